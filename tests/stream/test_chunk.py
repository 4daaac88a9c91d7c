"""Rows of a chunk, sealed and foreign; rows in other processes; chunks and rows in memory."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash

from lazyshard import ChunkWriter
from lazyshard.errors import ChunkCorrupt, ChunkMissing, RowInvalid
from lazyshard.format.names import chunk_name
from lazyshard.store.files import open_file
from lazyshard.stream import StreamReader, chunk_files
from lazyshard.stream import chunk as chunks
from lazyshard.stream.chunk import Chunk, Held, ScatteredReader, open_foreign, open_sealed
from lazyshard.stream.chunk_files import RowPlace, read_place
from tests.stream.streams import foreign, produce, seal

LINES = [b'{"id":0}\n', b'{"id":1}\n', b'{"id":2}\n', b'{"id":3}\n']


def sealed(directory: Path, lines: list[bytes]) -> Path:
    with ChunkWriter(directory, len(lines)) as writer:
        for line in lines:
            writer.write(line)
    return directory / chunk_name(0)


def opened(data: Path) -> Chunk:
    return open_sealed(data, seal(data.parent, 0))


def take(chunk: Chunk, first: int, stop: int, at_least: int = 1, budget: int = 1 << 18) -> list[dict[str, Any]]:
    return chunk.parse(chunk.lines(first, stop, at_least, budget), first)


def unsealed_check(directory: Path, lines: list[bytes]) -> Chunk:
    """A chunk whose digests fit bytes that are no rows, as only a foreign or broken producer would make."""
    data = b"".join(lines)
    (directory / "data").write_bytes(data)
    offsets = array("Q", [0])
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    digests = b"".join(map(xxhash.xxh3_64_digest, lines))
    return Chunk(open_file(directory / "data"), 0, offsets, digests)


def test_lines_and_line_agree_for_every_range_and_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = sealed(tmp_path, LINES)
    chunk = opened(data)
    assert [chunk.line(row) for row in range(4)] == LINES
    for first in range(4):
        for stop in range(first + 1, 5):
            for at_least in range(1, stop - first + 1):
                for budget in (0, 9, 18, 35, 36, 10**9):
                    fit = min(stop - first, budget // 9)
                    wanted = max(at_least, fit - fit % at_least)
                    assert chunk.lines(first, stop, at_least, budget) == LINES[first : first + wanted]
    # Short reads go on.
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 5), offset))
    assert chunk.lines(0, 4, 4, 0) == LINES
    # A bad row is raised only when it comes first, also of a file that is cut meanwhile.
    data.write_bytes(b"".join([*LINES[:2], b'{"id":7}\n', LINES[3]]))
    assert chunk.lines(0, 4, 4, 1000) == LINES[:2]
    assert chunk.lines(3, 4, 1, 1000) == LINES[3:]
    os.truncate(data, 12)
    assert chunk.line(0) == LINES[0]
    with pytest.raises(ChunkCorrupt) as caught:
        chunk.line(1)
    assert "byte 12" in str(caught.value.actual)


@pytest.mark.parametrize("bad", [b"[1]\n", b"nonsense\n", b"1\n", b'{"a":"\xff"}\n'])
def test_row_that_is_no_object_ends_the_good_prefix_and_names_line_and_byte(bad: bytes, tmp_path: Path) -> None:
    chunk = unsealed_check(tmp_path, [LINES[0], LINES[1], bad, LINES[3]])
    assert take(chunk, 0, 4, 4) == [{"id": 0}, {"id": 1}]
    with pytest.raises(RowInvalid) as caught:
        take(chunk, 2, 4, 2)
    assert caught.value.line == 3
    assert caught.value.byte is not None and 18 <= caught.value.byte < 18 + len(bad)
    assert caught.value.file == str(tmp_path / "data")


TWO_ROWS = [
    *(b'{"a":1}\n{"a":2}\n', b'{"a":1}\n{"a":2}', b'{"a":1}\r\n{"a":2}\r\n', b'\n \t\n{"a":1}\n{"a":2}\n'),
    *(b'{"a":1}\n\n\r\n{"a":2}\n', b'{"a":1}\n{"a":2}\n\n  \n', b'{"a":1}\n{"a":2}\n   '),
    b'\xef\xbb\xbf{"a":1}\n{"a":2}\n',
]
NO_ROW = (b"", b"\n", b"  ", b" \r\n\n", b"\xef\xbb\xbf")
ONE_ROW: dict[bytes, Any] = {b'\xef\xbb\xbf\n{"a":1}\n': 1, '{"a":"\u2028\u2029\x85"}\n'.encode(): "\u2028\u2029\x85"}


def test_foreign_rows_are_found_by_newlines(tmp_path: Path) -> None:
    cases: list[tuple[bytes, list[Any]]] = [(data, [1, 2]) for data in TWO_ROWS] + [(data, []) for data in NO_ROW]
    for data, wanted in cases + [(data, [value]) for data, value in ONE_ROW.items()]:
        (tmp_path / "data").write_bytes(data)
        chunk = open_foreign(tmp_path / "data", 0)
        assert len(chunk) == len(wanted)
        if wanted:
            assert [row["a"] for row in take(chunk, 0, len(wanted), len(wanted))] == wanted
            assert [take(chunk, row, row + 1)[0]["a"] for row in range(len(wanted))] == wanted


@pytest.mark.parametrize("shift", range(-3, 4))
def test_foreign_rows_across_the_border_of_a_block(shift: int, tmp_path: Path) -> None:
    first = b'{"a":"%s"}\n' % (b"x" * ((1 << 20) + shift - 9))
    (tmp_path / "data").write_bytes(first + b' \n{"a":2}\n')
    chunk = open_foreign(tmp_path / "data", 0)
    assert len(chunk) == 2
    assert take(chunk, 1, 2) == [{"a": 2}]


BAD_ROWS = {b"[1]": 11, b"nope": 11, b'{"a":"\xff"}': 17, b'{"a":1}{"a":2}': 18, b"\x0c": 11, b'{"a":%d}' % 2**64: 16}


def test_foreign_bad_row_names_its_line_and_spares_the_others(tmp_path: Path) -> None:
    for bad, byte in BAD_ROWS.items():
        (tmp_path / "data").write_bytes(b'\n{"a":1}\n\r\n' + bad + b'\n{"a":3}\n')
        chunk = open_foreign(tmp_path / "data", 0)
        assert take(chunk, 0, 3, 3) == [{"a": 1}]
        assert take(chunk, 2, 3) == [{"a": 3}]
        with pytest.raises(RowInvalid) as caught:
            take(chunk, 1, 3)
        assert (caught.value.line, caught.value.byte) == (4, byte)


def test_foreign_file_that_grows_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.write_bytes(b'{"a":1}\n')
    pread = os.pread

    def grow(fd: int, size: int, offset: int) -> bytes:
        with data.open("ab") as file:
            file.write(b"{}\n" if data.stat().st_size < 20 else b"")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", grow)
    with pytest.raises(ChunkCorrupt):
        open_foreign(data, 0)


@pytest.fixture(autouse=True)
def none_open() -> Iterator[None]:
    chunk_files._open_files.clear()
    yield
    chunk_files._open_files.clear()


def place_of(directory: Path, chunk: int, row: int) -> RowPlace:
    place = StreamReader(directory).chunk(chunk).place(row)
    assert place is not None
    return place


def test_a_row_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = produce(tmp_path / "s", 4)
    assert place_of(directory, 1, 1)[:5] == (str(directory / "chunk_00001.jsonl"), 1, 1, 9, 9)
    # A place holds after the process has gone to another directory.
    monkeypatch.chdir(tmp_path)
    places = [place_of(Path("s"), *divmod(i, 2)) for i in (3, 0, 2)]
    monkeypatch.chdir("/")
    assert [read_place(place) for place in places] == [b'{"id":3}\n', b'{"id":0}\n', b'{"id":2}\n']
    # Rows without digests have none.
    others = foreign(tmp_path / "f", b'{"id":0}\n', end=True)
    assert StreamReader(others, samples_per_chunk=1).chunk(0).place(0) is None


@pytest.mark.parametrize(
    ("change", "actual"),
    [(lambda path: os.truncate(path, 13), "4 bytes"), (lambda path: path.write_bytes(b'{"id":0}\n{"id":9}\n'), "")],
)
def test_row_that_was_changed_meanwhile_is_bad(change: Callable[[Path], object], actual: str, tmp_path: Path) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    change(Path(place.path))
    with pytest.raises(ChunkCorrupt) as caught:
        read_place(place)
    error = caught.value
    assert (error.file, error.row, error.byte) == (place.path, 1, 9)
    assert actual in str(error.actual)


def test_a_row_whose_file_was_deleted_or_replaced_meanwhile(tmp_path: Path) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    read_place(place)
    os.unlink(place.path)
    # It is still open here.
    assert read_place(place) == b'{"id":1}\n'
    # One that another has replaced is opened again.
    Path(place.path).write_bytes(b'{"id":7}\n{"id":8}\n')
    other = place_of(produce(tmp_path / "other", 9), 4, 0)
    assert read_place(other._replace(path=place.path, start=9)) == b'{"id":8}\n'
    os.unlink(place.path)
    chunk_files._open_files.clear()
    with pytest.raises(ChunkMissing) as caught:
        read_place(place)
    assert caught.value.file == place.path


def test_few_files_stay_open_and_none_that_was_deleted(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 40)
    found = [place_of(directory, number, 0) for number in range(20)]
    for place in found[:10]:
        read_place(place)
    assert list(chunk_files._open_files) == [place.path for place in found[2:10]]
    for place in found[4:10]:
        os.unlink(place.path)
    read_place(found[10])
    assert list(chunk_files._open_files) == [found[3].path, found[10].path]


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


def test_lines_of_a_foreign_directory_are_checked_one_by_one(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "s", b'{"id":0}\n{"id":1}\n', b'[2]\n{"id":3}\n', end=True)
    rows = ScatteredReader(StreamReader(directory, 2, max_wait=0))
    held = prepared(rows, np.array([3, 0, 2, 1]))
    assert held.digests is None
    assert rows.lines(held, 0, 4) == [b'{"id":3}\n', b'{"id":0}\n']
    with pytest.raises(RowInvalid):
        rows.lines(held, 2, 4)


def test_each_chunk_is_read_once_while_it_is_held(reader: StreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    assert held.row_bytes == sum(len(reader.line(sample)) for sample in ORDER.tolist()) // 7
    reader.chunk(3)
    pread = Mock(wraps=os.pread)
    monkeypatch.setattr(os, "pread", pread)
    for start in range(6):
        assert len(rows.lines(held, start, 7)) == 7 - start
    assert pread.call_count == 3
    # What is in none of those that come next makes room for them, the rest is not read again.
    held = prepared(rows, np.array([5, 4]))
    rows.lines(held, 0, 2)
    assert pread.call_count == 3
    held = prepared(rows, np.array([4, 14]))
    rows.lines(held, 0, 2)
    assert list(rows._held) == [1, 3]
    assert pread.call_count == 4


def test_what_was_held_of_the_window_before_is_freed_before_the_next_one_is_read(reader: StreamReader) -> None:
    before: list[bytes] = []
    references: list[int] = []

    class Watched(StreamReader):
        def read_from(self, chunk: Chunk, call: Callable[[], Any]) -> Any:
            references.extend(map(sys.getrefcount, before))
            return super().read_from(chunk, call)

    rows = ScatteredReader(Watched(reader.directory, max_wait=0))
    rows.lines(prepared(rows, np.array([0, 1, 4, 5])), 0, 4)
    before += rows._held.values()
    alone = list(map(sys.getrefcount, [bytes(9), bytes(9)]))
    rows.lines(prepared(rows, np.array([8, 9, 12, 13])), 0, 4)
    assert references == 2 * alone


def test_threads_do_not_read_over_what_another_one_reads_from(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    begun, done = threading.Event(), threading.Event()

    class Slow(StreamReader):
        def read_from(self, chunk: Chunk, call: Callable[[], Any]) -> Any:
            begun.set()
            assert done.wait(60)
            return super().read_from(chunk, call)

    slow = ScatteredReader(Slow(reader.directory, max_wait=0))
    # It holds chunk 0, which the other thread has in use while this one lets go of what it does not want.
    rows.lines(prepared(rows, np.array([0])), 0, 1)
    slow._held = rows._held
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(slow.lines, prepared(slow, np.array([0, 4])), 0, 2)
        assert begun.wait(60)
        assert rows.lines(prepared(rows, np.array([8, 9])), 0, 2) == [reader.line(8), reader.line(9)]
        done.set()
        assert found.result(60) == [reader.line(0), reader.line(4)]


def test_chunks_that_do_not_fit_or_have_large_rows_or_of_which_little_is_read_are_not_held(
    reader: StreamReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [reader.chunk(number).size for number in range(3)]
    mean = sum(len(reader.line(sample)) for sample in ORDER.tolist()) // 7
    for name, enough in (("HELD_BYTES", sum(sizes)), ("LARGE_ROW_BYTES", mean)):
        with monkeypatch.context() as patch:
            for value in (enough, enough - 1):
                patch.setattr(chunks, name, value)
                rows = ScatteredReader(reader)
                assert (rows.prepare(ORDER) is not None) is (value == enough)
                assert rows._held == {}
    rows = ScatteredReader(StreamReader(produce(tmp_path / "long", 40, 20), max_wait=0))
    assert rows.prepare(np.array([0, 1, 20])) is None
    assert rows.prepare(np.arange(10)) is not None
    # Nor are those that cannot be opened.
    os.truncate(reader.chunk(2).path, 5)
    assert ScatteredReader(StreamReader(tmp_path / "s", max_wait=0)).prepare(ORDER) is None


@pytest.mark.parametrize(("bad", "found"), [(11, 4), (0, 1), (2, 6), (9, 2)])
def test_bad_row_ends_what_is_returned_and_is_told_if_it_is_first(reader: StreamReader, bad: int, found: int) -> None:
    expected = [reader.line(sample) for sample in ORDER.tolist()]
    damage(reader, bad)
    rows = ScatteredReader(reader)
    held = prepared(rows)
    assert rows.lines(held, 0, 7) == expected[:found]
    with pytest.raises(ChunkCorrupt) as caught:
        rows.lines(held, found, 7)
    assert (caught.value.chunk, caught.value.row) == (bad // 4, bad % 4)
    if found < 6:
        assert rows.lines(held, found + 1, 7) == expected[found + 1 :]


def test_a_chunk_that_was_cut_is_told_at_its_rows(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    os.truncate(reader.chunk(2).path, 5)
    assert len(rows.lines(held, 0, 7)) == 2
    with pytest.raises(ChunkCorrupt):
        rows.lines(held, 2, 7)


def test_what_is_held_does_not_travel(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    lines = rows.lines(held, 0, 7)
    copy: ScatteredReader = pickle.loads(pickle.dumps(rows))
    assert (len(rows._held), copy._held) == (3, {})
    assert copy.lines(held, 0, 7) == lines
