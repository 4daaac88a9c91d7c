"""One look at a stream, for people who ask how it is: everything that its files tell, and what is wrong with them.

Nothing is written, no lock is taken, and no row is read. With a readable `head.json` the cost does not grow with the
stream, but for a listing of its names, about 1 us a file. What is damaged becomes a sentence in a list of problems, and
the next best source of the same fact takes its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from lazyshard import errors
from lazyshard.format import records
from lazyshard.format.records import END, HEAD, MANIFEST, End, Head, Manifest, Retired
from lazyshard.format.seal import MixedSource, Seal, mixed_sources
from lazyshard.store import files
from lazyshard.store.files import UrlPath, is_there, read_record
from lazyshard.stream import Consumer, list_consumers, listing, read_retired
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.listing import list_chunks, read_manifest, unlisted_chunks
from lazyshard.stream.reader import GRACE_S

_T = TypeVar("_T")
Names = Callable[[int], tuple[str, ...]]  # Of a chunk's data file and seal, and of what else belongs to it

_MAX_SEAL_BYTES: Final = 4 << 20  # A larger seal, of over 100,000 rows, is not read: looks shall not burden a share
SAMPLED_CHUNKS: Final = 128  # Looked at with two calls each: on a network filesystem a call takes about a millisecond
_MOST_LOOKED_UP: Final = 1000  # Of chunks that a listing lacks, the lowest: it may be older than they are
_COUNTED_BYTES: Final = 16 << 20  # Lines of a longer file are estimated: this much is counted in about 10 ms
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at a stream has found. Times are seconds since 1970."""

    directory: Path
    looked_at: float  # by this machine's clock
    census: Census
    gone: bool | None  # the producer's process is not to be seen on this machine; None where it runs on another one
    consumers: tuple[Consumer, ...]  # by name
    unread_since: dict[str, float]  # when the first chunk that a consumer is not done with was published
    disk: DiskUse
    free: int | None  # bytes that its filesystem has left
    quarantine: Lines | None  # rows that the producer has refused, None where there is no such file
    problems: tuple[str, ...]  # what is wrong with the files, a sentence each
    mixture: tuple[MixedSource, ...] = ()  # the sources that the producer mixes by weights, up to the newest chunk
    ended: bool = False  # the producer's process is known to have ended, and not merely not to be seen


@dataclass(frozen=True, slots=True)
class Census:
    """What a stream has published."""

    native: bool  # a producer of ours fills it
    manifest: Manifest | None  # None where there is none that can be read
    head: Head | None  # likewise
    chunks: int  # those of [0, chunks), the retired ones included
    samples: int | None  # rows in them
    ended: bool  # nothing will follow
    retired: int  # the chunks of [0, retired) are deleted or being deleted
    names: Names


def take_survey(directory: Path, now: float, lost: LostChunks | None = None) -> Survey:
    """Looks at a stream once; `lost` is that of the looks before, where there are any. Raises as `take_census`."""
    problems: list[str] = []
    census = take_census(directory, problems)
    head, since = census.head, dict[str, float]()
    disk = measure_disk(directory, census.retired, census.chunks, census.names, lost or LostChunks())
    problems += _lost(disk, directory, census, now)
    consumers = tolerate(lambda: list_consumers(directory, census.chunks), problems) or ()
    for consumer in consumers:
        if consumer.chunks_before < census.chunks:
            # One that is retired or lost tells nothing.
            with contextlib.suppress(OSError):
                since[consumer.name] = files.modified_at(directory / census.names(consumer.chunks_before)[1])
    mixture: tuple[MixedSource, ...] = ()
    if census.native and census.chunks > census.retired:
        newest = census.chunks - 1
        # What is wrong with it is told by whoever looks for damage; the head counted it as published.
        with contextlib.suppress(errors.LazyShardError, OSError):
            seal = files.read_file(directory / census.names(newest)[1], _MAX_SEAL_BYTES)
            mixture = mixed_sources(Seal.decode(seal, newest).source)
    gone, ended = (None, False) if head is None else (process_gone(head), process_ended(head))
    # A manifest that is damaged is met twice.
    told, rows = tuple(dict.fromkeys(problems)), count_lines(directory / records.QUARANTINE)
    left = free_bytes(directory)
    return Survey(directory, now, census, gone, consumers, since, disk, left, rows, told, mixture, ended)


def _lost(disk: DiskUse, directory: Path, census: Census, now: float) -> list[str]:
    """Tells of chunks that are not there, unless they were retired meanwhile or are too new to be seen everywhere."""
    if not disk.missing:
        return []
    retired = tolerate(lambda: _retired_chunks(directory, census.manifest), []) or 0
    missing, newest = [chunk for chunk in disk.missing if chunk >= retired], census.chunks - 1
    while missing and missing[-1] == newest and census.head is not None and now - census.head.updated_at < GRACE_S:
        newest = missing.pop() - 1
    if not missing:
        return []
    others = f", nor are those of {len(missing) - 1} other{'s' * (len(missing) > 2)}" if missing[1:] else ""
    command = f"lazyshard verify {shlex.quote(str(directory))}"
    return [f"chunk {missing[0]} is published, but its files are not all there{others}: run `{command}`"]


def take_census(directory: Path, problems: list[str]) -> Census:
    """Counts what is published; `problems` takes what is wrong. Raises StreamMissing, FileInvalid, StreamInvalid."""
    try:
        manifest = tolerate(lambda: read_manifest(directory, None), problems)
    except NotADirectoryError as cause:
        raise errors.StreamMissing(f"{directory}: a file, not a directory", directory=str(directory)) from cause
    head = tolerate(lambda: _read_head(directory / HEAD, manifest), problems)
    native = any(is_there(directory / name) for name in (MANIFEST, HEAD, records.OWNER))
    if native and manifest is None and not is_there(directory / MANIFEST):
        problems.append(f"{directory / MANIFEST}: missing; restore it from a copy")
    files_of = partial(chunk_files, arrays=manifest is not None and manifest.arrays)
    if head is None:
        return _listed(directory, native, manifest, files_of, problems)
    # After the head: of the chunks that it names, some may have been deleted since, and are known as such then.
    retired = min(tolerate(lambda: _retired_chunks(directory, manifest), problems) or 0, head.chunks)
    if head.ended:
        # Readers go by the head; whoever comes when that is lost, and the producer, need it whole.
        tolerate(lambda: _decoded(directory / END, End.decode), problems)
    return Census(native, manifest, head, head.chunks, head.samples, head.ended, retired, files_of)


def tolerate(read: Callable[[], _T | None], problems: list[str]) -> _T | None:
    """Returns what is read, None where the file is damaged, which becomes a problem."""
    try:
        return read()
    except errors.VersionUnsupported:
        raise
    except (errors.FormatInvalid, errors.FileRefused) as error:
        problems.append(str(error))
    return None


def _read_head(path: Path, manifest: Manifest | None) -> Head | None:
    head, size = _decoded(path, Head.decode), 0 if manifest is None else manifest.samples_per_chunk
    if head is None or not size or listing.are_whole(head.chunks, head.samples, head.ended, size):
        return head
    what = f"{path}: expected {head.chunks} chunks of {size} samples, found {head.samples} samples in all"
    expected, actual = str(head.chunks * size), str(head.samples)
    raise errors.FileInvalid(what, file=str(path), field="samples", expected=expected, actual=actual)


def _retired_chunks(directory: Path, manifest: Manifest | None) -> int:
    if manifest is not None:
        return read_retired(directory, manifest.stream_id)
    # Without a manifest nothing tells whose the mark is; what it says is still the best guess.
    mark = _decoded(directory / records.RETIRED, Retired.decode)
    return 0 if mark is None else mark.chunks_before


def _decoded(path: Path, decode: Callable[[bytes, str], _T]) -> _T | None:
    """Returns what a file says that is replaced now and then, None where there is none."""
    try:
        return read_record(path, decode)
    except FileNotFoundError:
        return None


def _listed(directory: Path, native: bool, manifest: Manifest | None, canonical: Names, problems: list[str]) -> Census:
    """Counts what is published where no head tells it."""
    try:
        listed = list_chunks(directory)
    except FileNotFoundError:
        raise listing.stream_missing(directory) from None
    samples: int | None = None
    end: End | None = None
    has_head = is_there(directory / HEAD)
    if not (has_head or listed.data or listed.seals or is_there(directory / MANIFEST)):
        raise listing.stream_missing(directory)
    if not native and not listed.seals:
        raise stream_unsealed(directory, len(listed.data))
    if native:
        if not has_head:
            problems.append(f"{directory / HEAD}: missing, so the chunks were counted by listing them")
        listed = listed.starting_at(tolerate(lambda: _retired_chunks(directory, manifest), problems) or 0)
    chunks, gap, ended = listed.complete, listed.gap, not native and is_there(directory / END)
    if ended and gap is None and len(listed.data) > chunks:
        # The end of a foreign stream counts only once every data file has its marker.
        gap = chunks
    if gap is not None:
        problems.append(f"chunk {gap} lacks its data or its marker, so it and those after it do not count")
    if native:
        end = tolerate(lambda: _decoded(directory / END, End.decode), problems)
    if end is not None:
        chunks, samples = end.chunks, end.samples
    elif native and manifest is not None:
        if chunks > listed.first:
            # It may be the partial chunk of a stream whose `stream.end` is still to come.
            last = tolerate(lambda: files.read_seal(directory, chunks - 1, listed.seals[chunks - 1]), problems)
            chunks -= last is None or last.samples < manifest.samples_per_chunk
        samples = chunks * manifest.samples_per_chunk

    def files_of(chunk: int) -> tuple[str, ...]:
        data, seal, *others = canonical(chunk)
        return listed.data.get(chunk, data), listed.seals.get(chunk, seal), *others

    ended = end is not None or (ended and gap is None)
    return Census(native, manifest, None, chunks, samples, ended, min(listed.first, chunks), files_of)


def stream_unsealed(directory: Path, count: int) -> errors.FileInvalid:
    """Returns the error for a foreign directory of so many chunk files without any marker."""
    what = f"{directory}: {count} chunk files, but no {records.SEAL_SUFFIX} marker, so nothing tells which of them are"
    return errors.FileInvalid(f"{what} complete; {listing.how_to_mark(directory)}", directory=str(directory))


class DiskUse(NamedTuple):
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


def chunk_files(chunk: int, *, arrays: bool = False) -> tuple[str, ...]:
    """Returns the names of a chunk's data file, its seal, and its side file, as our own writer gives them."""
    own = records.chunk_name(chunk), records.seal_name(chunk)
    return (*own, records.arrays_name(chunk)) if arrays else own


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
    """Returns the bytes of `count` chunks of which some sizes are known, by number; the last may be a partial one."""
    known, others = sum(sizes.values()), len(sizes) - (last in sizes)
    if len(sizes) >= count:
        return known
    part = sizes.get(last, 0)
    mean = (known - part) / others if others else known
    return round(mean * (count - (last in sizes)) + part)


class LostChunks:
    """Finds chunks of which a file is not there by listings, in 5 % of the time at most; in between by the last one."""

    def __init__(self) -> None:
        self._unlisted: list[int] = []
        self._again_at = float("-inf")

    def unlisted(self, directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
        """Returns chunks of [first, stop) of which the last listing lacks a file; none of a store, which charges."""
        # A directory holds fewer: a head that names more is damaged, and takes no memory.
        if isinstance(directory, UrlPath) or stop - first > 20_000_000:
            return []
        started = time.monotonic()
        if started >= self._again_at:
            self._unlisted = files.again_if_stale(lambda: unlisted_chunks(directory, first, stop, arrays=arrays))
            ended = time.monotonic()
            self._again_at = ended + (ended - started) / 0.05
        return [chunk for chunk in self._unlisted if first <= chunk < stop]


def measure_disk(
    directory: Path, first: int, stop: int, files_of: Names = chunk_files, lost: LostChunks | None = None
) -> DiskUse:
    """Looks at sizes of some chunks of [first, stop) and of what is being written; `lost` tells others to look up."""
    # In an object store a call takes some ten milliseconds.
    looked_at = sampled_chunks(first, stop, 16 if isinstance(directory, UrlPath) else SAMPLED_CHUNKS)
    exact = len(looked_at) == stop - first
    unlisted: list[int] = []
    if lost is not None and not exact:
        unlisted = lost.unlisted(directory, first, stop, arrays=len(files_of(first)) > 2)
        looked_at = sorted({*looked_at, *unlisted[:_MOST_LOOKED_UP]})
    sizes: dict[int, int] = {}
    missing = set(unlisted[_MOST_LOOKED_UP:])
    for chunk in looked_at:
        try:
            sizes[chunk] = sum(files.size_of(directory / name) for name in files_of(chunk))
        except OSError as error:
            # A link that leads to itself leads to no file either; which of the two it is is for `verify` to tell.
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            missing.add(chunk)
    size = estimate_size(len(sizes) if exact else stop - first, sizes, stop - 1)
    for folder, _, written in () if isinstance(directory, UrlPath) else os.walk(directory / records.TEMPORARY):
        for name in written:
            # What is being written is renamed at any moment.
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
    return DiskUse(size, exact, sum(sizes.values()) / len(sizes) if sizes else None, tuple(sorted(missing)))


def count_lines(path: Path) -> Lines | None:
    """Returns how many lines a file has, estimated by its beginning if long; None for an object, or no plain file."""
    try:
        if isinstance(path, UrlPath):
            return None
        opened = files.open_file(path)
    except (errors.LazyShardError, OSError):
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
            return shutil.disk_usage(directory).free
    return None
