"""The rows of all sources in the order of the run, one after another or mixed by weight, and the position after each.

The order does not depend on time: the run waits for a source that has no rows now. When a source ends, the shares are
reset. A start in the middle of a unit first reads the rows of that unit, in their original order. A finished source
that has grown rejoins when the growth is detected; within a unit only if no other source has rows.
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

Line: TypeAlias = bytes | EncodedRow  # A row in its published form: a line of JSON with its newline, or an encoded row


def by_length(settings: Settings) -> bool:
    """Returns whether rows are packed or balanced by their lengths."""
    return settings.pack > 0 or settings.balance is not None


class MixPosition(NamedTuple):
    """The positions of all sources between two rows, in memory; `Mixer.position` makes the position for seals.

    `again`: inside of a unit that an earlier run has begun, or at its end.
    """

    each: tuple[Position, ...]
    drawn: tuple[int, ...]
    finished: tuple[bool, ...]
    again: bool
    counts: Mapping[str, Any]


class SourceSpan(NamedTuple):
    """Consecutive rows of one source: `lines` are those of `rows` from `first` on; `before` is the position before."""

    source: int
    rows: Rows
    first: int
    lines: Sequence[Line | RowInvalid]
    before: MixPosition

    def place(self, index: int) -> RowOrigin:
        """Returns the origin of `lines[index]`."""
        return self.rows.place(self.first + index)

    def after(self, index: int, counts: Mapping[str, Any]) -> MixPosition:
        """Returns the position after `lines[index]`, with these counts."""
        before = self.before
        each, drawn = list(before.each), list(before.drawn)
        each[self.source] = self.rows.position(self.first + index)
        if drawn:
            drawn[self.source] += index + 1
        return MixPosition(tuple(each), tuple(drawn), before.finished, before.again, counts)


class _Input:
    """A source. Of the `stop` rows of its last read, [0, next) were returned; `position` is the one after them."""

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
        # Cached by identity: an unchanged position is the same object. The entry of a live source also makes rows after
        # the position durable, so it is not cached.
        if position is None:
            return self.entry
        if self.source is not None and (self.source.live or self._known[0] is not position):
            self._known = (position, self.source.entry(position))
        return self._known[1]

    def progress(self) -> tuple[int, int | None, int]:
        """Returns (bytes returned, total bytes, blank lines skipped)."""
        if self.source is None:
            return self._progress
        read, there = self.source.progress
        if self.stop > self.next:
            # Count only the share of the bytes of rows that were returned.
            read = self.read_before + (read - self.read_before) * self.next // self.stop
        return read, there, self.source.blank

    def close(self) -> None:
        if self.source is not None:
            self._progress = self.progress()
            self.source.close()
            self.source = None


@dataclass(eq=False)
class Mixer:
    """Reads the rows of all sources in the run's order: mixed by their shares, or without weights one after another.

    Counts rows, including those of earlier runs, and makes the positions for seals.

    `ahead`: positions may be requested after later rows were read, so a source at its end stays open. `recipe` applies
    to rows from `start` on.
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
        """Opens all sources if they are mixed, so that an unreadable one is refused before anything is published."""
        position, sources = self.start, self.settings.sources
        self.rows, self.duplicate, self.blocks = position.rows, position.duplicate, position.blocks
        self._warned: set[str] = set()
        self.names = [plain_name(source.path) for source in sources]
        self._weights = [source.weight for source in sources if source.weight is not None] or None
        # Rows of a unit, after which sources that have grown rejoin; 0 means one. The number of source rows in a stripe
        # or a pack buffer is unknown until they are made.
        self._block = 1 << 62 if by_length(self.settings) else self.settings.shuffle
        self._ending = False
        self._waiting: int | None = None
        self._inputs = [_Input(entry, source_size(one)) for entry, one in zip(position.sources, sources, strict=True)]
        self._in_unit = 0  # rows since the start of the unit
        self._again: list[int] | None = None  # remaining rows of each source in the begun unit
        self._added = range(0)  # sources that were added after the unit was begun
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
        """Returns the next rows, empty if there are none now, None if all sources are finished."""
        self._waiting = None
        while True:
            if self._again is not None and not any(self._again):
                self._leave_unit()
            if self._again is None and not self._in_unit:
                for finished in tuple(self._unsure):
                    self._check_growth(finished)
            if not self._active and not self._unsure:
                return None
            if not self._active and self._again is None:
                if not self._check_growth(self._unsure[0]):
                    return self._nothing(self._unsure[0])
            elif not self._active:
                # The first source with remaining rows was finished and has grown: it rejoins.
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
                    # The source ended here when the unit was begun, and has grown since.
                    self._set_finished(index, True)
                    self._unsure.append(index)

    def here(self, counts: Mapping[str, Any]) -> MixPosition:
        """Returns the position after the last span, with these counts."""
        mixed = self._in_force is not None
        drawn, finished = (tuple(self._drawn), tuple(self._finished)) if mixed else ((), ())
        each = tuple(one.position for one in self._inputs)
        return MixPosition(each, drawn, finished, self._again is not None, counts)

    def position(self, at: MixPosition, **unit: Any) -> RunPosition:
        """Returns the position for a seal; `unit` are the fields of a unit that begins there. Does I/O."""
        self.refusals.sync()
        # A unit that an earlier run has begun keeps the earlier recipe.
        recipe = self.start.recipe if at.again else self.recipe
        entries = tuple(one.entry_at(place) for one, place in zip(self._inputs, at.each, strict=True))
        return RunPosition(sources=entries, drawn=at.drawn, finished=at.finished, recipe=recipe, **unit, **at.counts)

    def counts(self) -> dict[str, int]:
        """Returns the current counts by their names in `RunPosition`."""
        own = {"rows": self.rows, "duplicate": self.duplicate, "blocks": self.blocks}
        return own | {"refused": self.refusals.count, "quarantine_bytes": self.refusals.kept_bytes}

    def count_duplicate(self, place: RowOrigin) -> None:
        """Counts a row that contains a key twice; warns for the first such row of each source."""
        self.duplicate += 1
        if place.file not in self._warned:
            self._warned.add(place.file)
            what = "an object contains a key twice (readers keep one of the values)"
            self.warn(f"{place.file}:{place.line}: {what}; further such rows of this source are only counted")

    def wait(self, seconds: float) -> str:
        """Waits until the source without rows may have some, at most `seconds`; returns in words what it waits for."""
        source = None if self._waiting is None else self._inputs[self._waiting].source
        if source is None:
            return ""
        source.wait(seconds)
        return source.waits_for()

    def end(self) -> None:
        """Requests live sources to end with the rows that exist now."""
        self._ending = True
        for one in self._inputs:
            if one.source is not None:
                one.source.end()

    def totals(self) -> dict[str, Any]:
        """Returns the figures of all sources and runs by their names in `Tally`."""
        read, there, blank = zip(*(one.progress() for one in self._inputs), strict=True)
        rows = {"duplicate_key_rows": self.duplicate, "refused_rows": self.refusals.count, "blank_lines": sum(blank)}
        total = None if None in there else sum(there)
        return {"bytes": sum(read), "bytes_total": total, "sources": len(self.names), **rows}

    def close(self) -> None:
        """Closes all open sources."""
        for one in self._inputs:
            one.close()

    def _set_shares(self, weights: Sequence[float] | None, drawn: Sequence[int], finished: Sequence[bool]) -> None:
        """Sets weights (None: one source after another), rows drawn and finished sources, and computes the shares."""
        self._in_force, self._drawn, self._finished = weights, list(drawn), list(finished)
        self._active = [index for index, done in enumerate(finished) if not done and index not in self._added]
        self._alone = weights is None or len(self._active) == 1
        self._shares = [0.0] * len(finished)
        if weights is not None and self._active:
            for index, share in zip(self._active, shares([weights[one] for one in self._active]), strict=True):
                self._shares[index] = share

    def _set_finished(self, index: int, done: bool) -> None:
        # This resets all shares.
        self._finished[index] = done
        self._set_shares(self._in_force, [0] * len(self._drawn), self._finished)

    def _nothing(self, index: int) -> SourceSpan:
        self._waiting = index
        return SourceSpan(index, Rows(), 0, (), self.here({}))

    def _leave_unit(self) -> None:
        """Continues after the unit, with the current weights and all sources."""
        drawn = self._drawn if self._weights == self._in_force else [0] * len(self._drawn)
        finished, self._again, self._added = self._finished, None, range(0)
        if self._weights is None or self._in_force is None:
            # As at any other start, each source is read again to detect its end.
            finished, self._unsure = [False] * len(finished), []
        self._set_shares(self._weights, drawn, finished)

    def _check_growth(self, index: int) -> bool:
        """Checks whether a finished source has grown; returns False if that is not known yet."""
        one = self._inputs[index]
        ended = one.next == one.stop and not self._read(index)
        if ended or one.stop:
            self._unsure.remove(index)
        if not ended and one.stop:
            self._set_finished(index, False)
        return ended or one.stop > 0

    def _take(self, index: int) -> SourceSpan:
        """Returns the next consecutive rows of a source: those in memory, while it is the source's turn."""
        one = self._inputs[index]
        before, first, most = self.here({}), one.next, one.stop - one.next
        if self.settings.rate is not None:
            # At most one second of rows, so that `totals` advances evenly.
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
        """Reads more rows of a source; returns whether there are any, and marks the source as finished at its end."""
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
        """Loads the next rows of a source, perhaps none; returns False at its end."""
        one = self._inputs[index]
        with self.watchdog.ask(lambda: f"reading {self.names[index]}"):
            source = self._opened(index)
            one.read_before, rows = source.progress[0], source.read()
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
    """Rows to be published, in order; empty if there are none now. `tokens` is None if not measured, as `patches`.

    `after` returns the position after the row of an index. `checked`: the rows are known to be valid.
    """

    mixer: Mixer
    lines: Sequence[Line | RowInvalid]
    place: Callable[[int], RowOrigin]
    after: Callable[[int], RunPosition]
    tokens: Sequence[int] | None = None
    patches: Sequence[int] = ()
    checked: bool = True

    def position(self, index: int) -> RunPosition:  # A method, as planted bugs replace it
        """Returns the position after `lines[index]`; all rows before must be written or refused. Does I/O."""
        return self.after(index)

    def refuse(self, index: int, error: RowInvalid) -> None:
        """Refuses `lines[index]`, or ends the run; see `Refusals.take`."""
        self.mixer.refusals.take(error, self.place(index), self.lines[index])


class Size(NamedTuple):
    """The length of a row in tokens, and the patches of its images and videos; 0 if not measured."""

    tokens: int = 0
    patches: int = 0


class MadeRow(NamedTuple):
    """A row made of source rows, the origin of the first of these, and its length and patches, 0 if not measured.

    `squares` is the sum of the squares of the lengths of its samples, which do not attend to each other.
    """

    line: Line
    place: RowOrigin
    tokens: int = 0
    squares: int = 0
    patches: int = 0

    @property
    def data(self) -> bytes:
        """The bytes that identify the row, for a digest."""
        return self.line if isinstance(self.line, bytes) else self.line.data


class Unit:
    """The rows `made` of one source row or a block of them. `of` gives the number of rows of each source, by index.

    `before` and `after` are the positions of the sources.
    """

    def __init__(self, mixer: Mixer, before: MixPosition, made: list[MadeRow], of: Mapping[int, int]) -> None:
        self.before = self.after = before
        self.made, self.of = made, dict(of)
        self._mixer, self._digest, self._digested = mixer, xxhash.xxh3_64(), 0

    def position(self, skip: int, *, lead: int = 0, cut: int = 0) -> RunPosition:
        """Returns the position after `skip` of its rows, not fewer than in the last call. See `RunPosition`."""
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
