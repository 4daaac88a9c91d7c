"""Whether files of a followed directory that were read to their end have grown since: none should."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from lazyshard_producer.following.finished import Finished, FinishedFiles
from lazyshard_producer.following.listing import DirectoryListing

_RECENT: Final = 100
"""The files finished last are looked at every time: those that were taken for complete too early are among them."""


class FinishedWatch:
    """Knows the files that were read to their end, and looks at some of those that are there.

    Args:
        path: the directory.
        files: those known.
        listing: what is in the directory; they need no attention there.
    """

    def __init__(self, path: str, files: FinishedFiles, listing: DirectoryListing) -> None:
        self._path = path
        self._files = files
        self._listing = listing
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._next = 0

    def add(self, name: str, file: Finished) -> None:
        """Adds a file."""
        self._files.add(name, file)
        self._recent.append(name)
        self._listing.settle(name)

    def get(self, name: str) -> Finished | None:
        """Returns what is known of a file, None if it was not read to its end."""
        return self._files.get(name)

    def sort_out(self, sizes: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Returns which of the files that were not there before are not known, and which are known and have grown.

        Args:
            sizes: their sizes in bytes, by name.
        """
        unknown, grown = self._files.compare(sizes)
        for name in sizes.keys() - set(unknown):
            self._listing.settle(name)
        return unknown, grown

    def look(self, count: int) -> Iterator[tuple[str, int]]:
        """Looks at so many of the files, and those finished last; yields those that have grown, with their sizes."""
        names = self._listing.settled(self._next, count)
        self._next = self._next + count if len(names) == count else 0
        for name in {*names, *self._recent}:
            known = self._files.get(name)
            if known is None:
                continue
            size = 0
            with contextlib.suppress(OSError):
                size = os.stat(os.path.join(self._path, name)).st_size
            if size > known.size:
                yield name, size
