"""Blending by the greatest error: which of several streams gives the next sample.

Before draw n the stream is taken that lags most behind its share: the greatest ``weight * max(n, 1) - drawn``, the
first of equals. It is the rule of Megatron Core's `BlendedDataset` (`build_blending_indices` in
`megatron/core/datasets/helpers.cpp`). After any number of draws each stream is less than one sample per stream away
from its share, nothing is random, and the counts alone are the state::

    weights  0.5 0.25 0.25      draws  0 1 2 0 | 0 1 2 0 | ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["next_stream", "shares"]


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their sum.

    Raises:
        ValueError: there is none, or one is not a finite number above 0.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a weight is a finite number above 0, got {weight}")
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ValueError(f"weights need a finite sum above 0, got {list(weights)}")
    return tuple(weight / total for weight in weights)


def next_stream(shares: Sequence[float], drawn: Sequence[int], among: Sequence[int] | None = None) -> int:
    """Return the stream to draw from next.

    Args:
        shares: what each stream should have of all samples, shape (streams,); see `shares`.
        drawn: how many samples each has given, shape (streams,).
        among: the streams to choose from, ascending; None for all. At least one.
    """
    total = float(max(sum(drawn), 1))
    best, greatest = -1, -math.inf
    for stream in range(len(shares)) if among is None else among:
        error = shares[stream] * total - drawn[stream]
        if error > greatest:
            best, greatest = stream, error
    return best
