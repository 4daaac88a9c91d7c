"""Rows of a chunk, sealed and foreign; in other processes; in memory, and when it is used again."""

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
from torch.utils.dlpack import from_dlpack

from lazyshard import StreamReader, as_tensor
from lazyshard.errors import ChunkCorrupt, ChunkMissing, RowInvalid
from lazyshard.format.records import chunk_name
from lazyshard.memory import LEAST_BYTES, ROW_MEMORY, RowMemory
from lazyshard.stream import chunk as chunks
from lazyshard.stream import scattered
from lazyshard.stream.chunk import Chunk, RowPlace, open_foreign, open_sealed, read_place
from lazyshard.stream.scattered import Held, ScatteredReader
from tests.stream.damage import flip
from tests.stream.streams import foreign, produce, publish_rows, raised, seal, seal_rows

LINES = [b'{"id":0}\n', b'{"id":1}\n', b'{"id":2}\n', b'{"id":3}\n']


def opened(data: Path) -> Chunk:
    return open_sealed(data, seal(data.parent, 0))


def take(chunk: Chunk, first: int, stop: int, at_least: int = 1, budget: int = 1 << 18) -> list[dict[str, Any]]:
    return chunk.parse(chunk.lines(first, stop, at_least, budget), first)


def test_lines_and_line_agree_for_every_range_and_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal_rows(tmp_path, 0, *LINES)
    data = tmp_path / chunk_name(0)
    chunk = opened(data)
    assert [chunk.line(row) for row in range(4)] == LINES
    for first in range(4):
        for stop in range(first + 1, 5):
            for at_least in range(1, stop - first + 1):
                for budget in (0, 9, 18, 35, 36, 10**9):
                    fit = min(stop - first, budget // 9)
                    wanted = max(at_least, fit - fit % at_least)
                    assert chunk.lines(first, stop, at_least, budget) == LINES[first : first + wanted]
    # Short reads continue.
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 5), offset))
    assert chunk.lines(0, 4, 4, 0) == LINES
    # A bad row is raised only when it comes first, also of a file that is cut meanwhile.
    data.write_bytes(b"".join([*LINES[:2], b'{"id":7}\n', LINES[3]]))
    assert chunk.lines(0, 4, 4, 1000) == LINES[:2]
    assert chunk.lines(3, 4, 1, 1000) == LINES[3:]
    os.truncate(data, 12)
    assert chunk.line(0) == LINES[0]
    assert "byte 12" in str(raised(ChunkCorrupt, chunk.line, 1).actual)


def test_row_that_is_no_object_ends_the_good_prefix_and_names_line_and_byte(tmp_path: Path) -> None:
    for bad in (b"[1]\n", b"nonsense\n", b"1\n", b'{"a":"\xff"}\n'):
        # Its digests fit bytes that are no rows, as only a foreign or broken producer would make them.
        seal_rows(tmp_path, 0, LINES[0], LINES[1], bad, LINES[3])
        chunk = opened(tmp_path / chunk_name(0))
        assert take(chunk, 0, 4, 4) == [{"id": 0}, {"id": 1}]
        caught = raised(RowInvalid, take, chunk, 2, 4, 2)
        assert (caught.file, caught.line) == (str(tmp_path / chunk_name(0)), 3)
        assert caught.byte is not None and 18 <= caught.byte < 18 + len(bad)


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
    for shift in range(-3, 4):  # Across the border of a block
        first = b'{"a":"%s"}\n' % (b"x" * ((1 << 20) + shift - 9))
        (tmp_path / "data").write_bytes(first + b' \n{"a":2}\n')
        chunk = open_foreign(tmp_path / "data", 0)
        assert (len(chunk), take(chunk, 1, 2)) == (2, [{"a": 2}])


BAD_ROWS = {b"[1]": 11, b"nope": 11, b'{"a":"\xff"}': 17, b'{"a":1}{"a":2}': 18, b"\x0c": 11, b'{"a":%d}' % 2**64: 16}


def test_foreign_bad_row_names_its_line_and_spares_the_others(tmp_path: Path) -> None:
    for bad, byte in BAD_ROWS.items():
        (tmp_path / "data").write_bytes(b'\n{"a":1}\n\r\n' + bad + b'\n{"a":3}\n')
        chunk = open_foreign(tmp_path / "data", 0)
        assert take(chunk, 0, 3, 3) == [{"a": 1}]
        assert take(chunk, 2, 3) == [{"a": 3}]
        caught = raised(RowInvalid, take, chunk, 1, 3)
        assert (caught.line, caught.byte) == (4, byte)


def test_foreign_file_that_grows_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.write_bytes(b'{"a":1}\n')
    pread = os.pread

    def grow(fd: int, size: int, offset: int) -> bytes:
        with data.open("ab") as file:
            file.write(b"{}\n" if data.stat().st_size < 20 else b"")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", grow)
    raised(ChunkCorrupt, open_foreign, data, 0)


@pytest.fixture(autouse=True)
def none_open() -> Iterator[None]:
    chunks._open_files.clear()
    yield
    chunks._open_files.clear()


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
    assert [read_place(place).tobytes() for place in places] == [b'{"id":3}\n', b'{"id":0}\n', b'{"id":2}\n']
    # Rows without digests have none.
    others = foreign(tmp_path / "f", b'{"id":0}\n', end=True)
    assert StreamReader(others, samples_per_chunk=1).chunk(0).place(0) is None


def test_a_row_whose_file_was_deleted_replaced_or_changed_meanwhile(tmp_path: Path) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    read_place(place)
    os.unlink(place.path)
    # It is still open here.
    assert read_place(place).tobytes() == b'{"id":1}\n'
    # One that another has replaced is opened again.
    Path(place.path).write_bytes(b'{"id":7}\n{"id":8}\n')
    other = place_of(produce(tmp_path / "other", 9), 4, 0)
    assert read_place(other._replace(path=place.path, start=9)).tobytes() == b'{"id":8}\n'
    for data, actual in ((b'{"id":0}\n{"id":9}\n', ""), (b'{"id":0}\n{"id', "4 bytes")):
        Path(place.path).write_bytes(data)
        error = raised(ChunkCorrupt, read_place, place)
        assert (error.file, error.row, error.byte) == (place.path, 1, 9)
        assert actual in str(error.actual)
    os.unlink(place.path)
    chunks._open_files.clear()
    assert raised(ChunkMissing, read_place, place).file == place.path


def test_few_files_stay_open_and_none_that_was_deleted(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 40)
    found = [place_of(directory, number, 0) for number in range(20)]
    for place in found[:10]:
        read_place(place)
    assert list(chunks._open_files) == [place.path for place in found[2:10]]
    for place in found[4:10]:
        os.unlink(place.path)
    read_place(found[10])
    assert list(chunks._open_files) == [found[3].path, found[10].path]


ORDER = np.array([7, 0, 9, 4, 11, 1, 2])


@pytest.fixture
def reader(tmp_path: Path) -> StreamReader:
    return StreamReader(produce(tmp_path / "s", 16, 4), max_wait=0)


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
    raised(RowInvalid, rows.lines, held, 2, 4)


def test_each_chunk_is_read_once_while_it_is_held(reader: StreamReader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    expected = [reader.line(sample) for sample in ORDER.tolist()]
    assert held.row_bytes == sum(map(len, expected)) // 7
    reader.chunk(3)
    pread = Mock(wraps=os.preadv)
    monkeypatch.setattr(os, "preadv", pread)
    for start in range(6):
        assert rows.lines(held, start, 7) == expected[start:]
    assert pread.call_count == 3
    # What is held does not travel.
    copy: ScatteredReader = pickle.loads(pickle.dumps(rows))
    assert (len(rows._held), copy._held) == (3, {})
    assert copy.lines(held, 0, 7) == expected
    # What is in none of those that come next makes room for them, the rest is not read again.
    pread.reset_mock()
    rows.lines(prepared(rows, np.array([5, 4])), 0, 2)
    assert pread.call_count == 0
    memory = set(map(id, rows._held.values()))
    rows.lines(prepared(rows, np.array([4, 14])), 0, 2)
    assert list(rows._held) == [1, 3] and {id(held) for held in rows._held.values()} <= memory
    assert pread.call_count == 1


def test_chunks_of_a_few_bytes_are_held(tmp_path: Path) -> None:
    publish_rows(tmp_path / "s", 1, [{}] * 3)
    rows = ScatteredReader(StreamReader(tmp_path / "s", max_wait=0))
    assert rows.lines(prepared(rows, np.array([2, 0])), 0, 2) == [b"{}\n"] * 2
    assert rows.lines(prepared(rows, np.array([1])), 0, 1) == [b"{}\n"]


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


def test_chunks_that_are_not_held(reader: StreamReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [reader.chunk(number).offset(len(reader.chunk(number))) for number in range(3)]
    mean = sum(len(reader.line(sample)) for sample in ORDER.tolist()) // 7
    for name, enough in (("HELD_BYTES", sum(sizes)), ("LARGE_ROW_BYTES", mean)):
        with monkeypatch.context() as patch:
            for value in (enough, enough - 1):
                patch.setattr(scattered, name, value)
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
    flip(chunk_name(bad // 4), reader.chunk(bad // 4).offset(bad % 4) + 2)(Path(reader.directory))
    rows = ScatteredReader(reader)
    held = prepared(rows)
    assert rows.lines(held, 0, 7) == expected[:found]
    caught = raised(ChunkCorrupt, rows.lines, held, found, 7)
    assert (caught.chunk, caught.row) == (bad // 4, bad % 4)
    if found < 6:
        assert rows.lines(held, found + 1, 7) == expected[found + 1 :]


def test_a_chunk_that_was_cut_is_told_at_its_rows(reader: StreamReader) -> None:
    rows = ScatteredReader(reader)
    held = prepared(rows)
    os.truncate(reader.chunk(2).path, 5)
    assert len(rows.lines(held, 0, 7)) == 2
    raised(ChunkCorrupt, rows.lines, held, 2, 7)


SIZE = LEAST_BYTES


def address(data: npt.NDArray[Any]) -> int:
    return int(data.ctypes.data)


def test_no_more_is_kept_than_the_limit_and_what_is_taken_at_once_is_each_its_own() -> None:
    memory = RowMemory(4 * SIZE)
    # Small memory is left to the C library, and who finds another thread in it does not wait.
    assert [memory.take(size).size for size in (0, 1, SIZE - 1)] == [0, 1, SIZE - 1]
    with memory._lock:
        assert memory.take(SIZE).size == SIZE
    assert memory.size == 0
    taken = [memory.take(size) for size in (SIZE, SIZE, SIZE + 1, 2 * SIZE, *[SIZE] * 5)]
    for number, data in enumerate(taken):
        data[:] = number
    assert [int(data.min()) for data in taken] == [int(data.max()) for data in taken] == list(range(9))
    del data, taken
    assert memory.size == 4 * SIZE
    assert memory.take(4 * SIZE + 1).size == 4 * SIZE + 1
    assert memory.size == 4 * SIZE


@pytest.mark.parametrize(
    "look",
    [
        lambda data: data[8:16],
        lambda data: np.ndarray((2, 3), np.float32, data, 64).T[1:],
        lambda data: data.view(np.float16).reshape(2, -1)[::2],
        lambda data: as_tensor(data.view(np.float32))[3:],
        from_dlpack,
        lambda data: memoryview(data)[5:],
        lambda data: np.frombuffer(data.data, np.int32)[7:],
        lambda data: [data][:],
        lambda data: iter(data),
    ],
    ids=["slice", "array in a row", "other dtype", "tensor", "dlpack", "memoryview", "buffer", "list", "iterator"],
)
def test_memory_that_somebody_looks_at_is_left_alone(look: Any) -> None:
    memory = RowMemory()
    data = memory.take(SIZE)
    where = address(data)
    kept = look(data)
    del data
    others = [memory.take(SIZE) for _ in range(3)]
    assert where not in map(address, others)
    del kept, others
    assert where in [address(data) for data in [memory.take(SIZE) for _ in range(4)]]


def test_rows_of_a_stream_are_read_into_memory_of_dropped_ones(tmp_path: Path) -> None:
    rows = ({"x": np.full(SIZE, number, np.uint8), "y": np.full(8, number, np.int64)} for number in range(6))
    publish_rows(tmp_path, 6, rows, arrays=True)
    reader = StreamReader(tmp_path, max_wait=0)
    before = ROW_MEMORY.size
    for _ in range(5):
        for number in range(6):
            row = reader.read(number)
            assert (set(row["x"].tolist()), row["y"].tolist()) == ({number}, [number] * 8)
    # That of the row that is read, and of the one before it.
    assert ROW_MEMORY.size - before <= 3 * SIZE
    # One array of a row keeps it while others are read.
    kept = [reader.read(number)["y"] for number in range(6)]
    tensors = [as_tensor(reader.read(number)["x"])[-3:] for number in range(6)]
    for number in range(6):
        reader.read(number)
    assert [array.tolist() for array in kept] == [[number] * 8 for number in range(6)]
    assert [tensor.tolist() for tensor in tensors] == [[number] * 3 for number in range(6)]
    # A damaged row is refused in memory that held a good one.
    flip("chunk_00000.arrays", SIZE + 64 + 100)(tmp_path)
    raised(ChunkCorrupt, reader.read, 1)
    assert set(reader.read(2)["x"].tolist()) == {2}
