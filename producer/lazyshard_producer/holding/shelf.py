"""Where the published chunks of a stream lie and what they take there: all the I/O of holding back and deleting.

Bytes are those of the files, data and seal, as `ls` shows them; blocks and directories are not counted. They are looked
at once, then kept up to date by what is added and deleted. What lies elsewhere than in a directory may lag behind: see
`Shelf.visible`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lazyshard.format.names import parse_arrays_name, parse_chunk_name
from lazyshard.inspection.disk_use import (
    canonical_names,
    estimate_size,
    free_bytes,
    measure_disk,
    names_with_arrays,
    sampled_chunks,
)
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.manifest import read_manifest
from lazyshard.stream.retire import read_retired, retire


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The chunks that are on disk.

    Attributes:
        first: number of the oldest one.
        stop: the chunks of the half-open range [first, stop) are there.
        size: their bytes.
        largest: bytes of the largest one so far.
    """

    first: int
    stop: int
    size: int
    largest: int

    @property
    def chunks(self) -> int:
        """How many they are."""
        return self.stop - self.first

    @property
    def mean(self) -> int | None:
        """Mean bytes of a chunk, rounded down; None where there is none."""
        return self.size // self.chunks if self.chunks else None

    def add(self, size: int) -> Stock:
        """Returns the stock with one chunk of so many bytes more."""
        return replace(self, stop=self.stop + 1, size=self.size + size, largest=max(self.largest, size))

    def delete(self, first: int, size: int) -> Stock:
        """Returns the stock without the chunks below `first`, which had so many bytes."""
        return replace(self, first=first, size=max(0, self.size - size))


def measure_stock(directory: Path, first: int, stop: int, *, exact: bool) -> Stock:
    """Looks at the chunks [first, stop) of a stream.

    Args:
        directory: the stream's directory.
        first: the oldest chunk that is not retired. What is still there of retired ones counts as well.
        stop: how many chunks are published.
        exact: True looks at all of them, which takes O(chunks); False at some, evenly spread, and estimates.

    Raises:
        OSError: the filesystem failed.
    """
    if not exact:
        arrays = SideFiles(directory)()
        sizes = {chunk: chunk_size(directory, chunk, arrays) for chunk in sampled_chunks(first, stop)}
        size = estimate_size(stop - first, sizes, stop - 1)
        return Stock(first=first, stop=stop, size=size, largest=max(sizes.values(), default=0))
    size = data = seal = side = 0
    with os.scandir(directory) as entries:
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


def chunk_size(directory: Path, chunk: int, arrays: bool = False) -> int:
    """Returns the bytes of a chunk with its seal; a file that is not there has none.

    Raises:
        OSError: the filesystem failed.
    """
    size = 0
    for name in names_with_arrays(chunk) if arrays else canonical_names(chunk):
        with contextlib.suppress(FileNotFoundError):
            size += os.stat(directory / name, follow_symlinks=False).st_size
    return size


class SideFiles:
    """Whether the chunks of a stream have side files; the manifest is asked once it is there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._arrays: bool | None = None

    def __call__(self) -> bool:
        """Returns it; False as long as there is no manifest.

        Raises:
            FileInvalid, OSError: the manifest cannot be read.
        """
        if self._arrays is None:
            manifest = read_manifest(self._directory, None)
            self._arrays = None if manifest is None else manifest.arrays
        return bool(self._arrays)


class Shelf:
    """The published chunks of a stream and the files of its consumers: in a directory, whose writer's lock is held.

    Every method raises OSError where they cannot be reached.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.directory: Final = directory
        self.name: Final = str(directory) if name is None else name
        """What the stream is called for people, and in commands."""
        self._side_files = SideFiles(directory)

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
        """Deletes the chunks of [0, chunks_before), never the newest; `check` is as in `lazyshard.stream.retire`."""
        retire(self.directory, chunks_before, published, check=check)

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Looks at the chunks [first, stop); see `measure_stock`."""
        return measure_stock(self.directory, first, stop, exact=exact)

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk with its seal, 0 where it is not there."""
        return chunk_size(self.directory, chunk, self._side_files())

    def used_bytes(self, published: int) -> int:
        """Returns about how many bytes the stream takes, so many chunks of it being published."""
        names = names_with_arrays if self._side_files() else canonical_names
        return measure_disk(self.directory, self.first(), published, names).size

    def free_bytes(self) -> int | None:
        """Returns how many bytes are free beside the chunks, None where nobody can tell."""
        return free_bytes(self.directory)
