"""How a stream went on in time: published by the seals, trained by checkpoints, and where it stood still.

Arithmetic on what other modules have read; no I/O. Times are seconds since 1970 by the clocks of those who wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from lazyshard.inspection.report_chunks import ChunkPoint

_PAUSE_S: Final = 10.0
_PAUSE_FACTOR: Final = 5.0
"""Publishing stood still where two chunks came this much further apart than half of all do, and so many seconds."""

MOST_PAUSES: Final = 1000
"""That are kept, the longest."""


class At(NamedTuple):
    """An amount at a time."""

    time: float
    amount: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing was published in between.

    Attributes:
        start: when the last chunk before it was published.
        stop: when the next one that was looked at was.
        chunk: that next one.
    """

    start: float
    stop: float
    chunk: int

    @property
    def seconds(self) -> float:
        """How long it was, the time that its own rows took included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Dry:
    """A checkpoint at which training had used up what was published: the next step had to wait.

    Attributes:
        consumer: whose.
        at: when it was saved.
        left: samples that were published then and not trained.
    """

    consumer: str
    at: float
    left: float


def published_rows(points: Sequence[ChunkPoint], samples_per_chunk: int) -> list[At]:
    """Returns how many rows were published when, from chunks that were looked at; times that go back are evened out.

    >>> published_rows([ChunkPoint(0, 10, 99, 5.0), ChunkPoint(3, 4, 40, 9.0)], 10)
    [At(time=5.0, amount=10), At(time=9.0, amount=34)]
    """
    return [
        At(at, point.chunk * samples_per_chunk + point.rows) for at, point in zip(_rising(points), points, strict=True)
    ]


def published_bytes(points: Sequence[ChunkPoint]) -> list[At]:
    """Returns how many bytes of rows were published when, counted from the first chunk that was looked at.

    Chunks in between that were not looked at count as the mean of the two beside them.

    >>> published_bytes([ChunkPoint(0, 10, 100, 5.0), ChunkPoint(3, 4, 40, 9.0)])
    [At(time=5.0, amount=100), At(time=9.0, amount=280.0)]
    """
    found: list[At] = []
    for index, (at, point) in enumerate(zip(_rising(points), points, strict=True)):
        if not index:
            found.append(At(at, point.size))
            continue
        before = points[index - 1]
        between = (point.chunk - before.chunk - 1) * (point.size + before.size) / 2
        found.append(At(at, found[-1].amount + between + point.size))
    return found


def rates(course: Sequence[At], most: int) -> list[At]:
    """Returns the mean rate per second in equal stretches of time, each at the end of its stretch.

    Args:
        course: amounts, rising in time and amount.
        most: how many stretches; fewer where there are fewer amounts.

    >>> rates([At(0.0, 0), At(10.0, 100), At(20.0, 100)], 2)
    [At(time=10.0, amount=10.0), At(time=20.0, amount=0.0)]
    """
    if len(course) < 2 or course[-1].time <= course[0].time:
        return []
    edges = np.linspace(course[0].time, course[-1].time, min(most, len(course) - 1) + 1)
    amounts = np.interp(edges, [one.time for one in course], [one.amount for one in course])
    found = np.diff(amounts) / np.diff(edges)
    return [At(float(edge), float(rate)) for edge, rate in zip(edges[1:], found, strict=True)]


def mean_rate(course: Sequence[At]) -> float | None:
    """Returns the amount per second from the first to the last; None where no time has passed."""
    if len(course) < 2 or course[-1].time <= course[0].time:
        return None
    return (course[-1].amount - course[0].amount) / (course[-1].time - course[0].time)


def pauses(points: Sequence[ChunkPoint]) -> list[Pause]:
    """Returns where publishing stood still, the longest first.

    >>> times = [0.0, 1.0, 2.0, 62.0, 63.0]
    >>> pauses([ChunkPoint(chunk, 1, 1, at) for chunk, at in enumerate(times)])
    [Pause(start=2.0, stop=62.0, chunk=3)]
    """
    times = _rising(points)
    # Of chunks that were not looked at the time is shared by all of them.
    steps = [
        (after - before) / (point.chunk - last.chunk)
        for (before, after), (last, point) in zip(pairwise(times), pairwise(points), strict=True)
    ]
    if not steps:
        return []
    usual = median(steps)
    found = []
    for (before, after), (last, point) in zip(pairwise(times), pairwise(points), strict=True):
        expected = usual * (point.chunk - last.chunk)
        if after - before >= max(_PAUSE_S, _PAUSE_FACTOR * expected):
            found.append(Pause(before, after, point.chunk))
    return sorted(found, key=lambda pause: (-pause.seconds, pause.start))[:MOST_PAUSES]


def dry_points(consumer: str, trained: Iterable[At], published: Sequence[At], step: int) -> list[Dry]:
    """Returns the checkpoints at which fewer samples were left than the next step takes.

    Args:
        consumer: whose they are.
        trained: samples at each.
        published: rows published when.
        step: samples of a step over all ranks. With whole stripes to wait for, more checkpoints may have been dry.

    >>> dry_points("sft", [At(5.0, 10), At(9.0, 28)], [At(0.0, 10), At(5.0, 20), At(9.0, 30)], 4)
    [Dry(consumer='sft', at=9.0, left=2)]
    """
    found = []
    times = [one.time for one in published]
    for one in trained:
        index = int(np.searchsorted(times, one.time, side="right"))
        # Before the first seal that was looked at nothing is known; behind the last one nothing was waited for.
        if not 0 < index <= len(times) or (index == len(times) and one.time > times[-1]):
            continue
        left = published[index - 1].amount - one.amount
        if 0 <= left < step:
            found.append(Dry(consumer, one.time, left))
    return found


def _rising(points: Sequence[ChunkPoint]) -> list[float]:
    """Returns the times of chunks, none before that of an earlier chunk: a clock that was set back tells no rate."""
    return [float(one) for one in np.maximum.accumulate([point.at for point in points])] if points else []
