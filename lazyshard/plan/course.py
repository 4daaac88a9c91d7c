"""The course of a run: what each rank draws, through any number of changes of the number of ranks.

The draws of a part follow from the parts before it: the lanes of each, its micro batch size, and how many positions
each lane drew. There is no other state. In an epoch all lanes draw the same number of positions, in whole micro
batches. If a part begins in the middle of an epoch, the rest of the epoch is dealt again (`lazyshard.plan.segment`);
later epochs are whole. Positions are counted from the beginning of a part::

    part 0, 2 lanes                    part 1, 3 lanes
    epoch 0 ........... | epoch 1 .....|.... | epoch 2 ........
                                       rest of epoch 1

A part with as many lanes as the previous part and no new skipped samples continues in the same order. A part that ends
exactly at the end of an epoch still belongs to that epoch. `total` is the end of the samples, None for a live stream.

If the samples left over at the end of an epoch are to be drawn too, every lane draws one more batch: the samples that
it still holds, and in the missing places repeated samples of the same epoch, in parentheses. 17 samples, `unit=3`,
batches of 4::

                                            "pad"                     "loop"
    lane 0    0  1  2  6    7  8 12 14      16 ( 8)(12)(14)           16 (3)(4)(5)
    lane 1    3  4  5  9   10 11 13 15     (10)(11)(13)(15)          (0) (1)(2)(6)

In the order in which the lanes draw the epoch, position by position and lane by lane, "pad" repeats the last samples
that are not left over, and "loop" repeats the first ones, as torch's `DistributedSampler` and accelerate do. No sample
occurs twice in this batch, except in an epoch shorter than `dp * batch_size`, which is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from lazyshard.part import Int64Array, Numbers, Part
from lazyshard.plan.deal import Gaps, Rules, outside
from lazyshard.plan.segment import Segment

_OPEN: Final = 2**63 - 1  # The length of an epoch while the end of the stream is unknown
_BLOCK: Final = 16_384  # Positions computed together: the temporary arrays fit in a processor's cache


class Draw(NamedTuple):
    """The draw at a position: the number of the `sample`, and the `epoch` in which it is drawn."""

    epoch: int
    sample: int


class Run(NamedTuple):
    """Positions [first, stop) of one lane that draw consecutive samples; `sample` is the sample of `first`."""

    first: int
    stop: int
    sample: int
    epoch: int


class Place(NamedTuple):
    """Where a sample is drawn: `position` of `lane`, counted from the beginning of the part."""

    part: int
    lane: int
    position: int


@dataclass(slots=True)
class Begin:
    """Where a part begins, given a total: at position `offset` of a segment, possibly the segment of the previous part.

    `length` and `full` are the positions that each lane draws in that epoch and in a later, whole one, in whole
    batches; `_OPEN` and 0 while the end is unknown.
    """

    segment: Segment
    offset: int
    continues: bool
    length: int
    full: int
    _later: Segment | None = None  # the later epoch requested last

    def later(self, epoch: int) -> Segment:
        """Returns a later, whole epoch."""
        own, later = self.segment, self._later
        if later is None or later.epoch != epoch:
            later = self._later = Segment(own.rules, own.dp, epoch, own.total, own.gaps)
        return later

    def around(self, position: int) -> tuple[Segment, int, int]:
        """Returns the segment of a position, the shift to positions of that segment, and the end of its epoch."""
        if position < self.length:
            return self.segment, self.offset, self.length
        if not self.full:
            own = self.segment
            kept = 0 if own.total is None else own.gaps.kept(0, own.total)
            raise IndexError(f"an epoch is empty: {kept} samples are fewer than one batch for each of {own.dp} lanes")
        epochs, within = divmod(position - self.length, self.full)
        segment = self.later(self.segment.epoch + 1 + epochs)
        return segment, within - position, position - within + self.full

    def draws(self, lanes: Int64Array, positions: Int64Array) -> tuple[Int64Array | int, Int64Array]:
        """Returns epochs (one for all or one each) and samples of positions counted from the beginning of the part."""
        segment, shift, _ = self.around(int(positions.max()))
        if positions.min() >= -shift:
            return segment.epoch, segment.samples(lanes, positions + shift)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        turns = np.maximum((positions - self.length) // max(self.full, 1), -1)
        for turn in np.unique(turns).tolist():
            own = turns == turn
            segment, shift, _ = self.around(int(positions[own][0]))
            epochs[own], samples[own] = segment.epoch, segment.samples(lanes[own], positions[own] + shift)
        return epochs, samples


class Course:
    """The parts of a run. The last one is `current`; positions, `dp` and `batch_size` refer to it.

    Methods with a `total` raise ValueError if a part has drawn more than there is.
    """

    def __init__(self, rules: Rules, parts: Sequence[Part]) -> None:
        self.rules, self.parts = rules, tuple(parts)
        self.current = self.parts[-1]
        self.dp, self.batch_size = self.current.dp, self.current.batch_size
        self._begins: dict[int | None, list[Begin]] = {}

    @property
    def gaps(self) -> Gaps:
        """The samples that the current part leaves out."""
        return self.rules.gaps.joined(one for part in self.parts for one in part.skip)

    @property
    def consumed_before(self) -> int:
        """Samples trained before the current part, over all lanes and epochs."""
        return sum(part.dp * part.draws for part in self.parts[:-1] if part.trained)

    def until(self, number: int) -> Course:
        """Returns the course as it was in part `number`, from 0."""
        return Course(self.rules, self.parts[: number + 1]) if number + 1 < len(self.parts) else self

    def in_epoch(self, epoch: int) -> Course:
        """Returns a course whose current part begins the given epoch, with the same lanes and skipped samples."""
        skip = Gaps(one for part in self.parts for one in part.skip).ranges
        return Course(self.rules, [replace(self.current, draws=0, epoch=epoch, skip=skip)])

    def resumed(self, drawn: int, total: int | None) -> tuple[Course, int]:
        """Returns the course in whose first epoch position `drawn` lies, and the position there.

        The end of an epoch still belongs to that epoch. Raises ValueError: more was drawn than there is.
        """
        begin = self.begin(total)
        if total is None or drawn <= begin.length:
            return self, drawn
        if not begin.full:
            raise ValueError(f"{drawn} positions of {self.dp} lanes were drawn, but there are {total} samples")
        turns, before = divmod(drawn - begin.length - 1, begin.full)
        return self.in_epoch(begin.segment.epoch + 1 + turns), before + 1

    def epoch(self, total: int | None) -> int:
        """Returns the epoch in which the current part begins."""
        return self.begin(total).segment.epoch

    def epoch_stop(self, drawn: int, total: int) -> int:
        """Returns the end of the epoch of a run that has drawn `drawn` positions; at the end of an epoch, that end."""
        begin = self.begin(total)
        later = drawn > begin.length and begin.full > 0
        return begin.length - ((begin.length - drawn) // begin.full * begin.full if later else 0)

    def leftover(self, total: int) -> int:
        """Returns how many samples the current part's first epoch leaves undrawn: fewer than dp * batch_size."""
        begin = self.begin(total)
        return (begin.segment.size or 0) - self.dp * (begin.offset + begin.length)

    def needed(self, position: int) -> int:
        """Returns how many samples must be published before `position` can be drawn while the end is unknown.

        For every `total >= needed(p)`, `draw(lane, p, total) == draw(lane, p, None)`. Monotonic in the position.
        """
        begin, size = self.begin(None), self.batch_size
        return begin.segment.needed(begin.offset + position, begin.offset + (position // size + 1) * size)

    def drawable(self, samples: int) -> int:
        """Returns how many positions can be drawn once `samples` are published: the inverse of `needed`."""
        begin, size = self.begin(None), self.batch_size
        certain, held = begin.segment.drawable(samples)
        return max(0, min(certain - begin.offset, (held - begin.offset) // size * size))

    def done_before(self, position: int, total: int | None) -> int:
        """Returns N such that no sample below N is drawn in the same epoch after every lane has drawn [0, position).

        An open window counts as needed completely; so do leftover samples, until the next epoch has begun.
        """
        begin = self.begin(total)
        if total is not None and position >= begin.length and (position > begin.length or not self.leftover(total)):
            return total
        return begin.segment.done_before(begin.offset + position)

    def draw(self, lane: int, position: int, total: int | None) -> Draw:
        """Returns epoch and sample of a position; of the first epoch while the end is unknown.

        Raises IndexError: an epoch is shorter than one batch for each lane.
        """
        segment, shift, _ = self.begin(total).around(position)
        return Draw(segment.epoch, segment.sample(lane, position + shift))

    def draws(self, lanes: Numbers, positions: Numbers, total: int | None) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and samples of `draw` for arrays or integers, broadcast; fastest window by window."""
        lane, position = np.asarray(lanes, np.int64), np.asarray(positions, np.int64)
        # `broadcast_arrays` of numpy 2.4.6 leaked 28 bytes per window (tests/data/test_memory_flat.py).
        shape = np.broadcast_shapes(lane.shape, position.shape)
        begin, flat = self.begin(total), tuple(np.broadcast_to(one, shape).ravel() for one in (lane, position))
        epochs, samples = np.empty_like(flat[0]), np.empty_like(flat[0])
        for first in range(0, flat[0].size, _BLOCK):
            block = slice(first, first + _BLOCK)
            epochs[block], samples[block] = begin.draws(flat[0][block], flat[1][block])
        return epochs.reshape(shape), samples.reshape(shape)

    def run(self, lane: int, position: int, total: int | None) -> Run:
        """Returns the run of consecutive samples around a position, in one epoch; no more samples need be published."""
        segment, shift, limit = self._around(position, total)
        first, stop = segment.run(lane, position + shift, limit + shift)
        # Positions of the segment before the part belong to an earlier part.
        first = max(first, shift)
        return Run(first - shift, stop - shift, segment.sample(lane, first), segment.epoch)

    def window_stop(self, lane: int, position: int, total: int | None) -> int:
        """Returns the end of a position's window, in its epoch; no position before it needs more published samples."""
        segment, shift, limit = self._around(position, total)
        return min(limit, segment.window_stop(lane, position + shift) - shift)

    def _around(self, position: int, total: int | None) -> tuple[Segment, int, int]:
        """As `Begin.around`; while the end is unknown, the end of the positions that need no more samples."""
        segment, shift, stop = self.begin(total).around(position)
        return segment, shift, self.drawable(self.needed(position)) if total is None else stop

    def place(self, sample: int, total: int | None, epoch: int) -> Place | None:
        """Returns where a sample is drawn in an epoch; with `total` None only in the epoch of the current part.

        A sample is dealt in the segment whose fresh deal contains it; if that segment ended earlier, the next one
        takes it over. Returns None for a sample that is skipped, past the end, or left over.
        """
        if sample < 0:
            raise outside("sample", sample, None)
        found: tuple[int, int] | None = None
        before: Segment | None = None
        ends = [*(part.draws for part in self.parts[:-1]), _OPEN]
        for number, (begin, drawn) in enumerate(zip(self._all(total), ends, strict=True)):
            turns = epoch - begin.segment.epoch
            first = begin.length + (turns - 1) * begin.full if turns else 0
            if turns < 0 or (turns and (not begin.full or first >= drawn)):
                continue
            segment, shift, stop = begin.around(first) if turns else (begin.segment, begin.offset, begin.length)
            if before is not None and found is not None and (turns or not begin.continues):
                found = segment.take_over(*found)
                if found == (-1, -1):
                    return None
            if found is None and sample >= segment.start:
                found = segment.place(sample)
            before = segment
            if found is not None and found[1] - shift < min(stop, drawn):
                return Place(number, found[0], found[1] - shift)
        return None

    def begin(self, total: int | None) -> Begin:
        """Returns where the current part begins."""
        return self._all(total)[-1]

    def _all(self, total: int | None) -> list[Begin]:
        found = self._begins.get(total)
        if found is None:
            found = _begins(self.rules, self.parts, total)
            # For a growing stream only the last total is requested again, and None.
            self._begins = {known: self._begins[known] for known in (None,) if known in self._begins}
            self._begins[total] = found
        return found


def _begins(rules: Rules, parts: Sequence[Part], total: int | None) -> list[Begin]:
    found: list[Begin] = []
    gaps = rules.gaps
    for number, part in enumerate(parts):
        gaps = gaps.joined(part.skip)
        continues = number > 0 and part.epoch is None and not part.skip and part.dp == parts[number - 1].dp
        if not found or part.epoch is not None:
            segment, offset = Segment(rules, part.dp, part.epoch or 0, total, gaps), 0
        else:
            segment, offset = _ended(found[-1], parts[number - 1])
            if not continues:
                segment, offset = Segment(rules, part.dp, segment.epoch, total, gaps, (segment, offset)), 0
        size, batch = segment.size, part.dp * part.batch_size
        length = _OPEN if size is None else (size - part.dp * offset) // batch * part.batch_size
        full = 0 if total is None else gaps.kept(0, total) // batch * part.batch_size
        found.append(Begin(segment, offset, continues, length, full))
    return found


def _ended(begin: Begin, part: Part) -> tuple[Segment, int]:
    """Returns the segment in which a part ended, and how many of its positions were drawn by then."""
    if part.draws <= begin.length:
        return begin.segment, begin.offset + part.draws
    if not begin.full:
        total = begin.segment.total
        raise ValueError(f"{part.draws} positions were drawn in each of {part.dp} lanes, but there are {total} samples")
    # A part that ends exactly at the end of an epoch still belongs to that epoch.
    segment, shift, _ = begin.around(part.draws - 1)
    return segment, part.draws + shift


AtEnd = Literal["drop", "pad", "loop"]
"""What to do with the samples left over: drop them, or draw them in one more batch of every lane."""


class Ending(NamedTuple):
    """The end of one epoch of a course, in which all lanes draw whole batches.

    `left` are the samples that each lane still holds, `whole` is the same epoch, dealt from its beginning to the same
    number of lanes.
    """

    left: tuple[tuple[int, ...], ...]
    whole: Segment
    batch_size: int

    @classmethod
    def of(cls, course: Course, drawn: int, total: int) -> Ending:
        """Returns the end of the epoch of a run that has drawn `drawn` positions; at the end of an epoch, that end."""
        begin, stop = course.begin(total), course.epoch_stop(drawn, total)
        segment, first = begin.segment, begin.offset + begin.length
        if stop > begin.length:
            segment = begin.later(segment.epoch + (stop - begin.length) // begin.full)
            first = begin.full
        left = tuple(
            tuple(segment.sample(lane, position) for position in range(first, segment.lane_length(lane)))
            for lane in range(course.dp)
        )
        return cls(left, begin.later(segment.epoch), course.batch_size)

    @property
    def leftover(self) -> int:
        """Number of samples left over, over all lanes."""
        return sum(map(len, self.left))

    @property
    def missing(self) -> int:
        """Number of samples that one more batch of every lane repeats; 0 if nothing is left over."""
        return len(self.left) * self.batch_size - self.leftover if self.leftover else 0

    def batch(self, lane: int, at_end: AtEnd) -> tuple[int, ...]:
        """Returns the samples of a lane's batch after its whole batches; empty if nothing is left over."""
        own = self.left[lane]
        if at_end == "drop" or not self.leftover:
            return ()
        places = np.arange(self.batch_size)[:, None] >= [len(each) for each in self.left]
        numbers = np.cumsum(places).reshape(places.shape)[len(own) :, lane] - 1
        return (*own, *self._again(at_end)[numbers].tolist())

    def _again(self, at_end: AtEnd) -> Int64Array:
        dp, count = len(self.left), self.whole.size
        assert count
        step = dp * self.batch_size
        numbers = (np.arange(step) + (0 if at_end == "loop" else count - step)) % count
        samples = self.whole.samples(numbers % dp, numbers // dp)
        if count >= step:
            samples = samples[~np.isin(samples, [sample for each in self.left for sample in each])]
        return samples[: self.missing] if at_end == "loop" else samples[len(samples) - self.missing :]
