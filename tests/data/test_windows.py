"""Shuffled windows: whoever reads on gets rows from chunks that are held, and always the sample that was drawn."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazyshard import BadRows, LazyShardedDataset
from lazyshard.data import lane as window_reader
from lazyshard.errors import ChunkCorrupt
from lazyshard.stream import chunk, scattered
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, ids
from tests.stream.streams import produce

SAMPLES, PER_CHUNK = 120, 10


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", SAMPLES, PER_CHUNK)


def open_rank(directory: Path, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(
        directory, dp_rank=0, dp_size=dp, max_wait=DEADLINE_S, **grouped({"shuffle_window": 3, "seed": 5, **options})
    )


def preads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is read of chunks from now on, line by line and whole."""
    sizes: list[int] = []
    pread, preadv = os.pread, os.preadv

    def count(fd: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl"):
            sizes.append(size)

    def counted(fd: int, size: int, at: int) -> bytes:
        count(fd, size)
        return pread(fd, size, at)

    def counted_into(fd: int, into: list[memoryview], at: int) -> int:
        count(fd, len(into[0]))
        return preadv(fd, into, at)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(os, "preadv", counted_into)
    return sizes


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("layout", ["block", "strided"])
@pytest.mark.parametrize("encoded", [False, True])
def test_rows_are_those_that_were_drawn(
    stream: Path, batch: int, held: bool, layout: str, encoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not held:
        monkeypatch.setattr(scattered, "HELD_BYTES", 0)
    options: dict[str, Any] = {"encode_fn": dict} if encoded else {}
    dataset = open_rank(stream, 2, layout=layout, num_samples=3 * SAMPLES, **options)
    indices = list(dataset.rank_indices)
    expected = [open_rank(stream, 2, layout=layout, num_samples=3 * SAMPLES).draw(i).sample for i in indices]
    got = [i for at in range(0, len(indices), batch) for i in ids(dataset.__getitems__(indices[at : at + batch]))]
    assert got == expected
    assert bool(dataset._draws.lanes._windows._scattered._idle) == held


def test_a_window_is_read_in_as_many_calls_as_it_has_chunks(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(stream, batch_size=4)
    dataset[0]
    sizes = [dataset.reader.chunk(number).size for number in range(SAMPLES // PER_CHUNK)]
    reads = preads(monkeypatch)
    for start in range(30, SAMPLES, 4):
        dataset.__getitems__(list(range(start, min(start + 4, SAMPLES))))
    whole = [size for size in reads if size in sizes]
    # Rows of the first batch are read by themselves: it is not clear yet that this goes on.
    assert sorted(whole) == sorted(sizes[3:])
    assert len(reads) - len(whole) == 4


def test_workers_that_step_over_each_other_hold_chunks_too(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(stream)
    expected = [open_rank(stream).draw(index).sample for index in range(SAMPLES)]
    reads = preads(monkeypatch)
    for start in range(0, SAMPLES, 8):
        assert ids(dataset.__getitems__([start, start + 1])) == expected[start : start + 2]
    # Two batches until it is clear that this goes on; from then on each chunk that is met is read once.
    met = {expected[index] // PER_CHUNK for start in range(16, SAMPLES, 8) for index in (start, start + 1)}
    assert len(reads) == 2 * 2 + len(met)


def test_who_jumps_about_reads_no_chunk_whole(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(stream, shuffle_window=1)
    expected = [open_rank(stream, shuffle_window=1).draw(index).sample for index in range(SAMPLES)]
    smallest = min(dataset.reader.chunk(number).size for number in range(SAMPLES // PER_CHUNK))
    reads = preads(monkeypatch)
    # Never twice in a row forward by less than a window.
    for index in [at for first in range(40) for at in (first + 80, first + 40, first)]:
        assert dataset[index]["id"] == expected[index]
    assert len(reads) == 120 and max(reads) < smallest


def test_a_batch_that_reaches_into_the_next_lane_is_read_from_both(stream: Path) -> None:
    dataset = open_rank(stream, 2)
    border = SAMPLES // 2
    expected = [open_rank(stream, 2).draw(index).sample for index in range(SAMPLES)]
    for first in (border - 3, border - 2, border - 1):
        assert ids(dataset.__getitems__(list(range(first, first + 4)))) == expected[first : first + 4]


@pytest.mark.parametrize("window", [0, 3])
def test_large_rows_are_read_one_by_one(stream: Path, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunk, scattered, window_reader):
        monkeypatch.setattr(module, "LARGE_ROW_BYTES", 1)
    dataset = open_rank(stream, shuffle_window=window, batch_size=4)
    expected = [dataset.draw(index).sample for index in range(SAMPLES)]
    reads = preads(monkeypatch)
    for start in range(0, SAMPLES, 4):
        assert ids(dataset.__getitems__(list(range(start, start + 4)))) == expected[start : start + 4]
        assert len(dataset._draws.lanes.ahead[1]) == 1
    found = list(reads)
    assert found == [len(dataset.reader.line(sample)) for sample in expected]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_bad_row_is_met_at_its_place_and_replaced(stream: Path, batch: int) -> None:
    expected = [open_rank(stream).draw(index).sample for index in range(SAMPLES)]
    damaged = open_rank(stream).reader.chunk(1)
    with damaged.path.open("r+b") as file:
        file.seek(damaged.offset(7) + 2)
        file.write(b"X")
    dataset = open_rank(stream)
    got = [i for at in range(0, SAMPLES, batch) for i in ids(dataset.__getitems__(list(range(at, at + batch))))]
    different = [index for index in range(SAMPLES) if got[index] != expected[index]]
    assert [expected[index] for index in different] == [17]
    assert all(10 <= got[index] < 20 for index in different)
    assert dataset.stats().bad_samples == 1
    strict = open_rank(stream, bad_rows=BadRows("raise"))
    with pytest.raises(ChunkCorrupt, match=r"row 7 .*as sealed"):
        for index in range(SAMPLES):
            strict[index]


def test_threads_that_share_a_data_set_get_their_own_rows(stream: Path) -> None:
    expected = [open_rank(stream).draw(index).sample for index in range(SAMPLES)]
    dataset = open_rank(stream)

    def work(number: int) -> None:
        order = [*range(number * 30, SAMPLES), *range(number * 30)]
        for index in order:
            assert dataset[index]["id"] == expected[index]
        for _ in range(50):
            start = random.randrange(SAMPLES - 4)
            assert ids(dataset.__getitems__(list(range(start, start + 4)))) == expected[start : start + 4]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result(DEADLINE_S)
