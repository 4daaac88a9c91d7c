"""How a writer comes by its stream: the right to write to it, what is published of it, a place for its own files."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded
from lazyshard.format import Encoding, Manifest
from lazyshard.format.names import END, HEAD, HEAD_RESERVE, MANIFEST
from lazyshard.stream.announcer import Announcer
from lazyshard.stream.creation import create_stream, find_manifest
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.publishing import publish_end
from lazyshard.stream.recovery import Recovered, recover


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream that can be written to.

    Attributes:
        manifest: its manifest.
        found: what is published.
        lock: the right to write to it, and where to.
        announcer: tells the readers.
    """

    manifest: Manifest
    found: Recovered
    lock: WriterLock
    announcer: Announcer


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
