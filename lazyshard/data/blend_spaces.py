"""The index spaces of a blend, one for each epoch that is set, and whether the blend ends before an index."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lazyshard.data.blend_space import BlendSpace, Stopping
from lazyshard.data.blend_states import BlendStates
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.order import LayoutName
from lazyshard.errors import RankInvalid

__all__ = ["BlendSpaces"]


class BlendSpaces:
    """The index spaces of one blend, of which the newest is kept.

    Args:
        datasets: that are blended.
        states: where the run stands.
        layout: "block" or "strided".
        num_samples: how many indices there are to be at the most, over all ranks; None to end by `stopping`.
        stopping: where to end.

    Attributes:
        num_samples: as given; set before the first space is asked for.
        stopping: as given.
        used: whether a space was asked for.
    """

    def __init__(
        self,
        datasets: Sequence[LazyShardedDataset],
        states: BlendStates,
        layout: LayoutName,
        num_samples: int | None,
        stopping: Stopping,
    ) -> None:
        self.num_samples = num_samples
        self._datasets = datasets
        self._states = states
        self._layout = layout
        self.stopping = stopping
        self._newest: tuple[int, BlendSpace] | None = None

    @property
    def used(self) -> bool:
        """See above."""
        return self._newest is not None

    def current(self) -> BlendSpace:
        """Returns the indices of the epoch that is set.

        Raises:
            RankInvalid: the data sets are of different ranks.
            LengthUnknown: there is no end.
            ValueError: a stream is too short, or there is less than one batch of every rank.
        """
        epoch = self._datasets[0].epoch
        if self._newest is None or self._newest[0] != epoch:
            self._newest = (epoch, self._make(epoch))
        return self._newest[1]

    def in_epoch(self, index: int) -> bool:
        """Returns whether the blend goes on for the micro batch of an index; see `BlendedDataset.in_epoch`."""
        space = self.current()
        position, size = space.layout.locate(operator.index(index))[1], space.part.batch_size
        # Batches are trained whole: the one that would draw too much is not, the one with what is missing still is.
        begin = position - position % size
        last = begin + size - 1
        epoch = self._datasets[0].epoch
        # Where one that has ended is exhausted, the others need not be waited for.
        known = sorted(enumerate(space.drawn(last + 1)), key=lambda pair: not self._datasets[pair[0]].reader.seen.ended)
        over = (self._exhausted(stream, drawn, epoch) for stream, drawn in known)
        if self.stopping == "first_exhausted":
            return not any(over)
        for _ in over:
            # Waits until the samples up to the index are there.
            pass
        # An epoch counts as drawn once the next one would begin.
        return not all(self._exhausted(stream, count + 1, epoch) for stream, count in enumerate(space.drawn(begin)))

    def _exhausted(self, stream: int, drawn: int, epoch: int) -> bool:
        dataset = self._datasets[stream]
        return drawn > 0 and dataset._epoch_at(drawn) > epoch

    def _make(self, epoch: int) -> BlendSpace:
        ranks = {dataset.rank for dataset in self._datasets}
        if len(ranks) != 1:
            raise RankInvalid(f"the data sets of a blend are of one rank, got {sorted(ranks)}")
        (rank,) = ranks
        courses = [dataset._indices().course for dataset in self._datasets]
        stands = [(len(course.parts) - 1, course.current.draws) for course in courses]
        lengths: list[int | None] = []
        for dataset, course in zip(self._datasets, courses, strict=True):
            known = dataset._order.known_total(dataset.reader.seen)
            total = dataset._order.max_total_samples if known is None else known
            if total is not None and not course.full_epoch_length(total):
                raise ValueError(
                    f"{dataset.directory}: the stream has {total} samples, fewer than one for each of {rank.dp_size} "
                    f"ranks, so it cannot be repeated in a blend: leave it out"
                )
            if total is None:
                lengths.append(None)
            else:
                lengths.append(0 if course.epoch(total) > epoch else course.epoch_length(total))
        part = self._states.part(epoch, rank, stands)
        samples = self.num_samples
        if samples is not None:
            samples -= sum(one.dp * one.draws for one in self._states.before(epoch, part))
        begun = self._states.goes_on(epoch)
        return BlendSpace(part, rank, self._layout, lengths, samples, self.stopping, begun=begun)
