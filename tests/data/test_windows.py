"""Which bytes a rank reads: those of its own rows, or chunks that are held, of shuffled windows; by threads too."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset
from lazyshard.data import index_space as window_reader
from lazyshard.data.index_space import IndexSpace
from lazyshard.plan.course import Draw
from lazyshard.stream import chunk, scattered
from tests.data import runs
from tests.data.workers import DEADLINE_S, ids, loader
from tests.stream.streams import produce

SAMPLES, PER_CHUNK = 120, 10


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", SAMPLES, PER_CHUNK)


def open_rank(directory: Path, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return runs.open_rank(directory, 0, dp, **{"shuffle_window": 3, "seed": 5, **options})


def preads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Places of what is read of chunks from now on, line by line and whole: first byte, and the one behind the last."""
    found: list[tuple[int, int]] = []
    pread, preadv = os.pread, os.preadv

    def note(fd: int, size: int, at: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl"):
            found.append((at, at + size))

    def noted(fd: int, size: int, at: int) -> bytes:
        note(fd, size, at)
        return pread(fd, size, at)

    def noted_into(fd: int, into: list[memoryview], at: int) -> int:
        note(fd, len(into[0]), at)
        return preadv(fd, into, at)

    monkeypatch.setattr(os, "pread", noted)
    monkeypatch.setattr(os, "preadv", noted_into)
    return found


def sizes(reads: list[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in reads]


def drawn(dataset: LazyShardedDataset) -> list[int]:
    return [dataset.draw(index).sample for index in range(len(dataset))]


@pytest.mark.parametrize(("batch", "most"), [(4, scattered.HELD_BYTES), (1, scattered.HELD_BYTES), (4, 0), (1, 0)])
def test_rows_are_those_drawn(stream: Path, batch: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered, "HELD_BYTES", most)
    options: dict[str, Any] = {"layout": "strided", "encode_fn": dict if batch == 1 else None}
    dataset, other = (open_rank(stream, 2, num_samples=3 * SAMPLES, **options) for _ in range(2))
    every, indices = drawn(other), list(dataset.rank_indices)
    got = [i for at in range(0, len(indices), batch) for i in ids(dataset.__getitems__(indices[at : at + batch]))]
    assert got == [every[index] for index in indices]
    assert bool(dataset._lanes._scattered._held) == bool(most)


def test_a_window_is_read_in_as_many_calls_as_it_has_chunks(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(stream, batch_size=4)
    dataset[0]
    chunks = [dataset.reader.chunk(number).offset(PER_CHUNK) for number in range(SAMPLES // PER_CHUNK)]
    reads = preads(monkeypatch)
    for start in range(30, SAMPLES, 4):
        dataset.__getitems__(list(range(start, min(start + 4, SAMPLES))))
    whole = [size for size in sizes(reads) if size in chunks]
    # Rows of the first batch are read by themselves: it is not clear yet that this continues.
    assert sorted(whole) == sorted(chunks[3:])
    assert len(reads) - len(whole) == 4


def test_workers_that_step_over_each_other_hold_chunks_too(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(stream)
    expected = drawn(open_rank(stream))
    reads = preads(monkeypatch)
    for start in range(0, SAMPLES, 8):
        assert ids(dataset.__getitems__([start, start + 1])) == expected[start : start + 2]
    # Two batches until it is clear that this continues; from then on each chunk that is met is read once.
    met = {expected[index] // PER_CHUNK for start in range(16, SAMPLES, 8) for index in (start, start + 1)}
    assert len(reads) == 2 * 2 + len(met)


def test_who_jumps_about_reads_no_chunk_whole(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_rank(stream, shuffle_window=1)
    expected = drawn(open_rank(stream, shuffle_window=1))
    smallest = min(dataset.reader.chunk(number).offset(PER_CHUNK) for number in range(SAMPLES // PER_CHUNK))
    reads = preads(monkeypatch)
    # Never twice in a row forward by less than a window.
    for index in [at for first in range(40) for at in (first + 80, first + 40, first)]:
        assert dataset[index]["id"] == expected[index]
    assert len(reads) == 120 and max(sizes(reads)) < smallest


@pytest.mark.parametrize("window", [0, 3])
def test_large_rows_are_read_one_by_one(stream: Path, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunk, scattered, window_reader):
        monkeypatch.setattr(module, "LARGE_ROW_BYTES", 1)
    dataset = open_rank(stream, shuffle_window=window, batch_size=4)
    expected = drawn(dataset)
    reads = preads(monkeypatch)
    for start in range(0, SAMPLES, 4):
        assert ids(dataset.__getitems__(list(range(start, start + 4)))) == expected[start : start + 4]
        assert len(dataset._lanes.ahead[3]) == 1
    assert sizes(reads) == [len(dataset.reader.line(sample)) for sample in expected]


@pytest.mark.parametrize(("layout", "window"), [("block", 0), ("strided", 0), ("block", 3)])
def test_threads_that_share_a_data_set_get_their_own_rows(tmp_path: Path, layout: str, window: int) -> None:
    directory = produce(tmp_path / "s", 200, 10)
    for attempt in range(3):
        dataset, other = (runs.open_rank(directory, 0, 2, layout=layout, shuffle_window=window) for _ in range(2))
        expected = drawn(other)
        together = threading.Barrier(4)

        def work(number: int, dataset: Any = dataset, together: Any = together, expected: Any = expected) -> None:
            together.wait(DEADLINE_S)
            for start in [*range(number * 50, 200, 5), *range(0, number * 50, 5)]:
                assert ids(dataset.__getitems__(list(range(start, start + 5)))) == expected[start : start + 5]
                assert dataset[start]["id"] == expected[start]

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, (number + attempt) % 4) for number in range(4)]:
                done.result(DEADLINE_S)


def test_thread_that_comes_while_another_settles_the_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = runs.open_rank(produce(tmp_path / "s", 8, 4), 0, 2, layout="strided")
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
        space = dataset._space()
    finally:
        other_is_done.set()
        first.join(DEADLINE_S)
    assert dataset._space() is space


def test_thread_that_waits_for_the_end_is_not_told_of_anothers_open_end(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4, end=False)
    dataset = runs.open_rank(directory, 0, 2, max_total_samples=16, unit="sample")
    space, reader = dataset._space(), dataset.reader
    real = reader.wait_for

    def interrupted(samples: int) -> Any:
        published = real(samples)
        reader.wait_for = real  # type: ignore[method-assign]
        # Another thread meanwhile meets the end, which came in between.
        produce(directory, 6, 4)
        assert space.draw(3) == Draw(1, 0)
        return published

    reader.wait_for = interrupted  # type: ignore[method-assign]
    assert space.draw(0) == Draw(0, 0)
    assert space.draw(3) == Draw(1, 0)


RANKS, BATCH, ROWS = 8, 4, 320


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose rows all have other lengths, so that bytes tell which rows were read."""
    directory = tmp_path_factory.mktemp("one") / "s"
    with ChunkWriter(directory, ROWS) as writer:
        for number in range(ROWS):
            writer.write({"id": number, "text": "x" * number})
    return directory


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges in order, neighbours made one; fails where two overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        assert not found or found[-1][1] <= start, "bytes that were read twice"
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


@pytest.mark.parametrize(
    ("unit", "options", "least", "most"),
    [
        # Forty rows of each rank. No rank has a chunk, so they come one by one.
        ("chunk", {"shuffle_window": 1}, 1, 40),
        ("sample", {}, 40, 40),
        ("batch", {"layout": "strided"}, 10, 10),
        ("auto", {}, 10, 10),
        # An eighth of the file each, read ahead up to its end.
        (40, {}, 1, 9),
        (40, {"layout": "strided"}, 1, 9),
    ],
)
def test_each_rank_reads_the_bytes_of_its_rows_once(
    one_file: Path, unit: Any, options: dict[str, Any], least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = preads(monkeypatch)
    everything: list[tuple[int, int]] = []
    for rank in range(RANKS):
        dataset = runs.open_rank(one_file, rank, RANKS, batch_size=BATCH, unit=unit, max_wait=0, **options)
        found.clear()
        drawn = [number for batch in loader(dataset, dataset.rank_indices, 0, batch_size=BATCH) for number in batch]
        chunk = dataset.reader.chunk(0)
        assert joined(found) == joined([(chunk.offset(number), chunk.offset(number + 1)) for number in drawn])
        assert least <= len(found) <= most
        assert dataset.stats().chunks_opened == 1
        everything += found
    assert joined(everything) == [(0, chunk.offset(len(chunk)))]
