"""A sink for Ray Data that writes a data set computed on a cluster as a stream.

    import ray
    from lazyshard_producer.ray import LazyShardSink

    sink = LazyShardSink("/shared/stream", samples_per_chunk=1000, key="id")
    prompts = sink.remaining(ray.data.read_parquet("prompts/"))
    prompts.map_batches(generate, ...).write_datasink(sink)

Ray's write tasks convert their blocks to rows and write them as chunks with seals, in parallel and on any machine that
can access the stream's directory. A thread of the driver gives these chunks their numbers in the stream, while other
tasks still run: it links the files of whole chunks, and copies only rows that are left over. Columns of tensors become
nested arrays; columns of Python objects, which Ray pickles, are refused. See `lazyshard_producer.ray_pieces`.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard.errors import RowInvalid
from lazyshard.format.records import check_samples_per_chunk
from lazyshard.format.writers import WRITERS, check_writer_name
from lazyshard.stream import ChunkWriter
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.ray_pieces import Committer, durable_keys, write_piece
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder, load_pyarrow
from lazyshard_producer.sources.source import PIECE_ROWS

try:
    from ray.data import DataContext, Dataset, Datasink
    from ray.data.block import BlockAccessor
except ImportError as cause:
    needs = "lazyshard_producer.ray needs Ray Data, which cannot be imported: pip install 'lazyshard[ray]'"
    raise ExtraMissing(needs, package="ray", extra="ray") from cause

_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "ray.data.arrow_variable_shaped_tensor")

_log = logging.getLogger("lazyshard")


class LazyShardSink(Datasink[int]):  # type: ignore[misc]
    """Writes a data set as a stream; for `ray.data.Dataset.write_datasink`.

    Every row is published exactly once, even if tasks or workers fail and are retried. If the driver fails, write the
    same data set to the same directory again:

    - With `key`, rows that are durable are not written again, and not computed again after `remaining`.
    - Without it, all rows are computed again, and the published ones are recognised. This requires a data set with the
      same rows in the same order, so set `execution_options.preserve_order`; otherwise a restart is refused.

    With `preserve_order` and without `key` the stream has the rows in the order of the data set. Otherwise the rows of
    a chunk of a block stay together, and chunks come as tasks finish.

    Use a sink for one write only. The driver holds the lock of the stream, or of its writer, until the write is over;
    after an interrupt, `close` releases it.

    Args:
        directory: the stream's directory, on a filesystem shared by the driver and all workers.
        samples_per_chunk: rows per chunk.
        max_row_bytes: longest accepted row, in bytes.
        key: a column of strings or integers, different in every row, which each row keeps on its way to the sink.
        writer: name of this write if several data sets are written to the stream, as in `ChunkWriter`; needs `key`.
        writers: how many writers the stream has, or their names, as in `ChunkWriter`.

    Raises:
        ValueError: samples_per_chunk or writer is invalid, or writer is given without key.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        samples_per_chunk: int,
        *,
        max_row_bytes: int = 64 << 20,
        key: str | None = None,
        writer: str | None = None,
        writers: int | Iterable[str] | None = None,
    ) -> None:
        self._samples_per_chunk = check_samples_per_chunk(samples_per_chunk)
        # Workers have other working directories.
        self._directory = Path(os.path.abspath(directory))
        self._max_row_bytes, self._key = max_row_bytes, key
        self._names: dict[str, Any] = {"writer": writer, "writers": writers}
        own = self._directory
        if writer is not None:
            own = own / WRITERS / check_writer_name(writer)
            if key is None:
                raise ValueError(f"{directory}: writer={writer!r} needs key=COLUMN, to continue after a failure")
        self._folder = own / ".ray" / secrets.token_hex(6)
        self._committer: Committer | None = None
        self._started = False

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the committer, which belongs to the driver."""
        return vars(self) | {"_committer": None}

    def remaining(self, dataset: Dataset) -> Dataset:
        """Returns the rows of a data set whose keys are not durable yet; call it before the expensive steps.

        Opens the stream. Raises as `ChunkWriter`, and ValueError: the sink has no key.
        """
        if self._key is None:
            raise ValueError(f"{self._directory}: remaining() needs a sink with key=COLUMN")
        self._open()
        if not durable_keys(self._folder):
            return dataset
        options = {"folder": self._folder, "key": self._key}
        return dataset.map_batches(_drop_durable, batch_size=None, batch_format="pyarrow", fn_kwargs=options)

    def on_write_start(self, schema: Any = None) -> None:
        """Opens the stream and starts to publish. Called by Ray on the driver."""
        if self._started:
            raise RuntimeError("a LazyShardSink can be used for one write only: make another one")
        self._started = True
        self._open()

    def _open(self) -> Committer:
        if self._committer is None:
            ordered = bool(DataContext.get_current().execution_options.preserve_order)
            if self._key is None and not ordered:
                text = "%s: set execution_options.preserve_order = True, or the write cannot continue; or give a key"
                _log.warning(text, self._directory)
            writer = ChunkWriter(self._directory, self._samples_per_chunk, **self._names)
            try:
                self._committer = Committer(writer, self._folder, ordered=ordered and self._key is None, key=self._key)
            except BaseException:
                writer.close(end=False, state="failed")
                raise
        return self._committer

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        """Writes the rows of a task's blocks. Called by Ray on a worker."""
        task = int(ctx.task_idx)
        tables: Iterable[Any] = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        keys = list[Any]()
        write_piece(self._folder, task, self._encode(tables, f"task {task}", keys), self._samples_per_chunk, keys)
        return task

    def _encode(self, tables: Iterable[Any], task: str, keys: list[Any]) -> Iterator[bytes]:
        """Yields the rows of a task's blocks in order, as lines of JSON; with a key those that are not durable yet.

        Adds the keys of these to the list. Raises RowInvalid with the number of the row.
        """

        def refuse(reason: str, row: int) -> RowInvalid:
            text = f"{task}, row {row}: {reason}; fix it in the data set, and write it again"
            return RowInvalid(text, reason=reason, file=task, line=row)

        pa = load_pyarrow(task)
        row = 0
        for table in tables:
            if not table.num_rows:
                continue
            if self._key is not None:
                table = _drop_durable(table, self._folder, self._key)
                keys += table.column(self._key).to_pylist()
            try:
                plain = _without_tensors(pa, table)
                encoder = ArrowRowEncoder(pa, plain.schema, self._max_row_bytes)
            except ValueError as cause:
                raise refuse(str(cause), row + 1) from cause
            for batch in plain.to_batches(max_chunksize=PIECE_ROWS):
                for line in encoder.encode(batch):
                    row += 1
                    if isinstance(line, RowInvalid):
                        raise refuse(line.reason or str(line), row)
                    yield line

    def on_write_complete(self, write_result: Any) -> None:
        """Publishes the remaining rows and ends the stream. Called by Ray on the driver."""
        # Without any block, Ray does not call on_write_start.
        self._open().finish(task for task in write_result.write_returns if task is not None)

    def on_write_failed(self, error: Exception) -> None:
        """Stops publishing; published chunks stay. Called by Ray on the driver."""
        self.close()
        if self._committer is not None and self._committer.failure not in (None, error):
            raise self._committer.failure from error

    def close(self) -> None:
        """Stops publishing and releases the stream; does nothing if the write has ended."""
        if self._committer is not None:
            self._committer.stop()


def _drop_durable(table: Any, folder: Path, key: str) -> Any:
    if key not in table.column_names:
        raise ValueError(f"the data set has no column {key!r}, which is the key of the sink")
    values, durable = table.column(key).to_pylist(), durable_keys(folder)
    for value in values:
        if type(value) not in (int, str):
            raise ValueError(f"the key {key!r} of a row is a string or an integer, got {value!r}")
    return table.filter([value not in durable for value in values]) if durable else table


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
