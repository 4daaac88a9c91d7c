"""The chunks of a writer, one after the other: filled, published when full, told to the readers; and the stream's end.

The order of steps is the guarantee. Rows under `.tmp/`, and the side file of their arrays if they have one, are synced,
renamed, and the directory synced; then the same for the seal. The seal is the commit: before it nothing of the chunk
counts, after it nothing of it changes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyshard.errors import LazyShardError, ProducerFenced
from lazyshard.format.batch import CheckedLines
from lazyshard.format.names import END, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Manifest, ProducerState
from lazyshard.store.durable import publish_bytes, rename, sync_directory
from lazyshard.store.files import MAX_PLAIN_BYTES
from lazyshard.stream.head import Announcer
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.open_chunk import OpenArrays, OpenChunk, WriteSteps

_log = logging.getLogger("lazyshard")


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream that can be written to: its lock, and what is published, `source` being the position after that."""

    manifest: Manifest
    lock: WriterLock
    announcer: Announcer
    chunks: int
    samples: int
    source: Any


class ChunkSequence:
    """Publishes rows chunk after chunk. Whatever a method raises leaves it open what was added: nothing may follow.

    `steps` does everything that touches files, so that it happens in order whatever the thread.

    Attributes:
        published_chunks: chunks sealed so far; `full_chunks`: these, and the one that is on its way.
        source: the position after the last published row; `row_source`: that after the last row.
        publish_s: seconds from the last row of the last published chunk to its being told.
    """

    def __init__(self, directory: Path, opened: Opened, steps: WriteSteps, clock: Callable[[], float]) -> None:
        self.full_chunks = self.published_chunks = opened.chunks
        self.published_samples = opened.samples
        self.source: Any = opened.source
        self.row_source = self.source
        self.state: ProducerState = "running"
        self.publish_s = 0.0
        self._directory = directory
        self._samples_per_chunk = opened.manifest.samples_per_chunk
        self._arrays = opened.manifest.arrays
        self._lock, self._workplace, self.announcer = opened.lock, opened.lock.workplace, opened.announcer
        self._steps = steps
        self._clock = clock
        self._publishing = 0  # number of the step
        self._handed_over = self.published_samples
        self._chunk = self._new_chunk()
        self._pid = os.getpid()

    @property
    def room(self) -> int:
        """Rows that the open chunk can still take."""
        return self._samples_per_chunk - len(self._chunk)

    @property
    def samples(self) -> int:
        """Rows taken so far."""
        return self._handed_over + len(self._chunk)

    def append(self, line: bytes, arrays: bytes | None, tokens: int | None, source: Any) -> None:
        """Adds a row, with the bytes of its arrays where rows may hold some; see `ChunkWriter.write`."""
        if arrays is not None:
            assert self._chunk.arrays is not None
            self._chunk.arrays.append(arrays)
        self._chunk.append(line, tokens)
        self._added(source)

    def extend(self, rows: CheckedLines, source: Any) -> None:
        """Adds rows, as many as there is room for at the most; see `ChunkWriter.write_lines`."""
        self._chunk.extend(rows)
        self._added(source)

    def end(self) -> None:
        """Publishes what rows are left, and ends the stream."""
        if len(self._chunk):
            self._publish(last=True)
        self._steps.wait()
        self._lock.check()
        temporary = self._workplace.path(END)
        publish_end(
            self._directory, self.published_chunks, self.published_samples, self.row_source, temporary=temporary
        )
        self.tell("finished")

    def leave(self, state: ProducerState, note: str = "") -> None:
        """Tells the readers, if it can, that this producer stops, and why."""
        if self._steps.stop():
            with contextlib.suppress(OSError, LazyShardError):
                self._lock.check()
                self.tell(state, note)

    def tell_alive(self, note: str) -> None:
        """A step: tells the readers that this producer is alive. Raises ProducerFenced: another one has taken over."""
        self.announcer.told_at = time.monotonic()
        try:
            self._lock.check()
            self.tell(self.state, note)
        except LazyShardError:
            raise
        except OSError as cause:
            self._lock.check(closely=True)
            # The head is a hint; a full disk must not stop a producer that has nothing to publish yet.
            _log.warning("%s: readers cannot be told that this producer is alive: %s", self._directory, cause)

    def tell(self, state: ProducerState, note: str = "") -> None:
        """A step: replaces the head."""
        self.announcer.tell(self.published_chunks, self.published_samples, self.samples, state, note)

    def close(self) -> None:
        """A step, the last one: removes what is not published."""
        self._chunk.discard()
        self.announcer.close()

    def abandon(self) -> None:
        """Lets go of the open file as it is; for a fork, which only has copies."""
        self._chunk.abandon()

    def _added(self, source: Any) -> None:
        if source is not None:
            self.row_source = source
        if len(self._chunk) == self._samples_per_chunk:
            self._publish()

    def _publish(self, *, last: bool = False) -> None:
        chunk = self._chunk
        chunk.pass_on()
        # The one before: with that still on its way, this would be the second.
        self._steps.wait(self._publishing)
        step = functools.partial(self._publish_chunk, chunk, self.row_source, time.monotonic(), last)
        self._handed_over += len(chunk)
        self.full_chunks += 1
        self._chunk = self._new_chunk()
        self._publishing = self._steps.do(step)

    def _publish_chunk(self, chunk: OpenChunk, source: Any, full_at: float, last: bool) -> None:
        temporary = self._workplace.path(seal_name(chunk.number))
        try:
            publish_chunk(self._directory, chunk, source, self._clock(), lock=self._lock, temporary=temporary)
        except BaseException:
            chunk.discard()
            raise
        self.published_chunks += 1
        self.published_samples += len(chunk)
        self.source = source
        if not last:
            # A partial chunk is the last one: the head names it only together with the end.
            self.tell(self.state)
        self.publish_s = time.monotonic() - full_at

    def warn(self) -> None:
        """Logs, if the writer is dropped or the interpreter ends before it was closed, that rows are not published."""
        if len(self._chunk) and os.getpid() == self._pid:
            _log.warning(
                "%s: a ChunkWriter was dropped without close(): %d rows of its open chunk are not published; use it "
                "in a with statement, or call close()",
                *(self._directory, len(self._chunk)),
            )

    def _new_chunk(self) -> OpenChunk:
        number, arrays = self.full_chunks, None
        if self._arrays:
            arrays = OpenArrays(self._workplace.path(arrays_name(number)), self._steps)
        return OpenChunk(number, self._workplace.path(chunk_name(number)), self._steps, arrays)


def publish_chunk(
    directory: Path, chunk: OpenChunk, source: Any, now: float, *, lock: WriterLock, temporary: Path
) -> None:
    """Publishes a chunk, all of whose rows were passed on. It is published if and only if this returns.

    The lock is looked at before each step that shows. The seal is written under the name `temporary` first. Raises
    ProducerFenced: another producer has taken the stream over, or has published this chunk all the same.
    """
    target = directory / seal_name(chunk.number)
    chunk.finish()
    lock.check()
    if os.path.lexists(target):
        # By a producer that has taken over since the look before, most likely.
        lock.check()
        raise ProducerFenced(
            f"{target}: somebody else has published this chunk; this producer stops, nothing of the stream was changed",
            directory=str(directory),
        )
    if chunk.arrays is not None:
        rename(chunk.arrays.file.path, directory / arrays_name(chunk.number))
    rename(chunk.path, directory / chunk_name(chunk.number))
    sync_directory(directory)
    seal = chunk.seal(source, now)
    lock.check()
    publish_bytes(seal.encode(), target, temporary)


def publish_end(directory: Path, chunks: int, samples: int, source: Any = None, *, temporary: Path) -> None:
    """Ends the stream after so many published chunks; `source` is the position behind all that was read."""
    data = End(chunks, samples, source).encode()
    if len(data) > MAX_PLAIN_BYTES:
        # Readers refuse such a file, and can do without the position.
        data = End(chunks, samples).encode()
    publish_bytes(data, directory / END, temporary)
