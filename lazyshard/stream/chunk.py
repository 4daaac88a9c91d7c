"""A published chunk, open for reading: rows by their offsets, each checked against its digest before anybody sees it.

`OpenChunks` says which of them a reader holds open, and for how long.

Files are read with `pread`, never mapped: a mapped file that is cut short or fails on a network filesystem kills the
process with SIGBUS and no word of explanation.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from lazyshard.errors import ChunkCorrupt, RowInvalid
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.names import arrays_name, seal_name
from lazyshard.format.row import check_row, parse_lines, parse_row
from lazyshard.format.seal import DealtByCost, Seal
from lazyshard.memory import quick_loads
from lazyshard.store.files import OpenFile, again_if_stale, open_file, open_unread, read_file
from lazyshard.store.urls import UrlPath
from lazyshard.stream.chunk_files import MARKED, SEALED, ChunkArrays, CompleteFile, RowPlace, damaged
from lazyshard.stream.foreign_rows import BLANKS, MAX_ROW_BYTES, find_rows, line_number

LARGE_ROW_BYTES: Final = 64 << 10
"""Rows above this are read one by one, and parsed before the next one is read: to cut them out of a larger piece is a
copy more, and to hold several is memory that is touched for the first time. Both cost more than a system call."""

OPEN_CHUNKS: Final = 256
"""Chunks held open at the most: a quarter of the usual limit of 1,024 descriptors."""

OPEN_ROWS: Final = 1 << 20
"""Rows of all chunks held open, unless a single chunk has more: their offsets and digests take 16 bytes a row."""

_digest = xxhash.xxh3_64_digest
_loads = quick_loads


class Chunk:
    """An open chunk.

    Args:
        file: the data file.
        number: the chunk's number.
        offsets: row starts, and the end of the last one: n + 1 numbers.
        digests: XXH3 of each row, 8 big-endian bytes each, or None where nobody took any.
        arrays: the side file with the arrays of the rows; None in a stream whose rows hold none.
        dealt: how its rows were dealt by cost, as its seal says; None if they were not.

    Raises:
        ChunkCorrupt: the file is shorter or longer than the offsets say.
    """

    __slots__ = ("_digests", "_file", "_offsets", "arrays", "dealt", "number")

    def __init__(
        self,
        file: OpenFile,
        number: int,
        offsets: array[int],
        digests: bytes | None,
        arrays: ChunkArrays | None = None,
        dealt: DealtByCost | None = None,
    ) -> None:
        self.number = number
        self.arrays = arrays
        self.dealt = dealt
        self._file = CompleteFile(file)
        self._offsets = offsets
        self._digests = digests
        if file.size != offsets[-1]:
            known = "bytes when its rows were counted" if digests is None else "bytes as sealed"
            raise self._corrupt(None, f"{offsets[-1]} {known}", f"{file.size} bytes")

    def __len__(self) -> int:
        """Rows."""
        return len(self._offsets) - 1

    @property
    def path(self) -> Path:
        """The data file."""
        return self._file.path

    def offset(self, row: int) -> int:
        """Byte at which a row starts."""
        return self._offsets[row]

    def identity(self) -> bytes:
        """Returns 16 bytes that tell the rows of this chunk, with their arrays, from those of others.

        Where nobody took digests they tell where its rows lie, not what is in them: compare the line, too.
        """
        if self._digests is None:
            return xxhash.xxh3_128_digest(os.fsencode(os.path.abspath(self.path)) + self._offsets.tobytes())
        return xxhash.xxh3_128_digest(self._digests + (b"" if self.arrays is None else self.arrays.all_digests()))

    def lines(self, first: int, stop: int, at_least: int, budget: int) -> list[bytes]:
        """Reads and checks rows of [first, stop), in one system call unless they are large, and returns their bytes.

        Args:
            first: first row.
            stop: row before which to stop in any case.
            at_least: how many rows to read if they are good, even past the budget. Of what is read beyond that the
                number is a multiple of it.
            budget: how many bytes to read at the most beyond that.

        Returns:
            Lines from `first` on, their newlines included. Fewer than `at_least`, but never none, where a bad row
            follows, and a single one where rows are large.

        Raises:
            ChunkCorrupt: row `first` is not what was sealed, or the file was cut.
            OSError: the filesystem failed.
        """
        offsets = self._offsets
        start = offsets[first]
        if at_least == 1 and start + budget <= offsets[first + 1]:
            return [self.line(first)]
        fit = bisect_right(offsets, start + budget, first, stop + 1) - 1 - first
        stop = max(first + fit - fit % at_least, min(first + at_least, stop))
        size = offsets[stop] - start
        if size > MAX_ROW_BYTES:
            self._check_sizes(first, stop)
        if size > LARGE_ROW_BYTES * (stop - first):
            return [self.line(first)]
        data = self._read(start, size)
        if self._digests is not None:
            # The quick way for good rows: split at newlines, and let the digests say whether those are the rows.
            lines = BytesIO(data).readlines()
            if b"".join(map(_digest, lines)) == self._digests[8 * first : 8 * stop]:
                return lines
        cuts = [offset - start for offset in offsets[first : stop + 1]]
        return self._good([data[cut:end] for cut, end in pairwise(cuts)], range(first, stop))

    def parse(self, lines: list[bytes], first: int) -> list[dict[str, Any]]:
        """Parses checked lines, `first` being the row of the first one, and puts their arrays into the rows.

        Returns:
            Rows from `first` on; fewer than lines, but never none, where one follows that is not a JSON object, or
            whose arrays are not as they should be.

        Raises:
            RowInvalid: row `first` is not a JSON object, or does not describe its arrays.
            ChunkCorrupt, OSError: the arrays of row `first` are not what was sealed, or cannot be read.
        """
        if rows := parse_lines(lines):
            return rows if self.arrays is None else self._with_arrays(rows, lines, first)
        rows = [self._parse(lines[0], first)]
        with contextlib.suppress(RowInvalid):
            rows.extend(self._parse(line, first + 1 + i) for i, line in enumerate(lines[1:]))
        return rows if self.arrays is None else self._with_arrays(rows, lines, first)

    def fill(self, parsed: dict[str, Any], line: bytes, row: int) -> None:
        """Puts the arrays of a row into their places. Raises as `parse` does."""
        if self.arrays is None or not may_hold_arrays(line):
            return
        try:
            fill_row(parsed, self.arrays.read(row))
        except RowInvalid as cause:
            raise self._invalid(cause, line, row) from None

    def rows(self, first: int, stop: int, at_least: int, budget: int) -> list[dict[str, Any]]:
        """Reads, checks and parses rows of [first, stop); arguments and errors as for `lines` and `parse`."""
        return self.parse(self.lines(first, stop, at_least, budget), first)

    def row(self, row: int) -> dict[str, Any]:
        """Reads, checks and parses one row. Raises as `rows` does."""
        line = self.line(row)
        try:
            parsed = _loads(line)
        except orjson.JSONDecodeError:
            parsed = None
        found = parsed if type(parsed) is dict else self._parse(line, row)
        if self.arrays is not None:
            self.fill(found, line, row)
        return found

    def line(self, row: int) -> bytes:
        """Reads and checks the bytes of one row, its newline included. Raises as `rows` does."""
        start = self._offsets[row]
        size = self._offsets[row + 1] - start
        if size > MAX_ROW_BYTES:
            raise self._too_large(row, size)
        line = self._read(start, size)
        self.check(line, row)
        return line

    def place(self, row: int) -> RowPlace | None:
        """Returns where a row lies, for another process to read it again.

        None where nobody took digests, and of a chunk of an object store: its copy may be gone by then.
        """
        if self._digests is None or isinstance(self.path, UrlPath):
            return None
        start = self._offsets[row]
        digest = self._digests[8 * row : 8 * row + 8]
        return RowPlace(os.path.abspath(self.path), self.number, row, start, self._offsets[row + 1] - start, digest)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._offsets[-1]

    def read_into(self, memory: memoryview) -> None:
        """Reads the whole file; its rows are not checked yet: see `spans` and `check`.

        Args:
            memory: u8 of shape (size,), which may be changed whatever comes of it.

        Raises:
            ChunkCorrupt: the file was cut.
            OSError: the filesystem failed.
        """
        done = self._file.read_into(memory, 0)
        if done < len(memory):
            raise self._ends_at(done)

    def spans(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64] | None]:
        """Returns where rows start and stop in the file's bytes, and the bits of their digests if they have any.

        Args:
            rows: their numbers, in any order.
        """
        offsets = np.frombuffer(self._offsets, dtype=np.uint64)
        digests = None if self._digests is None else np.frombuffer(self._digests, dtype=np.int64)[rows]
        return offsets[rows], offsets[rows + 1], digests

    def _check_sizes(self, first: int, stop: int) -> None:
        """Looks whether each of the rows [first, stop) can be read into memory."""
        for row in range(first, stop):
            if (size := self._offsets[row + 1] - self._offsets[row]) > MAX_ROW_BYTES:
                raise self._too_large(row, size)

    def _too_large(self, row: int, size: int) -> ChunkCorrupt:
        return self._corrupt(row, f"a row of at most {MAX_ROW_BYTES} bytes", f"one of {size}")

    def _good(self, lines: list[bytes], rows: Sequence[int]) -> list[bytes]:
        """Returns the lines of these rows up to the first bad one; raises if that is the first."""
        for at, (line, row) in enumerate(zip(lines, rows, strict=True)):
            try:
                self.check(line, row)
            except (ChunkCorrupt, RowInvalid):
                if not at:
                    raise
                return lines[:at]
        return lines

    def _read(self, start: int, size: int) -> bytes:
        data = self._file.read(start, size)
        if len(data) < size:
            raise self._ends_at(start + len(data))
        return data

    def _ends_at(self, byte: int) -> ChunkCorrupt:
        return self._corrupt(None, f"{self._offsets[-1]} bytes", f"the end of the file at byte {byte}")

    def check(self, line: bytes, row: int) -> None:
        """Checks the bytes of a row. Raises as `rows` does."""
        if self._digests is None:
            # Nobody has checked this row yet, so it is held to what a producer of ours would publish.
            self._parse(line, row)
        elif (found := _digest(line)) != (sealed := self._digests[8 * row : 8 * row + 8]):
            raise self._corrupt(row, f"XXH3 {sealed.hex()} as sealed", found.hex())

    def _parse(self, line: bytes, row: int) -> dict[str, Any]:
        try:
            return parse_row(line) if self._digests is not None else check_row(line.strip(BLANKS))
        except RowInvalid as cause:
            raise self._invalid(cause, line, row) from None

    def _with_arrays(self, rows: list[dict[str, Any]], lines: list[bytes], first: int) -> list[dict[str, Any]]:
        for at, (parsed, line) in enumerate(zip(rows, lines, strict=False)):
            try:
                self.fill(parsed, line, first + at)
            except (ChunkCorrupt, RowInvalid):
                if not at:
                    raise
                return rows[:at]
        return rows

    def _invalid(self, cause: RowInvalid, line: bytes, row: int) -> RowInvalid:
        blanks = 0 if self._digests is not None else len(line) - len(line.lstrip(BLANKS))
        byte = self._offsets[row] + blanks + (cause.byte or 0)
        number = self._line_number(line, row)
        return RowInvalid(
            f"{self.path}: row {row} (line {number}, byte {byte}): {cause.reason}",
            reason=cause.reason,
            file=str(self.path),
            line=number,
            byte=byte,
        )

    def _line_number(self, line: bytes, row: int) -> int:
        """Returns where a row is, counted from 1: with blank lines before it, further down than its own number says."""
        if self._digests is not None:
            return row + 1
        return line_number(line, self._offsets[row], self._read)

    def _corrupt(self, row: int | None, expected: str, actual: str) -> ChunkCorrupt:
        byte = None if row is None else self._offsets[row]
        published = MARKED if self._digests is None else SEALED
        return damaged(self.path, self.number, row, byte, expected, actual, published=published)


def open_sealed(path: Path, seal: Seal, *, read: bool = True) -> Chunk:
    """Opens a chunk that has a seal; `read`: not only to look at its size. Raises as `open_file` and `Chunk` do."""
    how = open_file if read else open_unread
    if seal.arrays is None:
        return open_copy(how(path), seal)
    # The rows first: who looks for what is missing asks for them first, too.
    file = how(path)
    return open_copy(file, seal, how(path.parent / arrays_name(seal.chunk)))


def open_copy(file: OpenFile, seal: Seal, arrays: OpenFile | None = None) -> Chunk:
    """Returns a chunk whose files are open already: that of its rows, and the side file if it has one.

    Raises as `Chunk` and `ChunkArrays` do.
    """
    digests = seal.digests.astype(">u8").tobytes()
    side = None
    if seal.arrays is not None:
        assert arrays is not None
        side = ChunkArrays(arrays, seal.chunk, seal.arrays)
    return Chunk(file, seal.chunk, _numbers(seal.offsets), digests, side, DealtByCost.read(seal.source))


def open_foreign(path: Path, number: int) -> Chunk:
    """Opens a chunk with an empty marker: finds its rows by one scan of the file, in bounded memory.

    Blank lines count as part of the row before them, in front of all rows as part of the first. A byte order mark at
    the start is passed over. The last line may lack its newline. A file without rows gives a chunk of none.

    Raises:
        FileNotFoundError, FileRefused, FileUnreadable, OSError: as `open_file`.
        ChunkCorrupt: the file has grown or shrunk meanwhile, or a line in it has no end.
    """

    def opened() -> Chunk:
        file = open_file(path)
        return Chunk(file, number, find_rows(file, number), None)

    return again_if_stale(opened)


def _numbers(values: npt.NDArray[np.uint64]) -> array[int]:
    # array indexes to plain ints three times faster than numpy.
    return array("Q", values.astype("=u8").tobytes())


def read_dealt(directory: Path, chunk: int) -> DealtByCost | None:
    """Returns how the rows of a chunk were dealt by cost; None if they were not.

    Args:
        directory: of a stream of ours.
        chunk: one that is published and not deleted.

    Raises:
        SealInvalid, OSError: its seal cannot be read.
    """
    path = directory / seal_name(chunk)
    return DealtByCost.read(Seal.decode(read_file(path), chunk, str(path)).source)


class OpenChunks:
    """The open chunks of one reader; those that were not used for longest are closed.

    Of an object store no more are held than are needed, as each is kept in the cache meanwhile: one at first, and twice
    as many whenever a chunk has to be opened again that was closed only just before.

    Several threads may share one, and it may be forked at any time: each step is atomic, so there is no lock, which a
    fork could leave locked. Open files stay behind when it is pickled or copied.

    Args:
        samples_per_chunk: rows in every chunk but possibly the last.
        arrays: whether rows may hold arrays: a chunk has two files then, and a row twice as many numbers.
        cached: whether chunks are copies of those of an object store.
    """

    def __init__(self, samples_per_chunk: int, *, arrays: bool, cached: bool) -> None:
        files = 1 + arrays
        self._by_rows = max(1, OPEN_ROWS // files // samples_per_chunk)
        self._most = 1 if cached else min(OPEN_CHUNKS // files, self._by_rows)
        self._grows = cached
        # In the order of use. (An OrderedDict breaks when the end of a value lets a thread in.)
        self._chunks: dict[int, Chunk] = {}
        self._closed: deque[int] = deque(maxlen=2)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves open files behind."""
        return self.__dict__ | {"_chunks": {}, "_closed": self._closed.copy()}

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the open chunks, the one used last at the end."""
        return list(self._chunks)

    def get(self, number: int) -> Chunk | None:
        """Returns a chunk that is about to be used, None if it is not open."""
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self._chunks[number] = chunk
        return chunk

    def add(self, chunk: Chunk) -> None:
        """Takes a chunk that was opened and is about to be used; closes others for it, if there are too many."""
        if self._grows and chunk.number in self._closed:
            # It was closed too early: the reader goes to and fro between more of them.
            self._most = min(2 * self._most, OPEN_CHUNKS, self._by_rows)
            self._closed = deque(self._closed, maxlen=2 * self._most)
        self._chunks[chunk.number] = chunk
        for old in list(self._chunks)[: -self._most]:
            self._chunks.pop(old, None)
            self._closed.append(old)

    def close(self, number: int) -> None:
        """Closes a chunk, if it is open."""
        self._chunks.pop(number, None)

    def close_below(self, first: int) -> None:
        """Closes all chunks before this one."""
        for number in [number for number in list(self._chunks) if number < first]:
            self._chunks.pop(number, None)

    def clear(self) -> None:
        """Closes all."""
        self._chunks.clear()
