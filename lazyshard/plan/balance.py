"""Rows dealt by cost, so that the ranks of a step have as much to do as each other.

In a step every rank trains a micro batch, and waits for the slowest. Which rows meet in a step follows from where they
lie: a stripe is one chunk for each of `ranks` ranks, and rank r reads chunk r of it in order. Two ranks with chunks of
four rows and micro batches of two::

    row of the stripe    0  1 | 2  3      4  5 | 6  7
    rank                 0  0 | 0  0      1  1 | 1  1
    step                 0  0 | 1  1      0  0 | 1  1

So where the rows of a stripe are put into the right order before chunks are cut, nobody has to balance anything later.
The order is found in three moves, O(n log n) for n rows:

1. **Micro batches of nearly equal cost.** Rows go into micro batches from the costliest to the cheapest, in rounds, one
   row each in a round: the micro batch that cost least so far gets the row that costs most. This is Graham's "longest
   processing time first" ("Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17, 1969) with as many
   items in every bin; long rows meet short ones. With one row a micro batch there is nothing to choose.
2. **Steps of equal micro batches.** Micro batches are sorted by cost, and `ranks` that follow each other are a step. No
   other steps have a smaller sum of their largest costs: sorted, each step's largest is as small as it can be.
3. **No order by length.** Steps are shuffled, and so are the ranks within each, by the seed: no rank has the costliest
   micro batch of each step. The order of steps is the same in every stripe: row j of any chunk is about as costly as
   row j of any other, so that steps stay even with other numbers of ranks too, whole multiples or not.

Rows of equal cost are taken in an order by chance, so that rows which come one after the other in the source do not
always meet in a step.

What fills no whole stripe at the end of a stream is dealt to the ranks row by row (`lazyshard.plan.deal`), and put into
the order that fits that. The few rows at the end that fill no step are drawn by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.plan.deal import check_field
from lazyshard.plan.shuffle import permutation

PER_TOKEN: Final = 1.0
PER_TOKEN_SQUARED: Final = 4e-5
"""What a row costs for the square of its tokens, in units of what a token costs by itself.

A transformer of L layers of width h does about 72 L h^2 (1 + t / 6h) floating point operations for each token of a row
of t tokens, forward and backward (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021, without recomputation and vocabulary): 72 L h^2, 6 times the parameters, in its matrices,
and 12 L h t in attention. The ratio is 1 / 6h: 4.07e-5 for the 4,096 of a model of 7 to 8 billion parameters. Kernels
that leave out what a causal mask hides do half as much in attention, at a lower rate."""

_ROWS, _RANKS, _STEPS, _REST = range(4)
"""What a permutation is for: part of its key."""

_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cost:
    """What it costs to train a row, in any unit: only ratios count.

    Attributes:
        per_token: of each token by itself, finite and >= 0.
        per_token_squared: of each pair of tokens, finite and >= 0; not both are 0.

    Raises:
        ValueError: they cannot be.
    """

    per_token: float = PER_TOKEN
    per_token_squared: float = PER_TOKEN_SQUARED

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("per_token", "per_token_squared"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if not self.per_token and not self.per_token_squared:
            raise ValueError("per_token and per_token_squared cannot both be 0: every row would cost nothing")

    def of(self, tokens: npt.ArrayLike) -> _Floats:
        """Returns ``per_token * t + per_token_squared * t**2`` for lengths t in tokens, of the same shape."""
        lengths = np.asarray(tokens, np.float64)
        return self.of_packs(lengths, lengths * lengths)

    def of_packs(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> _Floats:
        """Returns what packs of several samples cost: the sum over the samples, none of which attends to another.

        Args:
            tokens: of each pack, the sum of the lengths of its samples; of any shape.
            squares: of each pack, the sum of the squares of these lengths; of the same shape.
        """
        sums, of_squares = np.asarray(tokens, np.float64), np.asarray(squares, np.float64)
        found: _Floats = sums * self.per_token + of_squares * self.per_token_squared
        return found


@dataclass(frozen=True, slots=True)
class Balance:
    """The order of a stream whose stripes are dealt by cost.

    Attributes:
        ranks: data-parallel ranks for which it is made, >= 1.
        samples_per_chunk: rows in a chunk, a multiple of `micro_batch_size`: otherwise micro batches would lie across
            stripes.
        micro_batch_size: rows of one rank in a micro batch, >= 1.
        seed: of what is left to chance, in [0, 2**63).

    Raises:
        ValueError: a field is no `int` or outside its range.
    """

    ranks: int
    samples_per_chunk: int
    micro_batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_field("ranks", self.ranks, 1)
        check_field("micro_batch_size", self.micro_batch_size, 1)
        check_field("samples_per_chunk", self.samples_per_chunk, 1)
        check_field("seed", self.seed, 0, 2**63)
        if self.samples_per_chunk % self.micro_batch_size:
            raise ValueError(
                f"samples_per_chunk must be a multiple of micro_batch_size = {self.micro_batch_size}, got "
                f"{self.samples_per_chunk}"
            )

    @property
    def stripe(self) -> int:
        """Rows of a stripe, a chunk for each rank."""
        return self.ranks * self.samples_per_chunk

    def room(self, sample: int) -> int:
        """Returns how many samples there are from this one to the end of its stripe, itself included."""
        return self.stripe - sample % self.stripe

    def order(self, costs: npt.ArrayLike, first: int) -> _Integers:
        """Returns the order in which rows are to be published.

        Args:
            costs: of the rows, shape (n,), n <= room(first).
            first: number of the first sample that they become. If it is not the first of a stripe, somebody else has
                put the rows before it in place, and these stay in their order.

        Returns:
            Shape (n,): element i is the row that becomes sample `first + i`. Each row once.

        Raises:
            ValueError: there are more rows than there is room.
        """
        rows = np.asarray(costs, np.float64)
        if len(rows) > self.room(first):
            raise ValueError(f"there is room for {self.room(first)} rows from sample {first} on, got {len(rows)}")
        stripe, within = divmod(first, self.stripe)
        if within:
            return np.arange(len(rows))
        if len(rows) == self.stripe:
            # (step, rank, row) to (rank, step, row): each rank's chunk lies in one piece.
            return self._steps(rows, stripe).transpose(1, 0, 2).reshape(-1)
        step = self.ranks * self.micro_batch_size
        chance = permutation(len(rows), self.seed, _REST, stripe)
        dealt = np.sort(chance[: len(rows) // step * step])
        # (step, rank, row) to (step, row, rank): dealt row by row.
        steps = dealt[self._steps(rows[dealt], stripe).transpose(0, 2, 1).reshape(-1)]
        return np.concatenate((steps, np.sort(chance[len(steps) :])))

    def _steps(self, costs: _Floats, stripe: int) -> _Integers:
        """Returns which rows meet in each step: shape (steps, ranks, micro_batch_size)."""
        chance = permutation(len(costs), self.seed, _ROWS, stripe)
        batches, sums = _batches(costs, chance, self.micro_batch_size)
        steps = len(batches) // self.ranks
        even = np.argsort(sums, kind="stable").reshape(steps, self.ranks)
        ranks = np.argsort(permutation(len(batches), self.seed, _RANKS, stripe).reshape(steps, self.ranks), axis=1)
        found = np.empty((steps, self.ranks, self.micro_batch_size), np.int64)
        found[permutation(steps, self.seed, _STEPS)] = batches[np.take_along_axis(even, ranks, axis=1)]
        return found


def _batches(costs: _Floats, chance: _Integers, size: int) -> tuple[_Integers, _Floats]:
    """Returns micro batches of nearly equal cost, shape (n / size, size), and the cost of each.

    Args:
        costs: of n rows.
        chance: the order in which rows of equal cost are taken.
        size: rows of a micro batch; divides n.
    """
    falling = chance[np.argsort(-costs[chance], kind="stable")]
    count = len(costs) // size
    batches = np.empty((count, size), np.int64)
    sums = np.zeros(count)
    for turn in range(size):
        rows = falling[turn * count : (turn + 1) * count]
        cheapest_first = np.argsort(sums, kind="stable")
        batches[cheapest_first, turn] = rows
        sums[cheapest_first] += costs[rows]
    return batches, sums
