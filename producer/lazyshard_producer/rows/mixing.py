"""The order of the rows of a run: sources one after another, or mixed by weights.

Mixed, row after row comes from the source that lags most behind its share (`lazyshard.plan.blend`). Nothing depends on
time: a source that has nothing at the moment is waited for. When one has met its end, the shares are counted anew. A
start in the middle of a unit (see `RunPosition`) first gives the rows of which that was made, in the order of then. A
source that was finished and has grown comes back once that shows; within a unit only when there is nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazyshard.plan.blend import next_stream, shares
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.opening import source_size
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
    """Rows of one source that follow each other: of what it gave, those from index `first` on.

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
    """A source, opened at `entry` (None: its start); of `rows`, which it gave last, [0, next) of `stop` were given out.

    `position` is where it stands after these.
    """

    def __init__(self, entry: dict[str, Any] | None, size: int | None) -> None:
        self.entry = entry
        self.source: Source | None = None
        self.rows = Rows()
        self.next = self.stop = 0
        self.is_empty = True
        self.position: Position = None
        self._known: tuple[Position, dict[str, Any] | None] = (None, entry)
        self._progress: tuple[int, int | None, int] = (0, size, 0)
        self.read_before = self.read_after = 0  # bytes, without and with those of `rows`

    def entry_at(self, position: Position) -> dict[str, Any] | None:
        """Returns the entry of a position, None for a source that is not begun. Raises as `Source.entry` does."""
        # By identity: a position that has not moved is the same object. Of a live source an entry also makes durable
        # what lies behind the position, so it is asked each time.
        if position is None:
            return self.entry
        if self.source is not None and (self.source.live or self._known[0] is not position):
            self._known = (position, self.source.entry(position))
        return self._known[1]

    def progress(self) -> tuple[int, int | None, int]:
        """Returns (bytes given out, bytes there are, blank lines skipped)."""
        if self.source is None:
            return self._progress
        read, there = self.source.progress
        if self.stop > self.next:
            # Of rows that were read and not given out yet only their share counts.
            read = self.read_before + (read - self.read_before) * self.next // self.stop
        return read, there, self.source.blank

    def close(self) -> None:
        if self.source is not None:
            self._progress = self.progress()
            self.source.close()
            self.source = None


@dataclass(eq=False)
class Mixer:
    """Gives the rows of all sources in the run's order, by their shares; without weights one after another.

    `block` is how many rows a unit has, 0 for one: where sources that have grown come back. `ahead`: positions are
    asked for rows behind those read last, so a source at its end stays open.
    """

    settings: Settings
    start: RunPosition
    open_source: Callable[[int, dict[str, Any] | None], Source]
    block: int
    ahead: bool
    watchdog: Watchdog
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        """Opens the sources where they are mixed: one that cannot be read is refused before anything is published."""
        position, sources = self.start, self.settings.sources
        self.names = [plain_name(source.path) for source in sources]
        self._weights = [source.weight for source in sources if source.weight is not None] or None
        self._ending = False
        self._waiting: int | None = None
        self._inputs = [_Input(entry, source_size(one)) for entry, one in zip(position.sources, sources, strict=True)]
        self._in_unit = 0  # rows since its start
        self._again: list[int] | None = None  # rows of each source to come of the unit
        self._added = range(0)  # sources that were not there when the unit was begun
        nothing = [False] * len(sources)
        weights, finished = self._weights, list(position.finished) or nothing
        if weights is None and not position.skip:
            finished = nothing
        self._unsure = [index for index, was in enumerate(finished) if was]  # may have grown
        if position.skip:
            weights, self._again = position.recipe.get("weights"), list(position.unit)
            self._added = range(len(sources if weights is None else weights), len(sources))
            finished = [done or index in self._added for index, done in enumerate(finished)]
        self._set_shares(weights, position.drawn or [0] * len(sources), finished)
        if self._weights is not None:
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
            if not self._active:
                if not self._unsure:
                    return None
                if not self._come_back():
                    return self._nothing(self._unsure[0])
                continue
            index = self._active[0] if self._alone else next_stream(self._shares, self._drawn, self._active)
            one = self._inputs[index]
            if one.next == one.stop and not self._fill(index):
                if self._finished[index]:
                    continue
                return self._nothing(index)
            if self._again is None or self._again[index]:
                return self._take(index)
            # It was at its end here when the unit was begun, and has grown since.
            self._set_finished(index, True)
            self._unsure.append(index)

    def position(self, counts: Mapping[str, Any]) -> MixPosition:
        """Returns where all sources stand after the last span, with so much counted up to there."""
        each, again = tuple(one.position for one in self._inputs), self._again is not None
        if self._in_force is None:
            return MixPosition(each, (), (), again, counts)
        return MixPosition(each, tuple(self._drawn), tuple(self._told_finished()), again, counts)

    def entries(self, position: MixPosition) -> tuple[dict[str, Any] | None, ...]:
        """Returns the entry of each source, as seals keep it. Does I/O."""
        return tuple(one.entry_at(at) for one, at in zip(self._inputs, position.each, strict=True))

    def wait(self, seconds: float) -> str:
        """Waits until the source that had nothing may have more, so many seconds at the most; says what for."""
        source = None if self._waiting is None else self._inputs[self._waiting].source
        if source is None:
            return ""
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
        read, there, blank = zip(*(one.progress() for one in self._inputs), strict=True)
        return sum(read), None if None in there else sum(there), sum(blank)

    def close(self) -> None:
        """Closes all sources that are open."""
        for one in self._inputs:
            one.close()

    def _set_shares(self, weights: Sequence[float] | None, drawn: Sequence[int], finished: Sequence[bool]) -> None:
        """Sets by which weights (None: by their order) the sources that are not finished take turns, and from where."""
        self._in_force, self._drawn, self._finished = weights, list(drawn), list(finished)
        self._active = [index for index, done in enumerate(finished) if not done]
        self._alone = weights is None or len(self._active) == 1
        if weights is not None and self._active:
            normal = iter(shares([weights[index] for index in self._active]))
            self._shares = [0.0 if done else next(normal) for done in finished]

    def _set_finished(self, index: int, done: bool) -> None:
        """Notes that a source has met its end, or has more rows after all: all shares are counted anew."""
        self._finished[index] = done
        self._set_shares(self._in_force, [0] * len(self._drawn), self._finished)

    def _nothing(self, index: int) -> SourceSpan:
        self._waiting = index
        return SourceSpan(index, Rows(), 0, (), self.position({}))

    def _told_finished(self) -> list[bool]:
        """Returns whether the end of each source was met. Those added stay out of a unit that was begun before."""
        added = self._added if self._again is not None else ()
        return [done and index not in added for index, done in enumerate(self._finished)]

    def _leave_unit(self) -> None:
        """Goes on behind the unit: with the weights of now, and with all sources."""
        drawn = self._drawn if self._weights == self._in_force else [0] * len(self._drawn)
        finished = self._told_finished()
        if self._weights is None or self._in_force is None:
            # As at any other start: those that are at their end show it in turn.
            finished, self._unsure = [False] * len(finished), []
        self._set_shares(self._weights, drawn, finished)
        self._again = None

    def _come_back(self) -> bool:
        """Has the first source come back of those that were finished and have grown; False if that cannot be told."""
        if self._again is None:
            return self._look_again(self._unsure[0])
        back = next(index for index, left in enumerate(self._again) if left)
        self._unsure.remove(back)
        self._set_finished(back, False)
        return True

    def _look_again(self, index: int) -> bool:
        """Looks whether a source that was finished has grown; returns False if that cannot be told yet."""
        one = self._inputs[index]
        ended = one.next == one.stop and not self._read(index)
        if ended or one.stop:
            self._unsure.remove(index)
        if not ended and one.stop:
            self._set_finished(index, False)
        return ended or one.stop > 0

    def _take(self, index: int) -> SourceSpan:
        """Moves past the rows that follow each other: as many as are at hand, and as it is the source's turn."""
        one = self._inputs[index]
        before, first, most = self.position({}), one.next, one.stop - one.next
        if self.settings.rate is not None:
            # So finely `totals` tells how far it is.
            most = min(most, max(1, int(self.settings.rate)))
        if self._again is not None:
            most = min(most, self._again[index])
        elif self._unsure and self.block:
            most = min(most, self.block - self._in_unit)
        taken = most if self._alone else 1
        self._drawn[index] += taken
        while taken < most and next_stream(self._shares, self._drawn, self._active) == index:
            taken += 1
            self._drawn[index] += 1
        if self._again is not None:
            self._again[index] -= taken
        elif self.block:
            self._in_unit = (self._in_unit + taken) % self.block
        one.next += taken
        one.position = one.rows.position(one.next - 1)
        lines = one.rows.lines
        return SourceSpan(index, one.rows, first, lines if taken == len(lines) else lines[first : one.next], before)

    def _fill(self, index: int) -> bool:
        """Reads on in a source; returns whether there is a row, and notes where its end is met."""
        one = self._inputs[index]
        if self._read(index):
            return one.stop > 0
        if one.is_empty and one.entry is None:
            self.warn(f"{self.names[index]}: holds no rows")
        self._set_finished(index, True)
        if self._again is not None:
            self._again[index] = 0
        return False

    def _read(self, index: int) -> bool:
        """Holds the next rows of a source, none where there are none now; returns False where it is at its end."""
        one = self._inputs[index]
        self.watchdog.ask(lambda: f"reading {self.names[index]}")
        try:
            source = self._opened(index)
            rows = source.read()
        finally:
            self.watchdog.answered()
        if rows is not None:
            one.rows, one.next, one.stop = rows, 0, len(rows.lines)
            one.is_empty &= not rows.lines
            one.read_before, one.read_after = one.read_after, source.progress[0]
            return True
        one.position = source.reached
        if not self.ahead:
            one.entry_at(one.position)
            one.close()
        return False

    def _opened(self, index: int) -> Source:
        one = self._inputs[index]
        source = one.source
        if source is None:
            source = one.source = self.open_source(index, one.entry)
            if one.position is None:
                one.position = source.start
            one.read_before = one.read_after = source.progress[0]
            if self._ending:
                source.end()
        return source
