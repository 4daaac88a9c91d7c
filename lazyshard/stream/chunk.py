"""A published chunk, open for reading. Every row is found by its offset and checked against its digest before use.

A chunk without a seal, written by another program, is scanned once to find its rows. Files are read with `pread`, never
mapped: if a mapped file is cut short or fails on a network filesystem, SIGBUS kills the process. Arrays are read with
`preadv` into memory of their own row. Everything made from it is a view, so nothing is copied again.
"""

from __future__ import annotations

import codecs
import contextlib
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import xxhash

from lazyshard.errors import ChunkCorrupt, ChunkMissing, RowInvalid
from lazyshard.format.arrays import MAX_ROW_BYTES, fill_row, may_hold_arrays
from lazyshard.format.records import arrays_name
from lazyshard.format.row import check_row, parse_lines, parse_row
from lazyshard.format.seal import DealtByCost, Seal, SealedArrays
from lazyshard.memory import ROW_MEMORY
from lazyshard.part import ByteArray, Int64Array, UInt64Array
from lazyshard.store.files import OpenFile, UrlPath, again_if_stale, open_file

if TYPE_CHECKING:
    from mmap import mmap

    from lazyshard.stream.stream import Stream

LARGE_ROW_BYTES: Final = 64 << 10
"""Larger rows are read one by one, and each is parsed before the next is read. Cutting them out of a larger piece takes
another copy, and holding several touches new memory. Both cost more than a system call."""

OPEN_CHUNKS: Final = 256  # maximum number of open chunks: a quarter of the usual limit of 1,024 descriptors
OPEN_ROWS: Final = 1 << 20  # maximum rows in them, unless one chunk has more: offsets and digests take 16 bytes a row
_SCAN_BYTES: Final = 1 << 20
_BLANKS: Final = b" \t\r\n"  # white space in JSON
_OPEN_FILES: Final = 8  # maximum number of open files: as many chunks as workers usually read at a time
_open_files: dict[str, OpenFile] = {}  # by path, least recently used first

_digest = xxhash.xxh3_64_digest


def good_until(count: int, check: Callable[[int], object]) -> int:
    """Returns how many of the first `count` rows pass a check, up to the first that fails; raises if row 0 fails."""
    for at in range(count):
        try:
            check(at)
        except (ChunkCorrupt, RowInvalid):
            if not at:
                raise
            return at
    return count


class FileOfRows:
    """An open file of chunk `number`. Raises ChunkCorrupt if it is shorter or longer than its offsets say.

    `offsets`: row starts and the end of the last row; `digests`: XXH3 of each row, 8 big-endian bytes, or None.
    """

    __slots__ = ("_digests", "_file", "_offsets", "number", "path")

    def __init__(self, file: OpenFile, number: int, offsets: array[int], digests: bytes | None) -> None:
        self.number, self.path = number, file.path
        self._file, self._offsets, self._digests = file, offsets, digests
        if file.size != offsets[-1]:
            known = "bytes when its rows were counted" if digests is None else "bytes as sealed"
            raise self._corrupt(None, f"{offsets[-1]} {known}", f"{file.size} bytes")

    def _check_size(self, row: int) -> int:
        """Returns the size of a row in bytes. Raises ChunkCorrupt if it is too large to read into memory."""
        size = self._offsets[row + 1] - self._offsets[row]
        if size > MAX_ROW_BYTES:
            raise self._corrupt(row, f"a row of at most {MAX_ROW_BYTES} bytes", f"{size} bytes")
        return size

    def place(self, row: int) -> RowPlace | None:
        """Returns where another process finds a row; None without digests, or for a store, which may evict its copy."""
        if self._digests is None or isinstance(self.path, UrlPath):
            return None
        start, stop = self._offsets[row : row + 2]
        digest = self._digests[8 * row : 8 * row + 8]
        return RowPlace(os.path.abspath(self.path), self.number, row, start, stop - start, digest)

    def _corrupt(self, row: int | None, expected: str, actual: str) -> ChunkCorrupt:
        byte, sealed = None if row is None else self._offsets[row], self._digests is not None
        return damaged(self.path, self.number, row, byte, expected, actual, sealed=sealed)


class ChunkArrays(FileOfRows):
    """The side file of an open chunk."""

    __slots__ = ()
    _digests: bytes

    def size(self, first: int, stop: int) -> int:
        """Returns the size of the rows [first, stop) in bytes."""
        return self._offsets[stop] - self._offsets[first]

    def fit(self, first: int, stop: int, at_least: int, budget: int) -> int:
        """Returns where to stop in [first, stop): after `at_least` rows, and after all rows that fit the budget."""
        fit = bisect_right(self._offsets, self._offsets[first] + budget, first, stop + 1) - 1
        return min(stop, max(first + at_least, fit))

    def read_rows(self, first: int, stop: int) -> ByteArray:
        """Reads and checks the bytes of the rows [first, stop) in one system call; returns u8 owned by the caller."""
        offsets = self._offsets
        for row in range(first, stop):
            self._check_size(row)
        start = offsets[first]
        data = ROW_MEMORY.take(offsets[stop] - start)
        view = data.data
        if (done := self._file.read_into(view, start)) < len(view):
            raise self._corrupt(None, f"{offsets[-1]} bytes", f"the end of the file at byte {start + done}")
        for row in range(first, stop):
            at, sealed = slice(offsets[row] - start, offsets[row + 1] - start), self._digests[8 * row : 8 * row + 8]
            if (found := _digest(view[at])) != sealed and (rest := self._file.fetch(offsets[row], offsets[stop])):
                view[at.start : at.start + len(rest)] = rest
                found = _digest(view[at])
            if found != sealed:
                raise self._corrupt(row, f"XXH3 {sealed.hex()} as sealed", found.hex())
        return data

    def ends(self, first: int, stop: int) -> UInt64Array:
        """Returns the end of each of the rows [first, stop), in bytes from the start of row `first`."""
        return np.array(self._offsets[first + 1 : stop + 1], np.uint64) - np.uint64(self._offsets[first])

    def digests(self, first: int, stop: int) -> UInt64Array:
        """Returns the digests of the rows [first, stop)."""
        return np.frombuffer(self._digests, ">u8")[first:stop].astype(np.uint64)


def damaged(
    path: Path, chunk: int, row: int | None, byte: int | None, expected: str, actual: str, *, sealed: bool = True
) -> ChunkCorrupt:
    """Returns the error for a file that was changed after publishing; without a row, it concerns the whole file."""
    where = "" if row is None else f" row {row} (byte {byte}):"
    was = "sealed" if sealed else "marked complete"
    what = f"{path}:{where} expected {expected}, found {actual}; the file was changed or damaged after it was {was}"
    fields = {"file": str(path), "chunk": chunk, "row": row, "byte": byte, "expected": expected, "actual": actual}
    return ChunkCorrupt(f"{what}. Restore it from a copy", **fields)


class Chunk(FileOfRows):
    """An open chunk: data file, side file (None if the stream holds no arrays), and how its rows were dealt by cost."""

    arrays: ChunkArrays | None = None
    dealt: DealtByCost | None = None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def offset(self, row: int) -> int:
        """Returns the byte at which a row starts."""
        return self._offsets[row]

    def identity(self) -> bytes:
        """Returns 16 bytes that identify its rows and arrays; without digests, its path and offsets instead."""
        if self._digests is None:
            return xxhash.xxh3_128_digest(os.fsencode(os.path.abspath(self.path)) + self._offsets.tobytes())
        arrays = b"" if self.arrays is None else self.arrays.digests(0, len(self)).astype("<u8").tobytes()
        return xxhash.xxh3_128_digest(self._digests + arrays)

    def lines(self, first: int, stop: int, at_least: int, budget: int) -> list[bytes]:
        """Reads and checks rows of [first, stop), in one system call unless they are large, and returns their bytes.

        Reads `at_least` rows; beyond that, multiples of `at_least` up to `budget` bytes. Returns lines from `first` on,
        newlines included. Returns fewer than `at_least`, but at least one, if a bad row follows, and a single line if
        rows are large. Raises ChunkCorrupt if row `first` is bad.
        """
        offsets = self._offsets
        start = offsets[first]
        if at_least == 1 and start + budget <= offsets[first + 1]:
            return [self.line(first)]
        fit = bisect_right(offsets, start + budget, first, stop + 1) - 1 - first
        stop = max(first + fit - fit % at_least, min(first + at_least, stop))
        size = offsets[stop] - start
        if size > MAX_ROW_BYTES:
            for row in range(first, stop):
                self._check_size(row)
        if size > LARGE_ROW_BYTES * (stop - first):
            return [self.line(first)]
        data = self._read(start, size)
        if self._digests is not None:
            # Fast path for good rows: split at newlines, and use the digests to verify that these are the rows.
            lines = BytesIO(data).readlines()
            if b"".join(map(_digest, lines)) == self._digests[8 * first : 8 * stop]:
                return lines
        lines = [data[begin - start : end - start] for begin, end in pairwise(offsets[first : stop + 1])]
        return lines[: good_until(len(lines), lambda at: self.check(lines[at], first + at))]

    def parse(self, lines: list[bytes], first: int) -> list[dict[str, Any]]:
        """Parses checked lines, the first of which is row `first`, and puts their arrays into the rows.

        Returns fewer rows than lines, but at least one, if a bad row follows. Raises if the first row is bad.
        """
        rows = parse_lines(lines)
        if not rows:
            rows = [self._parse(lines[0], first)]
            with contextlib.suppress(RowInvalid):
                rows.extend(self._parse(line, first + 1 + i) for i, line in enumerate(lines[1:]))
        if self.arrays is None:
            return rows
        return rows[: good_until(len(rows), lambda at: self._fill(rows[at], lines[at], first + at))]

    def _fill(self, found: dict[str, Any], line: bytes, row: int) -> ByteArray | None:
        """Puts the arrays of a row into it, and returns their bytes; None if it has none. Raises as `parse`."""
        if self.arrays is None or not may_hold_arrays(line):
            return None
        data = self.arrays.read_rows(row, row + 1)
        try:
            fill_row(found, data)
        except RowInvalid as cause:
            raise self._invalid(cause, line, row) from None
        return data

    def line(self, row: int) -> bytes:
        """Reads and checks the bytes of one row, newline included. Raises as `lines` does."""
        line = self._read(self._offsets[row], self._check_size(row))
        self.check(line, row)
        return line

    def to_send(self, line: bytes, row: int) -> tuple[bytes | RowPlace, bytes | RowPlace | None]:
        """Returns a checked line, and the bytes of its arrays, None without any: of what is large the place, if it can.

        Raises ChunkCorrupt, RowInvalid: the arrays are bad.
        """
        sent = (self.place(row) if len(line) > LARGE_ROW_BYTES else None) or line
        if self.arrays is None or (data := self._fill(self._parse(line, row), line, row)) is None:
            return sent, None
        return sent, (self.arrays.place(row) if len(data) > LARGE_ROW_BYTES else None) or data.tobytes()

    def read_whole(self, memory: mmap) -> None:
        """Reads the whole file into memory without checking its rows: use `spans` and `check` for that."""
        with memoryview(memory) as whole, whole[: self._offsets[-1]] as view:
            if (done := self._file.read_into(view, 0)) < len(view):
                raise self._corrupt(None, f"{len(view)} bytes", f"the end of the file at byte {done}")

    def spans(self, rows: Int64Array) -> tuple[UInt64Array, UInt64Array, Int64Array | None]:
        """Returns the start and stop bytes of rows, in any order, and the bits of their digests if there are any."""
        offsets = np.frombuffer(self._offsets, dtype=np.uint64)
        digests = None if self._digests is None else np.frombuffer(self._digests, dtype=np.int64)[rows]
        return offsets[rows], offsets[rows + 1], digests

    def _read(self, start: int, size: int) -> bytes:
        data = self._file.read(start, size)
        if len(data) < size:
            raise self._corrupt(None, f"{self._offsets[-1]} bytes", f"the end of the file at byte {start + len(data)}")
        return data

    def check(self, line: bytes, row: int) -> None:
        """Checks the bytes of a row. Raises as `lines` does."""
        if self._digests is None:
            # This row was never checked, so it must meet the same rules as a row of our own producers.
            self._parse(line, row)
        elif (found := _digest(line)) != (sealed := self._digests[8 * row : 8 * row + 8]):
            raise self._corrupt(row, f"XXH3 {sealed.hex()} as sealed", found.hex())

    def _parse(self, line: bytes, row: int) -> dict[str, Any]:
        try:
            return parse_row(line) if self._digests is not None else check_row(line.strip(_BLANKS))
        except RowInvalid as cause:
            raise self._invalid(cause, line, row) from None

    def _invalid(self, cause: RowInvalid, line: bytes, row: int) -> RowInvalid:
        byte, number = self._offsets[row] + (cause.byte or 0), row + 1
        if self._digests is None:
            # Blank lines before a row make its line number larger than its row number.
            blanks = line[: len(line) - len(line.lstrip(_BLANKS))]
            byte, number, start = byte + len(blanks), 1 + blanks.count(b"\n"), self._offsets[row]
            for at in range(0, start, _SCAN_BYTES):
                number += self._read(at, min(_SCAN_BYTES, start - at)).count(b"\n")
        what = f"{self.path}: row {row} (line {number}, byte {byte}): {cause.reason}"
        return RowInvalid(what, reason=cause.reason, file=str(self.path), line=number, byte=byte)


def open_sealed(path: Path, seal: Seal) -> Chunk:
    """Opens a chunk that has a seal. Raises as `open_file` and `Chunk`."""
    # The rows first: code that searches for a missing file checks for them first, too.
    file = open_file(path)
    return open_copy(file, seal, None if seal.arrays is None else open_file(path.parent / arrays_name(seal.chunk)))


def open_copy(file: OpenFile, seal: Seal, arrays: OpenFile | None = None) -> Chunk:
    """Returns a chunk from its open data file and side file, if it has one. Raises as `Chunk` and `ChunkArrays`."""
    side = None if arrays is None or seal.arrays is None else ChunkArrays(arrays, seal.chunk, *_known(seal.arrays))
    chunk = Chunk(file, seal.chunk, *_known(seal))
    chunk.arrays, chunk.dealt = side, DealtByCost.read(seal.source)
    return chunk


def _known(sealed: Seal | SealedArrays) -> tuple[array[int], bytes]:
    # Indexing an array into plain ints is three times faster than with numpy.
    return array("Q", sealed.offsets.astype("=u8").tobytes()), sealed.digests.astype(">u8").tobytes()


def open_foreign(path: Path, number: int) -> Chunk:
    """Opens a chunk with an empty marker: finds its rows in one scan of the file, in bounded memory.

    Blank lines belong to the row before them, and those before all rows to the first row. A byte order mark at the
    start is skipped. Raises as `open_file`, and ChunkCorrupt if the file has changed meanwhile or a line has no end.
    """

    def opened() -> Chunk:
        file = open_file(path)
        return Chunk(file, number, _find_rows(file, number), None)

    return again_if_stale(opened)


def _find_rows(file: OpenFile, number: int) -> array[int]:
    """Returns where the rows of a file start, and the end of the last one. Raises ChunkCorrupt if a line has no end."""
    position = len(codecs.BOM_UTF8) if os.pread(file.fd, 3, 0) == codecs.BOM_UTF8 else 0
    offsets = array("Q", [position])
    blank = True
    while block := os.pread(file.fd, _SCAN_BYTES, position):
        start = 0
        while (newline := block.find(b"\n", start)) >= 0:
            blank = blank and not block[start:newline].strip(_BLANKS)
            if not blank:
                offsets.append(position + newline + 1)
            elif len(offsets) > 1:
                offsets[-1] = position + newline + 1
            blank, start = True, newline + 1
        blank = blank and not block[start:].strip(_BLANKS)
        position += len(block)
        if position - offsets[-1] > MAX_ROW_BYTES:
            # For instance the zeros of a hole, which may be longer than anything that can be read.
            row, expected = len(offsets) - 1, f"a line of at most {MAX_ROW_BYTES} bytes"
            raise damaged(file.path, number, row, offsets[-1], expected, "no end of it", sealed=False)
    if blank:
        offsets[-1] = position
    else:
        offsets.append(position)
    return offsets


class OpenChunks(dict[int, Chunk]):
    """The open chunks of one reader, least recently used first; these are closed first.

    For an object store it holds only as many as needed, since an open chunk occupies the cache: one at first, and twice
    as many whenever a chunk is opened again that was closed only just before. It may be shared by threads and forked at
    any time: each step is atomic. (An OrderedDict breaks when the destructor of a value lets another thread run.)
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        files = 1 + stream.arrays
        self._by_rows = max(1, OPEN_ROWS // files // stream.samples_per_chunk)
        self._grows = stream.mirror is not None
        self._most = 1 if self._grows else min(OPEN_CHUNKS // files, self._by_rows)
        self._closed: deque[int] = deque(maxlen=2)

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk that was opened and is about to be used; closes others if there are too many."""
        if self._grows and chunk.number in self._closed:
            # It was closed too early: the reader alternates between more chunks.
            self._most = min(2 * self._most, OPEN_CHUNKS, self._by_rows)
            self._closed = deque(self._closed, maxlen=2 * self._most)
        self[chunk.number] = chunk
        for old in list(self)[: -self._most]:
            self.pop(old, None)
            self._closed.append(old)


class RowPlace(NamedTuple):
    """A row of a sealed chunk: absolute path of the data file, numbers, first byte, size with newline, and XXH3."""

    path: str
    chunk: int
    row: int
    start: int
    size: int
    digest: bytes  # 8 big-endian bytes


def read_place(place: RowPlace) -> ByteArray:
    """Reads the bytes of a row that another process has checked; returns u8 owned by the caller.

    Raises ChunkMissing or ChunkCorrupt if they are gone or changed.
    """
    # Twice: an open file may have been replaced since, or its server may have forgotten it.
    with contextlib.suppress(OSError, ChunkCorrupt):
        return _read_place(place)
    _open_files.pop(place.path, None)
    return _read_place(place)


def _read_place(place: RowPlace) -> ByteArray:
    data = ROW_MEMORY.take(place.size)
    done = _file_of(place).read_into(data.data, place.start)
    if done == place.size and _digest(data.data) == place.digest:
        return data
    actual = f"{done} bytes" if done < place.size else _digest(data.data).hex()
    expected = f"XXH3 {place.digest.hex()} of {place.size} bytes as sealed"
    raise damaged(Path(place.path), place.chunk, place.row, place.start, expected, actual)


def _file_of(place: RowPlace) -> OpenFile:
    # Each step is atomic, so threads need no lock, which a fork could leave locked.
    if (file := _open_files.pop(place.path, None)) is None:
        try:
            file = open_file(Path(place.path))
        except FileNotFoundError as cause:
            what = f"{place.path}: row {place.row} was read by a DataLoader worker, and the file has since been deleted"
            way = "let the producer delete chunks (--retain consumed): it keeps chunks that are still being read"
            raise ChunkMissing(f"{what}; {way}", file=place.path, chunk=place.chunk) from cause
        # Closes the least recently used file and deleted files: they take up disk space while they are open.
        for path, other in list(_open_files.items()):
            if len(_open_files) >= _OPEN_FILES or not os.fstat(other.fd).st_nlink:
                _open_files.pop(path, None)
    _open_files[place.path] = file
    return file
