"""Values of encoded samples come back as they were, types included, or are not taken."""

from __future__ import annotations

import collections
import enum
import math
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import BFLOAT16
from lazyshard.data.tensors import pack, unpack
from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import fill_row, pack_row


def through(value: Any) -> Any:
    """Returns a value that went through a line and the bytes of its arrays."""
    line, arrays = pack_row({"value": pack(value)})
    row = orjson.loads(line)
    fill_row(row, np.frombuffer(arrays, np.uint8).copy())
    return unpack(row["value"])


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, at any depth; zeros of the same sign."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return bool(list(one) == list(other) and all(same(one[name], other[name]) for name in one))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float | np.floating):
        return bool(one == other and math.copysign(1, one) == math.copysign(1, other)) or one != one
    return bool(one == other)


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-5, 5) | st.booleans()
PLAIN = NUMBERS | st.none() | st.floats() | st.text(st.characters(codec="utf-8"), max_size=5)
NAMES = st.text(st.characters(codec="utf-8"), max_size=3).filter(lambda name: not name.startswith("$"))
LISTS = st.lists(st.integers(-5, 5), max_size=12) | st.lists(st.floats(), max_size=12) | st.lists(st.booleans())
VALUES = st.recursive(
    PLAIN | LISTS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(VALUES)
def test_what_json_and_python_have_comes_back_exactly(value: Any) -> None:
    assert same(through(value), value)


VARIOUS: dict[str, Any] = {
    "tokens": {"input_ids": list(range(400)), "labels": [-100] * 9, "length": 400, "lengths": [400]},
    "large numbers": [[2**31] * 9, [2**63 - 1] * 9, [2**63] * 9, [-(2**63)] * 9, [0.1] * 9, [0.5] * 9, [1e300] * 9],
    "numbers of two kinds": [[1, 2.5] * 9, [True, 1] * 9, [None, 1] * 9],
    "no finite numbers": [math.inf, -math.inf, math.nan, [math.nan, -0.0, 1.0] * 9, {"a": -0.0}],
    "tensors": {
        "pixel_values": torch.arange(12, dtype=torch.float32).reshape(2, 6),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "one": torch.tensor(3),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6).reshape(2, 3).T,
        "wide": torch.ones(1).expand(4),
    },
    "arrays": [np.arange(4, dtype=np.uint8), np.zeros((2, 0)), np.ones(2, np.uint16).view(BFLOAT16), np.array(1.5)],
    "numpy's numbers": [np.float32(0.5), np.int64(3), np.bool_(True), np.float64("nan"), np.uint8(200)],
    "nothing": [{}, [], (), "", None],
}


@pytest.mark.parametrize("name", VARIOUS)
def test_sample_comes_back_as_it_was(name: str) -> None:
    assert same(through(VARIOUS[name]), VARIOUS[name]), through(VARIOUS[name])


class Colour(enum.IntEnum):
    RED = 1


class Words(str):
    pass


class Pair(NamedTuple):
    a: int
    b: int


OTHERS = [object(), {1, 2}, b"bytes", 1j, Colour.RED, Words("a"), collections.OrderedDict(a=1), Pair(1, 2)]
KEYS_AND_TEXT = [{1: 2}, {"$tensor": [1]}, {"$array": [1]}, {"$scalar": 1}, [2**64], "\ud800"]
TENSORS = [
    *(torch.ones(1, requires_grad=True), torch.nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse()),
    *(torch.ones(1, dtype=torch.complex64), torch.ones(1, device="meta")),
]
ARRAYS = [np.array(["a"]), np.array([1], ">i4"), np.array([None]), np.ma.masked_array([1], [True])]
NUMPYS = [np.str_("a"), np.longdouble(1)]


@pytest.mark.parametrize(
    "value", [*OTHERS, *KEYS_AND_TEXT, *TENSORS, *ARRAYS, *NUMPYS], ids=lambda value: type(value).__name__
)
def test_what_would_come_back_otherwise_is_not_taken(value: Any) -> None:
    for given_value in (value, {"a": [value]}, [1, (value,)]):
        with pytest.raises((TypeError, RowInvalid, NotImplementedError, RuntimeError)):
            through(given_value)
