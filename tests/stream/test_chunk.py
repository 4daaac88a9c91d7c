"""Rows of a chunk, sealed and foreign; rows in other processes; chunks and rows in memory."""

from __future__ import annotations

import errno
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lazyshard import ChunkWriter
from lazyshard.errors import ChunkCorrupt, ChunkMissing, RowInvalid
from lazyshard.format.names import chunk_name
from lazyshard.store.files import open_file
from lazyshard.stream import StreamReader, chunk_files
from lazyshard.stream.chunk import Chunk, open_foreign, open_sealed
from lazyshard.stream.chunk_files import RowPlace, read_place
from lazyshard.stream.scattered import HeldChunks
from tests.stream.streams import foreign, open_descriptors, produce, seal

LINES = [b'{"id":0}\n', b'{"id":1}\n', b'{"id":2}\n', b'{"id":3}\n']


def sealed(directory: Path, lines: list[bytes]) -> Path:
    with ChunkWriter(directory, len(lines)) as writer:
        for line in lines:
            writer.write(line)
    return directory / chunk_name(0)


def opened(data: Path) -> Chunk:
    return open_sealed(data, seal(data.parent, 0))


def damage(data: Path, row: int, line: bytes) -> None:
    lines = data.read_bytes().splitlines(keepends=True)
    lines[row] = line
    data.write_bytes(b"".join(lines))


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


def test_lines_and_line_agree_for_every_range_and_budget(tmp_path: Path) -> None:
    chunk = opened(sealed(tmp_path, LINES))
    assert [chunk.line(row) for row in range(4)] == LINES
    for first in range(4):
        for stop in range(first + 1, 5):
            for at_least in range(1, stop - first + 1):
                for budget in (0, 9, 20, 1000):
                    found = chunk.lines(first, stop, at_least, budget)
                    assert at_least <= len(found) <= stop - first
                    assert found == LINES[first : first + len(found)]


def test_budget_bounds_what_is_read_ahead(tmp_path: Path) -> None:
    chunk = opened(sealed(tmp_path, LINES))
    assert [len(chunk.lines(0, 4, 1, budget)) for budget in (0, 9, 18, 35, 36, 10**9)] == [1, 1, 2, 3, 4, 4]


def test_large_rows_are_whole_and_come_one_at_a_time(tmp_path: Path) -> None:
    big = [b'{"text":"%s"}\n' % (b"x" * size) for size in (3_000_000, 5, 1_500_000)]
    chunk = opened(sealed(tmp_path, big))
    assert [chunk.lines(row, 3, 3 - row, 10**9) for row in range(3)] == [[line] for line in big]
    assert [chunk.line(row) for row in range(3)] == big


def test_digest_mismatch_names_file_row_byte_expected_and_actual(tmp_path: Path) -> None:
    data = sealed(tmp_path, LINES)
    damage(data, 2, b'{"id":7}\n')
    want, have = (f"{xxhash.xxh3_64_intdigest(line):016x}" for line in (LINES[2], b'{"id":7}\n'))
    for many in (False, True):
        with pytest.raises(ChunkCorrupt) as caught:
            opened(data).lines(2, 4, 2, 0) if many else opened(data).line(2)
        error = caught.value
        assert (error.file, error.chunk, error.row, error.byte) == (str(data), 0, 2, 18)
        assert (error.expected, error.actual) == (f"XXH3 {want} as sealed", have)


def test_bad_row_behind_good_ones_is_raised_only_when_it_comes_first(tmp_path: Path) -> None:
    data = sealed(tmp_path, LINES)
    damage(data, 2, b'{"id":7}\n')
    assert opened(data).lines(0, 4, 4, 1000) == LINES[:2]
    assert opened(data).lines(3, 4, 1, 1000) == LINES[3:]


def test_newline_moved_between_rows_does_not_pass(tmp_path: Path) -> None:
    data = sealed(tmp_path, [b'{"a":1}\n', b'{"b":22}\n'])
    data.write_bytes(b'{"a":1 }\n' + b'{"b":2}\n')
    with pytest.raises(ChunkCorrupt, match="row 0"):
        opened(data).lines(0, 2, 2, 1000)


@pytest.mark.parametrize("bad", [b"[1]\n", b"nonsense\n", b"1\n", b'{"a":"\xff"}\n'])
def test_row_that_is_no_object_ends_the_good_prefix_and_names_line_and_byte(bad: bytes, tmp_path: Path) -> None:
    chunk = unsealed_check(tmp_path, [LINES[0], LINES[1], bad, LINES[3]])
    assert take(chunk, 0, 4, 4) == [{"id": 0}, {"id": 1}]
    with pytest.raises(RowInvalid) as caught:
        take(chunk, 2, 4, 2)
    assert caught.value.line == 3
    assert caught.value.byte is not None and 18 <= caught.value.byte < 18 + len(bad)
    assert caught.value.file == str(tmp_path / "data")


@pytest.mark.parametrize(("change", "actual"), [(b"", "0 bytes"), (b"{}\n", "3 bytes"), (b"x" * 99, "99 bytes")])
def test_file_of_another_size_than_sealed_is_corrupt(change: bytes, actual: str, tmp_path: Path) -> None:
    data = sealed(tmp_path, LINES)
    data.write_bytes(change)
    before = open_descriptors()
    with pytest.raises(ChunkCorrupt) as caught:
        opened(data)
    assert (caught.value.expected, caught.value.actual) == ("36 bytes as sealed", actual)
    del caught
    assert open_descriptors() == before


def test_file_cut_after_opening_is_corrupt_and_no_bus_error(tmp_path: Path) -> None:
    data = sealed(tmp_path, LINES)
    chunk = opened(data)
    os.truncate(data, 12)
    assert chunk.line(0) == LINES[0]
    with pytest.raises(ChunkCorrupt, match="the end of the file at byte 12"):
        chunk.line(1)


def test_stale_descriptor_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b'{"a":1}\n')
    chunk = opened(sealed(tmp_path / "s", LINES))
    pread, left = os.pread, [2]

    def stale(fd: int, size: int, offset: int) -> bytes:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", stale)
    before = open_descriptors()
    assert chunk.lines(0, 4, 4, 0) == LINES
    assert open_descriptors() == before
    left[0] = 1
    # A scan starts again.
    assert take(open_foreign(tmp_path / "data", 0), 0, 1) == [{"a": 1}]
    left[0] = 10**9
    with pytest.raises(OSError, match="Stale"):
        chunk.line(0)


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = opened(sealed(tmp_path, LINES))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 5), offset))
    assert chunk.lines(0, 4, 4, 0) == LINES


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b'{"a":1}\n{"a":2}\n', [1, 2]),
        (b'{"a":1}\n{"a":2}', [1, 2]),
        (b'{"a":1}\r\n{"a":2}\r\n', [1, 2]),
        (b'\n \t\n{"a":1}\n{"a":2}\n', [1, 2]),
        (b'{"a":1}\n\n\r\n{"a":2}\n', [1, 2]),
        (b'{"a":1}\n{"a":2}\n\n  \n', [1, 2]),
        (b'{"a":1}\n{"a":2}\n   ', [1, 2]),
        (b'\xef\xbb\xbf{"a":1}\n{"a":2}\n', [1, 2]),
        (b'\xef\xbb\xbf\n{"a":1}\n', [1]),
        (b"", []),
        (b"\n", []),
        (b"  ", []),
        (b" \r\n\n", []),
        (b"\xef\xbb\xbf", []),
        ('{"a":"\u2028\u2029\x85"}\n'.encode(), ["\u2028\u2029\x85"]),
    ],
)
def test_foreign_rows_are_found_by_newlines(data: bytes, wanted: list[Any], tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("bad", "byte"), [(b"[1]", 11), (b"nope", 11), (b'{"a":"\xff"}', 17), (b'{"a":1}{"a":2}', 18), (b"\x0c", 11)]
)
def test_foreign_bad_row_names_its_line_in_the_file_and_spares_the_others(
    bad: bytes, byte: int, tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(b'\n{"a":1}\n\r\n' + bad + b'\n{"a":3}\n')
    chunk = open_foreign(tmp_path / "data", 0)
    assert take(chunk, 0, 3, 3) == [{"a": 1}]
    assert take(chunk, 2, 3) == [{"a": 3}]
    with pytest.raises(RowInvalid) as caught:
        take(chunk, 1, 3)
    assert (caught.value.line, caught.value.byte) == (4, byte)


def test_foreign_file_that_grows_while_it_is_scanned_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.write_bytes(b'{"a":1}\n')
    pread = os.pread

    def grow(fd: int, size: int, offset: int) -> bytes:
        with data.open("ab") as file:
            file.write(b"{}\n" if data.stat().st_size < 20 else b"")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", grow)
    with pytest.raises(ChunkCorrupt, match="marked complete"):
        open_foreign(data, 0)


def test_foreign_integer_past_64_bits_is_refused_rather_than_rounded(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b'{"a":1}\n\n  {"a":18446744073709551616}\n')
    chunk = open_foreign(tmp_path / "data", 0)
    assert chunk.lines(0, 2, 1, 1000) == [b'{"a":1}\n\n']
    with pytest.raises(RowInvalid, match="18446744073709551616 does not fit into 64 bits") as caught:
        chunk.lines(1, 2, 1, 1000)
    assert (caught.value.line, caught.value.byte) == (3, 16)


@pytest.fixture(autouse=True)
def none_open() -> Iterator[None]:
    chunk_files._open_files.clear()
    yield
    chunk_files._open_files.clear()


def place_of(directory: Path, chunk: int, row: int) -> RowPlace:
    place = StreamReader(directory).chunk(chunk).place(row)
    assert place is not None
    return place


def test_a_row_is_read_where_it_lies(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4)
    place = place_of(directory, 1, 1)
    assert place[:5] == (str(directory / "chunk_00001.jsonl"), 1, 1, 9, 9)
    assert [read_place(place_of(directory, *divmod(i, 2))) for i in (3, 0, 2)] == [
        b'{"id":3}\n',
        b'{"id":0}\n',
        b'{"id":2}\n',
    ]


def test_a_place_holds_after_the_process_has_gone_to_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(tmp_path / "s", 2)
    monkeypatch.chdir(tmp_path)
    place = place_of(Path("s"), 0, 0)
    monkeypatch.chdir("/")
    assert read_place(place) == b'{"id":0}\n'


def test_rows_without_digests_have_no_place(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "s", b'{"id":0}\n', end=True)
    assert StreamReader(directory, samples_per_chunk=1).chunk(0).place(0) is None


def test_a_row_that_was_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    with open(place.path, "r+b") as file:
        os.pwrite(file.fileno(), b"9", 9 + 6)
    with pytest.raises(ChunkCorrupt, match=r"row 1 \(byte 9\): expected XXH3 .* of 9 bytes as sealed, found .*changed"):
        read_place(place)


def test_a_file_that_was_cut_meanwhile_is_refused(tmp_path: Path) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    os.truncate(place.path, 13)
    with pytest.raises(ChunkCorrupt, match="found 4 bytes; the file was changed"):
        read_place(place)


@pytest.mark.parametrize("known", [False, True])
def test_a_row_whose_file_was_deleted_meanwhile(tmp_path: Path, known: bool) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    if known:
        read_place(place)
    os.unlink(place.path)
    if known:
        # It is still open here.
        assert read_place(place) == b'{"id":1}\n'
        return
    with pytest.raises(ChunkMissing, match="row 1 was read by a DataLoader worker, and the file is gone since"):
        read_place(place)


def test_an_open_file_that_another_has_replaced_is_opened_again(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 2)
    assert read_place(place_of(directory, 0, 0)) == b'{"id":0}\n'
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "chunk_00000.jsonl").write_bytes(b'{"id":7}\n{"id":8}\n')
    other = produce(tmp_path / "other", 9)
    of_eight = place_of(other, 4, 0)._replace(path=str(directory / "chunk_00000.jsonl"), start=9)
    assert read_place(of_eight) == b'{"id":8}\n'


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


def filled(data: bytes) -> Callable[[memoryview], None]:
    def read(memory: memoryview) -> None:
        memory[:] = data

    return read


def test_slices_are_the_bytes_of_the_chunk() -> None:
    chunks = HeldChunks()
    chunks.read(3, 5, {3}, filled(b"abcde"))
    assert chunks.data[3][1:4] == b"bcd"
    assert type(chunks.data[3][1:4]) is bytes


def test_a_chunk_that_is_not_wanted_leaves_its_memory_to_the_next() -> None:
    chunks = HeldChunks()
    chunks.read(0, 5, {0, 1}, filled(b"abcde"))
    chunks.read(1, 2, {0, 1}, filled(b"xy"))
    memory = chunks.data[0]
    chunks.read(2, 7, {1, 2}, filled(b"0123456"))
    assert chunks.data[2] is memory
    assert {number: data[:2] for number, data in chunks.data.items()} == {1: b"xy", 2: b"01"}


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_memory_of_another_size_is_given_up_for_each_that_is_had(size: int) -> None:
    chunks = HeldChunks()
    for number in range(3):
        chunks.read(number, 1 << 20, {0, 1, 2}, filled(bytes(1 << 20)))
    for number, spare in ((3, 2), (4, 1), (5, 0)):
        chunks.read(number, size, {3, 4, 5}, filled(bytes(size)))
        assert len(chunks._spare) == spare
    assert [len(data) for data in chunks.data.values()] == [max(size, 256 << 10)] * 3


def test_a_chunk_that_cannot_be_read_is_not_held_and_its_memory_is_used_again() -> None:
    def fail(memory: memoryview) -> None:
        memory[0] = 1
        raise OSError("no")

    chunks = HeldChunks()
    with pytest.raises(OSError, match="no"):
        chunks.read(0, 5, {0}, fail)
    assert chunks.data == {}
    (memory,) = chunks._spare
    chunks.read(0, 5, {0}, filled(b"abcde"))
    assert chunks.data[0] is memory


def test_a_forked_process_reads_over_its_own_copy_alone() -> None:
    chunks = HeldChunks()
    chunks.read(0, 5, {0}, filled(b"abcde"))
    pid = os.fork()
    if not pid:
        chunks.read(1, 5, {1}, filled(b"01234"))
        os._exit(chunks.data[1][:5] != b"01234")
    assert os.waitpid(pid, 0)[1] == 0
    assert chunks.data[0][:5] == b"abcde"
