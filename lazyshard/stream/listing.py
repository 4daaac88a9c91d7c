"""What lies in a stream's directory, or under its URL: the manifest, and the chunks by listing it.

Listing is O(chunks): for writers, and where head.json is lost. Of foreign directories `scan_chunks` keeps numbers only.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from lazyshard.errors import FileInvalid, FileRefused, StreamInvalid, StreamMismatch, StreamMissing
from lazyshard.format import names
from lazyshard.format.names import HEAD, MANIFEST, OWNER, TEMPORARY, arrays_name, chunk_name, seal_name
from lazyshard.format.records import Head, Manifest, check_samples_per_chunk
from lazyshard.store.files import check_folder, list_names, read_record, unreadable
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


def are_whole(chunks: int, samples: int, ended: bool, size: int) -> bool:
    """Returns whether so many chunks of so many samples each, but of the last one at an end, hold so many in all."""
    short = chunks * size - samples
    return 0 <= short < size and (ended or not short)


def invalid(directory: Path | str, what: str, chunk: int | None = None) -> StreamInvalid:
    """Returns the error of a directory whose files contradict each other."""
    return StreamInvalid(f"{directory}: {what}", directory=str(directory), chunk=chunk)


def read_manifest(directory: Path, samples_per_chunk: int | None) -> Manifest | None:
    """Returns a stream's manifest, None where there is none; the directory may not be there.

    Raises:
        StreamMismatch: the stream has another number of samples per chunk than the caller asks for, if not None.
        FileInvalid, VersionUnsupported, OSError: the manifest cannot be used or read.
        ValueError: samples_per_chunk is impossible.
    """
    if samples_per_chunk is not None:
        check_samples_per_chunk(samples_per_chunk)
    try:
        manifest = read_record(directory / MANIFEST, Manifest.decode)
    except FileNotFoundError:
        return None
    except FileInvalid as error:
        error.args = (f"{error}; restore it from a copy",)
        raise
    if samples_per_chunk not in (None, size := manifest.samples_per_chunk):
        what = f"{directory}: the stream has {size} samples per chunk, asked for {samples_per_chunk}, and that never"
        told = {"directory": str(directory), "expected": str(samples_per_chunk), "actual": str(size)}
        raise StreamMismatch(f"{what} changes. Use {size}, or another directory", **told)
    return manifest


def stream_missing(directory: Path) -> StreamMissing:
    """Returns the error of a directory that is none of a stream, and none at all maybe."""
    what = f"{directory}: there is no stream: neither {MANIFEST} nor any chunk file; see whether the path is right"
    return StreamMissing(f"{what}, and start its producer", directory=str(directory))


def how_to_mark(directory: Path) -> str:
    """Returns in words what to do with chunk files that have no markers."""
    files = shlex.quote(f"{directory}/chunk_*.jsonl")
    what = "a producer makes an empty marker when its chunk is complete (`touch chunk_00000.jsonl.completed`); if none"
    command = f"lazyshard-producer run --source {files} --out NEW --samples-per-chunk N"
    return f"{what} is to come, make a stream of their rows: `{command}`"


def manifest_lost(directory: Path, beside: str) -> StreamInvalid:
    """Returns the error of a stream without its manifest; by the file `beside` it is known for one of ours."""
    return invalid(directory, f"there are chunks and {beside}, but {MANIFEST} is missing; restore it from a copy")


def other_files(names: Iterable[str]) -> str:
    """Returns some of the names in a directory, for people; nothing if it is empty, or one may be of a stream."""
    seen = sorted(names)
    if any(name.startswith((".", "chunk_", "stream.", "head.json")) for name in seen):
        return ""
    return ", ".join(seen[:3]) + (", ..." if len(seen) > 3 else "")


@dataclass(frozen=True)
class Listing:
    """The chunk files of a directory, by chunk number. Those below `first` are retired."""

    data: dict[int, str]
    seals: dict[int, str]
    arrays: dict[int, str] = field(default_factory=dict)
    tokens: list[tuple[int, str]] = field(default_factory=list)  # lengths that an earlier release has left
    first: int = 0
    leftovers: list[str] = field(default_factory=list)  # files of retired chunks, markers before data

    @cached_property
    def sealed(self) -> int:
        """The chunks of the half-open range [first, sealed) have a marker."""
        return next(chunk for chunk in itertools.count(self.first) if chunk not in self.seals)

    @cached_property
    def complete(self) -> int:
        """The chunks of the half-open range [first, complete) have marker and data."""
        return next(chunk for chunk in itertools.count(self.first) if not (chunk in self.seals and chunk in self.data))

    @property
    def gap(self) -> int | None:
        """The first chunk that is not complete although a later one has a marker; None if there is no such chunk."""
        return self.complete if len(self.seals) > self.complete - self.first else None

    def starting_at(self, first: int) -> Listing:
        """Returns the listing of the chunks from `first` on, those below it being retired."""
        if first == self.first:
            return self
        leftovers, kept = [name for chunk, name in sorted(self.tokens) if chunk < first], []
        for kind in (self.seals, self.data, self.arrays):
            leftovers += [kind[chunk] for chunk in sorted(kind) if chunk < first]
            kept.append({chunk: name for chunk, name in kind.items() if chunk >= first})
        seals, data, arrays = kept
        return Listing(data, seals, arrays, [one for one in self.tokens if one[0] >= first], first, leftovers)


def list_chunks(directory: Path) -> Listing:
    """Lists the chunk files of a directory; of a stream of ours take `list_kept`, which knows what was deleted.

    Raises StreamInvalid: two files have the same number, padded differently. AccessRefused, OSError.
    """
    return sort_names(names_in(directory), directory)


@dataclass(frozen=True, slots=True)
class Scan:
    """What is known of a stream that nobody deletes from."""

    complete: int  # the chunks of the half-open range [0, complete) have marker and data
    data: int
    seals: int
    odd: dict[int, str]  # data files that are not named as `chunk_name` says
    ours: frozenset[str]  # names of files that only producers of ours write
    ended: bool = False  # whether there was an end before it was listed
    listed: int = 0  # how many chunks were complete when it was listed, before others were looked up; 0 if it was not
    again_at: float = 0.0  # when it may be listed again, in seconds of `time.monotonic`

    @property
    def gap(self) -> int | None:
        """As `Listing.gap`."""
        return self.complete if self.seals > self.complete else None

    def data_name(self, chunk: int) -> str:
        """Returns the file name of a chunk's rows."""
        return self.odd.get(chunk, chunk_name(chunk))


def scan_chunks(directory: Path) -> Scan:
    """Lists the chunk files of a directory as `list_chunks` does, and keeps numbers instead of names."""
    listed = names_in(directory)
    found = sort_names(listed, directory)
    odd = {chunk: name for chunk, name in found.data.items() if name != chunk_name(chunk)}
    return Scan(found.complete, len(found.data), len(found.seals), odd, _OURS.intersection(listed))


def names_in(directory: Path) -> list[str]:
    """Returns the names in a directory. Raises AccessRefused: this process may not list it."""
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
        parsed = [names.parse_chunk_name(name) for folder in own for name in list_names(folder)]
    except (OSError, FileRefused):
        return None
    return any(one is not None and not one[1] and one[0] >= chunks for one in parsed) if own else None


def unlisted_chunks(directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
    """Returns which chunks of [first, stop) of a stream of ours lack a file in the listing, which may be old."""
    listed = set(os.listdir(directory))
    kinds = (chunk_name, seal_name, arrays_name) if arrays else (chunk_name, seal_name)
    return [chunk for chunk in range(first, stop) if any(name(chunk) not in listed for name in kinds)]


def sort_names(listed: Iterable[str], directory: Path | str) -> Listing:
    """Returns the listing of a place that holds files of these names. Raises StreamInvalid as `list_chunks`."""
    found = Listing({}, {})
    for name in listed:
        parsed = names.parse_chunk_name(name)
        if parsed is None:
            if (number := names.parse_arrays_name(name)) is not None:
                found.arrays[number] = name
            elif (number := names.parse_tokens_name(name)) is not None:
                found.tokens.append((number, name))
            continue
        chunk, is_seal = parsed
        kind = found.seals if is_seal else found.data
        if chunk in kind:
            first, second = sorted((kind[chunk], name))
            raise invalid(directory, f"{first} and {second} are both chunk {chunk}; keep one of them", chunk)
        kind[chunk] = name
    return found
