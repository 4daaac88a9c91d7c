"""How many bytes a stream takes: exact while it is small, else from the sizes of some of its chunks.

The names of a stream's chunks are known, so a hundred thousand chunks cost no more than a few hundred (measured: a
listing of them with the size of each file takes a second, the sizes of `SAMPLED_CHUNKS` 1 ms). Which of them were
deleted by hand only a listing of the names tells: `LostChunks`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from lazyshard.errors import LazyShardError
from lazyshard.format.names import TEMPORARY, arrays_name, chunk_name, seal_name
from lazyshard.store.files import again_if_stale, open_file, size_of
from lazyshard.store.urls import UrlPath
from lazyshard.stream.listing import unlisted_chunks

SAMPLED_CHUNKS: Final = 128  # Looked at with two calls each: on a network filesystem a call takes about a millisecond
_LISTING_SHARE: Final = 0.05  # Of the time of who looks again and again, for listings: a second for a million files
_MOST_LISTED: Final = 20_000_000  # A directory holds fewer: a head that names more is damaged, and takes no memory
_MOST_LOOKED_UP: Final = 1000  # Of chunks that a listing lacks, the lowest: it may be older than they are
_SAMPLED_OBJECTS: Final = 16  # As many of a stream in an object store, where a call takes some ten milliseconds
_COUNTED_BYTES: Final = 16 << 20  # Lines of a longer file are estimated: this much is counted in about 10 ms
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a stream takes on disk."""

    size: int  # bytes of its chunks, seals and what is being written: sizes, not blocks
    exact: bool  # every chunk was looked at
    chunk_size: float | None  # mean bytes of a chunk with its seal, None where no chunk was found
    missing: tuple[int, ...]  # those of which a file is not there, of those looked at and those not listed


class Lines(NamedTuple):
    """How long a file of lines is; `exact` where the lines were counted."""

    lines: int
    size: int
    exact: bool


def canonical_names(chunk: int) -> tuple[str, ...]:
    """Returns the names of a chunk's data file and seal, as our own writer gives them."""
    return chunk_name(chunk), seal_name(chunk)


def names_with_arrays(chunk: int) -> tuple[str, ...]:
    """Returns these names, and that of the side file, of a stream whose rows hold arrays."""
    return *canonical_names(chunk), arrays_name(chunk)


def sampled_chunks(first: int, stop: int, most: int = SAMPLED_CHUNKS) -> list[int]:
    """Returns at most `most` (2 or more) chunks of the half-open range [first, stop), evenly spread, with both ends.

    >>> sampled_chunks(0, 3), sampled_chunks(10, 110, 4)
    ([0, 1, 2], [10, 43, 76, 109])
    """
    count = stop - first
    if count <= most:
        return list(range(first, stop))
    return [first + index * (count - 1) // (most - 1) for index in range(most)]


def estimate_size(count: int, sizes: dict[int, int], last: int) -> int:
    """Returns the bytes of `count` chunks of which some sizes are known, by number.

    The last chunk may be a partial one: its size stands for itself alone.
    """
    others = [size for chunk, size in sizes.items() if chunk != last]
    if len(sizes) >= count:
        return sum(sizes.values())
    if not others:
        return sum(sizes.values()) * count
    mean = sum(others) / len(others)
    return round(mean * (count - 1) + sizes[last] if last in sizes else mean * count)


class LostChunks:
    """Finds chunks of which a file is not there, by listing their names, for one stream, in 5 % of the time at most.

    In between it returns what the last listing lacked, so a chunk that is deleted is found at the next one.
    """

    def __init__(self) -> None:
        self._unlisted: list[int] = []
        self._again_at = float("-inf")

    def unlisted(self, directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
        """Returns chunks of the half-open range [first, stop) of which the last listing lacks a file, in order.

        None of an object store, where a listing is paid for. Raises as `unlisted_chunks`.
        """
        if isinstance(directory, UrlPath) or stop - first > _MOST_LISTED:
            return []
        started = time.monotonic()
        if started >= self._again_at:
            self._unlisted = again_if_stale(lambda: unlisted_chunks(directory, first, stop, arrays=arrays))
            ended = time.monotonic()
            self._again_at = ended + (ended - started) / _LISTING_SHARE
        return [chunk for chunk in self._unlisted if first <= chunk < stop]


def measure_disk(
    directory: Path,
    first: int,
    stop: int,
    names: Callable[[int], tuple[str, ...]] = canonical_names,
    lost: LostChunks | None = None,
) -> DiskUse:
    """Looks at the sizes of some of the chunks [first, stop) and of what is being written.

    Without `lost`, which tells which of the other chunks to look up, only those are missed whose sizes are asked.
    Raises OSError where the filesystem failed.
    """
    looked_at = sampled_chunks(first, stop, _SAMPLED_OBJECTS if isinstance(directory, UrlPath) else SAMPLED_CHUNKS)
    exact = len(looked_at) == stop - first
    unlisted: list[int] = []
    if lost is not None and not exact:
        unlisted = lost.unlisted(directory, first, stop, arrays=len(names(first)) > 2)
        looked_at = sorted({*looked_at, *unlisted[:_MOST_LOOKED_UP]})
    sizes: dict[int, int] = {}
    missing: list[int] = []
    for chunk in looked_at:
        try:
            sizes[chunk] = sum(size_of(directory / name) for name in names(chunk))
        except OSError as error:
            # A link that leads to itself leads to no file either; which of the two it is is for `verify` to tell.
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            missing.append(chunk)
    size = estimate_size(len(sizes) if exact else stop - first, sizes, stop - 1) + _unfinished_size(directory)
    mean = sum(sizes.values()) / len(sizes) if sizes else None
    return DiskUse(size, exact, mean, tuple(sorted({*missing, *unlisted[_MOST_LOOKED_UP:]})))


def count_lines(path: Path) -> Lines | None:
    """Returns how many lines a file has, None if it is not there or no plain file.

    A long one is estimated by its beginning, so that looking again and again costs nothing. Objects are not looked at.
    """
    if isinstance(path, UrlPath):
        return None
    try:
        opened = open_file(path)
    except (LazyShardError, OSError):
        return None
    lines = read = 0
    while read < min(opened.size, _COUNTED_BYTES) and (part := os.pread(opened.fd, _READ_BYTES, read)):
        lines += part.count(b"\n")
        read += len(part)
    exact = read >= opened.size or not read
    return Lines(lines if exact else round(lines * opened.size / read), opened.size, exact)


def free_bytes(directory: Path) -> int | None:
    """Returns how many bytes this user may still write to the filesystem, None where it does not tell, or is none."""
    if not isinstance(directory, UrlPath):
        with contextlib.suppress(OSError):
            found = os.statvfs(directory)
            return found.f_bavail * found.f_frsize
    return None


def _unfinished_size(directory: Path) -> int:
    if isinstance(directory, UrlPath):
        return 0
    size = 0
    for folder, _, names in os.walk(directory / TEMPORARY):
        for name in names:
            # What is being written is renamed at any moment.
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
    return size
