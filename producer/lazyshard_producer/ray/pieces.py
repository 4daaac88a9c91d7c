"""Publishes what Ray's write tasks have written: pieces in, in the order of the tasks; chunks out.

It runs beside the tasks, so that training can start while they work: a piece is taken as soon as it and all before it
are there. A write that is started anew on a stream that was begun gives all rows again: those that are published are
recognised by their digests and passed over.

A piece holds the rows of one write task, in one file under `STREAM/.ray/WRITE/`, named after its task:

    rows                n lines of JSON, each with its newline
    ends                n × u64, little-endian: row i ends before byte ends[i]
    digests             n × u64: XXH3 of each row
    trailer             8 bytes of magic, n, and how many bytes the rows have (u64 each)

It is renamed when it is whole and on the device. A task that Ray runs again replaces what it left before.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import struct
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt, LazyShardError, StreamMismatch, WriterFailed
from lazyshard.format.batch import CheckedLines
from lazyshard.format.names import seal_name
from lazyshard.format.seal import Seal
from lazyshard.store.durable import create, rename, sync, write_all
from lazyshard.store.files import open_file, read_file
from lazyshard.stream import ChunkWriter

_MAGIC: Final = b"LSPIECE1"
_TRAILER: Final = struct.Struct("<8sQQ")
_SUFFIX: Final = ".piece"
_NAME: Final = re.compile(r"([0-9]{8,18})\.piece")


def piece_path(folder: Path, task: int) -> Path:
    """Returns where the piece of a task is."""
    return folder / f"{task:08d}{_SUFFIX}"


def list_pieces(folder: Path) -> set[int]:
    """Returns the tasks whose pieces are there. A hint: on a network filesystem it may lag by seconds."""
    names = os.listdir(folder)
    return {int(found[1]) for found in map(_NAME.fullmatch, names) if found}


def write_piece(folder: Path, task: int, batches: Iterable[Sequence[bytes]]) -> None:
    """Writes the piece of a task durably, or nothing; rows are lines with their newlines. Memory: 16 bytes a row."""
    temporary = folder / f".{task:08d}.{secrets.token_hex(8)}"
    try:
        fd = create(temporary)
    except FileNotFoundError as cause:
        directory = folder.parent.parent
        raise WriterFailed(
            f"{folder}: the driver no longer publishes, or this machine does not share {directory} with it; see the "
            f"driver's log",
            directory=str(directory),
        ) from cause
    ends, digests, length = array("Q"), array("Q"), 0
    try:
        for lines in batches:
            for line in lines:
                length += len(line)
                ends.append(length)
                digests.append(xxhash.xxh3_64_intdigest(line))
            write_all(fd, b"".join(lines))
        tables = [np.asarray(table, dtype="<u8").tobytes() for table in (ends, digests)]
        write_all(fd, b"".join(tables) + _TRAILER.pack(_MAGIC, len(ends), length))
        sync(fd)
        rename(temporary, piece_path(folder, task))
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


class PieceReader:
    """Reads a piece, as a context manager. Row i ends before byte ends[i]. Memory: 16 bytes a row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        opened = open_file(path)
        self._file = os.fdopen(os.dup(opened.fd), "rb")
        try:
            size = self._file.seek(0, os.SEEK_END)
            whole = size >= _TRAILER.size
            trailer = self._bytes(size - _TRAILER.size, _TRAILER.size) if whole else bytes(_TRAILER.size)
            magic, rows, length = _TRAILER.unpack(trailer)
            if magic != _MAGIC or size != length + 16 * rows + _TRAILER.size:
                raise self._corrupt("a whole piece", f"one of {size} bytes")
            self.ends = self._table(length, rows)
            self.digests = self._table(length + 8 * rows, rows)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PieceReader:
        """Returns the piece."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self._file.close()

    def __len__(self) -> int:
        """Rows."""
        return len(self.digests)

    def fit(self, first: int, most_rows: int, most_bytes: int) -> int:
        """Returns the end of a range of rows from `first` on that has so many rows and bytes, but at least one row."""
        limit = self._start(first) + most_bytes
        last = int(np.searchsorted(self.ends, np.uint64(limit), side="right"))
        return min(max(last, first + 1), first + most_rows, len(self))

    def read(self, first: int, last: int) -> CheckedLines:
        """Returns the rows of the half-open range [first, last), which is not empty."""
        start = self._start(first)
        data = self._bytes(start, int(self.ends[last - 1]) - start)
        ends, digests = self.ends[first:last] - np.uint64(start), self.digests[first:last]
        before, view = 0, memoryview(data)
        for row, (end, expected) in enumerate(zip(ends.tolist(), digests.tolist(), strict=True), first):
            actual = xxhash.xxh3_64_intdigest(view[before:end])
            if actual != expected:
                raise self._corrupt(f"XXH3 {expected:016x} of row {row}", f"{actual:016x}")
            before = end
        return CheckedLines(data=data, ends=ends, digests=digests)

    def _start(self, row: int) -> int:
        return int(self.ends[row - 1]) if row else 0

    def _table(self, offset: int, rows: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._bytes(offset, 8 * rows), dtype="<u8").astype(np.uint64)

    def _bytes(self, offset: int, count: int) -> bytes:
        self._file.seek(offset)
        data = self._file.read(count)
        if len(data) != count:
            raise self._corrupt(f"{count} bytes at {offset}", f"{len(data)}")
        return data

    def _corrupt(self, expected: str, actual: str) -> ChunkCorrupt:
        return ChunkCorrupt(
            f"{self._path}: expected {expected}, found {actual}: the filesystem has lost or changed what a task wrote; "
            f"run the same write again",
            file=str(self._path),
            expected=expected,
            actual=actual,
        )


KIND: Final = "ray"

POLL_S: Final = 0.5  # how often to look for new pieces: chunks take longer to fill, and a look costs one listing
MISSING_S: Final = 60.0  # how long a piece of a task that is done may stay invisible here: network filesystems
_HEARTBEAT_S: Final = 5.0
_SLICE_BYTES: Final = 4 << 20  # how much of a piece is in memory at a time


class Committer:
    """Publishes pieces on a thread of its own. It closes the writer, and removes the folder of pieces in the end."""

    def __init__(self, writer: ChunkWriter, folder: Path) -> None:
        source = writer.source
        if writer.published_chunks and not (isinstance(source, dict) and source.get("kind") == KIND):
            raise _mismatch(writer.directory, "a stream that Ray has begun", "one of another program")
        self._writer = writer
        self._folder = folder
        self._published: Final = writer.published_samples
        self._rows = 0
        self._beat_at = time.monotonic()
        self._changed = threading.Condition()
        self._tasks: list[int] | None = None
        self._stopping = False
        self._ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"publish {writer.directory}", daemon=True)

    def start(self) -> None:
        """Begins to publish."""
        self._thread.start()

    def finish(self, tasks: Iterable[int]) -> None:
        """Publishes the pieces of these tasks, all of which are done, and ends the stream."""
        with self._changed:
            self._tasks = sorted(tasks)
            self._changed.notify_all()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
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
            self.failure = error
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
                if self._rows < self._published:
                    expected = f"the {self._published} rows that are published"
                    raise _mismatch(self._writer.directory, expected, f"{self._rows} in all")
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
        path, deadline = piece_path(self._folder, task), time.monotonic() + patience_s
        while not self._stopping:
            try:
                piece = PieceReader(path)
                break
            except FileNotFoundError:
                # It has to be seen here first.
                if time.monotonic() >= deadline:
                    raise
            self._wait(lambda: self._stopping)
        else:
            return False
        self._writer.state = "running"
        with piece:
            first = self._count_published(piece.digests)
            self._rows += first
            while first < len(piece):
                last = piece.fit(first, self._writer.room, _SLICE_BYTES)
                self._rows += last - first
                self._writer.write_lines(piece.read(first, last), source=self._position())
                first = last
        os.unlink(path)
        return not self._stopping

    def _position(self) -> dict[str, Any]:
        return {"kind": KIND, "rows": self._rows}

    def _count_published(self, digests: npt.NDArray[np.uint64]) -> int:
        """Returns how many of the rows with these digests, the next ones, an earlier write has published."""
        count = max(0, min(len(digests), self._published - self._rows))
        done = 0
        while done < count:
            chunk, at = divmod(self._rows + done, self._writer.samples_per_chunk)
            part = min(count - done, self._writer.samples_per_chunk - at)
            try:
                expected = Seal.decode(read_file(self._writer.directory / seal_name(chunk)), chunk).digests
            except FileNotFoundError:
                pass  # retired since, or the writer would have refused the stream
            else:
                differ = np.flatnonzero(expected[at : at + part] != digests[done : done + part])
                if len(differ):
                    sample = self._rows + done + int(differ[0])
                    expects = f"as row {sample} the one published as sample {sample}"
                    raise _mismatch(self._writer.directory, expects, "another")
            done += part
        return count


def _mismatch(directory: Path, expected: str, actual: str) -> StreamMismatch:
    return StreamMismatch(
        f"{directory}: expected {expected}, found {actual}; give the same data set in the same order "
        f"(DataContext.get_current().execution_options.preserve_order = True), or another directory",
        directory=str(directory),
        expected=expected,
        actual=actual,
    )
