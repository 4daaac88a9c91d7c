"""Weights of a blend that follow the steps of a run: from one set to the next at once, or along a line.

::

    steps      0 ......... 1000 ......... 5000 ......
    weights    1 0         1 0            1 1
    "steps"    1 0         1 0            1 1
    "linear"   1 0         1 0  ...  2 1  1 1          in up to 64 pieces from one to the next
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from lazyshard.plan.blend_course import BlendCourse, BlendPiece
from lazyshard.plan.blend_table import whole_parts

__all__ = ["BlendSchedule", "Ramp"]

Ramp = Literal["steps", "linear"]

_PIECES: Final = 64
"""Pieces of a line at the most: each has a table of its own."""

_SHORT: Final = 1 << 10
_EACH: Final = 8
"""Periods of the pieces of a line are shorter, as there are many: of so many draws, or as many of each stream."""

_PLACES: Final = 512
"""Of a table that are looked at as beginnings of a piece."""

_STRIDE: Final = 0.6180339887498949


class BlendSchedule:
    """Which weights hold from which step on.

    Args:
        points: steps and the weights from there on, shape (streams,) each, 0 or more and not all 0; the first at
            step 0.
        ramp: "steps" holds each until the next; "linear" goes from each to the next along a line, in pieces of whole
            steps which have the weights of their middle. Behind the last point its weights hold.

    Raises:
        ValueError: there is no point, the first is not at step 0, they do not follow each other, or weights are wrong.
    """

    def __init__(self, points: Sequence[tuple[int, Sequence[float]]], ramp: Ramp = "steps") -> None:
        if ramp not in get_args(Ramp):
            raise ValueError(f"ramp is one of {', '.join(get_args(Ramp))}, got {ramp!r}")
        steps = [step for step, _ in points]
        for step in steps:
            if type(step) is not int:
                raise ValueError(f"the steps of a schedule are integers, got {step!r}")
        if not steps or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"the points of a schedule begin at step 0 and follow each other, got {steps}")
        streams = len(points[0][1])
        if any(len(weights) != streams for _, weights in points):
            raise ValueError(f"each point of a schedule has a weight for each of {streams} streams")
        # Each with its own table; a line that leads nowhere is no line.
        self._steps: list[int] = []
        self._parts: list[tuple[int, ...]] = []
        for step, parts in _stretches(points, ramp):
            if not self._parts or parts != self._parts[-1]:
                self._steps.append(step)
                self._parts.append(parts)

    @property
    def constant(self) -> bool:
        """Whether the weights never change."""
        return len(self._parts) == 1

    def parts(self, step: int) -> tuple[int, ...]:
        """Returns the draws of each stream in a period, as they are from a step on."""
        return self._parts[bisect_right(self._steps, step) - 1]

    def pieces(self, step: int, draws_per_step: int) -> tuple[BlendPiece, ...]:
        """Returns the pieces of a course that begins after so many steps.

        Args:
            step: steps trained before its first position.
            draws_per_step: positions of a lane in a step; only of importance if the weights change.
        """
        first = bisect_right(self._steps, step) - 1
        pieces = [BlendPiece(0, self._parts[first])]
        lag = np.zeros(len(self._parts[0]))
        begins = [(begin - step) * draws_per_step for begin in self._steps[first + 1 :]]
        lengths = [stop - begin for begin, stop in pairwise(begins)]
        for at, parts, draws in zip_longest(begins, self._parts[first + 1 :], lengths):
            last = pieces[-1]
            lag += _lag(last, at - last.first)
            pieces.append(BlendPiece(at, parts, _offset(parts, lag, draws)))
        return tuple(pieces)


def _lag(piece: BlendPiece, draws: int) -> npt.NDArray[np.float64]:
    """Returns how far each stream is behind its share after the first draws of a piece."""
    course = BlendCourse([piece._replace(first=0)])
    parts = np.array(piece.parts)
    lag: npt.NDArray[np.float64] = draws * parts / parts.sum() - np.array(course.counts(draws))
    return lag


def _offset(parts: tuple[int, ...], lag: npt.NDArray[np.float64], draws: int | None) -> int:
    """Returns where in its table a piece begins so that what streams lag behind their shares is made good.

    If each piece began its table anew, it would begin with the same streams, and where pieces are short these would get
    more than their shares.

    Args:
        parts: of the piece.
        lag: of each stream where it begins.
        draws: how many there are in the piece; None for a piece without an end.
    """
    period, shares = sum(parts), np.array(parts) / sum(parts)
    # Strewn by the golden ratio: places at even distances would all have the same stream's turn come next.
    places = np.arange(period)
    if period > _PLACES:
        places = (np.arange(_PLACES) * _STRIDE % 1 * period).astype(np.int64)
    streams, _ = BlendCourse([BlendPiece(0, parts, period)]).draws(0, 2 * period)
    before = np.zeros((2 * period + 1, len(parts)), dtype=np.int64)
    before[1:] = np.cumsum(streams[:, None] == np.arange(len(parts)), axis=0)
    if draws is None:
        # Where the table's own streams are as far behind.
        apart = places[:, None] * shares - before[places] - lag
    else:
        # So many draws from there leave them as near to their shares as can be.
        drawn = before[places + draws % period] - before[places]
        apart = lag + draws % period * shares - drawn
    # A stream that has no part in this piece cannot catch up in it.
    return period + int(places[int((apart[:, shares > 0] ** 2).sum(axis=1).argmin())])


def _stretches(points: Sequence[tuple[int, Sequence[float]]], ramp: Ramp) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields steps and the draws of a period from there on."""
    for (step, weights), (stop, target) in pairwise(points):
        if ramp == "steps":
            yield step, _parts(weights)
            continue
        _parts(weights)
        count = min(_PIECES, stop - step)
        bounds = [step + (stop - step) * number // count for number in range(count + 1)]
        for begin, end in pairwise(bounds):
            way = ((begin + end) / 2 - step) / (stop - step)
            between = [one + (other - one) * way for one, other in zip(weights, target, strict=True)]
            yield begin, _parts(between, max(_SHORT, _EACH * len(between)))
    yield points[-1][0], _parts(points[-1][1])


def _parts(weights: Sequence[float], longest: int | None = None) -> tuple[int, ...]:
    """Returns whole parts of the weights, 0 for those that are 0."""
    given = [weight for weight in weights if weight]
    whole = iter(whole_parts(given, longest))
    return tuple(next(whole) if weight else 0 for weight in weights)
