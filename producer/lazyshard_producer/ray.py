"""A sink for Ray Data: a data set, computed on a cluster, becomes a stream.

    import ray
    from lazyshard_producer.ray import LazyShardSink

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.read_parquet("prompts/").map_batches(generate, ...).write_datasink(
        LazyShardSink("/shared/stream", samples_per_chunk=1000)
    )

Ray's write tasks turn their blocks into rows, check and digest them, and write them to pieces in the stream's
directory, in parallel and on any machine that has it. A thread of the driver publishes pieces in the order of the
tasks, while others still run. Columns of tensors become nested arrays; those of Python objects, which Ray keeps
pickled, are refused.

A piece holds the rows of one write task in parts of some MiB, the last of which is empty, in one file under
`STREAM/.ray/WRITE/`, named after its task. A part:

    rows                n: u64, little-endian, as are the others
    ends                n × u64: row i ends before byte ends[i]
    digests             n × u64: XXH3 of each row
    data                n lines of JSON, each with its newline

It is renamed when it is whole and on the device. A task that Ray runs again replaces what it left before.
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

POLL_S: Final = 0.5  # how often to look for new pieces: chunks take longer to fill
MISSING_S: Final = 60.0  # how long a piece of a task that is done may stay invisible here: network filesystems
_PART_BYTES: Final = 4 << 20  # how much of a piece is in memory at a time, but for longer rows
_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "ray.data.arrow_variable_shaped_tensor")

_log = logging.getLogger("lazyshard")


class LazyShardSink(Datasink[int]):  # type: ignore[misc]
    """Writes a data set as a stream; for `ray.data.Dataset.write_datasink`.

    Every row is published exactly once, whatever tasks or workers fail and are run again. If the driver fails, write
    the same data set to the same directory again: what is published stays, and each row of it is recognised. That
    takes a data set that gives the same rows in the same order, so set `execution_options.preserve_order`; without it
    the rows come once each all the same, but in an order that Ray chooses anew, and a restart is refused.

    One sink is for one write. The driver holds the stream's lock until that is over; `close` lets go of it after an
    interrupt.

    Args:
        directory: the stream's directory, on a filesystem that the driver and all workers share.
        samples_per_chunk: rows in a chunk.
        max_row_bytes: longest row that is accepted, in bytes.

    Raises:
        ValueError: samples_per_chunk is impossible.
    """

    def __init__(
        self, directory: str | os.PathLike[str], samples_per_chunk: int, *, max_row_bytes: int = 64 << 20
    ) -> None:
        self._samples_per_chunk = check_samples_per_chunk(samples_per_chunk)
        # Workers have other current directories.
        self._directory = Path(os.path.abspath(directory))
        self._max_row_bytes = max_row_bytes
        # Where pieces come to be, within the stream's directory; readers pass over it.
        self._folder = self._directory / ".ray" / uuid.uuid4().hex
        self._committer: Committer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to the driver."""
        return vars(self) | {"_committer": None}

    def on_write_start(self, schema: Any = None) -> None:
        """Opens the stream and begins to publish. Called by Ray, on the driver."""
        if self._committer is not None:
            raise RuntimeError("a LazyShardSink is for one write: make another one")
        if not DataContext.get_current().execution_options.preserve_order:
            text = "%s: set execution_options.preserve_order = True: else a write cannot continue after the driver died"
            _log.warning(text, self._directory)
        # Of writes that have died, or are fenced from here on; what comes after this is of one that fences this one.
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
        """Writes the rows of a task's blocks. Called by Ray, on a worker."""
        task = int(ctx.task_idx)
        tables = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        write_piece(self._folder, task, _encode_tables(tables, f"task {task}", self._max_row_bytes))
        return task

    def on_write_complete(self, write_result: Any) -> None:
        """Publishes what is not published yet, and ends the stream. Called by Ray, on the driver."""
        if self._committer is None:  # not one block: Ray has not called on_write_start
            self.on_write_start()
        assert self._committer is not None
        self._committer.finish(task for task in write_result.write_returns if task is not None)

    def on_write_failed(self, error: Exception) -> None:
        """Stops publishing; what is published stays. Called by Ray, on the driver."""
        self.close()
        if self._committer is not None and self._committer.failure not in (None, error):
            raise self._committer.failure from error

    def close(self) -> None:
        """Stops publishing and lets go of the stream; does nothing after a write that has ended."""
        if self._committer is not None:
            self._committer.stop()

    def get_name(self) -> str:
        """Returns what Ray calls the tasks."""
        return "LazyShard"


def _encode_tables(tables: Iterable[Any], task: str, max_row_bytes: int) -> Iterator[bytes]:
    """Yields the rows of a task's blocks in order, lines of JSON. Raises RowInvalid with the number of the row."""

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
            # to_pylist gives these flat; nulls within them are left to numpy, which has none.
            found = [one for chunk in chunks for one in (chunk.to_numpy_ndarray() if fixed else chunk.to_pylist())]
            nested = [None if value is None else np.asarray(value).tolist() for value in found]
            table = table.set_column(index, field.name, pa.array(nested))
    return table


def piece_path(folder: Path, task: int) -> Path:
    """Returns where the piece of a task is."""
    return folder / f"{task:08d}.piece"


def write_piece(folder: Path, task: int, lines: Iterable[bytes]) -> None:
    """Writes the piece of a task durably, or nothing; rows are lines with their newlines."""
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
    """Yields the rows of a piece, part by part. Raises ChunkCorrupt: it is not as it was written."""

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
    """Publishes pieces on a thread of its own, closes the writer, and removes the folder of pieces in the end.

    Of a write that is started anew, rows that are published are recognised by their digests and passed over.
    """

    def __init__(self, writer: ChunkWriter, folder: Path) -> None:
        self._writer, self._folder = writer, folder
        source = writer.source
        if writer.published_chunks and not (isinstance(source, dict) and source.get("kind") == "ray"):
            raise self._mismatch("a stream that Ray has begun", "one of another program")
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
        """Publishes the pieces of these tasks, all of which are done, and ends the stream."""
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
        """Stops after the piece in hand, and leaves the stream to be continued. May be called twice."""
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
            # Tasks that still run find it gone, and stop.
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()

    def _publish_all(self) -> bool:
        """Publishes pieces until the last one (True), or until it is to stop (False)."""
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
                    # Its task is done, but it has to be seen here first.
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
        """Returns how many of the rows with these digests, the next ones, an earlier write has published."""
        count = max(0, min(len(digests), self._published - self._rows))
        done = 0
        while done < count:
            chunk, at = divmod(self._rows + done, self._writer.samples_per_chunk)
            part = min(count - done, self._writer.samples_per_chunk - at)
            # One that is retired since is passed over: the writer would have refused the stream otherwise.
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
