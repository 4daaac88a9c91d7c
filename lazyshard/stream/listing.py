"""What is published of a stream at one moment, and which chunks a directory holds, by listing it.

Listing is O(chunks): for writers, and where head.json is lost. Of foreign directories `scan_chunks` keeps numbers only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lazyshard.errors import FileRefused, StreamInvalid
from lazyshard.format.names import (
    HEAD,
    MANIFEST,
    OWNER,
    TEMPORARY,
    arrays_name,
    chunk_name,
    parse_arrays_name,
    parse_chunk_name,
    parse_tokens_name,
    seal_name,
)
from lazyshard.format.records import Head
from lazyshard.store.files import check_folder, list_names, unreadable
from lazyshard.store.urls import UrlPath

_OURS: Final = frozenset((MANIFEST, HEAD, OWNER))


@dataclass(frozen=True, slots=True)
class Published:
    """What is published at one moment: the chunks of the half-open range [0, chunks)."""

    chunks: int
    samples: int
    ended: bool  # nothing will follow
    head: Head | None = None
    gap: int | None = None  # a chunk that lacks its data or its marker although it should have both
    short: int | None = None  # rows of the newest chunk of a foreign stream, which counts only once that has ended


def other_files(names: Iterable[str]) -> str:
    """Returns some of the names in a directory, for people; nothing if it is empty, or one may be of a stream."""
    seen = sorted(names)
    if any(name.startswith((".", "chunk_", "stream.", "head.json")) for name in seen):
        return ""
    return ", ".join(seen[:3]) + (", ..." if len(seen) > 3 else "")


@dataclass(frozen=True, slots=True)
class Listing:
    """The chunk files of a directory, by chunk number. Those below `first` are retired."""

    data: dict[int, str]
    seals: dict[int, str]
    sealed: int  # the chunks of the half-open range [first, sealed) have a marker
    complete: int  # those of the half-open range [first, complete) have marker and data
    first: int = 0
    leftovers: list[str] = field(default_factory=list)  # files of retired chunks, markers before data
    arrays: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)  # lengths that an earlier release has left

    @property
    def gap(self) -> int | None:
        """The first chunk that is not complete although a later one has a marker; None if there is no such chunk."""
        return self.complete if len(self.seals) > self.complete - self.first else None

    def starting_at(self, first: int) -> Listing:
        """Returns the listing of the chunks from `first` on, those below it being retired."""
        if first == self.first:
            return self
        kinds = (self.data, self.seals, self.arrays)
        data, seals, arrays = ({chunk: name for chunk, name in kind.items() if chunk >= first} for kind in kinds)
        tokens = {chunk: names for chunk, names in self.tokens.items() if chunk >= first}
        leftovers = [name for chunk in sorted(self.tokens) if chunk < first for name in self.tokens[chunk]]
        for kind in (self.seals, self.data, self.arrays):
            leftovers += [kind[chunk] for chunk in sorted(kind) if chunk < first]
        return _contiguous(Listing(data, seals, first, first, first, leftovers, arrays, tokens))


def list_chunks(directory: Path) -> Listing:
    """Lists the chunk files of a directory; of a stream of ours take `list_kept`, which knows what was deleted.

    Raises StreamInvalid: two files have the same chunk number (padded differently). FileUnreadable, OSError.
    """
    return sort_names(_names(directory), str(directory))


@dataclass(frozen=True, slots=True)
class Scan:
    """What a listing says of a stream that nobody deletes from."""

    complete: int  # the chunks of the half-open range [0, complete) have marker and data
    data: int
    seals: int
    odd: dict[int, str]  # data files that are not named as `chunk_name` says
    ours: frozenset[str]  # names of files that only producers of ours write

    @property
    def gap(self) -> int | None:
        """As `Listing.gap`."""
        return self.complete if self.seals > self.complete else None

    def data_name(self, chunk: int) -> str:
        """Returns the file name of a chunk's rows."""
        return self.odd.get(chunk, chunk_name(chunk))


def scan_chunks(directory: Path) -> Scan:
    """Lists the chunk files of a directory as `list_chunks` does, and keeps numbers instead of names."""
    names = _names(directory)
    listing = sort_names(names, str(directory))
    odd = {chunk: name for chunk, name in listing.data.items() if name != chunk_name(chunk)}
    return Scan(listing.complete, len(listing.data), len(listing.seals), odd, _OURS.intersection(names))


def _names(directory: Path) -> list[str]:
    try:
        return list_names(directory)
    except PermissionError as cause:
        raise unreadable(directory) from cause


def has_unpublished_rows(directory: Path, chunks: int) -> bool | None:
    """Returns whether a producer that runs has begun a file under `.tmp/` of a chunk behind these; None: not known."""
    if isinstance(directory, UrlPath):
        return None
    try:
        own = [check_folder(directory / TEMPORARY / name) for name in list_names(check_folder(directory / TEMPORARY))]
        parsed = [parse_chunk_name(name) for folder in own for name in list_names(folder)]
    except (OSError, FileRefused):
        return None
    return any(one is not None and not one[1] and one[0] >= chunks for one in parsed) if own else None


def unlisted_chunks(directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
    """Lists the directory of a stream of ours, and returns which chunks of [first, stop) lack a file there.

    It may be an old listing. Takes about 1 us a file.
    """
    names = set(os.listdir(directory))
    kinds = (chunk_name, seal_name, arrays_name) if arrays else (chunk_name, seal_name)
    return [chunk for chunk in range(first, stop) if any(name(chunk) not in names for name in kinds)]


def sort_names(names: Iterable[str], directory: str) -> Listing:
    """Returns the listing of a place that holds files of these names. Raises StreamInvalid as `list_chunks`."""
    data: dict[int, str] = {}
    seals: dict[int, str] = {}
    arrays: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    for name in names:
        parsed = parse_chunk_name(name)
        if parsed is None:
            if (number := parse_arrays_name(name)) is not None:
                arrays[number] = name
            elif (number := parse_tokens_name(name)) is not None:
                tokens.setdefault(number, []).append(name)
            continue
        chunk, is_seal = parsed
        kind = seals if is_seal else data
        if chunk in kind:
            first, second = sorted((kind[chunk], name))
            raise StreamInvalid(
                f"{directory}: {first} and {second} are both chunk {chunk}; keep one of them",
                directory=directory,
                chunk=chunk,
            )
        kind[chunk] = name
    return _contiguous(Listing(data, seals, 0, 0, arrays=arrays, tokens=tokens))


def _contiguous(found: Listing) -> Listing:
    sealed = complete = found.first
    while sealed in found.seals:
        sealed += 1
    while complete < sealed and complete in found.data:
        complete += 1
    return replace(found, sealed=sealed, complete=complete)
