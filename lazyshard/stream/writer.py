"""`ChunkWriter` writes rows into chunks, publishes each full chunk, and notifies the readers."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lazyshard.errors import LazyShardError, StreamEnded, WriterFailed
from lazyshard.format.arrays import may_hold_arrays, pack_row, refuse_array_key
from lazyshard.format.batch import CheckedLines, check_lines, without_array_keys
from lazyshard.format.records import END, Encoding, ProducerState, check_encoding
from lazyshard.format.row import check_line, encode_row
from lazyshard.stream import publishing
from lazyshard.stream.head import HEARTBEAT_S, check_state, failure_note, plain
from lazyshard.stream.lock import Wanted, open_for_writing
from lazyshard.stream.publishing import Filled, LinkedChunk, OpenChunk, SealedPiece, WriteSteps
from lazyshard.stream.share import Share


class ChunkWriter(contextlib.AbstractContextManager["ChunkWriter"]):
    """Writes rows into a stream, `samples_per_chunk` to a chunk, and publishes each chunk when it is full.

    If the stream exists, the writer continues after its last published chunk: give it the rows after the first
    `published_samples`. Rows of an unfinished chunk are dropped if the process dies or the writer is closed with
    ``end=False``, and must be given again. The same rows make the same chunks.

    As a context manager it ends the stream on success; after an exception it leaves the stream resumable. Use a writer
    in one thread only, in the process that opened it. Not guaranteed: that two producers on two machines are kept apart
    on a filesystem that does not meet the requirements of `lazyshard.stream.lock`.

    Args:
        directory: the stream's directory; created if it does not exist.
        samples_per_chunk: rows in a chunk. Needed for a new stream; for an existing one it must be the same, or None.
        clock: returns seconds since 1970.
        overlap: write and publish in a thread while the caller makes the next rows. A call that fills a chunk then
            returns before it is published; at most one such chunk is in progress. Filesystem errors are raised by a
            later call, at the latest by `close`.
        arrays: rows may hold numpy arrays, stored in a side file per chunk; see docs/arrays.md. For an existing stream
            it must be the value it was created with.
        encoding: how all rows are encoded, as plain facts by name (see docs/encoding.md); stored in the manifest. None
            if rows are not encoded. Needs `arrays`.
        writer: the name of this writer if several write to the stream: 1 to 64 letters, digits, `.`, `_` and `-`. Its
            chunks are published in `.writers/NAME` first; one of the writers' processes, or `lazyshard-producer
            sequence`, gives them their numbers in the stream. Everything here but `samples_per_chunk` is about this
            writer's rows alone. Or a `Share`, which has a name. None: the only producer of its stream.
        writers: how many writers the stream has, or their names: it ends when all of them have ended. 0, the default of
            a new stream: it ends by `lazyshard-producer end`. For a stream that is there it must be the same, or None.

    Attributes:
        stream_id: the stream's identity, 32 hexadecimal digits.
        published_chunks, published_samples: chunks sealed so far, and rows in them.
        samples: rows taken so far: published ones, those in progress and those of the open chunk.
        full_chunks: chunks sealed so far, plus the one in progress with `overlap`.
        source: the position that was given with the last published row, or None.
        publish_s: seconds from the last row of the last published chunk until the head was written.

    Raises:
        StreamEnded: the stream has ended.
        StreamMismatch: it has another number of samples per chunk, or was made with other `arrays` or `encoding`.
        StreamInvalid: its files contradict each other, or the directory holds chunks of another program.
        ProducerFenced: another producer, on this machine or another, is writing to it.
        OSError: the filesystem refused.
        ValueError: samples_per_chunk is missing or invalid, or `encoding` is invalid.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        samples_per_chunk: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
        overlap: bool = False,
        arrays: bool = False,
        encoding: Encoding | None = None,
        writer: str | Share | None = None,
        writers: int | Iterable[str] | None = None,
    ) -> None:
        wanted = Wanted(samples_per_chunk, arrays, encoding)
        shared = writer.directory if isinstance(writer, Share) else Path(directory)
        if not isinstance(writer, Share | None):
            open_stream = functools.partial(open_sequenced, shared, clock, arrays, encoding)
            writer = Share(shared, writer, writers, wanted, clock, open_stream=open_stream)
        elif writers is not None:
            raise ValueError(f"{shared}: writers={writers!r} needs writer=NAME, the name of this one")
        self._share = writer
        self._open(shared, wanted, clock, overlap)

    def _open(self, directory: Path, wanted: Wanted, clock: Callable[[], float], overlap: bool) -> None:
        self.directory = directory if self._share is None else self._share.folder
        self._pid = os.getpid()
        if wanted.encoding is not None:
            wanted = wanted._replace(encoding=check_encoding(wanted.encoding))
            if not wanted.arrays:
                raise ValueError(f"{self.directory}: encoded rows hold arrays; give arrays=True with encoding")
        stream_id = None
        if self._share is not None:
            stream_id = self._share.piece_stream_id
            wanted = wanted._replace(samples_per_chunk=self._share.samples_per_chunk)
        try:
            opened = open_for_writing(self.directory, wanted, clock, stream_id)
        except StreamEnded as ended:
            if self._share is not None:
                # Its process may have been killed before its last pieces were numbered, and before the stream's end.
                self._share.complete(ended.samples or 0)
            raise
        manifest, self._lock, self._announcer, found, self.source = opened
        self.stream_id, self.arrays = manifest.stream_id, manifest.arrays
        self.samples_per_chunk = manifest.samples_per_chunk
        self.full_chunks = self.published_chunks = found.chunks
        self.published_samples = self.samples = found.samples
        self._row_source = self.source  # the position after the last row
        self.publish_s = 0.0
        self._state: ProducerState = "running"
        self._clock = clock
        self._failure: BaseException | None = None
        self._steps = WriteSteps(overlap=overlap)
        self._publishing = 0  # number of the step that publishes
        self._begin_chunk()
        self._closed = False
        if self._share is not None:
            self._share.begin(self.published_samples, self)

    def write(self, row: dict[str, Any] | bytes, tokens: int | None = None, *, source: Any = None) -> dict[str, Any]:
        """Adds a row; publishes the chunk if that fills it. Returns the row's object, parsed to check it.

        Args:
            row: a JSON object, as a dict or as the bytes of one line (with or without its line end). With `arrays` a
                dict may hold numpy arrays at any depth, of bool, u/int8 to 64, float16 to 64 or `lazyshard.BFLOAT16`.
            tokens: length of the sample in tokens. Kept for a chunk if every row of it has one.
            source: JSON value that says where to continue after this row. The value of a chunk's last row is stored in
                its seal and becomes `source` of the writer that resumes; None keeps the previous value.

        Raises:
            RowInvalid: not a JSON object in UTF-8; the row is not added, and the writer continues.
            ProducerFenced: another producer has taken the stream over.
            WriterFailed: the filesystem refused, or an earlier call was interrupted, for instance by a
                KeyboardInterrupt. The chunk is dropped; open the stream again to resume.
            TypeError, ValueError: `tokens` is invalid (the row is not added, and the writer continues), `source` is
                not JSON, or the writer is closed.
            RuntimeError: this is a fork of the process that opened the writer.
        """
        self._check_open()
        tokens = None if tokens is None else publishing.check_tokens(tokens)
        packed = b""
        if isinstance(row, bytes):
            line, parsed = check_line(row)
            if self.arrays and may_hold_arrays(line):
                refuse_array_key(parsed)
        else:
            parsed = row
            line, packed = pack_row(row) if self.arrays else (encode_row(row), b"")
        try:
            self._chunk.append(line, packed, tokens)
            self._added(1, source)
        except BaseException as cause:
            self._fail(cause)
        self._beat()
        return parsed

    def write_lines(self, lines: Sequence[bytes] | CheckedLines, *, source: Any = None) -> tuple[int, ...]:
        """Adds many rows, several times faster than one by one; publishes the chunk if they fill it.

        Args:
            lines: the rows, each the bytes of one line, with or without its line end, or the result of
                `lazyshard.format.batch.check_lines`; at most `room` rows.
            source: as in `write`, after the last of these rows.

        Returns:
            Indices of the rows with a duplicate key in one object.

        Raises:
            RowInvalid: a line is not a row; its `index` says which. Only the lines before it are added, without
                `source`; the writer continues.
            ValueError: there are more lines than the open chunk has room for, or they hold arrays and the stream does
                not (nothing is added); or the writer is closed.
            ProducerFenced, WriterFailed, TypeError, RuntimeError: see `write`.
        """
        self._check_open()
        given = len(lines) + (isinstance(lines, CheckedLines) and lines.refused is not None)
        if given > self.room:
            raise ValueError(f"{given} lines are more than the open chunk has room for, which is {self.room}")
        rows = lines if isinstance(lines, CheckedLines) else check_lines(lines)
        if rows.arrays is None:
            rows = without_array_keys(rows) if self.arrays else rows
        elif not self.arrays:
            raise ValueError(f"{self.directory}: the stream was created without arrays, but these rows hold some")
        try:
            if len(rows):
                self._chunk.extend(rows)
                self._added(len(rows), source if rows.refused is None else None)
        except BaseException as cause:
            self._fail(cause)
        self._beat()
        if rows.refused is not None:
            raise rows.refused
        return rows.duplicates

    def publish_pieces(self, pieces: Sequence[SealedPiece]) -> None:
        """Publishes chunks of other streams on this filesystem as the next ones of this stream. Raises as `write`.

        Their files get a second name here, which costs the same whatever their size. `SealedPiece.check` must have
        passed them, and the open chunk must be empty.
        """
        self._check_open()
        assert not len(self._chunk)
        numbered = enumerate(pieces, self.full_chunks)
        chunks = [(LinkedChunk(number, self._lock.path, piece), piece.source) for number, piece in numbered]
        self._row_source = pieces[-1].source
        self.samples += sum(len(chunk) for chunk, _ in chunks)
        try:
            self._publish(chunks)
        except BaseException as cause:
            self._fail(cause)

    @property
    def state(self) -> ProducerState:
        """The state of this producer in `head.json`, from the next publish or heartbeat on."""
        return self._state

    @state.setter
    def state(self, state: ProducerState) -> None:
        self._state = check_state(state)

    @property
    def room(self) -> int:
        """Rows that the open chunk can still take, at least 1."""
        return self.samples_per_chunk - len(self._chunk)

    def heartbeat(self, state: ProducerState | None = None, note: str = "") -> None:
        """Tells the readers that this producer is alive. `write` does this too; call it while no row arrives.

        Args:
            state: the producer's new state; None keeps it.
            note: what it waits for, in words; kept in `head.json` until the next publish or heartbeat.

        Raises:
            ProducerFenced, WriterFailed: as `write`.
            ValueError: the writer is closed, or `state` is "finished", which only `close` can set.
        """
        self._check_open()
        self.state = state or self.state
        self._finish_steps(functools.partial(self._tell_alive, note))

    def held(self) -> str | None:
        """Returns why the chunk that begins now would wait when it is full, None if it would not. Raises as `write`.

        A named writer waits while four of its chunks have no number in the stream.
        """
        self._check_open()
        return None if self._share is None else self._share.held(self.full_chunks * self.samples_per_chunk)

    def settle(self) -> None:
        """Returns when every full chunk is published; at once without `overlap`. Raises as `write`."""
        self._check_open()
        self._finish_steps()

    @property
    def failed(self) -> bool:
        """Whether a call has failed so that the stream must be opened again."""
        return self._failure is not None

    def check_owner(self) -> Path:
        """Raises ProducerFenced if the stream no longer belongs to this producer; call it before deleting chunks.

        Returns a directory from which to rename files into the stream, until another producer takes it over.
        """
        self._lock.check(closely=True)
        return self._lock.place

    def close(self, end: bool = True, state: ProducerState = "idle", *, source: Any = None, note: str = "") -> None:
        """Closes the writer. Closing a closed one does nothing.

        Args:
            end: True publishes the remaining rows as the last, shorter chunk and ends the stream; False drops them and
                leaves the stream resumable.
            state: the state in `head.json` from now on, if the stream does not end.
            source: as in `write`: the position at the end of all sources.
            note: why the producer stops, in words, if the stream does not end.

        Raises:
            ProducerFenced, WriterFailed: as `write`; open the stream again to resume or to finish it.
            ValueError: `state` is "finished", which only `end` can set.
            RuntimeError: a fork of the process that opened the writer would end the stream.
        """
        if self._closed:
            return
        check_state(state)
        if os.getpid() != self._pid:
            # Files, lock and owner belong to the parent; only this process's copy of the descriptor is closed.
            self._closed = True
            self._chunk.discard(remove=False)
            if end:
                raise self._forked()
            return
        self._row_source = self._row_source if source is None else source
        try:
            if end:
                self._check_open()
                try:
                    self._end()
                except BaseException as cause:
                    self._fail(cause)
            else:
                self._finish_steps()
                self._leave(state, plain(note))
        except BaseException as cause:
            self._leave("failed", failure_note(cause))
            raise
        else:
            if end and self._share is not None:
                self._share.finish(self.published_samples)
        finally:
            self._closed = True
            self._dropped.detach()
            # An interrupt may have left steps running: they need the lock and files until the process ends.
            if self._steps.stop():
                self._chunk.discard()
                self._announcer.close()
                self._lock.release()
            if self._share is not None:
                self._share.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Ends the stream, or after an exception leaves it resumable."""
        failed = isinstance(error, Exception)
        self.close(end=kind is None, state="failed" if failed else "idle", note=failure_note(error) if failed else "")

    def _begin_chunk(self) -> None:
        self._chunk = OpenChunk(self.full_chunks, self._lock.path, self._steps, arrays=self.arrays)
        self._dropped = weakref.finalize(self, self._chunk.warn_unpublished, self.directory, self._pid)

    def _added(self, rows: int, source: Any) -> None:
        self.samples += rows
        self._row_source = self._row_source if source is None else source
        if len(self._chunk) == self.samples_per_chunk:
            self._publish([(self._chunk, self._row_source)])

    def _publish(self, chunks: Sequence[Filled], *, last: bool = False) -> None:
        for file in self._chunk.files:
            file.pass_on()
        # Waits for the previous chunk: at most one may be in progress.
        self._steps.wait(self._publishing)
        step = functools.partial(self._publish_chunks, chunks, time.monotonic(), last)
        self.full_chunks += len(chunks)
        self._dropped.detach()
        self._begin_chunk()
        self._publishing = self._steps.do(step)

    def _publish_chunks(self, chunks: Sequence[Filled], full_at: float, last: bool) -> None:
        if self._share is not None:
            self._share.make_room(self.published_samples, self._tell_alive)
        try:
            publishing.publish_chunks(self.directory, chunks, self._clock(), self._lock)
        except BaseException:
            for chunk, _ in chunks:
                chunk.discard()
            raise
        self.published_chunks += len(chunks)
        self.published_samples += sum(len(chunk) for chunk, _ in chunks)
        self.source = chunks[-1][1]
        if not last:
            # A partial chunk is the last one: the head counts it only together with the end.
            self._tell(self._state)
        if self._share is not None:
            self._share.wake(self.published_chunks)
        self.publish_s = time.monotonic() - full_at

    def _end(self) -> None:
        if len(self._chunk):
            self._publish([(self._chunk, self._row_source)], last=True)
        self._steps.wait()
        self._lock.check()
        end = self.published_chunks, self.published_samples, self._row_source
        publishing.publish_end(self.directory, *end, self._lock.path(END))
        self._tell("finished")

    def _leave(self, state: ProducerState, note: str) -> None:
        """Tells the readers, if possible, that this producer stops, and why."""
        if self._steps.stop():
            with contextlib.suppress(OSError, LazyShardError):
                self._lock.check()
                self._tell(state, note)

    def _tell_alive(self, note: str) -> None:
        self._announcer.tell_alive(functools.partial(self._tell, self._state, note), self._lock)

    def _tell(self, state: ProducerState, note: str = "") -> None:
        self._announcer.tell(self.published_chunks, self.published_samples, self.samples, state, note)

    def _beat(self) -> None:
        if time.monotonic() - self._announcer.told_at > HEARTBEAT_S:
            self.heartbeat()

    def _finish_steps(self, last: Callable[[], object] | None = None) -> None:
        if self._failure is None:
            try:
                if last is not None:
                    self._steps.do(last)
                self._steps.wait()
            except Exception as cause:
                self._fail(cause)

    def _fail(self, cause: BaseException) -> NoReturn:
        """Records the error that left the open chunk in an unknown state, and raises it or a more specific one.

        Tells the readers at once: the caller may catch the error and never close the writer.
        """
        self._failure = cause
        if not isinstance(cause, Exception):
            raise cause
        told: LazyShardError | None = None
        if isinstance(cause, OSError) and not isinstance(cause, LazyShardError):
            # A producer that takes over removes this one's directory, which is not a filesystem error.
            lost, reason = self._lock.lost(), cause.strerror or str(cause)
            self._failure = told = lost or self._failed(reason, "make room or fix the filesystem, then open")
        self._leave("failed", failure_note(told or cause))
        if told is None:
            raise cause
        raise told from cause

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.directory}: this writer is closed; open the stream again to continue")
        if os.getpid() != self._pid:
            raise self._forked()
        if isinstance(self._failure, LazyShardError):
            raise self._failure
        if self._failure is not None:
            reason = f"an earlier call was ended by {type(self._failure).__name__}"
            raise self._failed(reason, "open") from self._failure

    def _failed(self, reason: str, remedy: str) -> WriterFailed:
        return publishing.write_failed(self.directory, self.published_samples, reason, remedy)

    def _forked(self) -> RuntimeError:
        return RuntimeError(f"{self.directory}: this writer belongs to process {self._pid}; this process is its fork")


def open_sequenced(directory: Path, clock: Callable[[], float], arrays: bool, encoding: Encoding | None) -> ChunkWriter:
    """Returns the writer of a stream of several writers, for their sequencer. Raises as `ChunkWriter`."""
    writer = ChunkWriter.__new__(ChunkWriter)
    writer._share = None
    writer._open(directory, Wanted(None, arrays, encoding, shared=True), clock, overlap=False)
    return writer
