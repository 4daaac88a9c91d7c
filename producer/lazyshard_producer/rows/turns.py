"""Whose turn it is where rows come from several sources. Decisions only: nothing is read here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lazyshard.plan.blend import next_stream, shares


class Turns:
    """Says which source gives the next row: the first that is not finished, or by weights the one that lags most.

    Args:
        weights: shares of the sources; None for one after another.
        drawn: rows drawn from each since one of them was finished the last time.
        finished: whether the end of each was met.

    Attributes:
        weights, drawn, finished: the same.
    """

    def __init__(self, weights: Sequence[float] | None, drawn: Sequence[int], finished: Sequence[bool]) -> None:
        self.weights: Final = weights
        self.drawn = list(drawn)
        self.finished = list(finished)
        self._choose()

    def next(self) -> int | None:
        """Returns whose turn it is; None where all are finished."""
        if not self._active:
            return None
        if self.weights is None or len(self._active) == 1:
            return self._active[0]
        return next_stream(self._shares, self.drawn, self._active)

    def take(self, index: int, most: int) -> int:
        """Counts the rows that the source whose turn it is gives one after another, `most` at the most; at least 1.

        Returns:
            How many they are.
        """
        count = most
        if self.weights is None or len(self._active) == 1:
            self.drawn[index] += count
            return count
        count = 1
        self.drawn[index] += 1
        while count < most and next_stream(self._shares, self.drawn, self._active) == index:
            count += 1
            self.drawn[index] += 1
        return count

    def finish(self, index: int) -> None:
        """Takes notice that the end of a source was met: the others go on with their shares, counted anew."""
        self._set_finished(index, True)

    def begin(self, index: int) -> None:
        """Takes notice that a source that was finished has more rows: counts start anew."""
        self._set_finished(index, False)

    def _set_finished(self, index: int, finished: bool) -> None:
        self.finished[index] = finished
        self.drawn = [0] * len(self.drawn)
        self._choose()

    def _choose(self) -> None:
        self._active = [index for index, finished in enumerate(self.finished) if not finished]
        if self.weights is not None and self._active:
            normal = iter(shares([self.weights[index] for index in self._active]))
            self._shares = [0.0 if finished else next(normal) for finished in self.finished]
