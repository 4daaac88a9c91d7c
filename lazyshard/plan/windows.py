"""Windows: the positions of a lane, shuffled inside windows of a fixed number of them. See `lazyshard.plan.lane`.

Position p of a lane is drawn as position `w * window + pi(p % window)`, with `w = p // window` and pi the permutation
of the key (seed, epoch, lane, w). The last window of an ended lane is as long as what the lane still holds. Nothing is
known here of batches or of where an epoch ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import Deal
from lazyshard.plan.shuffle import KEPT_PERMUTATIONS, permutation

__all__ = ["window_place", "window_sample", "window_samples"]


def window_sample(deal: Deal, window: int, seed: int, epoch: int, lane: int, position: int, total: int | None) -> int:
    """Return the sample that `lane` draws at `position` of `epoch`; with a window of 0, in order.

    Raises:
        IndexError, ValueError: as `Deal.sample`.
    """
    if window:
        number, within = divmod(position, window)
        position = number * window + _order(deal, window, seed, epoch, lane, number, total).item(within)
    return deal.sample(lane, position, total)


def window_samples(
    deal: Deal,
    window: int,
    seed: int,
    epochs: npt.NDArray[np.int64],
    lanes: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    total: int | None,
) -> npt.NDArray[np.int64]:
    """Return `window_sample` for arrays, int64 and all of the same shape.

    Positions of one window that stand together are cheapest; any order is right.

    Raises:
        IndexError, ValueError: as `Deal.samples`.
    """
    if window and positions.size:
        shape = positions.shape
        drawn = _shuffled(deal, window, seed, epochs.ravel(), lanes.ravel(), positions.ravel(), total)
        positions = drawn.reshape(shape)
    return deal.samples(lanes, positions, total)


def window_place(deal: Deal, window: int, seed: int, epoch: int, sample: int, total: int | None) -> tuple[int, int]:
    """Return the lane and the position at which a sample is drawn: the inverse of `window_sample`.

    Raises:
        IndexError, ValueError: as `Deal.place`.
    """
    lane, position = deal.place(sample, total)
    if window:
        number, moved = divmod(position, window)
        order = _order(deal, window, seed, epoch, lane, number, total)
        position = number * window + int(np.flatnonzero(order == moved)[0])
    return lane, position


def _order(
    deal: Deal, window: int, seed: int, epoch: int, lane: int, number: int, total: int | None
) -> npt.NDArray[np.int64]:
    size = window
    if total is not None:
        # A position past the end is the deal's to refuse.
        size = min(size, max(0, deal.lane_length(lane, total) - number * size))
    return permutation(size, seed, epoch, lane, number)


def _shuffled(
    deal: Deal,
    window: int,
    seed: int,
    epochs: npt.NDArray[np.int64],
    lanes: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    total: int | None,
) -> npt.NDArray[np.int64]:
    """Apply to each position the permutation of its window; arrays of one dimension."""
    numbers = positions // window
    begins = numbers[1:] != numbers[:-1]
    begins |= lanes[1:] != lanes[:-1]
    begins |= epochs[1:] != epochs[:-1]
    # Runs of positions of one window.
    firsts = np.concatenate(([0], np.flatnonzero(begins) + 1))
    runs = epochs[firsts], lanes[firsts], numbers[firsts]
    windows = np.unique(np.stack(runs), axis=1).shape[1]
    if windows < len(firsts) and (windows > KEPT_PERMUTATIONS or len(firsts) > 8 * windows):
        # Sorted by window, so that each permutation is made once however the positions come, and each window is one
        # run. Where a few runs more meet no more windows than are kept, sorting costs more than it saves.
        order = np.lexsort((numbers, lanes, epochs))
        drawn = np.empty_like(positions)
        drawn[order] = _shuffled(deal, window, seed, epochs[order], lanes[order], positions[order], total)
        return drawn
    drawn = np.empty_like(positions)
    stops = [*firsts[1:].tolist(), len(positions)]
    for first, stop, epoch, lane, number in zip(firsts.tolist(), stops, *(run.tolist() for run in runs), strict=True):
        moves = _order(deal, window, seed, epoch, lane, number, total)
        begin = number * window
        np.add(moves[positions[first:stop] - begin], begin, out=drawn[first:stop])
    return drawn
