"""Rows that lie scattered over a few chunks, as those of a shuffled window do."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from lazyshard.errors import ChunkCorrupt, LazyShardError
from lazyshard.stream.chunk import LARGE_ROW_BYTES, Numbers, good_until

if TYPE_CHECKING:
    from lazyshard.stream.reader import StreamReader

HELD_BYTES: Final = 64 << 20
"""Bytes of chunks that a `ScatteredReader` holds. Where those of a window are more, rows are read one by one."""


@dataclass(frozen=True, slots=True)
class Held:
    """Samples whose chunks are held, and where their rows lie."""

    samples: Numbers
    row_bytes: int  # the mean size of their rows, at least 1
    spans: Numbers  # of shape (3, samples): chunk, the row's first byte, the byte before which it stops
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

    def prepare(self, samples: Numbers) -> Held | None:
        """Says which published samples will be read soon, at least one; returns what `lines` reads.

        None, and what is held is let go, unless their chunks fit into `HELD_BYTES`, a quarter of them at least is to be
        read, their rows are not large, and each chunk can be opened: who comes to its rows is told.
        """
        with contextlib.suppress(LazyShardError, OSError):
            if (found := self._find(samples)) is not None:
                return found
        self._held = {}
        return None

    def _find(self, samples: Numbers) -> Held | None:
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
        if digests is not None and b"".join(map(xxhash.xxh3_64_digest, lines)) == digests:
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
