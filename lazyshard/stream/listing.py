"""What is published of a stream at one moment, and which chunks a directory holds, by listing it.

Listing is O(chunks): for writers, and where head.json is lost. Of foreign directories `scan_chunks` keeps numbers only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.errors import FileRefused, StreamInvalid
from lazyshard.format.names import (
    ARRAYS_SUFFIX,
    DATA_SUFFIX,
    HEAD,
    MANIFEST,
    OWNER,
    SEAL_SUFFIX,
    TEMPORARY,
    chunk_name,
    parse_arrays_name,
    parse_chunk_name,
    parse_tokens_name,
)
from lazyshard.format.records import Head
from lazyshard.store.files import again_if_stale, check_folder, list_names, unreadable
from lazyshard.store.urls import UrlPath

_PREFIX: Final = b"chunk_"
_DATA_END: Final = DATA_SUFFIX.encode()
_SEAL_END: Final = (DATA_SUFFIX + SEAL_SUFFIX).encode()
_ARRAYS_END: Final = ARRAYS_SUFFIX.encode()
_OURS: Final = frozenset((MANIFEST, HEAD, OWNER))
_LONGEST_OURS: Final = max(map(len, _OURS))

_PADDED: Final = 5  # digits with which no name is padded otherwise than `chunk_name` does
_MOST_DIGITS: Final = 18  # such numbers are int64

_BATCH: Final = 1 << 14
"""Names that are looked at together: of a million chunks, all would take 150 MB."""

_Integers = npt.NDArray[np.int64]


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
    try:
        found = list_names(directory)
    except PermissionError as cause:
        raise unreadable(directory) from cause
    return sort_names(found, str(directory))


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
    """Lists the chunk files of a directory as `list_chunks` does, faster and in less memory. Raises as that does."""
    if not isinstance(directory, UrlPath):
        try:
            found = again_if_stale(lambda: _scan(directory))
        except PermissionError as cause:
            raise unreadable(directory) from cause
        if found is not None:
            return found
    names = list_names(directory)
    listing = sort_names(names, str(directory))
    odd = {chunk: name for chunk, name in listing.data.items() if name != chunk_name(chunk)}
    return Scan(listing.complete, len(listing.data), len(listing.seals), odd, _OURS.intersection(names))


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


def _scan(directory: Path) -> Scan | None:
    """Returns what is there, None where it takes a closer look: two files have one number, or a number is absurd."""
    kinds: tuple[list[_Integers], list[_Integers]] = [], []
    odd: dict[int, str] = {}
    ours: set[str] = set()
    for names, table in _tables(directory):
        length = table.shape[1]
        ours.update(_OURS.intersection(names) if length <= _LONGEST_OURS else ())
        for kind, end in zip(kinds, (_DATA_END, _SEAL_END), strict=True):
            digits = length - len(_PREFIX) - len(end)
            if digits > _MOST_DIGITS and any(map(parse_chunk_name, names)):
                return None
            if not 0 < digits <= _MOST_DIGITS:
                continue
            rows, numbers = _numbers(table, end, digits)
            kind.append(numbers)
            if kind is kinds[0] and digits != _PADDED:
                # Longer ones that begin with a zero, and all that are shorter.
                found = np.flatnonzero((numbers < 10 ** (digits - 1)) | (digits < _PADDED))
                odd.update((int(numbers[one]), names[rows[one]]) for one in found)
    data, seals = (np.sort(np.concatenate([np.zeros(0, np.int64), *kind])) for kind in kinds)
    if any((numbers[1:] == numbers[:-1]).any() for numbers in (data, seals)):
        return None
    complete = min(_first_missing(data), _first_missing(seals))
    return Scan(complete, len(data), len(seals), odd, frozenset(ours))


def unlisted_chunks(directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
    """Lists a directory, and returns which chunks of [first, stop) lack a file there; it may be an old listing.

    Takes about 1 us a file, and 2 or 3 bytes a chunk. With `arrays` each chunk has a side file too.
    """
    ends = (_DATA_END, _SEAL_END, _ARRAYS_END) if arrays else (_DATA_END, _SEAL_END)
    listed = np.zeros((len(ends), stop - first), np.bool_)
    for _, table in _tables(directory):
        for kind, end in zip(listed, ends, strict=True):
            digits = table.shape[1] - len(_PREFIX) - len(end)
            if 0 < digits <= _MOST_DIGITS:
                _, numbers = _numbers(table, end, digits)
                kind[numbers[(numbers >= first) & (numbers < stop)] - first] = True
    return [first + int(missing) for missing in np.flatnonzero(~listed.all(axis=0))]


def _tables(directory: Path) -> Iterator[tuple[list[str], npt.NDArray[np.uint8]]]:
    """Yields the names of a directory's files, those of one length together, and their bytes: a name in each row."""
    with os.scandir(directory) as entries:
        while batch := [entry.name for entry in itertools.islice(entries, _BATCH)]:
            for length, group in itertools.groupby(sorted(batch, key=len), key=len):
                # What is not ASCII is nothing of a stream.
                names = [name for name in group if name.isascii()]
                yield names, np.frombuffer("".join(names).encode(), np.uint8).reshape(-1, length)


def _numbers(table: npt.NDArray[np.uint8], end: bytes, digits: int) -> tuple[_Integers, _Integers]:
    """Returns which rows of a table of names are those of chunks with such an end, and the numbers of these."""
    fits = (table[:, : len(_PREFIX)] == np.frombuffer(_PREFIX, np.uint8)).all(axis=1)
    fits &= (table[:, len(_PREFIX) + digits :] == np.frombuffer(end, np.uint8)).all(axis=1)
    values = table[:, len(_PREFIX) : len(_PREFIX) + digits] - np.uint8(ord("0"))
    rows = np.flatnonzero(fits & (values <= 9).all(axis=1))
    return rows, values[rows].astype(np.int64) @ (10 ** np.arange(digits - 1, -1, -1, dtype=np.int64))


def _first_missing(numbers: _Integers) -> int:
    wrong = np.flatnonzero(numbers != np.arange(len(numbers)))
    return int(wrong[0]) if len(wrong) else len(numbers)


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
