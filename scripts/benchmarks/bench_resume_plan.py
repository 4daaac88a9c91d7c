"""The arithmetic of a run's course: which sample a position draws, one by one and for arrays, and after a rescale.

In processor time, which other work on the machine disturbs less: nothing is waited for here, and nothing has threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from lazyshard.plan import Course, Part, Rules
from scripts.benchmarks.bench_read import SAMPLES_PER_CHUNK

WINDOW: Final = 4 * SAMPLES_PER_CHUNK
_DRAWS: Final = 12_501_250
"""Positions that were drawn before: 10^8 samples of 8 ranks, and a little, so that it is in the middle of a window."""

_SCALAR: Final = 20_000
_VECTOR: Final = 240_000
"""About so many samples a round."""

_RANKS: Final = (1024, 768)


@dataclass(frozen=True)
class Variant:
    """A course, and positions of its current part that are drawn in turn.

    Attributes:
        name: what it is called in the table.
        rules: of the run.
        parts: of the run.
        start: the first position.
        stop: the position behind the last one.
    """

    name: str
    rules: Rules
    parts: tuple[Part, ...]
    start: int
    stop: int

    def course(self, seed: int) -> Course:
        """Returns the course, with another seed each time: else permutations would be known from the time before."""
        return Course(replace(self.rules, seed=seed), self.parts)


def variants() -> Iterator[Variant]:
    """Yields what is measured."""
    for window, words in ((0, "in order"), (WINDOW, "window 4")):
        rules = Rules(SAMPLES_PER_CHUNK, window)
        count = _VECTOR // 8
        yield Variant(f"8 ranks, {words}", rules, (Part(8),), _DRAWS, _DRAWS + count)
        parts: tuple[Part, ...] = (Part(8, draws=_DRAWS), Part(6))
        open_samples = (rules.span - _DRAWS % rules.span) * 8
        carried = open_samples // 6
        yield Variant(f"8 to 6 ranks, {words}: carried over", rules, parts, 0, carried)
        yield Variant(f"8 to 6 ranks, {words}: behind that", rules, parts, carried + 1, carried + 1 + count)
        parts = (Part(8, draws=_DRAWS), Part(6, draws=100), Part(7, draws=100), Part(5))
        carried = (open_samples - 6 * 100 - 7 * 100) // 5
        yield Variant(f"8, 6, 7, 5 ranks in one window, {words}: carried over", rules, parts, 0, carried)


class Times(NamedTuple):
    """Seconds a sample, one for each round."""

    scalar: list[float]
    vector: list[float]


def measure_arithmetic(chunks: int, rounds: int) -> dict[tuple[Variant, bool], Times]:
    """Returns the times of each variant with the total known (True) and unknown; a first round is not counted."""
    found = {(variant, known): Times([], []) for variant in variants() for known in (True, False)}
    seeds = itertools.count()
    for number in range(rounds + 1):
        for (variant, known), times in found.items():
            course, total = variant.course(next(seeds)), chunks * SAMPLES_PER_CHUNK if known else None
            taken = _scalar(course, variant, total), _vector(course, variant, total)
            if number:
                times.scalar.append(taken[0])
                times.vector.append(taken[1])
    return found


def _scalar(course: Course, variant: Variant, total: int | None) -> float:
    """One rank's positions, one call each."""
    positions = range(variant.start, min(variant.stop, variant.start + _SCALAR))
    lane, draw = course.dp // 2, course.draw
    start = time.process_time()
    for position in positions:
        draw(lane, position, total)
    return (time.process_time() - start) / len(positions)


def _vector(course: Course, variant: Variant, total: int | None) -> float:
    """All ranks' positions in one call."""
    lanes, positions = np.arange(course.dp)[:, None], np.arange(variant.start, variant.stop)
    start = time.process_time()
    _, samples = course.draws(lanes, positions, total)
    return (time.process_time() - start) / samples.size


def measure_rescale(chunks: int, rounds: int) -> dict[str, list[float]]:
    """Returns seconds that a change of 1,024 ranks takes, one for each round.

    Each course has another seed, so that no permutation is known from the one before.
    """
    total = chunks * SAMPLES_PER_CHUNK
    found: dict[str, list[float]] = {}
    seeds = itertools.count()
    for _ in range(rounds):
        for before, after in (_RANKS, _RANKS[::-1]):
            # A little of the first window, so that nearly all of it is carried over.
            for skip, words in (((), ""), (((345_678, 345_679),), ", a sample left out")):
                parts = (Part(before, draws=97_650 // WINDOW * WINDOW + 345), Part(after, skip=skip))
                for known, told in ((total, ""), (None, ", end unknown")):
                    works = _works(Course(Rules(SAMPLES_PER_CHUNK, WINDOW, next(seeds)), parts), known)
                    for name, work in works.items():
                        start = time.process_time()
                        work()
                        key = f"{before:,} to {after:,} ranks{words}{told}: {name}"
                        found.setdefault(key, []).append(time.process_time() - start)
    return found


def _works(course: Course, total: int | None) -> dict[str, Callable[[], object]]:
    """Returns what is measured of a course; each begins with a course of its own."""

    def first_sample() -> object:
        return Course(course.rules, course.parts).draw(course.dp // 2, 0, total)

    def all_ranks() -> object:
        own = Course(course.rules, course.parts)
        return own.draws(np.arange(own.dp)[:, None], np.arange(WINDOW), total)

    return {"one rank's first sample": first_sample, "all ranks' first 4,000": all_ranks}
