"""Counting: every draw of one epoch of a run, one by one, into an array over the samples.

Nothing is taken for granted of what the arithmetic promises: each position of each lane is asked for its sample, and
what is drawn twice or by nobody shows. Memory: two bytes a sample, and blocks of a fixed size. Time: that of drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan import Course

_BLOCK: Final = 1 << 19
"""Draws that are computed at a time: about 60 MB with all that is made on the way."""

_LOOKED_AT: Final = 1 << 22
"""Samples that are looked at at a time."""

MAX_RANGES: Final = 1000
"""Ranges of samples that are kept of each kind; how many samples there are is counted in any case."""

SKIPPED: Final = 1
TO_COME: Final = 2
LEFT_OVER: Final = 3
LEFT_OUT: Final = 4

_ONE: Final = np.uint8(1)
"""Of the array's own type: `np.add.at` is fifty times slower with any other."""

Array = npt.NDArray[np.uint8]


class Ranges(NamedTuple):
    """Samples of one kind.

    Attributes:
        samples: how many.
        ranges: the first half-open ranges of them, `MAX_RANGES` at the most.
    """

    samples: int = 0
    ranges: tuple[tuple[int, int], ...] = ()


class Counts:
    """Draws of one epoch over the samples [0, total).

    Args:
        total: the end of the samples.
        epoch: the epoch.
        report: is told how many draws are counted.

    Attributes:
        total: as given.
        epoch: as given.
        trained: uint8 of shape (total,): how often each sample was trained.
        kinds: uint8 of shape (total,): why it was not; 0 where nothing is known.
        drawn: draws that were counted in `trained`.
        impossible: draws that the arithmetic puts into another epoch than it should, or past the end.
    """

    def __init__(self, total: int, epoch: int, report: Callable[[int], None] = lambda drawn: None) -> None:
        self.total = total
        self.epoch = epoch
        self.trained: Array = np.zeros(total, dtype=np.uint8)
        self.kinds: Array = np.zeros(total, dtype=np.uint8)
        self.drawn = 0
        self.impossible = 0
        self._marked = 0
        self._report = report

    def train(self, course: Course, start: int, stop: int) -> None:
        """Counts positions [start, stop) of each lane of a course as trained."""
        for samples in self._draws(course, start, stop):
            np.add.at(self.trained, samples, _ONE)
            self.drawn += len(samples)

    def mark(self, course: Course, start: int, stop: int, kind: int) -> None:
        """Marks what a course draws at positions [start, stop) of each lane as not trained, and why."""
        for samples in self._draws(course, start, stop):
            self.kinds[samples] = kind
            self._marked += len(samples)

    def leave_out(self, start: int, stop: int) -> None:
        """Marks those of a range as left out on purpose for which nothing else is known."""
        for first in range(min(start, self.total), min(stop, self.total), _LOOKED_AT):
            last = min(first + _LOOKED_AT, stop, self.total)
            kinds = self.kinds[first:last]
            free = (kinds == 0) & (self.trained[first:last] == 0)
            kinds[free] = LEFT_OUT

    def is_whole(self) -> bool:
        """Returns whether the array holds every draw, and no draw was marked twice: then what it says is all."""
        blocks = range(0, self.total, _LOOKED_AT)
        counted = sum(int(self.trained[at : at + _LOOKED_AT].sum(dtype=np.int64)) for at in blocks)
        marked = 0
        for at in blocks:
            kinds = self.kinds[at : at + _LOOKED_AT]
            marked += int(np.count_nonzero(kinds)) - int(np.count_nonzero(kinds == LEFT_OUT))
        return counted == self.drawn and marked == self._marked and not self.impossible

    def ranges(self, which: Callable[[Array, Array], npt.NDArray[np.bool_]]) -> Ranges:
        """Returns the samples that a function of `trained` and `kinds` picks."""
        return ranges_where(
            self.total,
            lambda first, last: which(self.trained[first:last], self.kinds[first:last]),
        )

    def _draws(self, course: Course, start: int, stop: int) -> Iterator[npt.NDArray[np.int64]]:
        for samples, epochs in draws_of(course, start, stop, self.total):
            wrong = (epochs != self.epoch) | (samples < 0) | (samples >= self.total)
            bad = int(np.count_nonzero(wrong))
            self.impossible += bad
            yield samples[~wrong] if bad else samples
            self._report(self.drawn + self._marked)


def draws_of(
    course: Course, start: int, stop: int, total: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yields what a course draws at positions [start, stop) of each lane, in blocks: samples and their epochs."""
    if start >= stop:
        return
    # Whole windows where that is possible: the permutation of one that is cut would be made twice.
    long = max(min(stop - start, _BLOCK), 1)
    lanes = max(1, _BLOCK // long)
    for lane in range(0, course.dp, lanes):
        numbers = np.arange(lane, min(lane + lanes, course.dp))[:, None]
        for first in range(start, stop, long):
            positions = np.arange(first, min(first + long, stop))
            epochs, samples = course.draws(numbers, positions, total)
            yield samples.ravel(), epochs.ravel()


def ranges_where(total: int, picked: Callable[[int, int], npt.NDArray[np.bool_]]) -> Ranges:
    """Returns the samples of [0, total) that are picked.

    Args:
        total: how many there are.
        picked: returns which of the half-open range [first, last) are, for ranges of a few millions.
    """
    samples = 0
    found: list[tuple[int, int]] = []
    for first in range(0, total, _LOOKED_AT):
        mask = picked(first, min(first + _LOOKED_AT, total))
        number = int(np.count_nonzero(mask))
        if not number:
            continue
        samples += number
        if len(found) > MAX_RANGES:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).view(np.int8)))
        pairs = (edges.reshape(-1, 2)[: MAX_RANGES + 1] + first).tolist()
        if found and found[-1][1] == pairs[0][0]:
            pairs[0][0] = found.pop()[0]
        found.extend((start, stop) for start, stop in pairs)
    return Ranges(samples, tuple(found[:MAX_RANGES]))
