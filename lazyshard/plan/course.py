"""The course of a run: what each rank draws, through any number of changes of the number of ranks.

What a part of a run draws follows from the parts before it, each by three integers: how many lanes, its micro batch,
and how many positions each lane drew. That history is all the state there is. In an epoch each lane draws as many
positions, in whole micro batches. Where a part begins in the middle of an epoch, what is left of that is dealt anew
(`lazyshard.plan.segment`); every later epoch is whole. Positions are counted from the beginning of a part::

    part 0, 2 lanes                    part 1, 3 lanes
    epoch 0 ........... | epoch 1 .....|.... | epoch 2 ........
                                       what is left of epoch 1

A part with as many lanes as the one before, and from which on no more is left out, goes on in the same order. A part
that ends exactly where an epoch does is still in that epoch, so it makes no difference whether the end was known.

Throughout, `total` is the end of the samples once it is known, None while the stream grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.part import Part
from lazyshard.plan.deal import Deal, Gaps, Rules, int64_array, outside
from lazyshard.plan.segment import Segment
from lazyshard.plan.shuffle import window_sample, window_samples

_Integers = npt.NDArray[np.int64]

_OPEN: Final = -1
"""The length of an epoch as long as the end of the stream is not known."""

_BLOCK: Final = 16_384
"""Positions computed together: so many that a processor's cache holds all that is made of them on the way."""


class Draw(NamedTuple):
    """What is drawn at a position: the number of the `sample`, and the `epoch` in which it is drawn."""

    epoch: int
    sample: int


class Run(NamedTuple):
    """Positions [first, stop) of one lane that are drawn as consecutive samples, `sample` being that of `first`."""

    first: int
    stop: int
    sample: int
    epoch: int


class Place(NamedTuple):
    """Where a sample is drawn: `position` of `lane`, counted from the beginning of a part."""

    part: int
    lane: int
    position: int


class Begin(NamedTuple):
    """Where a part begins, given a total: at the position `offset` of a segment, perhaps that of the part before.

    `length` and `full` are positions of each lane in that epoch and in a later one, `_OPEN` and 0 as long as that is
    open; `deal` is that of every later epoch, in numbers of the `kept` samples of it.
    """

    segment: Segment
    offset: int
    goes_on: bool
    length: int
    deal: Deal
    kept: int | None
    full: int

    def draw_later(self, lane: int, position: int) -> Draw:
        """Returns epoch and sample of a position that lies in a later epoch, counted from where the part begins."""
        segment = self.segment
        epochs, position = divmod(position - self.length, self._filled())
        epoch = segment.epoch + 1 + epochs
        kept = window_sample(self.deal, segment.rules, epoch, lane, position, self.kept)
        return Draw(epoch, segment.gaps.nth(0, kept))

    def draws(self, lanes: _Integers, positions: _Integers) -> tuple[_Integers | int, _Integers]:
        """Returns epochs, one or one for each, and samples of positions counted from where the part begins."""
        segment, length = self.segment, self.length
        if length == _OPEN or positions.max() < length:
            return segment.epoch, segment.samples(lanes, positions + self.offset)
        later = positions >= length
        epochs = np.full(len(positions), segment.epoch, dtype=np.int64)
        samples = np.empty_like(positions)
        samples[~later] = segment.samples(lanes[~later], positions[~later] + self.offset)
        behind, full = positions[later] - length, self._filled()
        turns = behind // full
        epochs[later] += 1 + turns
        kept = window_samples(self.deal, segment.rules, epochs[later], lanes[later], behind - turns * full, self.kept)
        samples[later] = segment.gaps.nth_all(0, kept)
        return epochs, samples

    def later(self, total: int, epoch: int) -> Segment:
        """Returns a later, whole epoch."""
        segment = self.segment
        return Segment(segment.rules, segment.dp, epoch, total, segment.gaps)

    def around(self, position: int, total: int) -> tuple[Segment, int, int]:
        """Returns the segment of a position, what to add to get a position of it, and the position behind its epoch."""
        if position < self.length:
            return self.segment, self.offset, self.length
        epochs, within = divmod(position - self.length, self._filled())
        segment = self.later(total, self.segment.epoch + 1 + epochs)
        return segment, within - position, position - within + self.full

    def _filled(self) -> int:
        if not self.full:
            raise IndexError(
                f"an epoch is empty: {self.kept} samples are less than a batch of each of {self.deal.dp} lanes"
            )
        return self.full


class Course:
    """The parts of a run, of which the last one is `current`; positions, `dp` and `batch_size` are those of that one.

    That a part has drawn more than there was is found, as a ValueError, when a total is given.
    """

    def __init__(self, rules: Rules, parts: Sequence[Part]) -> None:
        if not parts:
            raise ValueError("a course has at least one part")
        self.rules = rules
        self.parts = tuple(parts)
        self.current = self.parts[-1]
        self.dp = self.current.dp
        self.batch_size = self.current.batch_size
        self._begins: dict[int | None, list[Begin]] = {}
        # The total that was asked for last, and where the current part begins with it.
        self._last: tuple[int | None, Begin | None] = (None, None)

    @property
    def consumed_before(self) -> int:
        """Samples trained before the current part, over all lanes and epochs."""
        return sum(part.dp * part.draws for part in self.parts[:-1] if part.trained)

    def until(self, number: int) -> Course:
        """Returns the course as it was in the part of that number, from 0."""
        return Course(self.rules, self.parts[: number + 1]) if number + 1 < len(self.parts) else self

    def in_epoch(self, epoch: int) -> Course:
        """Returns the course whose current part begins an epoch instead, with the same lanes, and the same left out."""
        skip = Gaps(one for part in self.parts for one in part.skip).ranges
        return Course(self.rules, [replace(self.current, draws=0, epoch=epoch, skip=skip)])

    def epoch(self, total: int | None) -> int:
        """Returns the epoch in which the current part begins."""
        return self.begin(total).segment.epoch

    def epoch_length(self, total: int) -> int:
        """Returns how many positions each lane draws in the epoch in which the current part begins: whole batches."""
        return self.begin(total).length

    def epoch_stop(self, drawn: int, total: int) -> int:
        """Returns the position behind the epoch of a run that has drawn so many; at its end still that one."""
        begin = self.begin(total)
        if drawn <= begin.length or not begin.full:
            return begin.length
        return begin.length - (begin.length - drawn) // begin.full * begin.full

    def full_epoch_length(self, total: int) -> int:
        """Returns how many positions each lane draws in a later, whole epoch."""
        return self.begin(total).full

    def leftover(self, total: int) -> int:
        """Returns how many samples the epoch in which the part begins leaves undrawn: fewer than dp * batch_size."""
        begin = self.begin(total)
        return (begin.segment.size or 0) - self.dp * (begin.offset + begin.length)

    def needed(self, position: int) -> int:
        """Returns how many samples must be published before `position` may be drawn with the end unknown.

        For every `total >= needed(p)`, `draw(lane, p, total) == draw(lane, p, None)`. Never less for a later position.
        """
        if position < 0:
            raise outside("position", position, None)
        begin, size = self.begin(None), self.batch_size
        return begin.segment.needed(begin.offset + position, begin.offset + (position // size + 1) * size)

    def drawable(self, samples: int) -> int:
        """Returns how many positions can be drawn once so many samples are published: `needed` turned round."""
        begin, size = self.begin(None), self.batch_size
        certain, held = begin.segment.drawable(samples)
        return max(0, min(certain - begin.offset, (held - begin.offset) // size * size))

    def done_before(self, position: int, total: int | None) -> int:
        """Returns N such that no sample below N is drawn in the same epoch once every lane has drawn [0, position).

        What is open counts as needed whole; so is what is left over, until the first position of the next epoch.
        """
        if position < 0:
            raise outside("position", position, None)
        begin = self.begin(total)
        if total is not None and position >= begin.length and (position > begin.length or not self.leftover(total)):
            return total
        return begin.segment.done_before(begin.offset + position)

    def draw(self, lane: int, position: int, total: int | None) -> Draw:
        """Returns epoch and sample of a position, of the first epoch while the end is open. Raises IndexError."""
        known, begin = self._last
        if begin is None or known != total:
            begin = self.begin(total)
        if begin.length == _OPEN or position < begin.length:
            if position < 0:
                raise outside("position", position, None)
            segment = begin.segment
            return Draw(segment.epoch, segment.sample(lane, begin.offset + position))
        return begin.draw_later(lane, position)

    def draws(self, lanes: npt.ArrayLike, positions: npt.ArrayLike, total: int | None) -> tuple[_Integers, _Integers]:
        """Returns epochs and samples of `draw` for arrays or integers, broadcast; cheapest window by window."""
        lane, position = np.broadcast_arrays(int64_array("lane", lanes, self.dp), int64_array("position", positions))
        begin = self.begin(total)
        epochs, samples = np.empty(lane.shape, dtype=np.int64), np.empty(lane.shape, dtype=np.int64)
        given, drawn = (lane.ravel(), position.ravel()), (epochs.ravel(), samples.ravel())
        for first in range(0, lane.size, _BLOCK):
            block = slice(first, first + _BLOCK)
            drawn[0][block], drawn[1][block] = begin.draws(given[0][block], given[1][block])
        return epochs, samples

    def run(self, lane: int, position: int, total: int | None) -> Run:
        """Returns the neighbours drawn as consecutive samples in one epoch, none of which needs more published."""
        drawn = self.draw(lane, position, total)
        segment, shift, limit = self._around(position, total)
        first, stop = segment.run(lane, position + shift, limit + shift)
        # What lies before the part in its segment is not the part's.
        first = max(first, shift)
        return Run(first - shift, stop - shift, drawn.sample - (position + shift - first), drawn.epoch)

    def window_stop(self, lane: int, position: int, total: int | None) -> int:
        """Returns the position behind those that `lane` draws from one window, in one epoch, with this one.

        What is carried over counts as one window. None of them needs more samples published than `position` does.
        """
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        segment, shift, limit = self._around(position, total)
        return min(limit, segment.window_stop(lane, position + shift) - shift)

    def _around(self, position: int, total: int | None) -> tuple[Segment, int, int]:
        """Returns the segment of a position, what to add to get one of it, and behind which position it ends."""
        if position < 0:
            raise outside("position", position, None)
        begin = self.begin(total)
        if total is None:
            return begin.segment, begin.offset, self.drawable(self.needed(position))
        return begin.around(position, total)

    def place(self, sample: int, total: int | None, epoch: int) -> Place | None:
        """Returns where a sample is drawn in an epoch; with `total` None only in that of the current part.

        A sample is dealt in the segment in whose fresh deal it lies; where that one ended before, the next takes it
        over. None for a sample that is left out, past the end, or left over.
        """
        if sample < 0:
            raise outside("sample", sample, None)
        found: tuple[int, int] | None = None
        before: Segment | None = None
        for number, segment, goes_on, shift, stop in _chain(self.parts, self._all(total), total, epoch):
            if before is not None and not goes_on and found is not None:
                found = segment.take_over(*found)
                if found == (-1, -1):
                    return None
            if found is None and sample >= segment.start:
                found = segment.place(sample)
            before = segment
            if found is None:
                continue
            lane, position = found
            if stop is None or position + shift < stop:
                return Place(number, lane, position + shift)
        return None

    def begin(self, total: int | None) -> Begin:
        """Returns where the current part begins."""
        known, begin = self._last
        if begin is None or known != total:
            begin = self._all(total)[-1]
            self._last = (total, begin)
        return begin

    def _all(self, total: int | None) -> list[Begin]:
        found = self._begins.get(total)
        if found is None:
            found = _begins(self.rules, self.parts, total)
            open_ = self._begins.get(None)
            self._begins = {total: found} if open_ is None else {None: open_, total: found}
        return found


def _begins(rules: Rules, parts: Sequence[Part], total: int | None) -> list[Begin]:
    found: list[Begin] = []
    gaps = Gaps()
    for number, part in enumerate(parts):
        gaps = gaps.joined(part.skip)
        goes_on = number > 0 and part.epoch is None and not part.skip and part.dp == parts[number - 1].dp
        if not found or part.epoch is not None:
            segment, offset = Segment(rules, part.dp, part.epoch or 0, total, gaps), 0
        else:
            segment, offset = _ended(found[-1], parts[number - 1], total)
            if not goes_on:
                segment, offset = Segment(rules, part.dp, segment.epoch, total, gaps, segment, offset), 0
        size, batch = segment.size, part.dp * part.batch_size
        length = _OPEN if size is None else (size - part.dp * offset) // batch * part.batch_size
        kept = None if total is None else gaps.kept(0, total)
        full = 0 if kept is None else kept // batch * part.batch_size
        found.append(Begin(segment, offset, goes_on, length, Deal(part.dp, rules.unit), kept, full))
    return found


def _ended(begin: Begin, part: Part, total: int | None) -> tuple[Segment, int]:
    """Returns the segment in which a part ended, and how many of its positions were drawn by then."""
    segment = begin.segment
    if begin.length == _OPEN or part.draws <= begin.length:
        return segment, begin.offset + part.draws
    assert total is not None
    if not begin.full:
        raise ValueError(f"{part.draws} positions of {part.dp} lanes were drawn, but there are {total} samples")
    turns, drawn = divmod(part.draws - begin.length - 1, begin.full)
    return begin.later(total, segment.epoch + 1 + turns), drawn + 1


def _chain(
    parts: Sequence[Part], begins: Sequence[Begin], total: int | None, epoch: int
) -> Iterator[tuple[int, Segment, bool, int, int | None]]:
    """Yields of the segments of an epoch: part; segment; whether it is that of the part before; shift; stop.

    The shift is position of the part - position of the segment, the stop that behind the last one drawn, None if open.
    """
    last = len(parts) - 1
    for number, begin in enumerate(begins):
        current = number == last
        at, draws = begin.segment.epoch, parts[number].draws
        if begin.length == _OPEN:
            if at == epoch:
                yield number, begin.segment, begin.goes_on, -begin.offset, None if current else draws
            continue
        assert total is not None
        if epoch == at:
            drawn = begin.length if current else min(begin.length, draws)
            yield number, begin.segment, begin.goes_on, -begin.offset, drawn
        elif epoch > at:
            first = begin.length + (epoch - at - 1) * begin.full
            if current or first < draws:
                stop = first + begin.full if current else min(first + begin.full, draws)
                yield number, begin.later(total, epoch), False, first, stop
