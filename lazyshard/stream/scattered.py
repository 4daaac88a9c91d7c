"""Reads rows that are scattered over a few chunks, like the rows of a shuffled window."""

from __future__ import annotations

import contextlib
import mmap
import sys
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import xxhash

from lazyshard.errors import ChunkCorrupt, LazyShardError
from lazyshard.memory import ALONE, raise_if_short
from lazyshard.part import Int64Array
from lazyshard.stream.chunk import LARGE_ROW_BYTES, good_until

if TYPE_CHECKING:
    from lazyshard.stream.reader import StreamReader

HELD_BYTES: Final = 64 << 20
"""Maximum bytes of chunks that a `ScatteredReader` holds. If a window has more, its rows are read one by one."""


class Held(NamedTuple):
    """Samples whose chunks are held, and the places of their rows."""

    samples: Int64Array
    row_bytes: int  # the mean size of their rows, at least 1
    spans: Int64Array  # of shape (3, samples): chunk, first byte of the row, byte at which it ends (exclusive)
    digests: bytes | None  # 8 bytes of each row; None for a foreign stream
    chunks: frozenset[int]


class ScatteredReader:
    """Reads rows that are scattered over a few chunks, like the rows of a shuffled window.

    One system call per row makes such reads slow. So chunks that will soon be read in large part are **held**: read
    whole and cut into rows, which are checked each time. Safe under fork; may be shared by threads.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        # Whole chunks, and maybe more bytes; only ever replaced, so no thread changes what another reads.
        self._held: dict[int, mmap.mmap] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader, "_held": {}}

    def prepare(self, samples: Int64Array) -> Held | None:
        """Takes the published samples, at least one, that will be read soon; returns the argument for `lines`.

        Returns None, and releases the held chunks, unless the chunks fit into `HELD_BYTES`, at least a quarter of their
        bytes will be read, their rows are not large, and each chunk can be opened: reading its rows reports the error.
        """
        with contextlib.suppress(LazyShardError, OSError):
            if (found := self._find(samples)) is not None:
                return found
        self._held = {}
        return None

    def _find(self, samples: Int64Array) -> Held | None:
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
        """Returns the checked lines of the samples at the places [first, stop) of what `prepare` returned.

        Returns fewer, but at least one, if a bad row follows; their chunks are held from now on. Raises ChunkCorrupt,
        RowInvalid: the first row is bad; or as `StreamReader.lines_published`.
        """
        numbers, starts, stops = held.spans[:, first:stop].tolist()
        whole = self._held
        try:
            lines = [whole[number][start:end] for number, start, end in zip(numbers, starts, stops, strict=True)]
        except KeyError:
            whole = {}  # a reference here would keep chunks that are no longer needed while others are read
            whole = self._hold(held, numbers)
            spans = takewhile(lambda span: span[0] in whole, zip(numbers, starts, stops, strict=True))
            lines = [whole[number][start:end] for number, start, end in spans]
        digests = None if held.digests is None else held.digests[8 * first : 8 * (first + len(lines))]
        if digests is not None and b"".join(map(xxhash.xxh3_64_digest, lines)) == digests:
            return lines
        size, samples = self._reader.samples_per_chunk, held.samples[first:stop].tolist()
        rows = [divmod(sample, size) for sample in samples]
        return lines[: good_until(len(lines), lambda at: self._reader.chunk(rows[at][0]).check(lines[at], rows[at][1]))]

    def _hold(self, held: Held, numbers: list[int]) -> dict[int, mmap.mmap]:
        """Holds chunks up to the first bad one; raises if that is the first of all."""
        whole = {number: data for number, data in self._held.items() if number in held.chunks}
        spare = [data for number, data in self._held.items() if number not in held.chunks]
        self._held = whole.copy()
        for number in dict.fromkeys(numbers):
            if number not in whole:
                try:
                    chunk = self._reader.chunk(number)
                    memory = _take(spare, chunk.offset(len(chunk)))
                    self._reader.read_from(chunk, partial(chunk.read_whole, memory))
                    whole[number] = memory
                except ChunkCorrupt:
                    if number == numbers[0]:
                        raise
                    break
        self._held = whole
        return whole


def _take(spare: list[mmap.mmap], size: int) -> mmap.mmap:
    """Returns memory for so many bytes: that of a released chunk if no other thread reads from it.

    To touch new memory costs more than to read a chunk into it. Slices of it are bytes of their own.
    """
    for place in range(len(spare)):
        if size <= len(spare[place]) <= 2 * size + 4096 and sys.getrefcount(spare[place]) == ALONE:
            return spare.pop(place)
    del spare[-1:]  # one is released for each that is made, so that there are never more than two windows need
    step = 1 << max(12, size.bit_length() - 4)  # so that chunks of about one size fit into each other's
    try:
        return mmap.mmap(-1, size + -size % step, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise_if_short(error)
        raise
