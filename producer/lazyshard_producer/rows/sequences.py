"""What is made of many rows together: shuffled or packed in blocks, dealt by cost, or cut into sequences.

A block ends after so many source rows. A stripe, a chunk for each rank, ends after so many rows that were made of them:
where several are made of one source row, it may end in the middle of those. Then the next one begins with that source
row, behind its `lead`. Where rows are packed, a block of source rows stands in the place of a source row::

    source rows        a    b    c    d    e ...
    rows made of them  1 2  3 4  5 6  7 8  9 ...
    stripes of 5       `---------' `---------'
    positions          before a, n skipped | before c, 1 + n skipped, the first of them as lead

A sequence of exactly so many tokens may end in the middle of a row. Its position is the place before the source row, or
block, that this row was made of, with how many rows of it are published, and how many tokens of the last one. A BOS or
EOS of a row counts among its tokens::

    source rows        a      b      c    ...
    rows made of them  aaaa   bbbbb  cccc
    sequences of 6     `--------'`--------'
    positions          before b, 1 row with 2 tokens | before c, 1 row with 3 tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy.typing as npt

from lazyshard.format.arrays import MAX_ROW_BYTES
from lazyshard.format.batch import EncodedRow, encode_encoded_pack, encode_pack
from lazyshard.plan.balance import Balance, Cost
from lazyshard.plan.sequences import INPUT_IDS, cut_tokens
from lazyshard.plan.shuffle import permutation
from lazyshard.plan.splitting import BEGINNING, Cut, SplitSequence, cut_after, pack_samples, split_documents, split_rest
from lazyshard_producer.configuration.settings import SplitSettings
from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.encoding import document_of, write_tokens
from lazyshard_producer.rows.mixing import MixPosition
from lazyshard_producer.rows.reader import Batch, BegunUnit, Line, MadeRow, RowStats, Unit, line_size
from lazyshard_producer.rows.recipe import MadeOfRow
from lazyshard_producer.rows.refusals import locate
from lazyshard_producer.sources.source import RowOrigin, bad_row

_PACK_BYTES: Final = MAX_ROW_BYTES // 2
"""The rows of a pack hold no more in all, so that readers take it, whose text is longer than theirs."""

_MOST: Final = 64  # sequences that are made at a time: of a book there are thousands


def made_rows(made: MadeOfRow, place: RowOrigin) -> list[MadeRow]:
    """Returns the rows that were made of the source row at a place."""
    if not made.tokens:  # nobody asks for them
        return [MadeRow(line, place) for line in made.lines]
    pairs = zip(made.lines, made.tokens, strict=True)
    return [MadeRow(line, place, tokens, tokens * tokens) for line, tokens in pairs]


class Blocks(NamedTuple):
    """Blocks of so many source rows (the last one has fewer), and what is published of the rows of one, by its number.

    A block has ended before by `most_bytes` of the rows made of it; None for any number.
    """

    rows: int
    most_bytes: int | None
    arrange: Callable[[Sequence[MadeRow], int], Sequence[MadeRow]]


def shuffling(rows: int, seed: int) -> Blocks:
    """Returns blocks that are shuffled; the seed and a block's number give its order."""

    def shuffle(rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
        # Element i of the permutation is where row i goes.
        to = permutation(len(rows), seed, number).tolist()
        return [row for _, row in sorted(zip(to, rows, strict=True), key=itemgetter(0))]

    return Blocks(rows, None, shuffle)


def packing(rows: int, most_bytes: int, capacity: int) -> Blocks:
    """Returns blocks of which packs are made, of at most so many tokens each; see `lazyshard.plan.splitting`."""

    def pack(rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
        packs = pack_samples([row.tokens for row in rows], capacity)
        return [_packed(part) for pack in packs for part in _parts([rows[index] for index in pack], _PACK_BYTES)]

    return Blocks(rows, most_bytes, pack)


def _parts(rows: Sequence[MadeRow], most: int) -> Iterator[Sequence[MadeRow]]:
    """Yields the rows in as few parts as hold at most so many bytes, in order; each part holds a row at least."""
    first = held = 0
    for index, row in enumerate(rows):
        if held + line_size(row.line) > most and index > first:
            yield rows[first:index]
            first, held = index, 0
        held += line_size(row.line)
    yield rows[first:]


def _packed(rows: Sequence[MadeRow]) -> MadeRow:
    lengths = [row.tokens for row in rows]
    plain = [row.line for row in rows if isinstance(row.line, bytes)]
    encoded = [row.line for row in rows if isinstance(row.line, EncodedRow)]
    # All are of one kind.
    line: Line = encode_encoded_pack(encoded, lengths) if encoded else encode_pack(plain, lengths)
    return MadeRow(line, rows[0].place, sum(lengths), sum(row.squares for row in rows))


class _Start(NamedTuple):
    """Where a stripe begins: behind the `lead`, which was made of the first source row or block after the place."""

    at: MixPosition
    lead: Sequence[MadeRow] = ()
    of: Mapping[int, int] = {}


class Stripes:
    """Collects rows until they fill a stripe, and deals them by cost, after so many samples.

    `begun` is the unit with which to begin, if a part of it is published; `lead` are the rows made of its first source
    row or block that belong to the unit before.
    """

    def __init__(
        self, stats: RowStats, balance: Balance, cost: Cost, *, samples: int, begun: BegunUnit | None, lead: int
    ) -> None:
        self._stats = stats
        self._balance = balance
        self._cost = cost
        self._begun = begun
        self._lead = lead
        self._first = samples - (0 if begun is None else begun.skip - lead)
        self._start: _Start | None = None
        self._last: MixPosition | None = None
        self._of: Counter[int] = Counter()  # source rows of which `_rows` are made, by source
        self._rows: list[MadeRow] = []

    @property
    def source_rows_left(self) -> int | None:
        """Source rows still to come of the unit with which the run has begun; None where it is not in one."""
        return None if self._begun is None else self._begun.rows - self._of.total()

    def add(
        self, made: Sequence[MadeRow], of: Mapping[int, int], before: MixPosition, after: MixPosition
    ) -> Iterator[Batch]:
        """Takes what was made of so many rows `of` each source; yields the stripes that it fills."""
        self._last = after
        if self._start is None:
            self._start = _Start(before)
        self._rows += made
        self._of.update(of)

        def fill(count: int, skipped: int = 0) -> Batch:
            # What is left of the rows added last begins the next stripe.
            left = len(self._rows) - count
            following = _Start(before, made[: len(made) - left], of) if left else _Start(after)
            return self._deal(count, following, skipped)

        if self._begun is not None:
            if self._of.total() < self._begun.rows:
                return
            published = self._go_on(self._begun)
            # Where none is published but the lead, the stripe is not collected yet.
            if published:
                yield fill(min(len(self._rows), self._balance.room(self._first)), published)
        while len(self._rows) >= (room := self._balance.room(self._first)):
            yield fill(room)

    def rest(self) -> Batch | None:
        """Returns the rows that fill no stripe, dealt as well as they can be."""
        if self._begun is not None:
            self._begun.lose()
            self._lost(self._begun)
        if not self._rows:
            return None
        assert self._last is not None
        return self._deal(len(self._rows), _Start(self._last), 0)

    def _go_on(self, begun: BegunUnit) -> int:
        """Goes on in the unit of which a part is published; returns how many rows of the stripe are."""
        lead, published = self._lead, begun.skip - self._lead
        of_before = self._rows[:lead]
        own = self._rows[lead : lead + self._balance.room(self._first)]
        dealt = (own[index] for index in self._order(own)) if published else ()
        if not begun.find(row.data for row in chain(of_before, dealt)):
            self._lost(begun)
            return 0
        assert self._start is not None
        self._begun = None
        self._rows, self._start = self._rows[lead:], self._start._replace(lead=of_before)
        return published

    def _lost(self, begun: BegunUnit) -> None:
        self._begun = None
        self._first += begun.skip - self._lead

    def _deal(self, count: int, following: _Start, skipped: int) -> Batch:
        assert self._start is not None
        stats, lead, own = self._stats, self._start.lead, self._rows[:count]
        dealt = [own[index] for index in self._order(own)]
        unit = Unit(stats, [*lead, *dealt], self._start.at, self._of)
        rows = dealt[skipped:]

        def position(index: int) -> RunPosition:
            if index == len(rows) - 1:
                first = len(following.lead)
                return Unit(stats, following.lead, following.at, following.of).position(first, lead=first)
            return unit.position(len(lead) + skipped + index + 1, lead=len(lead))

        self._first += count
        self._rows, self._of = self._rows[count:], Counter(following.of)
        # Sources may come back before the next row: where a stripe begins with it, that is told with it.
        self._start = following if self._rows else None
        lines, tokens = [row.line for row in rows], [row.tokens for row in rows]
        return Batch(stats, lines, lambda index: rows[index].place, position, tokens=tokens)

    def _order(self, rows: Sequence[MadeRow]) -> list[int]:
        costs = self._cost.of_packs([row.tokens for row in rows], [float(row.squares) for row in rows])
        found: list[int] = self._balance.order(costs, self._first).tolist()
        return found


class _OpenDocument(NamedTuple):
    """A row of which not all tokens are published, by its number in a unit; `framed`: its BOS and EOS included."""

    unit: Unit
    row: int
    place: RowOrigin
    tokens: Mapping[str, npt.NDArray[Any]]
    framed: int


_Sequence = tuple[Line, int, RowOrigin, Callable[[], RunPosition]]
"""A sequence as it is published, its tokens, where its first row comes from, and the position after it."""


class Splitter:
    """Puts rows one behind the other and cuts them. They are as `read_document` gives them.

    `arrays`: sequences hold arrays, as encoded rows do. `follows`: a sequence is published that these follow. `cut`:
    tokens that are published of the last row of `begun` that is; 0 for all of that.
    """

    def __init__(
        self,
        stats: RowStats,
        settings: SplitSettings,
        *,
        arrays: bool,
        follows: bool,
        begun: BegunUnit | None,
        cut: int,
    ) -> None:
        self._stats = stats
        self._settings = settings
        self._rule = settings.rule
        self._frame = self._rule.bos + self._rule.eos
        self._arrays = arrays
        self._follows = follows
        self._begun = begun
        self._cut = cut
        self._documents: list[_OpenDocument] = []
        self._at = BEGINNING
        self._left = 0  # tokens from there on
        self._last: MixPosition | None = None  # behind all of them

    @property
    def source_rows_left(self) -> int | None:
        """Source rows still to come of the unit with which the run has begun; None where it is not in one."""
        return None if self._begun is None else self._begun.rows

    def add(
        self, made: Sequence[MadeRow], of: Mapping[int, int], before: MixPosition, after: MixPosition
    ) -> Iterator[Batch]:
        """Yields the sequences that more rows fill; see `Stripes.add`."""
        unit = Unit(self._stats, made, before, of)
        self._last = after
        added = [
            _OpenDocument(unit, number, row.place, document_of(row.line), row.tokens + self._frame)
            for number, row in enumerate(made)
            if isinstance(row.line, EncodedRow)  # all of them are
        ]
        if self._begun is not None:
            self._at = self._go_on(self._begun, added)
            self._left -= sum(one.framed for one in added[: self._at.document]) + self._at.offset
        self._documents += added
        self._left += sum(one.framed for one in added)
        if self._left < self._rule.size + self._rule.overlap - self._rule.every_bos:
            return
        sequences, at = split_documents(self._lengths(), self._rule, self._at)
        for first in range(0, len(sequences), _MOST):
            yield self._batch([self._make(one, cut_after(one, self._rule)) for one in sequences[first : first + _MOST]])
        self._documents = self._documents[at.document :]
        self._at = Cut(0, at.offset)
        self._left = sum(one.framed for one in self._documents) - at.offset

    def rest(self) -> Batch | None:
        """Returns the tokens that fill no sequence as a shorter one."""
        if self._begun is not None:
            self._begun.lose()
            self._begun, self._follows = None, False
        sequence = split_rest(self._lengths(), self._rule, self._at, begun=self._follows)
        if sequence is None:
            return None
        batch = self._batch([self._make(sequence, Cut(len(self._documents), 0))])
        self._documents, self._at, self._left = [], BEGINNING, 0
        return batch

    def _batch(self, made: Sequence[_Sequence]) -> Batch:
        lines, tokens, places, ends = zip(*made, strict=True)
        return Batch(self._stats, lines, places.__getitem__, lambda index: ends[index](), tokens)

    def _lengths(self) -> list[int]:
        return [one.framed - self._frame for one in self._documents]

    def _go_on(self, begun: BegunUnit, added: Sequence[_OpenDocument]) -> Cut:
        self._begun = None
        if begun.find(row.data for row in (added[0].unit.made if added else ())):
            at = Cut(begun.skip - 1, self._cut) if self._cut else Cut(begun.skip, 0)
            if not self._cut or self._cut < added[at.document].framed:
                return at
            begun.lose()
        self._follows = False
        return BEGINNING

    def _make(self, sequence: SplitSequence, end: Cut) -> _Sequence:
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
            place = first.place if other is None else self._documents[other].place
            hint = "and this is the first that differs from the one before; give all labels, or none"
            raise locate(bad_row(f"--split: {cause}, {hint}"), place) from cause
        count = len(tokens[INPUT_IDS])
        self._follows = True
        return write_tokens(tokens, count, arrays=self._arrays), count, first.place, self._end(end)

    def _end(self, cut: Cut) -> Callable[[], RunPosition]:
        document, offset = cut
        if document < len(self._documents) and offset == self._documents[document].framed:
            document, offset = document + 1, 0
        if document == len(self._documents):
            assert self._last is not None
            return partial(self._stats.position, self._last)
        one = self._documents[document]
        return partial(one.unit.position, one.row + (offset > 0), cut=offset)
