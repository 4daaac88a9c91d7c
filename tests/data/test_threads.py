"""Threads that share a data set: each gets the rows that it asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset
from lazyshard.data.index_space import IndexSpace
from lazyshard.plan.course import Draw
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, ids
from tests.stream.streams import produce


def open_rank(directory: Path, rank: int, dp: int, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, dp_rank=rank, dp_size=dp, max_wait=DEADLINE_S, **grouped(options))


@pytest.mark.parametrize("layout", ["block", "strided"])
def test_threads_that_share_a_data_set_get_their_own_rows(tmp_path: Path, layout: str) -> None:
    directory = produce(tmp_path / "s", 200, 10)
    for attempt in range(5):
        dataset = open_rank(directory, 0, 2, layout=layout)
        expected = [open_rank(directory, 0, 2, layout=layout).draw(i).sample for i in range(200)]
        together = threading.Barrier(4)

        def work(
            number: int,
            dataset: LazyShardedDataset = dataset,
            together: threading.Barrier = together,
            expected: list[int] = expected,
        ) -> None:
            together.wait(DEADLINE_S)
            for start in range(number * 50, 200, 5):
                assert ids(dataset.__getitems__(list(range(start, start + 5)))) == expected[start : start + 5]
                assert dataset[start]["id"] == expected[start]

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, (number + attempt) % 4) for number in range(4)]:
                done.result(DEADLINE_S)


def test_thread_that_comes_while_another_settles_the_indices_does_not_take_them_for_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_rank(produce(tmp_path / "s", 8, 4), 0, 2, layout="strided")
    settling, other_is_done = threading.Event(), threading.Event()
    real = IndexSpace.__init__

    def slow(self: IndexSpace, *arguments: Any) -> None:
        if threading.current_thread().name == "first":
            settling.set()
            assert other_is_done.wait(DEADLINE_S)
        real(self, *arguments)

    monkeypatch.setattr(IndexSpace, "__init__", slow)
    first = threading.Thread(target=lambda: dataset[0], name="first")
    first.start()
    assert settling.wait(DEADLINE_S)
    try:
        assert ids(dataset.__getitems__([0, 1, 2, 3])) == [0, 4, 1, 5]
        space = dataset._draws.indices()
    finally:
        other_is_done.set()
        first.join(DEADLINE_S)
    assert dataset._draws.indices() is space


def test_thread_that_waits_for_the_end_is_not_told_of_anothers_open_end(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    dataset = open_rank(directory, 0, 2, max_total_samples=16, unit="sample")
    space, reader = dataset._draws.indices(), dataset.reader
    real = reader.wait_for

    def interrupted(samples: int) -> Any:
        published = real(samples)
        reader.wait_for = real  # type: ignore[method-assign]
        # Another thread meanwhile meets the end, which came in between.
        produce(directory, 6, 4)
        assert space.draw(3, reader) == Draw(1, 0)
        return published

    reader.wait_for = interrupted  # type: ignore[method-assign]
    assert space.draw(0, reader) == Draw(0, 0)
    assert space.draw(3, reader) == Draw(1, 0)
