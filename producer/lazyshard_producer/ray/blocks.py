"""Blocks of Ray Data as lines of JSON.

As `arrow_values` has it, and columns of tensors as nested arrays. Columns of Python objects, which Ray keeps pickled,
are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from lazyshard.errors import RowInvalid
from lazyshard_producer.sources.arrow_library import load_pyarrow
from lazyshard_producer.sources.arrow_rows import RowEncoder
from lazyshard_producer.sources.tables import PIECE_ROWS

_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "ray.data.arrow_variable_shaped_tensor")
_FIXED_SHAPE_TENSOR: Final = "arrow.fixed_shape_tensor"
_PICKLED: Final = "ray.data.arrow_pickled_object"


def encode_tables(tables: Iterable[Any], task: str, max_row_bytes: int) -> Iterator[list[bytes]]:
    """Yields the rows of a task's blocks in order, each a line of JSON with its newline, some hundred at a time.

    Args:
        tables: the blocks, each a `pyarrow.Table`.
        task: what to call the task in messages.
        max_row_bytes: longest row, in bytes without its newline.

    Raises:
        RowInvalid: a row cannot be written as JSON, with its number in the task and the column.
    """
    pa = load_pyarrow(task)
    load_pyarrow(task, "pyarrow.compute")
    row = 0
    for table in tables:
        if not table.num_rows:
            continue
        try:
            plain = _without_tensors(pa, table)
            encoder = RowEncoder(pa, plain.schema, max_row_bytes)
        except ValueError as cause:
            raise _refuse(str(cause), task, row + 1) from cause
        for batch in plain.to_batches(max_chunksize=PIECE_ROWS):
            lines: list[bytes] = []
            for line in encoder.encode(batch):
                row += 1
                if isinstance(line, RowInvalid):
                    raise _refuse(line.reason or str(line), task, row)
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


def _refuse(reason: str, task: str, row: int) -> RowInvalid:
    return RowInvalid(
        f"{task}, row {row}: {reason}; mend it in the data set (map, filter, drop_columns), and write it again",
        reason=reason,
        file=task,
        line=row,
    )
