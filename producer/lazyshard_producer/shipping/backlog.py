"""What is published in the spool and not in the store yet: counted by the run, worked off by the shipper's thread."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence


class Backlog:
    """Chunks on their way. For the run's thread and the shipper's.

    Args:
        shipped: how many chunks are in the store.
        sizes: bytes of each of them, by chunk number; 0 for those that are retired.
        size_here: returns the bytes of a chunk that is in the spool.
    """

    def __init__(self, shipped: int, sizes: Sequence[int], size_here: Callable[[int], int]) -> None:
        # Eight bytes a chunk: a stream of a million of them takes 8 MB.
        self._sizes = array("Q", sizes)
        self._size_here = size_here
        self._shipped = self._announced = shipped
        self._pending = 0
        self._largest = 0
        self._changed = threading.Condition()
        self._news = False

    @property
    def shipped(self) -> int:
        """How many chunks are in the store."""
        return self._shipped

    @property
    def announced(self) -> int:
        """How many chunks are published in the spool."""
        return self._announced

    @property
    def pending_bytes(self) -> int:
        """Bytes of the chunks on their way."""
        return self._pending

    @property
    def largest(self) -> int:
        """Bytes of the largest chunk so far."""
        return self._largest

    def announce(self, published: int) -> None:
        """Notes that so many chunks are published in the spool."""
        with self._changed:
            for chunk in range(self._announced, published):
                size = self._size_here(chunk)
                self._sizes.append(size)
                self._pending += size
                self._largest = max(self._largest, size)
            self._announced = max(self._announced, published)
            self._news = True
            self._changed.notify_all()

    def next(self) -> int | None:
        """Returns the number of the chunk that is to be put now, None if there is none."""
        return self._shipped if self._shipped < self._announced else None

    def put(self, chunk: int, size: int) -> None:
        """Notes that a chunk is in the store."""
        with self._changed:
            self._pending -= self._sizes[chunk]
            self._sizes[chunk] = size
            self._shipped = chunk + 1

    def size(self, chunk: int) -> int:
        """Returns the bytes of a chunk, of one that is retired what it had."""
        with self._changed:
            return self._sizes[chunk] if chunk < len(self._sizes) else 0

    def total(self, first: int, stop: int) -> int:
        """Returns the bytes of the chunks [first, stop)."""
        with self._changed:
            return sum(self._sizes[first:stop])

    def largest_in(self, first: int, stop: int) -> int:
        """Returns the bytes of the largest of the chunks [first, stop), 0 without any."""
        with self._changed:
            return max(self._sizes[first:stop], default=0)

    def when_empty(self, act: Callable[[], list[str]]) -> list[str]:
        """Returns what `act` returns, called while nothing can be announced; nothing where chunks are on their way."""
        with self._changed:
            return act() if self._shipped == self._announced else []

    def wake(self) -> None:
        """Ends a wait of the shipper's thread."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Waits until there is something to do, for so many seconds at the most."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, seconds)
            self._news = False
