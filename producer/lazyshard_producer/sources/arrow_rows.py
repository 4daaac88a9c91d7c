"""Converts Arrow batches to lines of JSON: a row is an object with the names of the columns (table in docs/sources.md).

The conversion depends only on a column's type, never on its values, so a column has the same form in every row and on
every machine. A value that JSON cannot represent becomes an `_Unwritable`, so that only its row is refused.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import pybase64

from lazyshard.errors import RowInvalid
from lazyshard.format.row import encode_row
from lazyshard_producer.errors import load_extra
from lazyshard_producer.sources.source import bad_row, too_long

Reader = Callable[[Any], "list[Any]"]  # converts an array of one type to its values; None for null

_TEXT: Final = ("string", "large_string", "string_view")
_LIST: Final = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
_PLAIN: Final = ("null", "boolean", "integer", "float32", "float64", *_TEXT)
"""Types by their names in `pyarrow.types`; for the last ones pyarrow's Python values are those of JSON."""


def load_pyarrow(path: str, module: str = "pyarrow.compute") -> Any:
    """Returns pyarrow, with a module of it by its full name, for the source at a path. Raises ExtraMissing."""
    load_extra(f"{path}: reading it", module, "arrow")
    return load_extra(f"{path}: reading it", "pyarrow", "arrow")


class _Unwritable(Exception):
    """Replaces a value that JSON cannot represent; its text describes the value and the remedy."""


def _is(pa: Any, kind: Any, *names: str) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def _is_plain(pa: Any, kind: Any) -> bool:
    if _is(pa, kind, "struct"):
        return all(_is_plain(pa, field.type) for field in _fields(kind))
    return _is_plain(pa, kind.value_type) if _is(pa, kind, *_LIST) else _is(pa, kind, *_PLAIN)


def _choose_reader(pa: Any, kind: Any) -> Reader:
    slow = _by_structure(pa, kind)

    def read(array: Any) -> list[Any]:
        with contextlib.suppress(UnicodeDecodeError):  # a text is bad; the slow reader finds out which
            return list(array.to_pylist())
        return slow(array)

    return read if _is_plain(pa, kind) else slow


def _by_structure(pa: Any, kind: Any) -> Reader:
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return _each(lambda value: str(uuid.UUID(bytes=value)), lambda array: array.storage)
        storage = _choose_reader(pa, kind.storage_type)
        return lambda array: storage(array.storage)
    if (of_dictionary := _is(pa, kind, "dictionary")) or _is(pa, kind, "run_end_encoded"):
        values = _choose_reader(pa, kind.value_type)
        return lambda array: values(array.dictionary_decode() if of_dictionary else pa.compute.run_end_decode(array))
    if _is(pa, kind, "struct"):
        return _struct(pa, kind)
    if _is(pa, kind, "map"):
        return _map(pa, kind)
    if _is(pa, kind, *_LIST):
        return _list(pa, kind)
    if _is(pa, kind, *_TEXT):
        return _each(_text, lambda array: array.cast(pa.large_binary()))
    if _is(pa, kind, "float16"):
        return _each(float)  # older releases of pyarrow return numpy numbers
    if _is(pa, kind, "timestamp"):
        zone, digits = "Z" if kind.tz is not None else "", {"s": 0, "ms": 4, "us": 7, "ns": 10}[kind.unit]
        # Without its zone it is in UTC, and needs no time zone database, which some machines lack.
        written = partial(_dated, length=len("2026-01-02T03:04:05") + digits, zone=zone)
        return _each(written, lambda array: array.cast(pa.timestamp(kind.unit)).cast(pa.string()))
    if _is(pa, kind, "date"):
        return _each(partial(_dated, length=len("2026-01-02")), lambda array: array.cast(pa.string()))
    if _is(pa, kind, "time"):
        return lambda array: array.cast(pa.string()).to_pylist()
    if _is(pa, kind, "binary", "large_binary", "fixed_size_binary", "binary_view"):
        return _each(lambda value: pybase64.b64encode(value).decode("ascii"))
    if _is(pa, kind, *_PLAIN):
        return lambda array: array.to_pylist()
    what = "a decimal, which JSON readers round" if _is(pa, kind, "decimal") else "not a value of JSON"
    unwritable = _Unwritable(f"a value of type {kind}, {what}; cast the column to text or float64, or remove it")
    return lambda array: [unwritable if valid else None for valid in array.is_valid().to_pylist()]


def _each(convert: Callable[[Any], Any], cast: Callable[[Any], Any] = lambda array: array) -> Reader:
    """Returns a reader that converts arrays value by value, after a cast."""
    return lambda array: [None if value is None else convert(value) for value in cast(array).to_pylist()]


def _struct(pa: Any, kind: Any) -> Reader:
    names, readers = _names("fields", _fields(kind)), [_choose_reader(pa, field.type) for field in _fields(kind)]

    def read(array: Any) -> list[Any]:
        columns = [reader(child) for reader, child in zip(readers, array.flatten(), strict=True)]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{} for _ in array]
        if not array.null_count:
            return rows
        return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]

    return read


def _list(pa: Any, kind: Any) -> Reader:
    values = _choose_reader(pa, kind.value_type)

    def read(array: Any) -> list[Any]:
        items = iter(values(array.flatten()))  # `flatten` skips values hidden in null lists
        lengths = pa.compute.list_value_length(array).to_pylist()
        return [None if length is None else list(islice(items, length)) for length in lengths]

    return read


def _map(pa: Any, kind: Any) -> Reader:
    entry = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
    lists, convert = _list(pa, pa.list_(entry)), _as_object if _is(pa, kind.key_type, *_TEXT) else list
    return lambda array: [None if one is None else convert(one) for one in lists(array.cast(pa.list_(entry)))]


def _as_object(entries: list[dict[str, Any]]) -> Any:
    bad = next((entry["key"] for entry in entries if isinstance(entry["key"], _Unwritable)), None)
    found = {entry["key"]: entry["value"] for entry in entries}
    return bad or (found if len(found) == len(entries) else _Unwritable("a map that contains a key twice"))


def _dated(text: str, length: int, zone: str = "") -> Any:
    # ISO 8601 has four digits for the year.
    text = text.replace(" ", "T", 1)
    return text + zone if len(text) == length else _Unwritable(f"a date outside the years 0 to 9999 ({text})")


def _text(value: bytes) -> Any:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as bad:
        return _Unwritable(f"text that is not UTF-8 (byte 0x{value[bad.start]:02x} at {bad.start})")


def _fields(kind: Any) -> Sequence[Any]:
    return [kind.field(index) for index in range(kind.num_fields)]


def _names(what: str, fields: Iterable[Any]) -> list[str]:
    found = [field.name for field in fields]
    if len(set(found)) < len(found):
        raise ValueError(f"two {what} named {next(name for name in found if found.count(name) > 1)!r}")
    return found


class ArrowRowEncoder:
    """Encodes the rows of batches of one schema. `pa` is the module pyarrow, with pyarrow.compute loaded."""

    def __init__(self, pa: Any, schema: Any, max_row_bytes: int) -> None:
        self._names = _names("columns", schema)
        self._readers = [_choose_reader(pa, field.type) for field in schema]
        self._max_row_bytes = max_row_bytes

    def encode(self, batch: Any) -> list[bytes | RowInvalid]:
        """Returns the batch's rows in order, each a line of JSON with its newline, or the error for the row."""
        if not self._names:
            return [b"{}\n"] * batch.num_rows
        columns = [reader(column) for reader, column in zip(self._readers, batch.columns, strict=True)]
        return [self._line(dict(zip(self._names, row, strict=True))) for row in zip(*columns, strict=True)]

    def _line(self, row: dict[str, Any]) -> bytes | RowInvalid:
        try:
            line = encode_row(row)
        except RowInvalid as error:
            return bad_row(next(_culprits(row), None) or error.reason or str(error))
        return line if len(line) - 1 <= self._max_row_bytes else bad_row(too_long(self._max_row_bytes, ", as JSON"))


def _culprits(row: dict[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        try:
            encode_row({name: value})
        except RowInvalid as error:
            path, reason = next(_walk(name, value), (name, error.reason))
            yield f"column {path!r}: {reason}"


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Unwritable):
        yield path, str(value)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{'NaN' if math.isnan(value) else 'an infinity'}, which JSON does not have; write null instead"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item)
