"""One look at a stream, for people who ask how it is: everything that its files tell, and what is wrong with them.

Nothing is written, no lock is taken, and no row is read. With a readable `head.json` the cost does not grow with the
stream, but for a listing of its names, about 1 us a file. What is damaged becomes a sentence in a list of problems, and
the next best source of the same fact takes its place: chunks are counted by a listing where the head is lost.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from lazyshard import errors
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, QUARANTINE, RETIRED, SEAL_SUFFIX
from lazyshard.format.records import End, Head, Manifest, Retired
from lazyshard.format.seal import MixedSource, Seal, mixed_sources
from lazyshard.inspection import disk_use
from lazyshard.store.files import is_there, modified_at, read_file, read_replaced_file
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.listing import Listing, list_chunks
from lazyshard.stream.manifest import how_to_mark, read_manifest, stream_missing
from lazyshard.stream.reader import GRACE_S
from lazyshard.stream.retire import read_retired

_T = TypeVar("_T")

_MAX_SEAL_BYTES: Final = 4 << 20  # A larger seal, of over 100,000 rows, is not read: looks shall not burden a share


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at a stream has found. Times are seconds since 1970."""

    directory: Path
    looked_at: float  # by this machine's clock
    census: Census
    gone: bool | None  # the producer's process is not to be seen on this machine; None where it runs on another one
    consumers: tuple[Consumer, ...]  # by name
    unread_since: dict[str, float]  # when the first chunk that a consumer is not done with was published
    disk: disk_use.DiskUse
    free: int | None  # bytes that its filesystem has left
    quarantine: disk_use.Lines | None  # rows that the producer has refused, None where there is no such file
    problems: tuple[str, ...]  # what is wrong with the files, a sentence each
    mixture: tuple[MixedSource, ...] = ()  # the sources that the producer mixes by weights, up to the newest chunk
    ended: bool = False  # the producer's process is known to have ended, and not merely not to be seen


def take_survey(directory: Path, now: float, lost: disk_use.LostChunks | None = None) -> Survey:
    """Looks at a stream once; `lost` is that of the looks before, where there are any. Raises as `take_census`."""
    problems: list[str] = []
    census = take_census(directory, problems)
    disk = disk_use.measure_disk(directory, census.retired, census.chunks, census.names, lost or disk_use.LostChunks())
    problems += _lost(disk, directory, census, now)
    consumers = tolerate(lambda: list_consumers(directory, census.chunks), problems) or ()
    head, since = census.head, {}
    for consumer in consumers:
        if consumer.chunks_before < census.chunks:
            # One that is retired or lost tells nothing.
            with contextlib.suppress(OSError):
                since[consumer.name] = modified_at(directory / census.names(consumer.chunks_before)[1])
    return Survey(
        directory=directory,
        looked_at=now,
        census=census,
        gone=None if head is None else process_gone(head),
        ended=head is not None and process_ended(head),
        consumers=consumers,
        unread_since=since,
        disk=disk,
        free=disk_use.free_bytes(directory),
        quarantine=disk_use.count_lines(directory / QUARANTINE),
        # A manifest that is damaged is met twice.
        problems=tuple(dict.fromkeys(problems)),
        mixture=_read_mixture(directory, census),
    )


def _lost(disk: disk_use.DiskUse, directory: Path, census: Census, now: float) -> list[str]:
    """Tells of chunks that are not there, unless they were retired meanwhile or are too new to be seen everywhere."""
    if not disk.missing:
        return []
    retired = tolerate(lambda: _retired_chunks(directory, census.manifest), []) or 0
    missing = [chunk for chunk in disk.missing if chunk >= retired]
    newest = census.chunks - 1
    if census.head is not None and now - census.head.updated_at < GRACE_S:
        while missing and missing[-1] == newest:
            missing.pop()
            newest -= 1
    if not missing:
        return []
    others = f", nor are those of {len(missing) - 1} other{'s' * (len(missing) > 2)}" if missing[1:] else ""
    command = f"lazyshard verify {shlex.quote(str(directory))}"
    return [f"chunk {missing[0]} is published, but its files are not all there{others}: run `{command}`"]


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
    names: Callable[[int], tuple[str, ...]]  # of a chunk's data file and seal, and of what else belongs to it


def take_census(directory: Path, problems: list[str]) -> Census:
    """Counts what is published; `problems` takes what is wrong with its files, a sentence each.

    Raises:
        StreamMissing: there is no stream in it.
        StreamUnsealed: chunk files without any marker.
        StreamInvalid: two files have the same chunk number.
        VersionUnsupported: a later format.
        FileUnreadable, OSError: it cannot be read.
    """
    manifest = tolerate(lambda: _read_manifest(directory), problems)
    head = tolerate(lambda: _read_head(directory, manifest), problems)
    native = any(is_there(directory / name) for name in (MANIFEST, HEAD, OWNER))
    if native and manifest is None and not is_there(directory / MANIFEST):
        problems.append(f"{directory / MANIFEST}: missing; restore it from a copy")
    if head is None:
        return _listed(directory, native, manifest, problems)
    # After the head: of the chunks that it names, some may have been deleted since, and are known as such then.
    retired = tolerate(lambda: _retired_chunks(directory, manifest), problems) or 0
    if head.ended:
        # Readers go by the head; whoever comes when that is lost, and the producer, need it whole.
        tolerate(lambda: _decoded(directory / END, End.decode), problems)
    names = _names_in(manifest)
    return Census(native, manifest, head, head.chunks, head.samples, head.ended, min(retired, head.chunks), names)


def tolerate(read: Callable[[], _T | None], problems: list[str]) -> _T | None:
    """Returns what is read, None where the file is damaged, which becomes a problem."""
    try:
        return read()
    except errors.VersionUnsupported:
        raise
    except (errors.FormatInvalid, errors.FileRefused) as error:
        problems.append(str(error))
    return None


def _read_manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory, None)
    except NotADirectoryError as cause:
        raise errors.StreamMissing(
            f"{directory}: expected the directory of a stream, found a file", directory=str(directory)
        ) from cause


def _read_head(directory: Path, manifest: Manifest | None) -> Head | None:
    path = directory / HEAD
    head = _decoded(path, Head.decode)
    if head is not None and manifest is not None:
        full = head.chunks * manifest.samples_per_chunk
        if not 0 <= full - head.samples < manifest.samples_per_chunk or (full > head.samples and not head.ended):
            raise errors.FileInvalid(
                f"{path}: expected {head.chunks} chunks of {manifest.samples_per_chunk} samples, found {head.samples} "
                f"samples in all",
                file=str(path),
                field="samples",
                expected=str(full),
                actual=str(head.samples),
            )
    return head


def _retired_chunks(directory: Path, manifest: Manifest | None) -> int:
    if manifest is not None:
        return read_retired(directory, manifest.stream_id)
    # Without a manifest nothing tells whose the mark is; what it says is still the best guess.
    mark = _decoded(directory / RETIRED, Retired.decode)
    return 0 if mark is None else mark.chunks_before


def _decoded(path: Path, decode: Callable[[bytes, str], _T]) -> _T | None:
    """Returns what a file says that is replaced now and then, None where there is none."""
    try:
        return read_replaced_file(path, lambda data: decode(data, str(path)))
    except FileNotFoundError:
        return None


def _listed(directory: Path, native: bool, manifest: Manifest | None, problems: list[str]) -> Census:
    try:
        listing = list_chunks(directory)
    except FileNotFoundError:
        listing = None
    known = any(is_there(directory / name) for name in (MANIFEST, HEAD))
    if listing is None or not (known or listing.data or listing.seals):
        raise stream_missing(directory)
    if not native and not listing.seals:
        raise stream_unsealed(directory, len(listing.data))
    if native and not is_there(directory / HEAD):
        problems.append(f"{directory / HEAD}: missing, so the chunks were counted by listing them")
    if native:
        listing = listing.starting_at(tolerate(lambda: _retired_chunks(directory, manifest), problems) or 0)
    gap = listing.gap
    ended = not native and is_there(directory / END)
    if ended and gap is None and len(listing.data) > listing.complete:
        # The end of a foreign stream counts only once every data file has its marker.
        gap = listing.complete
    if gap is not None:
        problems.append(f"chunk {gap} lacks its data or its marker, so it and those after it do not count")
    canonical = _names_in(manifest)

    def names(chunk: int) -> tuple[str, ...]:
        data, seal, *others = canonical(chunk)
        return listing.data.get(chunk, data), listing.seals.get(chunk, seal), *others

    chunks, samples = listing.complete, None
    if native:
        chunks, samples, ended = _count(directory, manifest, listing, problems)
    return Census(
        native, manifest, None, chunks, samples, ended and (native or gap is None), min(listing.first, chunks), names
    )


def stream_unsealed(directory: Path, count: int) -> errors.StreamUnsealed:
    """Returns the error for a foreign directory of so many chunk files without any marker."""
    return errors.StreamUnsealed(
        f"{directory}: {count} chunk files, but no {SEAL_SUFFIX} marker, so nothing tells which of them are complete; "
        f"{how_to_mark(directory)}",
        directory=str(directory),
    )


def _count(
    directory: Path, manifest: Manifest | None, listing: Listing, problems: list[str]
) -> tuple[int, int | None, bool]:
    """Returns chunks, samples, and whether the stream has ended, of a native stream without its head."""
    end = tolerate(lambda: _decoded(directory / END, End.decode), problems)
    if end is not None:
        return end.chunks, end.samples, True
    chunks = listing.complete
    if manifest is None:
        return chunks, None, False
    if chunks > listing.first:
        # It may be the partial chunk of a stream whose `stream.end` is still to come.
        path = directory / listing.seals[chunks - 1]
        last = tolerate(lambda: Seal.decode(read_file(path), chunks - 1, str(path)), problems)
        if last is None or last.samples < manifest.samples_per_chunk:
            chunks -= 1
    return chunks, chunks * manifest.samples_per_chunk, False


def _names_in(manifest: Manifest | None) -> Callable[[int], tuple[str, ...]]:
    return disk_use.names_with_arrays if manifest is not None and manifest.arrays else disk_use.canonical_names


def _read_mixture(directory: Path, census: Census) -> tuple[MixedSource, ...]:
    """Returns how the sources are mixed up to the newest chunk, by one small read; nothing where that cannot be."""
    if not census.native or census.chunks <= census.retired:
        return ()
    newest = census.chunks - 1
    path = directory / census.names(newest)[1]
    try:
        return mixed_sources(Seal.decode(read_file(path, _MAX_SEAL_BYTES), newest, str(path)).source)
    except (errors.LazyShardError, OSError):
        # What is wrong with it is told by whoever looks for damage; the head counted it as published.
        return ()
