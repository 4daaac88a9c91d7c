"""Which chunks a directory holds, by listing it.

O(chunks): for writers, for foreign directories, and where head.json is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lazyshard.errors import StreamInvalid
from lazyshard.format.names import parse_arrays_name, parse_chunk_name, parse_tokens_name
from lazyshard.storage.files import list_names, unreadable


def other_files(names: Iterable[str]) -> str:
    """Returns some of the names in a directory, for people; nothing if it is empty, or one may be of a stream."""
    seen = sorted(names)
    if any(name.startswith((".", "chunk_", "stream.", "head.json")) for name in seen):
        return ""
    return ", ".join(seen[:3]) + (", ..." if len(seen) > 3 else "")


@dataclass(frozen=True, slots=True)
class Listing:
    """The chunk files of a directory.

    Attributes:
        data: file name of each chunk's rows, by chunk number.
        seals: file name of each chunk's marker, by chunk number.
        sealed: the chunks of the half-open range [first, sealed) have a marker.
        complete: those of the half-open range [first, complete) have marker and data.
        first: the first chunk that is looked at; those below it are retired.
        leftovers: names of files of retired chunks: their deletion is under way, or was undone by a power cut. What was
            measured comes before markers, and those before data.
        arrays: name of each chunk's side file, by chunk number; of those only that are not retired.
        tokens: names of the files of measured lengths of each chunk, by chunk number.
    """

    data: dict[int, str]
    seals: dict[int, str]
    sealed: int
    complete: int
    first: int = 0
    leftovers: list[str] = field(default_factory=list)
    arrays: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)

    @property
    def gap(self) -> int | None:
        """The first chunk that is not complete although a later one has a marker; None if there is no such chunk."""
        return self.complete if len(self.seals) > self.complete - self.first else None

    def starting_at(self, first: int) -> Listing:
        """Returns the listing of the chunks from `first` on, those below it being retired."""
        if first == self.first:
            return self
        data = {chunk: name for chunk, name in self.data.items() if chunk >= first}
        seals = {chunk: name for chunk, name in self.seals.items() if chunk >= first}
        arrays = {chunk: name for chunk, name in self.arrays.items() if chunk >= first}
        tokens = {chunk: names for chunk, names in self.tokens.items() if chunk >= first}
        leftovers = [name for chunk in sorted(self.tokens) if chunk < first for name in self.tokens[chunk]]
        kinds = (self.seals, self.data, self.arrays)
        leftovers += [names[chunk] for names in kinds for chunk in sorted(names) if chunk < first]
        return _contiguous(Listing(data, seals, first, first, first, leftovers, arrays, tokens))


def list_chunks(directory: Path) -> Listing:
    """Lists the chunk files of a directory; anything else in it is passed over.

    Of a stream of ours take `list_kept` (`lazyshard.storage.retire`), which knows what was deleted.

    Raises:
        StreamInvalid: two files have the same chunk number (padded differently).
        FileUnreadable: this process may not list it.
        OSError: the directory cannot be listed.
    """
    try:
        found = list_names(directory)
    except PermissionError as cause:
        raise unreadable(directory) from cause
    return sort_names(found, str(directory))


def sort_names(names: Iterable[str], directory: str) -> Listing:
    """Returns the listing of a directory, or of another place, that holds files of these names.

    Raises:
        StreamInvalid: two have the same chunk number (padded differently).
    """
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
    """Returns the same with its ranges."""
    sealed = complete = found.first
    while sealed in found.seals:
        sealed += 1
    while complete < sealed and complete in found.data:
        complete += 1
    return replace(found, sealed=sealed, complete=complete)
