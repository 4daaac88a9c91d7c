"""Rows that lie scattered over chunks: the same as one by one, from few system calls, in bounded memory."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lazyshard.errors import ChunkCorrupt, RowInvalid
from lazyshard.stream import StreamReader, scattered
from lazyshard.stream.chunk import Chunk
from lazyshard.stream.scattered import Held, ScatteredReader
from tests.stream.streams import foreign, produce

ORDER = np.array([7, 0, 9, 4, 11, 1, 2])


@pytest.fixture
def reader(tmp_path: Path) -> StreamReader:
    return StreamReader(produce(tmp_path / "s", 16, 4), max_wait=0)


def damage(reader: StreamReader, sample: int) -> None:
    """Changes a letter of a row."""
    chunk = reader.chunk(sample // 4)
    with chunk.path.open("r+b") as file:
        file.seek(chunk.offset(sample % 4) + 2)
        file.write(b"X")


def prepared(rows: ScatteredReader, samples: np.ndarray[tuple[int], np.dtype[np.int64]] = ORDER) -> Held:
    held = rows.prepare(samples)
    assert held is not None
    return held


def test_lines_come_in_the_order_asked_for(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    expected = [reader.line(sample) for sample in ORDER.tolist()]
    held = prepared(rows)
    assert rows.lines(held, 0, 7) == expected
    assert rows.lines(held, 2, 5) == expected[2:5]


def test_lines_of_a_foreign_directory_are_checked_one_by_one(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "s", b'{"id":0}\n{"id":1}\n', b'[2]\n{"id":3}\n', end=True)
    rows = ScatteredReader(StreamReader(directory, 2, max_wait=0))
    held = prepared(rows, np.array([3, 0, 2, 1]))
    assert held.digests is None
    assert rows.lines(held, 0, 4) == [b'{"id":3}\n', b'{"id":0}\n']
    with pytest.raises(RowInvalid, match="expected a JSON object"):
        rows.lines(held, 2, 4)


def test_each_chunk_is_read_once_while_it_is_held(reader: StreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    assert held.row_bytes == sum(len(reader.line(sample)) for sample in ORDER.tolist()) // 7
    reads: list[int] = []
    real = os.preadv

    def counted(fd: int, into: list[memoryview], at: int) -> int:
        reads.append(len(into[0]))
        return real(fd, into, at)

    monkeypatch.setattr(os, "preadv", counted)
    for start in range(6):
        assert len(rows.lines(held, start, 7)) == 7 - start
    assert reads == [reader.chunk(number).size for number in (0, 1, 2)]
    # What is in none of those that come next makes room for them, the rest is not read again.
    held = prepared(rows, np.array([5, 4]))
    rows.lines(held, 0, 2)
    assert len(reads) == 3
    held = prepared(rows, np.array([4, 14]))
    rows.lines(held, 0, 2)
    assert list(rows._idle[0].data) == [1, 3]
    assert reads[3:] == [reader.chunk(3).size]


def test_threads_do_not_read_over_what_another_one_reads_from(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    begun, done = threading.Event(), threading.Event()

    class Slow(StreamReader):
        def read_published_into(self, chunk: Chunk, memory: memoryview) -> None:
            begun.set()
            assert done.wait(60)
            super().read_published_into(chunk, memory)

    slow = ScatteredReader(Slow(reader.directory, max_wait=0))
    slow._idle = rows._idle
    # Its memory holds chunk 0, which the other thread has in use while this one reads over what it does not want.
    rows.lines(prepared(rows, np.array([0])), 0, 1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(slow.lines, prepared(slow, np.array([0, 4])), 0, 2)
        assert begun.wait(60)
        assert rows.lines(prepared(rows, np.array([8, 9])), 0, 2) == [reader.line(8), reader.line(9)]
        done.set()
        assert found.result(60) == [reader.line(0), reader.line(4)]
    assert len(rows._idle) == 2


def test_chunks_that_do_not_fit_are_not_held(reader: StreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ScatteredReader(reader)
    sizes = [reader.chunk(number).size for number in range(3)]
    monkeypatch.setattr(scattered, "HELD_BYTES", sum(sizes))
    assert rows.prepare(ORDER) is not None
    monkeypatch.setattr(scattered, "HELD_BYTES", sum(sizes) - 1)
    assert rows.prepare(ORDER) is None
    assert rows._idle == []


def test_chunks_of_which_little_is_read_are_not_held(tmp_path: Path) -> None:
    rows = ScatteredReader(StreamReader(produce(tmp_path / "s", 40, 20), max_wait=0))
    assert rows.prepare(np.array([0, 1, 20])) is None
    assert rows.prepare(np.arange(10)) is not None


def test_chunks_of_large_rows_are_not_held(reader: StreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    mean = sum(len(reader.line(sample)) for sample in ORDER.tolist()) // 7
    monkeypatch.setattr(scattered, "LARGE_ROW_BYTES", mean)
    assert ScatteredReader(reader).prepare(ORDER) is not None
    monkeypatch.setattr(scattered, "LARGE_ROW_BYTES", mean - 1)
    assert ScatteredReader(reader).prepare(ORDER) is None


@pytest.mark.parametrize(("bad", "found"), [(11, 4), (0, 1), (2, 6), (9, 2)])
def test_a_bad_row_ends_what_is_returned_and_is_told_when_it_comes_first(
    reader: StreamReader, bad: int, found: int
) -> None:
    expected = [reader.line(sample) for sample in ORDER.tolist()]
    damage(reader, bad)
    rows = ScatteredReader(reader)
    held = prepared(rows)
    assert rows.lines(held, 0, 7) == expected[:found]
    with pytest.raises(ChunkCorrupt, match=f"row {bad % 4} .*as sealed") as caught:
        rows.lines(held, found, 7)
    assert (caught.value.chunk, caught.value.row) == (bad // 4, bad % 4)
    if found < 6:
        assert rows.lines(held, found + 1, 7) == expected[found + 1 :]


def test_a_chunk_that_cannot_be_opened_is_not_held(reader: StreamReader) -> None:
    path = reader.chunk(2).path
    rows = ScatteredReader(StreamReader(path.parent, max_wait=0))
    os.truncate(path, 5)
    assert rows.prepare(ORDER) is None


def test_a_chunk_that_was_cut_is_told_at_its_rows(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    os.truncate(reader.chunk(2).path, 5)
    assert len(rows.lines(held, 0, 7)) == 2
    with pytest.raises(ChunkCorrupt, match="the end of the file at byte 5"):
        rows.lines(held, 2, 7)


def test_what_is_held_does_not_travel(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    lines = rows.lines(held, 0, 7)
    copy: ScatteredReader = pickle.loads(pickle.dumps(rows))
    assert (len(rows._idle[0].data), copy._idle) == (3, [])
    assert copy.lines(held, 0, 7) == lines
