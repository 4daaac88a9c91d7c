"""The parts of a run, and where each of them begins: in which segment of which epoch. See `lazyshard.plan.course`.

Where a part ends follows from how much it drew and how long its epochs were, so where the next one begins is a walk
over all parts: a few integers each, nothing of what they drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import Deal, check_field
from lazyshard.plan.gaps import Gaps
from lazyshard.plan.lane import Plan
from lazyshard.plan.segment import Rules, Segment

__all__ = ["OPEN", "Begin", "Part", "begins"]

OPEN: Final = -1
"""The length of an epoch as long as the end of the stream is not known."""


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


class Begin(NamedTuple):
    """Where a part begins, given a total.

    Attributes:
        segment: what is left of the epoch.
        offset: the position of that segment at which the part begins.
        goes_on: whether it goes on in the order of the part before, in its segment.
        length: positions of each lane in it; `OPEN` as long as that is not known.
        later: what is drawn in every later epoch, in numbers of the samples kept.
        kept: how many samples a later epoch has; None as long as that is open.
    """

    segment: Segment
    offset: int
    goes_on: bool
    length: int
    later: Plan
    kept: int | None

    def draws(
        self, lanes: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64] | int, npt.NDArray[np.int64]]:
        """Return epochs, one or one for each, and samples of positions counted from where the part begins."""
        segment, length = self.segment, self.length
        if length == OPEN or positions.max() < length:
            return segment.epoch, segment.samples(lanes, positions + self.offset)
        later = positions >= length
        epochs = np.full(len(positions), segment.epoch, dtype=np.int64)
        samples = np.empty_like(positions)
        samples[~later] = segment.samples(lanes[~later], positions[~later] + self.offset)
        epochs[later], kept = self.later.draws(lanes[later], positions[later] - length, self.kept, segment.epoch + 1)
        samples[later] = segment.gaps.nth_all(0, kept)
        return epochs, samples

    def full(self, total: int, epoch: int) -> Segment:
        """Return a later, whole epoch."""
        segment = self.segment
        return Segment(segment.rules, segment.dp, epoch, total, segment.gaps)


def begins(rules: Rules, parts: Sequence[Part], total: int | None) -> list[Begin]:
    """Return where each part begins, `total` being the end of the samples once it is known.

    Raises:
        ValueError: a part has drawn more than there was.
    """
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
        later = Plan(Deal(part.dp, rules.unit), part.batch_size, rules.window, rules.seed)
        size = segment.size
        batches = None if size is None else (size - part.dp * offset) // (part.dp * part.batch_size)
        length = OPEN if batches is None else batches * part.batch_size
        found.append(Begin(segment, offset, goes_on, length, later, None if total is None else gaps.kept(0, total)))
    return found


def _ended(begin: Begin, part: Part, total: int | None) -> tuple[Segment, int]:
    """Return the segment in which a part ended, and how many of its positions were drawn by then."""
    segment = begin.segment
    if begin.length == OPEN or part.draws <= begin.length:
        return segment, begin.offset + part.draws
    assert total is not None
    full = begin.later.epoch_length(begin.kept or 0)
    if not full:
        raise ValueError(f"{part.draws} positions of {part.dp} lanes were drawn, but there are {total} samples")
    turns, drawn = divmod(part.draws - begin.length - 1, full)
    return begin.full(total, segment.epoch + 1 + turns), drawn + 1
