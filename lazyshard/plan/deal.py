"""The deal: which sample of the stream is which position of which lane; gaps, which are left out; and units.

A stream is dealt in stripes. A stripe is `dp` units, one a lane, and a unit is `unit` samples in a row. With
`dp=2, unit=3`, the samples of each lane by position::

    position   0   1   2 |  3   4   5 |  6   7
    lane 0     0   1   2 |  6   7   8 | 12  14
    lane 1     3   4   5 |  9  10  11 | 13  15
               stripe 0  |  stripe 1  | tail of a stream of 16

What fills no whole stripe once the stream has ended, the tail, is dealt row by row, so lanes differ by at most one
sample: position q of lane l is sample `q * dp + (l - turn) % dp`. As long as the end is not known (`total` None), every
position is taken to lie in a whole stripe, which is the same sample wherever the stripe turns out to be whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_Integers = npt.NDArray[np.int64]


def check_field(name: str, value: object, low: int, stop: int | None = None) -> None:
    """Raises ValueError for what is not an `int` in [low, stop); `bool` is none: `dp=True` is a slip."""
    if type(value) is int and value >= low and (stop is None or value < stop):
        return
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    raise ValueError(f"{name} must be an int {bound}, got {value!r}")


def outside(name: str, value: int, stop: int | None, why: str = "", low: int = 0) -> IndexError:
    """Returns the error for an index outside [low, stop), `stop` None being no upper bound."""
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    return IndexError(f"{name} must be {bound}{why}, got {value}")


def int64_array(name: str, values: npt.ArrayLike, stop: int | None = None, low: int = 0) -> _Integers:
    """Returns `values` as int64. Raises ValueError: they are no integers; IndexError: one is not in [low, stop)."""
    given = np.asarray(values)
    if not given.size:
        return given.astype(np.int64)
    if given.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {given.dtype}")
    # Before the conversion, which would wrap a large unsigned number into a small negative one.
    end = 2**63 if stop is None else stop
    if int(given.min()) < low or int(given.max()) >= end:
        bad = next(number for number in given.flat if not low <= int(number) < end)
        raise outside(name, int(bad), stop, low=low)
    return given.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class Deal:
    """The samples of a stream, dealt to `dp` lanes in units of `unit`; `total` samples once that is known.

    `turn` is the lane that gets the first sample of the tail: not 0 where the lanes [0, turn) were dealt one more
    before.
    """

    dp: int
    unit: int
    turn: int = 0

    def sample(self, lane: int, position: int, total: int | None = None) -> int:
        """Returns the number of the sample at `position` of `lane`. Raises IndexError: there is none."""
        dp = self.dp
        if not 0 <= lane < dp:
            raise outside("lane", lane, dp)
        if position < 0:
            raise outside("position", position, None)
        if total is not None and position >= self.whole_positions(total):
            number = position * dp + (lane - self.turn) % dp
            if number >= total:
                raise self._past_end(lane, position, total)
            return number
        unit = self.unit
        stripe, within = divmod(position, unit)
        return (stripe * dp + lane) * unit + within

    def samples(self, lanes: npt.ArrayLike, positions: npt.ArrayLike, total: int | None = None) -> _Integers:
        """Returns `sample` for arrays or integers, broadcast against each other, as int64. Raises as `int64_array`."""
        lane, position = np.broadcast_arrays(int64_array("lane", lanes, self.dp), int64_array("position", positions))
        # (stripe * dp + lane) * unit + position % unit, with the remainder written out as position - stripe * unit: one
        # division, not two. In place, since for millions of positions it is memory that costs.
        numbers = np.asarray(position // self.unit)
        numbers *= self.dp - 1
        numbers += lane
        numbers *= self.unit
        numbers += position
        if total is None:
            return numbers
        in_tail = position >= self.whole_positions(total)
        if in_tail.any():
            numbers[in_tail] = position[in_tail] * self.dp + (lane[in_tail] - self.turn) % self.dp
            past = numbers >= total
            if past.any():
                raise self._past_end(int(lane[past][0]), int(position[past][0]), total)
        return numbers

    def place(self, sample: int, total: int | None = None) -> tuple[int, int]:
        """Returns the lane and the position of a sample. Raises IndexError: it is not in [0, total)."""
        if sample < 0 or (total is not None and sample >= total):
            raise outside("sample", sample, total)
        if total is not None and sample >= self.whole_positions(total) * self.dp:
            position, lane = divmod(sample, self.dp)
            return (lane + self.turn) % self.dp, position
        piece, within = divmod(sample, self.unit)
        stripe, lane = divmod(piece, self.dp)
        return lane, stripe * self.unit + within

    def whole_positions(self, total: int) -> int:
        """Returns how many positions of each lane lie in whole stripes; the tail's begin there."""
        return total // (self.dp * self.unit) * self.unit

    def lane_length(self, lane: int, total: int) -> int:
        """Returns how many samples `lane` holds. Raises IndexError: there is no such lane."""
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        # Whole stripes fill all lanes alike and the tail goes round, so this is round-robin's count.
        return (total + self.dp - 1 - (lane - self.turn) % self.dp) // self.dp

    def _past_end(self, lane: int, position: int, total: int) -> IndexError:
        why = f" in lane {lane} of {self.dp} over {total} samples"
        return outside("position", position, self.lane_length(lane, total), why)


class Gaps:
    """Half-open ranges of sample numbers that are left out, joined where they touch. What is kept is numbered.

    ::

        sample      0  1  2  3  4  5  6  7  8      with the gaps [2, 4) and [6, 7), from 1 on
        kept           0        1  2     3  4          kept(1, 7) == 3,  nth(1, 3) == 7
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
        return bool(self.ranges)

    def __contains__(self, sample: int) -> bool:
        at = bisect_right(self._starts, sample) - 1
        return at >= 0 and sample < self._stops[at]

    def joined(self, ranges: Iterable[tuple[int, int]]) -> Gaps:
        """Returns these gaps and more."""
        more = tuple(ranges)
        return Gaps((*self.ranges, *more)) if more else self

    def contains_all(self, samples: _Integers) -> npt.NDArray[np.bool_]:
        """Returns `sample in self` for each."""
        at = np.searchsorted(np.array(self._starts, dtype=np.int64), samples, side="right") - 1
        stops = np.array([0, *self._stops], dtype=np.int64)
        return np.asarray(samples < stops[at + 1])

    def kept(self, start: int, stop: int) -> int:
        """Returns how many samples of [start, stop) are kept; 0 if stop <= start."""
        return max(0, self._kept_before(stop) - self._kept_before(start))

    def nth(self, start: int, number: int) -> int:
        """Returns the sample of that number, from 0, among those kept from `start` on."""
        if not self.ranges:
            return start + number
        rank = self._kept_before(start) + number
        return rank + self._before[bisect_right(self._kept, rank)]

    def nth_all(self, start: int, numbers: _Integers) -> _Integers:
        """Returns `nth` for each."""
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


@dataclass(frozen=True, slots=True)
class Rules:
    """What never changes in a run: samples a lane gets in a row, and the shuffle.

    `window` positions of a lane are shuffled together, a multiple of `unit`; 0 draws in order.
    """

    unit: int
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_field("unit", self.unit, 1)
        check_field("window", self.window, 0)
        check_field("seed", self.seed, 0, 2**63)
        if self.window % self.unit:
            raise ValueError(f"window must be a multiple of unit = {self.unit}, got {self.window}")

    @property
    def span(self) -> int:
        """Positions of a lane that become certain together."""
        return self.window or self.unit


UNIT_NAMES: Final = ("chunk", "sample", "batch", "auto")


def named_unit(unit: str | int, samples_per_chunk: int, batch_size: int) -> int | None:
    """Returns how many samples a unit has, by its name or number; None for "auto". Raises ValueError: there is none."""
    if type(unit) is int and unit >= 1:
        return unit
    units = {"chunk": samples_per_chunk, "sample": 1, "batch": batch_size, "auto": None}
    if not isinstance(unit, str) or unit not in units:
        raise ValueError(f"unit is one of {', '.join(UNIT_NAMES)} or a number from 1, got {unit!r}")
    return units[unit]


def auto_unit(
    dp: int, samples_per_chunk: int, batch_size: int, published: int, ended: bool, limit: int | None
) -> int | None:
    """Returns the unit that "auto" stands for: a chunk if there is a full one for each rank, else a micro batch.

    With fewer chunks the whole stream would be tail: each row a read of its own, and nothing drawn before the end is
    known. None as long as what is still to come decides; then the same for every later `published` and `ended`, so
    ranks agree.
    """
    enough = dp * samples_per_chunk
    if limit is not None and limit < enough:
        return batch_size
    if published >= enough:
        return samples_per_chunk
    return batch_size if ended else None


def window_positions(chunks: int, samples_per_chunk: int, unit: int) -> int:
    """Returns how many positions of a rank a window of so many chunks' worth of samples has: whole units.

    >>> window_positions(2, 1000, 1000), window_positions(2, 1000, 64), window_positions(0, 1000, 64)
    (2000, 2048, 0)
    """
    return -(-chunks * samples_per_chunk // unit) * unit
