"""The order of the rows of a run: sources one after another, or mixed by weights.

Mixed, row after row comes from the source that lags most behind its share (`lazyshard.plan.blend`). Nothing depends on
time: a source that has nothing at the moment is waited for. When one has met its end, the shares are counted anew. A
start in the middle of a unit (see `RunPosition`) first gives the rows of which that was made, in the order of then. A
source that was finished and has grown comes back once that shows; within a unit only when there is nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lazyshard.plan.blend import next_stream, shares
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.position import RunPosition, plain_name
from lazyshard_producer.sources.source import Line, Position, RowOrigin, Rows, Source


@dataclass(frozen=True, slots=True)
class MixPosition:
    """Where all sources stand between two rows, in memory; `RowStats.position` makes what seals keep of it.

    `drawn` and `finished` are as in `RunPosition`. `again`: it is in a unit that an earlier run has begun, or at its
    end: then the weights are those of then.
    """

    each: tuple[Position, ...]
    drawn: tuple[int, ...]
    finished: tuple[bool, ...]
    again: bool
    counts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """Rows of one source that follow each other in the run: of what it gave, those from index `first` on.

    `before` is where all sources stand before them.
    """

    source: int
    rows: Rows
    first: int
    lines: Sequence[Line]
    before: MixPosition

    def place(self, index: int) -> RowOrigin:
        """Returns where `lines[index]` comes from."""
        return self.rows.place(self.first + index)

    def after(self, index: int, counts: Mapping[str, Any]) -> MixPosition:
        """Returns where all sources stand after `lines[index]`, with so much counted up to there."""
        before = self.before
        each, drawn = list(before.each), list(before.drawn)
        each[self.source] = self.rows.position(self.first + index)
        if drawn:
            drawn[self.source] += index + 1
        return MixPosition(tuple(each), tuple(drawn), before.finished, before.again, counts)


class _Input:
    """A source, opened at `entry` (None: its start), and how many of its rows were given out.

    Of `rows`, which it gave last, these are [0, next) of `stop`; `position` is where it stands after them.
    """

    def __init__(self, entry: dict[str, Any] | None, size: int | None) -> None:
        self.entry = entry
        self.source: Source | None = None
        self.rows: Rows | None = None
        self.next = 0
        self.stop = 0
        self.is_empty = True
        self.position: Position = None
        self._known: tuple[Position, dict[str, Any] | None] = (None, entry)
        self._progress: tuple[tuple[int, int | None], int] = ((0, size), 0)
        self._read_before = self._read_after = 0  # bytes, without and with those of `rows`

    def open(self, source: Source) -> None:
        self.source = source
        if self.position is None:
            self.position = source.start
        self._read_before = self._read_after = source.progress[0]

    def hold(self, rows: Rows) -> None:
        assert self.source is not None
        self.rows, self.next, self.stop = rows, 0, len(rows.lines)
        self.is_empty &= not rows.lines
        self._read_before, self._read_after = self._read_after, self.source.progress[0]

    def entry_at(self, position: Position) -> dict[str, Any] | None:
        """Returns the entry of a position, None for a source that is not begun. Raises as `Source.entry` does."""
        # By identity: positions are what a source likes, and one that has not moved is the same object. Of a live
        # source an entry also makes durable what lies behind the position, so it is asked each time.
        if self._known[0] is not position or (self.source is not None and self.source.live):
            if position is None:
                return self.entry
            assert self.source is not None
            self._known = (position, self.source.entry(position))
        return self._known[1]

    def progress(self) -> tuple[tuple[int, int | None], int]:
        """Returns ((bytes given out, bytes there are), blank lines skipped)."""
        if self.source is None:
            return self._progress
        read, there = self.source.progress
        if self.stop > self.next:
            # Of rows that were read and not given out yet only their share counts.
            read = self._read_before + (read - self._read_before) * self.next // self.stop
        return (read, there), self.source.blank

    def close(self) -> None:
        if self.source is not None:
            self._progress = self.progress()
            self.source.close()
            self.source = None


class _Turns:
    """Which source gives the next row: the first that is not finished, or by weights the one that lags most."""

    def __init__(self, weights: Sequence[float] | None, drawn: Sequence[int], finished: Sequence[bool]) -> None:
        self.weights: Final = weights
        self.drawn = list(drawn)
        self.finished = list(finished)
        self._choose()

    def next(self) -> int | None:
        if not self._active:
            return None
        return self._active[0] if self._alone else next_stream(self._shares, self.drawn, self._active)

    def take(self, index: int, most: int) -> int:
        """Counts the rows that the source in turn gives one after another; returns how many, 1 to `most`."""
        count = most if self._alone else 1
        self.drawn[index] += count
        while count < most and next_stream(self._shares, self.drawn, self._active) == index:
            count += 1
            self.drawn[index] += 1
        return count

    def set_finished(self, index: int, finished: bool) -> None:
        """Notes that a source has met its end, or has more rows after all: all shares are counted anew."""
        self.finished[index] = finished
        self.drawn = [0] * len(self.drawn)
        self._choose()

    def _choose(self) -> None:
        self._active = [index for index, finished in enumerate(self.finished) if not finished]
        self._alone = self.weights is None or len(self._active) == 1
        if self.weights is not None and self._active:
            normal = iter(shares([self.weights[index] for index in self._active]))
            self._shares = [0.0 if finished else next(normal) for finished in self.finished]


class Mixer:
    """Gives the rows of all sources in the run's order, by their shares; without weights one after another.

    `weights_before` are those with which the unit was begun in which the position is, if it is in one; `block` is how
    many rows a unit has, 0 for one: where sources that have grown come back. `ahead`: positions are asked for rows
    behind those read last, so a source at its end stays open. `most` rows are in a piece, None for all at hand: so
    finely `totals` tells how far it is. `empty` is told each source that has met its end without a single row.
    """

    def __init__(
        self,
        open_source: Callable[[int, dict[str, Any] | None], Source],
        paths: Sequence[str],
        weights: Sequence[float] | None,
        position: RunPosition,
        *,
        weights_before: Sequence[float] | None,
        block: int,
        sizes: Sequence[int | None],
        ahead: bool,
        watchdog: Watchdog,
        most: int | None = None,
        empty: Callable[[str], None],
    ) -> None:
        self.names: Final = [plain_name(path) for path in paths]
        self._open_source = open_source
        self._weights = weights
        self._block = block
        self._ahead = ahead
        self._watchdog = watchdog
        self._most = most
        self._empty = empty
        self._ending = False
        self._waiting: int | None = None
        self._inputs = [_Input(entry, size) for entry, size in zip(position.sources, sizes, strict=True)]
        self._in_unit = 0  # rows since its start
        self._again: list[int] | None = None  # rows of each source to come of the unit
        self._added = range(0)
        drawn = list(position.drawn) or [0] * len(paths)
        finished = list(position.finished) or [False] * len(paths)
        if weights is None and not position.skip:
            finished = [False] * len(paths)
        self._unsure = [index for index, was in enumerate(finished) if was]  # may have grown
        if position.skip:
            self._again = list(position.unit)
            self._added = range(len(paths if weights_before is None else weights_before), len(paths))
            finished = [done or index in self._added for index, done in enumerate(finished)]
        self._turns = _Turns(weights_before if position.skip else weights, drawn, finished)
        if weights is not None:
            # All of them: one that cannot be read is refused before anything is published.
            try:
                for index in range(len(self._inputs)):
                    self._opened(index)
            except BaseException:
                self.close()
                raise

    def read(self) -> SourceSpan | None:
        """Returns the next rows, none where there are none at the moment; None when all sources are finished."""
        self._waiting = None
        while True:
            if self._again is not None and not any(self._again):
                self._leave_unit()
            if self._again is None and not self._in_unit:
                for finished in tuple(self._unsure):
                    self._look_again(finished)
            index = self._turns.next()
            if index is None:
                if not self._unsure:
                    return None
                if not self._come_back():
                    return self._nothing(self._unsure[0])
                continue
            one = self._inputs[index]
            if one.next == one.stop and not self._fill(index):
                if self._turns.finished[index]:
                    continue
                return self._nothing(index)
            if self._again is None or self._again[index]:
                return self._take(index)
            # It was at its end here when the unit was begun, and has grown since.
            self._turns.set_finished(index, True)
            self._unsure.append(index)

    def position(self, counts: Mapping[str, Any]) -> MixPosition:
        """Returns where all sources stand after the last piece, with so much counted up to there."""
        each = tuple(one.position for one in self._inputs)
        turns, again = self._turns, self._again is not None
        if turns.weights is None:
            return MixPosition(each, (), (), again, counts)
        return MixPosition(each, tuple(turns.drawn), tuple(self._finished()), again, counts)

    def entries(self, position: MixPosition) -> tuple[dict[str, Any] | None, ...]:
        """Returns the entry of each source, as seals keep it. Does I/O."""
        return tuple(one.entry_at(at) for one, at in zip(self._inputs, position.each, strict=True))

    def wait(self, seconds: float) -> str:
        """Waits until the source that had nothing may have more, so many seconds at the most; says what for."""
        if self._waiting is None:
            return ""
        source = self._inputs[self._waiting].source
        assert source is not None
        source.wait(seconds)
        return source.waits_for()

    def end(self) -> None:
        """Asks live sources to finish with what is there."""
        self._ending = True
        for one in self._inputs:
            if one.source is not None:
                one.source.end()

    def totals(self) -> tuple[int, int | None, int]:
        """Returns (bytes read, bytes there are or None, blank lines skipped) of all sources and runs."""
        found = [one.progress() for one in self._inputs]
        sizes = [there for (_, there), _ in found if there is not None]
        there = sum(sizes) if len(sizes) == len(found) else None
        return sum(read for (read, _), _ in found), there, sum(blank for _, blank in found)

    def close(self) -> None:
        """Closes all sources that are open."""
        for one in self._inputs:
            one.close()

    def _nothing(self, index: int) -> SourceSpan:
        self._waiting = index
        rows = self._inputs[index].rows
        assert rows is not None
        return SourceSpan(index, rows, 0, (), self.position({}))

    def _finished(self) -> list[bool]:
        """Returns whether the end of each source was met. Those added stay out of a unit that was begun before."""
        added = self._added if self._again is not None else ()
        return [done and index not in added for index, done in enumerate(self._turns.finished)]

    def _leave_unit(self) -> None:
        """Goes on behind the unit: with the weights of now, and with all sources."""
        before = self._turns
        drawn = before.drawn if self._weights == before.weights else [0] * len(before.drawn)
        finished = self._finished()
        if self._weights is None or before.weights is None:
            # As at any other start: those that are at their end show it in turn.
            finished, self._unsure = [False] * len(finished), []
        self._turns = _Turns(self._weights, drawn, finished)
        self._again = None

    def _come_back(self) -> bool:
        """Has the first source come back of those that were finished and have grown; False if that cannot be told."""
        if self._again is None:
            return self._look_again(self._unsure[0])
        back = next(index for index, left in enumerate(self._again) if left)
        self._unsure.remove(back)
        self._turns.set_finished(back, False)
        return True

    def _look_again(self, index: int) -> bool:
        """Looks whether a source that was finished has grown; returns False if that cannot be told yet."""
        one = self._inputs[index]
        if one.next == one.stop and not self._read(index):
            self._unsure.remove(index)
            return True
        if one.stop:
            self._unsure.remove(index)
            self._turns.set_finished(index, False)
        return one.stop > 0

    def _take(self, index: int) -> SourceSpan:
        """Moves past the rows that follow each other: as many as are at hand, and as it is the source's turn."""
        one = self._inputs[index]
        assert one.rows is not None
        before, first, most = self.position({}), one.next, one.stop - one.next
        if self._most is not None:
            most = min(most, self._most)
        if self._again is not None:
            most = min(most, self._again[index])
        elif self._unsure and self._block:
            most = min(most, self._block - self._in_unit)
        count = self._turns.take(index, most)
        if self._again is not None:
            self._again[index] -= count
        elif self._block:
            self._in_unit = (self._in_unit + count) % self._block
        one.next += count
        one.position = one.rows.position(one.next - 1)
        lines = one.rows.lines
        return SourceSpan(index, one.rows, first, lines if count == len(lines) else lines[first : one.next], before)

    def _fill(self, index: int) -> bool:
        """Reads on in a source; returns whether there is a row, and notes where its end is met."""
        one = self._inputs[index]
        if self._read(index):
            return one.stop > 0
        if one.is_empty and one.entry is None:
            self._empty(self.names[index])
        self._turns.set_finished(index, True)
        if self._again is not None:
            self._again[index] = 0
        return False

    def _read(self, index: int) -> bool:
        """Holds the next rows of a source, none where there are none now; returns False where it is at its end."""
        one = self._inputs[index]
        self._watchdog.ask(lambda: f"reading {self.names[index]}")
        try:
            source = self._opened(index)
            rows = source.read()
        finally:
            self._watchdog.answered()
        if rows is not None:
            one.hold(rows)
            return True
        one.position = source.reached
        if not self._ahead:
            one.entry_at(one.position)
            one.close()
        return False

    def _opened(self, index: int) -> Source:
        one = self._inputs[index]
        if one.source is None:
            one.open(self._open_source(index, one.entry))
            assert one.source is not None
            if self._ending:
                one.source.end()
        return one.source
