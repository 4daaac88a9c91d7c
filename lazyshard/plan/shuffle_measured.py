"""How far apart neighbours are in what is really drawn. What the distances are is told in `shuffle_distance`.

The order of a whole stream may be too long to look at, so what is looked at is whole windows, evenly spaced, of all
lanes; where even one window of all lanes is too much, of some.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan.course import Course

__all__ = ["LOOKED_AT", "Measured", "in_turn", "measure", "neighbours", "same_chunk"]

LOOKED_AT: Final = 1 << 21
"""Samples that are looked at where there are more: enough for means good to a thousandth or so, in half a second."""

_STRETCHES: Final = 8
"""Places of the order that are looked at where all of it is too much."""

_Ints = npt.NDArray[np.int64]


class Measured(NamedTuple):
    """What was found.

    Attributes:
        neighbours: mean distance of two samples that are neighbours in the stream, in positions; None without any.
        in_turn: mean distance of two samples that a lane draws in turn, in samples of the stream; None without any.
        same_chunk: samples of a batch in the chunk of one of them, itself included, on average; None without a batch.
        samples: how many were looked at.
    """

    neighbours: float | None
    in_turn: float | None
    same_chunk: float | None
    samples: int


def measure(
    course: Course, samples_per_chunk: int, length: int, total: int | None, looked_at: int = LOOKED_AT
) -> Measured:
    """Look at what a run draws from its beginning on, in its first epoch.

    Args:
        course: what each lane draws.
        samples_per_chunk: samples in a chunk.
        length: positions [0, length) of each lane are looked at, or some of them: of the first epoch.
        total: the end of the samples; None while the stream grows, and then all these positions are certain.
        looked_at: how many samples are looked at, at the most; one window of two lanes, and the one behind it, in any
            case.
    """
    dp, batch = course.dp, course.batch_size
    lanes, stretches = _looked_at(dp, course.rules.span, length, looked_at)
    beside, turns, batches = _Sum(), _Sum(), _Sum()
    seen = 0
    for start, stop, end in stretches:
        positions = np.arange(start, end, dtype=np.int64)
        samples = course.draws(np.arange(lanes)[:, None], positions[None, :], total)[1]
        seen += lanes * (stop - start)
        # All lanes' positions [0, stop) hold the samples [0, dp * stop), where that is the end of a window.
        beside.add(*_neighbours(samples, positions, dp * stop if stop < length else None))
        turns.add(*_in_turn(samples[:, : stop - start + 1]))
        first, last = -start % batch, min(-(-stop // batch), end // batch) * batch - start
        if last > first:
            batches.add(*_same_chunk(samples[:, first:last], samples_per_chunk, batch))
    return Measured(beside.mean, turns.mean, batches.mean, seen)


def neighbours(samples: _Ints, positions: _Ints) -> float:
    """Return the mean distance, in positions, of those samples that are neighbours in the stream; 0.0 without any.

    Args:
        samples: what was drawn, of shape (lanes, positions).
        positions: where, of shape (positions,).

    >>> neighbours(np.array([[1, 0], [3, 2]]), np.array([0, 1]))
    1.0
    """
    return _Sum(*_neighbours(samples, positions)).mean or 0.0


def in_turn(samples: _Ints) -> float:
    """Return the mean distance of samples that a lane draws in turn; 0.0 without any.

    Args:
        samples: what was drawn at positions in a row, of shape (lanes, positions).

    >>> in_turn(np.array([[0, 1, 6], [3, 4, 9]]))
    3.0
    """
    return _Sum(*_in_turn(samples)).mean or 0.0


def same_chunk(samples: _Ints, samples_per_chunk: int, batch: int) -> float:
    """Return how many samples of a batch lie in the chunk of one of them, itself included, on average.

    Args:
        samples: what was drawn, whole batches in its last dimension.
        samples_per_chunk: samples in a chunk.
        batch: samples in a batch.

    >>> same_chunk(np.array([0, 1, 2, 3, 4, 8]), 4, 3)  # chunks 0 0 0, then 0 1 2
    2.0
    """
    return _Sum(*_same_chunk(samples, samples_per_chunk, batch)).mean or 0.0


class _Sum:
    """A mean under way."""

    def __init__(self, total: int = 0, count: int = 0) -> None:
        self.total = total
        self.count = count

    def add(self, total: int, count: int) -> None:
        self.total += total
        self.count += count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


def _looked_at(dp: int, span: int, length: int, most: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return how many lanes are looked at, and which positions.

    Returns:
        For each stretch of windows: what begins in its half-open range [start, stop) is counted, and may reach into the
        window behind it, up to `end`. Where not all windows are looked at, a short last one is left out.
    """
    row = max(1, min(span, length))
    lanes = min(dp, max(2, most // row))
    fitting = most // (lanes * row)
    rows = length // row
    if fitting * row >= length:
        return lanes, [(0, length, length)] if length else []
    # Each with a window more, into which it reaches.
    count = max(1, min(_STRETCHES, fitting // 2))
    each = max(1, fitting // count - 1)
    firsts = [number * max(0, rows - 1 - each) // max(1, count - 1) for number in range(count)]
    stretches = [(first * row, (first + each) * row) for first in firsts]
    return lanes, [(start, stop, min(stop + row, length)) for start, stop in stretches]


def _neighbours(samples: _Ints, positions: _Ints, limit: int | None = None) -> tuple[int, int]:
    order = np.argsort(samples, axis=None)
    ordered = samples.ravel()[order]
    beside = np.diff(ordered) == 1
    if limit is not None:
        beside &= ordered[:-1] < limit
    apart = np.abs(np.diff(np.broadcast_to(positions, samples.shape).ravel()[order]))
    return int(apart[beside].sum()), int(beside.sum())


def _in_turn(samples: _Ints) -> tuple[int, int]:
    apart = np.abs(np.diff(samples, axis=-1))
    return int(apart.sum()), apart.size


def _same_chunk(samples: _Ints, samples_per_chunk: int, batch: int) -> tuple[int, int]:
    chunks = np.sort((samples // samples_per_chunk).reshape(-1, batch), axis=1)
    # Where runs of one chunk begin, in one batch after another.
    begins = np.ones(chunks.shape, dtype=bool)
    begins[:, 1:] = chunks[:, 1:] != chunks[:, :-1]
    lengths = np.diff(np.append(np.flatnonzero(begins), chunks.size))
    return int((lengths**2).sum()), chunks.size
