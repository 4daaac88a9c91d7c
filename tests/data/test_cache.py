"""Encoded samples kept for later epochs: within their bytes, and never another sample's or a caller's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from lazyshard import EncodeCache, LazyShardedDataset, Order
from lazyshard.data.samples import SampleCache
from tests.data.workers import loader
from tests.stream.streams import produce

# b"....." of ten bytes pickles to 25.
TEN = b"0123456789"
SIZE = 25


def test_samples_come_back_by_number() -> None:
    cache = SampleCache(1000)
    cache.put(3, {"id": [3]})
    cache.put(4, {"id": [4]})
    assert [cache.get(3), cache.get(4), cache.get(5)] == [{"id": [3]}, {"id": [4]}, None]


def test_cached_sample_is_not_the_callers() -> None:
    cache = SampleCache(1000)
    given: dict[str, list[int]] = {"id": [3]}
    cache.put(3, given)
    given["id"].append(4)
    cache.get(3)["id"].clear()
    assert cache.get(3) == {"id": [3]}


def test_what_does_not_fit_is_not_kept_and_puts_nothing_out() -> None:
    cache = SampleCache(2 * SIZE)
    for number in range(4):
        cache.put(number, TEN)
    assert [cache.get(number) for number in range(4)] == [TEN, TEN, None, None]
    assert (len(cache), cache.size) == (2, 2 * SIZE)


def test_sample_put_again_counts_once() -> None:
    cache = SampleCache(1000)
    for _ in range(3):
        cache.put(0, TEN)
    assert (len(cache), cache.size) == (1, SIZE)


def test_cache_of_no_bytes_keeps_nothing() -> None:
    cache = SampleCache(0)
    cache.put(0, TEN)
    assert (len(cache), cache.size, cache.get(0)) == (0, 0, None)


def test_sample_that_cannot_be_pickled_is_not_kept() -> None:
    cache = SampleCache(1000)
    cache.put(0, lambda: None)
    assert (len(cache), cache.get(0)) == (0, None)
    cache.put(0, TEN)
    assert cache.get(0) == TEN


def test_fresh_one_is_empty_and_of_the_same_size() -> None:
    cache = SampleCache(SIZE)
    cache.put(0, TEN)
    fresh = cache.fresh()
    assert (len(fresh), fresh.size) == (0, 0)
    fresh.put(1, TEN)
    fresh.put(2, TEN)
    assert (fresh.get(1), fresh.get(2)) == (TEN, None)


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


def test_later_epochs_encode_only_what_was_not_kept(tmp_path: Path) -> None:
    encode = Counting()
    directory = produce(tmp_path / "s", 6, 4)
    dataset = LazyShardedDataset(
        directory, encode, dp_rank=0, dp_size=1, cache=EncodeCache(memory_bytes=1 << 20), order=Order(shuffle_window=2)
    )
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        samples = [dataset[i] for i in range(6)]
        orders.append([sample["id"] for sample in samples])
        assert orders[-1] == [dataset.draw(i).sample for i in range(6)]
        assert all(sample["input_ids"] == [sample["id"]] and sample["length"] == 1 for sample in samples)
        for sample in samples:
            sample["input_ids"].clear()
    assert orders[0] != orders[1]
    assert sorted(encode.calls) == [0, 1, 2, 3, 4, 5]


def test_substitute_is_not_kept_as_the_bad_sample(tmp_path: Path) -> None:
    encode = Counting(bad=1)
    directory = produce(tmp_path / "s", 4, 4)
    dataset = LazyShardedDataset(directory, encode, dp_rank=0, dp_size=1, cache=EncodeCache(memory_bytes=1 << 20))
    for _ in range(2):
        assert [dataset[i]["id"] for i in range(4)] == [0, 2, 2, 3]
    assert encode.calls == [0, 1, 2, 2, 3, 1, 2]


@pytest.mark.parametrize("context", ["fork", "pickled"])
def test_worker_starts_with_the_right_samples(tmp_path: Path, context: str) -> None:
    directory = produce(tmp_path / "s", 8, 4)
    dataset = LazyShardedDataset(directory, Counting(), dp_rank=0, dp_size=1, cache=EncodeCache(memory_bytes=60))
    assert [dataset[i]["id"] for i in range(8)] == list(range(8))
    if context == "pickled":
        assert len(dataset._draws._samples.__getstate__()["_cache"]) == 0
        assert [pickle.loads(pickle.dumps(dataset))[i]["id"] for i in range(8)] == list(range(8))
    else:
        assert [i for batch in loader(dataset, range(8), 2, batch_size=2) for i in batch] == list(range(8))
