"""What a source of rows is to the rest of the command.

A source gives rows in pieces, and can say of any row that it gave where it stood after it. That place comes in two
forms: a *mark*, cheap, opaque, for every row; and a *position*, a JSON object for the seals, made from a mark once a
chunk, from which a later run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from lazyshard.errors import RowInvalid
from lazyshard.format.encoded_row import EncodedRow

Mark: TypeAlias = Any
"""Where a source stands between two rows. Only the source that gave it can read it."""


class Place(NamedTuple):
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


class Rows(Protocol):
    """Rows that were read in one go, in order."""

    @property
    def lines(self) -> Sequence[bytes | EncodedRow | RowInvalid]:
        """The rows: each the bytes of one line, with or without its line end, nothing checked; or why there is none.

        One that comes with arrays, or of which the length in tokens is known, is an `EncodedRow`.

        A `RowInvalid` stands for a row that the source itself could not give (longer than `max_row_bytes`), so that
        the rows after it can still be had. Empty: there is nothing at the moment.
        """

    def mark(self, index: int) -> Mark:
        """Returns where the source stands after the row of this index. May take O(index)."""

    def place(self, index: int) -> Place:
        """Returns where the row of this index comes from. May take O(index)."""


class Source(Protocol):
    """Gives rows in order. One thread, one process.

    Opened at a position or at its start, and by then it has checked that what was read before is still there:
    `SourceRefused` is raised otherwise.
    """

    @property
    def name(self) -> str:
        """How positions, messages and metrics call it: the path as given, in plain text."""

    @property
    def live(self) -> bool:
        """Whether it may have nothing at the moment and more later."""

    @property
    def start(self) -> Mark:
        """Where it stood when it was opened."""

    @property
    def reached(self) -> Mark:
        """Where it stands after all that `read` gave, and after the blank lines behind that as far as they are read."""

    @property
    def blank(self) -> int:
        """Blank lines skipped so far, those of earlier runs included."""

    @property
    def progress(self) -> tuple[int, int | None]:
        """(bytes read, bytes there are) for what is shown, earlier runs included; None where nobody can know."""

    def read(self) -> Rows | None:
        """Returns the next rows: up to about 1 MiB of them; at least one row, or none where there are none *now*.

        None: finished, for ever. Never blocks for longer than the device takes; see `wait`.

        Raises:
            SourceRefused: it cannot be read on.
        """

    def wait(self, seconds: float) -> None:
        """Returns when there may be more rows, or when so many seconds have passed; at once if it is not `live`."""

    def waits_for(self) -> str:
        """Returns in words what a live source waits for: ``new lines in DIR (12 files open)``."""

    def position(self, mark: Mark) -> dict[str, Any]:
        """Returns the position at a mark that this object gave: a JSON object with at least `kind` and `path`.

        Does I/O where that is needed to know the source again; what the position relies on is durable when it returns.
        Called about once a chunk, with marks that never go back.

        Raises:
            SourceRefused: what was read is no longer there.
        """

    def end(self) -> None:
        """Asks a live source to finish: it gives what is there by now, and then None. Others need not care."""

    def close(self) -> None:
        """Lets go of what is open. May be called twice."""
