"""Where the sources of a run stand between two rows, and the rows that come next. Values only; see `mixing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lazyshard.errors import RowInvalid
from lazyshard.format import EncodedRow
from lazyshard_producer.sources.source import Mark, Place, Rows


@dataclass(frozen=True, slots=True)
class Standing:
    """Where all sources stand between two rows; only the `Mixer` that made it can make a position of it.

    Attributes:
        marks: where each source stands.
        drawn: where sources are mixed, rows drawn from each since one of them was finished the last time; else empty.
        finished: where sources are mixed, whether the end of each was met; else empty.
        again: whether it is in a unit that an earlier run has begun, or at its end: then the weights are those of then.
    """

    marks: tuple[Mark, ...]
    drawn: tuple[int, ...]
    finished: tuple[bool, ...]
    again: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one source that follow each other in the run.

    Attributes:
        source: number of the source.
        rows: what the source gave.
        first: index there of the first of them.
        lines: these rows; none where there are none at the moment.
        before: where all sources stand before `first`.
    """

    source: int
    rows: Rows
    first: int
    lines: Sequence[bytes | EncodedRow | RowInvalid]
    before: Standing

    def place(self, index: int) -> Place:
        """Returns where `lines[index]` comes from."""
        return self.rows.place(self.first + index)

    def after(self, index: int) -> Standing:
        """Returns where all sources stand after `lines[index]`."""
        marks, drawn = list(self.before.marks), list(self.before.drawn)
        marks[self.source] = self.rows.mark(self.first + index)
        if drawn:
            drawn[self.source] += index + 1
        return replace(self.before, marks=tuple(marks), drawn=tuple(drawn))
