"""A published chunk, open for reading: rows by their offsets, each checked against its digest before anybody sees it.

Of a chunk without a seal, which another program has written, one scan finds the rows. Files are read with `pread`,
never mapped: a mapped file that is cut short or fails on a network filesystem kills the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt, RowInvalid
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.names import arrays_name
from lazyshard.format.row import check_row, parse_lines, parse_row
from lazyshard.format.seal import DealtByCost, Seal
from lazyshard.store.files import OpenFile, again_if_stale, open_file, read_seal
from lazyshard.store.urls import UrlPath
from lazyshard.stream.chunk_files import MARKED, SEALED, ChunkArrays, CompleteFile, RowPlace, damaged

MAX_ROW_BYTES: Final = 1 << 31
"""No program makes rows as large; a file with a hole can claim any number of bytes at no cost."""

LARGE_ROW_BYTES: Final = 64 << 10
"""Rows above this are read one by one, and parsed before the next one is read: to cut them out of a larger piece is a
copy more, and to hold several is memory that is touched for the first time. Both cost more than a system call."""

OPEN_CHUNKS: Final = 256  # chunks held open at the most: a quarter of the usual limit of 1,024 descriptors

OPEN_ROWS: Final = 1 << 20
"""Rows of all chunks held open, unless a single chunk has more: their offsets and digests take 16 bytes a row."""

_SCAN_BYTES: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r\n"  # what JSON takes for white space

_digest = xxhash.xxh3_64_digest


def good_until(count: int, check: Callable[[int], object]) -> int:
    """Returns how many of so many rows, from the first on, pass a check; raises if the first one does not."""
    for at in range(count):
        try:
            check(at)
        except (ChunkCorrupt, RowInvalid):
            if not at:
                raise
            return at
    return count


class Chunk:
    """An open chunk. Raises ChunkCorrupt: the file is shorter or longer than the offsets say.

    Args:
        file: the data file of chunk `number`.
        offsets: row starts, and the end of the last one: n + 1 numbers.
        digests: XXH3 of each row, 8 big-endian bytes each, or None where nobody took any.
        arrays: the side file with the arrays of the rows; None in a stream whose rows hold none.
        dealt: how its rows were dealt by cost, as its seal says; None if they were not.
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
        self.number, self.arrays, self.dealt = number, arrays, dealt
        self._file, self._offsets, self._digests = CompleteFile(file), offsets, digests
        if file.size != offsets[-1]:
            known = "bytes when its rows were counted" if digests is None else "bytes as sealed"
            raise self._corrupt(None, f"{offsets[-1]} {known}", f"{file.size} bytes")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def path(self) -> Path:
        """The data file."""
        return self._file.path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._offsets[-1]

    def offset(self, row: int) -> int:
        """Byte at which a row starts."""
        return self._offsets[row]

    def identity(self) -> bytes:
        """Returns 16 bytes that tell the rows of this chunk, with their arrays, from those of others.

        Where nobody took digests they tell where its rows lie, not what is in them: compare the line, too.
        """
        if self._digests is None:
            return xxhash.xxh3_128_digest(os.fsencode(os.path.abspath(self.path)) + self._offsets.tobytes())
        arrays = b"" if self.arrays is None else self.arrays.digests(0, len(self)).astype("<u8").tobytes()
        return xxhash.xxh3_128_digest(self._digests + arrays)

    def lines(self, first: int, stop: int, at_least: int, budget: int) -> list[bytes]:
        """Reads and checks rows of [first, stop), in one system call unless they are large, and returns their bytes.

        Args:
            first: first row.
            stop: row before which to stop in any case.
            at_least: how many rows to read if they are good, even past the budget; of more a multiple of it is read.
            budget: how many bytes to read at the most beyond that.

        Returns:
            Lines from `first` on, their newlines included. Fewer than `at_least`, but never none, where a bad row
            follows, and a single one where rows are large. ChunkCorrupt is raised if row `first` is bad.
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
            # The quick way for good rows: split at newlines, and let the digests say whether those are the rows.
            lines = BytesIO(data).readlines()
            if b"".join(map(_digest, lines)) == self._digests[8 * first : 8 * stop]:
                return lines
        cuts = [offset - start for offset in offsets[first : stop + 1]]
        lines = [data[cut:end] for cut, end in pairwise(cuts)]
        return lines[: good_until(len(lines), lambda at: self.check(lines[at], first + at))]

    def parse(self, lines: list[bytes], first: int) -> list[dict[str, Any]]:
        """Parses checked lines, `first` being the row of the first one, and puts their arrays into the rows.

        Returns fewer rows than lines, but never none, where a bad one follows. If the first one is no JSON object, or
        its arrays are bad, it raises RowInvalid or ChunkCorrupt.
        """
        rows = parse_lines(lines)
        if not rows:
            rows = [self._parse(lines[0], first)]
            with contextlib.suppress(RowInvalid):
                rows.extend(self._parse(line, first + 1 + i) for i, line in enumerate(lines[1:]))
        if self.arrays is None:
            return rows
        return rows[: good_until(len(rows), lambda at: self.fill(rows[at], lines[at], first + at))]

    def fill(self, parsed: dict[str, Any], line: bytes, row: int) -> None:
        """Puts the arrays of a row into their places. Raises as `parse` does."""
        if self.arrays is None or not may_hold_arrays(line):
            return
        try:
            fill_row(parsed, self.arrays.read(row))
        except RowInvalid as cause:
            raise self._invalid(cause, line, row) from None

    def line(self, row: int) -> bytes:
        """Reads and checks the bytes of one row, its newline included. Raises as `lines` does."""
        line = self._read(self._offsets[row], self._check_size(row))
        self.check(line, row)
        return line

    def place(self, row: int) -> RowPlace | None:
        """Returns where a row lies, for another process to read it again.

        None where nobody took digests, and of a chunk of an object store: its copy may be gone by then.
        """
        if self._digests is None or isinstance(self.path, UrlPath):
            return None
        start, stop = self._offsets[row : row + 2]
        digest = self._digests[8 * row : 8 * row + 8]
        return RowPlace(os.path.abspath(self.path), self.number, row, start, stop - start, digest)

    def read_into(self, memory: memoryview) -> None:
        """Reads the whole file into u8 of shape (size,). Its rows are not checked yet: see `spans` and `check`."""
        done = self._file.read_into(memory, 0)
        if done < len(memory):
            raise self._ends_at(done)

    def spans(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64] | None]:
        """Returns where rows, in any order, start and stop in the file, and the bits of their digests if any."""
        offsets = np.frombuffer(self._offsets, dtype=np.uint64)
        digests = None if self._digests is None else np.frombuffer(self._digests, dtype=np.int64)[rows]
        return offsets[rows], offsets[rows + 1], digests

    def _check_size(self, row: int) -> int:
        """Returns the bytes of a row. Raises ChunkCorrupt: they cannot be read into memory."""
        size = self._offsets[row + 1] - self._offsets[row]
        if size > MAX_ROW_BYTES:
            raise self._corrupt(row, f"a row of at most {MAX_ROW_BYTES} bytes", f"one of {size}")
        return size

    def _read(self, start: int, size: int) -> bytes:
        data = self._file.read(start, size)
        if len(data) < size:
            raise self._ends_at(start + len(data))
        return data

    def _ends_at(self, byte: int) -> ChunkCorrupt:
        return self._corrupt(None, f"{self._offsets[-1]} bytes", f"the end of the file at byte {byte}")

    def check(self, line: bytes, row: int) -> None:
        """Checks the bytes of a row. Raises as `lines` does."""
        if self._digests is None:
            # Nobody has checked this row yet, so it is held to what a producer of ours would publish.
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
            # With blank lines before it a row is further down than its own number says.
            blanks = line[: len(line) - len(line.lstrip(_BLANKS))]
            byte, number, start = byte + len(blanks), 1 + blanks.count(b"\n"), self._offsets[row]
            for at in range(0, start, _SCAN_BYTES):
                number += self._read(at, min(_SCAN_BYTES, start - at)).count(b"\n")
        return RowInvalid(
            f"{self.path}: row {row} (line {number}, byte {byte}): {cause.reason}",
            reason=cause.reason,
            file=str(self.path),
            line=number,
            byte=byte,
        )

    def _corrupt(self, row: int | None, expected: str, actual: str) -> ChunkCorrupt:
        byte = None if row is None else self._offsets[row]
        published = MARKED if self._digests is None else SEALED
        return damaged(self.path, self.number, row, byte, expected, actual, published=published)


def open_sealed(path: Path, seal: Seal) -> Chunk:
    """Opens a chunk that has a seal. Raises as `open_file` and `Chunk`."""
    # The rows first: who looks for what is missing asks for them first, too.
    file = open_file(path)
    return open_copy(file, seal, None if seal.arrays is None else open_file(path.parent / arrays_name(seal.chunk)))


def open_copy(file: OpenFile, seal: Seal, arrays: OpenFile | None = None) -> Chunk:
    """Returns a chunk whose data file, and side file if it has one, are open. Raises as `Chunk` and `ChunkArrays`."""
    side = None if arrays is None or seal.arrays is None else ChunkArrays(arrays, seal.chunk, seal.arrays)
    # array indexes to plain ints three times faster than numpy.
    offsets, digests = array("Q", seal.offsets.astype("=u8").tobytes()), seal.digests.astype(">u8").tobytes()
    return Chunk(file, seal.chunk, offsets, digests, side, DealtByCost.read(seal.source))


def open_foreign(path: Path, number: int) -> Chunk:
    """Opens a chunk with an empty marker: finds its rows by one scan of the file, in bounded memory.

    Blank lines count as part of the row before them, in front of all rows as part of the first. A byte order mark at
    the start is passed over. The last line may lack its newline. Raises as `open_file`, and ChunkCorrupt: the file has
    grown or shrunk meanwhile, or a line in it has no end.
    """

    def opened() -> Chunk:
        file = open_file(path)
        return Chunk(file, number, _find_rows(file, number), None)

    return again_if_stale(opened)


def _find_rows(file: OpenFile, number: int) -> array[int]:
    """Returns where the rows of a file start, and the end of the last one. Raises ChunkCorrupt: a line has no end."""
    position = len(_BOM) if os.pread(file.fd, len(_BOM), 0) == _BOM else 0
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
            blank = True
            start = newline + 1
        blank = blank and not block[start:].strip(_BLANKS)
        position += len(block)
        if position - offsets[-1] > MAX_ROW_BYTES:
            # The zeros of a hole, for instance, of which there may be more than can ever be read.
            expected = f"a line of at most {MAX_ROW_BYTES} bytes"
            row, byte = len(offsets) - 1, offsets[-1]
            raise damaged(file.path, number, row, byte, expected, "no end of it", published=MARKED)
    if blank:
        offsets[-1] = position
    else:
        offsets.append(position)
    return offsets


def read_dealt(directory: Path, chunk: int) -> DealtByCost | None:
    """Returns how the rows of a published chunk of ours were dealt by cost; None if they were not."""
    return DealtByCost.read(read_seal(directory, chunk).source)


class OpenChunks:
    """The open chunks of one reader; those that were not used for longest are closed.

    Of an object store (`cached`) no more are held than are needed, as each is kept in the cache meanwhile: one at
    first, and twice as many whenever a chunk has to be opened again that was closed only just before. With `arrays` a
    chunk has two files, and a row twice as many numbers.

    Several threads may share one, and it may be forked at any time: each step is atomic, so there is no lock. Open
    files stay behind when it is pickled or copied.
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
        return self.__dict__ | {"_chunks": {}, "_closed": self._closed.copy()}

    def __len__(self) -> int:
        return len(self._chunks)

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
