"""Rows that lie scattered over a few chunks, as those of a shuffled window do.

One system call and a dozen steps of Python for each row is what makes such reading slow. So chunks of which a good part
will be read soon are **held**: read as a whole, in one call, and cut into rows where they lie, checked each time.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt, LazyShardError
from lazyshard.stream.chunk import LARGE_ROW_BYTES, good_until
from lazyshard.stream.reader import StreamReader

_GRAIN: Final = 256 << 10
"""Memory is had in multiples of it, so that chunks of about the same size fit into each other's."""

_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked process has its own copy

HELD_BYTES: Final = 64 << 20
"""Bytes of chunks held by a reader at the most. Where those of a window are more, rows are read one by one."""

_WORTH: Final = 4  # a chunk is held if what is to be read of it soon is at least so manieth a part of it

_digest = xxhash.xxh3_64_digest


@dataclass(frozen=True, slots=True)
class Held:
    """Samples whose chunks are held, and where their rows lie."""

    samples: npt.NDArray[np.int64]
    row_bytes: int  # the mean size of their rows, at least 1
    spans: npt.NDArray[np.int64]  # of shape (3, samples): chunk, the row's first byte, the byte before which it stops
    digests: bytes | None  # 8 bytes of each row; None where nobody took any
    chunks: frozenset[int]


class ScatteredReader:
    """Reads rows in any order. Safe under fork; several threads may share one."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        # What is held, but for what a thread has taken out to read from it: taking out is one step, and so each has its
        # own. A lock could be left locked by a fork.
        self._idle: list[HeldChunks] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader, "_idle": []}

    def prepare(self, samples: npt.NDArray[np.int64]) -> Held | None:
        """Says which published samples will be read soon, at least one.

        Returns what `lines` reads, if all their chunks are to be held: they fit into `HELD_BYTES`, a good part of them
        is to be read, and their rows are not large. Otherwise None, and what is held is let go; so too where a chunk
        cannot be opened: who comes to its rows is told.
        """
        try:
            found = self._find(samples)
        except (LazyShardError, OSError):
            found = None
        if found is None:
            self._idle = []
        return found

    def _find(self, samples: npt.NDArray[np.int64]) -> Held | None:
        numbers, rows = np.divmod(samples, self._reader.samples_per_chunk)
        spans = np.empty((3, len(samples)), dtype=np.int64)
        spans[0] = numbers
        digests: npt.NDArray[np.int64] | None = np.empty(len(samples), dtype=np.int64)
        whole = 0
        chunks = frozenset(np.unique(numbers).tolist())
        for number in sorted(chunks):
            chunk = self._reader.chunk(number)
            whole += chunk.size
            if whole > HELD_BYTES:
                return None
            places = np.flatnonzero(numbers == number)
            spans[1, places], spans[2, places], sealed = chunk.spans(rows[places])
            if sealed is None or digests is None:
                digests = None
            else:
                digests[places] = sealed
        wanted = int((spans[2] - spans[1]).sum())
        row_bytes = max(1, wanted // len(samples))
        if whole > _WORTH * wanted or row_bytes > LARGE_ROW_BYTES:
            return None
        return Held(samples, row_bytes, spans, None if digests is None else digests.tobytes(), chunks)

    def lines(self, held: Held, first: int, stop: int) -> list[bytes]:
        """Returns the checked lines of the samples at the places [first, stop) of what `prepare` has returned.

        Fewer, but never none, where a bad row follows. Their chunks are held from now on.

        Raises:
            ChunkCorrupt, RowInvalid: the first one is bad.
            ChunkRetired, ChunkMissing, OSError: as `StreamReader.lines_published`.
        """
        try:
            chunks = self._idle.pop()
        except IndexError:
            chunks = HeldChunks()
        try:
            return self._cut(chunks, held, first, stop)
        finally:
            self._idle.append(chunks)

    def _cut(self, chunks: HeldChunks, held: Held, first: int, stop: int) -> list[bytes]:
        numbers, starts, stops = held.spans[:, first:stop].tolist()
        data = chunks.data
        try:
            lines = [data[number][start:end] for number, start, end in zip(numbers, starts, stops, strict=True)]
        except KeyError:
            return self._cut(chunks, held, first, first + self._hold(chunks, held, numbers))
        if held.digests is not None and b"".join(map(_digest, lines)) == held.digests[8 * first : 8 * stop]:
            return lines
        size, samples = self._reader.samples_per_chunk, held.samples[first:stop].tolist()

        def check(at: int) -> None:
            number, row = divmod(samples[at], size)
            self._reader.chunk(number).check(lines[at], row)

        return lines[: good_until(len(lines), check)]

    def _hold(self, chunks: HeldChunks, held: Held, numbers: list[int]) -> int:
        """Reads chunks; returns how many from the first on are held, and raises if that one cannot be."""
        for place, number in enumerate(numbers):
            if number in chunks.data:
                continue
            try:
                chunk = self._reader.chunk(number)
                chunks.read(number, chunk.size, held.chunks, partial(self._reader.read_published_into, chunk))
            except ChunkCorrupt:
                if not place:
                    raise
                return place
        return len(numbers)


class HeldChunks:
    """The whole chunks that one thread reads from, in memory that is used over and over.

    Memory of its own would not fit the next one, whose size differs a little, and would spread out until most of it
    is cold in the processor's caches: 2 to 4 % of what a row of a blend costs.

    Attributes:
        data: by chunk number; the file's bytes come first, what follows them is of no meaning. A slice is bytes.
    """

    def __init__(self) -> None:
        self.data: dict[int, mmap.mmap] = {}
        self._spare: list[mmap.mmap] = []

    def read(self, number: int, size: int, wanted: Collection[int], read_into: Callable[[memoryview], None]) -> None:
        """Reads a chunk of so many bytes, over one that is not `wanted` any more if there is one.

        What `read_into` raises is raised, and the chunk is not held.
        """
        for done in [held for held in self.data if held not in wanted]:
            self._spare.append(self.data.pop(done))
        memory = self._memory(size)
        try:
            with memoryview(memory) as whole, whole[:size] as view:
                read_into(view)
        except BaseException:
            self._spare.append(memory)
            raise
        self.data[number] = memory

    def _memory(self, size: int) -> mmap.mmap:
        asked = max(-(-size // _GRAIN), 1) * _GRAIN
        for place, memory in enumerate(self._spare):
            if size <= len(memory) <= 2 * asked:
                return self._spare.pop(place)
        # One is given up for each that is had, so that there is never more than is held of one window.
        del self._spare[-1:]
        return mmap.mmap(-1, asked, _FLAGS)
