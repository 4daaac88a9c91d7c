"""Windows: the positions of a lane, shuffled inside windows of a fixed number of them. See `lazyshard.plan.lane`.

Position p of a lane is drawn as position `w * window + pi(p % window)`, with `w = p // window` and pi the permutation
of the key (seed, epoch, lane, w). The last window of an ended lane is as long as what the lane still holds. Nothing is
known here of batches or of where an epoch ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import Deal
from lazyshard.plan.shuffle import permutation

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
        positions = _shuffled(deal, window, seed, epochs, lanes, positions, total)
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
    """Apply to each position the permutation of its window."""
    epoch, lane, position = epochs.ravel(), lanes.ravel(), positions.ravel()
    number = position // window
    # One number for each (epoch, lane, window), in place, as in `Deal.samples`.
    group = epoch - epoch.min()
    group *= deal.dp
    group += lane
    group *= int(number.max()) + 1
    group += number
    order = None
    if (group[1:] < group[:-1]).any():
        # Sorted by window, so that each permutation is made once however the positions come.
        order = np.argsort(group, kind="stable")
        epoch, lane, position, number, group = (x[order] for x in (epoch, lane, position, number, group))
    drawn = np.empty_like(position)
    ends = (np.flatnonzero(group[1:] != group[:-1]) + 1).tolist()
    for first, stop in zip([0, *ends], [*ends, len(group)], strict=True):
        begin = int(number[first]) * window
        moves = _order(deal, window, seed, int(epoch[first]), int(lane[first]), int(number[first]), total)
        drawn[first:stop] = moves[position[first:stop] - begin] + begin
    if order is not None:
        back = np.empty_like(drawn)
        back[order] = drawn
        drawn = back
    return drawn.reshape(positions.shape)
