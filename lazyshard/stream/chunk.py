"""A published chunk, open for reading: rows by their offsets, each checked against its digest before anybody sees it.

Of a chunk without a seal, which another program has written, one scan finds the rows. Files are read with `pread`,
never mapped: a mapped file that is cut short or fails on a network filesystem kills the process with SIGBUS.
"""

from __future__ import annotations

import codecs
import contextlib
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt, LazyShardError, RowInvalid
from lazyshard.format.arrays import MAX_ROW_BYTES, fill_row, may_hold_arrays
from lazyshard.format.records import arrays_name
from lazyshard.format.row import check_row, parse_lines, parse_row
from lazyshard.format.seal import DealtByCost, Seal
from lazyshard.store.files import OpenFile, UrlPath, again_if_stale, open_file, read_seal
from lazyshard.stream.chunk_files import ChunkArrays, FileOfRows, RowPlace, damaged

if TYPE_CHECKING:
    from lazyshard.stream.reader import StreamReader
    from lazyshard.stream.stream import Stream

LARGE_ROW_BYTES: Final = 64 << 10
"""Rows above this are read one by one, and parsed before the next one is read: to cut them out of a larger piece is a
copy more, and to hold several is memory that is touched for the first time. Both cost more than a system call."""

HELD_BYTES: Final = 64 << 20
"""Bytes of chunks that a `ScatteredReader` holds. Where those of a window are more, rows are read one by one."""

OPEN_CHUNKS: Final = 256  # chunks held open at the most: a quarter of the usual limit of 1,024 descriptors
# Rows of all chunks held open, unless a single chunk has more: their offsets and digests take 16 bytes a row
OPEN_ROWS: Final = 1 << 20

_SCAN_BYTES: Final = 1 << 20
_BLANKS: Final = b" \t\r\n"  # what JSON takes for white space

_Numbers = npt.NDArray[np.int64]
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


class Chunk(FileOfRows):
    """An open chunk: its data file, its side file, None in a stream whose rows hold no arrays, and how it was dealt."""

    arrays: ChunkArrays | None = None
    dealt: DealtByCost | None = None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def offset(self, row: int) -> int:
        """Byte at which a row starts."""
        return self._offsets[row]

    def identity(self) -> bytes:
        """Returns 16 bytes that tell its rows and arrays from others; without digests, where its rows lie alone."""
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
        lines = [data[begin - start : end - start] for begin, end in pairwise(offsets[first : stop + 1])]
        return lines[: good_until(len(lines), lambda at: self.check(lines[at], first + at))]

    def parse(self, lines: list[bytes], first: int) -> list[dict[str, Any]]:
        """Parses checked lines, `first` being the row of the first one, and puts their arrays into the rows.

        Returns fewer rows than lines, but never none, where a bad one follows. Raises if the first one is bad.
        """
        rows = parse_lines(lines)
        if not rows:
            rows = [self._parse(lines[0], first)]
            with contextlib.suppress(RowInvalid):
                rows.extend(self._parse(line, first + 1 + i) for i, line in enumerate(lines[1:]))
        if (arrays := self.arrays) is None:
            return rows

        def fill(at: int) -> None:
            if may_hold_arrays(lines[at]):
                try:
                    fill_row(rows[at], arrays.read_rows(first + at, first + at + 1))
                except RowInvalid as cause:
                    raise self._invalid(cause, lines[at], first + at) from None

        return rows[: good_until(len(rows), fill)]

    def line(self, row: int) -> bytes:
        """Reads and checks the bytes of one row, its newline included. Raises as `lines` does."""
        line = self._read(self._offsets[row], self._check_size(row))
        self.check(line, row)
        return line

    def place(self, row: int) -> RowPlace | None:
        """Returns where a row lies, for another process; None without digests, and of a store, whose copy may go."""
        if self._digests is None or isinstance(self.path, UrlPath):
            return None
        start, stop = self._offsets[row : row + 2]
        digest = self._digests[8 * row : 8 * row + 8]
        return RowPlace(os.path.abspath(self.path), self.number, row, start, stop - start, digest)

    def read_whole(self) -> bytes:
        """Reads the whole file. Its rows are not checked yet: see `spans` and `check`."""
        return self._read(0, self._offsets[-1])

    def spans(self, rows: _Numbers) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], _Numbers | None]:
        """Returns where rows, in any order, start and stop in the file, and the bits of their digests if any."""
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
        what = f"{self.path}: row {row} (line {number}, byte {byte}): {cause.reason}"
        return RowInvalid(what, reason=cause.reason, file=str(self.path), line=number, byte=byte)


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
    chunk = Chunk(file, seal.chunk, offsets, digests)
    chunk.arrays, chunk.dealt = side, DealtByCost.read(seal.source)
    return chunk


def open_foreign(path: Path, number: int) -> Chunk:
    """Opens a chunk with an empty marker: finds its rows by one scan of the file, in bounded memory.

    Blank lines count to the row before them, in front of all rows to the first; a byte order mark at the start is
    skipped. Raises as `open_file`, and ChunkCorrupt: the file has changed meanwhile, or a line has no end.
    """

    def opened() -> Chunk:
        file = open_file(path)
        return Chunk(file, number, _find_rows(file, number), None)

    return again_if_stale(opened)


def _find_rows(file: OpenFile, number: int) -> array[int]:
    """Returns where the rows of a file start, and the end of the last one. Raises ChunkCorrupt: a line has no end."""
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
            # The zeros of a hole, for instance, of which there may be more than can ever be read.
            row, expected = len(offsets) - 1, f"a line of at most {MAX_ROW_BYTES} bytes"
            raise damaged(file.path, number, row, offsets[-1], expected, "no end of it", sealed=False)
    if blank:
        offsets[-1] = position
    else:
        offsets.append(position)
    return offsets


class OpenChunks(dict[int, Chunk]):
    """The open chunks of one reader, in the order of use; those that were not used for longest are closed.

    Of an object store no more are held than are needed, as each is kept in the cache meanwhile: one at first, and twice
    as many whenever a chunk has to be opened again that was closed only just before. Several threads may share one, and
    it may be forked at any time: each step is atomic. (An OrderedDict breaks when the end of a value lets a thread in.)
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        files = 1 + stream.arrays
        self._by_rows = max(1, OPEN_ROWS // files // stream.samples_per_chunk)
        self._grows = stream.mirror is not None
        self._most = 1 if self._grows else min(OPEN_CHUNKS // files, self._by_rows)
        self._closed: deque[int] = deque(maxlen=2)

    def add(self, chunk: Chunk) -> None:
        """Takes a chunk that was opened and is about to be used; closes others for it, if there are too many."""
        if self._grows and chunk.number in self._closed:
            # It was closed too early: the reader goes to and fro between more of them.
            self._most = min(2 * self._most, OPEN_CHUNKS, self._by_rows)
            self._closed = deque(self._closed, maxlen=2 * self._most)
        self[chunk.number] = chunk
        for old in list(self)[: -self._most]:
            self.pop(old, None)
            self._closed.append(old)


def read_dealt(directory: Path, chunk: int) -> DealtByCost | None:
    """Returns how the rows of a published chunk of ours were dealt by cost; None if they were not."""
    return DealtByCost.read(read_seal(directory, chunk).source)


@dataclass(frozen=True, slots=True)
class Held:
    """Samples whose chunks are held, and where their rows lie."""

    samples: _Numbers
    row_bytes: int  # the mean size of their rows, at least 1
    spans: _Numbers  # of shape (3, samples): chunk, the row's first byte, the byte before which it stops
    digests: bytes | None  # 8 bytes of each row; None where nobody took any
    chunks: frozenset[int]


class ScatteredReader:
    """Reads rows that lie scattered over a few chunks, as those of a shuffled window do.

    A system call for each row is what makes that slow. So chunks of which a good part will be read soon are **held**:
    read whole, and cut into rows, checked each time. Safe under fork; several threads may share one.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._held: dict[int, bytes] = {}  # whole chunks, only ever replaced: no thread changes what another one reads

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader, "_held": {}}

    def prepare(self, samples: _Numbers) -> Held | None:
        """Says which published samples will be read soon, at least one; returns what `lines` reads.

        None, and what is held is let go, unless their chunks fit into `HELD_BYTES`, a quarter of them at least is to be
        read, their rows are not large, and each chunk can be opened: who comes to its rows is told.
        """
        with contextlib.suppress(LazyShardError, OSError):
            if (found := self._find(samples)) is not None:
                return found
        self._held = {}
        return None

    def _find(self, samples: _Numbers) -> Held | None:
        numbers, rows = np.divmod(samples, self._reader.samples_per_chunk)
        spans = np.empty((3, len(samples)), dtype=np.int64)
        spans[0] = numbers
        digests, whole = np.zeros(len(samples), dtype=np.int64), 0
        chunks = frozenset(np.unique(numbers).tolist())
        for number in sorted(chunks):
            chunk = self._reader.chunk(number)
            if (whole := whole + chunk.offset(len(chunk))) > HELD_BYTES:
                return None
            places = np.flatnonzero(numbers == number)
            spans[1, places], spans[2, places], sealed = chunk.spans(rows[places])
            if sealed is not None:
                digests[places] = sealed
        wanted = int((spans[2] - spans[1]).sum())
        row_bytes = max(1, wanted // len(samples))
        if whole > 4 * wanted or row_bytes > LARGE_ROW_BYTES:
            return None
        return Held(samples, row_bytes, spans, digests.tobytes() if self._reader.stream_id else None, chunks)

    def lines(self, held: Held, first: int, stop: int) -> list[bytes]:
        """Returns the checked lines of the samples at the places [first, stop) of what `prepare` has returned.

        Fewer, but never none, where a bad row follows; their chunks are held from now on. Raises ChunkCorrupt,
        RowInvalid: the first one is bad; or as `StreamReader.lines_published`.
        """
        numbers, starts, stops = held.spans[:, first:stop].tolist()
        whole = self._held
        try:
            lines = [whole[number][start:end] for number, start, end in zip(numbers, starts, stops, strict=True)]
        except KeyError:
            whole = {}  # kept here, what is not wanted any more would take its room until the others are read
            whole = self._hold(held, numbers)
            spans = takewhile(lambda span: span[0] in whole, zip(numbers, starts, stops, strict=True))
            lines = [whole[number][start:end] for number, start, end in spans]
        digests = None if held.digests is None else held.digests[8 * first : 8 * (first + len(lines))]
        if digests is not None and b"".join(map(_digest, lines)) == digests:
            return lines
        size, samples = self._reader.samples_per_chunk, held.samples[first:stop].tolist()
        rows = [divmod(sample, size) for sample in samples]
        return lines[: good_until(len(lines), lambda at: self._reader.chunk(rows[at][0]).check(lines[at], rows[at][1]))]

    def _hold(self, held: Held, numbers: list[int]) -> dict[int, bytes]:
        """Holds chunks up to the first that is bad; raises if that is the first of all."""
        whole = {number: data for number, data in self._held.items() if number in held.chunks}
        self._held = whole.copy()  # what is not wanted any more makes room
        for number in dict.fromkeys(numbers):
            if number not in whole:
                try:
                    chunk = self._reader.chunk(number)
                    whole[number] = self._reader.read_from(chunk, chunk.read_whole)
                except ChunkCorrupt:
                    if number == numbers[0]:
                        raise
                    break
        self._held = whole
        return whole
