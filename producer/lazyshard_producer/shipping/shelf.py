"""The chunks of a stream in an object store: their sizes, and how they are deleted.

Deletion works as in a directory: first the watermark, then each seal before its data.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lazyshard.format.records import RETIRED, Retired, arrays_name, chunk_name, seal_name
from lazyshard.stream.cursor import list_consumers
from lazyshard.stream.listing import names_of
from lazyshard_producer.limits import Shelf, Stock
from lazyshard_producer.shipping.store import Found, StreamStore

_AT_ONCE: Final = 16  # objects that are deleted before the next chunk is published: each is two requests


class StoreShelf(Shelf):
    """The chunks of a stream in an object store; `directory` is where its consumers' files are read."""

    remote = True

    def __init__(self, store: StreamStore, directory: Path, found: Found) -> None:
        super().__init__(directory, store.url)
        self.store, self._manifest = store, found.manifest
        self._marked = found.listing.first
        # Eight bytes per chunk, so 8 MB for a million chunks. 0 for retired chunks.
        self._sizes = array("Q", [0] * self._marked)
        for chunk in range(self._marked, found.listing.sealed):
            self._sizes.append(sum(found.sizes.get(name, 0) for name in names_of(chunk, arrays=True)))
        self._leftovers = [*found.listing.leftovers]  # names below the watermark that are still to be deleted

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return self._marked

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Returns the sizes of the chunks [first, stop), always exact."""
        sizes = self._sizes[first:stop]
        return Stock(first, stop, sum(sizes), largest=max(sizes, default=0))

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk; of a retired chunk, those it had before."""
        return sum(self._sizes[chunk : chunk + 1])

    def used_bytes(self, published: int) -> int:
        """Returns the bytes of the stream, in the store and pending."""
        return sum(self._sizes[self._marked : published])

    def add(self, size: int) -> None:
        """Adds the bytes of the next chunk."""
        self._sizes.append(size)

    def announce(self, published: int) -> None:
        """Does a part of the pending deletions."""
        self.delete()

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Deletes the chunks of [0, chunks_before) that no consumer needs, never the newest, in parts."""
        # The consumers are read again right before.
        done = min((consumer.chunks_before for consumer in list_consumers(self.directory, published)), default=0)
        self.mark(min(chunks_before, published - 1, done))
        self.delete()

    def mark(self, chunks_before: int) -> None:
        """Raises the watermark, if it is below: the chunks before it may be deleted."""
        if chunks_before > self._marked and self._manifest is not None:
            self.store.replace(RETIRED, Retired(self._manifest.stream_id, chunks_before, time.time()).encode())
            kinds = (seal_name, chunk_name, arrays_name)[: 2 + self._manifest.arrays]
            self._leftovers += [name_of(chunk) for chunk in range(self._marked, chunks_before) for name_of in kinds]
            self._marked = chunks_before

    def delete(self) -> bool:
        """Deletes some of the objects below the watermark; returns whether some are left."""
        left, self._leftovers = self._leftovers[:_AT_ONCE], self._leftovers[_AT_ONCE:]
        self.store.remove(*left)
        return bool(self._leftovers)
