"""`ChunkWriter`: publishes a stream.

The order of steps is the guarantee. For each chunk: rows under `.tmp/`, sync, rename, sync the directory; the same for
the seal; then `head.json`. The seal is the commit: before it nothing of the chunk counts, after it nothing of it
changes.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from lazyshard.errors import (
    LazyShardError,
    ProducerFenced,
    RowInvalid,
    StreamEnded,
    StreamInvalid,
    WriterFailed,
)
from lazyshard.format import STATES, End, Head, Manifest, ProducerState, check_row, encode_row
from lazyshard.format.names import END, HEAD, MANIFEST, TEMPORARY, chunk_name, seal_name
from lazyshard.storage.creation import create_stream, find_manifest
from lazyshard.storage.durable import publish_bytes, rename, sync_directory
from lazyshard.storage.lock import WriterLock
from lazyshard.storage.open_chunk import OpenChunk
from lazyshard.storage.rate import RateMeter
from lazyshard.storage.recovery import recover

HEARTBEAT_S: Final = 5.0
"""How old `head.json` may get while rows come: readers only tell its age, and nobody acts on less than a minute."""

_MAX_TOKENS: Final = 2**32 - 1

_log = logging.getLogger("lazyshard")


class ChunkWriter:
    """Writes rows into a stream, `samples_per_chunk` to a chunk, and publishes each chunk when it is full.

    Opening a stream that is there goes on after its last published chunk: `published_samples` says how many rows it
    holds, so give it the rows that follow. Rows of an unfinished chunk are never published; they are dropped when the
    process dies or the writer is closed with ``end=False``, and have to be given again. Feed the same rows and the
    chunks come out the same.

    As a context manager it ends the stream on success, and on an exception leaves it so that it can be resumed.

    Args:
        directory: the stream's directory; made if it is not there.
        samples_per_chunk: rows in a chunk. Needed for a new stream; for one that is there it must be the same, or None.
        clock: returns seconds since 1970.

    Attributes:
        directory: the stream's directory.
        stream_id: the stream's identity, 32 hexadecimal digits.
        samples_per_chunk: rows in a chunk.
        published_chunks: chunks sealed so far.
        published_samples: rows in them.
        source: the position that was given with the last published row, None if there is none.
        state: what `head.json` says that this producer is doing.

    Raises:
        StreamEnded: the stream has ended.
        StreamMismatch: it has another number of samples per chunk.
        StreamInvalid: its files contradict each other, or the directory holds chunks that somebody else made.
        ProducerLocked: another producer on this machine is writing to it.
        OSError: the filesystem refused.
        ValueError: samples_per_chunk is missing or impossible.

    Not guaranteed: that no second producer *on another machine* publishes at the very moment of taking over; see
    `lazyshard.format.owner`. One writer is for one thread, and for the process that opened it: a forked one is refused
    every call, and nothing that it does touches the stream.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        samples_per_chunk: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self.state: ProducerState = "running"
        self._clock = clock
        self._temporary = self.directory / TEMPORARY
        self._host = socket.gethostname() or "unknown"
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._closed = True
        # Refuses what can be refused before anything is made, and before another producer is fenced.
        find_manifest(self.directory, samples_per_chunk)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(self.directory)
        owner = self._lock.acquire(clock(), self._temporary)
        # Two writers on two mounts never share a temporary name, so neither can rename what the other is writing.
        self._suffix = f".{owner.token}"
        try:
            self._open(samples_per_chunk)
        except BaseException:
            self._lock.release()
            raise
        self._closed = False

    def _open(self, samples_per_chunk: int | None) -> None:
        manifest = find_manifest(self.directory, samples_per_chunk)
        if manifest is None:
            assert samples_per_chunk is not None
            manifest = Manifest(uuid.uuid4().hex, samples_per_chunk, self._clock())
            create_stream(self.directory, manifest, self._temporary / f"{MANIFEST}{self._suffix}")
        self.stream_id = manifest.stream_id
        self.samples_per_chunk = manifest.samples_per_chunk
        found = recover(self.directory, manifest)
        self._temporary.mkdir(exist_ok=True)
        self.published_chunks = found.chunks
        self.published_samples = found.samples
        self.source: Any = found.last.source if found.last else None
        self._row_source = self.source
        self._meter = RateMeter(time.monotonic(), found.samples)
        self._rate = 0.0
        if found.closing:
            self._write_end()
        if found.ended or found.closing:
            self._write_head("finished")
            self._remove_temporary()
            raise StreamEnded(
                f"{self.directory}: the stream has ended with {found.samples} samples; nothing can be added to it. "
                f"Write a new stream to another directory",
                directory=str(self.directory),
                samples=found.samples,
            )
        self._chunk = self._new_chunk()
        self._write_head(self.state)

    def write(self, row: dict[str, Any] | bytes, tokens: int | None = None, *, source: Any = None) -> dict[str, Any]:
        """Adds a row; publishes the chunk if that fills it. Returns the row's object, which was parsed to check it.

        Args:
            row: a JSON object, as a dict or as the bytes of one line (with or without its line end), which are kept as
                they are.
            tokens: length of the sample in tokens. Kept for a chunk if every row of it has one.
            source: JSON value that tells where to go on after this row. That of a chunk's last row is kept in its seal
                and is `source` of the writer that resumes; None keeps the one before.

        Raises:
            RowInvalid: not a JSON object in UTF-8; the row is not added, and the writer goes on.
            ProducerFenced: another producer has taken the stream over.
            WriterFailed: the filesystem refused, now or in an earlier call. The chunk is dropped; open the stream again
                to resume.
            TypeError: `tokens` is not an integer (the row is not added, and the writer goes on), or `source` is not
                JSON.
            ValueError: the writer is closed, or `tokens` is negative.
            RuntimeError: this is a fork of the process that opened the writer.

        Whatever else ends a call in the middle, a KeyboardInterrupt for instance, leaves it open whether the row was
        added, so from then on the writer counts as failed: nothing is published twice or torn.
        """
        self._check_open()
        if tokens is not None and not 0 <= (tokens := operator.index(tokens)) <= _MAX_TOKENS:
            raise ValueError(f"tokens is from 0 to {_MAX_TOKENS}, got {tokens}")
        line, parsed = _line(row)
        try:
            self._chunk.append(line, tokens)
            if source is not None:
                self._row_source = source
            if len(self._chunk) == self.samples_per_chunk:
                self._publish()
        except BaseException as cause:
            self._fail(cause)
            raise
        if time.monotonic() - self._head_at > HEARTBEAT_S:
            self.heartbeat()
        return parsed

    @property
    def samples(self) -> int:
        """Rows taken so far: the published ones and those of the open chunk."""
        return self.published_samples + len(self._chunk)

    def heartbeat(self, state: ProducerState | None = None) -> None:
        """Tells the readers that this producer is alive. `write` does so by itself; call it while no row comes.

        Args:
            state: what it is doing from now on; None leaves it.

        Raises:
            ProducerFenced: another producer has taken the stream over.
            WriterFailed: an earlier call has failed.
            ValueError: the writer is closed, or `state` is "finished", which only `close` can make true.
        """
        self._check_open()
        self.state = _check_state(state or self.state)
        self._head_at = time.monotonic()
        try:
            self._lock.check()
            self._write_head(self.state)
        except LazyShardError as cause:
            self._failure = cause
            raise
        except OSError as cause:
            # The head is a hint; a full disk must not stop a producer that has nothing to publish yet.
            _log.warning("%s: readers cannot be told that this producer is alive: %s", self.directory, cause)

    def close(self, end: bool = True, state: ProducerState = "idle", *, source: Any = None) -> None:
        """Closes the writer. Closing a closed one does nothing.

        Args:
            end: True publishes what rows are left as the last, shorter chunk and ends the stream; False drops them and
                leaves the stream to be resumed.
            state: what `head.json` says from now on, if the stream does not end.
            source: as in `write`, for the last chunk if it is a shorter one: position where all the sources end.

        Raises:
            ProducerFenced: another producer has taken the stream over.
            WriterFailed: the filesystem refused, now or in an earlier call; open the stream again to resume, or where
                only the last step is missing to finish it.
            ValueError: `state` is "finished", which only `end` can make true.
            RuntimeError: the stream is to be ended by a fork of the process that opened the writer.
        """
        if self._closed:
            return
        _check_state(state)
        if os.getpid() != self._pid:
            # Files, lock and owner are the parent's; only this process's copy of the descriptor is closed.
            self._closed = True
            self._chunk.abandon()
            if end:
                raise RuntimeError(self._forked())
            return
        if source is not None:
            self._row_source = source
        ours = False
        try:
            if end:
                self._check_open()
                self._end()
                ours = True
            else:
                ours = self._leave(state)
        except BaseException:
            ours = self._leave("failed")
            raise
        finally:
            self._closed = True
            with contextlib.suppress(OSError):
                self._chunk.abandon()
            with contextlib.suppress(OSError):
                self._chunk.path.unlink(missing_ok=True)
            if ours:
                self._remove_temporary()
            self._lock.release()

    def __enter__(self) -> ChunkWriter:
        """Returns the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the stream, or after an exception leaves it resumable."""
        self.close(end=kind is None, state="failed" if kind is not None and issubclass(kind, Exception) else "idle")

    def _end(self) -> None:
        try:
            if len(self._chunk):
                # A partial chunk is the last one: the head names it only together with the end.
                self._publish(tell=False)
            self._lock.check()
            self._write_end()
            self._write_head("finished")
        except BaseException as cause:
            self._fail(cause)
            raise

    def _leave(self, state: ProducerState) -> bool:
        """Tells the readers, if it can, that this producer stops; returns whether the stream is still ours."""
        ours = False
        with contextlib.suppress(OSError, LazyShardError):
            self._lock.check()
            ours = True
            self._write_head(state)
        return ours

    def _publish(self, *, tell: bool = True) -> None:
        chunk = self._chunk
        data = self.directory / chunk_name(chunk.number)
        target = self.directory / seal_name(chunk.number)
        chunk.finish()
        self._lock.check()
        if os.path.lexists(target):
            raise StreamInvalid(
                f"{target}: somebody else has published this chunk; this producer stops, nothing of the stream was "
                f"changed",
                directory=str(self.directory),
                chunk=chunk.number,
            )
        rename(chunk.path, data)
        sync_directory(self.directory)
        seal = chunk.seal(self._row_source, self._clock())
        self._lock.check()
        publish_bytes(seal.encode(), target, self._temporary / f"{target.name}{self._suffix}")
        self.published_chunks += 1
        self.published_samples += len(chunk)
        self.source = self._row_source
        self._chunk = self._new_chunk()
        if tell:
            self._write_head(self.state)

    def _new_chunk(self) -> OpenChunk:
        return OpenChunk(self.published_chunks, self._temporary / f"{chunk_name(self.published_chunks)}{self._suffix}")

    def _write_end(self) -> None:
        end = End(self.published_chunks, self.published_samples)
        publish_bytes(end.encode(), self.directory / END, self._temporary / f"{END}{self._suffix}")

    def _write_head(self, state: ProducerState) -> None:
        self._head_at = time.monotonic()
        open_rows = len(self._chunk) if hasattr(self, "_chunk") else 0
        self._rate = self._meter.update(self._head_at, self.published_samples + open_rows)
        ended = state == "finished"
        # A partial chunk is the last one: no head names it before `stream.end` is there.
        partial = 0 if ended else self.published_samples % self.samples_per_chunk
        head = Head(
            chunks=self.published_chunks - (1 if partial else 0),
            samples=self.published_samples - partial,
            ended=ended,
            state=state,
            rate=self._rate,
            host=self._host,
            pid=os.getpid(),
            updated_at=self._clock(),
        )
        publish_bytes(head.encode(), self.directory / HEAD, self._temporary / f"{HEAD}{self._suffix}", durable=False)

    def _remove_temporary(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._temporary)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.directory}: this writer is closed; open the stream again to go on")
        if os.getpid() != self._pid:
            raise RuntimeError(self._forked())
        if isinstance(self._failure, LazyShardError):
            raise self._failure
        if self._failure is not None:
            reason = f"an earlier call was ended by {type(self._failure).__name__}"
            raise self._writer_failed(reason, "open") from self._failure

    def _forked(self) -> str:
        return (
            f"{self.directory}: this writer belongs to process {self._pid}, of which this one is a fork; only that one "
            f"can write and end the stream"
        )

    def _fail(self, cause: BaseException) -> None:
        """Remembers what has left an open chunk of unknown content; raises in its place what tells more."""
        self._failure = cause
        if isinstance(cause, OSError) and not isinstance(cause, LazyShardError):
            reason = cause.strerror or str(cause)
            self._failure = self._writer_failed(reason, "make room or mend the filesystem, then open")
            try:
                # A producer that has taken over may have removed `.tmp`, which is no fault of the filesystem.
                self._lock.check()
            except ProducerFenced as fenced:
                self._failure = fenced
            except OSError:
                pass
            raise self._failure from cause

    def _writer_failed(self, reason: str, remedy: str) -> WriterFailed:
        return WriterFailed(
            f"{self.directory}: {reason}. {self.published_samples} samples are published and safe, the rows after them "
            f"are not; {remedy} the stream again and go on from there",
            directory=str(self.directory),
            published_samples=self.published_samples,
        )


def _check_state(state: ProducerState) -> ProducerState:
    if state not in STATES or state == "finished":
        raise ValueError(f"state is one of {', '.join(s for s in STATES if s != 'finished')}, got {state!r}")
    return state


def _line(row: dict[str, Any] | bytes) -> tuple[bytes, dict[str, Any]]:
    if isinstance(row, bytes):
        line = row.rstrip(b"\r\n")
        if b"\n" in line:
            raise RowInvalid(
                "not a row: more than one line; a row is one JSON object on one line",
                reason="more than one line",
                byte=line.index(b"\n"),
            )
        parsed = check_row(line)
        return line + b"\n", parsed
    return encode_row(row), row
