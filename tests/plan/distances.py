"""How far apart neighbours of a stream are in what was drawn."""

from typing import Any

import numpy as np
import numpy.typing as npt


def neighbours(samples: npt.NDArray[Any], positions: npt.NDArray[Any]) -> float:
    """The mean distance in positions of those samples (lanes, positions) that are neighbours in the stream, or 0.0."""
    order = np.argsort(samples, axis=None)
    beside = np.diff(samples.ravel()[order]) == 1
    apart = np.abs(np.diff(np.broadcast_to(positions, samples.shape).ravel()[order]))
    return float(apart[beside].mean()) if beside.any() else 0.0
