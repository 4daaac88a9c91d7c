"""How a writer comes by its stream: the manifest, found or made, the right to write, and what a crash has left.

A crash can leave a file under `.tmp/`, or a data file or a side file with no seal; none was ever published. It can also
leave seals that are visible but not yet durable, so the directory is synced before any of them is believed. Chunks
below the retired mark may be missing; those that are still there, or there again after a power cut, are removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazyshard.errors import ChunkCorrupt, ChunkMissing, LazyShardError, StreamEnded, StreamInvalid
from lazyshard.format.names import END, HEAD, MANIFEST, RETIRED, TEMPORARY, arrays_name, chunk_name, seal_name
from lazyshard.format.records import Encoding, End, Manifest, check_samples_per_chunk
from lazyshard.format.seal import Seal
from lazyshard.store.durable import clear_folder, publish_new_bytes, sync_directory
from lazyshard.store.files import open_file, read_file, read_seal
from lazyshard.stream.head import Announcer
from lazyshard.stream.listing import Listing, list_chunks
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.manifest import check_arrays, check_same_encoding, manifest_lost, read_manifest
from lazyshard.stream.publishing import Opened, publish_end
from lazyshard.stream.retire import complete_retirement, list_kept

LISTING_S: Final = 60.0  # how long a listing may stay behind; common settings of network filesystems are 3 to 60 s

_log = logging.getLogger("lazyshard")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What is published in a stream."""

    chunks: int  # sealed ever, the retired ones included: those of the half-open range [0, chunks)
    samples: int
    last: Seal | None
    ended: bool  # `stream.end` is there
    closing: bool  # the last chunk is a partial one, so only `stream.end` is missing


def open_for_writing(
    directory: Path,
    samples_per_chunk: int | None,
    clock: Callable[[], float],
    *,
    arrays: bool = False,
    encoding: Encoding | None = None,
) -> Opened:
    """Opens a stream for writing, made if it is not there, and tells the readers. Raises as `ChunkWriter` does."""
    # Refuses what can be refused before anything is made, and before another producer is fenced.
    find_manifest(directory, samples_per_chunk, arrays, encoding)
    directory.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(directory)
    lock.acquire(clock())
    try:
        manifest = find_manifest(directory, samples_per_chunk, arrays, encoding)
        if manifest is None:
            assert samples_per_chunk is not None
            manifest = Manifest(uuid.uuid4().hex, samples_per_chunk, clock(), arrays, encoding)
            _create_stream(directory, manifest, lock.workplace.path(MANIFEST))
        return _open(directory, manifest, clock, lock)
    except BaseException as cause:
        try:
            # An error may come of another producer: a listing may be older than what that one has done.
            fenced = lock.lost() if isinstance(cause, OSError | LazyShardError) else None
        finally:
            lock.release()
        if fenced is not None:
            raise fenced from cause
        raise


def find_manifest(
    directory: Path, samples_per_chunk: int | None, arrays: bool = False, encoding: Encoding | None = None
) -> Manifest | None:
    """Returns a stream's manifest, None where there is none yet and one can be made. Changes nothing.

    Raises:
        StreamMismatch: the stream has another number of samples per chunk, or was made with other rows in mind.
        StreamInvalid: the directory holds chunks that somebody else made, or a manifest not to be seen yet.
        ValueError: samples_per_chunk is impossible, or missing for a new stream.
    """
    manifest = read_manifest(directory, samples_per_chunk)
    if manifest is None and not _is_new(directory, samples_per_chunk):
        # Made since by another producer, or what a network filesystem remembers as missing.
        manifest = read_manifest(directory, samples_per_chunk)
        if manifest is None:
            raise _unseen(directory)
    if manifest is not None:
        check_same_encoding(directory, manifest, encoding)
        check_arrays(directory, manifest, arrays)
    return manifest


def _create_stream(directory: Path, manifest: Manifest, temporary: Path) -> None:
    """Publishes a new stream's manifest, once the names of all directories above are durable: some may be new."""
    path = directory.absolute()
    while not os.path.ismount(path):
        path = path.parent
        # One that this process may not even list is none that it has made.
        with contextlib.suppress(PermissionError):
            sync_directory(path)
    try:
        publish_new_bytes(manifest.encode(), directory / MANIFEST, temporary)
    except FileExistsError as cause:
        raise _unseen(directory) from cause


def _open(directory: Path, manifest: Manifest, clock: Callable[[], float], lock: WriterLock) -> Opened:
    workplace = lock.workplace
    found = recover(directory, manifest, lock)
    chunks, samples, source = found.chunks, found.samples, None if found.last is None else found.last.source
    announcer = Announcer(directory, workplace, manifest.samples_per_chunk, samples, clock)
    if found.closing:
        publish_end(directory, chunks, samples, source, temporary=workplace.path(END))
    if found.ended or found.closing:
        announcer.tell(chunks, samples, samples, "finished")
        raise StreamEnded(
            f"{directory}: the stream has ended with {samples:,} samples; nothing can be added to it. Write a new "
            f"stream to another directory",
            directory=str(directory),
            samples=samples,
        )
    # Looking through a long stream takes its time: another producer may have come meanwhile.
    lock.check()
    announcer.tell(chunks, samples, samples, "running")
    return Opened(manifest, lock, announcer, chunks, samples, source)


def _is_new(directory: Path, samples_per_chunk: int | None) -> bool:
    """Returns whether a stream can be made there; False where a manifest is listed."""
    if samples_per_chunk is None:
        raise ValueError(f"{directory}: samples_per_chunk is needed to create a stream")
    check_samples_per_chunk(samples_per_chunk)
    with contextlib.suppress(FileNotFoundError):
        listing = list_chunks(directory)
        names = os.listdir(directory)
        if MANIFEST in names:
            return False
        if listing.data or listing.seals:
            if HEAD in names:
                raise manifest_lost(directory, HEAD)
            raise StreamInvalid(
                f"{directory}: holds chunk files but no {MANIFEST}, so somebody else made them; choose another "
                f"directory, to which `lazyshard-producer run --source {shlex.quote(str(directory))}` takes their rows",
                directory=str(directory),
            )
    return True


def _unseen(directory: Path) -> StreamInvalid:
    return StreamInvalid(
        f"{directory}: somebody else has created a stream here, which this machine does not see yet; nothing of it was "
        f"changed. If no other producer is running, start this one again in a minute",
        directory=str(directory),
    )


def recover(directory: Path, manifest: Manifest, lock: WriterLock) -> Recovered:
    """Clears what was never published and returns what was. The caller holds the writer's lock.

    What was never published when it was looked for, another producer may have published since: so it is taken out in a
    way in which only the owner can. Raises ProducerFenced, StreamInvalid, ChunkCorrupt, ChunkMissing, FormatInvalid.
    """
    sync_directory(directory)
    listing = _list(directory, manifest, lock)
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


def _list(directory: Path, manifest: Manifest, lock: WriterLock) -> Listing:
    """Lists the stream, and waits where the listing is older than what can be seen by name.

    Network filesystems remember listings, for 20 s say. By an old one a chunk that another machine's producer has
    sealed meanwhile would be taken for one that was never published, and deleted.
    """
    started = time.monotonic()
    told = False
    while True:
        listing = list_kept(directory, manifest.stream_id, arrays=manifest.arrays)
        unsealed = (chunk for names in (listing.data, listing.arrays) for chunk in names if chunk not in listing.seals)
        open_chunks = sorted({listing.sealed, *unsealed})
        unlisted = next((chunk for chunk in open_chunks if os.path.lexists(directory / seal_name(chunk))), None)
        if unlisted is None:
            return listing
        lock.check()
        path = directory / seal_name(unlisted)
        waited = time.monotonic() - started
        if waited > LISTING_S:
            raise StreamInvalid(
                f"{path}: is there, but a listing of {directory} has not shown it for {waited:.0f} s; start again when "
                f"it does, or mount the filesystem with shorter caches",
                directory=str(directory),
                chunk=unlisted,
            )
        if not told:
            told = True
            _log.warning("%s: is there, but not listed yet; waiting for the filesystem to list it", path)
        time.sleep(min(1.0, max(0.01, waited / 10)))


def _check_gaps(directory: Path, listing: Listing, arrays: bool) -> None:
    sealed = listing.sealed
    if beyond := [chunk for chunk in listing.seals if chunk >= sealed]:
        raise StreamInvalid(
            f"{directory}: {seal_name(sealed)} is missing although {listing.seals[min(beyond)]} is there; restore it "
            f"from a copy, a producer cannot go on past a gap",
            directory=str(directory),
            chunk=sealed,
        )
    if sealed == listing.first > 0:
        raise StreamInvalid(
            f"{directory}: {seal_name(sealed)} is missing, the first that {RETIRED} says was not deleted; restore it "
            f"from a copy, it holds the position from which a producer goes on",
            directory=str(directory),
            chunk=sealed,
        )
    kinds = [("data file", listing.data, chunk_name), ("side file", listing.arrays, arrays_name)][: 1 + arrays]
    for chunk in range(listing.first, sealed):
        for kind, names, name_of in kinds:
            if chunk not in names:
                path = directory / name_of(chunk)
                raise ChunkMissing(
                    f"{path}: sealed, but its {kind} is missing; restore it from a copy", file=str(path), chunk=chunk
                )


def _last_seal(directory: Path, listing: Listing) -> Seal | None:
    if (chunk := listing.sealed - 1) < listing.first:
        return None
    seal = read_seal(directory, chunk, listing.seals[chunk])
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
