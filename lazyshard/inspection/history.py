"""How a stream came to be: when it was published, how long its rows are, which rows were refused.

Told by the seals of at most some hundred evenly spaced chunks, by the cursors, and by `quarantine.jsonl`: no row is
read. Who looks again passes what was found before, of which only what has changed is read anew. Times are seconds
since 1970 by the clocks of those who wrote them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from lazyshard.format.names import QUARANTINE
from lazyshard.inspection.inspection import ChunkPoint, Overview, overview
from lazyshard.inspection.refusals import Refusals, read_refusals
from lazyshard.inspection.survey import tolerate
from lazyshard.store.files import size_of
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.manifest import read_manifest
from lazyshard.stream.opening import open_now
from lazyshard.stream.published import Published

MOST_TRAINED: Final = 20
"""Consumers that are told of: those furthest behind."""


class At(NamedTuple):
    """An amount at a time."""

    time: float
    amount: float


class Trained(NamedTuple):
    """A consumer's last checkpoint: its name, when it was saved, and the samples in it."""

    name: str
    time: float
    samples: int


@dataclass(frozen=True, slots=True)
class History:
    """How a stream came to be.

    Attributes:
        found: what the seals tell; None of a directory without `stream.json`, whose rows would have to be read.
        course: how many rows were published when.
        trained: of the consumers that are furthest behind, at most `MOST_TRAINED`.
        refusals: the rows that were refused; None where there is no file of them.
        refusals_size: bytes of that file.
    """

    found: Overview | None
    course: tuple[At, ...] = ()
    trained: tuple[Trained, ...] = ()
    refusals: Refusals | None = None
    refusals_size: int | None = None


def take_history(directory: Path, before: History | None = None) -> History:
    """Looks at how a stream came to be.

    Args:
        directory: the stream's directory.
        before: what was found last; None at first.

    Raises:
        LazyShardError, OSError: as `overview` and `read_refusals`.
    """
    size = None
    with contextlib.suppress(FileNotFoundError):
        size = size_of(directory / QUARANTINE)
    same = before is not None and size == before.refusals_size
    refusals = before.refusals if before is not None and same else read_refusals(directory)
    if read_manifest(directory, None) is None:
        return History(None, refusals=refusals, refusals_size=size)
    stream = open_now(directory)
    published, retired = stream.published(), stream.retired()
    known = None if before is None else before.found
    found = known if known is not None and _same(known, published, retired) else overview(directory, rows=False)
    cursors = [one.cursor for one in tolerate(lambda: list_consumers(directory, published.chunks), []) or ()]
    trained = [Trained(one.consumer, one.updated_at, one.consumed) for one in cursors if one is not None]
    trained.sort(key=lambda one: (one.samples, one.name))
    course = published_rows(found.points, found.samples_per_chunk)
    return History(found, tuple(course), tuple(trained[:MOST_TRAINED]), refusals, size)


def _same(known: Overview, published: Published, retired: int) -> bool:
    before = known.published
    return (before.chunks, before.ended, known.retired) == (published.chunks, published.ended, retired)


def published_rows(points: Sequence[ChunkPoint], samples_per_chunk: int) -> list[At]:
    """Returns how many rows were published when, from chunks that were looked at; times that go back are evened out.

    >>> published_rows([ChunkPoint(0, 10, 99, 5.0), ChunkPoint(3, 4, 40, 9.0)], 10)
    [At(time=5.0, amount=10), At(time=9.0, amount=34)]
    """
    if not points:
        return []
    times = np.maximum.accumulate([point.sealed_at for point in points])
    return [
        At(float(time), point.chunk * samples_per_chunk + point.rows) for time, point in zip(times, points, strict=True)
    ]


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
