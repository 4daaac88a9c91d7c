"""Deletes chunks in the store, copies consumers from there into the spool, and knows what is still to be put.

The order of deletion is that of a directory: first `retired.json`, then for each chunk its seal before its data and
side file. Right before the mark the consumers are looked at once more: one that has come since, or has gone back, keeps
its chunks. All calls of the store are made by the shipper's thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lazyshard.format.cursor import CURSOR_SUFFIX
from lazyshard.format.names import CURSORS, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.format.records import Retired
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.objects import ObjectStore
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.manifest import read_manifest
from lazyshard_producer.holding.shelf import Shelf, SideFiles, Stock
from lazyshard_producer.shipping.store import Found, Tries, get, names_in, replace


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


PULL_S: Final = 1.0
"""How old what is known of the consumers may get while somebody asks for it: a listing, and a request for each."""

_AT_ONCE: Final = 8
"""Chunks that are deleted before the next one is put: each is two requests."""


class Retiring:
    """Consumers and deletion. What is said to be for the thread calls the store.

    Args:
        check_owner: raises where the stream is another producer's now.
    """

    def __init__(
        self,
        store: ObjectStore,
        tries: Tries,
        check_owner: Callable[[], None],
        stream: Path,
        backlog: Backlog,
        found: Found,
    ) -> None:
        self._store = store
        self._tries = tries
        self._check_owner = check_owner
        self._stream = stream
        self._backlog = backlog
        self._stream_id = None if found.manifest is None else found.manifest.stream_id
        self._side_files = SideFiles(stream)
        self._leftovers = list(found.listing.leftovers)
        self._marked = self._deleted = self._wanted = found.listing.first
        self._asked = False
        self._pulled_at = self._refused_at = float("-inf")

    @property
    def first(self) -> int:
        """The number of the oldest chunk that is not retired."""
        return self._marked

    def ask(self) -> None:
        """Says that somebody wants to know of the consumers."""
        self._asked = True

    def want(self, chunks_before: int) -> None:
        """Asks for the chunks of [0, chunks_before) to be deleted."""
        self._wanted = max(self._wanted, chunks_before)

    def pull(self) -> None:
        """For the thread: copies the files of consumers into the spool. Raises as `Tries` does."""
        there = {name for name in names_in(self._store, self._tries, CURSORS) if _is_consumers(name)}
        folder = self._stream / CURSORS
        folder.mkdir(exist_ok=True)
        for name in sorted(there):
            data = get(self._store, self._tries, f"{CURSORS}/{name}")
            if data is not None:
                publish_bytes(data, folder / name, folder / f".{secrets.token_hex(8)}", durable=False)
        for path in folder.iterdir():
            if path.name not in there:
                remove(path)
        self._pulled_at = time.monotonic()

    def go_on(self) -> None:
        """For the thread: does a part of what is to be done. Raises as `Tries` and `check_owner` do."""
        if self._asked and time.monotonic() - self._pulled_at >= PULL_S:
            self._asked = False
            self.pull()
        if self._leftovers:
            self._check_owner()
            left, self._leftovers = self._leftovers[: 2 * _AT_ONCE], self._leftovers[2 * _AT_ONCE :]
            for name in left:
                self._delete(name)
        if self._wanted > self._marked and time.monotonic() - self._refused_at >= PULL_S:
            self._mark()
        if self._deleted < self._marked:
            self._check_owner()
            for chunk in range(self._deleted, min(self._marked, self._deleted + _AT_ONCE)):
                self._delete(seal_name(chunk))
                self._delete(chunk_name(chunk))
                if self._side_files():
                    self._delete(arrays_name(chunk))
                self._deleted = chunk + 1

    def finish(self) -> None:
        """For the thread: does all of it."""
        self._refused_at = float("-inf")
        self.go_on()
        while self._leftovers or self._deleted < self._marked:
            self.go_on()

    def _mark(self) -> None:
        self.pull()
        shipped = self._backlog.shipped
        done = [consumer.chunks_before for consumer in list_consumers(self._stream, shipped)]
        target = min(self._wanted, shipped - 1, min(done, default=0))
        if target < self._wanted:
            # Not dropped: whoever asked counts it as done. A cursor may be ahead of what is known to be in the store.
            self._refused_at = time.monotonic()
        if target <= self._marked:
            return
        mark = Retired(self._id(), target, time.time())
        replace(self._store, self._tries, self._check_owner, RETIRED, mark.encode())
        self._marked = target

    def _id(self) -> str:
        if self._stream_id is None:
            manifest = read_manifest(self._stream, None)
            assert manifest is not None
            self._stream_id = manifest.stream_id
        return self._stream_id

    def _delete(self, name: str) -> None:
        self._tries(lambda: self._store.delete(name))


def _is_consumers(name: str) -> bool:
    return name.endswith(CURSOR_SUFFIX) and not name.startswith(".") and "/" not in name


class ObjectShelf(Shelf):
    """Chunks in an object store, the newest of them in a spool here too."""

    def __init__(self, url: str, stream: Path, backlog: Backlog, retiring: Retiring) -> None:
        super().__init__(stream, url)
        self._backlog = backlog
        self._retiring = retiring

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return self._retiring.first

    def visible(self, published: int) -> int:
        """Returns how many chunks are in the store."""
        return min(published, self._backlog.shipped)

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as they were last copied, and has them copied again within a moment."""
        self._retiring.ask()
        return super().consumers(published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Asks for chunks to be deleted, which is done within a moment, once the consumers were looked at again."""
        self._retiring.want(min(chunks_before, published - 1))

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Returns what the chunks [first, stop) take; always exact."""
        size, largest = self._backlog.total(first, stop), self._backlog.largest_in(first, stop)
        return Stock(first=first, stop=stop, size=size, largest=largest)

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk."""
        return self._backlog.size(chunk)

    def used_bytes(self, published: int) -> int:
        """Returns how many bytes the stream takes in the store and on its way."""
        return self._backlog.total(self.first(), published)

    def free_bytes(self) -> int | None:
        """Returns None: nobody knows."""
        return None
