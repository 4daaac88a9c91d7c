"""What one rank draws in a pass, micro batch by micro batch, until the end of the epoch: of a stream, or of a blend.

Positions are those of the part of the run that is current, as everywhere. `drawn` is where the pass begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, get_args

from torch.utils.data import get_worker_info

from lazyshard.data.blend_state import epoch_of_blend
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.format.blend_state import BlendState
from lazyshard.plan.steps import AtEnd, Ending


class LanePasses(ABC):
    """What a rank draws in the epoch that is set.

    Attributes:
        batch_size: samples of a rank in a micro batch.
    """

    batch_size: int

    def stands(self) -> int:
        """Returns the position at which the data set's own state stands."""
        return self._part()[0]

    def consumed(self, position: int) -> int:
        """Returns the samples that were trained, over all ranks, once each rank has drawn so many positions."""
        _, before, dp = self._part()
        return before + dp * position

    def position(self, consumed: int) -> tuple[int, int]:
        """Returns the position of each rank after so many samples, and how many of them fill none."""
        _, before, dp = self._part()
        return divmod(consumed - before, dp)

    @abstractmethod
    def samples(self, drawn: int, position: int, within: int) -> list[Any]:
        """Returns the micro batch that begins at a position without its first `within` samples; none behind the end.

        Waits, and raises, as the data set does.
        """

    @abstractmethod
    def stop(self, drawn: int) -> int | None:
        """Returns the position behind the whole micro batches, without waiting; None as long as that is open."""

    def completes(self, drawn: int) -> bool:
        """Returns whether one more micro batch follows there, completed by samples that were drawn before."""
        return False

    @abstractmethod
    def go_on(self, state: dict[str, Any]) -> tuple[int, int] | None:
        """Loads a state; returns its epoch and position, None where the data set was not used yet.

        Raises: as `load_state_dict` of the data set.
        """

    @abstractmethod
    def _part(self) -> tuple[int, int, int]:
        """Returns the position at which the state stands, the samples before its current part, and the ranks."""


class _StreamPasses(LanePasses):
    """Of one stream: up to the end of the epoch, or to `num_samples`.

    Args:
        dataset: of the stream.
        at_end: what becomes of the samples left over; "drop" with `num_samples`.
        by_epoch: whether passes end with the epoch.
        tells: whether to log, on rank 0, what was left over.
    """

    def __init__(self, dataset: LazyShardedDataset, at_end: AtEnd, *, by_epoch: bool, tells: bool) -> None:
        self.batch_size = dataset._draws.order.batch_size
        self._dataset = dataset
        self._at_end = at_end
        self._by_epoch = by_epoch
        self._tells = tells

    def samples(self, drawn: int, position: int, within: int) -> list[Any]:
        """See above."""
        dataset = self._dataset
        indices = dataset._draws.indices().lane_indices(position)[: self.batch_size]
        if not indices:
            return []
        if self._by_epoch and (end := dataset._draws.end_of(drawn, position)) is not None and position >= end[0]:
            return self._last(drawn, end[1], within) if position == end[0] else []
        # The rest of one alone would be taken for the batch of a loader with another batch size.
        return [dataset[index] for index in indices[within:]] if within else dataset.__getitems__(list(indices))

    def stop(self, drawn: int) -> int | None:
        """See above."""
        space = self._dataset._draws.indices()
        if not self._by_epoch:
            return space.layout.block
        total = self._total()
        return None if total is None else space.course.epoch_stop(drawn, total)

    def completes(self, drawn: int) -> bool:
        """See above."""
        if self._at_end == "drop" or (total := self._total()) is None:
            return False
        return Ending.of(self._dataset._draws.indices().course, drawn, total).leftover > 0

    def go_on(self, state: dict[str, Any]) -> tuple[int, int] | None:
        """See above."""
        return self._dataset._draws.go_on(state)

    def _part(self) -> tuple[int, int, int]:
        course = self._dataset._draws.indices().course
        return course.current.draws, course.consumed_before, course.dp

    def _total(self) -> int | None:
        dataset = self._dataset
        total = dataset._draws.order.known_total(dataset.reader.seen)
        return dataset._draws.order.known_total(dataset.published()) if total is None else total

    def _last(self, drawn: int, total: int, within: int) -> list[Any]:
        """Returns what the epoch ends with, behind its whole micro batches."""
        dataset = self._dataset
        space = dataset._draws.indices()
        rank, worker = space.rank, get_worker_info()
        tells = self._tells and rank.dp_rank == 0 and (worker is None or worker.id == 0)
        if self._at_end == "drop" and not tells:
            return []
        ending = Ending.of(space.course, drawn, total)
        if tells and ending.leftover:
            done = {
                "drop": "they are not drawn",
                "pad": f"one more micro batch of each rank draws them, completed by the last {ending.missing} before",
                "loop": f"one more micro batch of each rank draws them, completed by the first {ending.missing}",
            }[self._at_end]
            space.tell(
                "leftover",
                f"{dataset.directory}: samples left over at the end of the epoch: {ending.leftover}, fewer than "
                f"dp_size * batch_size = {rank.dp_size} * {ending.batch_size}; at_end={self._at_end!r}: {done}",
            )
        return dataset._draws.read_samples(ending.batch(rank.dp_rank, self._at_end)[within:])


class _BlendPasses(LanePasses):
    """Of a blend: until it ends by `stopping`, or up to `num_samples`."""

    def __init__(self, blend: BlendedDataset, *, by_stopping: bool) -> None:
        self.batch_size = blend._batch_size
        self._blend = blend
        self._by_stopping = by_stopping

    def samples(self, drawn: int, position: int, within: int) -> list[Any]:
        """See above."""
        blend = self._blend
        space = blend._spaces.current()
        indices = space.layout.lane_indices(space.rank.dp_rank)[position : position + self.batch_size]
        if not indices or (self._by_stopping and not blend.in_epoch(indices[0])):
            return []
        return blend.__getitems__(list(indices[within:]))

    def stop(self, drawn: int) -> int | None:
        """See above."""
        return None if self._by_stopping else self._blend._spaces.current().layout.block

    def go_on(self, state: dict[str, Any]) -> tuple[int, int] | None:
        """See above."""
        blend, main = self._blend, get_worker_info() is None
        if main and not blend._spaces.used:
            blend.load_state_dict(state)
            return None
        found = BlendState.from_dict(state, "the state of a blend")
        epoch = epoch_of_blend(found)
        if main:
            blend.set_epoch(epoch)
        try:
            same = epoch == blend.epoch and blend._state_after(found.consumed) == found
        except ValueError:
            same = False
        if not same:
            # Says what to do.
            blend.load_state_dict(state)
        return epoch, self.position(found.consumed)[0]

    def _part(self) -> tuple[int, int, int]:
        blend = self._blend
        return blend._spaces.current().part.draws, blend.consumed_before, blend.rank.dp_size


def passes_of(dataset: LazyShardedDataset | BlendedDataset, at_end: AtEnd, *, endless: bool) -> LanePasses:
    """Returns the passes over a data set.

    Args:
        dataset: not used yet, if `endless`.
        at_end: what becomes of the samples left over.
        endless: whether its length is given up, so that a live stream needs none.

    Raises:
        ValueError: `at_end` is none, or does not apply.
        RuntimeError: the data set is used already.
        TypeError: it is none.
    """
    if at_end not in get_args(AtEnd):
        raise ValueError(f"at_end is one of {', '.join(get_args(AtEnd))}, got {at_end!r}")
    if isinstance(dataset, BlendedDataset):
        if at_end != "drop":
            raise ValueError(f"at_end={at_end!r} is for a single stream: a blend ends by its `stopping`")
        by_stopping = dataset._spaces.num_samples is None
        if endless:
            dataset._give_up_length()
        return _BlendPasses(dataset, by_stopping=by_stopping)
    if not isinstance(dataset, LazyShardedDataset):
        raise TypeError(
            f"expected a data set or a blend, as in LazyShardedStream(LazyShardedDataset(DIRECTORY)), got "
            f"{dataset!r:.100}"
        )
    by_epoch = dataset._draws.order.num_samples is None
    if at_end != "drop" and not by_epoch:
        raise ValueError(f"at_end={at_end!r} is for passes over an epoch: with num_samples nothing is left over there")
    if endless:
        dataset._draws.give_up_length()
    return _StreamPasses(dataset, at_end, by_epoch=by_epoch, tells=endless)
