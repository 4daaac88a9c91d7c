"""How the encoder is called, what becomes of what it returns, and how that is kept: exactly, types included."""

import collections
import enum
import functools
import math
import pickle
from collections import UserDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import BFLOAT16, EncodeCache, LazyShardedDataset
from lazyshard.data.samples import from_stored, to_stored
from lazyshard.data.settings import RowSteps
from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import fill_row, pack_row
from tests.data.runs import open_rank, read
from tests.data.workers import loader
from tests.stream.streams import produce, raised, refusal_of


def encoder(function: Any) -> Any:
    return functools.partial(RowSteps((), function), index=0)


def named(row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
    return {"options": {"return_length": return_length}}


class Template:
    """As in ms-swift: `template.encode`."""

    def encode(self, row: dict[str, Any], return_template_inputs: bool = False, *, return_length: bool) -> Any:
        return {"options": {"return_length": return_length}}

    __call__ = encode


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (named, {"return_length": True}),
        (lambda row, **options: {"options": options}, {"return_length": True}),
        (lambda row, return_length=False, /: {"options": {"return_length": return_length}}, {"return_length": False}),
        (lambda row, length=5: {"options": {"length": length}}, {"length": 5}),
        (Template().encode, {"return_length": True}),
        (Template(), {"return_length": True}),
        (functools.partial(named, return_length=False), {"return_length": True}),
    ],
)
def test_length_is_asked_for_where_it_can_be(function: Any, options: dict[str, Any]) -> None:
    assert encoder(function)({})["options"] == options
    # One without a signature is called with the row alone.
    assert encoder(dict)({"a": 1}) == {"a": 1}
    refusal_of(ValueError, "returned None", encoder(lambda row: None), {})


def test_length_is_that_of_the_tokens_unless_the_encoder_gives_one() -> None:
    for tokens, length in (((1, 2), 2), (np.arange(4), 4), (torch.arange(5), 5), ([], 0)):
        assert encoder(lambda row, tokens=tokens: {"input_ids": tokens})({})["length"] == length
    assert encoder(lambda row: {"input_ids": [1, 2, 3], "length": 9})({})["length"] == 9
    others = [{"input_ids": [1], "lengths": [1]}, {"labels": [1]}, {"input_ids": 5}, [1], UserDict({"input_ids": [1]})]
    for sample in others:
        before = repr(sample)
        assert encoder(lambda row, sample=sample: sample)({}) is sample
        assert repr(sample) == before


def test_encoder_may_change_its_row(tmp_path: Path) -> None:
    def encode(row: dict[str, Any]) -> dict[str, Any]:
        assert row == {"id": row["id"]}
        number = row.pop("id")
        if number == 2:
            raise ValueError("bad")
        row["seen"] = number
        return row

    dataset = LazyShardedDataset(produce(tmp_path / "s", 4, 4), encode, dp_rank=0, dp_size=1)
    for _ in range(3):
        assert [dataset[i] for i in range(4)] == [{"seen": 0}, {"seen": 1}, {"seen": 0}, {"seen": 3}]
        assert dataset.__getitems__([1, 1, 2]) == [{"seen": 1}, {"seen": 1}, {"seen": 0}]
    assert dataset.stats().bad_samples == 1


class Counting:
    def __init__(self, bad: int = -1) -> None:
        self.calls: list[int] = []
        self.bad = bad

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(row["id"])
        if row["id"] == self.bad:
            raise ValueError("bad")
        return {"id": row["id"], "input_ids": [row["id"]]}


def test_what_a_caller_does_to_a_sample_does_not_change_the_kept_one(tmp_path: Path) -> None:
    encode = Counting()
    dataset = open_rank(produce(tmp_path / "s", 6, 4), encode_fn=encode, cache=EncodeCache(memory_bytes=1 << 20))
    for _ in range(3):
        samples = [dataset[i] for i in range(6)]
        assert samples == [{"id": i, "input_ids": [i], "length": 1} for i in range(6)]
        for sample in samples:
            sample["input_ids"].clear()
    assert encode.calls == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("samples", "bad", "first", "again"),
    [
        (0, -1, [0, 1, 2, 3], [0, 1, 2, 3]),
        (2, -1, [0, 1, 2, 3], [2, 3]),
        (4, -1, [0, 1, 2, 3], []),
        # What stands in for a bad sample is not kept as that.
        (4, 1, [0, 1, 2, 2, 3], [1, 2]),
    ],
)
def test_as_many_samples_are_kept_as_fit_and_none_is_put_out(
    tmp_path: Path, samples: int, bad: int, first: list[int], again: list[int]
) -> None:
    encode = Counting(bad)
    size = len(pickle.dumps({"id": 0, "input_ids": [0], "length": 1}, protocol=pickle.HIGHEST_PROTOCOL))
    cache = EncodeCache(memory_bytes=samples * size)
    dataset = open_rank(produce(tmp_path / "s", 4, 4), encode_fn=encode, cache=cache)
    for _ in range(3):
        assert read([dataset]) == [[0, 2 if bad == 1 else 1, 2, 3]]
    assert encode.calls == [*first, *again, *again]


def test_a_sample_that_cannot_be_pickled_is_encoded_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def encode(row: dict[str, Any]) -> Any:
        calls.append(row["id"])
        return {"id": row["id"], "call": lambda: None} if row["id"] else {"id": 0}

    dataset = open_rank(produce(tmp_path / "s", 2, 2), encode_fn=encode, cache=EncodeCache(memory_bytes=1000))
    for _ in range(2):
        assert [dataset[i]["id"] for i in range(2)] == [0, 1]
    assert calls == [0, 1, 1]


def test_worker_and_copy_start_with_the_right_samples(tmp_path: Path) -> None:
    cache = EncodeCache(memory_bytes=60)
    dataset = open_rank(produce(tmp_path / "s", 8, 4), encode_fn=Counting(), cache=cache)
    assert read([dataset, pickle.loads(pickle.dumps(dataset))]) == [list(range(8))] * 2
    assert [i for batch in loader(dataset, range(8), 2, batch_size=2) for i in batch] == list(range(8))


def through(value: Any) -> Any:
    line, arrays = pack_row({"value": to_stored(value)})
    row = orjson.loads(line)
    fill_row(row, np.frombuffer(arrays, np.uint8).copy())
    return from_stored(row["value"])


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, at any depth; zeros of the same sign."""

    def told(value: Any) -> Any:
        if isinstance(value, dict):
            return [(name, told(inner)) for name, inner in value.items()]
        if isinstance(value, list | tuple):
            return type(value), [told(inner) for inner in value]
        if isinstance(value, torch.Tensor | np.ndarray):
            return type(value), value.dtype, value.shape, told(value.tolist())
        return type(value), repr(value)  # Which tells apart zeros of other signs, and no NaN from another

    return bool(told(one) == told(other))


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
    "tensors": {"pixel_values": torch.arange(12.0).reshape(2, 6), "half": torch.ones(3, dtype=torch.bfloat16)},
    "small tensors": {"mask": torch.tensor([True, False]), "one": torch.tensor(3), "none": torch.empty(0, 4)},
    "strided tensors": {"turned": torch.arange(6).reshape(2, 3).T, "wide": torch.ones(1).expand(4)},
    "arrays": [np.arange(4, dtype=np.uint8), np.zeros((2, 0)), np.ones(2, np.uint16).view(BFLOAT16), np.array(1.5)],
    "numpy's numbers": [np.float32(0.5), np.int64(3), np.bool_(True), np.float64("nan"), np.uint8(200)],
    "nothing": [{}, [], (), "", None],
}


@pytest.mark.parametrize("name", VARIOUS)
def test_sample_comes_back_as_it_was(name: str) -> None:
    assert same(through(VARIOUS[name]), VARIOUS[name]), through(VARIOUS[name])


Colour = enum.IntEnum("Colour", "RED")
Words = type("Words", (str,), {})


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
        raised((TypeError, RowInvalid, NotImplementedError, RuntimeError), through, given_value)
