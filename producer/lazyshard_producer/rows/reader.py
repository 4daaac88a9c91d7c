"""Readers give the rows to be published in batches, and the position after each row, which goes into the seals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

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


class RowStats:
    """What was counted of the rows of a run, and the positions that seals keep.

    In a unit that was begun before, these keep the recipe of then.
    """

    def __init__(
        self,
        mixer: Mixer,
        refusals: Refusals,
        start: RunPosition,
        recipe: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self.mixer = mixer
        self.refusals = refusals
        self.rows, self.duplicate, self.blocks = start.rows, start.duplicate, start.blocks
        self._recipe = recipe
        self._recipe_before = start.recipe
        self._warn = warn
        self._warned: set[str] = set()

    def count_duplicate(self, place: RowOrigin) -> None:
        """Counts a row that names a key twice; says so of the first of each source."""
        self.duplicate += 1
        if place.file not in self._warned:
            self._warned.add(place.file)
            self._warn(
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
        recipe = self._recipe_before if at.again else self._recipe
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


class Reader(Protocol):
    """Gives the rows to be published."""

    def read(self) -> Batch | None:
        """Returns the next rows; None when all is given. Raises as `Mixer.read` and `Refusals.take` do."""


class PlainReader:
    """Gives the rows of the sources as they are."""

    def __init__(self, stats: RowStats) -> None:
        self._stats = stats
        self._read = stats.rows

    def read(self) -> Batch | None:
        """Returns the next rows of one source."""
        stats = self._stats
        piece = stats.mixer.read()
        before = stats.rows = self._read
        if piece is None:
            return None
        self._read += len(piece.lines)

        def position(index: int) -> RunPosition:
            stats.rows = before + index + 1
            return stats.position(piece.after(index, stats.counts()))

        return Batch(stats, piece.lines, piece.place, position, checked=False)


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


def line_size(line: Line) -> int:
    """Returns the bytes of a row, its newline and its arrays included."""
    return len(line) if isinstance(line, bytes) else len(line.line) + len(line.arrays)


class Unit:
    """A source row of which several are made, or a block of rows that are shuffled or packed: what is made of it."""

    def __init__(self, stats: RowStats, made: Sequence[MadeRow], before: MixPosition, of: Mapping[int, int]) -> None:
        self.made: Final = made
        self._stats = stats
        self._before = before
        self._of = of
        self._digest = xxhash.xxh3_64()
        self._digested = 0

    def position(self, skip: int, *, lead: int = 0, cut: int = 0) -> RunPosition:
        """Returns the position after so many of its rows; never fewer than in the last call. See `RunPosition`."""
        if not skip:
            return self._stats.position(self._before)
        for row in self.made[self._digested : skip]:
            self._digest.update(row.data)
        self._digested = skip
        unit = tuple(self._of.get(source, 0) for source in range(len(self._stats.mixer.names)))
        begun: dict[str, Any] = {"unit": unit, "skipped": self._digest.hexdigest()}
        return self._stats.position(self._before, skip=skip, lead=lead, cut=cut, **begun)


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunUnit:
    """A unit of which an earlier run has published a part: of these sources, of so many of their rows.

    Of the rows made of them `skip` are published; `digest` is their XXH3. `new`: all its sources are inputs that are
    taken as new ones, so that other rows than before are no fault.
    """

    names: Sequence[str]
    rows: int
    skip: int
    digest: str
    new: bool
    warn: Callable[[str], None]

    def find(self, rows: Iterable[bytes]) -> bool:
        """Returns whether these rows begin with those that are published. Raises SourceRefused as `lose`."""
        digest = xxhash.xxh3_64()
        left = self.skip
        for line in islice(rows, self.skip):
            digest.update(line)
            left -= 1
        if not left and digest.hexdigest() == self.digest:
            return True
        self.lose()
        return False

    def lose(self) -> None:
        """Lets other rows come than those that are published, if they are of inputs that are taken as new ones."""
        names = ", ".join(self.names)
        if self.new:
            self.warn(
                f"{names}: goes on with new rows; what is not published of the last {self.rows} that were read before "
                f"is lost"
            )
            return
        raise SourceRefused(
            f"{names}: the last chunk ends within the rows that are made of {count(self.rows, 'row')} of it, and the "
            f"first {self.skip} of them come out otherwise now than they were published: the source was changed in a "
            f"part that was read, or a function does not give the same rows for the same row; put back what it was, or "
            f"choose another --out",
            file=names,
            expected=f"XXH3 {self.digest} of the first {count(self.skip, 'row')}",
            actual="another one",
        )
