"""Fetches the chunks that a process will come to next, while it reads those that it has."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

from lazyshard.errors import LazyShardError

_REMEMBERED: Final = 16
"""Chunks opened last, of which the distance is guessed; a window of more is opened in parts that tell the same."""


def guess_next(opened: Sequence[int], count: int) -> list[int]:
    """Returns the chunks that will be opened next, by those opened last; none as long as there was only one.

    A rank's chunks are a fixed distance apart, and a window of them is opened in any order: so what comes is behind the
    last of them, at the smallest distance that two of them have. (Where it is a multiple of the true one, what is
    guessed is the rank's as well.)

    Args:
        opened: numbers of chunks, in the order in which they were opened.
        count: how many to guess.
    """
    chunks = sorted(set(opened))
    if len(chunks) < 2:
        return []
    step = min(after - before for before, after in pairwise(chunks))
    return [chunks[-1] + step * (number + 1) for number in range(count)]


class ReadAhead:
    """A thread that fetches. One for each process; a fork begins with none.

    Args:
        fetch: fetches a chunk. What it raises is met again by who asks for that chunk.
        count: how many chunks to be ahead; 0 fetches none.
    """

    def __init__(self, fetch: Callable[[int], None], count: int) -> None:
        self._fetch = fetch
        self._count = count
        self._opened: deque[int] = deque(maxlen=_REMEMBERED)
        self._wanted: queue.SimpleQueue[list[int] | None] | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the thread behind."""
        return self.__dict__ | {"_wanted": None, "_pid": 0}

    def opened(self, chunk: int) -> None:
        """Notes that a chunk was opened, and has those fetched that come next."""
        self._opened.append(chunk)
        wanted = guess_next(self._opened, self._count)
        if not wanted:
            return
        if self._wanted is None or self._pid != os.getpid():
            self._pid, self._wanted = os.getpid(), queue.SimpleQueue()
            # It ends with its reader.
            weakref.finalize(self, self._wanted.put, None)
            # A daemon: what it is fetching when the process ends is fetched anew by whoever wants it.
            threading.Thread(
                target=_run, args=(self._wanted, weakref.ref(self)), name="lazyshard-read-ahead", daemon=True
            ).start()
        self._wanted.put(wanted)

    def fetch(self, chunk: int) -> bool:
        """Fetches a chunk; returns whether that went well."""
        try:
            self._fetch(chunk)
        except (LazyShardError, OSError):
            # Not published yet, most often. Whoever comes to it meets the same.
            return False
        return True


def _run(wanted: queue.SimpleQueue[list[int] | None], owner: weakref.ref[ReadAhead]) -> None:
    # Held while it fetches, and not while it waits: the reader may be gone by then.
    while (chunks := wanted.get()) is not None:
        ahead = owner()
        for chunk in chunks:
            # The reader is on: what it comes to next is more urgent.
            if ahead is None or not wanted.empty() or not ahead.fetch(chunk):
                break
        ahead = None
