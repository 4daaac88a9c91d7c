"""`OpenChunks`: which chunks a reader holds open, and for how long."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from lazyshard.stream.chunk import Chunk

OPEN_CHUNKS: Final = 256
"""Chunks held open at the most: a quarter of the usual limit of 1,024 descriptors."""

OPEN_ROWS: Final = 1 << 20
"""Rows of all chunks held open, unless a single chunk has more: their offsets and digests take 16 bytes a row."""


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
