"""Where a checked row lies: enough for another process of the machine to read it again, out of its page cache.

A large row costs more to be carried from process to process, through a pipe, than to be read a second time: the page
cache is memory that they share already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from lazyshard.errors import ChunkCorrupt, ChunkMissing
from lazyshard.store.files import OpenFile, open_file

__all__ = ["Place", "read_place"]

_OPEN_FILES: Final = 8
"""Held open at the most: as many chunks as workers usually read at a time."""

_open_files: dict[str, OpenFile] = {}
"""By path, in the order of use."""


class Place(NamedTuple):
    """A row of a sealed chunk.

    Attributes:
        path: the data file, absolute.
        chunk: number of the chunk.
        row: number of the row in it.
        start: byte at which it starts.
        size: its bytes, the newline included.
        digest: XXH3 of them, 8 big-endian bytes.
    """

    path: str
    chunk: int
    row: int
    start: int
    size: int
    digest: bytes


def read_place(place: Place) -> bytes:
    """Reads and checks a row that another process has read and checked before.

    Raises:
        ChunkMissing: its file was deleted since.
        ChunkCorrupt: its file was changed since.
        OSError: the filesystem failed.
    """
    # Twice, as a file that is open may be one that another has replaced since, or that its server has forgotten.
    try:
        line = _read(place)
    except OSError:
        line = b""
    if xxhash.xxh3_64_digest(line) == place.digest:
        return line
    _open_files.pop(place.path, None)
    line = _read(place)
    if (found := xxhash.xxh3_64_digest(line)) == place.digest:
        return line
    actual = found.hex() if len(line) == place.size else f"{len(line)} bytes"
    expected = f"XXH3 {place.digest.hex()} of {place.size} bytes as sealed"
    raise ChunkCorrupt(
        f"{place.path}: row {place.row} (byte {place.start}): expected {expected}, found {actual}; the file was "
        f"changed after a DataLoader worker had read the row. Restore it from a copy",
        file=place.path,
        chunk=place.chunk,
        row=place.row,
        byte=place.start,
        expected=expected,
        actual=actual,
    )


def _read(place: Place) -> bytes:
    """Returns the bytes of a row, fewer where the file ends."""
    file = _opened(place)
    data = b""
    while len(data) < place.size:
        part = os.pread(file.fd, place.size - len(data), place.start + len(data))
        if not part:
            break
        data = data + part if data else part
    return data


def _opened(place: Place) -> OpenFile:
    # As in `StreamReader.chunk`: each step is atomic, so threads need no lock, which a fork could leave locked.
    file = _open_files.pop(place.path, None)
    if file is None:
        try:
            file = open_file(Path(place.path))
        except FileNotFoundError as cause:
            raise ChunkMissing(
                f"{place.path}: row {place.row} was read by a DataLoader worker, and the file is gone since, before "
                f"the row came to the process that trains. Nothing may delete chunks that are still being read: let "
                f"the producer do it by its consumers' cursors (--retain consumed)",
                file=place.path,
                chunk=place.chunk,
            ) from cause
        _let_go()
    _open_files[place.path] = file
    return file


def _let_go() -> None:
    """Closes what was used longest ago, and what was deleted, which takes room on the disk while it is open."""
    for path, file in list(_open_files.items()):
        if len(_open_files) >= _OPEN_FILES or not os.fstat(file.fd).st_nlink:
            _open_files.pop(path, None)
