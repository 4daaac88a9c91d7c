"""Rows dealt by cost: which rows of a block each rank gets at each step, so that ranks take equally long."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from lazyshard.part import FloatArray, Int64Array, Numbers
from lazyshard.plan.shuffle import permutation

PER_TOKEN: Final = 1.0
PER_TOKEN_SQUARED: Final = 4e-5
"""The cost of a row for the square of its token count, relative to the cost per token.

A transformer of L layers of width h does about 72 L h^2 (1 + t / 6h) floating point operations for each token of a row
of t tokens (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
2021). The ratio is 1 / 6h: 4.07e-5 for the 4,096 of a model of 7 to 8 billion parameters."""

_ROWS, _RANKS, _STEPS, _REST = range(4)
"""The purpose of a permutation: part of its key."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of training a row: per token, per pair of tokens, and per patch of an image. Only ratios matter."""

    per_token: float = PER_TOKEN
    per_token_squared: float = PER_TOKEN_SQUARED
    per_patch: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if not any(asdict(self).values()):
            raise ValueError("per_token, per_token_squared and per_patch cannot all be 0: every row would cost nothing")

    def of(self, tokens: Numbers) -> FloatArray:
        """Returns ``per_token * t + per_token_squared * t**2`` for lengths t in tokens, of the same shape."""
        lengths = np.asarray(tokens, np.float64)
        return self.of_packs(lengths, lengths * lengths)

    def of_packs(self, tokens: Numbers, squares: Numbers, patches: Numbers = 0.0) -> FloatArray:
        """Returns the cost of packs of samples that do not attend to each other, from sums over their samples."""
        sums, of_squares, of_patches = (np.asarray(one, np.float64) for one in (tokens, squares, patches))
        return np.asarray(sums * self.per_token + of_squares * self.per_token_squared + of_patches * self.per_patch)


@dataclass(frozen=True, slots=True)
class Balance:
    """Orders a stream by cost, so that the ranks of a step have equal work.

    A stripe is one chunk per rank, so the order in which its rows are published decides which rows share a step. Rows
    are assigned to micro batches from the most to the least expensive, one per micro batch in each round, the cheapest
    micro batch first. This is Graham's "longest processing time first" ("Bounds on Multiprocessing Timing Anomalies",
    SIAM J. Appl. Math. 17, 1969) with equally many items per bin and ties broken at random. After sorting by cost,
    `ranks` consecutive micro batches are a step. Steps are shuffled, the same way in every stripe, and so are the ranks
    within each step, so steps stay even with other numbers of ranks. Rows that fill no whole stripe are dealt row by
    row; the rows that fill no step are chosen at random. `samples_per_chunk` is a multiple of `micro_batch_size`.
    """

    ranks: int
    samples_per_chunk: int
    micro_batch_size: int = 1
    seed: int = 0

    @property
    def stripe(self) -> int:
        """Rows of a stripe: one chunk per rank."""
        return self.ranks * self.samples_per_chunk

    def room(self, sample: int) -> int:
        """Returns how many samples there are from this one (included) to the end of its stripe."""
        return self.stripe - sample % self.stripe

    def order(self, costs: Numbers, first: int) -> Int64Array:
        """Returns the order in which to publish rows: element i is the row that becomes sample `first + i`.

        If `first` is not the beginning of a stripe, rows keep their order. Raises ValueError: more than `room(first)`.
        """
        rows = np.asarray(costs, np.float64)
        if len(rows) > self.room(first):
            raise ValueError(f"there is room for {self.room(first)} rows from sample {first} on, got {len(rows)}")
        stripe, within = divmod(first, self.stripe)
        if within:
            return np.arange(len(rows))
        if len(rows) == self.stripe:
            # (step, rank, row) to (rank, step, row): each rank's chunk is contiguous.
            return self._steps(rows, stripe).transpose(1, 0, 2).reshape(-1)
        step = self.ranks * self.micro_batch_size
        chance = permutation(len(rows), self.seed, _REST, stripe)
        dealt = np.sort(chance[: len(rows) // step * step])
        # (step, rank, row) to (step, row, rank): dealt row by row.
        steps = dealt[self._steps(rows[dealt], stripe).transpose(0, 2, 1).reshape(-1)]
        return np.concatenate((steps, np.sort(chance[len(steps) :])))

    def _steps(self, costs: FloatArray, stripe: int) -> Int64Array:
        """Returns the rows of each step, shape (steps, ranks, micro_batch_size)."""
        chance = permutation(len(costs), self.seed, _ROWS, stripe)
        batches, sums = _batches(costs, chance, self.micro_batch_size)
        steps = len(batches) // self.ranks
        even = np.argsort(sums, kind="stable").reshape(steps, self.ranks)
        ranks = np.argsort(permutation(len(batches), self.seed, _RANKS, stripe).reshape(steps, self.ranks), axis=1)
        found = np.empty((steps, self.ranks, self.micro_batch_size), np.int64)
        found[permutation(steps, self.seed, _STEPS)] = batches[np.take_along_axis(even, ranks, axis=1)]
        return found


def _batches(costs: FloatArray, chance: Int64Array, size: int) -> tuple[Int64Array, FloatArray]:
    """Returns micro batches of nearly equal cost, shape (n / size, size), and their costs."""
    falling = chance[np.argsort(-costs[chance], kind="stable")]
    count = len(costs) // size
    batches, sums = np.empty((count, size), np.int64), np.zeros(count)
    for turn in range(size):
        rows = falling[turn * count : (turn + 1) * count]
        cheapest_first = np.argsort(sums, kind="stable")
        batches[cheapest_first, turn] = rows
        sums[cheapest_first] += costs[rows]
    return batches, sums
