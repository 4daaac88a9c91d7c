"""The one that publishes what Ray's write tasks have written: pieces in, in the order of the tasks; chunks out.

It runs beside the tasks, so that training can start while they work: a piece is taken as soon as it and all before it
are there. When the write is complete, the list of its tasks is final, and the stream ends after the last of them.

A write that is started anew on a stream that was begun (its driver died) gives all rows again. Those that are published
are recognised by their digests, one by one, and passed over: rows in another order, or other rows, are refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard.errors import LazyShardError, StreamMismatch, WriterFailed
from lazyshard.format import Seal
from lazyshard.format.names import seal_name
from lazyshard.store.files import read_file
from lazyshard.stream import ChunkWriter
from lazyshard_producer.ray.pieces import PieceReader, list_pieces, piece_path

KIND: Final = "ray"

POLL_S: Final = 0.5
"""How often to look for new pieces: chunks take longer than that to fill, and a look costs one listing."""

MISSING_S: Final = 60.0
"""How long a piece may stay invisible here after its task is done: network filesystems take that long at worst."""

_HEARTBEAT_S: Final = 5.0
_SLICE_BYTES: Final = 4 << 20
"""How much of a piece is in memory at a time."""


class Committer:
    """Publishes pieces on a thread of its own.

    Args:
        writer: the stream, open; the committer closes it.
        folder: where the pieces come to be; the committer removes it in the end.

    Raises:
        StreamMismatch: the stream was begun by another program.
    """

    def __init__(self, writer: ChunkWriter, folder: Path) -> None:
        source = writer.source
        if writer.published_chunks and not (isinstance(source, dict) and source.get("kind") == KIND):
            raise _mismatch(writer.directory, "a stream that Ray has begun", "one of another program")
        self._writer = writer
        self._folder = folder
        self._published: Final = _PublishedRows(writer.directory, writer.published_samples, writer.samples_per_chunk)
        self._rows = 0
        self._beat_at = time.monotonic()
        self._changed = threading.Condition()
        self._tasks: list[int] | None = None
        self._stopping = False
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"publish {writer.directory}", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What has ended it before its time."""
        return self._failure

    def start(self) -> None:
        """Begins to publish."""
        self._thread.start()

    def finish(self, tasks: Iterable[int]) -> None:
        """Publishes the pieces of these tasks, all of which are done, and ends the stream.

        Raises:
            StreamMismatch: the rows are not those that an earlier write has published.
            WriterFailed: it was stopped before that.
            LazyShardError, OSError: as `ChunkWriter` and `PieceReader` raise them.
        """
        with self._changed:
            self._tasks = sorted(tasks)
            self._changed.notify_all()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        if not self._ended:
            directory = self._writer.directory
            raise WriterFailed(
                f"{directory}: stopped before the last row; write the same data set again to go on",
                directory=str(directory),
                published_samples=self._writer.published_samples,
            )

    def stop(self) -> None:
        """Stops after the piece in hand, and leaves the stream to be gone on with. May be called twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._publish_all():
                self._writer.close(end=True, source=self._position())
                self._ended = True
            else:
                self._writer.close(end=False, state="failed")
        except BaseException as error:
            self._failure = error
            with contextlib.suppress(LazyShardError, OSError):
                self._writer.close(end=False, state="failed")
        finally:
            # Tasks that still run find it gone, and stop.
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()

    def _publish_all(self) -> bool:
        """Publishes pieces until the last one (True), or until it is to stop (False)."""
        next_task = 0
        there: set[int] = set()
        while True:
            with self._changed:
                tasks = self._tasks
                if self._stopping:
                    return False
            if tasks is not None:
                for task in tasks[bisect_left(tasks, next_task) :]:
                    if not self._publish(task, MISSING_S):
                        return False
                self._check_all_came_again()
                return True
            if next_task not in there:
                there = list_pieces(self._folder)
            if next_task in there:
                self._publish(next_task, 0.0)
                next_task += 1
            else:
                self._wait(lambda: self._stopping or self._tasks is not None)

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(until, POLL_S)
        now = time.monotonic()
        if now - self._beat_at > _HEARTBEAT_S:
            self._beat_at = now
            self._writer.heartbeat("waiting", "rows of Ray's write tasks")

    def _publish(self, task: int, patience_s: float) -> bool:
        """Takes a piece; returns whether to go on."""
        path = piece_path(self._folder, task)
        piece = self._open(path, patience_s)
        if piece is None:
            return False
        self._writer.state = "running"
        with piece:
            first = self._published.check(self._rows, piece.digests)
            self._rows += first
            while first < len(piece):
                last = piece.fit(first, self._writer.room, _SLICE_BYTES)
                self._rows += last - first
                self._writer.write_lines(piece.read(first, last), source=self._position())
                first = last
        os.unlink(path)
        return not self._stopping

    def _open(self, path: Path, patience_s: float) -> PieceReader | None:
        """Opens a piece, waiting for it to be seen here; None if it is to stop."""
        deadline = time.monotonic() + patience_s
        while not self._stopping:
            try:
                return PieceReader(path)
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise
            self._wait(lambda: self._stopping)
        return None

    def _position(self) -> dict[str, Any]:
        return {"kind": KIND, "rows": self._rows}

    def _check_all_came_again(self) -> None:
        if self._rows < self._published.samples:
            expected = f"the {self._published.samples} rows that are published"
            raise _mismatch(self._writer.directory, expected, f"{self._rows} in all")


class _PublishedRows:
    """The rows that an earlier write has published: samples [0, samples) of the stream."""

    def __init__(self, directory: Path, samples: int, samples_per_chunk: int) -> None:
        self.samples: Final = samples
        self._directory = directory
        self._per_chunk = samples_per_chunk

    def check(self, row: int, digests: Any) -> int:
        """Returns how many of the rows with these digests, the first of which is number `row`, are published.

        Raises:
            StreamMismatch: one of them is not the sample that is published in its place.
        """
        count = max(0, min(len(digests), self.samples - row))
        done = 0
        while done < count:
            chunk, at = divmod(row + done, self._per_chunk)
            part = min(count - done, self._per_chunk - at)
            expected = self._digests(chunk)
            if expected is not None:
                differ = np.flatnonzero(expected[at : at + part] != digests[done : done + part])
                if len(differ):
                    sample = row + done + int(differ[0])
                    raise _mismatch(self._directory, f"as row {sample} the one published as sample {sample}", "another")
            done += part
        return count

    def _digests(self, chunk: int) -> Any:
        path = self._directory / seal_name(chunk)
        try:
            return Seal.decode(read_file(path), chunk).digests
        except FileNotFoundError:
            return None  # retired since, or the writer would have refused the stream


def _mismatch(directory: Path, expected: str, actual: str) -> StreamMismatch:
    return StreamMismatch(
        f"{directory}: expected {expected}, found {actual}; give the same data set in the same order "
        f"(DataContext.get_current().execution_options.preserve_order = True), or another directory",
        directory=str(directory),
        expected=expected,
        actual=actual,
    )
