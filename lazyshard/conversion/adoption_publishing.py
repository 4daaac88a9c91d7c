"""The steps of adoption that write: seals, other files of a stream, and the head alone where only that is missing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from lazyshard.conversion.adoption_names import is_temporary, read_end, refuse
from lazyshard.conversion.adoption_rows import CheckedChunk, Report, read_again
from lazyshard.errors import LazyShardError
from lazyshard.format import End, Head, Manifest, Seal
from lazyshard.format.names import HEAD, TEMPORARY, chunk_name, seal_name
from lazyshard.store.durable import publish_bytes, remove, sync, sync_directory
from lazyshard.store.files import open_file, read_file
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.retire import list_kept


class Publisher:
    """Puts files into a directory, one durable step after the other, as long as it is ours to write to."""

    def __init__(self, directory: Path, lock: WriterLock, clock: Callable[[], float]) -> None:
        self.directory = directory
        self.clock = clock
        self._lock = lock

    def publish(self, name: str, data: bytes) -> None:
        """Makes a file appear whole and durable, in place of what has the name."""
        self._lock.check()
        publish_bytes(data, self.directory / name, self._lock.workplace.path(name))

    def publish_head(self, found: End, ended: bool) -> None:
        """Tells the readers what there is."""
        head = Head(
            chunks=found.chunks,
            samples=found.samples,
            ended=ended,
            state="finished" if ended else "idle",
            rate=0.0,
            host=socket.gethostname() or "unknown",
            pid=os.getpid(),
            updated_at=self.clock(),
        )
        self.publish(HEAD, head.encode())

    def clear(self) -> None:
        """Removes what runs of older versions that were killed have left; the lock removes what this run has.

        Nothing is removed from under another process that has taken the directory over.
        """
        with contextlib.suppress(OSError, LazyShardError):
            self._lock.check()
            for path in list((self.directory / TEMPORARY).iterdir()):
                if is_temporary(path.name):
                    remove(path)


def seal_all(publisher: Publisher, chunks: list[CheckedChunk], report: Report) -> None:
    """Seals the chunks that have no seal yet, if they hold what was checked, and makes all of them durable."""
    directory = publisher.directory
    # One killed before it had synced the directory leaves seals that a power cut takes back.
    sync_directory(directory)
    report("sealing", 0, len(chunks))
    for chunk, checked in enumerate(chunks):
        file = open_file(directory / chunk_name(chunk))
        # The other program may not have done it.
        sync(file.fd)
        if not checked.sealed:
            found = read_again(file, chunk, checked)
            publisher.publish(seal_name(chunk), found.seal(chunk, publisher.clock()).encode())
        report("sealing", chunk + 1, len(chunks))


def restore_head(directory: Path, manifest: Manifest, clock: Callable[[], float]) -> None:
    """Does the last step where a crash has left only that to do."""
    lock = WriterLock(directory)
    lock.acquire(clock())
    publisher = Publisher(directory, lock, clock)
    try:
        sync_directory(directory)
        listing = list_kept(directory, manifest.stream_id)
        if listing.gap is not None:
            raise refuse(
                directory,
                f"{directory}: chunk {listing.gap} lacks its data or its seal although later ones are there; restore "
                f"it from a copy",
                listing.gap,
            )
        found = read_end(directory, end=True)
        ended = found is not None
        if found is None:
            chunks = listing.complete
            # A partial chunk without an end was never finished; its producer has to.
            if chunks > listing.first and _decode_seal(directory, chunks - 1).samples < manifest.samples_per_chunk:
                chunks -= 1
            found = End(chunks, chunks * manifest.samples_per_chunk)
        publisher.publish_head(found, ended)
    finally:
        publisher.clear()
        lock.release()


def _decode_seal(directory: Path, chunk: int) -> Seal:
    path = directory / seal_name(chunk)
    return Seal.decode(read_file(path), chunk, str(path))
