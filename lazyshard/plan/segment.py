"""A segment: what is left of one epoch, dealt to the lanes of one part of a run.

When the number of ranks changes, all lanes have drawn as many positions, and windows are open: drawn in part. What they
still hold is **carried** over: lane after lane, in the order in which each would have drawn it, it is dealt to the new
lanes in contiguous slices, the first ones longer by one. Behind the open windows, at a stripe boundary, a fresh deal
begins. Here two lanes with `unit=3`, in order, become three after four draws::

    before     lane 0:  0  1  2   6 |  7  8  12 ...         drawn: left of the bar
               lane 1:  3  4  5   9 | 10 11  15 ...         carried: 7 8 10 11; fresh: from 12 on
    after      lane 0:  7  8 | 12 13 14   21 ...
               lane 1:  10   | 15 16 17   24 ...
               lane 2:  11   | 18 19 20   27 ...

A window that is open in one lane counts as open in all. The tail goes round from the lane behind the longer slices, so
lanes differ by one sample at most. Nothing of what is carried is stored: a place in it is one of the segment before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import Deal, Gaps, Rules, outside
from lazyshard.plan.shuffle import window_place, window_sample, window_samples

_Integers = npt.NDArray[np.int64]


class Slices:
    """`size` numbers in `lanes` contiguous slices of `each`, the first `more` of them longer by one."""

    __slots__ = ("each", "more", "size")

    def __init__(self, size: int, lanes: int) -> None:
        self.size = size
        self.each, self.more = divmod(size, lanes)

    def length(self, number: int) -> int:
        """Returns how long a slice is."""
        return self.each + (number < self.more)

    def start(self, number: int) -> int:
        """Returns where a slice begins."""
        return number * self.each + min(number, self.more)

    def find(self, offset: int) -> tuple[int, int]:
        """Returns the slice in which an offset lies, and where in it."""
        each, more = self.each, self.more
        behind = offset - more * (each + 1)
        if behind < 0:
            return divmod(offset, each + 1)
        number, within = divmod(behind, each)
        return more + number, within

    def find_all(self, offsets: _Integers) -> tuple[_Integers, _Integers]:
        """Returns `find` for each."""
        each, more = self.each, self.more
        if not more:
            number = offsets // each
            return number, offsets - number * each
        number = offsets // (each + 1)
        if each:
            # The greater of the two is right: this in the shorter slices, and that in the longer ones before them.
            np.maximum(number, (offsets - more) // each, out=number)
        return number, offsets - self.starts(number)

    def starts(self, numbers: _Integers) -> _Integers:
        """Returns `start` for each."""
        starts = numbers * self.each
        if self.more:
            starts += np.minimum(numbers, self.more)
        return starts


class Carried:
    """What is carried over from one segment to the next: `size` samples.

    Each lane had drawn [0, draws); `rests` are what each still held, `removed` the offsets in it that are now left out.
    """

    __slots__ = ("_draws", "_kept_before", "_removed", "_rests", "size")

    def __init__(self, rests: Slices, draws: int, removed: _Integers | None = None) -> None:
        self._rests = rests
        self._draws = draws
        self._removed = np.empty(0, dtype=np.int64) if removed is None else removed
        # Of each that is left out: how many are kept before it.
        self._kept_before = self._removed - np.arange(len(self._removed), dtype=np.int64)
        self.size = rests.size - len(self._removed)

    def places(self, numbers: _Integers) -> tuple[_Integers, _Integers]:
        """Returns lanes and positions of the segment before for numbers in [0, size)."""
        offsets = numbers
        if len(self._removed):
            offsets = numbers + np.searchsorted(self._kept_before, numbers, side="right")
        lanes, positions = self._rests.find_all(offsets)
        positions += self._draws
        return lanes, positions

    def stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields where the numbers [start, stop) lie: first number, lane and position before, and length."""
        while start < stop:
            out = int(np.searchsorted(self._kept_before, start, side="right"))
            lane, within = self._rests.find(start + out)
            length = min(stop - start, self._rests.length(lane) - within)
            if out < len(self._removed):
                length = min(length, int(self._kept_before[out]) - start)
            yield start, lane, self._draws + within, length
            start += length

    def number(self, lane: int, position: int) -> int | None:
        """Returns the number of a place that was not drawn before; None if it is not carried, -1 if it is left out."""
        within = position - self._draws
        if within >= self._rests.length(lane):
            return None
        offset = self._rests.start(lane) + within
        out = int(np.searchsorted(self._removed, offset))
        if out < len(self._removed) and self._removed[out] == offset:
            return -1
        return offset - out


_Trace: TypeAlias = "tuple[list[int], list[tuple[Segment, int, int]]]"
"""Of a lane, pieces of what is carried over to it: the position at which each begins, and where it was dealt: segment,
lane, and what is to be added to a position to count from where that lane's fresh deal begins."""


class Segment:
    """What is left of one epoch, dealt to `dp` lanes; `total` is the end of the samples, None while the stream grows.

    Of the segment that ended `before`, None at the beginning of an epoch, each lane had drawn positions [0, draws): a
    ValueError if there are not as many. The fresh deal begins with sample `start`, behind what is `carried` over.
    """

    def __init__(
        self,
        rules: Rules,
        dp: int,
        epoch: int,
        total: int | None,
        gaps: Gaps,
        before: Segment | None = None,
        draws: int = 0,
    ) -> None:
        self.rules = rules
        self.dp = dp
        self.epoch = epoch
        self.total = total
        self.gaps = gaps
        self.before = before
        self.draws_before = draws
        self.start = 0
        self._over = Carried(Slices(0, 1), 0)
        if before is not None:
            self._end(before, draws)
        self.carried = self._over.size
        if not self.carried:
            # Nothing of the history before matters any more.
            self.before = None
        self._traces: dict[int, _Trace] = {}
        self._slices = Slices(self.carried, dp)
        self._deal = Deal(dp, rules.unit, self.carried % dp)
        self._fresh = None if total is None else gaps.kept(self.start, total)
        # Positions of the fresh deal of which the end is no matter: windows, or stripes, that are whole.
        self._whole = 2**63
        if self._fresh is not None:
            self._whole = self._deal.whole_positions(self._fresh) // rules.span * rules.span

    def _end(self, before: Segment, draws: int) -> None:
        span, dp = self.rules.span, before.dp
        # What the lane that drew the most fresh samples has opened, counts as open in all lanes.
        most = draws - before.carried // dp
        opened = -(-most // span) * span if most > 0 else 0
        first, last = (before._open_length(lane, opened) - draws for lane in (0, dp - 1))
        if last < 0:
            raise ValueError(f"{draws} positions were drawn of each of {dp} lanes, but one ends at {draws + last}")
        longer = bisect_left(range(dp), True, key=lambda lane: before._open_length(lane, opened) - draws == last)
        rests = Slices(last * dp + (longer if first > last else 0), dp)
        if before._fresh is not None and before.total is not None and opened * dp >= before._fresh:
            self.start = before.total
        else:
            self.start = before.gaps.nth(before.start, opened * dp)
        lowest = before.done_before(draws)
        self._over = Carried(rests, draws)
        # Of the region from which samples are carried, is more left out than before?
        if self.gaps.kept(lowest, self.start) != before.gaps.kept(lowest, self.start):
            samples = before.samples(*self._over.places(np.arange(rests.size, dtype=np.int64)))
            self._over = Carried(rests, draws, np.flatnonzero(self.gaps.contains_all(samples)))

    def _open_length(self, lane: int, opened: int) -> int:
        """Returns how many positions of a lane lie before the end of its open windows."""
        fresh = opened if self._fresh is None else min(opened, self._deal.lane_length(lane, self._fresh))
        return self._slices.length(lane) + fresh

    def lane_length(self, lane: int) -> int:
        """Returns how many positions a lane has, once the end is known; lanes differ by at most one."""
        assert self._fresh is not None
        return self._slices.length(lane) + self._deal.lane_length(lane, self._fresh)

    @property
    def size(self) -> int | None:
        """Samples left of the epoch, over all lanes; None as long as that is open."""
        return None if self._fresh is None else self.carried + self._fresh

    def sample(self, lane: int, position: int) -> int:
        """Returns the sample that `lane` draws at `position`. Raises IndexError: there is no such lane or position."""
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        if position < 0:
            raise outside("position", position, None)
        fresh = position - self._slices.length(lane)
        if fresh >= 0:
            return self._fresh_sample(lane, fresh)
        starts, origins = self._traces.get(lane) or self._trace(lane)
        segment, lane, shift = origins[bisect_right(starts, position) - 1]
        return segment._fresh_sample(lane, position + shift)

    def _fresh_sample(self, lane: int, position: int) -> int:
        total = None if position < self._whole else self._fresh
        kept = window_sample(self._deal, self.rules, self.epoch, lane, position, total)
        return self.gaps.nth(self.start, kept)

    def _trace(self, lane: int) -> _Trace:
        starts: list[int] = []
        origins: list[tuple[Segment, int, int]] = []
        before = self.before
        assert before is not None
        first = self._slices.start(lane)
        for number, old, position, length in self._over.stretches(first, first + self._slices.length(lane)):
            # Position here - position there.
            shift, stop = number - first - position, position + length
            own = before._slices.length(old)
            if position < own:
                cuts, older = before._traces.get(old) or before._trace(old)
                at = bisect_right(cuts, position) - 1
                for cut, (segment, oldest, further) in zip(cuts[at:], older[at:], strict=True):
                    if cut >= stop:
                        break
                    starts.append(max(cut, position) + shift)
                    origins.append((segment, oldest, further - shift))
            if stop > own:
                starts.append(max(own, position) + shift)
                origins.append((before, old, -shift - own))
        self._traces[lane] = starts, origins
        return starts, origins

    def samples(self, lanes: _Integers, positions: _Integers) -> _Integers:
        """Returns `sample` for int64 arrays of one dimension and the same length."""
        slices = self._slices
        # Behind what is carried; negative: carried.
        behind = positions - slices.each
        if slices.more:
            behind -= lanes < slices.more
        if not self.carried:
            return self._fresh_samples(lanes, behind)
        fresh = behind >= 0
        count = np.count_nonzero(fresh)
        if count == len(fresh):
            return self._fresh_samples(lanes, behind)
        if not count:
            return self._carried_samples(lanes, positions)
        drawn, own, over = np.empty_like(positions), np.flatnonzero(fresh), np.flatnonzero(~fresh)
        drawn[own] = self._fresh_samples(lanes[own], behind[own])
        drawn[over] = self._carried_samples(lanes[over], positions[over])
        return drawn

    def _fresh_samples(self, lanes: _Integers, positions: _Integers) -> _Integers:
        epochs = np.full(len(lanes), self.epoch, dtype=np.int64)
        kept = window_samples(self._deal, self.rules, epochs, lanes, positions, self._fresh)
        return self.gaps.nth_all(self.start, kept)

    def _carried_samples(self, lanes: _Integers, positions: _Integers) -> _Integers:
        assert self.before is not None
        return self.before.samples(*self._over.places(positions + self._slices.starts(lanes)))

    def place(self, sample: int) -> tuple[int, int] | None:
        """Returns lane and position of a sample from `start` on; None if it is left out or past the end."""
        if sample in self.gaps or (self.total is not None and sample >= self.total):
            return None
        kept = self.gaps.kept(self.start, sample)
        lane, position = window_place(self._deal, self.rules, self.epoch, kept, self._fresh)
        return lane, position + self._slices.length(lane)

    def take_over(self, lane: int, position: int) -> tuple[int, int] | None:
        """Returns where a place not drawn before is now; None if not carried, (-1, -1) if left out from here on."""
        number = self._over.number(lane, position)
        if number is None or number < 0:
            return None if number is None else (-1, -1)
        return self._slices.find(number)

    def run(self, lane: int, position: int, limit: int) -> tuple[int, int]:
        """Returns positions [first, stop) around `position` that are drawn as consecutive samples, `stop` <= limit."""
        own, unit = self._slices.length(lane), self.rules.unit
        fresh = position - own
        alone = position, position + 1
        if self.rules.window or fresh < 0:
            return alone
        if self._fresh is not None and fresh >= self._deal.whole_positions(self._fresh):
            return alone
        first = fresh // unit * unit
        stop = min(first + unit, limit - own)
        if self.gaps and self.sample(lane, own + stop - 1) - self.sample(lane, own + first) != stop - 1 - first:
            return alone
        return own + first, own + stop

    def window_stop(self, lane: int, position: int) -> int:
        """Returns the position behind the window of a position; what is carried over is one window."""
        own, window = self._slices.length(lane), self.rules.window
        if position < own:
            return own
        return own + ((position - own) // window + 1) * window if window else 2**63

    def needed(self, position: int, stop: int) -> int:
        """Returns how many samples must be published before `position`, of a batch up to `stop`, may be drawn."""
        span = self.rules.span
        most = position - self.carried // self.dp
        kept = (most // span + 1) * span * self.dp if most >= 0 else 0
        kept = max(kept, stop * self.dp - self.carried)
        return self.gaps.nth(self.start, kept - 1) + 1 if kept > 0 else self.start

    def drawable(self, samples: int) -> tuple[int, int]:
        """Returns how many positions are certain once so many samples are published, and how many each lane holds."""
        if samples < self.start:
            return 0, 0
        kept, span = self.gaps.kept(self.start, samples), self.rules.span
        certain = kept // self.dp // span * span + self.carried // self.dp
        return certain, (kept + self.carried) // self.dp

    def done_before(self, position: int) -> int:
        """Returns N such that no sample below N is drawn behind [0, position); what is open counts as needed whole."""
        longest = -(-self.carried // self.dp)
        if self.carried and position < longest:
            return self._lowest
        fresh = position - longest
        if self._fresh is not None and not self.rules.window and fresh >= self._deal.whole_positions(self._fresh):
            kept = min(fresh * self.dp, self._fresh)
        else:
            kept = fresh // self.rules.span * self.rules.span * self.dp
        if self._fresh is not None and kept >= self._fresh:
            assert self.total is not None
            return self.total
        return self.gaps.nth(self.start, kept)

    @cached_property
    def _lowest(self) -> int:
        """A number below which nothing is carried."""
        assert self.before is not None
        return self.before.done_before(self.draws_before)
