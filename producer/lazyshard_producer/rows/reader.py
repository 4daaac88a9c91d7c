"""Readers give the rows to be published in batches, and the position after each row, which goes into the seals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format.batch import EncodedRow
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.mixing import Mixer, MixPosition
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.sources.source import RowOrigin
from lazyshard_producer.wording import count

Line: TypeAlias = bytes | EncodedRow  # A row as it is published: a line of JSON with its newline, or an encoded row


def line_size(line: Line) -> int:
    """Returns the bytes of a row, its newline and its arrays included."""
    return len(line) if isinstance(line, bytes) else len(line.line) + len(line.arrays)


@dataclass(eq=False)
class RowStats:
    """What was counted of the rows of a run from `start` on, and the positions that seals keep.

    In a unit that was begun before, these keep the recipe of then.
    """

    mixer: Mixer
    refusals: Refusals
    start: RunPosition
    recipe: dict[str, Any]
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        """Begins with the counts of earlier runs."""
        self.rows, self.duplicate, self.blocks = self.start.rows, self.start.duplicate, self.start.blocks
        self._warned: set[str] = set()

    def count_duplicate(self, place: RowOrigin) -> None:
        """Counts a row that names a key twice; says so of the first of each source."""
        self.duplicate += 1
        if place.file not in self._warned:
            self._warned.add(place.file)
            self.warn(
                f"{place.file}:{place.line}: a key is named twice in one object (readers keep one of the values); "
                f"further such rows of this source are only counted"
            )

    def counts(self) -> dict[str, int]:
        """Returns the counts of this moment, by their names in `RunPosition`."""
        own = {"rows": self.rows, "duplicate": self.duplicate, "blocks": self.blocks}
        return own | {"refused": self.refusals.count, "quarantine_bytes": self.refusals.kept_bytes}

    def here(self) -> MixPosition:
        """Returns the place after all that the mixer gave."""
        return self.mixer.position(self.counts())

    def reached(self) -> RunPosition:
        """Returns the position after all that a reader gave, which has nothing more. Does I/O."""
        return self.position(self.here())

    def position(self, at: MixPosition, **unit: Any) -> RunPosition:
        """Returns what a seal keeps of a place; `unit` are the fields of one that is begun there. Does I/O."""
        self.refusals.sync()
        recipe = self.start.recipe if at.again else self.recipe
        entries = self.mixer.entries(at)
        return RunPosition(sources=entries, drawn=at.drawn, finished=at.finished, recipe=recipe, **unit, **at.counts)


@dataclass(slots=True)
class Batch:
    """Rows to be published, in order; none where there are none at the moment. `tokens`: None where not measured.

    `after` returns the position after the row of an index. `checked`: they are known to be rows, having been written or
    read by us before.
    """

    stats: RowStats
    lines: Sequence[Line | RowInvalid]
    place: Callable[[int], RowOrigin]
    after: Callable[[int], RunPosition]
    tokens: Sequence[int] | None = None
    checked: bool = True

    def position(self, index: int) -> RunPosition:
        """Returns the position after `lines[index]`; all before it must have been dealt with. Does I/O."""
        return self.after(index)

    def refuse(self, index: int, error: RowInvalid) -> None:
        """Refuses `lines[index]`, or ends the run; see `Refusals.take`."""
        self.stats.refusals.take(error, self.place(index), self.lines[index])


class Reader:
    """Gives the rows to be published: those of the sources as they are."""

    def __init__(self, stats: RowStats) -> None:
        self._stats = stats

    def read(self) -> Batch | None:
        """Returns the next rows; None when all is given. Raises as `Mixer.read` and `Refusals.take` do."""
        stats, span = self._stats, self._stats.mixer.read()
        if span is None:
            return None
        before = stats.rows
        stats.rows += len(span.lines)

        def position(index: int) -> RunPosition:
            return stats.position(span.after(index, {**stats.counts(), "rows": before + index + 1}))

        return Batch(stats, span.lines, span.place, position, checked=False)


class MadeRow(NamedTuple):
    """A row that was made of others, where (the first of) these come from, and its length, 0 where not measured.

    `squares` is the square of that; of a pack the sum of those of its samples, none of which attends to another.
    """

    line: Line
    place: RowOrigin
    tokens: int = 0
    squares: int = 0

    @property
    def data(self) -> bytes:
        """What tells it from others."""
        return self.line if isinstance(self.line, bytes) else self.line.data


class Unit:
    """A source row of which several are made, or a block of rows that are shuffled or packed: what is `made` of it.

    It is made of so many rows `of` each source, after the place `before`.
    """

    def __init__(self, stats: RowStats, made: Sequence[MadeRow], before: MixPosition, of: Mapping[int, int]) -> None:
        self.made, self.before, self.of = made, before, of
        self._stats = stats
        self._digest = xxhash.xxh3_64()
        self._digested = 0

    def position(self, skip: int, *, lead: int = 0, cut: int = 0) -> RunPosition:
        """Returns the position after so many of its rows; never fewer than in the last call. See `RunPosition`."""
        if not skip:
            return self._stats.position(self.before)
        for row in self.made[self._digested : skip]:
            self._digest.update(row.data)
        self._digested = skip
        unit = tuple(self.of.get(source, 0) for source in range(len(self._stats.mixer.names)))
        digest = self._digest.hexdigest()
        return self._stats.position(self.before, skip=skip, lead=lead, cut=cut, unit=unit, skipped=digest)


class BegunUnit(NamedTuple):
    """A unit of which an earlier run has published a part: of these sources, of so many of their rows.

    Of the rows made of them `skip` are published; `digest` is their XXH3. `new`: all its sources are inputs that are
    taken as new ones, so that other rows than before are no fault.
    """

    names: str
    rows: int
    skip: int
    digest: str
    new: bool
    warn: Callable[[str], None]

    def find(self, rows: Iterable[bytes]) -> bool:
        """Returns whether these rows begin with those that are published. Raises SourceRefused as `lose`."""
        digest, found = xxhash.xxh3_64(), 0
        for found, line in enumerate(islice(rows, self.skip), 1):  # noqa: B007
            digest.update(line)
        if found == self.skip and digest.hexdigest() == self.digest:
            return True
        self.lose()
        return False

    def lose(self) -> None:
        """Lets other rows come than those that are published, if they are of inputs that are taken as new ones."""
        if self.new:
            self.warn(
                f"{self.names}: goes on with new rows; what is not published of the last {self.rows} that were read "
                f"before is lost"
            )
            return
        raise SourceRefused(
            f"{self.names}: the last chunk ends within the rows that are made of {count(self.rows, 'row')} of it, and "
            f"the first {self.skip} of them come out otherwise now than they were published: the source was changed in "
            f"a part that was read, or a function does not give the same rows for the same row; put back what it was, "
            f"or choose another --out",
            file=self.names,
            expected=f"XXH3 {self.digest} of the first {count(self.skip, 'row')}",
            actual="another one",
        )
