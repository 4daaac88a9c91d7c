"""How well a stream is shuffled: how far apart neighbours are, by formula and in what would really be drawn.

Rows are not read: what is drawn when follows from how many there are. What the distances are is told in
`lazyshard.plan.shuffle_distance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lazyshard.plan import Course, Deal, Part, Rules, auto_unit, named_unit, window_positions
from lazyshard.plan.shuffle_distance import (
    expected_in_turn,
    expected_neighbours,
    expected_same_chunk,
    largest_distance,
)
from lazyshard.plan.shuffle_measured import Measured, measure
from lazyshard.stream.published import Published

__all__ = ["ALL", "Expected", "Reading", "ShuffleReport", "WindowReport", "report_shuffle"]

ALL: Literal["all"] = "all"
"""The window that holds all chunks of a rank."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a stream would be read.

    Attributes:
        ranks: data-parallel ranks.
        unit: what is dealt to them in turn: "chunk", "sample", "batch", "auto", or a number of samples.
        batch_size: samples of one rank in a batch.
    """

    ranks: int = 1
    unit: str | int = "chunk"
    batch_size: int = 1

    def unit_samples(self, samples_per_chunk: int, published: Published) -> int:
        """Returns the unit in samples.

        Raises:
            ValueError: there is no such unit; or what "auto" stands for is not certain yet.
        """
        unit = named_unit(self.unit, samples_per_chunk, self.batch_size)
        if unit is None:
            samples, ended = published.samples, published.ended
            unit = auto_unit(self.ranks, samples_per_chunk, self.batch_size, samples, ended, None)
        if unit is None:
            raise ValueError(
                f"which unit 'auto' stands for is certain once {self.ranks * samples_per_chunk:,} samples are "
                f"published or the stream has ended; there are {published.samples:,}: name a unit"
            )
        return unit


@dataclass(frozen=True, slots=True)
class Expected:
    """What the formulas give, as means over all permutations.

    Attributes:
        neighbours: distance of two samples that are neighbours in the stream, in positions of a rank.
        in_turn: distance of two samples that a rank draws in turn, in samples of the stream.
        same_chunk: samples of a batch that lie in the chunk of one of them, itself included.
    """

    neighbours: float
    in_turn: float
    same_chunk: float


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One window.

    Attributes:
        window: in chunks, as it was asked for; `ALL` for all of a rank's.
        positions: how many samples of a rank are shuffled together; 0 in order.
        expected: by formula.
        measured: in what would be drawn with this window in the first epoch, under a seed of 0.
    """

    window: int | Literal["all"]
    positions: int
    expected: Expected
    measured: Measured


@dataclass(frozen=True, slots=True)
class ShuffleReport:
    """How well a stream is shuffled.

    Attributes:
        samples: that are published.
        ended: whether no more follow.
        samples_per_chunk: of the stream.
        reading: how it would be read.
        unit_samples: the unit of that, in samples.
        rank_samples: samples of one rank in an epoch; None while the stream grows.
        largest: the largest mean distance of neighbours that a window can reach, in positions; None while it grows.
        windows: one by one.
    """

    samples: int
    ended: bool
    samples_per_chunk: int
    reading: Reading
    unit_samples: int
    rank_samples: int | None
    largest: int | None
    windows: tuple[WindowReport, ...]


def report_shuffle(
    published: Published, samples_per_chunk: int, reading: Reading, windows: Sequence[int | Literal["all"]]
) -> ShuffleReport:
    """Looks at the order in which a stream would be read from its beginning.

    While it grows, that is what can be drawn by now; formulas are those of a stream without an end where nothing can.

    Args:
        published: what is published.
        samples_per_chunk: rows in every chunk but possibly the last.
        reading: how it is read.
        windows: in chunks, 0 for none; `ALL` for all chunks of a rank.

    Raises:
        ValueError: there is no such unit, or "auto" is not certain yet; `ALL` is asked of a stream that grows; or it
            has ended with less than a batch a rank.
    """
    size, total = samples_per_chunk, published.samples if published.ended else None
    unit = reading.unit_samples(size, published)
    length = None if total is None else Course(Rules(unit), [_part(reading)]).epoch_length(total)
    if length == 0:
        raise ValueError(
            f"the stream has ended with {published.samples:,} samples, fewer than one batch of {reading.batch_size} "
            f"for each of {reading.ranks} ranks"
        )
    found = []
    for window in windows:
        if window != ALL:
            positions = window_positions(window, size, unit)
        elif total is None:
            raise ValueError(
                "the stream is still being produced, so nothing tells how many samples a rank will have: a window as "
                "wide as all of them needs a stream that has ended"
            )
        else:
            # Ranks differ by one sample at most.
            positions = -(-total // (reading.ranks * unit)) * unit
        found.append(_report(window, positions, unit, reading, published, size))
    share = None if total is None else total // reading.ranks
    return ShuffleReport(
        samples=published.samples,
        ended=published.ended,
        samples_per_chunk=size,
        reading=reading,
        unit_samples=unit,
        rank_samples=length,
        largest=None if share is None else largest_distance(share),
        windows=tuple(found),
    )


def _report(
    window: int | Literal["all"], positions: int, unit: int, reading: Reading, published: Published, size: int
) -> WindowReport:
    ranks, batch = reading.ranks, reading.batch_size
    total = published.samples if published.ended else None
    course = Course(Rules(unit, positions), [_part(reading)])
    length = course.drawable(published.samples) if total is None else course.epoch_length(total)
    # To the end of an epoch all are shuffled together that a rank has, what will be left over included.
    share = (length or None) if total is None else total // ranks
    expected = Expected(
        expected_neighbours(ranks, unit, positions, share),
        expected_in_turn(ranks, unit, positions, share),
        expected_same_chunk(Deal(ranks, unit), size, positions, batch, total),
    )
    return WindowReport(window, positions, expected, measure(course, size, length, total))


def _part(reading: Reading) -> Part:
    return Part(reading.ranks, reading.batch_size)
