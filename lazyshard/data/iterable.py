"""`LazyShardedIterable`: what a rank draws, as an iterable that counts what it hands out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.errors import LazyShardError, StateInvalid

__all__ = ["LazyShardedIterable"]

_WORKER = "worker"
_WORKERS = "workers"
_HANDED_OUT = "handed_out"


class LazyShardedIterable(IterableDataset[Any]):
    """The samples of one rank, in order, from where the run stands to the end of the epoch that is set.

    For trainers that want an iterable, and as torchdata's `StatefulDataLoader` resumes it::

        samples = LazyShardedIterable(LazyShardedDataset("stream", encode, batch_size=8))
        loader = StatefulDataLoader(samples, batch_size=8, num_workers=2)

    Workers take micro batches of the data set in turn, so a loader whose batches are as large gives the same order
    whatever their number. With `num_samples` it goes on from epoch to epoch up to that number; without, it ends with
    the epoch, also where a live stream turns out shorter than `max_total_samples`. Each pass begins where the run
    stands in the epoch that is set: call `set_epoch` for the next one.

    Args:
        dataset: what is drawn. Its state is the iterable's.
    """

    def __init__(self, dataset: LazyShardedDataset) -> None:
        self._dataset = dataset
        # Epoch and position at which its passes begin; None where the data set stands.
        self._start: tuple[int, int] | None = None
        # Samples that this process, the main one or a worker, has handed out of this pass, which is over its epoch; and
        # of the pass to come, as a worker's loaded state says.
        self._handed_out = 0
        self._pass_epoch = 0
        self._behind = 0
        # Which the main process cannot see of its workers: only that they do.
        self._workers_read = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def dataset(self) -> LazyShardedDataset:
        """What is drawn."""
        return self._dataset

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; see `LazyShardedDataset.set_epoch`."""
        self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass, one at a time. Raises as `LazyShardedDataset` does."""
        worker = get_worker_info()
        self._workers_read[0] = worker is not None
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        behind, self._behind = self._behind, 0
        self._handed_out, self._pass_epoch = behind, self._dataset.epoch
        return self._pass(number, workers, behind)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state behind what this pass has handed out, all ranks having handed out as much.

        In a DataLoader worker, as `StatefulDataLoader` asks for it: that of the worker. Elsewhere it is a state as
        `LazyShardedDataset.state_dict` returns it, from which any ranks and workers can go on.

        Raises:
            RuntimeError: workers hand the samples out, which this process cannot count.
        """
        worker = get_worker_info()
        if worker is None and self._workers_read[0]:
            raise RuntimeError(
                f"{self._dataset.directory}: DataLoader workers hand the samples out, and this process cannot see how "
                f"many were trained; save `dataset.state_dict(consumed)`, or a StatefulDataLoader's own state"
            )
        course, start = self._dataset._indices().course, self._position()
        handed_out = self._handed_out if self._pass_epoch == self._dataset.epoch else 0
        drawn = start if worker else start + handed_out
        state = self._dataset.state_dict(course.consumed_before + course.dp * drawn)
        if worker is None:
            return state
        return state | {_WORKER: worker.id, _WORKERS: worker.num_workers, _HANDED_OUT: handed_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind what was handed out: the next pass begins there.

        Raises:
            StateInvalid, VersionUnsupported, StateMismatch: as `LazyShardedDataset.load_state_dict`.
            RuntimeError: the data set is used already, and the state is of another course; or a worker's state is
                loaded elsewhere than in that worker.
        """
        worker = get_worker_info()
        if worker is not None:
            try:
                self._load_in_worker(dict(state), (worker.id, worker.num_workers))
            except LazyShardError as error:
                error.carry_fields()
                raise
            return
        self._start = self._dataset._go_on(state)
        self._handed_out = 0
        self._workers_read[0] = False

    def _load_in_worker(self, state: dict[str, Any], here: tuple[int, int]) -> None:
        there = state.pop(_WORKER, None), state.pop(_WORKERS, None)
        behind = state.pop(_HANDED_OUT, None)
        if there != here or type(behind) is not int or behind < 0:
            raise StateInvalid(
                f"{self._dataset.directory}: expected the state of DataLoader worker {here[0]} of {here[1]}, found "
                f"that of {there[0]} of {there[1]}; with another number of workers go on from what "
                f"`dataset.state_dict(consumed)` gave",
                field=_WORKERS,
                expected=str(here),
                actual=str(there),
            )
        start = self._dataset._go_on(state)
        assert start is not None  # a worker's data set is in use
        if start != (self._dataset.epoch, self._position()):
            raise RuntimeError(
                f"{self._dataset.directory}: the state of worker {here[0]} is of epoch {start[0]} from position "
                f"{start[1]} on, this loader is at epoch {self._dataset.epoch} from {self._position()} on: load the "
                f"state that the data set began with, and set the epoch, before the loader's workers start"
            )
        self._behind = behind

    def _pass(self, number: int, workers: int, behind: int) -> Iterator[Any]:
        dataset = self._dataset
        space, start = dataset._indices(), self._position()
        indices, size = space.lane_indices(start), space.course.batch_size
        # With num_samples it goes on with the next epoch.
        epoch = space.epoch_at(start, dataset.reader) if space.wraps and space.order.num_samples is None else None
        turn, within = divmod(behind, size)
        for first in range((turn * workers + number) * size, len(indices), workers * size):
            batch = indices[first + within : first + size]
            within = 0
            if not batch or (epoch is not None and dataset.draw(batch[0]).epoch != epoch):
                return
            for sample in dataset.__getitems__(list(batch)):
                self._handed_out += 1
                yield sample

    def _position(self) -> int:
        """Returns the position at which a pass over the epoch that is set begins."""
        if self._start is not None and self._start[0] == self._dataset.epoch:
            return self._start[1]
        return self._dataset._indices().course.current.draws
