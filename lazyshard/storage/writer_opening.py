"""How a writer comes by its stream: the right to write to it, what is published of it, a place for its own files."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lazyshard.errors import ProducerFenced, StreamEnded
from lazyshard.format import Encoding, Manifest
from lazyshard.format.names import END, HEAD, MANIFEST, TEMPORARY
from lazyshard.storage.announcer import Announcer
from lazyshard.storage.creation import create_stream, find_manifest
from lazyshard.storage.lock import WriterLock
from lazyshard.storage.publishing import publish_end
from lazyshard.storage.recovery import Recovered, recover


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where a writer writes what is not published yet: `.tmp/`.

    Attributes:
        directory: that directory.
        token: the owner's. Two writers on two mounts never share a temporary name, so neither can rename what the other
            is writing.
    """

    directory: Path
    token: str

    def path(self, name: str) -> Path:
        """Returns under which name to write the file that is to be called `name`."""
        return self.directory / f"{name}.{self.token}"

    def remove(self) -> None:
        """Removes the directory if nothing is left in it."""
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream that can be written to.

    Attributes:
        manifest: its manifest.
        found: what is published.
        lock: the right to write to it.
        workplace: where to write.
        announcer: tells the readers.
    """

    manifest: Manifest
    found: Recovered
    lock: WriterLock
    workplace: Workplace
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
    owner = lock.acquire(clock(), directory / TEMPORARY)
    try:
        workplace = Workplace(directory / TEMPORARY, owner.token)
        return _open(directory, samples_per_chunk, arrays, encoding, clock, lock, workplace)
    except BaseException as cause:
        try:
            check_still_ours(lock, cause)
        finally:
            lock.release()
        raise


def check_still_ours(lock: WriterLock, cause: BaseException) -> None:
    """Looks, after an error of the filesystem, whether it is one.

    A producer that has taken the stream over meanwhile may have removed `.tmp`.

    Raises:
        ProducerFenced: another producer has taken the stream over.
    """
    if not isinstance(cause, OSError):
        return
    try:
        lock.check()
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
    workplace: Workplace,
) -> Opened:
    manifest = find_manifest(directory, samples_per_chunk, arrays, encoding)
    if manifest is None:
        assert samples_per_chunk is not None
        manifest = Manifest(uuid.uuid4().hex, samples_per_chunk, clock(), arrays, encoding)
        create_stream(directory, manifest, workplace.path(MANIFEST))
    found = recover(directory, manifest, lock.check)
    announcer = Announcer(directory, workplace.path(HEAD), manifest.samples_per_chunk, found.samples, clock)
    if found.closing:
        publish_end(directory, found.chunks, found.samples, temporary=workplace.path(END))
    if found.ended or found.closing:
        announcer.tell(found.chunks, found.samples, found.samples, "finished")
        workplace.remove()
        raise StreamEnded(
            f"{directory}: the stream has ended with {found.samples:,} samples; nothing can be added to it. Write a "
            f"new stream to another directory",
            directory=str(directory),
            samples=found.samples,
        )
    return Opened(manifest, found, lock, workplace, announcer)
