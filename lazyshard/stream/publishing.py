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
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lazyshard.errors import LazyShardError, ProducerFenced, WriterFailed
from lazyshard.format.batch import CheckedLines
from lazyshard.format.names import END, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Manifest, ProducerState
from lazyshard.store.durable import publish_bytes, rename, sync_directory
from lazyshard.store.files import MAX_PLAIN_BYTES
from lazyshard.stream.head import Announcer
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.open_chunk import OpenArrays, OpenChunk, WriteSteps
from lazyshard.stream.recovery import Recovered

_log = logging.getLogger("lazyshard")


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


class ChunkSequence:
    """Publishes rows chunk after chunk. Whatever a method raises leaves it open what was added: nothing may follow.

    Args:
        directory: the stream's directory.
        opened: the stream, opened for writing.
        steps: does everything that touches files, so that it happens in order whatever the thread.
        clock: returns seconds since 1970.

    Attributes:
        published_chunks: chunks sealed so far.
        published_samples: rows in them.
        full_chunks: these, and the one that is on its way.
        source: the position after the last published row.
        row_source: the position after the last row.
        state: what the readers are told.
        publish_s: seconds from the last row of the last published chunk to its being told.
    """

    def __init__(self, directory: Path, opened: Opened, steps: WriteSteps, clock: Callable[[], float]) -> None:
        self.full_chunks = self.published_chunks = opened.found.chunks
        self.published_samples = opened.found.samples
        self.source: Any = opened.found.last.source if opened.found.last else None
        self.row_source = self.source
        self.state: ProducerState = "running"
        self.publish_s = 0.0
        self._directory = directory
        self._samples_per_chunk = opened.manifest.samples_per_chunk
        self._arrays = opened.manifest.arrays
        self._lock, self._workplace, self._announcer = opened.lock, opened.lock.workplace, opened.announcer
        self._steps = steps
        self._clock = clock
        self._publishing = 0  # number of the step
        self._handed_over = self.published_samples
        self._chunk = self._new_chunk()
        self._pid = os.getpid()
        self._finalizer: weakref.finalize[..., object] | None = None

    @property
    def room(self) -> int:
        """Rows that the open chunk can still take."""
        return self._samples_per_chunk - len(self._chunk)

    @property
    def samples(self) -> int:
        """Rows taken so far."""
        return self._handed_over + len(self._chunk)

    @property
    def told_at(self) -> float:
        """When the readers were last told something, by the monotonic clock."""
        return self._announcer.told_at

    def watch(self, writer: object) -> None:
        """Sees to it that it is logged when the writer is dropped, or the interpreter ends, while there are rows.

        Nobody would notice that they are not published. Ends with `unwatch`: the writer was closed.
        """
        self._finalizer = weakref.finalize(writer, self._warn)

    def unwatch(self) -> None:
        """Ends that."""
        if self._finalizer is not None:
            self._finalizer.detach()

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
        publish_end(
            self._directory,
            self.published_chunks,
            self.published_samples,
            self.row_source,
            temporary=self._workplace.path(END),
        )
        self.tell("finished")

    def leave(self, state: ProducerState, note: str = "") -> None:
        """Tells the readers, if it can, that this producer stops, and why."""
        if self._steps.stop():
            with contextlib.suppress(OSError, LazyShardError):
                self._lock.check()
                self.tell(state, note)

    def tell_alive(self, note: str) -> None:
        """A step: tells the readers that this producer is alive.

        Raises:
            ProducerFenced: another one has taken the stream over.
        """
        self._announcer.told_at = time.monotonic()
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
        self._announcer.tell(self.published_chunks, self.published_samples, self.samples, state, note)

    def close(self) -> None:
        """A step, the last one: removes what is not published."""
        self._chunk.discard()
        self._announcer.close()

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
        """A step."""
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

    def _warn(self) -> None:
        if len(self._chunk) and os.getpid() == self._pid:
            _log.warning(
                "%s: a ChunkWriter was dropped without close(): %d rows of its open chunk are not published; use it "
                "in a with statement, or call close()",
                self._directory,
                len(self._chunk),
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

    Args:
        directory: the stream's directory.
        chunk: the chunk.
        source: the position after it, for its seal.
        now: seconds since 1970.
        lock: the right to write to the stream, which is looked at before each step that shows.
        temporary: a name on the same filesystem to write the seal under.

    Raises:
        ProducerFenced: another producer has taken the stream over, or has published this chunk all the same.
        OSError: the filesystem refused.
        TypeError: `source` is not JSON.
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
    """Ends the stream after so many chunks, all of them published; `source` is the position behind all that was read.

    Raises:
        OSError: the filesystem refused.
    """
    data = End(chunks, samples, source).encode()
    if len(data) > MAX_PLAIN_BYTES:
        # Readers refuse such a file, and can do without the position.
        data = End(chunks, samples).encode()
    publish_bytes(data, directory / END, temporary)


class WriterFailure:
    """Whether a writer has failed, and by what."""

    def __init__(self, directory: Path, lock: WriterLock) -> None:
        self._directory = directory
        self._lock = lock
        self._cause: BaseException | None = None

    def __bool__(self) -> bool:
        """Whether it has failed."""
        return self._cause is not None

    def check(self, published_samples: int) -> None:
        """Raises what the writer has failed by, if it has.

        Raises:
            LazyShardError: what it was; a `WriterFailed` where it was something else.
        """
        if isinstance(self._cause, LazyShardError):
            raise self._cause
        if self._cause is not None:
            reason = f"an earlier call was ended by {type(self._cause).__name__}"
            raise self._told(reason, "open", published_samples) from self._cause

    def fail(self, cause: BaseException, published_samples: int) -> NoReturn:
        """Remembers what has left an open chunk of unknown content, and raises it, or in its place what tells more.

        Raises:
            WriterFailed: the filesystem refused.
            ProducerFenced: another producer has taken the stream over, of which this was a consequence.
            BaseException: the cause itself, if it is something else.
        """
        self._cause = cause
        if not isinstance(cause, OSError) or isinstance(cause, LazyShardError):
            raise cause
        remedy = "make room or mend the filesystem, then open"
        told: LazyShardError = self._told(cause.strerror or str(cause), remedy, published_samples)
        self._cause = told
        try:
            # A producer that takes over removes this one's directory, which is no fault of the filesystem.
            self._lock.check(closely=True)
        except ProducerFenced as fenced:
            self._cause = told = fenced
        except OSError:
            pass
        raise told from cause

    def _told(self, reason: str, remedy: str, published_samples: int) -> WriterFailed:
        return WriterFailed(
            f"{self._directory}: {reason}. {published_samples:,} samples are published and safe, the rows after them "
            f"are not; {remedy} the stream again, or start its producer again: it goes on from there",
            directory=str(self._directory),
            published_samples=published_samples,
        )
