"""Rows dealt by cost: collected until they fill a stripe, a chunk for each rank, and put into the order of that.

Which order that is, is told in `lazyshard.plan.balance`. Here is what a restart needs of it: a stripe is a unit, as a
shuffled block is in `making`, and its position is the place before its first source row, with how many of its rows are
published. But it ends after so many rows, not after so many source rows: where several rows are made of one, it may end
in the middle of those. Then the next one begins with that source row, behind its `lead`::

    source rows        a    b    c    d    e ...
    rows made of them  1 2  3 4  5 6  7 8  9 ...
    stripes of 5       `---------' `---------'
    positions          before a, n skipped | before c, 1 + n skipped, the first of them as lead

Where rows are packed, a block of source rows stands in the place of a source row, and the packs made of it in that of
the rows made of one.

Memory: the rows of a stripe, and what is made of one source row or block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.plan.balance import Balance, Cost
from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.blocks import MadeRow
from lazyshard_producer.rows.book import Book, Spot
from lazyshard_producer.rows.feed import Batch
from lazyshard_producer.rows.recipe import Line
from lazyshard_producer.rows.unit import BegunUnit
from lazyshard_producer.sources.source import Place


class _Start(NamedTuple):
    """Where a stripe begins: behind the `lead`, which was made of the first source row or block after the spot."""

    spot: Spot
    lead: Sequence[MadeRow]
    unit: Mapping[int, int]

    def position(self, book: Book, dealt: int, digest: xxhash.xxh3_64) -> RunPosition:
        """Returns the position after so many rows that were dealt, this being the digest of the lead and of them."""
        skip = len(self.lead) + dealt
        if not skip:
            return book.position(self.spot)
        unit = tuple(self.unit.get(source, 0) for source in range(len(book.mixer.names)))
        return book.position(self.spot, skip=skip, lead=len(self.lead), unit=unit, skipped=digest.hexdigest())


class _Added(NamedTuple):
    """Rows made of a source row or of a block of them, of how many of which sources, and the places around these."""

    made: Sequence[MadeRow]
    of: Mapping[int, int]
    before: Spot
    after: Spot


class _DealtBatch:
    """The rows of a stripe in their order, without the first `skipped`.

    Args:
        book: makes positions.
        rows: all of them.
        skipped: see above.
        start: where the stripe begins, with the source rows that it is made of.
        following: where the next one begins.
    """

    checked = True

    def __init__(self, book: Book, rows: Sequence[MadeRow], skipped: int, start: _Start, following: _Start) -> None:
        self._rows = rows[skipped:]
        self.lines: Sequence[Line | RowInvalid] = [row.line for row in self._rows]
        self.tokens: Sequence[int] | None = [row.tokens for row in self._rows]
        self._book = book
        self._dealt = rows
        self._skipped = skipped
        self._start = start
        self._following = following
        self._digest = _digest(start.lead)
        self._digested = 0

    def position(self, index: int) -> RunPosition:
        if index == len(self.lines) - 1:
            return self._following.position(self._book, 0, _digest(self._following.lead))
        stop = self._skipped + index + 1
        for row in self._dealt[self._digested : stop]:
            self._digest.update(row.data)
        self._digested = stop
        return self._start.position(self._book, stop, self._digest)

    def refuse(self, index: int, error: RowInvalid) -> None:
        self._book.refusals.take(error, self.place(index), self.lines[index])

    def place(self, index: int) -> Place:
        return self._rows[index].place


class Stripes:
    """Collects rows and deals them.

    Args:
        book: makes positions.
        balance: the order.
        cost: of rows, by their lengths.
        samples: rows that are published.
        begun: the unit with which to begin, if a part of it is published.
        lead: rows made of its first source row or block that belong to the unit before.
        warn: is told what is odd.
    """

    def __init__(
        self,
        book: Book,
        balance: Balance,
        cost: Cost,
        *,
        samples: int,
        begun: BegunUnit | None,
        lead: int,
        warn: Callable[[str], None],
    ) -> None:
        self._book = book
        self._balance = balance
        self._cost = cost
        self._begun = begun
        self._lead = lead
        self._warn = warn
        self._first = samples - (0 if begun is None else begun.skip - lead)
        self._start: _Start | None = None
        self._last: Spot | None = None
        self._unit: dict[int, int] = {}  # source rows of which `_rows` are made, by source
        self._rows: list[MadeRow] = []

    @property
    def source_rows_left(self) -> int | None:
        """Source rows still to come of the unit with which the run has begun; None where it is not in one."""
        return None if self._begun is None else self._begun.rows - sum(self._unit.values())

    def add(self, made: Sequence[MadeRow], of: Mapping[int, int], spots: tuple[Spot, Spot]) -> Iterator[Batch]:
        """Takes what was made of a source row or of a block of them, and yields the stripes that it fills.

        Args:
            made: the rows.
            of: how many source rows these are, by number of the source.
            spots: the places before and after them.

        Raises:
            SourceRefused: the unit with which the run has begun comes out otherwise than it was published.
        """
        before, after = spots
        self._last = after
        if self._start is None:
            self._start = _Start(before, (), {})
        self._rows += made
        for source, rows in of.items():
            self._unit[source] = self._unit.get(source, 0) + rows
        added = _Added(made, of, before, after)
        if self._begun is not None:
            if sum(self._unit.values()) < self._begun.rows:
                return
            yield from self._go_on(self._begun, added)
        while len(self._rows) >= (room := self._balance.room(self._first)):
            yield self._fill(room, added)

    def rest(self) -> Batch | None:
        """Returns the rows that fill no stripe, dealt as well as they can be, at the end of the sources.

        Raises:
            SourceRefused: as `add`.
        """
        if self._begun is not None:
            self._lose(self._begun)
        if not self._rows:
            return None
        assert self._start is not None
        assert self._last is not None
        return self._deal(len(self._rows), _Start(self._last, (), {}), 0)

    def _go_on(self, begun: BegunUnit, added: _Added) -> Iterator[Batch]:
        """Goes on in the unit of which a part is published, now that its source rows are there."""
        lead, published = self._lead, begun.skip - self._lead
        of_before = self._rows[:lead]
        own = self._rows[lead : lead + self._balance.room(self._first)]
        dealt = (own[index] for index in self._order(own)) if published else ()
        if not begun.find(row.data for row in chain(of_before, dealt)):
            self._lose(begun)
            return
        assert self._start is not None
        self._begun = None
        self._rows, self._start = self._rows[lead:], self._start._replace(lead=of_before)
        # Where none is published but the lead, the stripe is not collected yet.
        if published:
            yield self._fill(len(own), added, published)

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
        self._first += begun.skip - self._lead

    def _fill(self, count: int, added: _Added, skipped: int = 0) -> Batch:
        """Returns the batch of the first so many rows; what is left of those added last begins the next stripe."""
        left = len(self._rows) - count
        if left:
            following = _Start(added.before, added.made[: len(added.made) - left], added.of)
        else:
            following = _Start(added.after, (), {})
        return self._deal(count, following, skipped)

    def _deal(self, count: int, following: _Start, skipped: int) -> Batch:
        assert self._start is not None
        own = self._rows[:count]
        dealt = [own[index] for index in self._order(own)]
        start = self._start._replace(unit=self._unit)
        batch = _DealtBatch(self._book, dealt, skipped, start, following)
        self._first += count
        self._rows, self._unit = self._rows[count:], dict(following.unit)
        # Sources may come back before the next row: where a stripe begins with it, that is told with it.
        self._start = following if self._rows else None
        return batch

    def _order(self, rows: Sequence[MadeRow]) -> list[int]:
        costs = self._cost.of_packs([row.tokens for row in rows], [float(row.squares) for row in rows])
        found: list[int] = self._balance.order(costs, self._first).tolist()
        return found


def _digest(rows: Iterable[MadeRow]) -> xxhash.xxh3_64:
    digest = xxhash.xxh3_64()
    for row in rows:
        digest.update(row.data)
    return digest
