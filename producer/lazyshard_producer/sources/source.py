"""What a source of rows is to the rest of the command.

A source gives rows in pieces, and can say of any row where it stood after it. That position comes in two forms: in
memory cheap, opaque and for every row; and as the *entry* of a seal, a JSON object made of it once a chunk, from which
a later run goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from lazyshard.errors import RowInvalid
from lazyshard.format.batch import EncodedRow

PIECE_BYTES: Final = 1 << 20
"""How much of a table is read at a time: enough for what a piece costs by itself, little beside all else in memory."""

PIECE_ROWS: Final = 512
"""As many rows at the most: in Python small rows take many times their size, and more gains nothing."""

STANDARD_INPUT: Final = "-"
"""Path of the source that is standard input."""

PYTHON: Final = "python:"
"""Begins the path of a source that is a function of the user's: ``python:MODULE:FUNCTION``."""

Position: TypeAlias = Any
"""Where a source stands between two rows. Only the source that gave it can read it."""

Line: TypeAlias = bytes | EncodedRow | RowInvalid
"""A row: the bytes of a line, with or without its line end, nothing checked; or an encoded row, where it comes with
arrays or its length in tokens is known; or why the source could not give it (it is longer than `max_row_bytes`), so
that the rows after it can still be had."""


class RowOrigin(NamedTuple):
    """Where a row comes from, for people.

    Attributes:
        file: path as the user gave it.
        line: number of its line or row, from 1.
        byte: offset of its line in the file (of compressed ones: in their text), from 0; None where rows have none.
    """

    file: str
    line: int
    byte: int | None


class Context(NamedTuple):
    """What sources are told about the run.

    Attributes:
        out: the stream's directory; it may not be there yet.
        max_row_bytes: longest row that is accepted, in bytes without its line end.
        samples_per_chunk: rows that are published at a time; None where nothing is to be published.
        check_owner: raises `ProducerFenced` where another producer has taken the stream over.
    """

    out: Path
    max_row_bytes: int
    samples_per_chunk: int | None = None
    check_owner: Callable[[], object] = lambda: None


def _of_no_row(index: int) -> Any:
    raise IndexError(index)


class Rows(NamedTuple):
    """Rows that were read in one go, in order.

    Attributes:
        lines: the rows; empty: there are none at the moment.
        position: returns where the source stands after the row of an index. May take O(index).
        place: returns where the row of an index comes from. May take O(index).
    """

    lines: Sequence[Line] = ()
    position: Callable[[int], Position] = _of_no_row
    place: Callable[[int], RowOrigin] = _of_no_row


class Source(ABC):
    """Gives rows in order. One thread, one process.

    Opened at a position or at its start, and by then it has checked that what was read before is still there:
    `SourceRefused` is raised otherwise.

    Attributes:
        name: how entries, messages and metrics call it: the path as given, in plain text.
        live: whether it may have nothing at the moment and more later.
        start: where it stood when it was opened.
    """

    name: str
    live: bool = False
    start: Position

    @property
    @abstractmethod
    def reached(self) -> Position:
        """Where it stands after all that `read` gave, and after the blank lines behind that as far as they are read."""

    @property
    def blank(self) -> int:
        """Blank lines skipped so far, those of earlier runs included."""
        return 0

    @property
    @abstractmethod
    def progress(self) -> tuple[int, int | None]:
        """(bytes read, bytes there are) for what is shown, earlier runs included; None where nobody can know."""

    @abstractmethod
    def read(self) -> Rows | None:
        """Returns the next rows: up to about 1 MiB of them; at least one row, or none where there are none *now*.

        None: finished, for ever. Never blocks for longer than the device takes; see `wait`.

        Raises:
            SourceRefused: it cannot be read on.
        """

    def wait(self, seconds: float) -> None:  # noqa: B027 - nothing to wait for
        """Returns when there may be more rows, or when so many seconds have passed; at once if it is not `live`."""

    def waits_for(self) -> str:
        """Returns in words what a source waits for: ``new lines in DIR (12 files open)``."""
        return ""

    @abstractmethod
    def entry(self, position: Position) -> dict[str, Any]:
        """Returns what seals keep of a position that this object gave: a JSON object with at least `kind` and `path`.

        Does I/O where that is needed to know the source again; what the entry relies on is durable when it returns.
        Called about once a chunk, with positions that never go back.

        Raises:
            SourceRefused: what was read is no longer there.
        """

    def end(self) -> None:  # noqa: B027 - those that are not live end by themselves
        """Asks a live source to finish: it gives what is there by now, and then None. Others need not care."""

    def close(self) -> None:  # noqa: B027 - not all hold anything
        """Lets go of what is open. May be called twice."""
