"""Which chunks a directory holds, by listing it.

O(chunks): for writers, for foreign directories, and where head.json is lost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lazyshard.errors import StreamInvalid
from lazyshard.format.names import parse_chunk_name
from lazyshard.storage.files import unreadable


@dataclass(frozen=True, slots=True)
class Listing:
    """The chunk files of a directory.

    Attributes:
        data: file name of each chunk's rows, by chunk number.
        seals: file name of each chunk's marker, by chunk number.
        sealed: how many chunks have a marker without a gap: those of the half-open range [0, sealed).
        complete: how many chunks have marker and data without a gap: those of the half-open range [0, complete).
    """

    data: dict[int, str]
    seals: dict[int, str]
    sealed: int
    complete: int

    @property
    def gap(self) -> int | None:
        """The first chunk that is not complete although a later one has a marker; None if there is no such chunk."""
        return self.complete if len(self.seals) > self.complete else None


def list_chunks(directory: Path) -> Listing:
    """Lists the chunk files of a directory; anything else in it is passed over.

    Raises:
        StreamInvalid: two files have the same chunk number (padded differently).
        FileUnreadable: this process may not list it.
        OSError: the directory cannot be listed.
    """
    data: dict[int, str] = {}
    seals: dict[int, str] = {}
    try:
        found = os.listdir(directory)
    except PermissionError as cause:
        raise unreadable(directory) from cause
    for name in found:
        parsed = parse_chunk_name(name)
        if parsed is None:
            continue
        chunk, is_seal = parsed
        names = seals if is_seal else data
        if chunk in names:
            first, second = sorted((names[chunk], name))
            raise StreamInvalid(
                f"{directory}: {first} and {second} are both chunk {chunk}; keep one of them",
                directory=str(directory),
                chunk=chunk,
            )
        names[chunk] = name
    sealed = 0
    while sealed in seals:
        sealed += 1
    complete = 0
    while complete < sealed and complete in data:
        complete += 1
    return Listing(data, seals, sealed, complete)
