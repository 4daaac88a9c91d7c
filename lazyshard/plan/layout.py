"""Layouts: how the lanes of one epoch lie in the index space of a map-style data set; shards of any other sequence.

A data set of `dp` lanes with `block` positions each has `dp * block` indices. With `dp=2, block=3`::

    index                     0  1  2  3  4  5
    block      lane           0  0  0  1  1  1        lane = index // block
               position       0  1  2  0  1  2
    strided    lane           0  1  0  1  0  1        lane = index % dp
               position       0  0  1  1  2  2
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index as as_int

from lazyshard.plan.deal import outside


@dataclass(frozen=True, slots=True)
class Layout:
    """A bijection between [0, size) and the positions [0, block) of the lanes [0, dp), lane after lane or `strided`."""

    dp: int
    block: int
    strided: bool = False

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.dp * self.block

    def locate(self, index: int) -> tuple[int, int]:
        """Returns lane and position of `index`, counted from the end if negative. Raises IndexError: there is none."""
        number, size = as_int(index), self.dp * self.block
        if not -size <= number < size:
            raise outside("index", number, size, low=-size)
        if number < 0:
            number += size
        if self.strided:
            position, lane = divmod(number, self.dp)
            return lane, position
        return divmod(number, self.block)

    def lane_indices(self, lane: int) -> range:
        """Returns the indices of `lane`, by position. Raises IndexError: `lane` is not in [0, dp)."""
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        if self.strided:
            return range(lane, self.size, self.dp)
        return range(lane * self.block, (lane + 1) * self.block)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a sequence is dealt to shards: in global batches, of which each shard has its own places.

    The last one, if not full, is completed from the first one (`even_batches`), as by `IterableDatasetShard` of
    `accelerate/data_loader.py`, so that all shards have equally many; or it is dropped (`drop_last`), or dealt as it
    is::

        batches of 2, two shards       | 0 1 2 3 | 4 5 6 7 | 8 0 1 2 |
        shard 0                          0 1       4 5       8 0
        shard 1, strided                   1   3     5   7     0   2

    `batch_size` is that of one shard, of all together with `split_batches`.

    Raises:
        ValueError: a number is outside its range, or a split batch has not as many places for each shard.
    """

    shards: int
    index: int
    batch_size: int = 1
    split_batches: bool = False
    drop_last: bool = False
    even_batches: bool = True
    strided: bool = False

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"num_shards is 1 or more, got {self.shards}")
        if not 0 <= self.index < self.shards:
            raise ValueError(f"index is in [0, {self.shards}), got {self.index}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is 1 or more, got {self.batch_size}")
        if self.split_batches and self.batch_size % self.shards:
            raise ValueError(
                f"with split_batches, batch_size is a multiple of num_shards, got {self.batch_size} for {self.shards}"
            )

    @property
    def batch(self) -> int:
        """Elements of a global batch."""
        return self.batch_size if self.split_batches else self.batch_size * self.shards

    @property
    def own(self) -> range:
        """Places of this shard in a global batch, ascending."""
        if self.strided:
            return range(self.index, self.batch, self.shards)
        size = self.batch // self.shards
        return range(self.index * size, (self.index + 1) * size)

    def count(self, total: int) -> int:
        """Returns how many elements this shard gets of `total`."""
        full, left = divmod(total, self.batch)
        return full * len(self.own) + len(self.last(left, full > 0))

    def last(self, left: int, has_first: bool) -> list[tuple[bool, int]]:
        """Returns what this shard gets of a last global batch of `left` elements, fewer than all.

        For each element whether it is one of the first global batch instead, if there was one, and its place there.
        """
        if not left or self.drop_last:
            return []
        if not self.even_batches:
            return [(False, place) for place in self.own if place < left]
        # Without a full one before, the last batch is its own first one.
        size = self.batch if has_first else left
        return [
            (False, place) if place < left else (has_first, (place - left) % size if has_first else place % left)
            for place in self.own
        ]
