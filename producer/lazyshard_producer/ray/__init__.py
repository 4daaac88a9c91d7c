"""A sink for Ray Data: a data set, computed on a cluster, becomes a stream.

    import ray
    from lazyshard_producer.ray import LazyShardSink

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.read_parquet("prompts/").map_batches(generate, ...).write_datasink(
        LazyShardSink("/shared/stream", samples_per_chunk=1000)
    )

Ray's write tasks turn their blocks into rows, check and digest them, and write them to files of their own in the
stream's directory, in parallel and on any machine that has it. The driver publishes them in the order of the tasks,
while others still run, and ends the stream when the last one is in it: see `pieces`. Columns of tensors become nested
arrays; those of Python objects, which Ray keeps pickled, are refused.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard.errors import RowInvalid
from lazyshard.format.records import check_samples_per_chunk
from lazyshard.store.files import check_folder
from lazyshard.stream import ChunkWriter
from lazyshard_producer.configuration.quantities import MAX_ROW_BYTES
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.ray.pieces import Committer, write_piece
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder, load_pyarrow
from lazyshard_producer.sources.source import PIECE_ROWS

try:
    from ray.data import DataContext, Datasink
    from ray.data.block import BlockAccessor
except ImportError as cause:
    raise ExtraMissing(
        "lazyshard_producer.ray needs Ray Data, which cannot be imported: pip install 'lazyshard[ray]'",
        package="ray",
        extra="ray",
    ) from cause

FOLDER: Final = ".ray"  # where pieces come to be, within the stream's directory; readers pass over it
_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "ray.data.arrow_variable_shaped_tensor")
_FIXED_SHAPE_TENSOR: Final = "arrow.fixed_shape_tensor"
_PICKLED: Final = "ray.data.arrow_pickled_object"

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
        self, directory: str | os.PathLike[str], samples_per_chunk: int, *, max_row_bytes: int = MAX_ROW_BYTES
    ) -> None:
        check_samples_per_chunk(samples_per_chunk)
        # Workers have other current directories.
        self._directory = Path(os.path.abspath(directory))
        self._samples_per_chunk = samples_per_chunk
        self._max_row_bytes = max_row_bytes
        self._folder = self._directory / FOLDER / uuid.uuid4().hex
        self._committer: Committer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to the driver."""
        return vars(self) | {"_committer": None}

    def on_write_start(self, schema: Any = None) -> None:
        """Opens the stream and begins to publish. Called by Ray, on the driver."""
        if self._committer is not None:
            raise RuntimeError("a LazyShardSink is for one write: make another one")
        if not DataContext.get_current().execution_options.preserve_order:
            _log.warning(
                "%s: Ray may hand out the blocks in another order each time, so this write can be completed but not "
                "gone on with if the driver dies; set execution_options.preserve_order = True to have both",
                self._directory,
            )
        # Of writes that have died, or are fenced from here on; what comes after this is of one that fences this one.
        try:
            left = list(check_folder(self._folder.parent).iterdir())
        except FileNotFoundError:
            left = []
        writer = ChunkWriter(self._directory, self._samples_per_chunk)
        try:
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            check_folder(self._folder.parent)
            self._folder.mkdir(parents=True)
            self._committer = Committer(writer, self._folder)
            self._committer.start()
        except BaseException:
            writer.close(end=False, state="failed")
            raise

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        """Writes the rows of a task's blocks. Called by Ray, on a worker."""
        task = int(ctx.task_idx)
        tables = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        write_piece(self._folder, task, encode_tables(tables, f"task {task}", self._max_row_bytes))
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
        failure = self._committer.failure if self._committer is not None else None
        if failure is not None and failure is not error:
            raise failure from error

    def close(self) -> None:
        """Stops publishing and lets go of the stream; does nothing after a write that has ended."""
        if self._committer is not None:
            self._committer.stop()

    def get_name(self) -> str:
        """Returns what Ray calls the tasks."""
        return "LazyShard"


def encode_tables(tables: Iterable[Any], task: str, max_row_bytes: int) -> Iterator[list[bytes]]:
    """Yields the rows of a task's blocks in order, each a line of JSON with its newline, some hundred at a time.

    Raises:
        RowInvalid: a row cannot be written as JSON, with its number in the task and the column.
    """

    def refuse(reason: str, row: int) -> RowInvalid:
        advice = "mend it in the data set (map, filter, drop_columns), and write it again"
        return RowInvalid(f"{task}, row {row}: {reason}; {advice}", reason=reason, file=task, line=row)

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
            lines: list[bytes] = []
            for line in encoder.encode(batch):
                row += 1
                if isinstance(line, RowInvalid):
                    raise refuse(line.reason or str(line), row)
                lines.append(line)
            yield lines


def _without_tensors(pa: Any, table: Any) -> Any:
    for index, field in enumerate(table.schema):
        name = getattr(field.type, "extension_name", "")
        if name == _PICKLED:
            raise ValueError(f"column {field.name!r}: Python objects, which JSON does not have")
        if name in _TENSORS or name == _FIXED_SHAPE_TENSOR:
            values = [value for chunk in table.column(index).chunks for value in _nested(name, chunk)]
            table = table.set_column(index, field.name, pa.array(values))
    return table


def _nested(name: str, chunk: Any) -> list[Any]:
    # to_pylist gives these flat; nulls within them are left to numpy, which has none.
    values = chunk.to_numpy_ndarray() if name == _FIXED_SHAPE_TENSOR else chunk.to_pylist()
    return [None if value is None else np.asarray(value).tolist() for value in values]
