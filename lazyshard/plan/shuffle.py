"""Permutations computed from a few integers, stable across releases; shuffle windows.

A shuffle buffer has state to save; a permutation that can be recomputed has none. Library generators do not guarantee
stable results, so the order is defined here by arithmetic on 64-bit words alone, all modulo 2**64::

    GAMMA       = 0x9E3779B97F4A7C15                      (2**64 divided by the golden ratio, odd)
    finalise(z) : z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
                  z = (z ^ z >> 27) * 0x94D049BB133111EB
                  z =  z ^ z >> 31
    mix64(k...) : h = 0;  for each k:  h = finalise((h ^ k) + GAMMA)
    key(i)      = finalise(mix64(k...) + (i + 1) * GAMMA)
    permutation = the numbers 0 .. size-1 ordered by key

`finalise` is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). It is a bijection, and so is adding multiples of an odd number, so no two keys are equal and
every sort gives the same order. The shuffle is not cryptographic.

**Windows.** Position p of a lane is drawn as position `w * window + pi(p % window)`, with `w = p // window` and pi the
permutation of the key (seed, epoch, lane, w). The last window of an ended lane has the length of the rest of the lane.

**Neighbours** are samples n and n + 1 of the stream, drawn at positions p and q of the same lane or of two lanes; their
distance is |p - q|. Let R be the number of lanes, u the unit, W the window, m = W / u (in order, the window is one
unit, not shuffled). In one lane's window, W - d of the W (W - 1) / 2 pairs are d apart, so the mean is (W + 1) / 3. The
permutations of two lanes are independent, and the mean is (W**2 - 1) / (3 W). From the last sample of window w to the
first of w + 1 it is W. Of the R W neighbours that begin in a window, R (W - m) lie in one unit, R m - 1 in two units of
the window, and one extends into the next window.
"""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import Final

import numpy as np

from lazyshard.part import Int64Array
from lazyshard.plan.deal import check_field

_MASK: Final = 2**64 - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
_MULTIPLIER_2: Final = 0x94D049BB133111EB


def mix64(*key: int) -> int:
    """Hashes integers in [0, 2**64), in order, to one 64-bit integer. Raises ValueError: one is out of range."""
    mixed = 0
    for part in key:
        word = index(part)
        if not 0 <= word <= _MASK:
            raise ValueError(f"a key must be in [0, 2**64), got {word}")
        word = ((mixed ^ word) + _GAMMA) & _MASK
        word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _MASK
        word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _MASK
        mixed = word ^ (word >> 31)
    return mixed


# A lane draws from one window at a time; the other entries serve processes that switch between lanes.
@lru_cache(maxsize=16)
def permutation(size: int, *key: int) -> Int64Array:
    """Returns the permutation of [0, size) for `key`: element i is the new place of i; int64, read-only.

    A smaller size with the same key gives the same order without the numbers from `size` on. The last 16 are cached.
    """
    if size < 0:
        raise ValueError(f"size must be >= 0, got {size}")
    # Arrays of uint64 wrap silently, as intended; numpy scalars would warn. Shifts need uint64 on both sides, or numpy
    # before 2.0 promotes to float64.
    words = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(mix64(*key))
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    words = words ^ (words >> np.uint64(31))
    # Same order as np.argsort(words), 3.5 times as fast for thousands: numpy sorts 16-bit numbers by radix, after which
    # its stable sort finds the words almost in order, since few share their highest 16 bits.
    nearly = np.argsort((words >> np.uint64(48)).astype(np.uint16), kind="stable")
    order = nearly[np.argsort(words[nearly], kind="stable")].astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def window_for_distance(distance: int, samples_per_chunk: int) -> int:
    """Returns how many chunks to shuffle together so that neighbours in the stream are `distance` apart on average.

    The distance is in samples that one rank draws; in optimiser steps it is `distance` divided by the samples that a
    rank draws per step. Two samples of a window of W are (W + 1) / 3 apart on average, so the result is the smallest
    number of chunks that hold at least 3 * distance - 1 samples, for any number of ranks and any unit::

        order = Order(shuffle_window=window_for_distance(10_000, samples_per_chunk=1000))
        dataset = LazyShardedDataset(stream, order=order)

    Not guaranteed at the end of a stream: its last window has only the remaining samples. A window is at most all
    samples of a rank, with neighbours a third of that apart.

    Args:
        distance: from 1.
        samples_per_chunk: rows in every chunk except the last of the stream.

    Raises:
        ValueError: a number is not an `int` of at least 1.

    >>> window_for_distance(10_000, 1000), window_for_distance(1, 1000), window_for_distance(667, 1000)
    (30, 1, 2)
    """
    check_field("distance", distance, 1)
    check_field("samples_per_chunk", samples_per_chunk, 1)
    return -(-(3 * distance - 1) // samples_per_chunk)


def largest_distance(positions: int) -> int:
    """Returns the mean distance of neighbours, rounded down, if all positions of a rank are one window.

    >>> largest_distance(30_000), largest_distance(1), largest_distance(2)
    (10000, 0, 1)
    """
    return (positions + 1) // 3 if positions > 1 else 0


def expected_neighbours(ranks: int, unit: int, window: int, length: int | None) -> float:
    """Returns the mean distance, in positions, of two neighbours in the stream; 0.0 with fewer than two samples.

    `window` is a multiple of `unit`, 0 for none; `length` is the positions of each lane in the epoch, None if endless.
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
    """Returns the sum of distances of neighbours that both lie in one window, of `size` positions, of all lanes."""
    units, tail = divmod(size, unit)
    if not shuffled:
        # The window is one stripe, or a tail dealt row by row.
        return (2 * ranks - 1) * (unit - 1) if units else tail - 1
    same = size - 1 if ranks == 1 else ranks * (size - tail - units)
    return same * (size + 1) / 3 + (ranks * size - 1 - same) * (size * size - 1) / (3 * size)
