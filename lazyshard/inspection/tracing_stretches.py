"""Stretches of a run: parts that go on from each other, cut where a part begins an epoch anew.

Within a stretch each sample is drawn once an epoch at the most; two stretches may draw the same epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lazyshard.plan import Course, Gaps


class Stretch(NamedTuple):
    """Parts of a run that go on from each other, the first of them beginning an epoch.

    Attributes:
        first: number of its first part.
        course: these parts alone.
        last_epoch: the epoch of what was drawn last in it.
    """

    first: int
    course: Course
    last_epoch: int


def stretches_of(course: Course, total: int | None) -> Iterator[Stretch]:
    """Yields the stretches of a course; what was left out before one is left out of it too.

    Raises:
        ValueError: a part has drawn more than there is.
    """
    parts = course.parts
    starts = [number for number, part in enumerate(parts) if not number or part.epoch is not None]
    gaps: Gaps = Gaps()
    for start, stop in zip(starts, [*starts[1:], len(parts)], strict=True):
        own = parts[start:stop]
        alone = Course(course.rules, [replace(own[0], skip=gaps.joined(own[0].skip).ranges), *own[1:]])
        yield Stretch(start, alone, _last_epoch(alone, total))
        gaps = gaps.joined(one for part in own for one in part.skip)


def _last_epoch(course: Course, total: int | None) -> int:
    draws = course.current.draws
    if not draws or total is None:
        return course.epoch(total)
    return course.draw(0, draws - 1, total).epoch


def is_over(stretch: Stretch, total: int | None) -> bool:
    """Returns whether a stretch has drawn its last epoch to the end."""
    if total is None:
        return False
    course = stretch.course
    length, full, draws = course.epoch_length(total), course.full_epoch_length(total), course.current.draws
    return draws == length or (draws > length and full > 0 and (draws - length) % full == 0)
