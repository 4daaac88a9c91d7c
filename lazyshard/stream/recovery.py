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

from lazyshard.errors import ChunkMissing, LazyShardError, StreamEnded, StreamInvalid, StreamMismatch
from lazyshard.format.names import END, HEAD, MANIFEST, RETIRED, TEMPORARY, arrays_name, chunk_name, seal_name
from lazyshard.format.records import Encoding, End, Manifest, differences
from lazyshard.format.seal import Seal
from lazyshard.store.durable import clear_folder, publish_new_bytes, sync_directory
from lazyshard.store.files import read_record, read_seal
from lazyshard.stream.chunk import open_sealed
from lazyshard.stream.head import Announcer
from lazyshard.stream.listing import Listing, invalid, list_chunks, manifest_lost, read_manifest
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.publishing import publish_end
from lazyshard.stream.retention import complete_retirement, list_kept

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
    directory: Path, samples_per_chunk: int | None, clock: Callable[[], float], arrays: bool, encoding: Encoding | None
) -> tuple[Manifest, WriterLock, Announcer, Recovered]:
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
            _create_stream(directory, manifest, lock.path(MANIFEST))
        found = recover(directory, manifest, lock)
        chunks, samples = found.chunks, found.samples
        announcer = Announcer(directory, lock.path, manifest.samples_per_chunk, samples, clock)
        if found.closing:
            publish_end(directory, chunks, samples, found.last and found.last.source, lock.path(END))
        if found.ended or found.closing:
            announcer.tell(chunks, samples, samples, "finished")
            what = f"{directory}: the stream has ended with {samples:,} samples; nothing can be added to it. Write a"
            raise StreamEnded(f"{what} new one to another directory", directory=str(directory), samples=samples)
        # Looking through a long stream takes its time: another producer may have come meanwhile.
        lock.check()
        announcer.tell(chunks, samples, samples, "running")
        return manifest, lock, announcer, found
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
    # Made since by another producer, or what a network filesystem remembers as missing.
    unseen = manifest is None and not _is_new(directory, samples_per_chunk)
    if unseen and (manifest := read_manifest(directory, samples_per_chunk)) is None:
        raise _unseen(directory)
    if manifest is not None:
        _check_same(directory, manifest, arrays, encoding)
    return manifest


def _check_same(directory: Path, manifest: Manifest, arrays: bool, encoding: Encoding | None) -> None:
    was, way = manifest.encoding, "go on with the encoding of before"
    expected, actual = map(_named, (encoding, was))
    what = ""
    if was is not None and encoding is not None:
        if found := differences(was, encoding):
            what = f"its rows are encoded otherwise: {'; '.join(found)}"
    elif was is not encoding:
        what = f"its rows are {'not ' * (was is None)}encoded, and those to come are{' not' * (was is not None)}"
    if not what and manifest.arrays != arrays:
        what = f"it was made {'to hold arrays' if manifest.arrays else 'without arrays'}"
        way = "open it with arrays=True" if manifest.arrays else "leave out arrays=True"
        expected, actual = f"arrays={arrays}", f"arrays={manifest.arrays}"
    if what:
        what = f"{directory}: {what}. That never changes for a stream: {way}, or take another directory"
        raise StreamMismatch(what, directory=str(directory), expected=expected, actual=actual)


def _named(encoding: Encoding | None) -> str:
    return "none" if encoding is None else ", ".join(f"{name}={value}" for name, value in encoding.items())[:1000]


def _is_new(directory: Path, samples_per_chunk: int | None) -> bool:
    """Returns whether a stream can be made there; False where a manifest is listed."""
    if samples_per_chunk is None:
        raise ValueError(f"{directory}: samples_per_chunk is needed to create a stream")
    with contextlib.suppress(FileNotFoundError):
        listing = list_chunks(directory)
        names = os.listdir(directory)
        if MANIFEST in names:
            return False
        if listing.data or listing.seals:
            if HEAD in names:
                raise manifest_lost(directory, HEAD)
            command = f"lazyshard-producer run --source {shlex.quote(str(directory))}"
            what = f"holds chunk files but no {MANIFEST}, so somebody else made them; choose another directory"
            raise invalid(directory, f"{what}, to which `{command}` takes their rows")
    return True


def _unseen(directory: Path) -> StreamInvalid:
    what = "somebody else has created a stream here, which this machine does not see yet; nothing of it was changed"
    return invalid(directory, f"{what}. If no other producer is running, start this one again in a minute")


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


def recover(directory: Path, manifest: Manifest, lock: WriterLock) -> Recovered:
    """Clears what was never published and returns what was. The caller holds the writer's lock.

    Another producer may publish it meanwhile, so it is taken out in a way in which only the owner can.
    """
    sync_directory(directory)
    listing = _list(directory, manifest, lock)
    _check_gaps(directory, listing, manifest.arrays)
    last, size = _last_seal(directory, listing), manifest.samples_per_chunk
    if last is not None and last.samples > size:
        what = f"chunk {last.chunk} holds {last.samples} samples, the stream has {size} a chunk"
        raise invalid(directory, what, last.chunk)
    short = 0 if last is None else size - last.samples
    samples = listing.sealed * size - short
    ended = _check_end(directory, listing.sealed, samples)
    _clear(directory, listing, lock)
    complete_retirement(directory, listing)
    return Recovered(listing.sealed, samples, last, ended, closing=short > 0 and not ended)


def _list(directory: Path, manifest: Manifest, lock: WriterLock) -> Listing:
    """Lists the stream, and waits where the listing is older than what can be seen by name.

    By an old one a chunk that another machine's producer has sealed meanwhile would be deleted as never published.
    """
    started, told = time.monotonic(), False
    while True:
        listing = list_kept(directory, manifest.stream_id, arrays=manifest.arrays)
        open_chunks = sorted({listing.sealed, *listing.data, *listing.arrays} - {*listing.seals})
        unlisted = next((chunk for chunk in open_chunks if os.path.lexists(directory / seal_name(chunk))), None)
        if unlisted is None:
            return listing
        lock.check()
        name, waited = seal_name(unlisted), time.monotonic() - started
        if waited > LISTING_S:
            what = f"{name} is there, but no listing has shown it for {waited:.0f} s; start again when one does"
            raise invalid(directory, f"{what}, or mount the filesystem with shorter caches", unlisted)
        if not told:
            _log.warning("%s/%s: is there, but not listed yet; waiting for the filesystem to list it", directory, name)
        told = True
        time.sleep(min(1.0, max(0.01, waited / 10)))


def _check_gaps(directory: Path, listing: Listing, arrays: bool) -> None:
    sealed, missing = listing.sealed, ""
    if beyond := [chunk for chunk in listing.seals if chunk >= sealed]:
        missing = f"although {listing.seals[min(beyond)]} is there"
    elif sealed == listing.first > 0:
        missing = f", the first that {RETIRED} says was not deleted"
    if missing:
        way = "restore it from a copy, a producer continues from the position in the last of all seals"
        raise invalid(directory, f"{seal_name(sealed)} is missing {missing}; {way}".replace(" ,", ","), sealed)
    kinds = [("data file", listing.data, chunk_name), ("side file", listing.arrays, arrays_name)][: 1 + arrays]
    for chunk in range(listing.first, sealed):
        for kind, names, name_of in kinds:
            if chunk not in names:
                path = str(directory / name_of(chunk))
                what = f"{path}: sealed, but its {kind} is missing; restore it from a copy"
                raise ChunkMissing(what, file=path, chunk=chunk)


def _last_seal(directory: Path, listing: Listing) -> Seal | None:
    if (chunk := listing.sealed - 1) < listing.first:
        return None
    seal = read_seal(directory, chunk, listing.seals[chunk])
    # Which looks whether its files are as long as sealed.
    open_sealed(directory / listing.data[chunk], seal)
    return seal


def _check_end(directory: Path, chunks: int, samples: int) -> bool:
    try:
        end = read_record(directory / END, End.decode)
    except FileNotFoundError:
        return False
    if (end.chunks, end.samples) != (chunks, samples):
        what = f"{END} says {end.chunks} chunks with {end.samples} samples, the seals say {chunks} with {samples}"
        raise invalid(directory, what)
    return True


def _clear(directory: Path, listing: Listing, lock: WriterLock) -> None:
    lock.check()
    for names in (listing.data, listing.arrays):
        for chunk, name in names.items():
            if chunk not in listing.seals:
                lock.take_out(directory / name)
    # What was written there by versions that had no directories of their own.
    clear_folder(directory / TEMPORARY)
