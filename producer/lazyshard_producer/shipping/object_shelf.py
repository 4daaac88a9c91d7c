"""The chunks of a stream in an object store, and those on their way there; consumers and deletion.

The order of deletion is that of a directory: first `retired.json`, then for each chunk its seal before its data and
side file. Right before the mark the consumers are looked at once more: one that has come since, or has gone back, keeps
its chunks.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lazyshard.format.cursor import CURSOR_SUFFIX
from lazyshard.format.names import CURSORS, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.format.records import Retired
from lazyshard.inspection.survey import chunk_files
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.listing import read_manifest
from lazyshard_producer.holding import Shelf, Stock
from lazyshard_producer.shipping.store import Found, StreamStore

PULL_S: Final = 1.0  # how old what is known of the consumers may get: a listing, and a request for each
_AT_ONCE: Final = 8  # chunks that are deleted before the next one is put: each is two requests


class ObjectShelf(Shelf):
    """Chunks in an object store (`shipped`), those on their way there, and the newest one, in a spool (`announced`).

    For the run's thread and the shipper's. The latter alone calls `pull`, `go_on` and `finish`, which call the store.
    """

    def __init__(self, store: StreamStore, stream: Path, found: Found) -> None:
        super().__init__(stream, store.url)
        self._store = store
        self.shipped = self.announced = found.chunks
        self.pending_bytes = 0
        self.largest = 0
        # Eight bytes a chunk: a stream of a million of them takes 8 MB. 0 for those that are retired.
        self._sizes = array("Q", [0] * found.listing.first)
        for chunk in range(found.listing.first, found.chunks):
            self._sizes.append(sum(found.sizes.get(name, 0) for name in chunk_files(chunk, arrays=True)))
        self._changed = threading.Condition()
        self._news = False
        self._leftovers = list(found.listing.leftovers)
        self._marked = self._deleted = self._wanted = found.listing.first
        self._asked = False
        self._pulled_at = self._refused_at = float("-inf")

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return self._marked

    def visible(self, published: int) -> int:
        """Returns how many chunks are in the store."""
        return min(published, self.shipped)

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as they were last copied, and has them copied again within a moment."""
        self._asked = True
        return super().consumers(published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Asks for chunks to be deleted, which is done within a moment, once the consumers were looked at again."""
        self._wanted = max(self._wanted, min(chunks_before, published - 1))

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Returns what the chunks [first, stop) take; always exact."""
        sizes = self._sizes_of(first, stop)
        return Stock(first=first, stop=stop, size=sum(sizes), largest=max(sizes, default=0))

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk, of one that is retired what it had."""
        return sum(self._sizes_of(chunk, chunk + 1))

    def used_bytes(self, published: int) -> int:
        """Returns how many bytes the stream takes in the store and on its way."""
        return sum(self._sizes_of(self._marked, published))

    def free_bytes(self) -> int | None:
        """Returns None: nobody knows."""
        return None

    def _sizes_of(self, first: int, stop: int) -> array[int]:
        with self._changed:
            return self._sizes[first:stop]

    def announce(self, published: int) -> None:
        """Notes that so many chunks are published in the spool."""
        with self._changed:
            for chunk in range(self.announced, published):
                size = super().chunk_size(chunk)
                self._sizes.append(size)
                self.pending_bytes += size
                self.largest = max(self.largest, size)
            self.announced = max(self.announced, published)
            self.wake()

    def put(self, chunk: int, size: int) -> None:
        """Notes that a chunk is in the store."""
        with self._changed:
            self.pending_bytes -= self._sizes[chunk]
            self._sizes[chunk] = size
            self.shipped = chunk + 1

    def when_all_shipped(self, act: Callable[[], list[str]]) -> list[str]:
        """Returns what `act` returns, called while nothing can be announced; nothing where chunks are on their way."""
        with self._changed:
            return act() if self.shipped == self.announced else []

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

    def pull(self) -> None:
        """Copies the files of consumers into the spool."""
        names = self._store.names(CURSORS)
        there = {name for name in names if name.endswith(CURSOR_SUFFIX) and name[0] != "." and "/" not in name}
        folder = self.directory / CURSORS
        folder.mkdir(exist_ok=True)
        for name in sorted(there):
            data = self._store.get(f"{CURSORS}/{name}")
            if data is not None:
                publish_bytes(data, folder / name, folder / f".{secrets.token_hex(8)}", durable=False)
        for path in folder.iterdir():
            if path.name not in there:
                remove(path)
        self._pulled_at = time.monotonic()

    def go_on(self) -> None:
        """Does a part of what is to be done."""
        if self._asked and time.monotonic() - self._pulled_at >= PULL_S:
            self._asked = False
            self.pull()
        if self._leftovers:
            self._store.check_owner()
            left, self._leftovers = self._leftovers[: 2 * _AT_ONCE], self._leftovers[2 * _AT_ONCE :]
            for name in left:
                self._store.delete(name)
        if self._wanted > self._marked and time.monotonic() - self._refused_at >= PULL_S:
            self._mark()
        if self._deleted < self._marked:
            self._store.check_owner()
            for chunk in range(self._deleted, min(self._marked, self._deleted + _AT_ONCE)):
                self._store.delete(seal_name(chunk))
                self._store.delete(chunk_name(chunk))
                if self.has_arrays():
                    self._store.delete(arrays_name(chunk))
                self._deleted = chunk + 1

    def finish(self) -> None:
        """Does all of it."""
        self._refused_at = float("-inf")
        self.go_on()
        while self._leftovers or self._deleted < self._marked:
            self.go_on()

    def _mark(self) -> None:
        self.pull()
        shipped = self.shipped
        done = [consumer.chunks_before for consumer in list_consumers(self.directory, shipped)]
        target = min(self._wanted, shipped - 1, min(done, default=0))
        if target < self._wanted:
            # Not dropped: whoever asked counts it as done. A cursor may be ahead of what is known to be in the store.
            self._refused_at = time.monotonic()
        if target <= self._marked:
            return
        manifest = read_manifest(self.directory, None)
        assert manifest is not None
        self._store.replace(RETIRED, Retired(manifest.stream_id, target, time.time()).encode())
        self._marked = target
