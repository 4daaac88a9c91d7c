"""A segment: the rest of one epoch, dealt to the lanes of one part of a run.

When the number of ranks changes, some windows are open: partly drawn. Their remaining samples are **carried** over:
lane after lane, in the order in which each would have drawn them, in contiguous slices, the first slices longer by one.
After the open windows, at a stripe boundary, a fresh deal begins. Here two lanes with `unit=3`, in order, become three
after four draws::

    before     lane 0:  0  1  2   6 |  7  8  12 ...         drawn: left of the bar
               lane 1:  3  4  5   9 | 10 11  15 ...         carried: 7 8 10 11; fresh: from 12 on
    after      lane 0:  7  8 | 12 13 14   21 ...
               lane 1:  10   | 15 16 17   24 ...
               lane 2:  11   | 18 19 20   27 ...

A window that is open in one lane counts as open in all. The tail is dealt in turn, starting with the lane after the
longer slices. Carried samples are not stored: a carried position is mapped to a position of the previous segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

import numpy as np

from lazyshard.part import Int64Array
from lazyshard.plan.deal import Deal, Gaps, Rules
from lazyshard.plan.shuffle import permutation

_BLOCK: Final = 512  # Carried positions of a lane whose samples are computed together


class Slices:
    """`size` numbers in `lanes` contiguous slices of `each`, the first `more` of them longer by one."""

    __slots__ = ("each", "more", "size")

    def __init__(self, size: int, lanes: int) -> None:
        self.size = size
        self.each, self.more = divmod(size, lanes)

    def length(self, number: int) -> int:
        """Returns the length of a slice."""
        return self.each + (number < self.more)

    def start(self, number: int) -> int:
        """Returns the offset at which a slice begins."""
        return number * self.each + min(number, self.more)

    def starts(self, numbers: Int64Array) -> Int64Array:
        """Returns `start` for an array."""
        return numbers * self.each + np.minimum(numbers, self.more)

    def find(self, offset: int) -> tuple[int, int]:
        """Returns the slice that contains an offset, and the offset within the slice."""
        number = offset // (self.each + 1)
        if number >= self.more:
            number = (offset - self.more) // self.each
        return number, offset - self.start(number)

    def find_all(self, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns `find` for an array."""
        number = offsets // (self.each + 1)
        if self.each:
            # The maximum is right: the first value holds in the longer slices, the second in the shorter ones after.
            np.maximum(number, (offsets - self.more) // self.each, out=number)
        return number, offsets - self.starts(number)


class Segment:
    """The rest of one epoch, dealt to `dp` lanes; `total` is the end of the samples, None while the stream grows.

    `ended`, None at the beginning of an epoch: the previous segment, and how many positions each of its lanes had
    drawn (ValueError: it has fewer). The fresh deal begins with sample `start`, after the `carried` samples.
    """

    def __init__(
        self, rules: Rules, dp: int, epoch: int, total: int | None, gaps: Gaps, ended: tuple[Segment, int] | None = None
    ) -> None:
        self.rules, self.dp, self.epoch, self.total, self.gaps = rules, dp, epoch, total, gaps
        self.start = 0
        self._lowest = 0  # no sample below is carried
        # The samples that the lanes of the previous segment, which had drawn `_drawn` positions, still held; the
        # offsets among them that are skipped now, and for each how many are kept before it.
        self._rests, self._drawn = Slices(0, 1), 0
        self._removed: list[int] = []
        self._kept_before: list[int] = []
        if ended is not None:
            self._end(*ended)
        self.carried = self._rests.size - len(self._removed)
        # If nothing is carried, the history is no longer needed.
        self.before = ended[0] if ended is not None and self.carried else None
        self._slices = Slices(self.carried, dp)
        self._known: tuple[tuple[int, int], list[int]] = (-1, -1), []
        self._deal = Deal(dp, rules.unit, self.carried % dp)
        self._fresh = None if total is None else gaps.kept(self.start, total)
        # Positions of the fresh deal that do not depend on the end: whole windows or stripes.
        self._whole = 2**63
        if self._fresh is not None:
            self._whole = self._deal.whole_positions(self._fresh) // rules.span * rules.span

    def _end(self, before: Segment, draws: int) -> None:
        span, dp = self.rules.span, before.dp
        # The windows opened by the lane that drew the most fresh samples count as open in all lanes.
        most = draws - before.carried // dp
        opened = -(-most // span) * span if most > 0 else 0
        first, last = (before.lane_length(lane, opened) - draws for lane in (0, dp - 1))
        if last < 0:
            raise ValueError(f"{draws} positions were drawn in each of {dp} lanes, but one lane ends at {draws + last}")
        longer = bisect_left(range(dp), True, key=lambda lane: before.lane_length(lane, opened) - draws == last)
        self._rests, self._drawn = Slices(last * dp + (longer if first > last else 0), dp), draws
        if before._fresh is not None and before.total is not None and opened * dp >= before._fresh:
            self.start = before.total
        else:
            self.start = before.gaps.nth(before.start, opened * dp)
        self._lowest = before.done_before(draws)
        # If more samples are skipped than before, some of the carried ones may be among them.
        if self.gaps.kept(self._lowest, self.start) != before.gaps.kept(self._lowest, self.start):
            samples = before.samples(*self._places_before(np.arange(self._rests.size, dtype=np.int64))).tolist()
            self._removed = [offset for offset, one in enumerate(samples) if one in self.gaps]
            self._kept_before = [offset - number for number, offset in enumerate(self._removed)]

    def _places_before(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns lanes and positions in the previous segment of carried samples, numbered in [0, carried)."""
        out = np.searchsorted(self._kept_before, numbers, side="right")
        lanes, within = self._rests.find_all(numbers + out)
        return lanes, self._drawn + within

    def lane_length(self, lane: int, opened: int = 2**63) -> int:
        """Returns how many positions a lane has, or how many lie before the end of its first `opened` fresh ones."""
        fresh = opened if self._fresh is None else min(opened, self._deal.lane_length(lane, self._fresh))
        return self._slices.length(lane) + fresh

    @property
    def size(self) -> int | None:
        """Samples left in the epoch, over all lanes; None while unknown."""
        return None if self._fresh is None else self.carried + self._fresh

    def sample(self, lane: int, position: int) -> int:
        """Returns the sample that `lane` draws at `position`, which must exist."""
        slices = self._slices
        fresh = position - slices.each - (lane < slices.more)
        if fresh < 0:
            return self._carried_sample(lane, position)
        total = None if fresh < self._whole else self._fresh
        if window := self.rules.window:
            number, within = divmod(fresh, window)
            fresh = number * window + self._order(lane, number, total).item(within)
        return self.gaps.nth(self.start, self._deal.sample(lane, fresh, total))

    def _carried_sample(self, lane: int, position: int) -> int:
        # From the second request on, a whole block is computed: one by one, each earlier part costs a microsecond.
        assert self.before is not None
        first, within = position - position % _BLOCK, position % _BLOCK
        known, samples = self._known
        if known != (lane, first):
            self._known = (lane, first), []
            number = self._slices.start(lane) + position
            before, within = self._rests.find(number + bisect_right(self._kept_before, number))
            return self.before.sample(before, self._drawn + within)
        if not samples:
            start, stop = self._slices.start(lane), min(first + _BLOCK, self._slices.length(lane))
            samples += self.before.samples(*self._places_before(np.arange(start + first, start + stop))).tolist()
        return samples[within]

    def _order(self, lane: int, number: int, total: int | None) -> Int64Array:
        """Returns the permutation of a window of the fresh deal; the last window is as long as the rest of its lane."""
        size = self.rules.window
        if total is not None:
            size = min(size, self._deal.lane_length(lane, total) - number * size)
        return permutation(size, self.rules.seed, self.epoch, lane, number)

    def samples(self, lanes: Int64Array, positions: Int64Array) -> Int64Array:
        """Returns `sample` for int64 arrays of one dimension and the same length."""
        behind = positions - self._slices.each - (lanes < self._slices.more)
        fresh = behind >= 0
        if fresh.all():
            return self._fresh_samples(lanes, behind)
        assert self.before is not None
        drawn, over = np.empty_like(positions), ~fresh
        drawn[fresh] = self._fresh_samples(lanes[fresh], behind[fresh])
        drawn[over] = self.before.samples(*self._places_before(positions[over] + self._slices.starts(lanes[over])))
        return drawn

    def _fresh_samples(self, lanes: Int64Array, positions: Int64Array) -> Int64Array:
        if (window := self.rules.window) and len(positions):
            numbers = positions // window
            # Sorted by window, so that each permutation is computed once, whatever the order of positions.
            order = np.lexsort((numbers, lanes))
            by_number, by_lane = numbers[order], lanes[order]
            changes = (by_number[1:] != by_number[:-1]) | (by_lane[1:] != by_lane[:-1])
            drawn = np.empty_like(positions)
            for own in np.split(order, np.flatnonzero(changes) + 1):
                lane, number = lanes.item(own[0]), numbers.item(own[0])
                moves = self._order(lane, number, self._fresh)
                drawn[own] = moves[positions[own] - number * window] + number * window
            positions = drawn
        return self.gaps.nth(self.start, self._deal.samples(lanes, positions, self._fresh))

    def place(self, sample: int) -> tuple[int, int] | None:
        """Returns lane and position of a sample from `start` on; None if it is skipped or past the end."""
        if sample in self.gaps or (self.total is not None and sample >= self.total):
            return None
        lane, position = self._deal.place(self.gaps.kept(self.start, sample), self._fresh)
        if window := self.rules.window:
            number, moved = divmod(position, window)
            position = number * window + int(np.flatnonzero(self._order(lane, number, self._fresh) == moved)[0])
        return lane, position + self._slices.length(lane)

    def take_over(self, lane: int, position: int) -> tuple[int, int] | None:
        """Returns the new place of a place not drawn before; None if not carried, (-1, -1) if skipped from here on."""
        within = position - self._drawn
        if within >= self._rests.length(lane):
            return None
        offset = self._rests.start(lane) + within
        out = bisect_left(self._removed, offset)
        return (-1, -1) if offset in self._removed[out : out + 1] else self._slices.find(offset - out)

    def run(self, lane: int, position: int, limit: int) -> tuple[int, int]:
        """Returns positions [first, stop) around `position` that draw consecutive samples, `stop` <= limit."""
        own, unit, alone = self._slices.length(lane), self.rules.unit, (position, position + 1)
        fresh = position - own
        tail = self._fresh is not None and fresh >= self._deal.whole_positions(self._fresh)
        if self.rules.window or fresh < 0 or tail:
            return alone
        first = fresh // unit * unit
        stop = min(first + unit, limit - own)
        if self.gaps:
            sample = self.sample(lane, position)
            low, high = self.gaps.around(sample)
            first, stop = max(first, fresh - (sample - low)), min(stop, fresh + high - sample)
        return own + first, own + stop

    def window_stop(self, lane: int, position: int) -> int:
        """Returns the end of the window of a position; the carried samples of a lane count as one window."""
        own, window = self._slices.length(lane), self.rules.window
        if position < own:
            return own
        return own + ((position - own) // window + 1) * window if window else 2**63

    def needed(self, position: int, stop: int) -> int:
        """Returns how many samples must be published before `position`, in a batch that ends at `stop`, is drawable."""
        span = self.rules.span
        most = position - self.carried // self.dp
        kept = (most // span + 1) * span * self.dp if most >= 0 else 0
        kept = max(kept, stop * self.dp - self.carried)
        return self.gaps.nth(self.start, kept - 1) + 1 if kept > 0 else self.start

    def drawable(self, samples: int) -> tuple[int, int]:
        """Returns how many positions are certain once `samples` are published, and how many each lane holds."""
        if samples < self.start:
            return 0, 0
        kept, span = self.gaps.kept(self.start, samples), self.rules.span
        certain = kept // self.dp // span * span + self.carried // self.dp
        return certain, (kept + self.carried) // self.dp

    def done_before(self, position: int) -> int:
        """Returns N such that no sample below N is drawn after [0, position); open windows count completely."""
        fresh = position - -(-self.carried // self.dp)
        if fresh < 0:
            return self._lowest
        if self._fresh is not None and not self.rules.window and fresh >= self._deal.whole_positions(self._fresh):
            kept = min(fresh * self.dp, self._fresh)
        else:
            kept = fresh // self.rules.span * self.rules.span * self.dp
        if self._fresh is not None and kept >= self._fresh:
            assert self.total is not None
            return self.total
        return self.gaps.nth(self.start, kept)
