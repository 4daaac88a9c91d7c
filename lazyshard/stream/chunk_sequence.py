"""The chunks of a writer, one after the other: filled, published when full, told to the readers."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazyshard.errors import LazyShardError
from lazyshard.format import CheckedLines, ProducerState
from lazyshard.format.arrays import PackedRow
from lazyshard.format.names import END, arrays_name, chunk_name, seal_name
from lazyshard.stream.dropped import HeldRows
from lazyshard.stream.open_arrays import OpenArrays
from lazyshard.stream.open_chunk import OpenChunk
from lazyshard.stream.publishing import publish_chunk, publish_end
from lazyshard.stream.steps import Steps
from lazyshard.stream.writer_opening import Opened

_log = logging.getLogger("lazyshard")


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
        held: the rows of the open chunk, for whoever has to know when the writer is gone.
    """

    def __init__(self, directory: Path, opened: Opened, steps: Steps, clock: Callable[[], float]) -> None:
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
        self.held = HeldRows(directory, self._chunk)

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

    def append(self, line: bytes, tokens: int | None, source: Any) -> None:
        """Adds a row; see `ChunkWriter.write`."""
        self._chunk.append(line, tokens)
        self._added(source)

    def append_packed(self, row: PackedRow, tokens: int | None, source: Any) -> None:
        """Adds a row with its arrays; see `ChunkWriter.write`."""
        assert self._chunk.arrays is not None
        self._chunk.arrays.append(row.arrays)
        self.append(row.line, tokens, source)

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
        self._chunk = self.held.chunk = self._new_chunk()
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

    def _new_chunk(self) -> OpenChunk:
        number, arrays = self.full_chunks, None
        if self._arrays:
            arrays = OpenArrays(self._workplace.path(arrays_name(number)), self._steps)
        return OpenChunk(number, self._workplace.path(chunk_name(number)), self._steps, arrays)
