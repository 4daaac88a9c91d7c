"""Batches of Arrow as lines of JSON: a row is an object by the names of the columns.

    Arrow                                        JSON
    null, booleans, integers, floats, text       the same; a NaN or an infinity is refused later, as JSON has none
    timestamps                                   "2026-01-02T03:04:05.678", as many digits as the unit has; with a "Z"
                                                 behind, and in UTC, where the column has a time zone
    dates, times of day                          "2026-01-02", "03:04:05"
    binary                                       base64 text
    lists, structs                               arrays, objects
    maps                                         objects where the keys are text, else arrays of {"key", "value"}
    dictionary- and run-end-encoded              as what they stand for
    extension types                              as their storage; arrow.uuid as text
    decimals, durations, intervals, unions       refused: JSON has no such value, and readers would round the first

What has no value in JSON becomes an `_Unwritable` in its place, so that only its row is lost. Everything here goes by
the column's type, never by what happens to be in it, so a column looks the same in every row and on every machine.
"""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pybase64

from lazyshard.errors import RowInvalid
from lazyshard.format.row import encode_row
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.sources.source import bad_row, too_long


def load_pyarrow(path: str, module: str = "pyarrow") -> Any:
    """Returns pyarrow, or the module of it of this whole name, for the source at a path."""
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        missing = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == "pyarrow"
        found = "it is not installed" if missing else f"importing it failed: {cause}"
        raise ExtraMissing(
            f"{path}: reading it needs pyarrow, and {found}: pip install 'lazyshard[arrow]'",
            package="pyarrow",
            extra="arrow",
        ) from cause


Reader = Callable[[Any], "list[Any]"]  # takes an array of one type, returns its values; None for null
_DATE_CHARACTERS: Final = len("2026-01-02")
_TIME_CHARACTERS: Final = {"s": 19, "ms": 23, "us": 26, "ns": 29}
"""Of 2026-01-02T03:04:05 and as many digits as each unit has."""


class _Unwritable:
    """Stands for a value that JSON cannot hold; the reason says what it is and what to do about it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _choose_reader(pa: Any, kind: Any) -> Reader:
    slow = _by_structure(pa, kind)
    if not _is_plain(pa, kind):
        return slow

    def read(array: Any) -> list[Any]:
        try:
            values: list[Any] = array.to_pylist()
        except UnicodeDecodeError:  # one bad text; find out which
            return slow(array)
        return values

    return read


def _is_plain(pa: Any, kind: Any) -> bool:
    types = pa.types
    if types.is_struct(kind):
        return all(_is_plain(pa, field.type) for field in _fields(kind))
    if _is_list(types, kind):
        return _is_plain(pa, kind.value_type)
    scalars = (types.is_null, types.is_boolean, types.is_integer, types.is_float32, types.is_float64)
    return any(is_kind(kind) for is_kind in scalars) or _is_text(types, kind)


def _by_structure(pa: Any, kind: Any) -> Reader:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        storage = _choose_reader(pa, kind.storage_type)
        if kind.extension_name == "arrow.uuid":
            return lambda array: [
                None if value is None else str(uuid.UUID(bytes=value)) for value in array.storage.to_pylist()
            ]
        return lambda array: storage(array.storage)
    if types.is_dictionary(kind):
        values = _choose_reader(pa, kind.value_type)
        return lambda array: values(array.dictionary_decode())
    if types.is_run_end_encoded(kind):
        values = _choose_reader(pa, kind.value_type)
        return lambda array: values(pa.compute.run_end_decode(array))
    if types.is_struct(kind):
        return _struct(pa, kind)
    if types.is_map(kind):
        return _map(pa, kind)
    if _is_list(types, kind):
        return _list(pa, kind)
    return _scalar(pa, kind)


def _scalar(pa: Any, kind: Any) -> Reader:
    types = pa.types
    if _is_text(types, kind):
        return lambda array: list(map(_text, array.cast(pa.large_binary()).to_pylist()))
    if types.is_float16(kind):
        # Numbers of numpy in older releases of pyarrow.
        return lambda array: [None if value is None else float(value) for value in array.to_pylist()]
    if types.is_timestamp(kind):
        return _timestamp(pa, kind)
    if types.is_date(kind):
        return lambda array: [_dated(text, _DATE_CHARACTERS) for text in array.cast(pa.string()).to_pylist()]
    if types.is_time(kind):
        return lambda array: array.cast(pa.string()).to_pylist()
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _base64
    if hasattr(types, "is_binary_view") and types.is_binary_view(kind):
        return _base64
    if _is_plain(pa, kind):
        return lambda array: array.to_pylist()
    return _refuse(kind, "a decimal, which JSON readers round" if types.is_decimal(kind) else "not a value of JSON")


def _struct(pa: Any, kind: Any) -> Reader:
    fields = _fields(kind)
    names = [field.name for field in fields]
    readers = [_choose_reader(pa, field.type) for field in fields]

    def read(array: Any) -> list[Any]:
        columns = [reader(child) for reader, child in zip(readers, array.flatten(), strict=True)]
        rows: list[Any] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if names and not array.null_count:
            return rows
        rows = rows or [{} for _ in range(len(array))]
        return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]

    return read


def _list(pa: Any, kind: Any) -> Reader:
    values = _choose_reader(pa, kind.value_type)
    list_value_length = pa.compute.list_value_length

    def read(array: Any) -> list[Any]:
        items = values(array.flatten())  # without what null lists may hide
        lists: list[Any] = []
        start = 0
        for length in list_value_length(array).to_pylist():
            lists.append(None if length is None else items[start : start + length])
            start += length or 0
        return lists

    return read


def _map(pa: Any, kind: Any) -> Reader:
    entry = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
    as_lists = pa.list_(entry)
    lists = _list(pa, as_lists)
    if not _is_text(pa.types, kind.key_type):
        return lambda array: lists(array.cast(as_lists))
    return lambda array: [_as_object(entries) for entries in lists(array.cast(as_lists))]


def _as_object(entries: list[dict[str, Any]] | None) -> Any:
    if entries is None:
        return None
    for entry in entries:
        if isinstance(entry["key"], _Unwritable):
            return entry["key"]
    found = {entry["key"]: entry["value"] for entry in entries}
    return found if len(found) == len(entries) else _Unwritable("a map that names a key twice")


def _timestamp(pa: Any, kind: Any) -> Reader:
    zone = "Z" if kind.tz is not None else ""
    length = _TIME_CHARACTERS[kind.unit]

    def read(array: Any) -> list[Any]:
        # Without its zone it is in UTC, and needs no data base of zones, which not every machine has.
        texts = array.cast(pa.timestamp(kind.unit)).cast(pa.string()).to_pylist()
        return [_dated(None if text is None else text.replace(" ", "T", 1), length, zone) for text in texts]

    return read


def _dated(text: str | None, length: int, zone: str = "") -> Any:
    if text is None:
        return None
    # ISO 8601 has four digits for the year.
    return text + zone if len(text) == length else _Unwritable(f"a date outside the years 0 to 9999 ({text})")


def _text(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as bad:
        return _Unwritable(f"text that is not UTF-8 (byte 0x{value[bad.start]:02x} at {bad.start})")


def _base64(array: Any) -> list[Any]:
    return [None if value is None else pybase64.b64encode(value).decode("ascii") for value in array.to_pylist()]


def _refuse(kind: Any, what: str) -> Reader:
    unwritable = _Unwritable(f"a value of type {kind}, {what}; cast the column to text or float64, or leave it out")
    return lambda array: [unwritable if valid else None for valid in array.is_valid().to_pylist()]


def _is_text(types: Any, kind: Any) -> bool:
    view = hasattr(types, "is_string_view") and types.is_string_view(kind)
    return types.is_string(kind) or types.is_large_string(kind) or view


def _is_list(types: Any, kind: Any) -> bool:
    names = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(hasattr(types, name) and getattr(types, name)(kind) for name in names)


def _fields(kind: Any) -> Sequence[Any]:
    return [kind.field(index) for index in range(kind.num_fields)]


class ArrowRowEncoder:
    """Writes the rows of batches of one schema; `pa` is the module pyarrow, with its module compute loaded."""

    def __init__(self, pa: Any, schema: Any, max_row_bytes: int) -> None:
        _check_names(pa, "columns", schema)
        self._names: list[str] = list(schema.names)
        self._readers = [_choose_reader(pa, field.type) for field in schema]
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
            return bad_row(next(_culprits(row), None) or error.reason or str(error))
        return line if len(line) - 1 <= self._max_row_bytes else bad_row(too_long(self._max_row_bytes, ", as JSON"))


def _culprits(row: dict[str, Any]) -> Iterator[str]:
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
        if isinstance(value, _Unwritable):
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
        _check_names(pa, f"fields of column {column!r}", _fields(kind))
