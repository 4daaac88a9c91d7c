"""Layouts: how the lanes of one epoch lie in the index space of a map-style data set.

Samplers hand out indices, lanes are drawn by position. A data set of `dp` lanes with `block` positions each has
`dp * block` indices, in one of two layouts. With `dp=2, block=3`::

    index                     0  1  2  3  4  5
    block      lane           0  0  0  1  1  1        lane = index // block
               position       0  1  2  0  1  2
    strided    lane           0  1  0  1  0  1        lane = index % dp
               position       0  0  1  1  2  2

`block` suits a sampler that gives each rank one contiguous piece, `strided` one that gives rank r the indices r,
r + dp, ... Every index resolves in either, on every rank; in the one that matches its sampler, a rank meets only its
own lane.

Shards: sample-level sharding of a sequence that is read one by one: which elements are one shard's.

The sequence is cut into global batches, and each shard has its own places in every one of them. The last global batch,
if it is not full, is completed from the first one, as by `IterableDatasetShard` of `accelerate/data_loader.py`, so that
all shards have equally many; or it is dropped, or dealt as it is::

    batches of 2, two shards       | 0 1 2 3 | 4 5 6 7 | 8 0 1 2 |
    shard 0                          0 1       4 5       8 0
    shard 1, strided                   1   3     5   7     0   2
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index as as_int

from lazyshard.plan.deal import check_field, outside


@dataclass(frozen=True, slots=True)
class Layout:
    """A bijection between [0, size) and the positions [0, block) of the lanes [0, dp).

    Attributes:
        dp: number of lanes, >= 1.
        block: positions in each lane, >= 0.
        strided: whether lanes come in turn, an index each; otherwise lane after lane.

    Raises:
        ValueError: a number is no `int` or outside its range.
    """

    dp: int
    block: int
    strided: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check_field("dp", self.dp, 1)
        check_field("block", self.block, 0)

    @property
    def size(self) -> int:
        """Number of indices: dp * block."""
        return self.dp * self.block

    def locate(self, index: int) -> tuple[int, int]:
        """Return the lane and the position of `index`, of any integer type; a negative one counts from the end.

        Raises:
            IndexError: `index` is not in [-size, size).
        """
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
        """Return the indices of `lane`, by position.

        Raises:
            IndexError: `lane` is not in [0, dp).
        """
        if not 0 <= lane < self.dp:
            raise outside("lane", lane, self.dp)
        if self.strided:
            return range(lane, self.size, self.dp)
        return range(lane * self.block, (lane + 1) * self.block)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a sequence is dealt to shards.

    Attributes:
        shards: how many there are, >= 1.
        index: this shard, in [0, shards).
        batch_size: elements of one shard in a global batch; of all shards with `split_batches`. >= 1.
        split_batches: whether `batch_size` is that of all shards together.
        drop_last: whether the elements behind the last full global batch are left out.
        even_batches: whether the last global batch is completed from the first one; otherwise shards may differ by up
            to a batch.
        strided: whether a shard has every shards-th place of a global batch, instead of a run of them.

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
        """Checks the numbers."""
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
        """Return how many elements this shard gets of `total`."""
        full, left = divmod(total, self.batch)
        return full * len(self.own) + len(self.last(left, full > 0))

    def last(self, left: int, has_first: bool) -> list[tuple[bool, int]]:
        """Return what this shard gets of a last global batch that is not full.

        Args:
            left: elements of it, in [0, batch).
            has_first: whether a full global batch came before.

        Returns:
            For each element whether it is one of the first global batch instead, and its place there.
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
