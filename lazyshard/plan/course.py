"""The course of a run: what each rank draws, through any number of changes of the number of ranks.

A run is one part after another, each under one number of lanes and one micro batch; a resume with the same two goes on
in the same part. What a part draws follows from the parts before it, each by three integers: how many lanes it had, its
micro batch, and how many positions each lane drew. That history is all the state there is.

Positions are counted from the beginning of a part. Where a part begins in the middle of an epoch, what is left of that
epoch is dealt anew (`lazyshard.plan.segment`); every later epoch is a whole one (`lazyshard.plan.lane`), so a part that
begins with an epoch does not depend on those before it::

    part 0, 2 lanes                    part 1, 3 lanes
    epoch 0 ........... | epoch 1 .....|.... | epoch 2 ........
                                       what is left of epoch 1

A part with as many lanes as the one before, and from which on no more is left out, goes on in the same order, window by
window, as if it were the same part.

A part that ends exactly where an epoch does is still in that epoch: what had been left over for want of a whole batch
is dealt to the next lanes, and may be too little again. So it makes no difference whether the end was known by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan._bounds import check_field, int64_array, outside
from lazyshard.plan.deal import Deal
from lazyshard.plan.gaps import Gaps
from lazyshard.plan.lane import Draw, Plan, Run
from lazyshard.plan.segment import Rules, Segment

__all__ = ["Course", "Part", "Place"]

_UNSET: Final = -1


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a run under one number of ranks and one micro batch.

    Attributes:
        dp: number of lanes, >= 1.
        batch_size: samples of one lane in a micro batch, >= 1.
        draws: positions [0, draws) of each lane were drawn; of the current part, so far.
        epoch: an epoch that it begins; None to go on where the part before stands (the first one: in epoch 0).
        trained: False if these draws were skipped and not trained.
        skip: half-open ranges of sample numbers that are not drawn from here on, besides those of earlier parts.

    Raises:
        ValueError: a field is outside its range.
    """

    dp: int
    batch_size: int = 1
    draws: int = 0
    epoch: int | None = None
    trained: bool = True
    skip: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        check_field("dp", self.dp, 1)
        check_field("batch_size", self.batch_size, 1)
        check_field("draws", self.draws, 0)
        if self.epoch is not None:
            check_field("epoch", self.epoch, 0)
        Gaps(self.skip)


class Place(NamedTuple):
    """Where a sample is drawn: `position` of `lane`, counted from the beginning of a part."""

    part: int
    lane: int
    position: int


class _Begin(NamedTuple):
    """Where a part begins, given a total.

    Attributes:
        segment: what is left of the epoch.
        offset: the position of that segment at which the part begins.
        goes_on: whether it goes on in the order of the part before, in its segment.
        length: positions of each lane in it; `_UNSET` as long as that is open.
        later: what is drawn in every later epoch, in numbers of the samples kept.
        kept: how many samples a later epoch has; None as long as that is open.
    """

    segment: Segment
    offset: int
    goes_on: bool
    length: int
    later: Plan
    kept: int | None

    def full(self, total: int, epoch: int) -> Segment:
        segment = self.segment
        return Segment(segment.rules, segment.dp, epoch, total, segment.gaps)


class Course:
    """The parts of a run, the last one being the current one.

    Throughout, `total` is the end of the half-open range [0, total) of samples once it is known, and None while the
    stream grows; positions are those of the current part.

    Args:
        rules: what never changes in the run.
        parts: at least one.

    Attributes:
        rules: as given.
        parts: as given.

    Raises:
        ValueError: there is no part. That a part has drawn more than there was is found when a total is given.
    """

    def __init__(self, rules: Rules, parts: Sequence[Part]) -> None:
        if not parts:
            raise ValueError("a course has at least one part")
        self.rules = rules
        self.parts = tuple(parts)
        self.current = self.parts[-1]
        self._begins: dict[int | None, list[_Begin]] = {}
        # Asked for again and again: the total that was asked for last, and where the current part begins with it.
        self._last: tuple[int | None, _Begin | None] = (None, None)

    def __repr__(self) -> str:
        """Return a call that makes the same."""
        return f"{type(self).__name__}({self.rules!r}, {list(self.parts)!r})"

    @property
    def dp(self) -> int:
        """Number of lanes of the current part."""
        return self.current.dp

    @property
    def batch_size(self) -> int:
        """Samples of one lane in a micro batch of the current part."""
        return self.current.batch_size

    @property
    def consumed_before(self) -> int:
        """Samples trained before the current part, over all lanes and epochs."""
        return sum(part.dp * part.draws for part in self.parts[:-1] if part.trained)

    def until(self, number: int) -> Course:
        """Return the course as it was in the part of that number, from 0."""
        return Course(self.rules, self.parts[: number + 1]) if number + 1 < len(self.parts) else self

    def in_epoch(self, epoch: int) -> Course:
        """Return the course whose current part begins an epoch instead, with the same lanes, and the same left out."""
        skip = self._gaps(len(self.parts) - 1).ranges
        return Course(self.rules, [replace(self.current, draws=0, epoch=epoch, skip=skip)])

    def epoch(self, total: int | None) -> int:
        """Return the epoch in which the current part begins."""
        return self._begin(total).segment.epoch

    def epoch_length(self, total: int) -> int:
        """Return how many positions each lane draws in the epoch in which the current part begins: whole batches."""
        return self._begin(total).length

    def full_epoch_length(self, total: int) -> int:
        """Return how many positions each lane draws in a later, whole epoch."""
        begin = self._begin(total)
        return begin.later.epoch_length(begin.kept or 0)

    def leftover(self, total: int) -> int:
        """Return how many samples the epoch in which the part begins leaves undrawn: fewer than dp * batch_size."""
        begin = self._begin(total)
        return (begin.segment.size or 0) - self.dp * (begin.offset + begin.length)

    def needed(self, position: int) -> int:
        """Return how many samples must be published before `position` may be drawn with the end unknown.

        For every `total >= needed(p)`, `draw(lane, p, total) == draw(lane, p, None)`. Never less for a later position.

        Raises:
            IndexError: `position` is negative.
        """
        if position < 0:
            raise outside("position", position, None)
        begin, size = self._begin(None), self.batch_size
        return begin.segment.needed(begin.offset + position, begin.offset + (position // size + 1) * size)

    def drawable(self, samples: int) -> int:
        """Return how many positions of each lane can be drawn once so many samples are published, the end unknown.

        `needed` turned round: needed(p) <= samples for the positions below, and for no other.
        """
        begin, size = self._begin(None), self.batch_size
        certain, held = begin.segment.drawable(samples)
        return max(0, min(certain - begin.offset, (held - begin.offset) // size * size))

    def done_before(self, position: int, total: int | None) -> int:
        """Return N such that no sample below N is drawn in the same epoch once every lane has drawn [0, position).

        What is open counts as needed whole. So is, at the end of the epoch in which the part begins, what is left over:
        other ranks would draw it. With the first position of the next epoch that is given up, and N is `total`.

        Raises:
            IndexError: `position` is negative.
        """
        if position < 0:
            raise outside("position", position, None)
        begin = self._begin(total)
        if total is not None and position >= begin.length and (position > begin.length or not self.leftover(total)):
            return total
        return begin.segment.done_before(begin.offset + position)

    def draw(self, lane: int, position: int, total: int | None) -> Draw:
        """Return epoch and sample of what `lane` draws at `position`.

        With `total` None the position is taken to lie in the epoch in which the part begins: see `needed`.

        Raises:
            IndexError: `lane` is not in [0, dp), `position` is negative, or an epoch is empty.
        """
        known, begin = self._last
        if begin is None or known != total:
            begin = self._begin(total)
        segment, length = begin.segment, begin.length
        if length == _UNSET or position < length:
            if position < 0:
                raise outside("position", position, None)
            return Draw(segment.epoch, segment.sample(lane, begin.offset + position))
        epoch, kept = begin.later.draw(lane, position - length, begin.kept, segment.epoch + 1)
        return Draw(epoch, segment.gaps.nth(0, kept))

    def draws(
        self, lanes: npt.ArrayLike, positions: npt.ArrayLike, total: int | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return `draw` for arrays or integers, broadcast against each other.

        Returns:
            The epochs and the samples, int64, of the shape that `lanes` and `positions` broadcast to.

        Raises:
            IndexError: as `draw`. ValueError: a number is not an integer.
        """
        lane, position = np.broadcast_arrays(int64_array("lane", lanes, self.dp), int64_array("position", positions))
        shape, lane, position = lane.shape, lane.ravel(), position.ravel()
        begin = self._begin(total)
        segment, length = begin.segment, begin.length
        epochs = np.full(len(position), segment.epoch, dtype=np.int64)
        later = position >= (np.iinfo(np.int64).max if length == _UNSET else length)
        if not later.any():
            return epochs.reshape(shape), segment.samples(lane, position + begin.offset).reshape(shape)
        samples = np.empty(len(position), dtype=np.int64)
        samples[~later] = segment.samples(lane[~later], position[~later] + begin.offset)
        epochs[later], kept = begin.later.draws(lane[later], position[later] - length, begin.kept, segment.epoch + 1)
        samples[later] = segment.gaps.nth_all(0, kept)
        return epochs.reshape(shape), samples.reshape(shape)

    def run(self, lane: int, position: int, total: int | None) -> Run:
        """Return positions around `position` that are drawn as consecutive samples, in the same epoch.

        With `total` None, no position in it needs more samples published than `position` does.

        Raises:
            IndexError: as `draw`.
        """
        drawn = self.draw(lane, position, total)
        begin = self._begin(total)
        # Position of the segment - position of the part.
        shift, segment = begin.offset, begin.segment
        if total is None:
            limit = shift + self.drawable(self.needed(position))
        elif position < begin.length:
            limit = shift + begin.length
        else:
            limit = begin.later.epoch_length(begin.kept or 0)
            shift = (position - begin.length) % limit - position
            segment = begin.full(total, drawn.epoch)
        first, stop = segment.run(lane, position + shift, limit)
        # What lies before the part in its segment is not the part's.
        first = max(first, shift)
        return Run(first - shift, stop - shift, drawn.sample - (position + shift - first), drawn.epoch)

    def place(self, sample: int, total: int | None, epoch: int) -> Place | None:
        """Return where a sample is drawn in an epoch, which may lie ahead of what the current part has drawn.

        With `total` None only the epoch of the current part is known. None for a sample that is left out, or which this
        course does not draw in that epoch: it is past the end, or left over.

        Raises:
            IndexError: `sample` is negative.
        """
        if sample < 0:
            raise outside("sample", sample, None)
        found: tuple[int, int] | None = None
        before: Segment | None = None
        for number, segment, goes_on, shift, stop in self._chain(total, epoch):
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

    def _chain(self, total: int | None, epoch: int) -> Iterator[tuple[int, Segment, bool, int, int | None]]:
        """Yield the segments of an epoch, part by part.

        Yields:
            Number of the part; segment; whether it is the one of the part before; position of the part - position of
            the segment; the position of the part behind the last that it draws in this epoch, None if that is open.
        """
        begins = self._all(total)
        for number, begin in enumerate(begins):
            current = number == len(begins) - 1
            at, draws = begin.segment.epoch, self.parts[number].draws
            if begin.length == _UNSET:
                if at == epoch:
                    yield number, begin.segment, begin.goes_on, -begin.offset, None if current else draws
                continue
            assert total is not None
            if epoch == at:
                drawn = begin.length if current else min(begin.length, draws)
                yield number, begin.segment, begin.goes_on, -begin.offset, drawn
            elif epoch > at:
                full = begin.later.epoch_length(begin.kept or 0)
                first = begin.length + (epoch - at - 1) * full
                if current or first < draws:
                    stop = first + full if current else min(first + full, draws)
                    yield number, begin.full(total, epoch), False, first, stop

    def _begin(self, total: int | None) -> _Begin:
        known, begin = self._last
        if begin is None or known != total:
            begin = self._all(total)[-1]
            self._last = (total, begin)
        return begin

    def _gaps(self, number: int) -> Gaps:
        return Gaps(one for part in self.parts[: number + 1] for one in part.skip)

    def _all(self, total: int | None) -> list[_Begin]:
        """Return where each part begins. Of several totals only the newest stays known, and None."""
        found = self._begins.get(total)
        if found is None:
            found = []
            gaps = Gaps()
            for number, part in enumerate(self.parts):
                gaps = gaps.joined(part.skip)
                segment, offset = self._segment(number, part, gaps, found, total)
                later = Plan(Deal(part.dp, self.rules.unit), part.batch_size, self.rules.window, self.rules.seed)
                size = segment.size
                step = part.dp * part.batch_size
                length = _UNSET if size is None else (size - part.dp * offset) // step * part.batch_size
                kept = None if total is None else gaps.kept(0, total)
                found.append(_Begin(segment, offset, self._goes_on(number), length, later, kept))
            if total is not None:
                self._begins = {key: known for key, known in self._begins.items() if key is None}
            self._begins[total] = found
        return found

    def _segment(
        self, number: int, part: Part, gaps: Gaps, begins: list[_Begin], total: int | None
    ) -> tuple[Segment, int]:
        """Return the segment in which a part begins, and at which of its positions."""
        if part.epoch is not None or not number:
            return Segment(self.rules, part.dp, part.epoch or 0, total, gaps), 0
        before, ended = begins[-1], self.parts[number - 1]
        segment, drawn = before.segment, before.offset + ended.draws
        if before.length != _UNSET and ended.draws > before.length:
            assert total is not None
            full = before.later.epoch_length(before.kept or 0)
            if not full:
                raise ValueError(
                    f"{ended.draws} positions of {ended.dp} lanes were drawn, but there are {total} samples"
                )
            turns = (ended.draws - before.length - 1) // full
            segment = before.full(total, segment.epoch + 1 + turns)
            drawn = ended.draws - before.length - turns * full
        if self._goes_on(number):
            return segment, drawn
        return Segment(self.rules, part.dp, segment.epoch, total, gaps, segment, drawn), 0

    def _goes_on(self, number: int) -> bool:
        """Return whether a part goes on in the order of the one before."""
        part = self.parts[number]
        return number > 0 and part.epoch is None and not part.skip and part.dp == self.parts[number - 1].dp
