"""The end of an epoch: what is left over, and one more batch of every lane, completed by samples drawn before.

Lanes draw whole batches, as many in each; fewer than `dp * batch_size` samples are left over. Where these are to be
drawn too, every lane draws one batch more: what it still holds, and in the places that are missing samples of the same
epoch once more. Here 17 samples, two lanes with `unit=3` and batches of 4; what is drawn once more is in brackets::

                                            "pad"                     "loop"
    lane 0    0  1  2  6    7  8 12 14      16 ( 8)(12)(14)           16 (3)(4)(5)
    lane 1    3  4  5  9   10 11 13 15     (10)(11)(13)(15)          (0) (1)(2)(6)

All are counted in the order in which the lanes draw a whole epoch, position by position and lane by lane at each of
them: 0 3 1 4 2 5 6 9 7 10 8 11 12 13 14 15 16. "pad" takes the last ones of it that are not left over, so that the last
batch of all lanes is the end of the epoch; "loop" takes the first ones, as torch's `DistributedSampler` and accelerate
do. The missing places are counted in the same way. No sample is twice in this batch, but in an epoch that is shorter
than `dp * batch_size`: that one is repeated from its beginning ("loop"), or so that it ends with its end ("pad").
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan.course import Course
from lazyshard.plan.segment import Segment

__all__ = ["AtEnd", "Ending"]

AtEnd = Literal["drop", "pad", "loop"]
"""What becomes of the samples left over: not drawn, or drawn in one more batch of every lane."""


class Ending(NamedTuple):
    """The end of one epoch of a course, all of whose lanes draw whole batches up to there.

    Attributes:
        left: samples that are left over, fewer than `dp * batch_size`, lane by lane: what each still holds, in order.
        whole: the same epoch, dealt to as many lanes from its beginning.
        batch_size: samples of one lane in a micro batch.
    """

    left: tuple[tuple[int, ...], ...]
    whole: Segment
    batch_size: int

    @classmethod
    def of(cls, course: Course, drawn: int, total: int) -> Ending:
        """Return the end of the epoch in which a run stands.

        Args:
            course: of the run.
            drawn: positions of each lane that it has drawn; at the end of an epoch it still stands in that one.
            total: the end of the samples.
        """
        begin, stop = course.begin(total), course.epoch_stop(drawn, total)
        segment, first = begin.segment, begin.offset + begin.length
        if stop > begin.length:
            full = course.full_epoch_length(total)
            segment, first = begin.full(total, segment.epoch + (stop - begin.length) // full), full
        left = tuple(
            tuple(segment.sample(lane, position) for position in range(first, segment.lane_length(lane)))
            for lane in range(course.dp)
        )
        return cls(left, begin.full(total, segment.epoch), course.batch_size)

    @property
    def leftover(self) -> int:
        """Samples that are left over, of all lanes."""
        return sum(map(len, self.left))

    @property
    def missing(self) -> int:
        """Samples that one more batch of every lane draws once more; 0 where nothing is left over."""
        return len(self.left) * self.batch_size - self.leftover if self.leftover else 0

    def batch(self, lane: int, at_end: AtEnd) -> tuple[int, ...]:
        """Return the samples of the batch that a lane draws behind its whole ones; none where nothing is left over.

        Raises:
            IndexError: there is no such lane.
        """
        own = self.left[lane]
        if at_end == "drop" or not self.leftover:
            return ()
        places = np.arange(self.batch_size)[:, None] >= [len(each) for each in self.left]
        numbers = np.cumsum(places).reshape(places.shape)[len(own) :, lane] - 1
        return (*own, *self._again(at_end)[numbers].tolist())

    def _again(self, at_end: AtEnd) -> npt.NDArray[np.int64]:
        """Return what fills the missing places, in order."""
        dp, count = len(self.left), self.whole.size
        assert count
        step = dp * self.batch_size
        numbers = (np.arange(step) + (0 if at_end == "loop" else count - step)) % count
        samples = self.whole.samples(numbers % dp, numbers // dp)
        if count >= step:
            samples = samples[~np.isin(samples, [sample for each in self.left for sample in each])]
        return samples[: self.missing] if at_end == "loop" else samples[len(samples) - self.missing :]
