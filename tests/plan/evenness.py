"""How even the steps of ranks are that read chunks dealt to them in order."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]


def step_costs(
    costs: npt.ArrayLike, ranks: int, samples_per_chunk: int, micro_batch_size: int = 1, *, ended: bool = False
) -> _Floats:
    """Returns what each rank's micro batch of each step costs, of shape (steps, ranks).

    `costs`: of the samples from the first of a stripe on; those that fill no step are left out. `ended`: whether the
    stream ends behind them: then what fills no whole stripe is dealt too, row by row.
    """
    rows = np.asarray(costs, np.float64)
    whole = len(rows) // (ranks * samples_per_chunk) * samples_per_chunk
    stripes = rows[: whole * ranks].reshape(-1, ranks, samples_per_chunk).transpose(1, 0, 2).reshape(ranks, whole)
    if ended:
        tail = rows[whole * ranks :]
        tail = tail[: len(tail) // ranks * ranks].reshape(-1, ranks).T
        stripes = np.concatenate((stripes, tail), axis=1)
    steps = stripes.shape[1] // micro_batch_size
    found: _Floats = stripes[:, : steps * micro_batch_size].reshape(ranks, steps, micro_batch_size).sum(axis=2).T
    return found


class Evenness(NamedTuple):
    """The largest cost of a rank in a step over the mean of its ranks, 1 where all are equal: of all steps together."""

    steps: int  # how many they are
    overall: float  # the sum of the largest over the sum of the means
    mean: float  # of the ratios


def evenness(costs: _Floats) -> Evenness | None:
    """Returns how even steps are, of what `step_costs` returned; None if there are none, or none costs anything."""
    means, largest = costs.mean(axis=1), costs.max(axis=1, initial=0.0)
    if not means.sum():
        return None
    # In a step that costs nothing all are equal.
    ratios = np.divide(largest, means, out=np.ones_like(means), where=means > 0)
    return Evenness(len(costs), float(largest.sum() / means.sum()), float(ratios.mean()))
