"""Where the published chunks of a stream lie, as far as holding back and deleting is concerned: all its I/O.

A directory is looked at and changed at once. What lies elsewhere may lag behind: see `Shelf.visible`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lazyshard.inspection.disk_use import canonical_names, free_bytes, measure_disk, names_with_arrays
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.retire import read_retired, retire
from lazyshard_producer.holding.disk import SideFiles, Stock, chunk_size, measure_stock


class Shelf(Protocol):
    """The published chunks of a stream and the files of its consumers.

    Every method raises OSError where they cannot be reached.
    """

    @property
    def name(self) -> str:
        """What the stream is called for people, and in commands."""

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""

    def visible(self, published: int) -> int:
        """Returns how many of so many published chunks the readers can be sure to find by now."""

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as they were last seen; those whose cursor is ahead of `published` do not count."""

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Deletes the chunks of [0, chunks_before), never the newest; `check` is as in `lazyshard.stream.retire`."""

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Looks at the chunks [first, stop); see `measure_stock`."""

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk with its seal, 0 where it is not there."""

    def used_bytes(self, published: int) -> int:
        """Returns about how many bytes the stream takes, so many chunks of it being published."""

    def free_bytes(self) -> int | None:
        """Returns how many bytes are free beside the chunks, None where nobody can tell."""


class DirectoryShelf:
    """A directory, whose writer's lock is held; see `Shelf`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._side_files = SideFiles(directory)

    @property
    def name(self) -> str:
        """See `Shelf`."""
        return str(self._directory)

    def first(self) -> int:
        """See `Shelf`."""
        return read_retired(self._directory)

    def visible(self, published: int) -> int:
        """See `Shelf`."""
        return published

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """See `Shelf`."""
        return list_consumers(self._directory, published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """See `Shelf`."""
        retire(self._directory, chunks_before, published, check=check)

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """See `Shelf`."""
        return measure_stock(self._directory, first, stop, exact=exact)

    def chunk_size(self, chunk: int) -> int:
        """See `Shelf`."""
        return chunk_size(self._directory, chunk, self._side_files())

    def used_bytes(self, published: int) -> int:
        """See `Shelf`."""
        names = names_with_arrays if self._side_files() else canonical_names
        return measure_disk(self._directory, self.first(), published, names).size

    def free_bytes(self) -> int | None:
        """See `Shelf`."""
        return free_bytes(self._directory)
