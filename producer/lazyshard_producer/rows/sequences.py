"""What is made of rows and of many rows together: in blocks shuffled or packed, dealt by cost, or cut into sequences.

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

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.format.arrays import MAX_ROW_BYTES
from lazyshard.format.batch import EncodedRow, encode_encoded_pack, encode_pack
from lazyshard.plan import sequences as forms
from lazyshard.plan.balance import Balance, Cost
from lazyshard.plan.sequences import INPUT_IDS, Cut, Split, SplitSequence, cut_tokens, pack_samples
from lazyshard.plan.shuffle import permutation
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.encoding import document_of, write_tokens
from lazyshard_producer.rows.mixing import MixPosition, SourceSpan
from lazyshard_producer.rows.reader import Batch, BegunUnit, Line, MadeRow, Reader, RowStats, Unit, line_size
from lazyshard_producer.rows.recipe import MadeOfRow, Maker, Workers
from lazyshard_producer.rows.refusals import locate
from lazyshard_producer.sources.source import RowOrigin, bad_row

_PACK_BYTES: Final = MAX_ROW_BYTES // 2
"""The rows of a pack hold no more in all, so that readers take it, whose text is longer than theirs."""

_MOST: Final = 64  # sequences that are made at a time: of a book there are thousands


class Blocks(NamedTuple):
    """Blocks of so many source rows (the last one has fewer), and what is published of the rows of one, by its number.

    A block has ended before by `most_bytes` of the rows made of it; None for any number.
    """

    rows: int
    most_bytes: int | None
    arrange: Callable[[Sequence[MadeRow], int], Sequence[MadeRow]]


def shuffle(seed: int, rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
    """Returns the rows of a block in another order, which the seed and its number give."""
    # Element i of the permutation is where row i goes.
    return [rows[index] for index in np.argsort(permutation(len(rows), seed, number)).tolist()]


def pack(capacity: int, rows: Sequence[MadeRow], number: int) -> list[MadeRow]:
    """Returns packs of rows, of at most so many tokens each; see `lazyshard.plan.sequences`."""
    packs = pack_samples([row.tokens for row in rows], capacity)
    return [_packed(part) for found in packs for part in _parts([rows[index] for index in found])]


def _parts(rows: Sequence[MadeRow]) -> Iterator[Sequence[MadeRow]]:
    """Yields the rows in as few parts as hold at most so many bytes, in order; each part holds a row at least."""
    first = held = 0
    for index, row in enumerate(rows):
        if held + line_size(row.line) > _PACK_BYTES and index > first:
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


class Units:
    """Gives what is made of each unit by itself.

    `begun` is the unit with which to begin, if a part of it is published. `measured`: rows are told with their lengths.
    """

    def __init__(self, stats: RowStats, begun: BegunUnit | None, *, measured: bool) -> None:
        self._stats, self._begun, self._measured = stats, begun, measured
        self._of: Counter[int] = Counter()  # source rows that were taken of a unit that is not complete, by source

    @property
    def source_rows_left(self) -> int | None:
        """Source rows still to come of the unit with which the run has begun; None where it is not in one."""
        return None if self._begun is None else self._begun.rows - self._of.total()

    def add(self, unit: Unit, after: MixPosition) -> Iterator[Batch]:
        """Takes what was made of more source rows; yields what can be published now. Sources stand `after` it."""
        begun, self._begun = self._begun, None
        skipped = begun.skip if begun is not None and begun.find(row.data for row in unit.made) else 0
        if last := len(unit.made) - skipped:

            def position(index: int) -> RunPosition:
                return self._stats.position(after) if index == last - 1 else unit.position(skipped + index + 1)

            yield self.batch(unit.made[skipped:], position)

    def rest(self) -> Batch | None:
        """Returns what is left when all source rows are read."""
        if self._begun is not None:
            self._begun.lose()
            self._lost(self._begun)
        return None

    def _lost(self, begun: BegunUnit) -> None:
        self._begun = None

    def batch(self, rows: Sequence[MadeRow], position: Callable[[int], RunPosition]) -> Batch:
        """Returns rows that are to be published, with the position after each."""
        tokens = [row.tokens for row in rows] if self._measured else None
        return Batch(self._stats, [row.line for row in rows], lambda index: rows[index].place, position, tokens)


class MakingReader(Reader):
    """Gives rows made of rows, in blocks if asked for; `units` says what becomes of each, or of each block."""

    def __init__(
        self, stats: RowStats, makers: Maker | Workers, units: Units, blocks: Blocks | None, watchdog: Watchdog
    ) -> None:
        super().__init__(stats)
        self._makers, self._units, self._blocks, self._watchdog = makers, units, blocks, watchdog
        self._rows: list[MadeRow] = []
        self._of: dict[int, int] = {}  # source rows of which `_rows` are made, by source
        self._bytes = 0  # of `_rows`
        self._before = self._last = stats.here()  # before and after these
        self._batches = self._make()

    def read(self) -> Batch | None:
        """Returns what was made of the next source row, or the next block."""
        return next(self._batches, None)

    def _make(self) -> Iterator[Batch]:
        for made in self._work():
            nothing = True
            for of in made:
                for batch in self._add(*of):
                    nothing = False
                    yield batch
            if nothing:  # for now; signals are looked at in between
                yield self._units.batch((), lambda index: self._stats.reached())
        if self._of:
            yield from self._end_block()
        if (rest := self._units.rest()) is not None:
            yield rest

    def _work(self) -> Iterator[list[tuple[SourceSpan, int, MadeOfRow]]]:
        """Yields what was made of source rows that were sent off together, in order; none where that is not ready."""
        mixer, makers = self._stats.mixer, self._makers
        number = self._stats.rows  # source rows in work, and before them
        under_way: deque[tuple[SourceSpan, int, Any]] = deque()
        span, first = mixer.read(), 0
        while span is not None or under_way:
            while span is not None and len(under_way) < makers.most:
                if first == len(span.lines):
                    span, first = mixer.read(), 0
                    if span is None or not span.lines:
                        break
                stop = min(len(span.lines), first + makers.rows)
                under_way.append((span, first, self._submit(span, first, stop, number)))
                number += stop - first
                first = stop
            made = makers.result(under_way[0][2], 0.1) if under_way else None
            if made is None:
                yield []
                continue
            of, at, _ = under_way.popleft()
            yield [(of, index, row) for index, row in enumerate(made, at)]

    def _submit(self, span: SourceSpan, first: int, stop: int, number: int) -> Any:
        def told() -> str:
            place = span.place(first)
            return f"the functions that make rows, at {place.file}:{place.line}"

        self._watchdog.ask(told)
        try:
            return self._makers.submit(span.lines[first:stop], number)
        finally:
            self._watchdog.answered()

    def _add(self, span: SourceSpan, index: int, made: MadeOfRow) -> Iterator[Batch]:
        """Deals with one source row, as the batches made of those before were asked for."""
        stats, place, blocks = self._stats, span.place(index), self._blocks
        if not self._of:
            # Sources may have come back since the row before.
            self._before = self._last if index else replace(span.before, counts=self._last.counts)
        stats.rows += 1
        if made.duplicate:
            stats.count_duplicate(place)
        if made.refused is not None:
            stats.refusals.take(made.refused, place, span.lines[index])
        self._last = span.after(index, stats.counts())
        lengths = made.tokens or [0] * len(made.lines)  # none where nobody asks for them
        self._rows += [MadeRow(line, place, n, n * n) for line, n in zip(made.lines, lengths, strict=True)]
        self._bytes += sum(map(line_size, made.lines))
        self._of[span.source] = self._of.get(span.source, 0) + 1
        if blocks is not None:
            left = self._units.source_rows_left
            rows = blocks.rows if left is None else min(left, blocks.rows)
            if sum(self._of.values()) < rows and (blocks.most_bytes is None or self._bytes < blocks.most_bytes):
                return
        yield from self._end_block()

    def _end_block(self) -> Iterator[Batch]:
        stats, rows = self._stats, self._rows
        if self._blocks is not None:
            rows = list(self._blocks.arrange(rows, stats.blocks))
            stats.blocks += 1
            self._last = replace(self._last, counts={**self._last.counts, "blocks": stats.blocks})
        unit = Unit(stats, rows, self._before, self._of)
        self._rows, self._of, self._bytes = [], {}, 0
        return self._units.add(unit, self._last)


class Stripes(Units):
    """Collects rows until they fill a stripe, and deals them by cost, after so many samples.

    `lead` are the rows made of the first source row or block of `begun` that belong to the unit before.
    """

    def __init__(
        self, stats: RowStats, begun: BegunUnit | None, balance: Balance, cost: Cost, *, samples: int, lead: int
    ) -> None:
        super().__init__(stats, begun, measured=True)
        self._balance, self._cost, self._lead = balance, cost, lead
        self._first = samples - (0 if begun is None else begun.skip - lead)
        self._start: Unit | None = None  # behind the rows of this the stripe begins: its lead
        self._last: MixPosition | None = None
        self._rows: list[MadeRow] = []

    def add(self, unit: Unit, after: MixPosition) -> Iterator[Batch]:
        """Yields the stripes that more rows fill; see `Units.add`."""
        self._last, skipped = after, 0
        if self._start is None:
            self._start = Unit(self._stats, (), unit.before, {})
        self._rows += unit.made
        self._of.update(unit.of)
        if self._begun is not None:
            if self._of.total() < self._begun.rows:
                return
            # Where none is published but the lead, the stripe is not collected yet.
            skipped = self._go_on(self._begun)
        while skipped or len(self._rows) >= self._balance.room(self._first):
            taken = min(len(self._rows), self._balance.room(self._first))
            # What is left of the rows added last begins the next stripe.
            left = len(self._rows) - taken
            lead = unit.made[: len(unit.made) - left]
            following = Unit(self._stats, lead, unit.before, unit.of) if left else Unit(self._stats, (), after, {})
            yield self._deal(taken, following, skipped)
            skipped = 0

    def rest(self) -> Batch | None:
        """Returns the rows that fill no stripe, dealt as well as they can be."""
        super().rest()
        if not self._rows:
            return None
        assert self._last is not None
        return self._deal(len(self._rows), Unit(self._stats, (), self._last, {}), 0)

    def _go_on(self, begun: BegunUnit) -> int:
        """Goes on in the unit of which a part is published; returns how many rows of the stripe are."""
        lead, published = self._lead, begun.skip - self._lead
        own = self._rows[lead : lead + self._balance.room(self._first)]
        dealt = (own[index] for index in self._order(own)) if published else ()
        if not begun.find(row.data for row in chain(self._rows[:lead], dealt)):
            self._lost(begun)
            return 0
        assert self._start is not None
        self._begun = None
        self._start.made, self._rows = self._rows[:lead], self._rows[lead:]
        return published

    def _lost(self, begun: BegunUnit) -> None:
        super()._lost(begun)
        self._first += begun.skip - self._lead

    def _deal(self, taken: int, following: Unit, skipped: int) -> Batch:
        assert self._start is not None
        lead, own = self._start.made, self._rows[:taken]
        dealt = [own[index] for index in self._order(own)]
        unit = Unit(self._stats, [*lead, *dealt], self._start.before, self._of)
        last = len(dealt) - skipped - 1

        def position(index: int) -> RunPosition:
            if index == last:
                return following.position(len(following.made), lead=len(following.made))
            return unit.position(len(lead) + skipped + index + 1, lead=len(lead))

        self._first += taken
        self._rows, self._of = self._rows[taken:], Counter(following.of)
        # Sources may come back before the next row: where a stripe begins with it, that is told with it.
        self._start = following if self._rows else None
        return self.batch(dealt[skipped:], position)

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


class Splitter(Units):
    """Puts rows one behind the other and cuts them. They are as `read_document` gives them.

    `arrays`: sequences hold arrays, as encoded rows do. `follows`: a sequence is published that these follow. `cut`:
    tokens that are published of the last row of `begun` that is; 0 for all of that.
    """

    def __init__(
        self, stats: RowStats, begun: BegunUnit | None, split: Split, *, arrays: bool, follows: bool, cut: int
    ) -> None:
        super().__init__(stats, begun, measured=True)
        self._split = split
        (self._frame,) = split.framed([0])
        self._arrays, self._follows, self._cut = arrays, follows, cut
        self._documents: list[_OpenDocument] = []
        self._offset = 0  # tokens of the first of them that are published
        self._left = 0  # tokens of them that are not
        self._last: MixPosition | None = None  # behind all of them

    def add(self, unit: Unit, after: MixPosition) -> Iterator[Batch]:
        """Yields the sequences that more rows fill; see `Units.add`."""
        self._last, split = after, self._split
        added = [
            _OpenDocument(unit, number, row.place, document_of(row.line), row.tokens + self._frame)
            for number, row in enumerate(unit.made)
            if isinstance(row.line, EncodedRow)  # all of them are
        ]
        if self._begun is not None:
            added = self._go_on(self._begun, unit, added)
            self._left = -self._offset
        self._documents += added
        self._left += sum(one.framed for one in added)
        if self._left < split.size + split.overlap - (split.every_bos is not None):
            return
        sequences, at = forms.split_documents(self._lengths(), split, Cut(0, self._offset))
        for first in range(0, len(sequences), _MOST):
            yield self._cut_all([(one, forms.cut_after(one, split)) for one in sequences[first : first + _MOST]])
        self._documents, self._offset = self._documents[at.document :], at.offset
        self._left = sum(one.framed for one in self._documents) - at.offset

    def rest(self) -> Batch | None:
        """Returns the tokens that fill no sequence as a shorter one."""
        super().rest()
        sequence = forms.split_rest(self._lengths(), self._split, Cut(0, self._offset), begun=self._follows)
        if sequence is None:
            return None
        batch = self._cut_all([(sequence, Cut(len(self._documents), 0))])
        self._documents, self._offset, self._left = [], 0, 0
        return batch

    def _lost(self, begun: BegunUnit) -> None:
        super()._lost(begun)
        self._follows = False

    def _lengths(self) -> list[int]:
        return [one.framed - self._frame for one in self._documents]

    def _go_on(self, begun: BegunUnit, unit: Unit, added: list[_OpenDocument]) -> list[_OpenDocument]:
        """Returns the rows of the unit of which a part is published that are not, or not as a whole."""
        if begun.find(row.data for row in unit.made):
            self._begun = None
            if not self._cut:
                return added[begun.skip :]
            if self._cut < added[begun.skip - 1].framed:
                self._offset = self._cut
                return added[begun.skip - 1 :]
            begun.lose()
        self._lost(begun)
        return added

    def _cut_all(self, sequences: Sequence[tuple[SplitSequence, Cut]]) -> Batch:
        rows = [self._make(sequence) for sequence, _ in sequences]
        ends = [self._end(end) for _, end in sequences]
        return self.batch(rows, lambda index: ends[index]())

    def _make(self, sequence: SplitSequence) -> MadeRow:
        first = self._documents[sequence.pieces[0].document]
        documents = {piece.document: self._documents[piece.document].tokens for piece in sequence.pieces}
        try:
            tokens = cut_tokens(sequence, documents, self._split)
        except ValueError as cause:
            # Whoever leaves a row out moves all tokens behind it, so that is no choice.
            other = next((number for number, one in documents.items() if one.keys() != first.tokens.keys()), None)
            place = first.place if other is None else self._documents[other].place
            hint = "and this is the first that differs from the one before; give all labels, or none"
            raise locate(bad_row(f"--split: {cause}, {hint}"), place) from cause
        self._follows, length = True, len(tokens[INPUT_IDS])
        return MadeRow(write_tokens(tokens, length, arrays=self._arrays), first.place, length)

    def _end(self, cut: Cut) -> Callable[[], RunPosition]:
        document, offset = cut
        if document < len(self._documents) and offset == self._documents[document].framed:
            document, offset = document + 1, 0
        if document == len(self._documents):
            assert self._last is not None
            return partial(self._stats.position, self._last)
        one = self._documents[document]
        return partial(one.unit.position, one.row + (offset > 0), cut=offset)
