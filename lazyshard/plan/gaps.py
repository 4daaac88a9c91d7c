"""Gaps: ranges of sample numbers that are left out, and the numbering of those that are kept.

With the gaps [2, 4) and [6, 7), from 1 on::

    sample      0  1  2  3  4  5  6  7  8
    kept           0        1  2     3  4          kept(1, 7) == 3,  nth(1, 3) == 7
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import check_field

__all__ = ["Gaps"]


class Gaps:
    """Half-open ranges of sample numbers that are left out.

    Args:
        ranges: of any order; those that touch or overlap become one.

    Attributes:
        ranges: sorted and disjoint, with room between them.

    Raises:
        ValueError: a range is empty, or a bound is no `int` from 0.
    """

    __slots__ = ("_before", "_kept", "_starts", "_stops", "ranges")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            check_field("start of a range", start, 0)
            check_field("stop of a range", stop, start + 1)
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
            else:
                joined.append((start, stop))
        self.ranges = tuple(joined)
        self._starts = [start for start, _ in joined]
        self._stops = [stop for _, stop in joined]
        # Of each range: how many samples are left out by the end of it, and how many are kept before it.
        self._before = [0]
        self._kept = []
        for start, stop in joined:
            self._kept.append(start - self._before[-1])
            self._before.append(self._before[-1] + stop - start)

    def __bool__(self) -> bool:
        """Return whether anything is left out."""
        return bool(self.ranges)

    def __contains__(self, sample: int) -> bool:
        """Return whether a sample is left out."""
        at = bisect_right(self._starts, sample) - 1
        return at >= 0 and sample < self._stops[at]

    def joined(self, ranges: Iterable[tuple[int, int]]) -> Gaps:
        """Return these gaps and more."""
        more = tuple(ranges)
        return Gaps((*self.ranges, *more)) if more else self

    def contains_all(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return `sample in self` for each: bool, of the same shape."""
        at = np.searchsorted(np.array(self._starts, dtype=np.int64), samples, side="right") - 1
        stops = np.array([0, *self._stops], dtype=np.int64)
        return np.asarray(samples < stops[at + 1])

    def kept(self, start: int, stop: int) -> int:
        """Return how many samples of [start, stop) are kept; 0 if stop <= start."""
        return max(0, self._kept_before(stop) - self._kept_before(start))

    def nth(self, start: int, number: int) -> int:
        """Return the sample of that number, from 0, among those kept from `start` on."""
        if not self.ranges:
            return start + number
        rank = self._kept_before(start) + number
        return rank + self._before[bisect_right(self._kept, rank)]

    def nth_all(self, start: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `nth` for each: int64, of the same shape."""
        if not self.ranges:
            return numbers + start
        ranks = numbers + self._kept_before(start)
        at = np.searchsorted(np.array(self._kept, dtype=np.int64), ranks, side="right")
        return np.asarray(ranks + np.array(self._before, dtype=np.int64)[at])

    def _kept_before(self, sample: int) -> int:
        at = bisect_right(self._starts, sample) - 1
        if at < 0:
            return sample
        return sample - self._before[at] - min(sample, self._stops[at]) + self._starts[at]
