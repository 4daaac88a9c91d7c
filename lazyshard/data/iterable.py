"""`LazyShardedStream`: what a rank draws, as an iterable that ends by itself; `LazyShardedIterable`, with a length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.passes import passes_of
from lazyshard.data.run_state import HANDED_OUT, OVER, WORKER, WORKERS, as_count
from lazyshard.errors import LazyShardError, StateInvalid
from lazyshard.plan.steps import AtEnd

_D = TypeVar("_D", LazyShardedDataset, BlendedDataset)


class LazyShardedStream(IterableDataset[Any], Generic[_D]):
    """The samples of one rank, in order, from where the run stands to the end of the epoch that is set.

    It needs no length: a pass over a live stream waits for what is still to come, and ends where the stream does, on
    every rank after as many micro batches::

        dataset = LazyShardedDataset("stream", encode, batch_size=8)
        stream = LazyShardedStream(dataset, at_end="loop")
        loader = DataLoader(stream, batch_size=8, num_workers=2)

    Workers take micro batches of the data set in turn, so a loader whose batches are as large gives the same order
    whatever their number. With `max_total_samples` a pass ends there at the latest; with `num_samples` it goes on from
    epoch to epoch up to that number. Each pass begins where the run stands in the epoch that is set: call `set_epoch`
    for the next one.

    Args:
        dataset: what is drawn: a data set that is not used yet, or a blend, which ends by its `stopping`. Its length is
            given up: ask it for no `rank_indices`. Everything else of it may be used.
        at_end: what becomes of the samples left over, fewer than dp_size * batch_size, which fill no micro batch of
            every rank. "drop": they are not drawn. Otherwise every rank draws one more micro batch with all of them, in
            which samples of the same epoch fill the missing places: "pad" the last ones before them, "loop" the first
            ones of the epoch, of which a producer that deletes chunks may have none any more. `lazyshard.plan.steps`
            shows which they are. For single streams without `num_samples`.

    Raises:
        ValueError: `at_end` is none of the three, or does not apply.
        RuntimeError: the data set is used already.
        TypeError: it is none of ours.
    """

    _endless: bool = True

    def __init__(self, dataset: _D, *, at_end: AtEnd = "drop") -> None:
        self._passes = passes_of(dataset, at_end, endless=self._endless)
        self._dataset: _D = dataset
        self._at_end: AtEnd = at_end
        # Epoch and position at which its passes begin; None where the data set stands.
        self._start: tuple[int, int] | None = None
        # Of what epoch, and how many samples of the first micro batch are behind it already.
        self._within = (0, 0)
        # The epoch of which nothing is left, and how many samples its last micro batch had, which was completed.
        self._over: tuple[int, int] | None = None
        # Samples that are behind this process, the main one or a worker, in this pass, which is over its epoch; and in
        # the pass to come, as a worker's loaded state says.
        self._behind = 0
        self._pass_epoch = 0
        self._loaded_behind: int | None = None
        # Which the main process cannot see of its workers: only that they do.
        self._workers_read = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def dataset(self) -> _D:
        """What is drawn."""
        return self._dataset

    @property
    def at_end(self) -> AtEnd:
        """What becomes of the samples left over."""
        return self._at_end

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._dataset.epoch

    @property
    def consumed(self) -> int:
        """What `state_dict` was given when the loaded state was saved; 0 without one, or once another epoch is set."""
        return self._dataset.consumed + self._last_samples()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the passes to come; see `LazyShardedDataset.set_epoch`."""
        self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass, one at a time. Raises as the data set does."""
        worker = get_worker_info()
        self._workers_read[0] = worker is not None
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        behind, self._loaded_behind = self._loaded_behind, None
        if behind is None:
            # All of what is behind a pass lies in its first micro batch.
            behind = self._begun_within() if number == 0 else 0
        self._behind, self._pass_epoch = behind, self.epoch
        return self._pass(number, workers, behind)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run, all ranks having drawn as much: plain values for any checkpoint.

        Any ranks and workers go on from it. But one within a micro batch, where none was given, is only for as many
        ranks; and what `StatefulDataLoader` asks a worker for is the state of that worker.

        Args:
            consumed: as for the data set; the micro batch that completes the epoch counts whole, with what is in it
                once more. None for what this pass has handed out, in this process.

        Raises:
            ValueError, TypeError: as `state_dict` of the data set.
            RuntimeError: None, but workers hand the samples out, which this process cannot count.
        """
        worker, start = get_worker_info(), self._position()
        if consumed is not None:
            return self._state_of(consumed)
        if worker is None and self._workers_read[0]:
            raise RuntimeError(
                f"{self._where}: DataLoader workers hand the samples out, and this process cannot see how "
                f"many were trained; save `dataset.state_dict(consumed)`, or that of this iterable, or a "
                f"StatefulDataLoader's own state"
            )
        ours = self._pass_epoch == self.epoch
        if worker is not None:
            state = self._dataset.state_dict(self._passes.consumed(start))
            return state | {WORKER: worker.id, WORKERS: worker.num_workers, HANDED_OUT: self._behind if ours else 0}
        return self._state_at(start + (self._behind if ours else self._begun_within()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state stands, with any number of ranks and workers: the next pass begins there.

        Args:
            state: what `state_dict` returned, of this class or of the data set.

        Raises:
            StateInvalid, VersionUnsupported, StateMismatch: as `load_state_dict` of the data set; or it stands within a
                micro batch of other ranks.
            RuntimeError: the data set is used already, and the state is of another course; or a worker's state is
                loaded elsewhere than in that worker.
        """
        worker = get_worker_info()
        if worker is not None:
            try:
                self._load_in_worker(state, (worker.id, worker.num_workers))
            except LazyShardError as error:
                error.carry_fields()
                raise
            return
        size = self._passes.batch_size
        given, within, last_samples = _take_apart(state, size, self._where)
        self._start = self._passes.go_on(given)
        if within:
            _check_ranks(given, self._dataset.rank.dp_size, size, self._where)
        self._over = (self.epoch, last_samples) if last_samples else None
        self._within = (self.epoch, within)
        self._behind = within
        self._pass_epoch = self.epoch
        self._workers_read[0] = False

    def commit(
        self, consumed: int, *, last_epoch: bool, keep: Iterable[dict[str, Any]] = (), take_over: bool = False
    ) -> bool:
        """Commits how far the checkpoints are: as `commit` of the data set, `consumed` as for `state_dict`."""
        state = self._state_of(consumed)
        kept = [{name: value for name, value in one.items() if name not in (OVER, HANDED_OUT)} for one in keep]
        return self._dataset.commit(state["consumed"], last_epoch=last_epoch, keep=kept, take_over=take_over)

    @property
    def _where(self) -> str:
        return "the blend" if isinstance(self._dataset, BlendedDataset) else str(self._dataset.directory)

    def _pass(self, number: int, workers: int, behind: int) -> Iterator[Any]:
        start, size = self._position(), self._passes.batch_size
        if self._last_samples():
            return
        turn, within = divmod(behind, size)
        while samples := self._passes.samples(start, start + (turn * workers + number) * size, within):
            for sample in samples:
                self._behind += 1
                yield sample
            turn, within = turn + 1, 0

    def _position(self) -> int:
        """Returns the position at which a pass over the epoch that is set begins, but for what is `_begun_within`."""
        if self._start is not None and self._start[0] == self.epoch:
            return self._start[1]
        return self._passes.stands()

    def _begun_within(self) -> int:
        epoch, within = self._within
        return within if epoch == self.epoch else 0

    def _last_samples(self) -> int:
        """Returns how many samples the completed micro batch had with which the epoch is over; 0 if it is not."""
        return self._over[1] if self._over is not None and self._over[0] == self.epoch else 0

    def _state_of(self, consumed: int) -> dict[str, Any]:
        count = as_count(consumed)
        start = self._position()
        if self._last_samples():
            if count != self.consumed:
                raise ValueError(f"consumed is {self.consumed} where this epoch is over, got {count}")
            return self._state_at(start)
        stop = self._passes.stop(start)
        position, beside = self._passes.position(count)
        if stop is None or position <= stop or beside:
            return self._dataset.state_dict(count)
        most = stop + (self._passes.batch_size if self._passes.completes(start) else 0)
        if position == most:
            return self._state_at(position)
        raise ValueError(
            f"{self._where}: consumed is at most {self._passes.consumed(most)}, all that is drawn of this epoch, and "
            f"counts whole micro batches of all ranks, got {count}"
        )

    def _state_at(self, position: int) -> dict[str, Any]:
        """Returns the state once each rank has drawn so many positions."""
        size = self._passes.batch_size
        whole = position // size * size
        # What is dropped is not handed out, so there a place never lies behind the end.
        if self._at_end != "drop" and (stop := self._passes.stop(self._position())) is not None:
            whole = min(whole, stop)
        state = self._dataset.state_dict(self._passes.consumed(whole))
        if position - whole == size or self._last_samples():
            return state | {OVER: self._last_samples() or self._dataset.rank.dp_size * size}
        return state | {HANDED_OUT: position - whole} if position > whole else state

    def _load_in_worker(self, state: Any, here: tuple[int, int]) -> None:
        given, behind = _of_worker(state, here, self._where)
        start = self._passes.go_on(given)
        assert start is not None  # a worker's data set is in use
        if start != (self.epoch, self._position()):
            raise RuntimeError(
                f"{self._where}: the state of worker {here[0]} is of epoch {start[0]} from position "
                f"{start[1]} on, this loader is at epoch {self.epoch} from {self._position()} on: load the "
                f"state that the data set began with, and set the epoch, before the loader's workers start"
            )
        self._loaded_behind = behind


class LazyShardedIterable(LazyShardedStream[LazyShardedDataset]):
    """A `LazyShardedStream` over a data set of a known length, which keeps that length and its indices.

    ::

        samples = LazyShardedIterable(LazyShardedDataset("stream", encode, batch_size=8))
        loader = StatefulDataLoader(samples, batch_size=8, num_workers=2)

    A live stream needs `max_total_samples` or `num_samples` then, and the samples left over at the end are dropped.

    Args:
        dataset: what is drawn; it may be in use already. Its state is the iterable's.

    Raises:
        TypeError: it is none, or a blend, for which there is `LazyShardedStream`.
    """

    _endless = False

    def __init__(self, dataset: LazyShardedDataset) -> None:
        if isinstance(dataset, BlendedDataset):
            raise TypeError("a LazyShardedIterable takes a LazyShardedDataset; a blend goes into a LazyShardedStream")
        super().__init__(dataset)


def _take_apart(state: Any, size: int, where: str) -> tuple[Any, int, int]:
    """Returns the state of the data set, samples handed out within a micro batch, and those of the one that ended all.

    Args:
        state: as loaded. What is no state at all, or that of a worker, is left for the data set to refuse.
        size: samples of a rank in a micro batch.
        where: the stream, for messages.

    Raises:
        StateInvalid: what was added is not as it should be.
    """
    if not isinstance(state, dict) or WORKER in state:
        return state, 0, 0
    within, last = state.get(HANDED_OUT, 0), state.get(OVER, 0)
    if type(within) is not int or not 0 <= within < size:
        raise StateInvalid(
            f"{where}: the state stands within a micro batch, behind {within!r:.100} samples of {size}: go on from one "
            f"that was saved at the end of a micro batch",
            field=HANDED_OUT,
            expected=f"an integer from 0 to {size - 1}",
            actual=f"{within!r:.100}",
        )
    if type(last) is not int or last < 0:
        raise StateInvalid(
            f"{where}: the state to go on from: expected a number of samples as {OVER!r}, found {last!r:.100}; go on "
            f"from an older checkpoint",
            field=OVER,
            expected="an integer from 0",
            actual=f"{last!r:.100}",
        )
    return {name: value for name, value in state.items() if name not in (HANDED_OUT, OVER)}, within, last


def _check_ranks(state: dict[str, Any], dp: int, size: int, where: str) -> None:
    """Refuses a state within a micro batch of other ranks, or of another size. It is one that its data set has read.

    Raises:
        StateInvalid: naming both.
    """
    last = state["parts"][-1]
    if (last["dp"], last["batch_size"]) != (dp, size):
        raise StateInvalid(
            f"{where}: the state stands within a micro batch of {last['batch_size']} of {last['dp']} ranks, here it is "
            f"{size} of {dp}: go on from one that was saved at the end of a micro batch",
            field=HANDED_OUT,
            expected=f"{dp} ranks, batch_size {size}",
            actual=f"{last['dp']} ranks, batch_size {last['batch_size']}",
        )


def _of_worker(state: Any, here: tuple[int, int], where: str) -> tuple[dict[str, Any], int]:
    """Returns the state of the data set with which a worker's pass began, and the samples that it has handed out since.

    Raises:
        StateInvalid: it is no state of this worker.
    """
    given = dict(state) if isinstance(state, dict) else {}
    there = given.pop(WORKER, None), given.pop(WORKERS, None)
    behind = given.pop(HANDED_OUT, None)
    if there != here or type(behind) is not int or behind < 0:
        raise StateInvalid(
            f"{where}: expected the state of DataLoader worker {here[0]} of {here[1]}, found that of {there[0]} of "
            f"{there[1]}; with another number of workers go on from what `dataset.state_dict(consumed)` gave",
            field=WORKERS,
            expected=str(here),
            actual=str(there),
        )
    return given, behind
