"""The order of the rows of a run: sources one after another, or mixed by weights.

Mixed, row after row comes from the source that lags most behind its share (`lazyshard.plan.blend`). Nothing is random
and nothing depends on time: a source that has nothing at the moment is waited for. When one has met its end, the others
go on with their shares, and the counts start anew.

A start in the middle of a unit (see `RunPosition`) first gives the rows of which that was made, whatever has been added
to a source since, and in the order of then. A source that was finished and has grown comes back once that shows; within
a unit only when there is nothing else, so that the unit's order follows from its start and its numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from lazyshard.stream.watchdog import Watchdog
from lazyshard_producer.position import RunPosition, plain_name
from lazyshard_producer.rows.slot import Slot
from lazyshard_producer.rows.standing import Piece, Standing
from lazyshard_producer.rows.turns import Turns
from lazyshard_producer.sources.source import Rows, Source

Opener = Callable[[int, "dict[str, Any] | None"], Source]
"""Opens the source of a number at a position, None for its start."""


class Mixer:
    """Gives the rows of all sources in the run's order.

    Args:
        open_source: opens a source.
        paths: of the sources, as the user gave them.
        weights: their shares; None reads one after another, with one open at a time.
        position: where to start.
        weights_before: the weights with which the unit was begun in which that is, if it is in one.
        block: rows in a unit, 0 for one: where sources that have grown come back.
        sizes: bytes of each source, None where nobody knows: for what is shown until it is opened.
        ahead: whether positions are asked for rows that lie behind those read last, so that a source which has met its
            end stays open until the run is over.
        patience: is told what is asked of sources.
        most: rows in a piece at the most, None for as many as are at hand: how finely `totals` tells how far it is.
        empty: is told the name of each source that has met its end without a single row.
    """

    def __init__(
        self,
        open_source: Opener,
        paths: Sequence[str],
        weights: Sequence[float] | None,
        position: RunPosition,
        *,
        weights_before: Sequence[float] | None,
        block: int,
        sizes: Sequence[int | None],
        ahead: bool,
        patience: Watchdog,
        most: int | None = None,
        empty: Callable[[str], None],
    ) -> None:
        self.names: Final = [plain_name(path) for path in paths]
        self._ahead = ahead
        self._most = most
        self._empty = empty
        self._patience = patience
        self._ending = False
        self._waiting: int | None = None
        self._open_source = open_source
        self._slots = [Slot(entry, size) for entry, size in zip(position.sources, sizes, strict=True)]
        drawn = list(position.drawn) or [0] * len(paths)
        finished = list(position.finished) or [False] * len(paths)
        if weights is None and not position.skip:
            finished = [False] * len(paths)
        self._weights = weights
        self._turns = Turns(weights, drawn, finished)
        self._unsure = [index for index, was in enumerate(finished) if was]  # may have grown
        self._again: list[int] | None = None  # rows of each source to come of the unit
        self._added = range(0)
        self._block = block
        self._in_unit = 0  # rows since its start
        if position.skip:
            self._again = list(position.unit)
            self._added = range(len(paths if weights_before is None else weights_before), len(paths))
            was = [done or index in self._added for index, done in enumerate(finished)]
            self._turns = Turns(weights_before, drawn, was)
        if weights is not None:
            self._open_all()

    def read(self) -> Piece | None:
        """Returns the next rows, none where there are none at the moment; None when all sources are finished.

        Raises:
            SourceRefused: a source cannot be opened or read on.
        """
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
            slot = self._slots[index]
            if slot.next == slot.stop and not self._fill(index):
                if self._turns.finished[index]:
                    continue
                return self._nothing(index)
            if self._again is None or self._again[index]:
                return self._take(index)
            # It was at its end here when the unit was begun, and has grown since.
            self._turns.finish(index)
            self._unsure.append(index)

    def standing(self) -> Standing:
        """Returns where all sources stand after the last piece."""
        marks = tuple(slot.mark for slot in self._slots)
        turns, again = self._turns, self._again is not None
        if turns.weights is None:
            return Standing(marks, (), (), again)
        return Standing(marks, tuple(turns.drawn), tuple(self._finished()), again)

    def position(self, standing: Standing, **counts: Any) -> RunPosition:
        """Returns the position at a standing; `counts` are the other fields of `RunPosition`. Does I/O.

        Raises:
            SourceRefused: what was read of a source is no longer there.
        """
        entries = tuple(slot.position(mark) for slot, mark in zip(self._slots, standing.marks, strict=True))
        return RunPosition(sources=entries, drawn=standing.drawn, finished=standing.finished, **counts)

    def wait(self, seconds: float) -> str:
        """Waits until the source that had nothing may have more, so many seconds at the most; says what for."""
        if self._waiting is None:
            return ""
        source = self._slots[self._waiting].source
        assert source is not None
        source.wait(seconds)
        return source.waits_for()

    def end(self) -> None:
        """Asks live sources to finish with what is there."""
        self._ending = True
        for slot in self._slots:
            if slot.source is not None:
                slot.source.end()

    def totals(self) -> tuple[int, int | None, int]:
        """Returns (bytes read, bytes there are or None, blank lines skipped) of all sources and runs."""
        read, there, blank = 0, 0, 0
        unknown = False
        for slot in self._slots:
            (got, of), skipped = slot.progress()
            read, blank = read + got, blank + skipped
            unknown = unknown or of is None
            there += of or 0
        return read, None if unknown else there, blank

    def close(self) -> None:
        """Closes all sources that are open."""
        for slot in self._slots:
            slot.close()

    def _nothing(self, index: int) -> Piece:
        """Returns a piece without rows, since a source has none at the moment."""
        self._waiting = index
        rows = self._slots[index].rows
        assert rows is not None
        return Piece(index, rows, 0, (), self.standing())

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
        self._turns = Turns(self._weights, drawn, finished)
        self._again = None

    def _come_back(self) -> bool:
        """Has the first source come back of those that were finished and have grown; False if that cannot be told."""
        if self._again is None:
            return self._look_again(self._unsure[0])
        back = next(index for index, left in enumerate(self._again) if left)
        self._unsure.remove(back)
        self._turns.begin(back)
        return True

    def _look_again(self, index: int) -> bool:
        """Looks whether a source that was finished has grown; returns False if that cannot be told yet."""
        slot = self._slots[index]
        if slot.next == slot.stop:
            source, rows = self._read(index)
            if rows is None:
                self._unsure.remove(index)
                slot.mark = source.reached
                if not self._ahead:
                    slot.finish()
                return True
            slot.hold(rows)
        if slot.stop:
            self._unsure.remove(index)
            self._turns.begin(index)
        return slot.stop > 0

    def _take(self, index: int) -> Piece:
        """Moves past the rows that follow each other: as many as are at hand, and as it is the source's turn."""
        slot = self._slots[index]
        assert slot.rows is not None
        before, first, most = self.standing(), slot.next, slot.stop - slot.next
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
        slot.next += count
        slot.mark = slot.rows.mark(slot.next - 1)
        lines = slot.rows.lines
        return Piece(index, slot.rows, first, lines if count == len(lines) else lines[first : slot.next], before)

    def _fill(self, index: int) -> bool:
        """Reads on in a source; returns whether there is a row, and notes where its end is met."""
        slot = self._slots[index]
        source, rows = self._read(index)
        if rows is None:
            if slot.is_empty and slot.entry is None:
                self._empty(self.names[index])
            slot.mark = source.reached
            if not self._ahead:
                slot.finish()
            self._turns.finish(index)
            if self._again is not None:
                self._again[index] = 0
            return False
        slot.hold(rows)
        return slot.stop > 0

    def _read(self, index: int) -> tuple[Source, Rows | None]:
        """Returns a source and the next rows of it, as `Source.read` does."""
        self._patience.ask(lambda: f"reading {self.names[index]}")
        try:
            source = self._opened(index)
            return source, source.read()
        finally:
            self._patience.answered()

    def _opened(self, index: int) -> Source:
        slot = self._slots[index]
        if slot.source is None:
            slot.open(self._open_source(index, slot.entry))
            assert slot.source is not None
            if self._ending:
                slot.source.end()
        return slot.source

    def _open_all(self) -> None:
        """Opens all sources: one that cannot be read is refused before anything is published."""
        try:
            for index in range(len(self._slots)):
                self._opened(index)
        except BaseException:
            self.close()
            raise
