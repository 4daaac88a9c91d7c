"""What a producer finds when it opens a stream, and what it clears away first.

A crash can leave a file under `.tmp/`, or a data file or a side file with no seal; none was ever published. It can also
leave seals that are visible but not yet durable, so the directory is synced before any of them is believed. Chunks
below the retired mark may be missing; those that are still there, or there again after a power cut, are removed. What
that costs does not grow with how many there once were.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazyshard.errors import ChunkCorrupt, ChunkMissing, StreamInvalid
from lazyshard.format.names import END, RETIRED, TEMPORARY, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Manifest
from lazyshard.format.seal import Seal
from lazyshard.store.durable import clear_folder, sync_directory
from lazyshard.store.files import open_file, read_file
from lazyshard.stream.listing import Listing
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.retire import complete_retirement, list_kept

LISTING_S: Final = 60.0
"""How long a listing may stay behind; common settings of network filesystems are 3 to 60 s."""

_log = logging.getLogger("lazyshard")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What is published in a stream.

    Attributes:
        chunks: chunks sealed ever, the retired ones included: those of the half-open range [0, chunks).
        samples: rows in them.
        last: seal of the last one, None if there is none.
        ended: `stream.end` is there.
        closing: the last chunk is a partial one, so the stream was being ended and only `stream.end` is missing.
    """

    chunks: int
    samples: int
    last: Seal | None
    ended: bool
    closing: bool


def recover(directory: Path, manifest: Manifest, lock: WriterLock) -> Recovered:
    """Clears what was never published and returns what was. The caller holds the writer's lock.

    Args:
        directory: the stream's directory.
        manifest: its manifest.
        lock: the right to write to it. What was never published when it was looked for, another producer may have
            published since: so it is taken out in a way in which only the owner can.

    Raises:
        ProducerFenced: another producer has taken the stream over.
        StreamInvalid: there is a gap above the retired chunks, or `stream.end` says otherwise than the seals.
        FileInvalid: `retired.json` cannot be used.
        ChunkCorrupt, ChunkMissing, SealInvalid: the last chunk is not as it was sealed.
        OSError: the filesystem failed.
    """
    sync_directory(directory)
    listing = _list(directory, manifest, lock.check)
    _check_gaps(directory, listing, manifest.arrays)
    last = _last_seal(directory, listing)
    if last is not None and last.samples > manifest.samples_per_chunk:
        raise StreamInvalid(
            f"{directory}: chunk {last.chunk} holds {last.samples} samples, the stream has "
            f"{manifest.samples_per_chunk} a chunk",
            directory=str(directory),
            chunk=last.chunk,
        )
    short = 0 if last is None else manifest.samples_per_chunk - last.samples
    samples = listing.sealed * manifest.samples_per_chunk - short
    ended = _check_end(directory, listing.sealed, samples)
    _clear(directory, listing, lock)
    complete_retirement(directory, listing)
    return Recovered(listing.sealed, samples, last, ended, closing=short > 0 and not ended)


def _list(directory: Path, manifest: Manifest, check_owner: Callable[[], None]) -> Listing:
    """Lists the stream, and waits where the listing is older than what can be seen by name.

    Network filesystems remember listings, for 20 s say. By an old one a chunk that another machine's producer has
    sealed meanwhile would be taken for one that was never published, and deleted.

    Raises:
        StreamInvalid: the listing has stayed behind.
    """
    started = time.monotonic()
    told = False
    while True:
        listing = list_kept(directory, manifest.stream_id, arrays=manifest.arrays)
        unsealed = (chunk for names in (listing.data, listing.arrays) for chunk in names if chunk not in listing.seals)
        open_chunks = {listing.sealed, *unsealed}
        unlisted = [chunk for chunk in sorted(open_chunks) if os.path.lexists(directory / seal_name(chunk))]
        if not unlisted:
            return listing
        check_owner()
        path = directory / seal_name(unlisted[0])
        waited = time.monotonic() - started
        if waited > LISTING_S:
            raise StreamInvalid(
                f"{path}: is there, but a listing of {directory} has not shown it for {waited:.0f} s; start again when "
                f"it does, or mount the filesystem with shorter caches",
                directory=str(directory),
                chunk=unlisted[0],
            )
        if not told:
            told = True
            _log.warning("%s: is there, but not listed yet; waiting for the filesystem to list it", path)
        time.sleep(min(1.0, max(0.01, waited / 10)))


def _check_gaps(directory: Path, listing: Listing, arrays: bool) -> None:
    beyond = [chunk for chunk in listing.seals if chunk >= listing.sealed]
    if beyond:
        raise StreamInvalid(
            f"{directory}: {seal_name(listing.sealed)} is missing although {listing.seals[min(beyond)]} is there; "
            f"restore it from a copy, a producer cannot go on past a gap",
            directory=str(directory),
            chunk=listing.sealed,
        )
    if listing.sealed == listing.first > 0:
        raise StreamInvalid(
            f"{directory}: {seal_name(listing.first)} is missing, the first that {RETIRED} says was not deleted; "
            f"restore it from a copy, it holds the position from which a producer goes on",
            directory=str(directory),
            chunk=listing.first,
        )
    for chunk in range(listing.first, listing.sealed):
        if chunk not in listing.data:
            raise _missing(directory / chunk_name(chunk), "data file", chunk)
        if arrays and chunk not in listing.arrays:
            raise _missing(directory / arrays_name(chunk), "side file", chunk)


def _missing(path: Path, kind: str, chunk: int) -> ChunkMissing:
    return ChunkMissing(
        f"{path}: sealed, but its {kind} is missing; restore it from a copy", file=str(path), chunk=chunk
    )


def _last_seal(directory: Path, listing: Listing) -> Seal | None:
    if listing.sealed == listing.first:
        return None
    chunk = listing.sealed - 1
    path = directory / listing.seals[chunk]
    seal = Seal.decode(read_file(path), chunk, str(path))
    _check_size(directory / listing.data[chunk], chunk, seal.size)
    if seal.arrays is not None:
        _check_size(directory / arrays_name(chunk), chunk, seal.arrays.size)
    return seal


def _check_size(path: Path, chunk: int, sealed: int) -> None:
    size = open_file(path).size
    if size != sealed:
        raise ChunkCorrupt(
            f"{path}: expected {sealed} bytes as sealed, found {size}; restore the file from a copy",
            file=str(path),
            chunk=chunk,
            expected=f"{sealed} bytes",
            actual=f"{size} bytes",
        )


def _check_end(directory: Path, chunks: int, samples: int) -> bool:
    path = directory / END
    try:
        end = End.decode(read_file(path), str(path))
    except FileNotFoundError:
        return False
    if (end.chunks, end.samples) != (chunks, samples):
        raise StreamInvalid(
            f"{path}: says {end.chunks} chunks with {end.samples} samples, the seals say {chunks} with {samples}",
            directory=str(directory),
        )
    return True


def _clear(directory: Path, listing: Listing, lock: WriterLock) -> None:
    lock.check()
    for names in (listing.data, listing.arrays):
        for chunk, name in names.items():
            if chunk not in listing.seals:
                lock.workplace.take_out(directory / name)
    # What was written there by versions that had no directories of their own.
    clear_folder(directory / TEMPORARY)
