"""What the indices of a blend mean: which stream each draws from, which draw of it, and where the blend ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.rank import Rank
from lazyshard.errors import LengthUnknown
from lazyshard.format.blend_state import BlendPartState
from lazyshard.plan.blend_course import BlendCourse, BlendPiece
from lazyshard.plan.layout import Layout, make_layout

__all__ = ["BlendSpace", "Stopping"]

Stopping = Literal["first_exhausted", "all_exhausted"]


class BlendSpace:
    """The indices of one blend in one epoch that was set. Fixed once made.

    Args:
        part: how the streams are blended, and where the run stands.
        rank: whose data set it is.
        layout: "block" or "strided".
        lengths: draws of a lane of each stream until its epoch ends, None where that is not known; 0 where a later one
            has begun.
        samples: how many indices there are to be at the most, over all ranks; None to end by `stopping`.
        stopping: where to end.
        begun: whether the run goes on from a state, which may be its end.

    Attributes:
        part: as given.
        rank: as given.
        course: which stream each position draws from.
        layout: how the ranks' positions lie among the indices.
        step: how far apart the indices are that follow each other in a lane.
        lengths: as given.

    Raises:
        LengthUnknown: there is no end.
        ValueError: there is less than one batch of every rank.
    """

    def __init__(
        self,
        part: BlendPartState,
        rank: Rank,
        layout: str,
        lengths: Sequence[int | None],
        samples: int | None,
        stopping: Stopping,
        *,
        begun: bool,
    ) -> None:
        self.part = part
        self.rank = rank
        self.course = BlendCourse([BlendPiece(*piece) for piece in part.pieces])
        self.lengths = tuple(lengths)
        self._stopping = stopping
        self._begins = [draws for _, draws in part.begins]
        self._first_draws = np.array(self._begins, dtype=np.int64)
        size = part.batch_size
        if samples is not None:
            block = max(samples, 0) // (rank.dp_size * size) * size
        else:
            end = self._end()
            block = end // size * size if stopping == "first_exhausted" else -(-end // size) * size
        if not block and not begun:
            raise ValueError(
                f"the blend has less than one batch of {size} for each of {rank.dp_size} ranks: a stream is too short "
                f"for its weight, or num_samples too small"
            )
        self.layout: Layout = make_layout(layout, rank.dp_size, max(block, part.draws))
        self.step = 1 if layout == "block" else rank.dp_size

    def drawn(self, position: int) -> tuple[int, ...]:
        """Returns how many draws of a lane each stream's current part has behind it at a position."""
        return tuple(map(sum, zip(self._begins, self.course.counts(position), strict=True)))

    def streams(self, index: int, count: int) -> list[int]:
        """Returns which stream an index, and those that follow it in its lane, draw from.

        Args:
            index: the first one.
            count: how many at the most; fewer at the end of the lane.

        Raises:
            IndexError: it is outside the data set.
        """
        position = self.layout.locate(index)[1]
        return self.course.streams_of(position, min(position + count, self.layout.block))

    def tell_lane(self, index: int, dataset: LazyShardedDataset) -> None:
        """Warns of an index that is another rank's, in the name of one of the data sets."""
        lane = self.layout.locate(index)[0]
        if lane != self.rank.dp_rank:
            dataset._indices().tell(
                "lane of a blend",
                f"the blend of {dataset.directory} and others: rank {self.rank.dp_rank} of {self.rank.dp_size} was "
                f"asked for index {index}, which is rank {lane}'s. If every rank is asked for the same indices, "
                f"samples repeat: did you forget `sampler=blend.rank_indices`?",
            )

    def locate(self, index: int) -> tuple[int, int]:
        """Returns which stream an index draws from, and its index in that. Raises as `streams` does."""
        lane, position = self.layout.locate(index)
        stream, draw = self.course.draw(position)
        return stream, (self._begins[stream] + draw) * self.rank.dp_size + lane

    def located(self, index: int, count: int) -> tuple[list[int], list[int]]:
        """Returns the same, and the index of each in its stream. Arguments and errors as of `streams`."""
        lane, position = self.layout.locate(index)
        streams, draws = self.course.draws(position, min(position + count, self.layout.block))
        return streams.tolist(), ((self._first_draws[streams] + draws) * self.rank.dp_size + lane).tolist()

    def _end(self) -> int:
        """Returns how many positions there are by `stopping`."""
        ends = []
        for stream, length in enumerate(self.lengths):
            if length is None:
                if self._stopping == "first_exhausted":
                    continue
                raise LengthUnknown(self._unknown())
            left = length - self._begins[stream]
            if self._stopping == "first_exhausted":
                position = self.course.position(stream, max(left, 0))
                ends += [] if position is None else [position]
            elif left > 0:
                position = self.course.position(stream, left - 1)
                ends += [] if position is None else [position + 1]
        if self._stopping == "first_exhausted":
            if None in self.lengths or not ends:
                raise LengthUnknown(self._unknown())
            return min(ends)
        return max(ends, default=0)

    def _unknown(self) -> str:
        return (
            "the blend has no length yet, as a stream in it is still being produced: pass num_samples, how many to "
            "train on however many epochs of a stream that takes, or give that stream's data set max_total_samples"
        )
