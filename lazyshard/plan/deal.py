"""The deal: which sample of the stream is which position of which lane.

A stream is dealt in stripes. A stripe is `dp` units, one a lane, and a unit is `unit` samples in a row. With
`dp=2, unit=3`, the samples of each lane by position::

    position   0   1   2 |  3   4   5 |  6   7
    lane 0     0   1   2 |  6   7   8 | 12  14
    lane 1     3   4   5 |  9  10  11 | 13  15
               stripe 0  |  stripe 1  | tail of a stream of 16

Three well-known rules are this one with another `unit`: the samples of a chunk give `chunk % dp == rank`, 1 gives
sample-level sharding (rank r takes r, r + dp, ...), and the batch size gives the batch-aware rule of the Hugging Face
Trainer's `IterableDatasetShard`.

What fills no whole stripe once the stream has ended, the tail, is dealt row by row. So lanes differ by at most one
sample however few chunks there are. Since the stripes before it hold as many samples in every lane, the tail's position
q of lane l is simply the sample `q * dp + l` (with a `turn`, `q * dp + (l - turn) % dp`).

As long as the end is not known (`total` None), every position is taken to lie in a whole stripe. That is the same
sample as later, with the end known, for every position whose stripe turns out to be whole.

Gaps are left out: ranges of sample numbers, and only what is kept is numbered and dealt. With the gaps [2, 4) and
[6, 7), from 1 on::

    sample      0  1  2  3  4  5  6  7  8
    kept           0        1  2     3  4          kept(1, 7) == 3,  nth(1, 3) == 7

Units: how many samples in a row a rank is dealt, and which unit `auto` stands for.

Chunks are the best unit where each rank gets some of its own: it opens no other rank's. With fewer chunks than ranks
there is no whole stripe of them, and the whole stream is tail, dealt row by row (`lazyshard.plan.deal`): balanced, but
each row is a read of its own, and on a stream that grows nothing can be drawn before its end is known. So chunks are
**enough** if there is at least one full one for every rank. Eight ranks, four samples a chunk::

    chunks    9         8         7 and 3 rows    1
    unit      4         4         the batch       the batch

Where they are enough, what is left of them for the tail is less than a stripe: under half of the stream, and a share
that shrinks as it grows.

Who decides must not go by how much is published when it happens to look: ranks look at different times. So the answer
is a function of the stream's length alone, and is open until that says it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt


def check_field(name: str, value: object, low: int, stop: int | None = None) -> None:
    """Refuse a configuration value that is not an `int` in the half-open range [low, stop).

    `bool` is refused although it is an `int`: `dp=True` is a slip, not a number of ranks.

    Raises:
        ValueError: with the name, the bound and the value.
    """
    if type(value) is int and value >= low and (stop is None or value < stop):
        return
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    raise ValueError(f"{name} must be an int {bound}, got {value!r}")


def outside(name: str, value: int, stop: int | None, why: str = "", low: int = 0) -> IndexError:
    """Build the error for an index outside the half-open range [low, stop), `stop` None being no upper bound."""
    bound = f">= {low}" if stop is None else f"in [{low}, {stop})"
    return IndexError(f"{name} must be {bound}{why}, got {value}")


def int64_array(name: str, values: npt.ArrayLike, stop: int | None = None, low: int = 0) -> npt.NDArray[np.int64]:
    """Return `values`, of any shape, as int64 after checking that all lie in the half-open range [low, stop).

    Raises:
        ValueError: `values` are not integers.
        IndexError: a value lies outside the range; the first such one is named.
    """
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
    """The samples of a stream, dealt to `dp` lanes.

    Throughout, `total` is how many samples are dealt, once that is known.

    Attributes:
        dp: number of lanes, one per data-parallel rank, >= 1.
        unit: samples a lane gets in a row, >= 1.
        turn: the lane that gets the first sample of the tail, in [0, dp). Not 0 where earlier samples were dealt to the
            lanes [0, turn) already, one more than to the others: see `lazyshard.plan.segment`.

    Raises:
        ValueError: a field is no `int` or outside its range.
    """

    dp: int
    unit: int
    turn: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_field("dp", self.dp, 1)
        check_field("unit", self.unit, 1)
        check_field("turn", self.turn, 0, self.dp)

    def sample(self, lane: int, position: int, total: int | None = None) -> int:
        """Return the number of the sample at `position` of `lane`.

        Raises:
            IndexError: `lane` is not in [0, dp), or `position` not in [0, lane_length(lane, total)).
        """
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

    def samples(
        self, lanes: npt.ArrayLike, positions: npt.ArrayLike, total: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return `sample` for arrays or integers, broadcast against each other.

        Returns:
            int64, of the shape that `lanes` and `positions` broadcast to.

        Raises:
            IndexError: a lane or a position is outside the range that `sample` gives; the first such one is named.
            ValueError: a number is not an integer.
        """
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
        """Return the lane and the position of a sample: the inverse of `sample`.

        Raises:
            IndexError: `sample` is not in [0, total).
        """
        if sample < 0 or (total is not None and sample >= total):
            raise outside("sample", sample, total)
        if total is not None and sample >= self.whole_positions(total) * self.dp:
            position, lane = divmod(sample, self.dp)
            return (lane + self.turn) % self.dp, position
        piece, within = divmod(sample, self.unit)
        stripe, lane = divmod(piece, self.dp)
        return lane, stripe * self.unit + within

    def whole_positions(self, total: int) -> int:
        """Return how many positions of each lane lie in whole stripes; the tail's begin there."""
        return total // (self.dp * self.unit) * self.unit

    def lane_length(self, lane: int, total: int) -> int:
        """Return how many samples `lane` holds; lanes differ by at most one, those from `turn` on being the longer.

        Raises:
            IndexError: `lane` is not in [0, dp).
        """
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        # Whole stripes fill all lanes alike and the tail goes round, so this is round-robin's count.
        return (total + self.dp - 1 - (lane - self.turn) % self.dp) // self.dp

    def _past_end(self, lane: int, position: int, total: int) -> IndexError:
        why = f" in lane {lane} of {self.dp} over {total} samples"
        return outside("position", position, self.lane_length(lane, total), why)


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


@dataclass(frozen=True, slots=True)
class Rules:
    """What never changes in a run.

    Attributes:
        unit: samples a lane gets in a row, >= 1.
        window: positions of one lane that are shuffled together, a multiple of `unit`; 0 draws in order.
        seed: of the shuffle, in [0, 2**63).

    Raises:
        ValueError: a field is no `int` or outside its range.
    """

    unit: int
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
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
    """Return how many samples a unit has, by its name or number; None for "auto": see `auto_unit`.

    Raises:
        ValueError: there is no such unit.
    """
    if type(unit) is int and unit >= 1:
        return unit
    units = {"chunk": samples_per_chunk, "sample": 1, "batch": batch_size, "auto": None}
    if not isinstance(unit, str) or unit not in units:
        raise ValueError(f"unit is one of {', '.join(UNIT_NAMES)} or a number from 1, got {unit!r}")
    return units[unit]


def auto_unit(
    dp: int, samples_per_chunk: int, batch_size: int, published: int, ended: bool, limit: int | None
) -> int | None:
    """Return the unit that "auto" stands for: a chunk if there is a full one for each rank, else a micro batch.

    A batch for every rank is what a step needs at the least, so with it as the unit nothing that is drawn is tail.

    Args:
        dp: number of ranks.
        samples_per_chunk: rows of every chunk but possibly the last.
        batch_size: samples of one rank in a micro batch.
        published: samples that are published.
        ended: whether none will follow.
        limit: samples that are drawn at the most, None for no bound.

    Returns:
        None as long as what is still to come decides: until `dp * samples_per_chunk` samples are published or the
        stream has ended. With chunks as the unit the first step would have to wait for as many. Once it is not None, it
        is the same for every later `published` and `ended` of the stream.
    """
    enough = dp * samples_per_chunk
    if limit is not None and limit < enough:
        return batch_size
    if published >= enough:
        return samples_per_chunk
    return batch_size if ended else None


def window_positions(chunks: int, samples_per_chunk: int, unit: int) -> int:
    """Return how many positions of a rank a window of so many chunks' worth of samples has: whole units.

    So it is known to be published when its stripes are.

    >>> window_positions(2, 1000, 1000), window_positions(2, 1000, 64), window_positions(0, 1000, 64)
    (2000, 2048, 0)
    """
    return -(-chunks * samples_per_chunk // unit) * unit
