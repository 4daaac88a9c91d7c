"""Rows that a Python function of the user's gives: what it may give, and what is said where it does not.

    def rows(position):
        for number in range(position or 0, 1000):
            yield {"id": number}, number + 1

The protocol: the function is called once a run, with the position of the last published row, None at the start. It
returns an iterator of pairs (row, position after it). A row is a dict, or the bytes of one line of JSON. A position is
any value of JSON, and comes back as JSON has it (a tuple as a list). Called with a position, the function must give the
rows that followed it, and the same ones: what was given and not published yet is lost in a crash and given again.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple

import orjson

from lazyshard.errors import RowInvalid
from lazyshard.format.row import encode_row
from lazyshard.memory import raise_if_short
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.user_functions import name_error, name_value

_FRAMES: Final = 3
"""So many of the user's lines are named when the function raises: where it went wrong, and from where it came there."""

_SHOWN: Final = 120
"""Characters of a value that are shown."""


class GeneratorFailed(SourceRefused):
    """The user's function raised, or gave what the protocol has no place for.

    `frames` are the innermost lines of its traceback, ``file:line (function)``, the last one where it happened.
    """

    frames: tuple[str, ...] = ()


class FunctionMark(NamedTuple):
    """Where the function stands between two rows.

    Attributes:
        rows: rows given, those of earlier runs included.
        length: their bytes as lines.
        position: what it gave with the last of them, as JSON text: the function may change its object later.
    """

    rows: int
    length: int
    position: bytes


def encode_position(position: Any) -> bytes:
    """Returns a position as JSON text.

    Raises:
        RowInvalid: it is no value of JSON.
    """
    return encode_row({"position": position})


def decode_position(text: bytes) -> Any:
    """Returns what `encode_position` was given, as JSON has it."""
    return orjson.loads(text)["position"]


def function_rows(
    name: str, function: Callable[..., Any], start: FunctionMark, max_row_bytes: int
) -> Generator[tuple[bytes | RowInvalid, FunctionMark], None, None]:
    """Calls the function and yields its rows, each a line of JSON or why it is none, with the mark after it.

    Closing this iterator closes the function's.

    Args:
        name: the source, for messages.
        function: the user's.
        start: where to go on.
        max_row_bytes: longest row, in bytes without its line end.

    Raises:
        GeneratorFailed: it raised or broke the protocol; the rows before that are yielded.
    """
    try:
        rows = function(decode_position(start.position))
    except BaseException as error:
        raise _raised(name, error) from error
    if not isinstance(rows, Iterator):
        expected = "it to return an iterator of pairs (row, position), as a generator does"
        raise _broke(name, expected, rows)
    mark = start
    try:
        while True:
            try:
                pair = next(rows)
            except StopIteration:
                return
            except BaseException as error:
                raise _raised(name, error) from error
            line, written = _examine(name, mark.rows + 1, pair, max_row_bytes)
            length = len(line) if isinstance(line, bytes) else 0
            mark = FunctionMark(mark.rows + 1, mark.length + length, written)
            yield line, mark
    finally:
        close = getattr(rows, "close", None)
        if close is not None:
            close()


def name_frames(frames: TracebackType | None) -> tuple[str, ...]:
    """Returns the innermost lines of a traceback, but for those of this module: ``file:line (function)``."""
    found = [frame for frame in traceback.extract_tb(frames) if frame.filename != __file__]
    return tuple(f"{os.path.basename(frame.filename)}:{frame.lineno} ({frame.name})" for frame in found[-_FRAMES:])


def _examine(name: str, number: int, pair: Any, max_row_bytes: int) -> tuple[bytes | RowInvalid, bytes]:
    """Returns the row's line and the position's text."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise _broke(name, f"a pair (row, position) as row {number}", pair)
    row, position = pair
    if not isinstance(row, (dict, bytes)):
        raise _broke(name, f"a dict or the bytes of one line as row {number}", row)
    try:
        written = encode_position(position)
    except RowInvalid as error:
        expected = f"a value of JSON as the position after row {number}"
        raise _broke(name, expected, position, f" ({error.reason})") from None
    try:
        line = row if isinstance(row, bytes) else encode_row(row)
    except RowInvalid as error:
        return error, written
    if len(line) > max_row_bytes and len(line.rstrip(b"\r\n")) > max_row_bytes:
        reason = f"longer than the {max_row_bytes} bytes of --max-row-bytes"
        return RowInvalid(f"not a row: {reason}", reason=reason), written
    return line, written


def _raised(name: str, error: BaseException) -> GeneratorFailed:
    raise_if_short(error)
    frames = name_frames(error.__traceback__)
    where = f" at {', called from '.join(reversed(frames))}" if frames else ""
    hint = "mend it and run the same command again, nothing is lost"
    return GeneratorFailed(f"{name}: raised {name_error(error)}{where}; {hint}", file=name, frames=frames)


def _broke(name: str, expected: str, value: Any, more: str = "") -> GeneratorFailed:
    actual = name_value(value, _SHOWN) + more
    return GeneratorFailed(f"{name}: expected {expected}, found {actual}", file=name, expected=expected, actual=actual)
