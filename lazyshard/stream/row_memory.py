"""Memory for the arrays of rows: what nobody looks at any more is used again.

To touch memory for the first time costs several times as much as to read a file's bytes into it: the kernel clears it,
page by page, while it is being filled. What large rows lie in is given back to the kernel when they are dropped, so
each row would pay for that anew. Here a row's memory is kept when the row is dropped, and another one is read into it.

That nobody looks at it is known from its count of references: every array that shares the memory of another one holds a
reference to it, and so does whatever is made of such an array, as a tensor, a memoryview or a DLPack capsule. No array
is told when it is dropped, and what is kept for ever is simply never used again.
"""

from __future__ import annotations

import sys
from collections import deque
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

KEPT_BYTES: Final = 64 << 20
"""What a process keeps at the most: a batch of 8 rows of 8 MiB, of which it held as much before."""

LEAST_BYTES: Final = 128 << 10
"""Smaller memory is kept by the C library already: from this size on, that asks the kernel each time (glibc's
M_MMAP_THRESHOLD)."""

_LAST: Final = 3
_TRIES: Final = 16
"""How many are looked at for one that is free, of those that were taken last and first: 2 microseconds at the most."""

_PROBE: Final = [np.empty(0, np.uint8)]
_ALONE: Final = sys.getrefcount(_PROBE[0])
"""References to an array that a container alone holds, counted as `RowMemory` counts them."""


class RowMemory:
    """Memory of rows, kept for others.

    Threads may share one, and a process that was forked goes on with a copy of its own. Who finds another thread in it
    gets new memory instead of waiting.

    Args:
        limit: bytes to keep at the most. What is in use counts; beyond it the oldest is forgotten, and goes back to
            the kernel when it is dropped.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._lock = Lock()
        self._buffers: deque[Bytes] = deque()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes that are kept, in use or not."""
        return self._size

    def take(self, size: int) -> Bytes:
        """Returns memory that nobody else looks at, with anything in it.

        Args:
            size: in bytes.

        Returns:
            u8 of shape (size,). Up to a quarter more is held with it.
        """
        # Never waits: a lock that a thread holds while its process forks stays locked in the child for ever.
        if not LEAST_BYTES <= size <= self._limit or not self._lock.acquire(blocking=False):
            return np.empty(size, np.uint8)
        try:
            found = self._free(size)
            return (self._new(size) if found is None else found)[:size]
        finally:
            self._lock.release()

    def _free(self, size: int) -> Bytes | None:
        """Returns memory of about this size that nobody looks at, if some is found soon."""
        buffers = self._buffers
        # What was taken last is still in the CPU's caches: who looks at one row at a time has dropped it already.
        for back in range(-1, -1 - min(len(buffers), _LAST), -1):
            if self._fits(back, size):
                found = buffers[back]
                del buffers[back]
                buffers.append(found)
                return found
        for _ in range(min(len(buffers), _TRIES)):
            buffers.rotate(-1)
            if self._fits(-1, size):
                return buffers[-1]
        return None

    def _fits(self, at: int, size: int) -> bool:
        buffers = self._buffers
        return size <= buffers[at].size <= size + size // 4 and sys.getrefcount(buffers[at]) == _ALONE

    def _new(self, size: int) -> Bytes:
        # Rounded up by an eighth at the most, so that rows of nearly the same size fit into each other's.
        step = 1 << (size.bit_length() - 4)
        made = np.empty(-(-size // step) * step, np.uint8)
        self._buffers.append(made)
        self._size += made.size
        while self._size > self._limit:
            self._size -= self._buffers.popleft().size
        return made


ROW_MEMORY: Final = RowMemory()
"""This process's."""
