"""What a template returns, as a row and back: the same values of the same kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import BFLOAT16, ChunkWriter, StreamReader
from lazyshard.format.arrays import pack_row
from lazyshard_swift.encoded_values import pack, unpack


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same kinds, at any depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or one != one


SAMPLES: dict[str, dict[str, Any]] = {
    "text": {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "length": 3, "lengths": [3]},
    "weights": {"input_ids": [1], "loss_scale": [0.0, 1.0, 0.1], "length": 1},
    "large numbers": {"a": [2**31], "b": [-(2**31) - 1, 0], "c": [2**31 - 1, -(2**31)]},
    "numbers of two kinds": {"a": [1, 2.5], "b": [True, 1], "c": [None, 1], "d": [2**63, 1]},
    "truth values": {"mask": [True, False]},
    "nothing": {"a": [], "b": None, "c": "", "d": {}, "e": ()},
    "lists in lists": {"input_ids": [[1, 2], [3]], "names": ["a", "b"], "negative": [None, [1]]},
    "pictures": {
        "pixel_values": torch.arange(12, dtype=torch.float32).reshape(2, 6),
        "image_grid_thw": torch.tensor([[1, 2, 3]]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "numbers": np.arange(4, dtype=np.uint8),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6).reshape(2, 3).T,
    },
    "nested": {"extra": {"a": (1, [2, 3], {"b": torch.ones(1)}), "x": 1.5}, "channel": "c"},
    "more of one row": {"chosen_input_ids": [1, 2], "rejected_input_ids": [1, 3], "margin": 0.5},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_comes_back_through_a_stream_as_it_was(name: str, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 1, arrays=True) as writer:
        writer.write(pack(SAMPLES[name]))
    found = unpack(StreamReader(tmp_path).read(0))
    assert same(found, SAMPLES[name]), found


def test_numbers_are_kept_in_as_few_bytes_as_give_them_back() -> None:
    def dtype(values: list[Any]) -> Any:
        return pack({"a": values})["a"].dtype

    assert [dtype(values) for values in ([1], [2**31], [0.5], [0.1], [True])] == [
        np.int32,
        np.int64,
        np.float32,
        np.float64,
        np.bool_,
    ]
    assert pack({"a": torch.ones(1, dtype=torch.bfloat16)})["a"]["$tensor"].dtype == BFLOAT16
    assert pack({"lengths": [1, 2], "chosen_length": 3}) == {"lengths": [1, 2], "chosen_length": 3}


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: not name.startswith("$")),
        st.lists(st.integers(-(2**40), 2**40)) | st.lists(st.floats(allow_nan=False, allow_infinity=True)),
    )
)
def test_lists_of_numbers_come_back_exactly(sample: dict[str, Any]) -> None:
    packed = pack(sample)
    assert same(unpack(packed), sample) or any(name.endswith(("length", "lengths")) for name in sample)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ({"a": object()}, "the template returned a builtins.object at a, which no row can hold"),
        ({"a": {"b": {1, 2}}}, "a builtins.set at a.b"),
        ({"$tensor": 1}, "the key '\\$tensor' at the top, which no row can have"),
        ({"a": {3: 1}}, "the key 3 at a"),
    ],
)
def test_what_no_row_can_hold_is_named(sample: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        pack(sample)


def test_tensors_share_the_memory_of_the_row() -> None:
    packed = pack({"a": torch.ones(4)})
    assert unpack(packed)["a"].data_ptr() == packed["a"]["$tensor"].ctypes.data
    assert pack_row(packed).line == b'{"a":{"$tensor":{"$array":["float32",[4],0]}}}\n'
