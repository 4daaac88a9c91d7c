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
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index as as_int
from typing import Protocol

from lazyshard.plan.deal import check_field, outside

__all__ = [
    "BlockLayout",
    "Layout",
    "StridedLayout",
    "make_layout",
]


class Layout(Protocol):
    """A bijection between [0, size) and the positions [0, block) of the lanes [0, dp)."""

    @property
    def dp(self) -> int:
        """Number of lanes."""

    @property
    def block(self) -> int:
        """Positions in each lane."""

    @property
    def size(self) -> int:
        """Number of indices: dp * block."""

    def locate(self, index: int) -> tuple[int, int]:
        """Return the lane and the position of `index`; a negative one counts from the end.

        Raises:
            IndexError: `index` is not in [-size, size).
        """

    def index(self, lane: int, position: int) -> int:
        """Return the index of `position` of `lane`: the inverse of `locate`.

        Raises:
            IndexError: `lane` is not in [0, dp), or `position` not in [0, block).
        """

    def lane_indices(self, lane: int) -> range:
        """Return the indices of `lane`, by position.

        Raises:
            IndexError: `lane` is not in [0, dp).
        """


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Lane after lane: what a sampler of contiguous pieces walks. See `Layout` for the methods.

    Attributes:
        dp: number of lanes, >= 1.
        block: positions in each lane, >= 0.

    Raises:
        ValueError: a field is no `int` or outside its range.
    """

    dp: int
    block: int

    def __post_init__(self) -> None:
        """Check the fields."""
        _check(self)

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.dp * self.block

    def locate(self, index: int) -> tuple[int, int]:
        """Return the lane and the position of `index`."""
        return divmod(_from_start(index, self.size), self.block)

    def index(self, lane: int, position: int) -> int:
        """Return the index of `position` of `lane`."""
        _check_place(self, lane, position)
        return lane * self.block + position

    def lane_indices(self, lane: int) -> range:
        """Return the indices of `lane`, by position."""
        _check_lane(self, lane)
        return range(lane * self.block, (lane + 1) * self.block)


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Lanes in turn, an index each: what a round-robin sampler walks. See `Layout` for the methods.

    Attributes:
        dp: number of lanes, >= 1.
        block: positions in each lane, >= 0.

    Raises:
        ValueError: a field is no `int` or outside its range.
    """

    dp: int
    block: int

    def __post_init__(self) -> None:
        """Check the fields."""
        _check(self)

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.dp * self.block

    def locate(self, index: int) -> tuple[int, int]:
        """Return the lane and the position of `index`."""
        position, lane = divmod(_from_start(index, self.size), self.dp)
        return lane, position

    def index(self, lane: int, position: int) -> int:
        """Return the index of `position` of `lane`."""
        _check_place(self, lane, position)
        return position * self.dp + lane

    def lane_indices(self, lane: int) -> range:
        """Return the indices of `lane`, by position."""
        _check_lane(self, lane)
        return range(lane, self.size, self.dp)


def make_layout(name: str, dp: int, block: int) -> Layout:
    """Return the layout called `name`, "block" or "strided", of `dp` lanes with `block` positions each.

    Raises:
        ValueError: there is no such layout, or a number is outside its range.
    """
    if name == "block":
        return BlockLayout(dp, block)
    if name == "strided":
        return StridedLayout(dp, block)
    raise ValueError(f"layout must be 'block' or 'strided', got {name!r}")


def _check(layout: Layout) -> None:
    check_field("dp", layout.dp, 1)
    check_field("block", layout.block, 0)


def _check_lane(layout: Layout, lane: int) -> None:
    if not 0 <= lane < layout.dp:
        raise outside("lane", lane, layout.dp)


def _check_place(layout: Layout, lane: int, position: int) -> None:
    _check_lane(layout, lane)
    if not 0 <= position < layout.block:
        raise outside("position", position, layout.block)


def _from_start(index: int, size: int) -> int:
    """Return `index` counted from the start, as a plain int whatever integer type a sampler yields."""
    number = as_int(index)
    if not -size <= number < size:
        raise outside("index", number, size, low=-size)
    return number + size if number < 0 else number
