"""The chunks of a stream in an object store, for `Holdback`; see `lazyshard_producer.holding.shelf`.

Nothing here calls the store: consumers were copied into the spool, sizes are known from putting, and what is to be
deleted is handed to the shipper's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard_producer.holding.shelf import Stock
from lazyshard_producer.shipping.backlog import Backlog
from lazyshard_producer.shipping.retiring import Retiring


class ObjectShelf:
    """See `lazyshard_producer.holding.shelf.Shelf`.

    Args:
        url: of the stream.
        stream: its directory in the spool.
        backlog: the chunks and their sizes.
        retiring: deletes in the store.
    """

    def __init__(self, url: str, stream: Path, backlog: Backlog, retiring: Retiring) -> None:
        self._url = url
        self._stream = stream
        self._backlog = backlog
        self._retiring = retiring

    @property
    def name(self) -> str:
        """See `Shelf`."""
        return self._url

    def first(self) -> int:
        """See `Shelf`."""
        return self._retiring.first

    def visible(self, published: int) -> int:
        """See `Shelf`: those that are in the store."""
        return min(published, self._backlog.shipped)

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """See `Shelf`."""
        self._retiring.ask()
        return list_consumers(self._stream, published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """See `Shelf`: asks for it, which is done within a moment, once the consumers were looked at again."""
        self._retiring.want(min(chunks_before, published - 1))

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """See `Shelf`; always exact."""
        size, largest = self._backlog.total(first, stop), self._backlog.largest_in(first, stop)
        return Stock(first=first, stop=stop, size=size, largest=largest)

    def chunk_size(self, chunk: int) -> int:
        """See `Shelf`."""
        return self._backlog.size(chunk)

    def used_bytes(self, published: int) -> int:
        """See `Shelf`."""
        return self._backlog.total(self.first(), published)

    def free_bytes(self) -> int | None:
        """See `Shelf`: nobody knows."""
        return None
