"""Rows on their way to the stream: what gives them, and the plain case, in which they are published as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lazyshard.errors import RowInvalid
from lazyshard.format import EncodedRow
from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.book import Book
from lazyshard_producer.rows.standing import Piece
from lazyshard_producer.sources.source import Place


class Batch(Protocol):
    """Rows to be published, in order; none where there are none at the moment.

    Attributes:
        lines: the rows; those of `checked` batches are lines of JSON that we have written or read before, or encoded
            rows.
        checked: whether they are known to be rows.
        tokens: the length of each in tokens, None where not measured.
    """

    lines: Sequence[bytes | EncodedRow | RowInvalid]
    checked: bool
    tokens: Sequence[int] | None

    def position(self, index: int) -> RunPosition:
        """Returns the position after `lines[index]`; all before it must have been dealt with. Does I/O."""

    def refuse(self, index: int, error: RowInvalid) -> None:
        """Refuses `lines[index]`, or ends the run; see `Refusals.take`."""

    def place(self, index: int) -> Place:
        """Returns where `lines[index]` comes from, or about where."""


class Feed(Protocol):
    """Gives the rows to be published."""

    def read(self) -> Batch | None:
        """Returns the next rows; None when all is given. Raises as `Mixer.read` and `Refusals.take` do."""

    def here(self) -> RunPosition:
        """Returns the position after all that was given. Does I/O."""


class _PlainBatch:
    """Rows of one source as they are."""

    checked = False

    def __init__(self, book: Book, piece: Piece) -> None:
        self.lines: Sequence[bytes | EncodedRow | RowInvalid] = piece.lines
        self.tokens: Sequence[int] | None = None
        self._book = book
        self._piece = piece
        self._before = book.rows

    def position(self, index: int) -> RunPosition:
        self._book.rows = self._before + index + 1
        return self._book.position(self._book.spot(self._piece.after(index)))

    def refuse(self, index: int, error: RowInvalid) -> None:
        self._book.refusals.take(error, self.place(index), self.lines[index])

    def place(self, index: int) -> Place:
        return self._piece.place(index)


class PlainFeed:
    """Rows as they are."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._read = book.rows

    def read(self) -> Batch | None:
        """Returns the next rows of one source."""
        piece = self._book.mixer.read()
        self._book.rows = self._read
        if piece is None:
            return None
        self._read += len(piece.lines)
        return _PlainBatch(self._book, piece)

    def here(self) -> RunPosition:
        """Returns the position after all that was given."""
        self._book.rows = self._read
        return self._book.position(self._book.spot(self._book.mixer.standing()))
