"""What a named writer does beside writing: joins the stream, waits for the sequencer, becomes it if there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import filelock

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamMismatch, WriterFailed
from lazyshard.format.records import END, HEAD, LOCK, MANIFEST, Declared, End, Head, Manifest
from lazyshard.format.writers import WRITERS, check_declared, check_writer_name, piece_stream_id
from lazyshard.store.files import UrlPath, check_folder, is_there, read_record
from lazyshard.stream.head import HEARTBEAT_S
from lazyshard.stream.listing import invalid, retire
from lazyshard.stream.lock import Wanted, create_stream, find_manifest, new_manifest
from lazyshard.stream.members import RETRY_S, has_ended, read_committed, read_position, writer_names
from lazyshard.stream.sequencer import Gate, Sequencer, Sequencing

if TYPE_CHECKING:
    from lazyshard.stream.writer import ChunkWriter

MOST_PIECES: Final = 4  # pieces without a number after which a writer waits
_MOST_OBJECTS: Final = 8  # the same in an object store: until a piece has a number takes a second there
_RETIRED_AT_ONCE: Final = 16  # pieces: deleting costs three syncs each time
REFUSED_S: Final = 5.0  # after which a writer whose pieces are not taken fails: by then another process has taken over
_WARN_S: Final = 60.0
_POLL_S: Final = 0.005
_ASK_S: Final = 0.25  # how often a writer that waits reads the reason
_CREATED_S: Final = 60.0  # by then a process that creates the stream has done so, or it hangs
_log = logging.getLogger("lazyshard")


class Uploads(Protocol):
    """What uploads a writer's pieces from its folder to `.writers/NAME` of an object store."""

    @property
    def directory(self) -> Path:
        """The folder."""

    def check(self) -> None:
        """Raises what has ended the uploads."""

    def announce(self, published: int) -> None:
        """So many pieces are published in the folder."""

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Deletes the pieces before one in the store."""


class Share:
    """A writer's share in a stream of several writers. Raises as `ChunkWriter`.

    Args:
        open_stream, gate, sequencer: as `open_stream`, `gate` and `kind` of `Sequencing`.
        pause: called with seconds and a reason, instead of `time.sleep`, while the writer waits for the sequencer: in
            the call that fills a chunk (see `ChunkWriter.held`), in `finish`, and here if the writer has ended before.
            After the end of this writer it may raise to leave the rest to other processes.

    Attributes:
        uploads: for a stream in an object store, what uploads the pieces; set before the writer is opened.
        piece_stream_id: the identity of that.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        writers: int | Iterable[str] | None,
        wanted: Wanted,
        clock: Callable[[], float],
        *,
        open_stream: Callable[[], ChunkWriter],
        gate: Callable[[ChunkWriter], Gate] | None = None,
        pause: Callable[[float, str], object] = lambda seconds, reason: time.sleep(seconds),
        sequencer: Callable[[Any, Gate | None, int], Sequencer] = Sequencer,
    ) -> None:
        self.directory, self.name = directory, check_writer_name(name)
        self.uploads: Uploads | None = None
        declared = None if writers is None else check_declared(writers)
        manifest = self._join(declared, wanted._replace(shared=True), clock, open_stream)
        self._declared: Declared = manifest.writers or 0
        self.samples_per_chunk: int = manifest.samples_per_chunk
        self.piece_stream_id = piece_stream_id(manifest.stream_id, name)
        self._sequencing = Sequencing(directory, open_stream, gate, sequencer)
        self._remote = isinstance(directory, UrlPath)
        self._most = self.samples_per_chunk * (_MOST_OBJECTS if self._remote else MOST_PIECES)
        self._pause = pause
        self._woken, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._retire: Callable[[int], object] = str
        self._taken = self._retired = 0
        self._held_since = 0.0  # 0: it is not held
        self._ended = False
        self._pid = os.getpid()

    def _join(
        self, declared: Declared | None, wanted: Wanted, clock: Callable[[], float], open_stream: Callable[[], object]
    ) -> Manifest:
        """Returns the manifest of the shared stream, made if it is not there."""
        try:
            manifest = find_manifest(self.directory, wanted)
        except StreamMismatch as cause:
            fields = {"directory": cause.directory, "expected": cause.expected, "actual": cause.actual}
            raise StreamMismatch(f"writer {self.name!r}: {cause}", **fields) from None
        if not isinstance(self.directory, UrlPath):
            (self.directory / WRITERS).mkdir(parents=True, exist_ok=True)
        check_folder(self.directory / WRITERS)
        if manifest is None:
            self._create(new_manifest(wanted, clock(), writers=declared or 0))
            manifest = find_manifest(self.directory, wanted)
            if manifest is None:
                raise invalid(self.directory, "another writer has created a stream that is not visible yet")
        self._check_declared(manifest.writers or 0, declared)
        with contextlib.suppress(FileNotFoundError):
            end = read_record(self.directory / END, End.decode)
            with contextlib.suppress(ProducerFenced, StreamEnded):
                # Cleans up after a sequencer that was killed while it ended the stream, and raises StreamEnded.
                open_stream()
            what = f"{self.directory}: the stream has ended with {end.samples:,} samples; rows of writer {self.name!r}"
            what += " that are not in it need another directory"
            raise StreamEnded(what, directory=str(self.directory), samples=end.samples)
        return manifest

    def _create(self, made: Manifest) -> None:
        if isinstance(self.directory, UrlPath):
            target = self.directory / MANIFEST
            target.store.put_new(target.key, made.encode())
            return
        folder = self.directory / WRITERS
        # Without hard links, the lock alone keeps a manifest from being replaced.
        lock = filelock.FileLock(folder / LOCK, timeout=_CREATED_S, thread_local=False, poll_interval=_POLL_S)
        with lock, contextlib.suppress(FileExistsError):
            if not (self.directory / MANIFEST).exists():
                create_stream(self.directory, made, folder / f".stream.{secrets.token_hex(8)}")

    @property
    def folder(self) -> Path:
        """The directory in which this writer publishes."""
        return self.directory / WRITERS / self.name if self.uploads is None else self.uploads.directory

    def _check_declared(self, was: Declared, declared: Declared | None) -> None:
        names = {*writer_names(self.directory), self.name}
        what = ""
        if declared not in (None, was):
            what, way = f"it was made for writers={was!r}, not {declared!r}", "leave out writers= (--writers)"
        elif isinstance(was, tuple) and self.name not in was:
            what, way = f"{self.name!r} is none of its writers, {', '.join(was)}", "use one of these names"
        elif isinstance(was, int) and 0 < was < len(names):
            others = ", ".join(sorted(names - {self.name}))
            what = f"it was made for {was} writers, and {self.name!r} would be one more than {others}"
            way = "use one of these names"
        if what:
            fields = {"directory": str(self.directory), "expected": repr(was), "actual": repr(declared or self.name)}
            raise StreamMismatch(f"{self.directory}: {what}. That never changes for a stream: {way}", **fields)

    def begin(self, published: int, writer: ChunkWriter | None) -> None:
        """The writer, None if it had ended before, has published so many rows; sequencing begins."""
        taken, _ = read_position(self.directory).taken.get(self.name, (0, 0))
        if published < taken:
            what = f"{taken:,} rows of this writer are in the stream, its folder has {published:,}"
            raise invalid(self.folder, f"{what}; restore the folder from a copy, or use another writer's name")
        self._taken = taken
        if writer is not None:
            self._retire = lambda done: retire(self.folder, done, writer.published_chunks, check=writer.check_owner)
        if (uploads := self.uploads) is not None:
            self._retire = lambda done: uploads.retire(done, done + 1, lambda: None)
        self._thread = threading.Thread(target=self._run, name="lazyshard-sequencer", daemon=True)
        self._thread.start()

    def wake(self, pieces: int) -> None:
        """So many pieces are published: if this process sequences, it need not poll."""
        if self.uploads is not None:
            self.uploads.announce(pieces)
        if self._sequencing.sequencer is not None:
            self._woken.set()

    def held(self, rows: int) -> str | None:
        """Returns why the next chunk, after so many rows, would wait; None if it would not. Raises as `make_room`."""
        self._held_since = self._held_since or time.monotonic()
        if not self._look(lambda: self._has_room(rows), self._held_since):
            return self._reason()
        self._held_since = 0.0
        return None

    def make_room(self, published: int, tell: Callable[[str], object]) -> None:
        """Waits while there are four pieces without a number; `tell` shows that this writer is alive, and says why."""
        self._wait(lambda: self._has_room(published), tell)
        done = self._taken // self.samples_per_chunk
        if done - self._retired >= _RETIRED_AT_ONCE:
            self._retire(done)
            self._retired = done

    def finish(self, published: int) -> None:
        """This writer has ended: waits until all its full pieces have numbers; the last writer waits for the end."""
        whole = published - published % self.samples_per_chunk
        if self.uploads is not None:
            self.uploads.announce(-(-published // self.samples_per_chunk))
        self._woken.set()
        # Of two writers that end at the same time, the later one must find both ends.
        end = self.directory / WRITERS / self.name / END
        self._wait(lambda: self._taken >= whole and (self._ended or self.uploads is None or is_there(end)), str)
        if self.uploads is not None:
            self._retire(self._taken // self.samples_per_chunk)
        if self._is_last():
            self._wait(lambda: self._ended, str, for_end=True)

    def complete(self, published: int) -> None:
        """As `finish`, for a writer that has ended before, with so many rows."""
        self.begin(published, None)
        try:
            self.finish(published)
        finally:
            self.close()

    def _is_last(self) -> bool:
        """Whether all writers have ended, so that the stream ends."""
        folder, declared = self.directory / WRITERS, self._declared
        names = declared if isinstance(declared, tuple) else writer_names(self.directory)
        least = declared if isinstance(declared, int) else 1
        return bool(least) and len(names) >= least and all(is_there(folder / name / END) for name in names)

    def close(self) -> None:
        """Stops sequencing, if this process does."""
        self._stopped.set()
        self._woken.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join()

    def _has_room(self, rows: int) -> bool:
        return rows - self._taken < self._most

    def _look(self, done: Callable[[], bool], since: float, *, for_end: bool = False) -> bool:
        """Reads what is committed if it is not `done` yet; returns whether it is. Raises what ends the wait.

        `since`: the monotonic time at which the wait began.
        """
        if done():
            return True
        if self.uploads is not None:
            self.uploads.check()
        # In this order: what is committed is told before the stream ends.
        self._ended = has_ended(self.directory)
        if (found := read_committed(self.directory)) is not None:
            self._taken = max(self._taken, found.taken.get(self.name, (0, 0))[0])
            if found.stopped:
                self._woken.set()
        if done():
            return True
        # A refusal may be older than what was done about it: the sequencer tries again once a second.
        late = time.monotonic() - since >= REFUSED_S
        self._check({} if found is None or not late else found.refused, for_end=for_end)
        return False

    def _reason(self) -> str:
        """Returns what this writer waits for, with the reason of the sequencer if it waits too."""
        with contextlib.suppress(OSError, LazyShardError):
            head = read_record(self.directory / HEAD, Head.decode)
            if head.state == "waiting" and head.note:
                return f"chunks of writer {self.name!r} wait for numbers in the stream: {head.note}"
        return f"chunks of writer {self.name!r} wait for the sequencer of the stream"

    def _wait(self, done: Callable[[], bool], tell: Callable[[str], object], *, for_end: bool = False) -> None:
        pause, began = _POLL_S, time.monotonic()
        warned = told = asked = began
        reason = ""
        while not self._look(done, began, for_end=for_end):
            if (now := time.monotonic()) - told >= HEARTBEAT_S:
                told = now
                tell(self._reason())
            if now - warned >= _WARN_S:
                warned = now
                _log.warning("%s: waits for a minute or more: %s", self.directory, self._reason())
            if now - asked >= _ASK_S:
                asked, reason = now, self._reason()
            self._pause(pause, reason)
            # In an object store each look is two requests or more.
            pause = min(0.5, 2 * max(pause, 0.1)) if self._remote else min(0.05, 1.5 * pause)

    def _check(self, refused: Mapping[str, str], *, for_end: bool) -> None:
        shared, own = str(self.directory), str(self.folder)
        if self._failure is not None:
            raise WriterFailed(f"{shared}: the sequencer has failed", directory=shared) from self._failure
        if self.name in refused:
            what = f"{own}: the sequencer does not take its chunks: {refused[self.name]}"
            raise WriterFailed(what, directory=own)
        if self._ended:
            what = f"{shared}: the stream has ended without the last rows of writer {self.name!r}"
            raise StreamEnded(f"{what}; write them to another directory", directory=shared)
        if for_end and refused:
            name, why = next(iter(refused.items()))
            what = f"{shared}: the stream cannot end: chunks of writer {name!r} are not taken: {why}"
            way = "repair them, or end the stream without them by `lazyshard-producer end`"
            raise WriterFailed(f"{what}; {way}", directory=shared)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                pause = self._sequencing.step()
            except (LazyShardError, OSError) as cause:
                _log.warning("%s: cannot sequence: %s", self.directory, cause)
                pause = RETRY_S
            except Exception as cause:
                self._failure = cause
                raise
            self._woken.wait(pause)
            self._woken.clear()
        with contextlib.suppress(LazyShardError, OSError):
            while self._sequencing.sequencer is not None and self._sequencing.step() == 0.0:
                pass
        self._sequencing.close()
