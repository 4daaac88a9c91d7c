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

from lazyshard.errors import (
    FileInvalid,
    FileRefused,
    FormatInvalid,
    LazyShardError,
    StreamMissing,
    StreamUnsealed,
    VersionUnsupported,
)
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, QUARANTINE, RETIRED, SEAL_SUFFIX
from lazyshard.format.records import End, Head, Manifest, Retired
from lazyshard.format.seal import MixedSource, Seal, mixed_sources
from lazyshard.inspection.disk_use import (
    DiskUse,
    Lines,
    LostChunks,
    canonical_names,
    count_lines,
    free_bytes,
    measure_disk,
    names_with_arrays,
)
from lazyshard.store.files import is_there, modified_at, read_file, read_replaced_file
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.listing import Listing, list_chunks
from lazyshard.stream.manifest import how_to_mark, read_manifest, stream_missing
from lazyshard.stream.reader import GRACE_S
from lazyshard.stream.retire import read_retired

_T = TypeVar("_T")

_MAX_SEAL_BYTES: Final = 4 << 20
"""A larger seal, of more than about 100,000 rows, is not read: looks every other second shall not burden a share."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at a stream has found.

    Attributes:
        directory: the stream's directory.
        looked_at: seconds since 1970, by this machine's clock.
        census: what is published, and what the producer tells of itself.
        gone: whether the producer's process is not to be seen on this machine; None where it runs on another one.
        consumers: by name.
        unread_since: by consumer, when the first chunk that it is not done with was published, in seconds since 1970;
            none for those that are done with all, and where that chunk is not there.
        disk: what the stream takes.
        free: bytes that its filesystem has left, None where unknown.
        quarantine: rows that the producer has refused, None where there is no such file.
        problems: what is wrong with the files, a sentence each.
        mixture: the sources that the producer mixes by weights, up to the newest chunk; none where it does not.
        ended: whether the producer's process is known to have ended, not merely not to be seen.
    """

    directory: Path
    looked_at: float
    census: Census
    gone: bool | None
    consumers: tuple[Consumer, ...]
    unread_since: dict[str, float]
    disk: DiskUse
    free: int | None
    quarantine: Lines | None
    problems: tuple[str, ...]
    mixture: tuple[MixedSource, ...] = ()
    ended: bool = False


def take_survey(directory: Path, now: float, lost: LostChunks | None = None) -> Survey:
    """Looks at a stream once; `lost` is that of the looks before, where there are any.

    Raises:
        StreamMissing, StreamUnsealed, StreamInvalid, VersionUnsupported, OSError: as `take_census`.
    """
    problems: list[str] = []
    census = take_census(directory, problems)
    disk = measure_disk(directory, census.retired, census.chunks, census.names, lost or LostChunks())
    problems += _lost(disk, directory, census, now)
    consumers = tolerate(lambda: list_consumers(directory, census.chunks), problems) or ()
    head = census.head
    return Survey(
        directory=directory,
        looked_at=now,
        census=census,
        gone=None if head is None else process_gone(head),
        ended=head is not None and process_ended(head),
        consumers=consumers,
        unread_since=_unread_since(directory, consumers, census),
        disk=disk,
        free=free_bytes(directory),
        quarantine=count_lines(directory / QUARANTINE),
        # A manifest that is damaged is met twice.
        problems=tuple(dict.fromkeys(problems)),
        mixture=_read_mixture(directory, census),
    )


def _lost(disk: DiskUse, directory: Path, census: Census, now: float) -> list[str]:
    """Tells of chunks that are not there, unless they were retired meanwhile or are too new to be seen everywhere."""
    if not disk.missing:
        return []
    retired = tolerate(lambda: retired_chunks(directory, census.manifest), []) or 0
    missing = [chunk for chunk in disk.missing if chunk >= retired]
    newest = census.chunks - 1
    if census.head is not None and now - census.head.updated_at < GRACE_S:
        while missing and missing[-1] == newest:
            missing.pop()
            newest -= 1
    if not missing:
        return []
    others = (
        f", nor are those of {len(missing) - 1} {'other' if len(missing) == 2 else 'others'}" if missing[1:] else ""
    )
    command = f"lazyshard verify {shlex.quote(str(directory))}"
    return [f"chunk {missing[0]} is published, but its files are not all there{others}: run `{command}`"]


def _unread_since(directory: Path, consumers: tuple[Consumer, ...], census: Census) -> dict[str, float]:
    since = {}
    for consumer in consumers:
        if consumer.chunks_before < census.chunks:
            # One that is retired or lost tells nothing.
            with contextlib.suppress(OSError):
                since[consumer.name] = modified_at(directory / census.names(consumer.chunks_before)[1])
    return since


@dataclass(frozen=True, slots=True)
class Census:
    """What a stream has published.

    Attributes:
        native: whether a producer of ours fills it.
        manifest: its manifest, None where there is none that can be read.
        head: what its producer tells of itself, None where there is nothing that can be read.
        chunks: published chunks, the retired ones included: those of the half-open range [0, chunks).
        samples: rows in them, None where that is not known.
        ended: nothing will follow.
        retired: the chunks of the half-open range [0, retired) are deleted or being deleted.
        names: returns the names of a chunk's data file and seal, and of what else belongs to it.
    """

    native: bool
    manifest: Manifest | None
    head: Head | None
    chunks: int
    samples: int | None
    ended: bool
    retired: int
    names: Callable[[int], tuple[str, ...]]


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
    if head is not None:
        # After the head: of the chunks that it names, some may have been deleted since, and are known as such then.
        retired = tolerate(lambda: retired_chunks(directory, manifest), problems) or 0
        if head.ended:
            # Readers go by the head; whoever comes when that is lost, and the producer, need it whole.
            tolerate(lambda: _read_end(directory), problems)
        first = min(retired, head.chunks)
        return Census(native, manifest, head, head.chunks, head.samples, head.ended, first, _names_in(manifest))
    return _listed(directory, native, manifest, problems)


def tolerate(read: Callable[[], _T | None], problems: list[str]) -> _T | None:
    """Returns what is read, None where the file is damaged, which becomes a problem."""
    try:
        return read()
    except VersionUnsupported:
        raise
    except (FormatInvalid, FileRefused) as error:
        problems.append(str(error))
    return None


def _read_manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory, None)
    except NotADirectoryError as cause:
        raise StreamMissing(
            f"{directory}: expected the directory of a stream, found a file", directory=str(directory)
        ) from cause


def _read_head(directory: Path, manifest: Manifest | None) -> Head | None:
    path = directory / HEAD
    head = _decoded(path, Head.decode)
    if head is not None and manifest is not None:
        short = head.chunks * manifest.samples_per_chunk - head.samples
        if not 0 <= short < manifest.samples_per_chunk or (short and not head.ended):
            raise FileInvalid(
                f"{path}: expected {head.chunks} chunks of {manifest.samples_per_chunk} samples, found {head.samples} "
                f"samples in all",
                file=str(path),
                field="samples",
                expected=str(head.chunks * manifest.samples_per_chunk),
                actual=str(head.samples),
            )
    return head


def retired_chunks(directory: Path, manifest: Manifest | None) -> int:
    """Returns how many chunks are retired. Raises as `read_retired` does."""
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
        listing = listing.starting_at(tolerate(lambda: retired_chunks(directory, manifest), problems) or 0)
    gap = listing.gap
    ended = not native and is_there(directory / END)
    if ended and gap is None and len(listing.data) > listing.complete:
        # The end of a foreign stream counts only once every data file has its marker.
        gap = listing.complete
    if gap is not None:
        problems.append(f"chunk {gap} lacks its data or its marker, so it and those after it do not count")
    names = _names_of(listing, _names_in(manifest))
    if native:
        chunks, samples, ended = _count(directory, manifest, listing, problems)
    else:
        chunks, samples, ended = listing.complete, None, ended and gap is None
    return Census(native, manifest, None, chunks, samples, ended, min(listing.first, chunks), names)


def stream_unsealed(directory: Path, count: int) -> StreamUnsealed:
    """Returns the error for a foreign directory of so many chunk files without any marker."""
    return StreamUnsealed(
        f"{directory}: {count} chunk files, but no {SEAL_SUFFIX} marker, so nothing tells which of them are complete; "
        f"{how_to_mark(directory)}",
        directory=str(directory),
    )


def _count(
    directory: Path, manifest: Manifest | None, listing: Listing, problems: list[str]
) -> tuple[int, int | None, bool]:
    """Returns chunks, samples, and whether the stream has ended, of a native stream without its head."""
    end = tolerate(lambda: _read_end(directory), problems)
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


def _read_end(directory: Path) -> End | None:
    path = directory / END
    try:
        return End.decode(read_file(path), str(path))
    except FileNotFoundError:
        return None


def _names_in(manifest: Manifest | None) -> Callable[[int], tuple[str, ...]]:
    return names_with_arrays if manifest is not None and manifest.arrays else canonical_names


def _names_of(listing: Listing, canonical: Callable[[int], tuple[str, ...]]) -> Callable[[int], tuple[str, ...]]:
    def names(chunk: int) -> tuple[str, ...]:
        data, seal, *others = canonical(chunk)
        return listing.data.get(chunk, data), listing.seals.get(chunk, seal), *others

    return names


def _read_mixture(directory: Path, census: Census) -> tuple[MixedSource, ...]:
    """Returns how the sources are mixed up to the newest chunk, by one small read.

    Returns:
        As `mixed_sources`; none too where the newest chunk is deleted, or its seal cannot be read or is large.
    """
    if not census.native or census.chunks <= census.retired:
        return ()
    newest = census.chunks - 1
    path = directory / census.names(newest)[1]
    try:
        return mixed_sources(Seal.decode(read_file(path, _MAX_SEAL_BYTES), newest, str(path)).source)
    except (LazyShardError, OSError):
        # What is wrong with it is told by whoever looks for damage; the head counted it as published.
        return ()
