"""A source of a run together with the place up to which its rows were given out."""

from __future__ import annotations

from typing import Any

from lazyshard_producer.sources.source import Mark, Rows, Source


class Slot:
    """A source with the place up to which its rows were given out.

    Args:
        entry: the position at which it is opened, None for its start.
        size: its bytes, None where nobody knows.

    Attributes:
        source: the source, None where it is not open.
        rows: what it gave last, of which those of [0, next) of `stop` were given out; None before the first.
        mark: where it stands after those given out, None before it was opened.
    """

    def __init__(self, entry: dict[str, Any] | None, size: int | None) -> None:
        self.entry = entry
        self.source: Source | None = None
        self.rows: Rows | None = None
        self.next = 0
        self.stop = 0
        self.is_empty = True
        self.mark: Mark = None
        self._known: tuple[Mark, dict[str, Any] | None] = (None, entry)
        self._progress: tuple[tuple[int, int | None], int] = ((0, size), 0)
        self._read_before = self._read_after = 0  # bytes, without and with those of `rows`

    def open(self, source: Source) -> None:
        """Takes the source, just opened."""
        self.source = source
        if self.mark is None:
            self.mark = source.start
        self._read_before = source.progress[0]

    def hold(self, rows: Rows) -> None:
        """Takes the next rows to give out."""
        if self.source is not None and self.rows is not None:
            self._read_before = self._read_after
        self.rows, self.next, self.stop = rows, 0, len(rows.lines)
        self.is_empty &= not rows.lines
        self._read_after = self.source.progress[0] if self.source is not None else 0

    def position(self, mark: Mark) -> dict[str, Any] | None:
        """Returns the position at a mark, None for a source that is not begun. Raises as `Source.position` does."""
        # By identity: marks are what a source likes, and one that has not moved is the same object. Of a live source a
        # position also makes durable what lies behind the mark, so it is asked each time.
        if self._known[0] is not mark or (self.source is not None and self.source.live):
            if mark is None:
                return self.entry
            assert self.source is not None
            self._known = (mark, self.source.position(mark))
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

    def finish(self) -> None:
        """Makes the last position and closes the source."""
        self.position(self.mark)
        self.close()

    def close(self) -> None:
        """Closes the source if it is open."""
        if self.source is not None:
            self._progress = self.progress()
            self.source.close()
            self.source = None
