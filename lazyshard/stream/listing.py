"""The contents of a stream's directory or URL: the manifest, a listing of the chunks, and how chunks are deleted.

Listing is O(chunks): it is for writers, and for readers if head.json is lost.

The order of steps makes deletion safe. First `retired.json` becomes durable: from then on the chunks below its number
are gone for all processes. Then the files are deleted, for each chunk its seal, its data and its side file in this
order, so that there is never a seal without data; the directory is synced once at the end. A kill in between, or a
power cut that restores deleted files, leaves files below the number, which the next start of a producer removes. The
newest chunk is never deleted: its seal holds the position from which a producer continues.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lazyshard.errors import FileInvalid, FileRefused, StreamInvalid, StreamMismatch, StreamMissing
from lazyshard.format import records
from lazyshard.format.records import MANIFEST, RETIRED, TEMPORARY, Head, Manifest, Retired, check_samples_per_chunk
from lazyshard.store.durable import publish_bytes, remove, sync_directory
from lazyshard.store.files import UrlPath, check_folder, find_record, list_names, unreadable


class Published(NamedTuple):
    """What is published at one time: the chunks [0, chunks)."""

    chunks: int
    samples: int
    ended: bool  # whether the stream has ended
    head: Head | None = None
    gap: int | None = None  # a chunk that lacks its data or its marker although a later one is complete
    short: int | None = None  # rows of a foreign stream's newest chunk, which counts only once the stream has ended


def invalid(directory: Path | str, what: str, chunk: int | None = None) -> StreamInvalid:
    """Returns the error for a directory whose files contradict each other."""
    return StreamInvalid(f"{directory}: {what}", directory=str(directory), chunk=chunk)


def read_manifest(directory: Path, samples_per_chunk: int | None) -> Manifest | None:
    """Returns a stream's manifest, None if there is none; the directory need not exist.

    Raises:
        StreamMismatch: `samples_per_chunk` is not None, and the stream has another number of samples per chunk.
        FileInvalid, VersionUnsupported, OSError: the manifest cannot be used or read.
        ValueError: `samples_per_chunk` is invalid.
    """
    if samples_per_chunk is not None:
        check_samples_per_chunk(samples_per_chunk)
    try:
        manifest = find_record(directory / MANIFEST, Manifest.decode)
    except FileInvalid as error:
        error.args = (f"{error}; restore it from a copy",)
        raise
    if manifest is not None and samples_per_chunk not in (None, size := manifest.samples_per_chunk):
        what = f"{directory}: the stream has {size} samples per chunk, which never changes; got"
        told = {"directory": str(directory), "expected": str(samples_per_chunk), "actual": str(size)}
        raise StreamMismatch(f"{what} {samples_per_chunk}. Use {size}, or another directory", **told)
    return manifest


def stream_missing(directory: Path) -> StreamMissing:
    """Returns the error for a directory that holds no stream, or does not exist."""
    what = f"{directory}: there is no stream: neither {MANIFEST} nor any chunk file; check the path"
    return StreamMissing(f"{what}, and start its producer", directory=str(directory))


def stream_unsealed(directory: Path, count: int) -> FileInvalid:
    """Returns the error for a foreign directory of `count` chunk files without any marker."""
    what = f"{directory}: {count} chunk files but no {records.SEAL_SUFFIX} marker, so it is unknown which are complete"
    way = "a producer makes an empty marker when its chunk is complete (`touch chunk_00000.jsonl.completed`); if no"
    command = f"lazyshard-producer run --source {shlex.quote(f'{directory}/chunk_*.jsonl')} --out NEW"
    return FileInvalid(f"{what}; {way} producer runs, use `{command} --samples-per-chunk N`", directory=str(directory))


def manifest_lost(directory: Path, beside: str) -> StreamInvalid:
    """Returns the error for a native stream without its manifest; the file `beside` shows that it is native."""
    return invalid(directory, f"there are chunks and {beside}, but {MANIFEST} is missing; restore it from a copy")


def other_files(names: Iterable[str]) -> str:
    """Returns some names of a directory for a message; "" if it is empty or a name may belong to a stream."""
    seen = sorted(names)
    if any(name.startswith((".", "chunk_", "stream.", "head.json")) for name in seen):
        return ""
    return ", ".join(seen[:3]) + (", ..." if len(seen) > 3 else "")


def path_hint(directory: Path) -> str:
    """Returns a hint if the directory, which a producer makes, does not exist yet, or holds something else."""
    try:
        found = "" if isinstance(directory, UrlPath) else other_files(list_names(directory))
    except FileNotFoundError:
        return "; there is no such directory yet, so check the path"
    except OSError:
        found = ""
    return f"; the directory holds other files ({found}), so check the path" if found else ""


@dataclass(frozen=True)
class Listing:
    """The chunk files of a directory, by chunk number. Chunks below `first` are retired."""

    data: dict[int, str]
    seals: dict[int, str]
    arrays: dict[int, str] = field(default_factory=dict)
    tokens: list[tuple[int, str]] = field(default_factory=list)  # files of lengths, written by an earlier release
    first: int = 0
    leftovers: list[str] = field(default_factory=list)  # files of retired chunks, markers before data

    @cached_property
    def sealed(self) -> int:
        """The chunks [first, sealed) have a marker."""
        return next(chunk for chunk in itertools.count(self.first) if chunk not in self.seals)

    @cached_property
    def complete(self) -> int:
        """The chunks [first, complete) have a marker and data."""
        return next(chunk for chunk in itertools.count(self.first) if not (chunk in self.seals and chunk in self.data))

    @property
    def gap(self) -> int | None:
        """The first chunk that is incomplete although a later one has a marker, or None."""
        return self.complete if len(self.seals) > self.complete - self.first else None

    def starting_at(self, first: int) -> Listing:
        """Returns the listing of the chunks from `first` on; chunks below it are retired."""
        if first == self.first:
            return self
        leftovers, kept = [name for chunk, name in sorted(self.tokens) if chunk < first], []
        for kind in (self.seals, self.data, self.arrays):
            leftovers += [kind[chunk] for chunk in sorted(kind) if chunk < first]
            kept.append({chunk: name for chunk, name in kind.items() if chunk >= first})
        seals, data, arrays = kept
        return Listing(data, seals, arrays, [one for one in self.tokens if one[0] >= first], first, leftovers)


def list_chunks(directory: Path) -> Listing:
    """Lists the chunk files of a directory. For a native stream use `list_kept`, which leaves out retired chunks.

    Raises StreamInvalid if two files have the same number with different padding; AccessRefused, OSError.
    """
    return sort_names(names_in(directory), directory)


def names_in(directory: Path) -> list[str]:
    """Returns the names in a directory. Raises AccessRefused if this process may not list it."""
    try:
        return list_names(directory)
    except PermissionError as cause:
        raise unreadable(directory) from cause


def names_of(chunk: int, *, arrays: bool = False) -> list[str]:
    """Returns the names of the files of a published chunk of a native stream, its seal first."""
    return [name(chunk) for name in (records.seal_name, records.chunk_name, records.arrays_name)[: 2 + arrays]]


def has_unpublished_rows(directory: Path, chunks: int) -> bool | None:
    """Returns whether a running producer has a file under `.tmp/` of a chunk from `chunks` on; None if unknown."""
    if isinstance(directory, UrlPath):
        return None
    try:
        own = [check_folder(directory / TEMPORARY / name) for name in list_names(check_folder(directory / TEMPORARY))]
        parsed = [records.parse_chunk_name(name) for folder in own for name in list_names(folder)]
    except (OSError, FileRefused):
        return None
    return any(one is not None and not one[1] and one[0] >= chunks for one in parsed) if own else None


def unlisted_chunks(directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
    """Returns which of the native chunks [first, stop) lack a file in the listing, which may be outdated."""
    listed = set(os.listdir(directory))
    return [chunk for chunk in range(first, stop) if not listed.issuperset(names_of(chunk, arrays=arrays))]


def sort_names(listed: Iterable[str], directory: Path | str) -> Listing:
    """Returns the listing of files with these names. Raises StreamInvalid as `list_chunks` does."""
    found = Listing({}, {})
    for name in listed:
        if (parsed := records.parse_chunk_name(name)) is not None:
            chunk, kind = parsed[0], found.seals if parsed[1] else found.data
            if chunk in kind:
                first, second = sorted((kind[chunk], name))
                raise invalid(directory, f"{first} and {second} are both chunk {chunk}; keep one of them", chunk)
            kind[chunk] = name
        elif (number := records.parse_arrays_name(name)) is not None:
            found.arrays[number] = name
        elif (tokens := records.TOKENS.fullmatch(name)) is not None:
            found.tokens.append((int(tokens[1]), name))
    return found


def read_retired(directory: Path, stream_id: str | None = None) -> int:
    """Returns how many chunks of a stream are retired: the chunks [0, n).

    Costs one failed open if nothing was ever deleted. Without `stream_id` the manifest is read. Raises FileInvalid,
    VersionUnsupported, OSError if a file cannot be used or read.
    """
    if (mark := find_record(directory / RETIRED, Retired.decode)) is None:
        return 0
    if stream_id is None and (manifest := read_manifest(directory, None)) is not None:
        stream_id = manifest.stream_id
    # A user who replaces a stream by a new one may overlook this file. It must not delete the new chunks.
    return mark.chunks_before if mark.stream_id == stream_id else 0


def list_kept(directory: Path, stream_id: str | None = None, *, arrays: bool = True) -> Listing:
    """Lists the chunks of a native stream that are not retired. Raises as `list_chunks` and `read_retired` do.

    Without `arrays`, files named like side files do not belong to the stream: they are neither listed nor leftovers.
    """
    found = list_chunks(directory)
    if not arrays:
        found = replace(found, arrays={})
    # After the listing: the mark precedes each deletion, so every chunk that was missing above is below it now.
    return found.starting_at(read_retired(directory, stream_id))


def complete_retirement(directory: Path, listing: Listing) -> None:
    """Removes files of retired chunks that still exist, or exist again. The caller holds the writer's lock."""
    for name in listing.leftovers:
        remove(directory / name)
    if listing.leftovers:
        sync_directory(directory)


def retire(
    directory: Path, chunks_before: int, published_chunks: int, *, check: Callable[[], Path | None] = lambda: None
) -> int:
    """Deletes the chunks [0, chunks_before), but never the newest one; returns how many were deleted.

    Completes an earlier call that failed. After an OSError, the next call or start completes this one.

    Args:
        directory: the stream's directory, whose writer's lock the caller holds.
        chunks_before: no consumer needs the chunks below this number.
        published_chunks: how many chunks have ever been published, including retired ones.
        check: called before anything is changed; raises if the stream belongs to another producer now, and returns the
            directory from which this one may publish. None if the caller excludes other producers itself.
    """
    if (manifest := read_manifest(directory, None)) is None:
        raise invalid(directory, f"there is no {MANIFEST}, so this is not a stream whose chunks can be deleted")
    marked = read_retired(directory, manifest.stream_id)
    first, target = marked, max(marked, min(chunks_before, published_chunks - 1))
    while first and _is_there(directory, first - 1, manifest.arrays):
        first -= 1
    if first == target:
        return 0
    folder = check()
    if target > marked:
        _write_mark(directory, folder, Retired(manifest.stream_id, target, time.time()))
    else:
        # The mark may be from a call that failed after the rename: visible, but not on the device yet.
        sync_directory(directory)
    for chunk in range(first, target):
        for name in (records.tokens_name(chunk), *names_of(chunk, arrays=manifest.arrays)):
            remove(directory / name)
    sync_directory(directory)
    return target - first


def _is_there(directory: Path, chunk: int, arrays: bool) -> bool:
    return any(os.path.lexists(directory / name) for name in names_of(chunk, arrays=arrays))


def _write_mark(directory: Path, folder: Path | None, mark: Retired) -> None:
    temporary = (folder or directory / TEMPORARY) / RETIRED
    if folder is None:
        temporary.parent.mkdir(exist_ok=True)
        temporary = check_folder(temporary.parent) / f"{RETIRED}.{secrets.token_hex(8)}"
    try:
        publish_bytes(mark.encode(), directory / RETIRED, temporary)
    finally:
        with contextlib.suppress(OSError):
            remove(temporary)
