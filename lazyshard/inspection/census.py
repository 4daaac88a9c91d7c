"""How many chunks a stream has published: by its head, or by a listing where that is lost or was never made.

For streams in any condition: what is damaged becomes a sentence in a list of problems, and the next best source of the
same fact takes its place. With a readable `head.json` the cost does not grow with the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lazyshard.errors import (
    FileRefused,
    FormatInvalid,
    HeadInvalid,
    StreamMissing,
    StreamUnsealed,
    VersionUnsupported,
)
from lazyshard.format import End, Head, Manifest, Retired, Seal
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, RETIRED
from lazyshard.inspection.disk_use import canonical_names, names_with_arrays
from lazyshard.store.files import is_there, read_file, read_replaced_file
from lazyshard.stream.listing import Listing, list_chunks
from lazyshard.stream.manifest import how_to_mark, read_manifest, stream_missing
from lazyshard.stream.retire import read_retired

_T = TypeVar("_T")


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
    """Counts what is published.

    Args:
        directory: the stream's directory.
        problems: takes what is wrong with its files, a sentence each.

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
    try:
        head = read_replaced_file(path, lambda data: Head.decode(data, str(path)))
    except FileNotFoundError:
        return None
    if manifest is not None:
        short = head.chunks * manifest.samples_per_chunk - head.samples
        if not 0 <= short < manifest.samples_per_chunk or (short and not head.ended):
            raise HeadInvalid(
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
    path = directory / RETIRED
    try:
        return read_replaced_file(path, lambda data: Retired.decode(data, str(path))).chunks_before
    except FileNotFoundError:
        return 0


def _listed(directory: Path, native: bool, manifest: Manifest | None, problems: list[str]) -> Census:
    try:
        listing = list_chunks(directory)
    except FileNotFoundError:
        listing = None
    known = any(is_there(directory / name) for name in (MANIFEST, HEAD))
    if listing is None or not (known or listing.data or listing.seals):
        raise stream_missing(directory)
    if not native and not listing.seals:
        raise StreamUnsealed(
            f"{directory}: {len(listing.data)} chunk files, but no .completed marker, so nothing tells which of them "
            f"are complete; {how_to_mark(directory)}",
            directory=str(directory),
        )
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
