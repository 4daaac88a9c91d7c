"""What a source of rows is to the rest of the command."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from lazyshard.errors import RowInvalid
from lazyshard.format.batch import EncodedRow

PIECE_BYTES: Final = 1 << 20
"""How much is read at a time: enough for what a piece costs by itself, little beside all else in memory."""

PIECE_ROWS: Final = 512
"""As many rows of a table at the most: in Python small rows take many times their size, and more gains nothing."""

STANDARD_INPUT: Final = "-"  # path of the source that is standard input
PYTHON: Final = "python:"  # begins the path of a source that is a function of the user's: ``python:MODULE:FUNCTION``
Position: TypeAlias = Any  # where a source stands between two rows. Only the source that gave it can read it
Line: TypeAlias = bytes | EncodedRow | RowInvalid
"""A row: the bytes of a line, with or without its line end, nothing checked; or an encoded row, where it comes with
arrays or its length in tokens is known; or why the source could not give it (it is longer than `max_row_bytes`), so
that the rows after it can still be had."""


class RowOrigin(NamedTuple):
    """Where a row comes from: path as the user gave it, line or row from 1, byte of the text from 0 if it has one."""

    file: str
    line: int
    byte: int | None


class Context(NamedTuple):
    """What sources are told about the run; `check_owner` raises `ProducerFenced` where another producer has the stream.

    `out` is the stream's directory, which may not be there yet. None `samples_per_chunk`: nothing is to be published.
    """

    out: Path
    max_row_bytes: int
    samples_per_chunk: int | None = None
    check_owner: Callable[[], object] = lambda: None


class Rows(NamedTuple):
    """Rows that were read in one go, in order; empty: there are none at the moment.

    `position` and `place` return where the source stands after the row of an index, and its origin; in O(index).
    """

    lines: Sequence[Line] = ()
    position: Callable[[int], Position] = lambda index: None
    place: Callable[[int], RowOrigin] = lambda index: RowOrigin("", 0, None)


def number_rows(lines: Sequence[Line], name: str, before: int, position: Callable[[int], Position]) -> Rows:
    """Returns rows of a source that knows their numbers alone: so many are before them."""
    return Rows(lines, position, lambda index: RowOrigin(name, before + index + 1, None))


class Source(ABC):
    """Gives rows in order. One thread, one process. Any call may raise SourceRefused: what was read is not as it was.

    Opened by its settings, the entry of a position (None for its start) and a `Context`.

    Attributes:
        name: how entries, messages and metrics call it: the path as given, in plain text.
        live: whether it may have nothing at the moment and more later.
        start, reached: where it stood when it was opened, and where after all that `read` gave and blank lines behind.
        blank: blank lines skipped so far, those of earlier runs included.
        progress: (bytes read, bytes there are or None) for what is shown, earlier runs included.
    """

    name: str
    live: bool = False
    start: Position
    reached: Position
    blank: int = 0
    progress: tuple[int, int | None] = (0, None)

    @abstractmethod
    def read(self) -> Rows | None:
        """Returns the next rows, about 1 MiB of them, or none where there are none *now*; None: finished, for ever.

        Never blocks for longer than the device takes; see `wait`.
        """

    def wait(self, seconds: float) -> None:  # noqa: B027 - nothing to wait for
        """Returns when there may be more rows, or when so many seconds have passed; at once if it is not `live`."""

    def waits_for(self) -> str:
        """Returns in words what a source waits for: ``new lines in DIR (12 files open)``."""
        return ""

    @abstractmethod
    def entry(self, position: Position) -> dict[str, Any]:
        """Returns what seals keep of a position: a JSON object with `kind`, `path`, and what it takes to go on from it.

        What the entry relies on is durable then. Called about once a chunk, with positions that never go back.
        """

    def end(self) -> None:  # noqa: B027 - those that are not live end by themselves
        """Asks a live source to finish: it gives what is there by now, and then None. Others need not care."""

    def close(self) -> None:  # noqa: B027 - not all hold anything
        """Lets go of what is open. May be called twice."""


def line_size(line: Line) -> int:
    """Returns the bytes of a row, its newline and its arrays included; 0 of one that could not be given."""
    if isinstance(line, EncodedRow):
        return len(line.line) + len(line.arrays)
    return len(line) if isinstance(line, bytes) else 0


def bad_row(reason: str, byte: int | None = None) -> RowInvalid:
    """Returns why a source cannot give a row."""
    return RowInvalid(f"not a row: {reason}", reason=reason, byte=byte)


def too_long(most: int, more: str = "") -> str:
    """Returns the reason for a row that is longer than is accepted."""
    return f"longer than the {most} bytes of --max-row-bytes{more}"
