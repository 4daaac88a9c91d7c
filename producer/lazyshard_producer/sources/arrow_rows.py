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

import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pybase64

from lazyshard.errors import RowInvalid
from lazyshard.format.row import encode_row
from lazyshard_producer.sources.files import load_extra
from lazyshard_producer.sources.source import bad_row, too_long


def load_pyarrow(path: str, module: str = "pyarrow") -> Any:
    """Returns pyarrow, or the module of it of this whole name, for the source at a path."""
    return load_extra(path, module, "arrow")


Reader = Callable[[Any], "list[Any]"]
"""Takes an array of one type, returns its values; None for null."""

_TEXT: Final = ("string", "large_string", "string_view")
_LIST: Final = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
_PLAIN: Final = ("null", "boolean", "integer", "float32", "float64", *_TEXT)
"""Types by their names in `pyarrow.types`, some of which older releases do not have; of the last ones pyarrow's own
Python values are those of JSON."""

_TIME_CHARACTERS: Final = {"s": 19, "ms": 23, "us": 26, "ns": 29}
"""Of 2026-01-02T03:04:05 and as many digits as each unit has."""


class _Unwritable:
    """Stands for a value that JSON cannot hold; the reason says what it is and what to do about it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _is(pa: Any, kind: Any, *names: str) -> bool:
    return any(getattr(pa.types, f"is_{name}", lambda kind: False)(kind) for name in names)


def _is_plain(pa: Any, kind: Any) -> bool:
    if _is(pa, kind, "struct"):
        return all(_is_plain(pa, field.type) for field in _fields(kind))
    return _is_plain(pa, kind.value_type) if _is(pa, kind, *_LIST) else _is(pa, kind, *_PLAIN)


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


def _by_structure(pa: Any, kind: Any) -> Reader:
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return _each(lambda value: str(uuid.UUID(bytes=value)), lambda array: array.storage)
        storage = _choose_reader(pa, kind.storage_type)
        return lambda array: storage(array.storage)
    if _is(pa, kind, "dictionary", "run_end_encoded"):
        values = _choose_reader(pa, kind.value_type)
        if _is(pa, kind, "dictionary"):
            return lambda array: values(array.dictionary_decode())
        return lambda array: values(pa.compute.run_end_decode(array))
    if _is(pa, kind, "struct"):
        return _struct(pa, kind)
    if _is(pa, kind, "map"):
        return _map(pa, kind)
    if _is(pa, kind, *_LIST):
        return _list(pa, kind)
    if _is(pa, kind, *_TEXT):
        return _each(_text, lambda array: array.cast(pa.large_binary()))
    if _is(pa, kind, "float16"):
        return _each(float)  # numbers of numpy in older releases of pyarrow
    if _is(pa, kind, "timestamp"):
        zone, length = "Z" if kind.tz is not None else "", _TIME_CHARACTERS[kind.unit]
        # Without its zone it is in UTC, and needs no data base of zones, which not every machine has.
        return _each(
            lambda text: _dated(text.replace(" ", "T", 1), length, zone),
            lambda array: array.cast(pa.timestamp(kind.unit)).cast(pa.string()),
        )
    if _is(pa, kind, "date"):
        return _each(lambda text: _dated(text, len("2026-01-02")), lambda array: array.cast(pa.string()))
    if _is(pa, kind, "time"):
        return lambda array: array.cast(pa.string()).to_pylist()
    if _is(pa, kind, "binary", "large_binary", "fixed_size_binary", "binary_view"):
        return _each(lambda value: pybase64.b64encode(value).decode("ascii"))
    if _is(pa, kind, *_PLAIN):
        return lambda array: array.to_pylist()
    what = "a decimal, which JSON readers round" if _is(pa, kind, "decimal") else "not a value of JSON"
    unwritable = _Unwritable(f"a value of type {kind}, {what}; cast the column to text or float64, or leave it out")
    return lambda array: [unwritable if valid else None for valid in array.is_valid().to_pylist()]


def _each(convert: Callable[[Any], Any], cast: Callable[[Any], Any] = lambda array: array) -> Reader:
    """Returns what reads arrays value by value, after a cast."""
    return lambda array: [None if value is None else convert(value) for value in cast(array).to_pylist()]


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

    def read(array: Any) -> list[Any]:
        items = values(array.flatten())  # without what null lists may hide
        lists: list[Any] = []
        start = 0
        for length in pa.compute.list_value_length(array).to_pylist():
            lists.append(None if length is None else items[start : start + length])
            start += length or 0
        return lists

    return read


def _map(pa: Any, kind: Any) -> Reader:
    entry = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
    lists, convert = _list(pa, pa.list_(entry)), _as_object if _is(pa, kind.key_type, *_TEXT) else list
    return lambda array: [None if one is None else convert(one) for one in lists(array.cast(pa.list_(entry)))]


def _as_object(entries: list[dict[str, Any]]) -> Any:
    bad = next((entry["key"] for entry in entries if isinstance(entry["key"], _Unwritable)), None)
    found = {entry["key"]: entry["value"] for entry in entries}
    return bad or (found if len(found) == len(entries) else _Unwritable("a map that names a key twice"))


def _dated(text: str, length: int, zone: str = "") -> Any:
    # ISO 8601 has four digits for the year.
    return text + zone if len(text) == length else _Unwritable(f"a date outside the years 0 to 9999 ({text})")


def _text(value: bytes) -> Any:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as bad:
        return _Unwritable(f"text that is not UTF-8 (byte 0x{value[bad.start]:02x} at {bad.start})")


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
    if isinstance(value, _Unwritable):
        yield path, value.reason
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{'NaN' if math.isnan(value) else 'an infinity'}, which JSON does not have; write null instead"
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _walk(f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]", item)


def _check_names(pa: Any, what: str, fields: Any) -> None:
    for name, times in Counter(field.name for field in fields).items():
        if times > 1:
            raise ValueError(f"two {what} named {name!r}")
    for field in fields:
        _check_within(pa, field.name, field.type)


def _check_within(pa: Any, column: str, kind: Any) -> None:
    if isinstance(kind, pa.BaseExtensionType):
        _check_within(pa, column, kind.storage_type)
    elif _is(pa, kind, "struct"):
        _check_names(pa, f"fields of column {column!r}", _fields(kind))
    elif _is(pa, kind, "nested"):
        _check_within(pa, column, kind.item_type if _is(pa, kind, "map") else getattr(kind, "value_type", pa.null()))
