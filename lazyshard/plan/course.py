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

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import int64_array, outside
from lazyshard.plan.gaps import Gaps
from lazyshard.plan.lane import Draw, Run
from lazyshard.plan.part import OPEN, Begin, Part, begins
from lazyshard.plan.places import Place, find_place
from lazyshard.plan.segment import Rules, Segment

__all__ = [
    "Course",
]


_BLOCK: Final = 16_384
"""Positions computed together: so many that a processor's cache holds all that is made of them on the way."""


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
        self._begins: dict[int | None, list[Begin]] = {}
        # Asked for again and again: the total that was asked for last, and where the current part begins with it.
        self._last: tuple[int | None, Begin | None] = (None, None)

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
        skip = Gaps(one for part in self.parts for one in part.skip).ranges
        return Course(self.rules, [replace(self.current, draws=0, epoch=epoch, skip=skip)])

    def begin(self, total: int | None) -> Begin:
        """Return where the current part begins."""
        return self._begin(total)

    def epoch(self, total: int | None) -> int:
        """Return the epoch in which the current part begins."""
        return self._begin(total).segment.epoch

    def epoch_length(self, total: int) -> int:
        """Return how many positions each lane draws in the epoch in which the current part begins: whole batches."""
        return self._begin(total).length

    def epoch_stop(self, drawn: int, total: int) -> int:
        """Return the position behind those of the epoch in which a run stands that has drawn so many positions.

        At the end of an epoch it still stands in that one.
        """
        begin = self._begin(total)
        full = begin.later.epoch_length(begin.kept or 0)
        if drawn <= begin.length or not full:
            return begin.length
        return begin.length - (begin.length - drawn) // full * full

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
        if length == OPEN or position < length:
            if position < 0:
                raise outside("position", position, None)
            return Draw(segment.epoch, segment.sample(lane, begin.offset + position))
        epoch, kept = begin.later.draw(lane, position - length, begin.kept, segment.epoch + 1)
        return Draw(epoch, segment.gaps.nth(0, kept))

    def draws(
        self, lanes: npt.ArrayLike, positions: npt.ArrayLike, total: int | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return `draw` for arrays or integers, broadcast against each other.

        Positions of one window that stand together, as lane by lane, are cheapest; any order is right.

        Returns:
            The epochs and the samples, int64, of the shape that `lanes` and `positions` broadcast to.

        Raises:
            IndexError: as `draw`. ValueError: a number is not an integer.
        """
        lane, position = np.broadcast_arrays(int64_array("lane", lanes, self.dp), int64_array("position", positions))
        begin = self._begin(total)
        epochs, samples = np.empty(lane.shape, dtype=np.int64), np.empty(lane.shape, dtype=np.int64)
        given, drawn = (lane.ravel(), position.ravel()), (epochs.ravel(), samples.ravel())
        for first in range(0, lane.size, _BLOCK):
            block = slice(first, first + _BLOCK)
            drawn[0][block], drawn[1][block] = begin.draws(given[0][block], given[1][block])
        return epochs, samples

    def run(self, lane: int, position: int, total: int | None) -> Run:
        """Return positions around `position` that are drawn as consecutive samples, in the same epoch.

        With `total` None, no position in it needs more samples published than `position` does.

        Raises:
            IndexError: as `draw`.
        """
        drawn = self.draw(lane, position, total)
        segment, shift, limit = self._around(position, total)
        first, stop = segment.run(lane, position + shift, limit + shift)
        # What lies before the part in its segment is not the part's.
        first = max(first, shift)
        return Run(first - shift, stop - shift, drawn.sample - (position + shift - first), drawn.epoch)

    def window_stop(self, lane: int, position: int, total: int | None) -> int:
        """Return the position behind those that `lane` draws from one window, in one epoch, with this one.

        What is carried over from an earlier part counts as one window. With `total` None, no position before the one
        returned needs more samples published than `position` does. Without windows all of the epoch that is certain.

        Raises:
            IndexError: as `draw`.
        """
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        segment, shift, limit = self._around(position, total)
        return min(limit, segment.window_stop(lane, position + shift) - shift)

    def _around(self, position: int, total: int | None) -> tuple[Segment, int, int]:
        """Return the segment of a position, what to add to get a position of it, and behind which it ends or is open.

        The latter is a position of the part. With `total` None: behind those that need no more samples published.
        """
        if position < 0:
            raise outside("position", position, None)
        begin = self._begin(total)
        if total is None:
            return begin.segment, begin.offset, self.drawable(self.needed(position))
        if position < begin.length:
            return begin.segment, begin.offset, begin.length
        full = begin.later.epoch_length(begin.kept or 0)
        if not full:
            raise IndexError(f"an epoch is empty: {total} samples are less than a batch of each of {self.dp} lanes")
        epochs, within = divmod(position - begin.length, full)
        segment = begin.full(total, begin.segment.epoch + 1 + epochs)
        return segment, within - position, position - within + full

    def place(self, sample: int, total: int | None, epoch: int) -> Place | None:
        """Return where a sample is drawn in an epoch, which may lie ahead of what the current part has drawn.

        With `total` None only the epoch of the current part is known. None for a sample that is left out, or which this
        course does not draw in that epoch: it is past the end, or left over.

        Raises:
            IndexError: `sample` is negative.
        """
        if sample < 0:
            raise outside("sample", sample, None)
        return find_place(self.parts, self._all(total), sample, total, epoch)

    def _begin(self, total: int | None) -> Begin:
        known, begin = self._last
        if begin is None or known != total:
            begin = self._all(total)[-1]
            self._last = (total, begin)
        return begin

    def _all(self, total: int | None) -> list[Begin]:
        """Return where each part begins. Of several totals only the newest stays known, and None."""
        found = self._begins.get(total)
        if found is None:
            found = begins(self.rules, self.parts, total)
            if total is not None:
                self._begins = {key: known for key, known in self._begins.items() if key is None}
            self._begins[total] = found
        return found
