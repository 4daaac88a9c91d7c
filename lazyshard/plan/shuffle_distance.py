"""How far a shuffle moves neighbours apart, by formula, and which window moves them as far as is wanted.

Ranks draw in lockstep, one position each at a time, so positions of different lanes can be compared. **Neighbours** are
samples n and n + 1 of the stream, drawn at positions p and q, of one lane or of two. Their distance is |p - q|, in
positions: how many samples a rank draws from the one to the other; in steps of b positions |p - q| / b. It is a mean
over all there are in an epoch.

R lanes, unit u, window W; m = W / u. In order the window is one unit, unshuffled.

A uniformly random permutation puts two samples of one lane's window at two different positions, each pair as likely as
any other. W - d of the W (W - 1) / 2 pairs are d apart, so the mean is
2 / (W (W - 1)) * sum of d (W - d) over 1 <= d < W, which is **(W + 1) / 3**. The permutations of two lanes are
independent, so two positions may be the same, and the mean is (W**2 - 1) / (3 W). From the last sample of all lanes'
window w to the first one of w + 1 it is the distance of the middles of two windows, W. Of the R W neighbours that begin
in a window, R (W - m) lie in one unit, R m - 1 in two units of the window, and one leads into the next window. So the
mean over all differs from (W + 1) / 3 by less than one position.

That is the mean over all permutations; that those of `lazyshard.plan.shuffle` are like random ones is measured by a
test, not proved. A short last window of an ended stream is counted as it is.
"""

from __future__ import annotations

from lazyshard.plan.deal import check_field

__all__ = [
    "expected_neighbours",
    "largest_distance",
    "window_for_distance",
]


def window_for_distance(distance: int, samples_per_chunk: int) -> int:
    """Return how many chunks to shuffle together so that neighbours in the stream end up so far apart on average.

    The distance is in samples that one rank draws, one after the other: from a sample to its neighbour in the stream a
    rank draws, on average, `distance` samples. In optimiser steps that is `distance` divided by the samples that a rank
    draws in a step. Two samples of a window of W are (W + 1) / 3 apart on average, so this is the smallest number of
    chunks that hold at least 3 * distance - 1 samples, however many ranks there are and whatever the unit
    (`lazyshard.plan.shuffle_distance` has the derivation)::

        dataset = LazyShardedDataset(stream, shuffle_window=window_for_distance(10_000, samples_per_chunk=1000))

    Not guaranteed where a stream ends: its last window is as short as what is left, and the window is at most all that
    a rank has, with which neighbours are a third of that apart.

    Args:
        distance: from 1.
        samples_per_chunk: rows in every chunk but the last of the stream.

    Raises:
        ValueError: a number is no `int` from 1.

    >>> window_for_distance(10_000, 1000), window_for_distance(1, 1000), window_for_distance(667, 1000)
    (30, 1, 2)
    """
    check_field("distance", distance, 1)
    check_field("samples_per_chunk", samples_per_chunk, 1)
    return -(-(3 * distance - 1) // samples_per_chunk)


def largest_distance(positions: int) -> int:
    """Return how far apart neighbours are, rounded down, if all of a rank's positions are one window.

    >>> largest_distance(30_000), largest_distance(1), largest_distance(2)
    (10000, 0, 1)
    """
    return (positions + 1) // 3 if positions > 1 else 0


def expected_neighbours(ranks: int, unit: int, window: int, length: int | None) -> float:
    """Return the mean distance, in positions, of two samples that are neighbours in the stream.

    Args:
        ranks: number of lanes.
        unit: samples a lane gets in a row.
        window: positions that are shuffled together, a multiple of `unit`; 0 for none.
        length: positions of each lane in the epoch, exact if all lanes have as many; None for endless ones.

    Returns:
        0.0 if there are no two samples.
    """
    span = window or unit
    if length is None:
        return (_neighbours_within(ranks, unit, span, bool(window)) + (span if window else 1)) / (ranks * span)
    whole, rest = divmod(length, span)
    if ranks * length < 2:
        return 0.0
    found = whole * _neighbours_within(ranks, unit, span, bool(window))
    found += max(0, whole - 1) * (span if window else 1)
    if rest:
        found += _neighbours_within(ranks, unit, rest, bool(window))
        if whole:
            found += (span + rest) / 2 if window else 1
    return found / (ranks * length - 1)


def _neighbours_within(ranks: int, unit: int, size: int, shuffled: bool) -> float:
    """Return the sum of the distances of neighbours of which both lie in one window of all lanes, of that size."""
    units, tail = divmod(size, unit)
    if not shuffled:
        # The window is one stripe; or less than one, dealt row by row.
        return (2 * ranks - 1) * (unit - 1) if units else tail - 1
    same = size - 1 if ranks == 1 else ranks * (size - tail - units)
    return same * (size + 1) / 3 + (ranks * size - 1 - same) * (size * size - 1) / (3 * size)
