"""Deletes chunks in the store, and copies what consumers leave there into the spool, where `Holdback` looks.

The order is that of a directory: first `retired.json`, then for each chunk its seal before its data and side file.
Right before the mark the consumers are looked at once more: one that has come since, or has gone back, keeps its
chunks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lazyshard.format import Retired
from lazyshard.format.cursor import CURSOR_SUFFIX, CURSORS
from lazyshard.format.names import RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.objects import ObjectStore
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.manifest import read_manifest
from lazyshard_producer.holding.shelf import SideFiles
from lazyshard_producer.shipping.backlog import Backlog
from lazyshard_producer.shipping.chunks import replace
from lazyshard_producer.shipping.found import Found, get, names_in
from lazyshard_producer.shipping.tries import Tries

PULL_S: Final = 1.0
"""How old what is known of the consumers may get while somebody asks for it: a listing, and a request for each."""

_AT_ONCE: Final = 8
"""Chunks that are deleted before the next one is put: each is two requests."""


class Retiring:
    """Consumers and deletion. What is said to be for the thread calls the store.

    Args:
        store: of the stream.
        tries: calls it.
        check_owner: raises where the stream is another producer's now.
        stream: the stream's directory in the spool.
        backlog: what is in the store.
        found: what was found there.
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
