"""A row: one JSON object in UTF-8 on one line.

A row is accepted if every reader parses it to the same value; any other row is refused with a reason and the byte.
Numbers that JSON readers round differently (integers past 64 bits, 1e999) are refused, not changed silently.

All code that traverses a row avoids recursion: orjson reads objects nested more deeply than Python's recursion limit.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import Any, Final

import orjson

from lazyshard.errors import RowInvalid
from lazyshard.memory import dumps, loads, quick_dumps, quick_loads

_TYPE: Final = "Type is not JSON serializable: "  # Prefix of orjson's message, followed by the name of the type
_MAX_LOOKED_AT: Final = 100_000  # Values: a row may contain itself, and bad rows must be cheap
_SHOWN: Final = 80  # Characters of a location in a message

_CREATE: Final = "create the stream with ChunkWriter(..., arrays=True)"

# What to do with a value, by the names of its type
_ADVICE: Final = (
    ("ndarray", _CREATE),
    ("bytes bytearray memoryview", f"{_CREATE} or `run --embed`, or write base64 text: base64.b64encode(it).decode()"),
    ("Image PngImageFile JpegImageFile WebPImageFile", "write the path or the bytes of a file that holds it"),
    ("set frozenset", "convert it, with sorted(), as it has no order of its own"),
    ("range generator deque map filter zip dict_keys dict_values", "convert it, with list()"),
    ("Decimal Fraction", "convert it, with float(), or str() to keep every digit"),
    ("PosixPath WindowsPath PurePosixPath PureWindowsPath datetime64 timedelta64", "convert it, with str()"),
    ("timedelta", "convert it, with .total_seconds()"),
    ("complex", "write it as two numbers, [it.real, it.imag]"),
    ("Tensor", "convert it, with .tolist()"),
)


def advise(row: Any, reason: str, arrays: bool) -> str:
    """Returns advice to append to orjson's reason for not writing a row; empty if the reason is not a type.

    >>> advise({"a": {"b": [1, range(2)]}}, "Type is not JSON serializable: range", True)
    " under 'a.b[1]'; a row holds JSON values, numpy arrays and bytes: convert it, with list()"
    """
    if not reason.startswith(_TYPE):
        return ""
    name = reason[len(_TYPE) :].rpartition(".")[2]
    place = _find(row, name)
    where = f" under {place[:_SHOWN]!r}" if place else ""
    holds = "JSON values, numpy arrays and bytes" if arrays else "JSON values"
    advice = next((advice for names, advice in _ADVICE if name in names.split()), "")
    if not advice:
        numpy = reason.startswith(f"{_TYPE}numpy.")
        advice = "convert it, with .item()" if numpy else "use dicts, lists, text, numbers, True, False and None"
    return f"{where}; a row holds {holds}: {advice}{'; or an array: .numpy()' if arrays and name == 'Tensor' else ''}"


def _find(row: Any, name: str) -> str:
    """Returns the location of the shallowest value whose type has this name; empty if none was found."""
    pending: deque[tuple[str, Any]] = deque([("", row)])
    for _ in range(_MAX_LOOKED_AT):
        if not pending:
            break
        place, value = pending.popleft()
        if type(value).__name__ == name:
            return place
        room = _MAX_LOOKED_AT - len(pending)
        if isinstance(value, dict):
            pending.extend((f"{place}.{key}" if place else str(key), one) for key, one in islice(value.items(), room))
        elif isinstance(value, list | tuple):
            pending.extend((f"{place}[{number}]", one) for number, one in enumerate(islice(value, room)))
    return ""


_STRINGS: Final = re.compile(rb'"[^"]*"')  # of a valid row, see `_plain`


def _plain(line: bytes) -> bytes:
    """Returns a valid row, of the same length, without escaped quotes: a regex uses 100 bytes for each escape."""
    return line.replace(rb"\\", b"__").replace(rb"\"", b"__")


def has_duplicate_keys(line: bytes, row: dict[str, Any]) -> bool:
    """Whether an object of the line has a key twice; `row` is the parsed line (with the last value of each key)."""
    colons, keys = line.count(b":"), count_keys(row)
    # Every member has a colon; so if there are no more colons than remaining keys, no member was dropped.
    if colons <= keys:
        return False
    # Serialised again, a row has the colons of its strings and remaining keys. Only an escaped colon could make up for
    # a lost one. The row may be nested more deeply than orjson writes, or too large to be copied.
    with contextlib.suppress(orjson.JSONEncodeError, MemoryError):
        if colons == dumps(row).count(b":") and b"\\u003" not in line:
            return False
    return colons - sum(text[0].count(b":") for text in _STRINGS.finditer(_plain(line))) > keys


def count_keys(row: dict[str, Any]) -> int:
    """Returns the number of keys in an object and all objects nested in it."""
    count = len(row)
    pending: list[Any] = [*row.values()]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is dict:
            count += len(value)
            pending.extend(value.values())
        elif kind is list:
            pending.extend(value)
    return count


# Strings, so that their content is skipped, and long integers
_LONG_INTEGERS: Final = re.compile(_STRINGS.pattern + rb"|(?<![0-9.eE+-])(-?[0-9]{19,})(?![0-9.eE])")
_UTF16: Final = re.compile(rb"(?s:([^\0]\0){2}|(\0[^\0]){2})")
_NON_FINITE: Final = re.compile(rb"-?(?:NaN|nan|Inf|inf)")

_KINDS: Final[dict[type, str]] = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}

# orjson's messages, and explanations for users who fix a file. Other releases may use other messages.
_WORDS: Final = {
    "no low surrogate in string": r"half of a surrogate pair (\ud800 to \udfff alone), which is no character",
    "number is infinity when parsed as double": "a number that does not fit into 64 bits; write it as a string",
    "depth limit exceeded": "nested more than 1,024 levels deep",
    "unexpected content after document": "trailing content after the object; expected one object on one line",
}


def parse_row(line: bytes | memoryview) -> dict[str, Any]:
    """Returns the object in a line, with or without its line end.

    Raises RowInvalid, with `reason` and `byte` (offset in the line), or MemoryError.
    """
    try:
        row = loads(line)
    except orjson.JSONDecodeError as cause:
        raise refuse_row(bytes(line), cause) from None
    if type(row) is not dict:
        raise _invalid(f"expected a JSON object, found {_KINDS.get(type(row), 'a number')}", 0)
    return row


def check_row(line: bytes) -> dict[str, Any]:
    """Returns the object in a line to be published, with or without its line end.

    Stricter than `parse_row`: also refuses line ends between the tokens and integers that do not fit into 64 bits.
    """
    row = parse_row(line)
    end = len(line) - line.endswith(b"\n")
    end -= line.endswith(b"\r", 0, end)
    for line_end in (b"\n", b"\r"):
        if (at := line.find(line_end, 0, end)) >= 0:
            raise _invalid("a line end within the row: expected one object on one line", at)
    if _has_huge_float(row):
        _check_integers(line)
    return row


def check_line(line: bytes) -> tuple[bytes, dict[str, Any]]:
    """Returns a line as published, ended by one newline whatever its line end was, and its object."""
    bare = line.rstrip(b"\r\n")
    if (at := bare.find(b"\n")) >= 0:
        raise _invalid("more than one line; a row is one JSON object on one line", at)
    return bare + b"\n", check_row(bare)


def encode_row(row: object, other: Callable[[Any], Any] | None = None) -> bytes:
    """Returns the line of an object, with its newline.

    `other` returns a replacement for a value that JSON does not support; it raises TypeError if there is none, or
    RowInvalid. Raises RowInvalid: a value that JSON, UTF-8 or 64-bit integers cannot represent, or more than 254 levels
    of nesting (NaN and infinities are refused, not written as null); MemoryError.
    """
    if not isinstance(row, dict):
        raise _invalid(f"expected a dict, found {type(row).__name__}", None)
    try:
        line = quick_dumps(row, other, orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_DATACLASS)
    except (orjson.JSONEncodeError, RecursionError) as cause:
        if isinstance(cause.__cause__, RowInvalid):
            raise cause.__cause__ from None
        # orjson's limit is independent of Python's recursion limit.
        reason = str(cause).replace("Recursion limit reached", "nested more than 254 levels deep")
        reason += advise(row, reason, arrays=other is not None)
        raise _invalid(f"cannot be written as JSON: {reason}", None) from None
    if b"null" in line and any(isinstance(one, float) and not math.isfinite(one) for one in values_in(row)):
        raise _invalid("NaN and infinities are not JSON; write null or a string", None)
    return line


def refuse_row(line: bytes, cause: orjson.JSONDecodeError) -> RowInvalid:
    """Returns the error for a line that orjson refused, in terms that help to fix the file."""
    stripped = line.rstrip(b"\r\n")
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or _UTF16.match(line):
        encoding = "UTF-16" if line[0] >= 0xFE else "UTF-16BE" if line[0] == 0 else "UTF-16LE"
        return _invalid(f"UTF-16 text: expected UTF-8; convert it with `iconv -f {encoding} -t UTF-8`", 0)
    if stripped.endswith(b"\0"):
        return _invalid("ends in NUL bytes; torn by a crash of the machine that wrote it?", len(stripped.rstrip(b"\0")))
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as bad:
        return _invalid(f"not UTF-8: byte 0x{line[bad.start]:02x}", bad.start)
    if not stripped.strip():
        return _invalid("a blank line", 0)
    byte = len(text[: cause.pos].encode("utf-8"))
    if line.startswith(b"\xef\xbb\xbf", byte):
        return _invalid("a byte order mark, which is only allowed at the start of a file", byte)
    if _NON_FINITE.match(line, byte) or _NON_FINITE.match(line, max(0, byte - 1)):
        return _invalid("NaN and infinities are not JSON; write null or a string", byte)
    before = line[:byte]
    if b"\r" in before[len(before.rstrip(b" \t\r")) :]:
        return _invalid("carriage returns as line ends: expected newlines; convert it with `tr '\\r' '\\n'`", byte)
    return _invalid(_WORDS.get(cause.msg, cause.msg), byte)


def _invalid(reason: str, byte: int | None) -> RowInvalid:
    at = "" if byte is None else f" (byte {byte} of the row)"
    return RowInvalid(f"not a row: {reason}{at}", reason=reason, byte=byte)


def _check_integers(line: bytes) -> None:
    for found in _LONG_INTEGERS.finditer(_plain(line)):
        digits = (found[1] or b"0").decode()
        # int() raises for more than 4,300 digits; 21 characters exceed any 64-bit integer.
        if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
            shown = digits if len(digits) <= 24 else digits[:20] + "..."
            raise _invalid(f"the integer {shown} does not fit into 64 bits; write it as a string", found.start())


def _has_huge_float(row: dict[str, Any]) -> bool:
    # orjson parses an integer that does not fit into 64 bits as a float, so only a row with such a float can contain
    # one. Traversing the parsed values is some twenty times faster than searching the text for long numbers.
    pending: list[Iterable[Any]] = [row.values()]
    while pending:
        for item in pending.pop():
            kind = type(item)
            if kind is float:
                if abs(item) >= 2**63:
                    return True
            elif kind is dict:
                pending.append(item.values())
            elif kind is list:
                pending.append(item)
    return False


def values_in(value: object) -> Iterator[object]:
    """Yields a value and all values nested in it, in any order."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, Enum):
            pending.append(value.value)


def parse_lines(lines: list[bytes]) -> list[dict[str, Any]]:
    """Parses lines quickly if all are JSON objects; otherwise returns an empty list: `parse_row` finds the error."""
    try:
        rows: list[dict[str, Any]] = list(map(quick_loads, lines))
    except orjson.JSONDecodeError:
        return []
    return rows if set(map(type, rows)) <= {dict} else []
