"""The rows of all sources in the order of the run, one after another or mixed by weights, and the position after each.

Nothing depends on time: a source that has nothing at the moment is waited for. When one has met its end, the shares are
counted anew. A start in the middle of a unit first gives the rows of which that was made, in the order of then. A
source that was finished and has grown comes back once that shows; within a unit only when there is nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format.batch import EncodedRow
from lazyshard.plan.blend import next_stream, shares
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.opening import open_source, source_size
from lazyshard_producer.position import RunPosition, plain_name
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.sources.source import Context, Position, RowOrigin, Rows, Source

Line: TypeAlias = bytes | EncodedRow  # A row as it is published: a line of JSON with its newline, or an encoded row


def by_length(settings: Settings) -> bool:
    """Whether rows go together by their lengths."""
    return settings.pack > 0 or settings.balance is not None


class MixPosition(NamedTuple):
    """Where all sources stand between two rows, in memory; `Mixer.position` makes what seals keep of it.

    `again`: it is in a unit that an earlier run has begun, or at its end.
    """

    each: tuple[Position, ...]
    drawn: tuple[int, ...]
    finished: tuple[bool, ...]
    again: bool
    counts: Mapping[str, Any]


class SourceSpan(NamedTuple):
    """Rows of one source that follow each other, of `rows` from `first` on; `before` is where all sources stand."""

    source: int
    rows: Rows
    first: int
    lines: Sequence[Line | RowInvalid]
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
    """A source; of `rows`, which it gave last, [0, next) of `stop` were given out. `position` is where it is then."""

    def __init__(self, entry: dict[str, Any] | None, size: int | None) -> None:
        self.entry = entry
        self.source: Source | None = None
        self.rows = Rows()
        self.next = self.stop = 0
        self.is_empty = True
        self.position: Position = None
        self._known: tuple[Position, dict[str, Any] | None] = (None, entry)
        self._progress: tuple[int, int | None, int] = (0, size, 0)
        self.read_before = 0  # bytes, without those of `rows`

    def entry_at(self, position: Position) -> dict[str, Any] | None:
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

    Counts what becomes of them, those of earlier runs included, and makes the positions that seals keep.

    `ahead`: positions are asked for rows behind those read last, so a source at its end stays open. By `recipe` rows
    are made of those from `start` on.
    """

    settings: Settings
    start: RunPosition
    context: Context
    ahead: bool
    watchdog: Watchdog
    warn: Callable[[str], None]
    refusals: Refusals
    recipe: dict[str, Any]

    def __post_init__(self) -> None:
        """Opens the sources where they are mixed: one that cannot be read is refused before anything is published."""
        position, sources = self.start, self.settings.sources
        self.rows, self.duplicate, self.blocks = position.rows, position.duplicate, position.blocks
        self._warned: set[str] = set()
        self.names = [plain_name(source.path) for source in sources]
        self._weights = [source.weight for source in sources if source.weight is not None] or None
        # Rows of a unit, 0 for one: where sources that have grown come back. How many source rows a stripe or a pack
        # buffer takes shows only as they are made.
        self._block = 1 << 62 if by_length(self.settings) else self.settings.shuffle
        self._ending = False
        self._waiting: int | None = None
        self._inputs = [_Input(entry, source_size(one)) for entry, one in zip(position.sources, sources, strict=True)]
        self._in_unit = 0  # rows since its start
        self._again: list[int] | None = None  # rows of each source to come of the unit
        self._added = range(0)  # sources that were not there when the unit was begun
        weights, finished = self._weights, list(position.finished)
        if not finished or (weights is None and not position.skip):
            finished = [False] * len(sources)
        self._unsure = [index for index, was in enumerate(finished) if was]  # may have grown
        if position.skip:
            weights, self._again = position.recipe.get("weights"), list(position.unit)
            self._added = range(len(sources if weights is None else weights), len(sources))
        self._set_shares(weights, position.drawn or [0] * len(sources), finished)
        if self._weights is not None:
            with contextlib.ExitStack() as stack:
                stack.callback(self.close)
                for one in range(len(sources)):
                    self._opened(one)
                stack.pop_all()

    def read(self) -> SourceSpan | None:
        """Returns the next rows, none where there are none at the moment; None when all sources are finished."""
        self._waiting = None
        while True:
            if self._again is not None and not any(self._again):
                self._leave_unit()
            if self._again is None and not self._in_unit:
                for finished in tuple(self._unsure):
                    self._look_again(finished)
            if not self._active and not self._unsure:
                return None
            if not self._active and self._again is None:
                if not self._look_again(self._unsure[0]):
                    return self._nothing(self._unsure[0])
            elif not self._active:
                # The first comes back of those that were finished and have grown.
                back = next(index for index, left in enumerate(self._again or ()) if left)
                self._unsure.remove(back)
                self._set_finished(back, False)
            else:
                index = self._active[0] if self._alone else next_stream(self._shares, self._drawn, self._active)
                one = self._inputs[index]
                if one.next == one.stop and not self._fill(index):
                    if not self._finished[index]:
                        return self._nothing(index)
                elif self._again is None or self._again[index]:
                    return self._take(index)
                else:
                    # It was at its end here when the unit was begun, and has grown since.
                    self._set_finished(index, True)
                    self._unsure.append(index)

    def here(self, counts: Mapping[str, Any]) -> MixPosition:
        """Returns where all sources stand after the last span, with so much counted up to there."""
        mixed = self._in_force is not None
        drawn, finished = (tuple(self._drawn), tuple(self._finished)) if mixed else ((), ())
        each = tuple(one.position for one in self._inputs)
        return MixPosition(each, drawn, finished, self._again is not None, counts)

    def position(self, at: MixPosition, **unit: Any) -> RunPosition:
        """Returns what a seal keeps of a place; `unit` are the fields of one that is begun there. Does I/O."""
        self.refusals.sync()
        # In a unit that was begun before the recipe of then counts.
        recipe = self.start.recipe if at.again else self.recipe
        entries = tuple(one.entry_at(place) for one, place in zip(self._inputs, at.each, strict=True))
        return RunPosition(sources=entries, drawn=at.drawn, finished=at.finished, recipe=recipe, **unit, **at.counts)

    def counts(self) -> dict[str, int]:
        """Returns the counts of this moment, by their names in `RunPosition`."""
        own = {"rows": self.rows, "duplicate": self.duplicate, "blocks": self.blocks}
        return own | {"refused": self.refusals.count, "quarantine_bytes": self.refusals.kept_bytes}

    def count_duplicate(self, place: RowOrigin) -> None:
        """Counts a row that names a key twice; says so of the first of each source."""
        self.duplicate += 1
        if place.file not in self._warned:
            self._warned.add(place.file)
            what = "a key is named twice in one object (readers keep one of the values)"
            self.warn(f"{place.file}:{place.line}: {what}; further such rows of this source are only counted")

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
        self._active = [index for index, done in enumerate(finished) if not done and index not in self._added]
        self._alone = weights is None or len(self._active) == 1
        self._shares = [0.0] * len(finished)
        if weights is not None and self._active:
            for index, share in zip(self._active, shares([weights[one] for one in self._active]), strict=True):
                self._shares[index] = share

    def _set_finished(self, index: int, done: bool) -> None:
        # All shares are counted anew.
        self._finished[index] = done
        self._set_shares(self._in_force, [0] * len(self._drawn), self._finished)

    def _nothing(self, index: int) -> SourceSpan:
        self._waiting = index
        return SourceSpan(index, Rows(), 0, (), self.here({}))

    def _leave_unit(self) -> None:
        """Continues behind the unit: with the weights of now, and with all sources."""
        drawn = self._drawn if self._weights == self._in_force else [0] * len(self._drawn)
        finished, self._again, self._added = self._finished, None, range(0)
        if self._weights is None or self._in_force is None:
            # As at any other start: those that are at their end show it in turn.
            finished, self._unsure = [False] * len(finished), []
        self._set_shares(self._weights, drawn, finished)

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
        before, first, most = self.here({}), one.next, one.stop - one.next
        if self.settings.rate is not None:
            # So finely `totals` tells how far it is.
            most = min(most, max(1, int(self.settings.rate)))
        if self._again is not None:
            most = min(most, self._again[index])
        elif self._unsure and self._block:
            most = min(most, self._block - self._in_unit)
        taken = most if self._alone else 1
        self._drawn[index] += taken
        while taken < most and next_stream(self._shares, self._drawn, self._active) == index:
            taken += 1
            self._drawn[index] += 1
        if self._again is not None:
            self._again[index] -= taken
        elif self._block:
            self._in_unit = (self._in_unit + taken) % self._block
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
            one.read_before, rows = source.progress[0], source.read()
        finally:
            self.watchdog.answered()
        if rows is not None:
            one.rows, one.next, one.stop = rows, 0, len(rows.lines)
            one.is_empty &= not rows.lines
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
            source = one.source = open_source(self.settings.sources[index], one.entry, self.context)
            one.position = source.start if one.position is None else one.position
            if self._ending:
                source.end()
        return source


@dataclass(slots=True)
class Batch:
    """Rows to be published, in order; none where there are none at the moment. `tokens`: None where not measured.

    `after` returns the position after the row of an index. `checked`: they are known to be rows.
    """

    mixer: Mixer
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
        self.mixer.refusals.take(error, self.place(index), self.lines[index])


class MadeRow(NamedTuple):
    """A row that was made of others, where (the first of) these come from, and its length, 0 where not measured.

    `squares` is the sum of the squares of the lengths of its samples, none of which attends to another.
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
    """What is `made` of a source row, or of a block of them: of so many rows `of` each source, by number.

    The sources stand `before` and `after` it.
    """

    def __init__(self, mixer: Mixer, before: MixPosition, made: list[MadeRow], of: Mapping[int, int]) -> None:
        self.before = self.after = before
        self.made, self.of = made, dict(of)
        self._mixer, self._digest, self._digested = mixer, xxhash.xxh3_64(), 0

    def position(self, skip: int, *, lead: int = 0, cut: int = 0) -> RunPosition:
        """Returns the position after so many of its rows; never fewer than in the last call. See `RunPosition`."""
        if not skip:
            return self._mixer.position(self.before)
        if skip == len(self.made) and not lead and not cut:
            return self._mixer.position(self.after)
        for row in self.made[self._digested : skip]:
            self._digest.update(row.data)
        self._digested = skip
        unit = tuple(self.of.get(source, 0) for source in range(len(self._mixer.names)))
        digest = self._digest.hexdigest()
        return self._mixer.position(self.before, skip=skip, lead=lead, cut=cut, unit=unit, skipped=digest)
