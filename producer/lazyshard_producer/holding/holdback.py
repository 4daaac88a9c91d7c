"""Holds a run back at its limits, and deletes what its consumers are done with: the decisions of `limits`, carried out.

Looks at the consumers' files at most twice a second while chunks come, and five times a second while one is held: since
then they have only come further. Bytes are those of the files, as `ls` shows them, looked at once and then counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from lazyshard.format.names import parse_arrays_name, parse_chunk_name
from lazyshard.inspection import survey
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.listing import read_manifest
from lazyshard.stream.retention import read_retired, retire
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding.limits import (
    Hold,
    Situation,
    Stock,
    ahead_in_chunks,
    deletable,
    publishable,
)

LOOK_S: Final = 0.5  # how old the consumers' files may get while chunks come: tiny ones must not cost looks
HELD_LOOK_S: Final = 0.2  # the same while a chunk is held: as often as it is asked for again
DELETED_AT_ONCE: Final = 100  # chunks; of 100,000 on a busy disk that took 0.3 to 0.8 s, in which nothing else happens
_RETRY_MIN_S: Final = 0.2
_RETRY_MAX_S: Final = 2.0

_log = logging.getLogger("lazyshard")


class Shelf:
    """The published chunks of a stream and its consumers' files; its writer's lock is held, `name` is for people."""

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.directory: Final = directory
        self.name: Final = str(directory) if name is None else name
        self._arrays: bool | None = None

    def has_arrays(self) -> bool:
        """Whether the chunks have side files; False as long as there is no manifest."""
        if self._arrays is None:
            manifest = read_manifest(self.directory, None)
            self._arrays = None if manifest is None else manifest.arrays
        return bool(self._arrays)

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return read_retired(self.directory)

    def visible(self, published: int) -> int:
        """Returns how many of so many published chunks the readers can be sure to find by now."""
        return published

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as they were last seen; those whose cursor is ahead of `published` do not count."""
        return list_consumers(self.directory, published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Deletes the chunks of [0, chunks_before), never the newest; `check` is as in `lazyshard.stream.retention`."""
        retire(self.directory, chunks_before, published, check=check)

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Looks at all files of chunks, O(chunks), or estimates from some of [first, stop)."""
        if not exact:
            sizes = {chunk: self.chunk_size(chunk) for chunk in survey.sampled_chunks(first, stop)}
            size = survey.estimate_size(stop - first, sizes, stop - 1)
            return Stock(first=first, stop=stop, size=size, largest=max(sizes.values(), default=0))
        size = data = seal = side = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if (parsed := parse_chunk_name(entry.name)) is None and parse_arrays_name(entry.name) is None:
                    continue
                found = entry.stat(follow_symlinks=False).st_size
                size += found
                if parsed is None:
                    side = max(side, found)
                elif parsed[1]:
                    seal = max(seal, found)
                else:
                    data = max(data, found)
        # Not a sum for each chunk: a number for each would be kept in memory for the whole listing.
        return Stock(first=first, stop=stop, size=size, largest=data + seal + side)

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk with its seal; a file that is not there has none."""
        size = 0
        for name in self._names(chunk):
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(self.directory / name, follow_symlinks=False).st_size
        return size

    def used_bytes(self, published: int) -> int:
        """Returns about how many bytes the stream takes, so many chunks of it being published."""
        return survey.measure_disk(self.directory, self.first(), published, self._names).size

    def free_bytes(self) -> int | None:
        """Returns how many bytes are free beside the chunks, None where nobody can tell."""
        return survey.free_bytes(self.directory)

    def _names(self, chunk: int) -> tuple[str, ...]:
        return survey.chunk_files(chunk, arrays=self.has_arrays())


class Gate(Protocol):
    """Says whether the next chunk may be published."""

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns None if the chunk after the published ones may be published, or why not."""

    def after_publish(self, published_chunks: int) -> None:
        """Takes notice that so many chunks are published, and deletes what may go."""


@dataclass(eq=False)
class Holdback:
    """Says whether the next chunk may be published, and deletes old ones."""

    limits: Limits
    shelf: Shelf
    samples_per_chunk: int
    check: Callable[[], Path | None] = lambda: None  # before deletion; raises if the stream is another producer's now
    warn: Callable[[str], None] = _log.warning  # is told of what goes wrong without stopping the run
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    stock: Stock | None = None  # what is on disk, as far as a limit needs it; estimated without `max_disk`
    _consumers: tuple[Consumer, ...] = ()
    _looked_at: float = float("-inf")
    _held_since: float | None = None
    _trouble: str | None = None
    _blind: str | None = None

    def __post_init__(self) -> None:
        """Looks where the chunks begin."""
        self._first = self.shelf.first()

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns why chunk number `published_chunks` may not be published yet, None if it may.

        To be asked before the chunk is begun. It is counted as large as the largest one so far: one that is larger than
        all before it can go beyond a limit of bytes, by the difference. That the consumers cannot be looked at, or
        chunks not be deleted, is only told to `warn`.
        """
        self._take_stock(published_chunks)
        hold = self._hold(published_chunks, published_samples)
        every_s = LOOK_S if hold is None else HELD_LOOK_S
        # Without such a limit nobody asks who the consumers are until there is something to say of them.
        heeds = hold is not None or self.limits.max_ahead is not None or self.limits.retain != "all"
        if heeds and self._refresh(published_chunks, every_s):
            hold = self._hold(published_chunks, published_samples)
        if hold is None:
            self._held_since = None
        return hold

    def after_publish(self, published_chunks: int) -> None:
        """Deletes what may be deleted, now that so many chunks are published. O(consumers + deleted chunks).

        Raises as `before_chunk`.
        """
        self._take_stock(published_chunks)
        if self.limits.retain != "all":
            self._refresh(published_chunks, LOOK_S)

    def _hold(self, published: int, samples: int) -> Hold | None:
        limits, stock = self.limits, self.stock
        if limits.max_ahead is not None:
            mean = stock.size // stock.chunks if stock is not None and stock.chunks else None
            ahead = ahead_in_chunks(limits.max_ahead, self.samples_per_chunk, mean)
            if published >= publishable(self._consumers, ahead):
                return self._situation(published, samples).hold_ahead()
        if stock is None:
            return None
        free = None if limits.min_free_disk is None else self.shelf.free_bytes()
        if limits.max_disk is not None and stock.size + stock.largest > limits.max_disk:
            limit, free = limits.max_disk, None
        elif limits.min_free_disk is not None and free is not None and free - stock.largest < limits.min_free_disk:
            limit = limits.min_free_disk
        else:
            return None
        more = deletable(self._consumers, limits, published) > self._first
        return self._situation(published, samples).hold_for_room(stock, limit, free, more, self._trouble)

    def _situation(self, published: int, samples: int) -> Situation:
        now = self.clock()
        if self._held_since is None:
            self._held_since = now
        retry, wall = retry_s(now - self._held_since), self.wall_clock()
        return Situation(self.shelf.name, self._consumers, self.limits, published, samples, retry, wall)

    def _take_stock(self, published: int) -> None:
        """Brings what is known of the disk up to date, as far as a limit asks for it."""
        limits, stock = self.limits, self.stock
        by_bytes = limits.max_ahead is not None and limits.max_ahead.unit == "bytes"
        if limits.max_disk is None and limits.min_free_disk is None and not by_bytes:
            return
        if stock is None:
            self.stock = self.shelf.stock(self._first, published, exact=limits.max_disk is not None)
            return
        for chunk in range(stock.stop, published):
            size = self.shelf.chunk_size(chunk)
            stock = replace(stock, stop=chunk + 1, size=stock.size + size, largest=max(stock.largest, size))
        self.stock = stock

    def _refresh(self, published: int, every_s: float) -> bool:
        """Looks at the consumers and deletes what may go, unless that was done a moment ago; returns whether it did."""
        now = self.clock()
        if now - self._looked_at < every_s:
            return False
        self._looked_at = now
        try:
            self._consumers = self.shelf.consumers(published)
        except OSError as error:
            # What was known stays true: consumers only come on, and for those that are not known nothing is deleted.
            if self._blind != str(error):
                self._blind = str(error)
                self.warn(f"{self.shelf.name}: how far its consumers are cannot be read: {error}")
            return False
        self._blind = None
        self._delete(published)
        return True

    def _delete(self, published: int) -> None:
        """Deletes what may go, or a first part of it."""
        published = self.shelf.visible(published)
        target = min(deletable(self._consumers, self.limits, published), self._first + DELETED_AT_ONCE)
        if target <= self._first:
            return
        chunks = range(self._first, target)
        size = self._size(chunks)
        try:
            self.shelf.retire(target, published, self.check)
        except OSError as error:
            if self._trouble != str(error):
                self.warn(f"{self.shelf.name}: chunks that nobody needs cannot be deleted: {error}")
            self._trouble = str(error)
            # What is left of them is tried again at the next look.
            target, size = self._first, size - self._size(chunks)
        else:
            self._trouble = None
        self._first = target
        if self.stock is not None:
            self.stock = replace(self.stock, first=target, size=max(0, self.stock.size - size))

    def _size(self, chunks: range) -> int:
        """Returns the bytes of chunks, where anybody wants to know."""
        return 0 if self.stock is None else sum(self.shelf.chunk_size(chunk) for chunk in chunks)


def retry_s(held_s: float) -> float:
    """Returns in how many seconds to ask again after a chunk has been held for so many: a tenth, from 0.2 to 2."""
    return min(_RETRY_MAX_S, max(_RETRY_MIN_S, held_s / 10))
