"""Sources one after another: the order of the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazyshard_producer.position import FilePosition, encode_positions
from lazyshard_producer.source import Place, Source


class SourceSequence:
    """Reads each source to its end, in order, with one open at a time.

    A source that had been read to its end and has grown since gives its new rows first, at the next start.

    Args:
        positions: where to start in each source.
        open_source: opens a source at its position.
        finished: is told the final position of each source when its end is met.
    """

    def __init__(
        self,
        positions: Sequence[FilePosition],
        open_source: Callable[[FilePosition], Source],
        finished: Callable[[FilePosition], None],
    ) -> None:
        self._positions = list(positions)
        self._open_source = open_source
        self._finished = finished
        self._index = 0
        self._current: Source | None = None

    def read(self) -> bytes | None:
        """Returns the next row's line; None when all sources are finished. Raises as `Source.read` does."""
        while self._index < len(self._positions):
            if self._current is None:
                self._current = self._open_source(self._positions[self._index])
            line = self._current.read()
            if line is not None:
                return line
            self._positions[self._index] = self._current.position()
            self._finished(self._positions[self._index])
            self.close()
            self._index += 1
        return None

    @property
    def place(self) -> Place:
        """Where the row comes from that was read last."""
        assert self._current is not None
        return self._current.place

    def count_duplicate(self) -> int:
        """See `Source.count_duplicate`."""
        assert self._current is not None
        return self._current.count_duplicate()

    def positions(self) -> tuple[FilePosition, ...]:
        """Returns the position in every source after the row read last. Raises as `Source.position` does."""
        if self._current is not None:
            self._positions[self._index] = self._current.position()
        return tuple(self._positions)

    def encoded(self) -> dict[str, Any]:
        """Returns `positions` as the JSON value for a seal."""
        return encode_positions(self.positions())

    def totals(self) -> tuple[int, int, int]:
        """Returns (bytes read, blank lines skipped, rows that name a key twice) of all sources and runs."""
        totals = [(position.offset, position.blank, position.duplicate) for position in self._positions]
        if self._current is not None:
            totals[self._index] = (self._current.offset, self._current.blank, self._current.duplicate)
        read, blank, duplicate = (sum(column) for column in zip(*totals, strict=True))
        return read, blank, duplicate

    def close(self) -> None:
        """Closes the source that is open."""
        if self._current is not None:
            self._current.close()
            self._current = None
