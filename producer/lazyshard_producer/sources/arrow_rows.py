"""Batches of Arrow as lines of JSON: a row is an object by the names of the columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lazyshard.errors import RowInvalid
from lazyshard.format.row import encode_row
from lazyshard_producer.sources.arrow_values import Unwritable, choose_reader


class RowEncoder:
    """Writes the rows of batches of one schema.

    Args:
        pa: the module pyarrow, with its module compute loaded.
        schema: the columns.
        max_row_bytes: longest row, in bytes without its newline.

    Raises:
        ValueError: two columns, or two fields of a struct, have one name.
    """

    def __init__(self, pa: Any, schema: Any, max_row_bytes: int) -> None:
        _check_names(pa, "columns", schema)
        self._names: list[str] = list(schema.names)
        self._readers = [choose_reader(pa, field.type) for field in schema]
        self._max_row_bytes = max_row_bytes

    def encode(self, batch: Any) -> list[bytes | RowInvalid]:
        """Returns the batch's rows in order, each a line of JSON with its newline, or why it cannot be one."""
        if not self._names:
            return [b"{}\n"] * batch.num_rows
        columns = [reader(column) for reader, column in zip(self._readers, batch.columns, strict=True)]
        names = self._names
        return [self._line(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]

    def _line(self, row: dict[str, Any]) -> bytes | RowInvalid:
        try:
            line = encode_row(row)
        except RowInvalid as error:
            return _refuse(next(_culprits(row), None) or error.reason or str(error))
        if len(line) - 1 > self._max_row_bytes:
            return _refuse(f"longer than the {self._max_row_bytes} bytes of --max-row-bytes, as JSON")
        return line


def _refuse(reason: str) -> RowInvalid:
    return RowInvalid(f"not a row: {reason}", reason=reason)


def _culprits(row: dict[str, Any]) -> Iterator[str]:
    """Yields why a row cannot be written, with the column."""
    for name, value in row.items():
        for path, reason in _walk(name, value):
            yield f"column {path!r}: {reason}"
    for name, value in row.items():
        try:
            encode_row({name: value})
        except RowInvalid as error:
            yield f"column {name!r}: {error.reason}"


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    pending = [(path, value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Unwritable):
            yield path, value.reason
        elif isinstance(value, float) and not math.isfinite(value):
            yield path, f"{'NaN' if math.isnan(value) else 'an infinity'}, which JSON does not have; write null instead"
        elif isinstance(value, dict):
            pending += [(f"{path}.{key}", item) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", item) for index, item in reversed(list(enumerate(value)))]


def _check_names(pa: Any, what: str, fields: Any) -> None:
    seen: set[str] = set()
    for field in fields:
        if field.name in seen:
            raise ValueError(f"two {what} named {field.name!r}")
        seen.add(field.name)
        _check_within(pa, field.name, field.type)


def _check_within(pa: Any, column: str, kind: Any) -> None:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        _check_within(pa, column, kind.storage_type)
    elif types.is_map(kind):
        _check_within(pa, column, kind.item_type)
    elif types.is_nested(kind) and hasattr(kind, "value_type"):
        _check_within(pa, column, kind.value_type)
    elif types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        _check_names(pa, f"fields of column {column!r}", fields)
