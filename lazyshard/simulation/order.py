"""How far a run's order is from the stream's: by the plan's own arithmetic, for some ranks, windows and steps.

The distances are defined in `lazyshard.plan.shuffle_distance`: of neighbours in the stream, in draws of a rank, by
formula; of what a rank draws in turn, in rows, as it is drawn. In order, what is drawn in turn is on average as far
apart as there are ranks: one within a chunk, and all other ranks' chunks from one chunk to the next. Whole windows are
looked at; where the stream is too short for one, what there is of it.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan.shuffle_distance import expected_neighbours
from lazyshard.simulation.setting import Setting

_POSITIONS: Final = 1 << 17
"""Of one rank, of two whole windows or more where they are smaller."""

_LANES: Final = 8
"""Ranks whose draws in turn are looked at."""

_BATCH_LANES: Final = 32
"""Ranks whose share of a global batch is looked at where all of them would take long."""

_SHUFFLED: Final = 4 << 20
"""Rows that may be shuffled for a step of all ranks."""

_STEPS: Final = 3


class Shuffle(NamedTuple):
    """Mean distances.

    Attributes:
        neighbour_draws: of two samples that are neighbours in the stream, in draws of a rank from the one to the other.
        in_turn_distance: of two samples that a rank draws one after the other, in rows of the stream.
        batch_distance: of two samples of a global batch, in rows of the stream; None where it is of one sample.
        full_distance: of two samples anywhere, in rows: what shuffling everything would give.
    """

    neighbour_draws: float
    in_turn_distance: float
    batch_distance: float | None
    full_distance: float


def shuffle_quality(setting: Setting, seed: int = 0) -> Shuffle:
    """Returns the distances of a setting; `seed` chooses what is looked at where not all is."""
    choice = random.Random(seed)  # noqa: S311 - what is looked at
    neighbours = expected_neighbours(
        setting.ranks,
        setting.samples_per_chunk,
        setting.window * setting.samples_per_chunk,
        setting.rows // setting.ranks,
    )
    return Shuffle(neighbours, _in_turn(setting, choice), _batch(setting, choice), (setting.rows + 1) / 3)


def _in_turn(setting: Setting, choice: random.Random) -> float:
    length, total = _length(setting)
    if total is None:
        # And the step from the last one to the next.
        length = min(length, max(2, _POSITIONS // setting.span) * setting.span) + 1
    lanes, positions = _some(setting.ranks, _LANES, choice), np.arange(length, dtype=np.int64)
    drawn = setting.course.draws(lanes[:, None], positions[None, :], total)[1]
    return float(np.abs(np.diff(drawn, axis=-1)).mean()) if drawn.shape[-1] > 1 else 0.0


def _batch(setting: Setting, choice: random.Random) -> float | None:
    if setting.step_rows < 2:
        return None
    few = setting.ranks * max(setting.draws, setting.window * setting.samples_per_chunk) > _SHUFFLED
    lanes = _some(setting.ranks, _BATCH_LANES if few else setting.ranks, choice)
    # Those of the same rank and those of two count as often as they do with all ranks.
    same = setting.draws * (setting.draws - 1) / 2 * setting.ranks
    apart = setting.step_rows * (setting.step_rows - 1) / 2 - same
    length, total = _length(setting)
    course, means, steps = setting.course, [], max(1, length // setting.draws)
    for step in sorted({0, steps // 2, *(choice.randrange(steps) for _ in range(_STEPS))}):
        positions = np.arange(step * setting.draws, (step + 1) * setting.draws, dtype=np.int64)
        _, samples = course.draws(lanes[:, None], positions[None, :], total)
        within = sum(_distances(row) for row in samples)
        across = _distances(samples.ravel()) - within
        within_pairs = len(lanes) * setting.draws * (setting.draws - 1) / 2
        across_pairs = samples.size * (samples.size - 1) / 2 - within_pairs
        mean = (same * within / within_pairs if same else 0.0) + (apart * across / across_pairs if apart else 0.0)
        means.append(mean / (same + apart))
    return float(np.mean(means))


def _length(setting: Setting) -> tuple[int, int | None]:
    """Returns the positions of each rank to look at, and the end of the stream if that matters there."""
    whole = setting.rows // setting.span_rows * setting.span
    return (whole, None) if whole else (setting.steps * setting.draws, setting.rows)


def _some(count: int, most: int, choice: random.Random) -> npt.NDArray[np.int64]:
    return np.array(sorted(choice.sample(range(count), min(count, most))), dtype=np.int64)


def _distances(samples: npt.NDArray[np.int64]) -> float:
    """Returns the sum of the distances of all pairs."""
    ordered = np.sort(samples).astype(np.float64)
    count = len(ordered)
    return float((ordered * (2 * np.arange(count) - count + 1)).sum())
