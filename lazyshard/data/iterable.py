"""`LazyShardedStream`: the samples of a rank as a finite iterable; `LazyShardedIterable`: the same with a length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from lazyshard.data import run_state
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_space import as_count
from lazyshard.data.rank import WORKERS_READ, carrying
from lazyshard.data.run_state import HANDED_OUT, OVER, WORKER, WORKERS, StateDicts, Worker
from lazyshard.data.settings import check_choice
from lazyshard.plan.course import AtEnd, Ending

_D = TypeVar("_D", LazyShardedDataset, BlendedDataset)


class _Begun(NamedTuple):
    """Where the passes over an epoch begin: a position of each rank, or None for the position of the data set.

    `within` samples of the first micro batch were already returned. `over` is the number of samples in the micro batch
    that completed the epoch, if nothing is left of the epoch; otherwise 0.
    """

    epoch: int
    position: int | None = None
    within: int = 0
    over: int = 0


def worker_here() -> Worker | None:
    """Returns the number of this DataLoader worker and how many there are; None outside a worker."""
    return None if (worker := get_worker_info()) is None else (worker.id, worker.num_workers)


class RankIterable(IterableDataset[Any]):
    """The draws of one rank from a data set or blend, in order: base of `LazyShardedStream` and the sequences."""

    _dataset: Any
    _begin_pass: Callable[[int, int], Iterator[Any]]
    _state_of: Callable[[int], dict[str, Any]]
    _state_here: Callable[[Worker | None], dict[str, Any]]

    @property
    def epoch(self) -> int:
        """The current epoch: initially 0, that of the state once one is loaded."""
        return int(self._dataset.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the following passes, in running workers too. Raises ValueError if it is negative."""
        self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass; only one may run at a time.

        Raises the errors of the class for any row or chunk, and ChunkRetired. Sequences also raise StateMismatch if the
        loaded state lies after the stream's end.
        """
        worker = worker_here()
        self._dataset._numbers[WORKERS_READ] = 0 if worker is None else worker[1]
        return self._begin_pass(*(worker or (0, 1)))

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run, with all ranks at the same position: plain values for any checkpoint.

        It can be resumed with any number of ranks and workers, with two exceptions: a state within a micro batch, where
        `consumed` was None, needs the same number of ranks; and a state that `StatefulDataLoader` takes in a worker
        belongs to that worker.

        Args:
            consumed: number of samples (as for the data set), or of sequences of this epoch, that all ranks have
                trained: whole micro batches. A micro batch that completes the epoch counts in full, including the
                samples repeated in it. For sequences this takes milliseconds per window since the last call. None:
                what this pass has returned in this process.

        Raises:
            ValueError, TypeError: `consumed` is not at the end of a micro batch, or is less than before.
            RuntimeError: `consumed` is None, but workers return the samples, which this process cannot count.
            WaitTimeout: that many sequences are not published.
        """
        if consumed is not None:
            return self._state_of(consumed)
        worker = worker_here()
        if worker is None and self._dataset._numbers[WORKERS_READ]:
            text = "DataLoader workers return the samples: pass `consumed`, or save the state of a StatefulDataLoader"
            raise RuntimeError(f"{self._dataset._where}: {text}")
        return self._state_here(worker)


class LazyShardedStream(RankIterable, Generic[_D]):
    """The samples of one rank, in order, from the position of the run to the end of the current epoch.

    It needs no length: a pass over a live stream waits for unpublished samples and ends where the stream ends, on every
    rank after the same number of micro batches::

        dataset = LazyShardedDataset("stream", encode, batch_size=8)
        stream = LazyShardedStream(dataset, at_end="loop")
        loader = DataLoader(stream, batch_size=8, num_workers=2)

    Workers take micro batches of the data set in turn, so a loader with the same batch size returns the same order for
    any number of workers. With `max_total_samples` a pass ends there or before; with `num_samples` it continues
    from epoch to epoch up to that number. Call `set_epoch` for the next epoch.

    Args:
        dataset: an unused data set, or an unused blend, which ends according to its `stopping`. It loses its length, so
            do not use its `rank_indices`. All its other methods remain usable.
        at_end: how to handle leftover samples, which are fewer than dp_size * batch_size and fill no micro batch on
            every rank. "drop" does not draw them. Otherwise every rank draws one more micro batch, which together hold
            all of them, and samples of the same epoch fill the missing places: with "pad" those just before, with
            "loop" the first ones of the epoch, which a producer that deletes chunks may no longer have. Only for single
            streams without `num_samples`.

    Raises:
        ValueError: `at_end` is unknown or does not apply.
        RuntimeError: the data set was already used.
        TypeError: it is neither a `LazyShardedDataset` nor a `BlendedDataset`.
    """

    _endless: bool = True

    def __init__(self, dataset: _D, *, at_end: AtEnd = "drop") -> None:
        check_choice("at_end", at_end, AtEnd)
        if not isinstance(dataset, (LazyShardedDataset, BlendedDataset)):
            raise TypeError(f"expected a data set or a blend, as LazyShardedDataset(DIRECTORY), got {dataset!r:.100}")
        order = dataset._states.order
        if at_end != "drop" and (order.num_samples is not None or isinstance(dataset, BlendedDataset)):
            raise ValueError(f"at_end={at_end!r} applies to an epoch of one stream, not to a blend or num_samples")
        self._dataset: _D = dataset
        self.dataset: _D = dataset
        """The data set or blend from which samples are drawn."""
        self.at_end: AtEnd = at_end
        """How leftover samples are handled."""
        # Whether a pass ends with the epoch of a stream, or by the `stopping` of a blend.
        self._by_epoch = order.num_samples is None
        if self._endless:
            dataset._give_up_length()
        self._size, self._loaded = order.batch_size, _Begun(0)
        # Samples that this process, the main one or a worker, has returned in the current pass; the epoch of that pass;
        # and the number to start the next pass with, from a loaded worker state.
        self._returned = self._pass_epoch = 0
        self._loaded_returned: int | None = None

    @property
    def consumed(self) -> int:
        """The `consumed` of the loaded state; 0 without a state, or once another epoch is set."""
        return self._dataset.consumed + self._begun().over

    @carrying()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state of this class or of the data set: the next pass begins there.

        Raises:
            StateInvalid, VersionUnsupported, StateMismatch: as `load_state_dict` of the data set; or the state lies
                within a micro batch of a different number of ranks.
            RuntimeError: the data set was already used and the state is of another course; or it is another worker's.
        """
        worker, where = worker_here(), f"{self._dataset._where}: the state to continue from"
        if worker is not None:
            given = state if isinstance(state, dict) else {}
            run_state.check_worker(given, worker, where)
            returned = run_state.read_count(given, HANDED_OUT, None, where)
            start = self._dataset._resume(_without(given, WORKER, WORKERS, HANDED_OUT))
            if start != (now := (self.epoch, self._position())):
                text = f"the state of worker {worker[0]} is at epoch and position {start}, this loader is at {now}"
                raise RuntimeError(f"{self._dataset._where}: {text}: load it, and set the epoch, before workers start")
            self._loaded_returned = returned
            return
        within = over = 0
        # The data set refuses values that are no state, and states of workers.
        if isinstance(state, dict) and WORKER not in state:
            within = run_state.read_count(state, HANDED_OUT, self._size - 1, where)
            over = run_state.read_count(state, OVER, None, where)
            state = _without(state, HANDED_OUT, OVER)
        start = self._dataset._resume(state)
        if within:
            last, here = state["parts"][-1], (self._dataset.rank.dp_size, self._size)
            run_state.check_micro_batch((last["dp"], last["batch_size"]), here, where)
        self._loaded = _Begun(self.epoch, None if start is None else start[1], within, over)
        self._returned, self._pass_epoch = within, self.epoch
        self._dataset._numbers[WORKERS_READ] = 0

    def commit(self, consumed: int, *, last_epoch: bool, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Commits the progress of the checkpoints: as `commit` of the data set, `consumed` as for `state_dict`."""
        count, kept = self._state_of(consumed)["consumed"], [_without(one, OVER, HANDED_OUT) for one in keep]
        return self._dataset.commit(count, last_epoch=last_epoch, keep=kept, take_over=take_over)

    def _begin_pass(self, number: int, workers: int) -> Iterator[Any]:
        returned, self._loaded_returned = self._loaded_returned, None
        if returned is None:
            # `within` counts samples of the first micro batch, which is worker 0's.
            returned = self._begun().within if number == 0 else 0
        self._returned, self._pass_epoch = returned, self.epoch
        return self._pass(number, workers, returned)

    def _state_here(self, worker: Worker | None) -> dict[str, Any]:
        start, ours = self._position(), self._pass_epoch == self.epoch
        if worker is None:
            return self._state_at(start + (self._returned if ours else self._begun().within))
        state = self._dataset.state_dict(self._dataset._space().consumed(start))
        return state | {WORKER: worker[0], WORKERS: worker[1], HANDED_OUT: self._returned if ours else 0}

    def _pass(self, number: int, workers: int, returned: int) -> Iterator[Any]:
        start, size = self._position(), self._size
        if self._begun().over:
            return
        turn, within = divmod(returned, size)
        while samples := self._micro_batch(start, start + (turn * workers + number) * size, within):
            for sample in samples:
                self._returned += 1
                yield sample
            turn, within = turn + 1, 0

    def _micro_batch(self, start: int, position: int, within: int) -> list[Any]:
        """Waits for the micro batch at a position and returns it without its first samples; empty after the end."""
        dataset = self._dataset
        indices = dataset._space().lane_indices(position)[: self._size]
        if not indices:
            return []
        if isinstance(dataset, BlendedDataset):
            if self._by_epoch and not dataset.in_epoch(indices[0]):
                return []
        elif self._by_epoch:
            with dataset._lanes:
                end = dataset._entered().end_of(start, position)
            if end is not None and position >= end[0]:
                return self._last(dataset, start, end[1], within) if position == end[0] else []
        # `__getitems__` of a partial micro batch would warn that the loader has another batch size.
        return [dataset[index] for index in indices[within:]] if within else dataset.__getitems__(list(indices))

    def _last(self, dataset: LazyShardedDataset, drawn: int, total: int, within: int) -> list[Any]:
        """Returns what a rank draws after the whole micro batches of an epoch; rank 0 logs the leftover."""
        space, worker = dataset._space(), get_worker_info()
        rank, ending = space.rank, Ending.of(space.course, drawn, total)
        if self._endless and rank.dp_rank == 0 and (worker is None or worker.id == 0) and ending.leftover:
            done = "they are not drawn" if self.at_end == "drop" else f"drawn, completed by {ending.missing} others"
            few = f"fewer than dp_size * batch_size = {rank.dp_size} * {self._size}; at_end={self.at_end!r}: {done}"
            space.warn_once("leftover", f"samples left over at the end of the epoch: {ending.leftover}, {few}")
        with dataset._lanes:
            return [dataset._samples.read(one) for one in ending.batch(rank.dp_rank, self.at_end)[within:]]

    def _end(self, start: int) -> tuple[int | None, int]:
        """Returns the position after the whole micro batches, None while unknown, and how many draws follow it."""
        dataset = self._dataset
        if not self._by_epoch:
            return dataset._space().layout.block, 0
        if isinstance(dataset, BlendedDataset):
            return None, 0
        course, known = dataset._space().course, dataset._states.order.known_total
        if (total := known(dataset.reader.seen) or known(dataset.published())) is None:
            return None, 0
        completes = self.at_end != "drop" and Ending.of(course, start, total).leftover > 0
        return course.epoch_stop(start, total), self._size if completes else 0

    def _begun(self) -> _Begun:
        return self._loaded if self._loaded.epoch == self.epoch else _Begun(self.epoch)

    def _position(self) -> int:
        position, start = self._begun().position, self._dataset._space().start
        return start if position is None else position

    def _state_of(self, consumed: int) -> dict[str, Any]:
        count, start, space = as_count(consumed), self._position(), self._dataset._space()
        if self._begun().over:
            if count != self.consumed:
                raise ValueError(f"consumed must be {self.consumed}, as this epoch is over; got {count}")
            return self._state_at(start)
        stop, more = self._end(start)
        position, rest = divmod(count - space.before, space.layout.dp)
        if stop is None or position <= stop or rest:
            return self._dataset.state_dict(count)
        if position == stop + more:
            return self._state_at(position)
        most = f"at most {space.consumed(stop + more)}, all that is drawn in this epoch in whole micro batches"
        raise ValueError(f"{self._dataset._where}: consumed must be {most} of all ranks, got {count}")

    def _state_at(self, position: int) -> dict[str, Any]:
        whole = position // self._size * self._size
        # Dropped samples are never returned, so with "drop" a position never lies after the end.
        if self.at_end != "drop" and (stop := self._end(self._position())[0]) is not None:
            whole = min(whole, stop)
        state, over = self._dataset.state_dict(self._dataset._space().consumed(whole)), self._begun().over
        if position - whole == self._size or over:
            return state | {OVER: over or self._dataset.rank.dp_size * self._size}
        return state | {HANDED_OUT: position - whole} if position > whole else state


class LazyShardedIterable(LazyShardedStream[LazyShardedDataset]):
    """A `LazyShardedStream` over a data set of known length, which keeps its length and indices.

    ::

        samples = LazyShardedIterable(LazyShardedDataset("stream", encode, batch_size=8))
        loader = StatefulDataLoader(samples, batch_size=8, num_workers=2)

    A live stream then needs `max_total_samples` or `num_samples`, and leftover samples are dropped.

    Args:
        dataset: the data set to draw from; it may already be in use. Both share one state.

    Raises TypeError: it is not a data set; for a blend use `LazyShardedStream`.
    """

    _endless = False

    def __init__(self, dataset: LazyShardedDataset) -> None:
        if isinstance(dataset, BlendedDataset):
            raise TypeError("a LazyShardedIterable takes a LazyShardedDataset; a blend goes into a LazyShardedStream")
        super().__init__(dataset)


def _without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}
