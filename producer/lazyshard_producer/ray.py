"""A sink for Ray Data that writes a data set computed on a cluster as a stream.

    import ray
    from lazyshard_producer.ray import LazyShardSink

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.read_parquet("prompts/").map_batches(generate, ...).write_datasink(
        LazyShardSink("/shared/stream", samples_per_chunk=1000)
    )

Ray's write tasks convert their blocks to rows, digest them, and write them to pieces in the stream's directory, in
parallel and on any machine that can access it. A thread of the driver publishes pieces in the order of the tasks, while
other tasks still run. Columns of tensors become nested arrays; columns of Python objects, which Ray pickles, are
refused.

A piece is one file under `STREAM/.ray/WRITE/`, named after its write task, with the rows of the task in parts of some
MiB, the last of which is empty. A part:

    rows                n: u64, all numbers are little-endian
    ends                n × u64: row i ends before byte ends[i]
    digests             n × u64: XXH3 of each row
    data                n lines of JSON, each with its newline

A piece gets its name when it is complete and durable. A task that Ray retries replaces its earlier piece.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt, LazyShardError, RowInvalid, StreamMismatch, WriterFailed
from lazyshard.format.batch import CheckedLines
from lazyshard.format.records import check_samples_per_chunk
from lazyshard.store.durable import create, rename, sync, write_all
from lazyshard.store.files import OpenFile, check_folder, open_file, read_seal
from lazyshard.stream import ChunkWriter
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder, load_pyarrow
from lazyshard_producer.sources.source import PIECE_ROWS

try:
    from ray.data import DataContext, Datasink
    from ray.data.block import BlockAccessor
except ImportError as cause:
    needs = "lazyshard_producer.ray needs Ray Data, which cannot be imported: pip install 'lazyshard[ray]'"
    raise ExtraMissing(needs, package="ray", extra="ray") from cause

POLL_S: Final = 0.5  # interval between polls for new pieces: chunks take longer to fill
MISSING_S: Final = 60.0  # how long a finished task's piece may stay invisible on a network filesystem
_PART_BYTES: Final = 4 << 20  # bytes of a piece in memory at a time, except for longer rows
_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "ray.data.arrow_variable_shaped_tensor")

_log = logging.getLogger("lazyshard")


class LazyShardSink(Datasink[int]):  # type: ignore[misc]
    """Writes a data set as a stream; for `ray.data.Dataset.write_datasink`.

    Every row is published exactly once, even if tasks or workers fail and are retried. If the driver fails, write the
    same data set to the same directory again: published rows stay and are recognised. This requires a data set with the
    same rows in the same order, so set `execution_options.preserve_order`. Without it, each row is still published
    once, but Ray chooses a new order in every run, and a restart is refused.

    Use a sink for one write only. The driver holds the stream's lock until the write is over; after an interrupt,
    `close` releases it.

    Args:
        directory: the stream's directory, on a filesystem shared by the driver and all workers.
        samples_per_chunk: rows per chunk.
        max_row_bytes: longest accepted row, in bytes.

    Raises:
        ValueError: samples_per_chunk is invalid.
    """

    def __init__(
        self, directory: str | os.PathLike[str], samples_per_chunk: int, *, max_row_bytes: int = 64 << 20
    ) -> None:
        self._samples_per_chunk = check_samples_per_chunk(samples_per_chunk)
        # Workers have other working directories.
        self._directory = Path(os.path.abspath(directory))
        self._max_row_bytes = max_row_bytes
        # The directory for pieces, within the stream's directory; readers ignore it.
        self._folder = self._directory / ".ray" / uuid.uuid4().hex
        self._committer: Committer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the committer, which belongs to the driver."""
        return vars(self) | {"_committer": None}

    def on_write_start(self, schema: Any = None) -> None:
        """Opens the stream and starts to publish. Called by Ray on the driver."""
        if self._committer is not None:
            raise RuntimeError("a LazyShardSink can be used for one write only: make another one")
        if not DataContext.get_current().execution_options.preserve_order:
            text = "%s: set execution_options.preserve_order = True, or the write cannot continue if the driver dies"
            _log.warning(text, self._directory)
        # These belong to writes that have died or are fenced by this one; later ones belong to writes that fence it.
        left = list(check_folder(self._folder.parent).iterdir()) if self._folder.parent.exists() else []
        writer = ChunkWriter(self._directory, self._samples_per_chunk)
        try:
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            check_folder(self._folder.parent)
            self._folder.mkdir(parents=True)
            self._committer = Committer(writer, self._folder)
        except BaseException:
            writer.close(end=False, state="failed")
            raise

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        """Writes the rows of a task's blocks. Called by Ray on a worker."""
        task = int(ctx.task_idx)
        tables = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        write_piece(self._folder, task, _encode_tables(tables, f"task {task}", self._max_row_bytes))
        return task

    def on_write_complete(self, write_result: Any) -> None:
        """Publishes the remaining rows and ends the stream. Called by Ray on the driver."""
        if self._committer is None:  # without any block, Ray does not call on_write_start
            self.on_write_start()
        assert self._committer is not None
        self._committer.finish(task for task in write_result.write_returns if task is not None)

    def on_write_failed(self, error: Exception) -> None:
        """Stops publishing; published chunks stay. Called by Ray on the driver."""
        self.close()
        if self._committer is not None and self._committer.failure not in (None, error):
            raise self._committer.failure from error

    def close(self) -> None:
        """Stops publishing and releases the stream; does nothing if the write has ended."""
        if self._committer is not None:
            self._committer.stop()

    def get_name(self) -> str:
        """Returns the name of the tasks in Ray."""
        return "LazyShard"


def _encode_tables(tables: Iterable[Any], task: str, max_row_bytes: int) -> Iterator[bytes]:
    """Yields the rows of a task's blocks in order, as lines of JSON. Raises RowInvalid with the number of the row."""

    def refuse(reason: str, row: int) -> RowInvalid:
        text = f"{task}, row {row}: {reason}; fix it in the data set, and write it again"
        return RowInvalid(text, reason=reason, file=task, line=row)

    pa = load_pyarrow(task)
    load_pyarrow(task, "pyarrow.compute")
    row = 0
    for table in tables:
        if not table.num_rows:
            continue
        try:
            plain = _without_tensors(pa, table)
            encoder = ArrowRowEncoder(pa, plain.schema, max_row_bytes)
        except ValueError as cause:
            raise refuse(str(cause), row + 1) from cause
        for batch in plain.to_batches(max_chunksize=PIECE_ROWS):
            for line in encoder.encode(batch):
                row += 1
                if isinstance(line, RowInvalid):
                    raise refuse(line.reason or str(line), row)
                yield line


def _without_tensors(pa: Any, table: Any) -> Any:
    for index, field in enumerate(table.schema):
        name = getattr(field.type, "extension_name", "")
        if name == "ray.data.arrow_pickled_object":
            raise ValueError(f"column {field.name!r}: Python objects, which JSON does not have")
        if (fixed := name == "arrow.fixed_shape_tensor") or name in _TENSORS:
            chunks = table.column(index).chunks
            # to_pylist would flatten these; numpy converts nulls within them, since it has none.
            found = [one for chunk in chunks for one in (chunk.to_numpy_ndarray() if fixed else chunk.to_pylist())]
            nested = [None if value is None else np.asarray(value).tolist() for value in found]
            table = table.set_column(index, field.name, pa.array(nested))
    return table


def piece_path(folder: Path, task: int) -> Path:
    """Returns the path of a task's piece."""
    return folder / f"{task:08d}.piece"


def write_piece(folder: Path, task: int, lines: Iterable[bytes]) -> None:
    """Writes the piece of a task durably and atomically; rows are lines with their newlines. Raises WriterFailed."""
    temporary, directory = folder / f".{task:08d}.{secrets.token_hex(8)}", str(folder.parent.parent)
    try:
        fd = create(temporary)
    except FileNotFoundError as cause:
        why = f"the driver no longer publishes, or does not share {directory} with this machine; see its log"
        raise WriterFailed(f"{folder}: {why}", directory=directory) from cause
    try:
        part: list[bytes] = []
        size = 0
        for line in lines:
            if part and size + len(line) > _PART_BYTES:
                write_all(fd, _part(part))
                part, size = [], 0
            part.append(line)
            size += len(line)
        write_all(fd, (_part(part) if part else b"") + _part([]))
        sync(fd)
        rename(temporary, piece_path(folder, task))
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def _part(lines: list[bytes]) -> bytes:
    ends, digests = np.cumsum([len(line) for line in lines]), list(map(xxhash.xxh3_64_intdigest, lines))
    return b"".join([*(np.array(table, "<u8").tobytes() for table in (len(lines), ends, digests)), *lines])


def read_piece(file: OpenFile) -> Iterator[CheckedLines]:
    """Yields the rows of a piece, part by part. Raises ChunkCorrupt if the piece differs from what was written."""

    def corrupt(expected: str, actual: str) -> ChunkCorrupt:
        text = f"{file.path}: expected {expected}, found {actual}: lost or changed since; run the same write again"
        return ChunkCorrupt(text, file=str(file.path), expected=expected, actual=actual)

    at = row = 0

    def take(size: int) -> bytes:
        nonlocal at
        data = file.read(at, size) if at + size <= file.size else b""
        if len(data) != size:
            raise corrupt(f"{size} bytes at {at}", f"a piece of {file.size} bytes")
        at += size
        return data

    while rows := int.from_bytes(take(8), "little"):
        ends, digests = np.frombuffer(take(16 * rows), "<u8").astype(np.uint64).reshape(2, rows)
        data = take(int(ends[-1]))
        bounds, view = pairwise([0, *ends.tolist()]), memoryview(data)
        actual = np.array([xxhash.xxh3_64_intdigest(view[start:end]) for start, end in bounds], np.uint64)
        for at_row in np.flatnonzero(actual != digests):
            raise corrupt(f"XXH3 {digests[at_row]:016x} of row {row + at_row}", f"{actual[at_row]:016x}")
        row += rows
        yield CheckedLines(data, ends, digests)


class Committer:
    """Publishes pieces in a separate thread, closes the writer, and finally removes the folder of pieces.

    When a write is restarted, published rows are recognised by their digests and skipped.
    """

    def __init__(self, writer: ChunkWriter, folder: Path) -> None:
        self._writer, self._folder = writer, folder
        source = writer.source
        if writer.published_chunks and not (isinstance(source, dict) and source.get("kind") == "ray"):
            raise self._mismatch("a stream begun by Ray", "one of another program")
        self._published: Final = writer.published_samples
        self._rows = 0
        self._beat_at = time.monotonic()
        self._news = threading.Event()
        self._tasks: list[int] | None = None
        self._stopping = self._ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"publish {writer.directory}", daemon=True)
        self._thread.start()

    def finish(self, tasks: Iterable[int]) -> None:
        """Publishes the pieces of these tasks, which are all done, and ends the stream."""
        self._tasks = sorted(tasks)
        self._news.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        if not self._ended:
            directory, published = str(self._writer.directory), self._writer.published_samples
            why = f"{directory}: stopped before the last row; write the same data set again to continue"
            raise WriterFailed(why, directory=directory, published_samples=published)

    def stop(self) -> None:
        """Stops after the current piece, so that the stream can be continued later. May be called twice."""
        self._stopping = True
        self._news.set()
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
            # Tasks that still run find the folder gone, and stop.
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()

    def _publish_all(self) -> bool:
        """Publishes pieces until the last one (returns True), or until `stop` is called (returns False)."""
        task, missing_since = 0, None
        while not self._stopping:
            if (tasks := self._tasks) is not None:
                at = bisect_left(tasks, task)
                if at == len(tasks):
                    break
                task = tasks[at]
            try:
                piece = open_file(piece_path(self._folder, task))
            except FileNotFoundError:
                if tasks is not None:
                    # The task is done, but its piece may not be visible on this machine yet.
                    missing_since = missing_since or time.monotonic()
                    if time.monotonic() - missing_since >= MISSING_S:
                        raise
                self._wait()
            else:
                self._publish(piece)
                task, missing_since = task + 1, None
        if self._rows < self._published and not self._stopping:
            raise self._mismatch(f"the {self._published} rows that are published", f"{self._rows} in all")
        return not self._stopping

    def _wait(self) -> None:
        self._news.wait(POLL_S)
        self._news.clear()
        now = time.monotonic()
        if now - self._beat_at > 5.0:
            self._beat_at = now
            self._writer.heartbeat("waiting", "rows of Ray's write tasks")

    def _publish(self, piece: OpenFile) -> None:
        self._writer.state = "running"
        for part in read_piece(piece):
            first = self._count_published(part.digests)
            self._rows += first
            while first < len(part):
                last = min(len(part), first + self._writer.room)
                self._rows += last - first
                start, end = (int(part.ends[row - 1]) if row else 0 for row in (first, last))
                ends = part.ends[first:last] - np.uint64(start)
                rows = CheckedLines(part.data[start:end], ends, part.digests[first:last])
                self._writer.write_lines(rows, source=self._position())
                first = last
        os.unlink(piece.path)

    def _position(self) -> dict[str, Any]:
        return {"kind": "ray", "rows": self._rows}

    def _count_published(self, digests: npt.NDArray[np.uint64]) -> int:
        """Returns how many of the next rows, which have these digests, an earlier write has published."""
        count = max(0, min(len(digests), self._published - self._rows))
        done = 0
        while done < count:
            chunk, at = divmod(self._rows + done, self._writer.samples_per_chunk)
            part = min(count - done, self._writer.samples_per_chunk - at)
            # A retired chunk is skipped: for any other missing chunk the writer would have refused the stream.
            with contextlib.suppress(FileNotFoundError):
                expected = read_seal(self._writer.directory, chunk).digests
                differ = np.flatnonzero(expected[at : at + part] != digests[done : done + part])
                if len(differ):
                    sample = self._rows + done + int(differ[0])
                    raise self._mismatch(f"as row {sample} the one published as sample {sample}", "another")
            done += part
        return count

    def _mismatch(self, expected: str, actual: str) -> StreamMismatch:
        directory, again = str(self._writer.directory), "(execution_options.preserve_order), or another directory"
        text = f"{directory}: expected {expected}, found {actual}; give the same data set in the same order {again}"
        return StreamMismatch(text, directory=directory, expected=expected, actual=actual)
