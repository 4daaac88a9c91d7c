"""How a writer comes by its stream: its manifest, found or made, the right to write to it, and what is published of it.

`find_manifest` changes nothing, so a producer may ask it whether it could begin. A new stream's directory is made
durable together with its manifest.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import uuid
from collections.abc import Callable
from pathlib import Path

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamInvalid
from lazyshard.format.names import END, HEAD, HEAD_RESERVE, MANIFEST
from lazyshard.format.records import Encoding, Manifest, check_samples_per_chunk
from lazyshard.store.durable import publish_new_bytes, sync_directory
from lazyshard.stream.head import Announcer
from lazyshard.stream.listing import list_chunks
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.manifest import check_arrays, check_same_encoding, manifest_lost, read_manifest
from lazyshard.stream.publishing import Opened, publish_end
from lazyshard.stream.recovery import recover


def open_for_writing(
    directory: Path,
    samples_per_chunk: int | None,
    clock: Callable[[], float],
    *,
    arrays: bool = False,
    encoding: Encoding | None = None,
) -> Opened:
    """Opens a stream for writing; makes it if it is not there. Raises as `ChunkWriter` does."""
    # Refuses what can be refused before anything is made, and before another producer is fenced.
    find_manifest(directory, samples_per_chunk, arrays, encoding)
    directory.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(directory)
    lock.acquire(clock())
    try:
        return _open(directory, samples_per_chunk, arrays, encoding, clock, lock)
    except BaseException as cause:
        try:
            check_still_ours(lock, cause)
        finally:
            lock.release()
        raise


def check_still_ours(lock: WriterLock, cause: BaseException) -> None:
    """Looks, after an error, whether it came of another producer: a listing may be older than what that one has done.

    Raises:
        ProducerFenced: another producer has taken the stream over.
    """
    if not isinstance(cause, OSError | LazyShardError):
        return
    try:
        lock.check(closely=True)
    except ProducerFenced:
        raise
    except OSError:
        pass


def find_manifest(
    directory: Path, samples_per_chunk: int | None, arrays: bool = False, encoding: Encoding | None = None
) -> Manifest | None:
    """Returns a stream's manifest, None where there is none yet and one can be made. Changes nothing.

    Args:
        directory: the stream's directory, which may not be there.
        samples_per_chunk: what the caller asks for; None takes what the manifest says.
        arrays: whether the caller's rows may hold arrays.
        encoding: what the caller's rows are encoded with, None for rows that are not.

    Raises:
        StreamMismatch: the stream has another number of samples per chunk, or was made with other rows in mind.
        StreamInvalid: the directory holds chunks that somebody else made, or a manifest that this machine does not
            see yet.
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


def create_stream(directory: Path, manifest: Manifest, temporary: Path) -> None:
    """Publishes a new stream's manifest and makes the directory itself durable. The caller holds the writer's lock.

    Raises:
        StreamInvalid: there is a manifest, which this machine could not see yet.
        OSError: the filesystem refused.
    """
    _sync_parents(directory)
    try:
        publish_new_bytes(manifest.encode(), directory / MANIFEST, temporary)
    except FileExistsError as cause:
        raise _unseen(directory) from cause


def _open(
    directory: Path,
    samples_per_chunk: int | None,
    arrays: bool,
    encoding: Encoding | None,
    clock: Callable[[], float],
    lock: WriterLock,
) -> Opened:
    workplace = lock.workplace
    manifest = find_manifest(directory, samples_per_chunk, arrays, encoding)
    if manifest is None:
        assert samples_per_chunk is not None
        manifest = Manifest(uuid.uuid4().hex, samples_per_chunk, clock(), arrays, encoding)
        create_stream(directory, manifest, workplace.path(MANIFEST))
    found = recover(directory, manifest, lock)
    temporary, reserve = workplace.path(HEAD), workplace.path(HEAD_RESERVE)
    announcer = Announcer(directory, temporary, reserve, manifest.samples_per_chunk, found.samples, clock)
    if found.closing:
        source = None if found.last is None else found.last.source
        publish_end(directory, found.chunks, found.samples, source, temporary=workplace.path(END))
    if found.ended or found.closing:
        announcer.tell(found.chunks, found.samples, found.samples, "finished")
        raise StreamEnded(
            f"{directory}: the stream has ended with {found.samples:,} samples; nothing can be added to it. Write a "
            f"new stream to another directory",
            directory=str(directory),
            samples=found.samples,
        )
    return Opened(manifest, found, lock, announcer)


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
    """Returns the error for a manifest that a network filesystem remembers as missing."""
    return StreamInvalid(
        f"{directory}: somebody else has created a stream here, which this machine does not see yet; nothing of it was "
        f"changed. If no other producer is running, start this one again in a minute",
        directory=str(directory),
    )


def _sync_parents(directory: Path) -> None:
    """Makes the names of the directories above durable: some may be new, perhaps since before a crash."""
    path = directory.absolute()
    while not os.path.ismount(path):
        path = path.parent
        # One that this process may not even list is none that it has made.
        with contextlib.suppress(PermissionError):
            sync_directory(path)
