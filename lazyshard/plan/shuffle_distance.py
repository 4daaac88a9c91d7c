"""How far a shuffle moves neighbours apart, by formula, and which window moves them as far as is wanted.

Three numbers tell how well an order is shuffled. Ranks draw in lockstep, one position each at a time, so positions of
different lanes can be compared:

- **neighbours**: samples n and n + 1 of the stream are drawn at positions p and q, of one lane or of two. Their
  distance is |p - q|, in positions: how many samples a rank draws from the one to the other. With b positions a step
  that is |p - q| / b steps.
- **in turn**: a lane draws samples m and n at positions p and p + 1. Their distance is |m - n|, in samples of the
  stream.
- **same chunk**: of a batch of b positions of a lane, how many samples lie in the chunk of one of them, itself
  included: 1 if no two of a batch share a chunk, b if all of them do.

Each is a mean over all there are in an epoch. R lanes, unit u, window W, S samples in a chunk, b positions in a batch;
m = W / u. In order the window is one unit, unshuffled.

**Neighbours.** A uniformly random permutation puts two samples of one lane's window at two different positions, each
pair as likely as any other. W - d of the W (W - 1) / 2 pairs are d apart, so the mean is
2 / (W (W - 1)) * sum of d (W - d) over 1 <= d < W, which is **(W + 1) / 3**. The permutations of two lanes are
independent, so two positions may be the same, and the mean is (W**2 - 1) / (3 W). From the last sample of all lanes'
window w to the first one of w + 1 it is the distance of the middles of two windows, W. Of the R W neighbours that begin
in a window, R (W - m) lie in one unit, R m - 1 in two units of the window, and one leads into the next window. So the
mean over all differs from (W + 1) / 3 by less than one position.

**In turn.** A position of a lane's window shares its unit with u - 1 of the W - 1 others, from which it is on average
(u + 1) / 3 apart. The others are in units that are on average (m + 1) / 3 stripes of R u samples apart, since within
their units they are as often before as behind. The middles of two windows are R W apart. Together
((u**2 - 1) / 3 + R (W**2 - u**2) / 3 + R W) / W, about R W / 3.

**Same chunk.** Two of a window's W positions hold samples of one chunk with probability
sum of c (c - 1) / (W (W - 1)), c being how many samples of each chunk the lane has in it: (S - 1) / (W - 1) where units
are chunks. So where windows hold whole batches it is 1 + (b - 1) (S - 1) / (W - 1).

All three are means over all permutations; that those of `lazyshard.plan.shuffle` are like random ones is measured
(`shuffle_measured`), not proved. A short last window of an ended stream is counted as it is.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from lazyshard.plan._bounds import check_field
from lazyshard.plan.deal import Deal
from lazyshard.plan.shuffle_measured import same_chunk

__all__ = [
    "expected_in_turn",
    "expected_neighbours",
    "expected_same_chunk",
    "largest_distance",
    "window_for_distance",
]

_COUNTED_LANES: Final = 8
_COUNTED_POSITIONS: Final = 1 << 20
"""So many lanes and positions, at the most, tell how many samples of a chunk lie in one window."""

_PHASES: Final = 4096
"""Windows that are looked at, at the most, for how they are cut into batches."""


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


def expected_in_turn(ranks: int, unit: int, window: int, length: int | None) -> float:
    """Return the mean distance, in samples of the stream, of two samples that a lane draws one after the other.

    Args:
        ranks: as of `expected_neighbours`, as are the others.
        unit: samples a lane gets in a row.
        window: positions that are shuffled together.
        length: positions of each lane in the epoch.
    """
    span = window or unit
    # From a window, or a stripe in order, into the next one.
    over = ranks * span if window else (ranks - 1) * unit + 1
    within = _in_turn_within(ranks, unit, span) if window else unit - 1
    if length is None:
        return (within + over) / span
    if length < 2:
        return 0.0
    whole, rest = divmod(length, span)
    found: float = whole * within + max(0, whole - 1) * over
    if rest:
        found += _in_turn_within(ranks, unit, rest) if window else (rest - 1) * ranks
        if whole:
            found += ranks * (span + rest) / 2 if window else (ranks - 1) * (unit + 1) / 2 + 1
    return found / (length - 1)


def _in_turn_within(ranks: int, unit: int, size: int) -> float:
    """Return the sum of the distances of what one lane draws in turn within a window of that size."""
    tail = size % unit
    whole = size - tail
    # Over all ordered pairs of different positions: both in whole stripes, both in the tail, one in each.
    pairs = whole * ((unit**2 - 1) + ranks * (whole**2 - unit**2)) / 3 if whole else 0.0
    pairs += tail * ranks * (tail**2 - 1) / 3 + whole * tail * ranks * size
    return pairs / size


def expected_same_chunk(deal: Deal, samples_per_chunk: int, window: int, batch: int, total: int | None) -> float:
    """Return how many of a batch's samples lie in the chunk of one of them, itself included, on average.

    How many samples of a chunk a lane has in one window is counted, in some windows: they are alike.

    Args:
        deal: how samples come to lanes, from the first one.
        samples_per_chunk: samples in a chunk.
        window: positions that are shuffled together; 0 draws in order, in which nothing is left to chance.
        batch: positions of a lane in a batch.
        total: the end of the samples, None for endless ones.
    """
    length = None if total is None else total // deal.dp
    if not window:
        return _same_chunk_in_order(deal, samples_per_chunk, batch, length, total)
    whole, rest = (1, 0) if length is None else divmod(length, window)
    found, positions = 0.0, 0
    if whole:
        # Windows begin at each of these places of a batch in turn.
        rows = min(batch // math.gcd(window, batch), _PHASES) if length is None or whole > _PHASES else whole
        shared = sum(_shared(row * window, window, batch) for row in range(rows)) / rows
        found += whole * (shared - window) * _chance(deal, samples_per_chunk, 0, window, total)
        positions += whole * window
    if rest:
        start = whole * window
        found += (_shared(start, rest, batch) - rest) * _chance(deal, samples_per_chunk, start, rest, total)
        positions += rest
    return 1 + found / positions if positions else 0.0


def _shared(start: int, size: int, batch: int) -> int:
    """Return, summed over the positions of a window, how many of it are in the same batch."""
    first = min(size, -start % batch)
    whole, last = divmod(size - first, batch)
    return first**2 + whole * batch**2 + last**2


def _chance(deal: Deal, samples_per_chunk: int, start: int, size: int, total: int | None) -> float:
    """Return the probability that two positions of one lane's window hold samples of one chunk."""
    if size < 2:
        return 0.0
    if not deal.unit % samples_per_chunk and not size % deal.unit:
        # Whole chunks alone.
        return (samples_per_chunk - 1) / (size - 1)
    # Each sample's chunk lies near it, so that a part of a large window tells as much.
    counted = min(size, _COUNTED_POSITIONS)
    found = []
    for lane in range(0, deal.dp, -(-deal.dp // _COUNTED_LANES)):
        samples = deal.samples(lane, np.arange(start, start + counted), total)
        # As if the window were one batch: of each sample so many more lie in its chunk.
        found.append(same_chunk(samples, samples_per_chunk, counted) - 1)
    return sum(found) / len(found) / (size - 1)


def _same_chunk_in_order(
    deal: Deal, samples_per_chunk: int, batch: int, length: int | None, total: int | None
) -> float:
    most = max(1, _COUNTED_POSITIONS // _COUNTED_LANES // batch) * batch
    stop = most if length is None else min(most, length // batch * batch)
    lanes = np.arange(0, deal.dp, -(-deal.dp // _COUNTED_LANES))
    samples = deal.samples(lanes[:, None], np.arange(stop)[None, :], total)
    return same_chunk(samples, samples_per_chunk, batch)
