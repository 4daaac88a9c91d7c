"""Where a sample is drawn: the course of a run turned round, from sample to part, lane and position.

A sample is dealt in the segment in whose fresh deal it lies. Where that one ended before it was drawn, the next one has
taken it over, and so on, part by part, up to the one that draws it. Here, as in `lazyshard.plan.segment`, sample 8 is
dealt to lane 0 of part 0, which ends before it, and drawn by lane 0 of part 1, at position 1::

    part 0, 2 lanes    lane 0:  0  1  2  6 | 7  8 ...        drawn: left of the bar
    part 1, 3 lanes    lane 0:  7  8  12 13 14 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lazyshard.plan.part import OPEN, Begin, Part
from lazyshard.plan.segment import Segment

__all__ = ["Place", "find_place"]


class Place(NamedTuple):
    """Where a sample is drawn: `position` of `lane`, counted from the beginning of a part."""

    part: int
    lane: int
    position: int


def find_place(
    parts: Sequence[Part], begins: Sequence[Begin], sample: int, total: int | None, epoch: int
) -> Place | None:
    """Return where a sample is drawn in an epoch, which may lie ahead of what the last part has drawn.

    Args:
        parts: of the run; the last one is the current one.
        begins: where each of them begins with that total.
        sample: at least 0.
        total: the end of the samples once it is known; with None only the epoch of the current part is known.
        epoch: the epoch.

    Returns:
        None for a sample that is left out, or which the run does not draw in that epoch.
    """
    found: tuple[int, int] | None = None
    before: Segment | None = None
    for number, segment, goes_on, shift, stop in _chain(parts, begins, total, epoch):
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


def _chain(
    parts: Sequence[Part], begins: Sequence[Begin], total: int | None, epoch: int
) -> Iterator[tuple[int, Segment, bool, int, int | None]]:
    """Yield the segments of an epoch, part by part.

    Yields:
        Number of the part; segment; whether it is the one of the part before; position of the part - position of the
        segment; the position of the part behind the last that it draws in this epoch, None if that is open.
    """
    last = len(parts) - 1
    for number, begin in enumerate(begins):
        current = number == last
        at, draws = begin.segment.epoch, parts[number].draws
        if begin.length == OPEN:
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
