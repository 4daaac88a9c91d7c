"""How the encoder is called, what becomes of what it returns, and how that is kept for later epochs."""

from __future__ import annotations

import functools
import pickle
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyshard import EncodeCache, LazyShardedDataset
from lazyshard.data.steps import Encoder
from tests.data.runs import open_rank
from tests.data.workers import loader
from tests.stream.streams import produce


def named(row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
    return {"options": {"return_length": return_length}}


def positional_only(row: dict[str, Any], return_length: bool = False, /) -> dict[str, Any]:
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
        (positional_only, {"return_length": False}),
        (lambda row, length=5: {"options": {"length": length}}, {"length": 5}),
        (Template().encode, {"return_length": True}),
        (Template(), {"return_length": True}),
        (functools.partial(named, return_length=False), {"return_length": True}),
    ],
)
def test_length_is_asked_for_where_it_can_be(function: Any, options: dict[str, Any]) -> None:
    assert Encoder(function)({})["options"] == options
    # One without a signature is called with the row alone.
    assert Encoder(dict)({"a": 1}) == {"a": 1}
    with pytest.raises(ValueError, match="returned None"):
        Encoder(lambda row: None)({})


def test_length_is_that_of_the_tokens_unless_the_encoder_gives_one() -> None:
    for tokens, length in (((1, 2), 2), (np.arange(4), 4), (torch.arange(5), 5), ([], 0)):
        assert Encoder(lambda row, tokens=tokens: {"input_ids": tokens})({})["length"] == length
    assert Encoder(lambda row: {"input_ids": [1, 2, 3], "length": 9})({})["length"] == 9
    others = [{"input_ids": [1], "lengths": [1]}, {"labels": [1]}, {"input_ids": 5}, [1], UserDict({"input_ids": [1]})]
    for sample in others:
        before = repr(sample)
        assert Encoder(lambda row, sample=sample: sample)({}) is sample
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
    """An encoder that tells its calls apart."""

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


@pytest.mark.parametrize(("samples", "again"), [(0, [0, 1, 2, 3]), (2, [2, 3]), (4, [])])
def test_as_many_samples_are_kept_as_fit_and_none_is_put_out(tmp_path: Path, samples: int, again: list[int]) -> None:
    encode = Counting()
    size = len(pickle.dumps({"id": 0, "input_ids": [0], "length": 1}, protocol=pickle.HIGHEST_PROTOCOL))
    cache = EncodeCache(memory_bytes=samples * size)
    dataset = open_rank(produce(tmp_path / "s", 4, 4), encode_fn=encode, cache=cache)
    for _ in range(3):
        assert [dataset[i]["id"] for i in range(4)] == [0, 1, 2, 3]
    assert encode.calls == [0, 1, 2, 3, *again, *again]


def test_a_sample_that_cannot_be_pickled_is_encoded_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def encode(row: dict[str, Any]) -> Any:
        calls.append(row["id"])
        return {"id": row["id"], "call": lambda: None} if row["id"] else {"id": 0}

    dataset = open_rank(produce(tmp_path / "s", 2, 2), encode_fn=encode, cache=EncodeCache(memory_bytes=1000))
    for _ in range(2):
        assert [dataset[i]["id"] for i in range(2)] == [0, 1]
    assert calls == [0, 1, 1]


def test_substitute_is_not_kept_as_the_bad_sample(tmp_path: Path) -> None:
    encode = Counting(bad=1)
    directory = produce(tmp_path / "s", 4, 4)
    dataset = open_rank(directory, encode_fn=encode, cache=EncodeCache(memory_bytes=1 << 20))
    for _ in range(2):
        assert [dataset[i]["id"] for i in range(4)] == [0, 2, 2, 3]
    assert encode.calls == [0, 1, 2, 2, 3, 1, 2]


def test_worker_and_copy_start_with_the_right_samples(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 8, 4)
    dataset = open_rank(directory, encode_fn=Counting(), cache=EncodeCache(memory_bytes=60))
    assert [dataset[i]["id"] for i in range(8)] == list(range(8))
    assert [pickle.loads(pickle.dumps(dataset))[i]["id"] for i in range(8)] == list(range(8))
    assert [i for batch in loader(dataset, range(8), 2, batch_size=2) for i in batch] == list(range(8))
