"""The plan: what each lane draws, position by position, epoch after epoch.

A `Plan` puts three rules on top of the deal.

**Epochs.** Ranks train in lockstep, so in an epoch each draws the same number of positions, B, in whole micro batches.
What is left over is fewer than `dp * batch_size` samples. Position B is the first of the next epoch::

    position   0 ........ B-1 | B ....... 2B-1 | 2B ...
    epoch      0              | 1              | 2

**Windows.** Positions are shuffled inside windows of `window` positions: position p is drawn as position
`w * window + pi(p % window)` of the lane, with `w = p // window` and pi the `permutation` of the key (seed, epoch,
lane, w). The last window of an ended lane is as long as what the lane still holds, what will be left over included.
With `window=4` and a lane of 10::

    drawn at   0  1  2  3 | 4  5  6  7 | 8  9
    position   2  0  3  1 | 4  7  5  6 | 9  8         (some permutation of each window)

**Readiness.** While the stream grows, a position may be drawn as soon as nothing published later could change what is
drawn there: `Plan.needed`. A decision taken then is the one that is taken after the end, in every lane, and no rank has
to ask another.

It all depends on the arguments alone; there is no state to save but the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import Deal, check_field, int64_array, outside
from lazyshard.plan.shuffle import window_sample, window_samples

__all__ = [
    "Draw",
    "Plan",
    "Run",
]


class Draw(NamedTuple):
    """What is drawn at a position: the number of the `sample`, and the `epoch` in which it is drawn."""

    epoch: int
    sample: int


class Run(NamedTuple):
    """Positions [first, stop) of one lane that are drawn as consecutive samples, `sample` being that of `first`."""

    first: int
    stop: int
    sample: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What each lane of a deal draws.

    Throughout, `total` is the end of the half-open range [deal.start, total) of samples once it is known, and None
    while the stream grows. `epoch` is the epoch in which position 0 lies.

    Attributes:
        deal: how samples come to lanes.
        batch_size: samples of one lane in a micro batch, >= 1.
        window: positions of one lane that are shuffled together, a multiple of `deal.unit`; 0 draws in order.
        seed: of the shuffle, in [0, 2**63).

    Raises:
        ValueError: a field is no `int` or outside its range.
    """

    deal: Deal
    batch_size: int = 1
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_field("batch_size", self.batch_size, 1)
        check_field("window", self.window, 0)
        check_field("seed", self.seed, 0, 2**63)
        if self.window % self.deal.unit:
            raise ValueError(f"window must be a multiple of unit = {self.deal.unit}, got {self.window}")

    def epoch_length(self, total: int) -> int:
        """Return B, how many positions each lane draws in one epoch: a multiple of `batch_size`, 0 if too few.

        Raises:
            ValueError: `total` is less than the deal's start.
        """
        return self.deal.dealt(total) // (self.deal.dp * self.batch_size) * self.batch_size

    def leftover(self, total: int) -> int:
        """Return how many samples an epoch leaves undrawn, over all lanes: fewer than dp * batch_size.

        Raises:
            ValueError: `total` is less than the deal's start.
        """
        return self.deal.dealt(total) - self.deal.dp * self.epoch_length(total)

    def needed(self, position: int) -> int:
        """Return how many samples must be published before `position` of epoch 0 may be drawn with the end unknown.

        These are all samples of its window (in order: its stripe), and enough for its whole batch to belong to epoch 0.
        For every `total >= needed(p)`, `draw(lane, p, total) == draw(lane, p, None)`. Never less for a later position.

        Raises:
            IndexError: `position` is negative.
        """
        if position < 0:
            raise outside("position", position, None)
        span = self.window or self.deal.unit
        batch = self.batch_size
        return self.deal.start + self.deal.dp * max((position // span + 1) * span, (position // batch + 1) * batch)

    def done_before(self, position: int, total: int | None) -> int:
        """Return N such that no sample below N is drawn in epoch 0 once every lane has drawn positions [0, position).

        A window that is open counts as needed whole, and so does a stripe that is dealt out in part; the tail is
        counted row by row. With `total` None, all of [0, position) must have been certain: see `needed`. Past the end
        of the epoch N is `total`: what is left over is not drawn any more. With `dp=2, unit=3`, 16 samples::

            position   0  1  2  3  4  5  6  7  8
            N          0  0  0  6  6  6 12 14 16

        Never less for a later position, nor for the same one once the end is known.

        Raises:
            IndexError: `position` is negative.
            ValueError: `total` is less than the deal's start.
        """
        if position < 0:
            raise outside("position", position, None)
        deal = self.deal
        if total is not None:
            if position >= self.epoch_length(total):
                return total
            if not self.window and position >= deal.whole_positions(total):
                return deal.start + position * deal.dp
        # Windows and stripes begin at whole stripes, before which the lanes hold all samples up to there.
        span = self.window or deal.unit
        return deal.start + position // span * span * deal.dp

    def draw(self, lane: int, position: int, total: int | None, epoch: int = 0) -> Draw:
        """Return what `lane` draws at `position`.

        With `total` None the position is taken to lie in the first epoch: whether it may be drawn yet is `needed`.

        Raises:
            IndexError: `lane` is not in [0, dp), `position` is negative, or an epoch is empty.
            ValueError: `total` is less than the deal's start, or `epoch` is negative.
        """
        deal = self.deal
        if not 0 <= lane < deal.dp:
            raise outside("lane", lane, deal.dp)
        if position < 0:
            raise outside("position", position, None)
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        if total is not None:
            turns, position = divmod(position, self._filled_epoch(total))
            epoch += turns
        return Draw(epoch, window_sample(deal, self.window, self.seed, epoch, lane, position, total))

    def draws(
        self, lanes: npt.ArrayLike, positions: npt.ArrayLike, total: int | None, epoch: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return `draw` for arrays or integers, broadcast against each other.

        Positions of one window that stand together are cheapest; any order is right.

        Returns:
            The epochs and the samples, int64, of the shape that `lanes` and `positions` broadcast to.

        Raises:
            IndexError: as `draw`; the first number outside its range is named.
            ValueError: as `draw`, or a number is not an integer.
        """
        lane, position = np.broadcast_arrays(
            int64_array("lane", lanes, self.deal.dp), int64_array("position", positions)
        )
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        epochs = np.full(position.shape, epoch, dtype=np.int64)
        if total is not None:
            length = self._filled_epoch(total)
            turns = position // length
            epochs += turns
            position = np.asarray(position - turns * length)
        return epochs, window_samples(self.deal, self.window, self.seed, epochs, lane, position, total)

    def run(self, lane: int, position: int, total: int | None, epoch: int = 0) -> Run:
        """Return positions around `position` that are drawn as consecutive samples, in the same epoch.

        In order these are the positions of its stripe; in the tail or with a window, `position` alone. With `total`
        None, no position in it needs more samples published than `position` does.

        Raises:
            IndexError: as `draw`.
            ValueError: as `draw`.
        """
        drawn = self.draw(lane, position, total, epoch)
        deal = self.deal
        if total is None:
            # The batches that are certain by the time `position` is.
            ready = (self.needed(position) - deal.start) // deal.dp
            before, limit, whole = 0, ready // self.batch_size * self.batch_size, ready
        else:
            limit, whole = self.epoch_length(total), deal.whole_positions(total)
            before = position - position % limit
        within = (position - before) % deal.unit
        first = position - before - within
        if self.window or first >= whole:
            return Run(position, position + 1, drawn.sample, drawn.epoch)
        return Run(before + first, before + min(first + deal.unit, limit), drawn.sample - within, drawn.epoch)

    def _filled_epoch(self, total: int) -> int:
        length = self.epoch_length(total)
        if not length:
            raise IndexError(
                f"an epoch is empty: samples [{self.deal.start}, {total}) are fewer than dp * batch_size = "
                f"{self.deal.dp} * {self.batch_size}"
            )
        return length
