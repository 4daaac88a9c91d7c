"""What one segment takes over from the one before: a numbering of the places that its lanes had not drawn yet.

Numbered lane after lane, in the order in which each lane would have drawn them; samples that are left out from now on
get no number. Nothing is stored but which those are: number and place follow from each other by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Carried", "Slices", "Stretch"]


class Slices:
    """`size` numbers in `lanes` contiguous slices of `each`, the first `more` of them longer by one."""

    __slots__ = ("each", "more", "size")

    def __init__(self, size: int, lanes: int) -> None:
        self.size = size
        self.each, self.more = divmod(size, lanes)

    def length(self, number: int) -> int:
        """Return how long a slice is."""
        return self.each + (number < self.more)

    def start(self, number: int) -> int:
        """Return where a slice begins."""
        return number * self.each + min(number, self.more)

    def find(self, offset: int) -> tuple[int, int]:
        """Return the slice in which an offset lies, and where in it."""
        each, more = self.each, self.more
        behind = offset - more * (each + 1)
        if behind < 0:
            return divmod(offset, each + 1)
        number, within = divmod(behind, each)
        return more + number, within

    def find_all(self, offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return `find` for each."""
        each, more = self.each, self.more
        if not more:
            number = offsets // each
            return number, offsets - number * each
        number = offsets // (each + 1)
        if each:
            # The greater of the two is right: this in the shorter slices, and that in the longer ones before them.
            np.maximum(number, (offsets - more) // each, out=number)
        return number, offsets - self.starts(number)

    def starts(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `start` for each."""
        starts = numbers * self.each
        if self.more:
            starts += np.minimum(numbers, self.more)
        return starts


class Stretch(NamedTuple):
    """Places that one lane would have drawn one after another, numbered one after another.

    Attributes:
        number: of the first one.
        lane: of the segment before.
        position: of the first one in that lane.
        length: how many, at least 1.
    """

    number: int
    lane: int
    position: int
    length: int


class Carried:
    """What is carried over from one segment to the next.

    Args:
        rests: what each lane still held, one slice a lane, before anything is left out.
        draws: positions [0, draws) of each lane were drawn.
        removed: offsets in `rests` that are left out from now on: int64, ascending; None for none.

    Attributes:
        size: how many samples are carried over.
    """

    __slots__ = ("_draws", "_kept_before", "_removed", "_rests", "size")

    def __init__(self, rests: Slices, draws: int, removed: npt.NDArray[np.int64] | None = None) -> None:
        self._rests = rests
        self._draws = draws
        self._removed = np.empty(0, dtype=np.int64) if removed is None else removed
        # Of each that is left out: how many are kept before it.
        self._kept_before = self._removed - np.arange(len(self._removed), dtype=np.int64)
        self.size = rests.size - len(self._removed)

    def places(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return lanes and positions of the segment before for an array of numbers in [0, size)."""
        offsets = numbers
        if len(self._removed):
            offsets = numbers + np.searchsorted(self._kept_before, numbers, side="right")
        lanes, positions = self._rests.find_all(offsets)
        positions += self._draws
        return lanes, positions

    def stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield the places of the numbers [start, stop), in order; as few stretches as there can be."""
        while start < stop:
            out = int(np.searchsorted(self._kept_before, start, side="right"))
            lane, within = self._rests.find(start + out)
            length = min(stop - start, self._rests.length(lane) - within)
            if out < len(self._removed):
                length = min(length, int(self._kept_before[out]) - start)
            yield Stretch(start, lane, self._draws + within, length)
            start += length

    def number(self, lane: int, position: int) -> int | None:
        """Return the number of a place that was not drawn before; None if it is not carried, -1 if it is left out."""
        within = position - self._draws
        if within >= self._rests.length(lane):
            return None
        offset = self._rests.start(lane) + within
        out = int(np.searchsorted(self._removed, offset))
        if out < len(self._removed) and self._removed[out] == offset:
            return -1
        return offset - out
