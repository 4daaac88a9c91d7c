"""Rows put one behind the other and cut into sequences of exactly so many tokens, wherever that falls.

Where they are cut is told in `lazyshard.plan.splitting`. Here is what a restart needs of it. A sequence may end in the
middle of a row; its position is then the place before the source row, or shuffled block, that this row was made of,
with how many rows of it are published, in part the last one, and how many tokens of that::

    source rows        a      b      c    ...
    rows made of them  aaaa   bbbbb  cccc
    sequences of 6     `--------'`--------'
    positions          before b, 1 row with 2 tokens | before c, 1 row with 3 tokens

A BOS or EOS of a row counts among its tokens. So rows before that place are done with, and what the next run makes from
there on is compared with a digest of the rows that are begun.

Memory: the rows of which a sequence is made, and what is made of one source row or block more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format import EncodedRow
from lazyshard.plan.sequence_tokens import INPUT_IDS, cut_tokens
from lazyshard.plan.splitting import BEGINNING, Cut, SplitSequence, cut_after, split_documents, split_rest
from lazyshard_producer.configuration.settings import SplitSettings
from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.blocks import MadeRow
from lazyshard_producer.rows.book import Book, Spot
from lazyshard_producer.rows.feed import Batch
from lazyshard_producer.rows.recipe import Line
from lazyshard_producer.rows.refusals import locate
from lazyshard_producer.rows.token_rows import document_of, write_tokens
from lazyshard_producer.rows.unit import BegunUnit
from lazyshard_producer.sources.source import Place

_MOST: Final = 64
"""Sequences that are made at a time: of a book there are thousands."""


class _Unit:
    """What was made of a source row, or of a block of them.

    Args:
        made: the rows.
        of: of how many source rows, by number of the source.
        spots: the places before and after these.
    """

    def __init__(self, made: Sequence[MadeRow], of: Mapping[int, int], spots: tuple[Spot, Spot]) -> None:
        self.made = made
        self.of = of
        self.before, self.after = spots
        self._digest = xxhash.xxh3_64()
        self._digested = 0

    def position(self, book: Book, row: int, offset: int) -> RunPosition:
        """Returns the position before a token of one of its rows; asked for none before the one of the last call."""
        skip = row + (offset > 0)
        if not skip:
            return book.position(self.before)
        for one in self.made[self._digested : skip]:
            self._digest.update(one.data)
        self._digested = skip
        unit = tuple(self.of.get(source, 0) for source in range(len(book.mixer.names)))
        return book.position(self.before, skip=skip, cut=offset, unit=unit, skipped=self._digest.hexdigest())


class _Document(NamedTuple):
    """A row of which not all tokens are published.

    Attributes:
        unit: to which it belongs.
        row: its number there.
        place: where it comes from.
        tokens: its own, by name.
        framed: how many these are, its BOS and EOS included.
    """

    unit: _Unit
    row: int
    place: Place
    tokens: Mapping[str, npt.NDArray[Any]]
    framed: int


class _Made(NamedTuple):
    """A sequence.

    Attributes:
        line: as it is published.
        tokens: how many it has.
        place: where the first row in it comes from.
        end: the unit in which it ends, the row of that and the token before which it does; row and token are None
            where that is behind all of the unit.
    """

    line: Line
    tokens: int
    place: Place
    end: tuple[_Unit, int, int] | tuple[_Unit, None, None]


class _CutBatch:
    """Sequences."""

    checked = True

    def __init__(self, book: Book, made: Sequence[_Made]) -> None:
        self.lines: Sequence[Line | RowInvalid] = [one.line for one in made]
        self.tokens: Sequence[int] | None = [one.tokens for one in made]
        self._book = book
        self._made = made

    def position(self, index: int) -> RunPosition:
        unit, row, offset = self._made[index].end
        if row is None or offset is None:
            return self._book.position(unit.after)
        return unit.position(self._book, row, offset)

    def refuse(self, index: int, error: RowInvalid) -> None:
        self._book.refusals.take(error, self.place(index), self.lines[index])

    def place(self, index: int) -> Place:
        return self._made[index].place


class Splitter:
    """Collects rows and cuts them.

    Args:
        book: makes positions.
        settings: how.
        arrays: whether sequences hold arrays, as encoded rows do.
        follows: whether a sequence is published that these follow.
        begun: the unit with which to begin, if a part of it is published.
        cut: tokens that are published of the last of its rows that is; 0 for all of that.
        warn: is told what is odd.
    """

    def __init__(
        self,
        book: Book,
        settings: SplitSettings,
        *,
        arrays: bool,
        follows: bool,
        begun: BegunUnit | None,
        cut: int,
        warn: Callable[[str], None],
    ) -> None:
        self._book = book
        self._settings = settings
        self._rule = settings.rule
        self._arrays = arrays
        self._follows = follows
        self._begun = begun
        self._cut = cut
        self._warn = warn
        self._documents: list[_Document] = []
        self._at = BEGINNING
        self._left = 0  # tokens from there on
        self._last: _Unit | None = None

    @property
    def source_rows_left(self) -> int | None:
        """Source rows still to come of the unit with which the run has begun; None where it is not in one."""
        return None if self._begun is None else self._begun.rows

    def add(self, made: Sequence[MadeRow], of: Mapping[int, int], spots: tuple[Spot, Spot]) -> Iterator[Batch]:
        """Takes what was made of a source row or of a block of them, and yields the sequences that it fills.

        Args:
            made: the rows, as `read_document` gives them.
            of: how many source rows these are, by number of the source.
            spots: the places before and after them.

        Raises:
            SourceRefused: the unit with which the run has begun comes out otherwise than it was published.
            RowInvalid: some rows of a sequence have labels, and others have none.
        """
        unit = self._last = _Unit(made, of, spots)
        added = [self._document(unit, row) for row in range(len(made))]
        if self._begun is not None:
            self._at = self._go_on(self._begun, added)
            self._left -= sum(one.framed for one in added[: self._at.document]) + self._at.offset
        self._documents += added
        self._left += sum(one.framed for one in added)
        if self._left < self._rule.size + self._rule.overlap - self._rule.every_bos:
            return
        sequences, at = split_documents(self._lengths(), self._rule, self._at)
        for first in range(0, len(sequences), _MOST):
            yield _CutBatch(
                self._book, [self._make(one, cut_after(one, self._rule)) for one in sequences[first : first + _MOST]]
            )
        self._documents = self._documents[at.document :]
        self._at = Cut(0, at.offset)
        self._left = sum(one.framed for one in self._documents) - at.offset

    def rest(self) -> Batch | None:
        """Returns the tokens that fill no sequence as a shorter one, at the end of the sources; None if there are none.

        Raises: as `add`.
        """
        if self._begun is not None:
            self._lose(self._begun)
        sequence = split_rest(self._lengths(), self._rule, self._at, begun=self._follows)
        if sequence is None:
            return None
        assert self._last is not None
        batch = _CutBatch(self._book, [self._make(sequence, Cut(len(self._documents), 0))])
        self._documents, self._at, self._left = [], BEGINNING, 0
        return batch

    def _document(self, unit: _Unit, row: int) -> _Document:
        made = unit.made[row]
        assert isinstance(made.line, EncodedRow)
        framed = made.tokens + self._rule.bos + self._rule.eos
        return _Document(unit, row, made.place, document_of(made.line), framed)

    def _lengths(self) -> list[int]:
        frame = self._rule.bos + self._rule.eos
        return [one.framed - frame for one in self._documents]

    def _go_on(self, begun: BegunUnit, added: Sequence[_Document]) -> Cut:
        """Returns where in these documents to go on, in the unit of which a part is published."""
        if begun.find(row.data for row in (added[0].unit.made if added else ())):
            at = Cut(begun.skip - 1, self._cut) if self._cut else Cut(begun.skip, 0)
            if not self._cut or self._cut < added[at.document].framed:
                self._begun = None
                return at
        self._lose(begun)
        return BEGINNING

    def _lose(self, begun: BegunUnit) -> None:
        """Goes on with new rows in the place of those of the unit, if they come from an input that is a new one.

        Raises:
            SourceRefused: they come from another source, which must give the same rows as before.
        """
        if not begun.new:
            raise begun.refuse()
        self._warn(
            f"{', '.join(begun.names)}: goes on with new rows; what is not published of the last {begun.rows} that "
            f"were read before is lost"
        )
        self._begun = None
        self._follows = False

    def _make(self, sequence: SplitSequence, end: Cut) -> _Made:
        settings, first = self._settings, self._documents[sequence.pieces[0].document]
        documents = {piece.document: self._documents[piece.document].tokens for piece in sequence.pieces}
        other = next((number for number, tokens in documents.items() if tokens.keys() != first.tokens.keys()), None)
        try:
            tokens = cut_tokens(
                sequence,
                documents,
                bos=settings.bos,
                eos=settings.eos,
                every_bos=settings.every_bos,
                every_eos=settings.every_eos,
            )
        except ValueError as cause:
            # Whoever leaves a row out moves all tokens behind it, so that is no choice.
            reason = (
                f"--split: {cause}, and this is the first that differs from the one before; give all labels, or none"
            )
            place = first.place if other is None else self._documents[other].place
            raise locate(RowInvalid(f"not a row: {reason}", reason=reason), place) from cause
        count = len(tokens[INPUT_IDS])
        self._follows = True
        return _Made(write_tokens(tokens, count, arrays=self._arrays), count, first.place, self._end(end))

    def _end(self, cut: Cut) -> tuple[_Unit, int, int] | tuple[_Unit, None, None]:
        assert self._last is not None
        document, offset = cut
        if document < len(self._documents) and offset == self._documents[document].framed:
            document, offset = document + 1, 0
        if document == len(self._documents):
            return self._last, None, None
        return self._documents[document].unit, self._documents[document].row, offset
