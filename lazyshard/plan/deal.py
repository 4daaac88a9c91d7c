"""The deal: maps samples of the stream to lanes and positions. Also splits, gaps, units, and indices of lanes.

A stream is dealt in stripes. A stripe is `dp` units, one per lane, and a unit is `unit` consecutive samples. With
`dp=2, unit=3`, these are the samples of each lane by position::

    position   0   1   2 |  3   4   5 |  6   7
    lane 0     0   1   2 |  6   7   8 | 12  14
    lane 1     3   4   5 |  9  10  11 | 13  15
               stripe 0  |  stripe 1  | tail of a stream of 16

Once the stream has ended, the samples that fill no whole stripe, the tail, are dealt row by row, so lanes differ by at
most one sample: position q of lane l is sample `q * dp + (l - turn) % dp`. While the end is unknown (`total` None),
every position is assumed to lie in a whole stripe; if the stripe becomes whole, that is the right sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from operator import index as as_int
from typing import Final, NamedTuple, TypeVar

import numpy as np

from lazyshard.part import SPLITS, BoolArray, Int64Array, SplitOf

_N = TypeVar("_N", int, Int64Array)


def check_field(name: str, value: object, low: int, stop: int | None = None) -> None:
    """Raises ValueError unless `value` is an `int` in [low, stop); `bool` is rejected: `dp=True` is a mistake."""
    if type(value) is int and value >= low and (stop is None or value < stop):
        return
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    raise ValueError(f"{name} must be an int {bound}, got {value!r}")


def outside(name: str, value: int, stop: int | None, low: int = 0) -> IndexError:
    """Returns the error for an index outside [low, stop); `stop` None means no upper bound."""
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    return IndexError(f"{name} must be {bound}, got {value}")


class Deal(NamedTuple):
    """The samples of a stream, dealt to `dp` lanes in units of `unit`; `total` is their number once known.

    `turn` is the lane that gets the first sample of the tail; it is not 0 if the lanes [0, turn) got one sample more
    before.
    """

    dp: int
    unit: int
    turn: int = 0

    def sample(self, lane: int, position: int, total: int | None = None) -> int:
        """Returns the sample at `position` of `lane`, which must exist."""
        if total is not None and position >= self.whole_positions(total):
            return position * self.dp + (lane - self.turn) % self.dp
        stripe, within = divmod(position, self.unit)
        return (stripe * self.dp + lane) * self.unit + within

    def samples(self, lanes: Int64Array, positions: Int64Array, total: int | None = None) -> Int64Array:
        """Returns `sample` for int64 arrays of the same shape."""
        # (stripe * dp + lane) * unit + position % unit, with the remainder written out as position - stripe * unit: one
        # division, not two. In place, since memory bandwidth is the bottleneck for millions of positions.
        numbers = positions // self.unit
        numbers *= self.dp - 1
        numbers += lanes
        numbers *= self.unit
        numbers += positions
        if total is not None and (tail := positions >= self.whole_positions(total)).any():
            numbers[tail] = positions[tail] * self.dp + (lanes[tail] - self.turn) % self.dp
        return numbers

    def place(self, sample: int, total: int | None = None) -> tuple[int, int]:
        """Returns the lane and the position of a sample, which must exist."""
        if total is not None and sample >= self.whole_positions(total) * self.dp:
            position, lane = divmod(sample, self.dp)
            return (lane + self.turn) % self.dp, position
        piece, within = divmod(sample, self.unit)
        stripe, lane = divmod(piece, self.dp)
        return lane, stripe * self.unit + within

    def whole_positions(self, total: int) -> int:
        """Returns how many positions of each lane lie in whole stripes; the tail begins there."""
        return total // (self.dp * self.unit) * self.unit

    def lane_length(self, lane: int, total: int) -> int:
        """Returns how many samples `lane` holds."""
        # Whole stripes fill all lanes equally and the tail is dealt in turn, so this is the round-robin count.
        return (total + self.dp - 1 - (lane - self.turn) % self.dp) // self.dp


class SplitTable:
    """The samples of a split, numbered from 0: `count(n)` are below sample n, and `sample(k)` is number k."""

    __slots__ = ("_before", "_numbers", "_own", "_owners", "_runs", "period")

    def __init__(self, split: SplitOf) -> None:
        self.period = sum(split.shares)
        owners, left = np.zeros(self.period, np.int64), np.arange(self.period)
        for number, share in enumerate(split.shares):
            # ceil(n * share / sum) for n in [0, sum]
            taken = -(-np.arange(len(left) + 1) * share // max(1, len(left)))
            own = taken[1:] > taken[:-1]
            owners[left[own]], left = number, left[~own]
        self._owners: list[int] = owners.tolist()
        self._numbers = np.flatnonzero(owners == split.number)
        self._own: list[int] = self._numbers.tolist()
        self._before: list[int] = np.searchsorted(self._numbers, np.arange(self.period)).tolist()
        # The consecutive samples around each of them, as a half-open range
        begins = np.flatnonzero(np.diff(self._numbers, prepend=-2) > 1)
        stops = np.append(begins[1:], len(self._own))
        runs = [(self._own[begin], self._own[stop - 1] + 1) for begin, stop in zip(begins, stops, strict=True)]
        self._runs = [run for run in runs for _ in range(*run)]

    def __contains__(self, sample: int) -> bool:
        within = sample % self.period
        at = self._before[within]
        return at < len(self._own) and self._own[at] == within

    def owner(self, sample: int) -> str:
        """Returns the name of the split of a sample."""
        return SPLITS[self._owners[sample % self.period]]

    def others(self, start: int, stop: int) -> BoolArray:
        """Returns for each of the samples [start, stop) whether it belongs to another split."""
        own = np.isin(np.arange(self.period), self._numbers)
        found: BoolArray = ~own[np.arange(start, stop) % self.period]
        return found

    def count(self, sample: int) -> int:
        """Returns how many samples below this one belong to the split."""
        periods, within = divmod(sample, self.period)
        return periods * len(self._own) + self._before[within]

    def sample(self, number: _N) -> _N:
        """Returns the sample with this number in the split (or array of numbers)."""
        size = len(self._own)
        if isinstance(number, int):
            return number // size * self.period + self._own[number % size]
        return number // size * self.period + self._numbers[number % size]

    def around(self, sample: int) -> tuple[int, int]:
        """Returns a half-open range of consecutive samples of the split that contains the given one."""
        periods, within = divmod(sample, self.period)
        start, stop = self._runs[self._before[within]]
        return periods * self.period + start, periods * self.period + stop


split_table: Final = lru_cache(maxsize=64)(SplitTable)  # makes the table of a split once


class Gaps:
    """Half-open ranges of sample numbers that are left out, joined if adjacent. The kept samples are numbered.

    ::

        sample      0  1  2  3  4  5  6  7  8      gaps [2, 4) and [6, 7); numbered from sample 1 on
        kept           0        1  2     3  4          kept(1, 7) == 3,  nth(1, 3) == 7

    With a split, the samples of other splits are left out too.
    """

    __slots__ = ("_before", "_kept", "_starts", "_stops", "_table", "ranges", "split")

    def __init__(self, ranges: Iterable[tuple[int, int]] = (), split: SplitOf | None = None) -> None:
        self.split, self._table = split, None if split is None else split_table(split)
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
        # For each range: how many samples (of the split) are left out before it, and how many are kept.
        count = self._count
        self._before = [0, *accumulate(count(stop) - count(start) for start, stop in joined)]
        self._kept = [count(start) - out for start, out in zip(self._starts, self._before, strict=False)]

    def __bool__(self) -> bool:
        return bool(self.ranges) or self._table is not None

    def __contains__(self, sample: int) -> bool:
        if (at := bisect_right(self._starts, sample) - 1) >= 0 and sample < self._stops[at]:
            return True
        return self._table is not None and sample not in self._table

    def joined(self, ranges: Iterable[tuple[int, int]]) -> Gaps:
        """Returns these gaps with further ranges."""
        more = tuple(ranges)
        return Gaps((*self.ranges, *more), self.split) if more else self

    def kept(self, start: int, stop: int) -> int:
        """Returns how many samples of [start, stop) are kept; 0 if stop <= start."""
        return max(0, self._kept_before(stop) - self._kept_before(start))

    def nth(self, start: int, number: _N) -> _N:
        """Returns the kept sample with this number (or array of numbers), counted from 0 at `start`."""
        if not self.ranges and self._table is None:
            return start + number
        rank = number + self._kept_before(start)
        if isinstance(rank, int):
            rank += self._before[bisect_right(self._kept, rank)]
        else:
            rank = rank + np.array(self._before, np.int64)[np.searchsorted(self._kept, rank, side="right")]
        return rank if self._table is None else self._table.sample(rank)

    def around(self, sample: int) -> tuple[int, int]:
        """Returns a half-open range of consecutive kept samples that contains the given one."""
        at = bisect_right(self._starts, sample)
        start, stop = self._stops[at - 1] if at else 0, self._starts[at] if at < len(self._starts) else 2**63
        if self._table is None:
            return start, stop
        first, last = self._table.around(sample)
        return max(start, first), min(stop, last)

    def _count(self, sample: int) -> int:
        return sample if self._table is None else self._table.count(sample)

    def _kept_before(self, sample: int) -> int:
        at, count = bisect_right(self._starts, sample) - 1, self._count
        if at < 0:
            return count(sample)
        return count(sample) - self._before[at] - count(min(sample, self._stops[at])) + count(self._starts[at])


_gaps_of: Final = lru_cache(maxsize=64)(partial(Gaps, ()))  # makes the gaps of a split once


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that never change in a run: the consecutive samples that a lane gets, the shuffle, and the split.

    `window` positions of a lane, a multiple of `unit`, are shuffled together; 0 draws in order.
    """

    unit: int
    window: int = 0
    seed: int = 0
    split: SplitOf | None = None

    def __post_init__(self) -> None:
        check_field("unit", self.unit, 1)
        check_field("window", self.window, 0)
        check_field("seed", self.seed, 0, 2**63)
        if self.window % self.unit:
            raise ValueError(f"window must be a multiple of unit = {self.unit}, got {self.window}")

    @property
    def gaps(self) -> Gaps:
        """The samples of other splits."""
        return _gaps_of(self.split)

    @property
    def span(self) -> int:
        """Positions of a lane that become drawable together."""
        return self.window or self.unit


UNIT_NAMES: Final = ("chunk", "sample", "batch", "auto")


def named_unit(unit: str | int, samples_per_chunk: int, batch_size: int) -> int | None:
    """Returns the samples of a unit, given by name or number; None for "auto". Raises ValueError: unknown unit."""
    if type(unit) is int and unit >= 1:
        return unit
    units = {"chunk": samples_per_chunk, "sample": 1, "batch": batch_size, "auto": None}
    if not isinstance(unit, str) or unit not in units:
        raise ValueError(f"unit must be one of {', '.join(UNIT_NAMES)} or a number of at least 1, got {unit!r}")
    return units[unit]


def auto_unit(
    dp: int, samples_per_chunk: int, batch_size: int, published: int, ended: bool, limit: int | None
) -> int | None:
    """Returns the unit for "auto": a chunk if there is a full chunk for each rank, otherwise a micro batch.

    With fewer chunks the whole stream would be tail: one read per row. Returns None while this depends on rows still to
    be published; after that the result is the same for all later `published` and `ended`, so all ranks agree.
    """
    enough = dp * samples_per_chunk
    if limit is not None and limit < enough:
        return batch_size
    if published >= enough:
        return samples_per_chunk
    return batch_size if ended else None


def window_positions(chunks: int, samples_per_chunk: int, unit: int) -> int:
    """Returns the positions of a rank's shuffle window of `chunks` chunks, rounded up to whole units.

    >>> window_positions(2, 1000, 1000), window_positions(2, 1000, 64), window_positions(0, 1000, 64)
    (2000, 2048, 0)
    """
    return -(-chunks * samples_per_chunk // unit) * unit


class Layout(NamedTuple):
    """How lanes map to indices of a map-style data set: a bijection between [0, size) and [0, block) of each lane.

    With `dp=2, block=3`, lane after lane or `strided`::

        index                     0  1  2  3  4  5
        block      lane           0  0  0  1  1  1        lane = index // block
                   position       0  1  2  0  1  2
        strided    lane           0  1  0  1  0  1        lane = index % dp
                   position       0  0  1  1  2  2
    """

    dp: int
    block: int
    strided: bool = False

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.dp * self.block

    def locate(self, index: int) -> tuple[int, int]:
        """Returns lane and position of `index`; negative indices count from the end. Raises IndexError."""
        number, size = as_int(index), self.dp * self.block
        if not -size <= number < size:
            raise outside("index", number, size, low=-size)
        number %= size
        return (number % self.dp, number // self.dp) if self.strided else divmod(number, self.block)

    def lane_indices(self, lane: int) -> range:
        """Returns the indices of `lane`, by position. Raises IndexError: `lane` is not in [0, dp)."""
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        return range(lane, self.size, self.dp) if self.strided else range(lane * self.block, (lane + 1) * self.block)
