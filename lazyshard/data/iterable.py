"""`LazyShardedStream`: what a rank draws, as an iterable that ends by itself; `LazyShardedIterable`, with a length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lazyshard.data.blend_state import epoch_of_blend
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.handed_out import Worker, check_micro_batch, check_worker, read_count
from lazyshard.data.run_state import HANDED_OUT, OVER, WORKER, WORKERS, as_count
from lazyshard.errors import LazyShardError
from lazyshard.format.state import BlendState
from lazyshard.plan.steps import AtEnd, Ending

_D = TypeVar("_D", LazyShardedDataset, BlendedDataset)


class _Begun(NamedTuple):
    """Where the passes over an epoch begin: at a position of each rank, None where the data set stands.

    `within` samples of the first micro batch are behind it already. `over` is how many samples the micro batch had that
    completed the epoch, of which nothing is left; 0 if there is.
    """

    epoch: int
    position: int | None = None
    within: int = 0
    over: int = 0


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
            ones of the epoch, of which a producer that deletes chunks may have none any more. For single streams
            without `num_samples`.

    Raises:
        ValueError: `at_end` is none of the three, or does not apply.
        RuntimeError: the data set is used already.
        TypeError: it is none of ours.
    """

    _endless: bool = True

    def __init__(self, dataset: _D, *, at_end: AtEnd = "drop") -> None:
        self._passes = _passes_of(dataset, at_end, endless=self._endless)
        self._dataset: _D = dataset
        self._at_end: AtEnd = at_end
        self._loaded = _Begun(0)
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
        return self._dataset.consumed + self._begun().over

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
            behind = self._begun().within if number == 0 else 0
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
                f"{self._where}: DataLoader workers hand the samples out, and this process cannot see how many were "
                f"trained; save `dataset.state_dict(consumed)`, or that of this iterable, or a StatefulDataLoader's own"
            )
        ours = self._pass_epoch == self.epoch
        if worker is not None:
            state = self._dataset.state_dict(self._passes.consumed(start))
            return state | {WORKER: worker.id, WORKERS: worker.num_workers, HANDED_OUT: self._behind if ours else 0}
        return self._state_at(start + (self._behind if ours else self._begun().within))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state stands, with any number of ranks and workers: the next pass begins there.

        Args:
            state: what `state_dict` returned, of this class or of the data set.

        Raises:
            StateInvalid, VersionUnsupported, StateMismatch: as `load_state_dict` of the data set; or it stands within a
                micro batch of other ranks.
            RuntimeError: the data set is used already, and the state is of another course; or it is another worker's.
        """
        worker = get_worker_info()
        if worker is not None:
            try:
                self._load_in_worker(state, (worker.id, worker.num_workers))
            except LazyShardError as error:
                error.carry_fields()
                raise
            return
        size, where = self._passes.batch_size, f"{self._where}: the state to go on from"
        within = over = 0
        # What is no state at all, or that of a worker, the data set refuses.
        if isinstance(state, dict) and WORKER not in state:
            within, over = read_count(state, HANDED_OUT, size - 1, where), read_count(state, OVER, None, where)
            state = {name: value for name, value in state.items() if name not in (HANDED_OUT, OVER)}
        start = self._passes.go_on(state)
        if within:
            last = state["parts"][-1]
            check_micro_batch((last["dp"], last["batch_size"]), (self._dataset.rank.dp_size, size), where)
        self._loaded = _Begun(self.epoch, None if start is None else start[1], within, over)
        self._behind = within
        self._pass_epoch = self.epoch
        self._workers_read[0] = False

    def commit(
        self, consumed: int, *, last_epoch: bool, keep: Iterable[dict[str, Any]] = (), take_over: bool = False
    ) -> bool:
        """Commits how far the checkpoints are: as `commit` of the data set, `consumed` as for `state_dict`."""
        count = self._state_of(consumed)["consumed"]
        kept = [{name: value for name, value in one.items() if name not in (OVER, HANDED_OUT)} for one in keep]
        return self._dataset.commit(count, last_epoch=last_epoch, keep=kept, take_over=take_over)

    @property
    def _where(self) -> str:
        return "the blend" if isinstance(self._dataset, BlendedDataset) else str(self._dataset.directory)

    def _pass(self, number: int, workers: int, behind: int) -> Iterator[Any]:
        start, size = self._position(), self._passes.batch_size
        if self._begun().over:
            return
        turn, within = divmod(behind, size)
        while samples := self._passes.samples(start, start + (turn * workers + number) * size, within):
            for sample in samples:
                self._behind += 1
                yield sample
            turn, within = turn + 1, 0

    def _begun(self) -> _Begun:
        return self._loaded if self._loaded.epoch == self.epoch else _Begun(self.epoch)

    def _position(self) -> int:
        position = self._begun().position
        return self._passes.stands() if position is None else position

    def _state_of(self, consumed: int) -> dict[str, Any]:
        count, start = as_count(consumed), self._position()
        if self._begun().over:
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
        size = self._passes.batch_size
        whole = position // size * size
        # What is dropped is not handed out, so there a place never lies behind the end.
        if self._at_end != "drop" and (stop := self._passes.stop(self._position())) is not None:
            whole = min(whole, stop)
        state, over = self._dataset.state_dict(self._passes.consumed(whole)), self._begun().over
        if position - whole == size or over:
            return state | {OVER: over or self._dataset.rank.dp_size * size}
        return state | {HANDED_OUT: position - whole} if position > whole else state

    def _load_in_worker(self, state: Any, here: Worker) -> None:
        where, given = f"{self._where}: the state to go on from", dict(state) if isinstance(state, dict) else {}
        check_worker(given, here, where)
        behind = read_count(given, HANDED_OUT, None, where)
        own = (WORKER, WORKERS, HANDED_OUT)
        start = self._passes.go_on({name: value for name, value in given.items() if name not in own})
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


class _Passes:
    """What one rank draws in a pass, micro batch by micro batch, to the end of the epoch that is set.

    Positions are those of the part of the run that is current; `drawn` is where the pass begins. `samples` waits for
    the micro batch of a position, without its first ones, none behind the end; `stop` is the position behind the whole
    micro batches, None as long as that is open; `go_on` loads a state, and returns its epoch and position, None where
    the data set was not used yet. `_part` is where the state stands, the samples before its current part, and the
    ranks.
    """

    def _part(self) -> tuple[int, int, int]:
        raise NotImplementedError

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


class _StreamPasses(_Passes):
    """Of one stream: up to the end of the epoch, or to `num_samples`; rank 0 `tells` what is left over."""

    def __init__(self, dataset: LazyShardedDataset, at_end: AtEnd, *, by_epoch: bool, tells: bool) -> None:
        self.batch_size = dataset._draws.order.batch_size
        self._dataset = dataset
        self._at_end = at_end
        self._by_epoch = by_epoch
        self._tells = tells

    def samples(self, drawn: int, position: int, within: int) -> list[Any]:
        dataset, draws = self._dataset, self._dataset._draws
        indices = draws.indices().lane_indices(position)[: self.batch_size]
        if not indices:
            return []
        if self._by_epoch and (end := draws.end_of(drawn, position)) is not None and position >= end[0]:
            return self._last(drawn, end[1], within) if position == end[0] else []
        # The rest of one alone would be taken for the batch of a loader with another batch size.
        return [dataset[index] for index in indices[within:]] if within else dataset.__getitems__(list(indices))

    def stop(self, drawn: int) -> int | None:
        space = self._dataset._draws.indices()
        if not self._by_epoch:
            return space.layout.block
        total = self._total()
        return None if total is None else space.course.epoch_stop(drawn, total)

    def completes(self, drawn: int) -> bool:
        if self._at_end == "drop" or (total := self._total()) is None:
            return False
        return Ending.of(self._dataset._draws.indices().course, drawn, total).leftover > 0

    def go_on(self, state: dict[str, Any]) -> tuple[int, int] | None:
        return self._dataset._draws.go_on(state)

    def _part(self) -> tuple[int, int, int]:
        course = self._dataset._draws.indices().course
        return course.current.draws, course.consumed_before, course.dp

    def _total(self) -> int | None:
        dataset = self._dataset
        total = dataset._draws.order.known_total(dataset.reader.seen)
        return dataset._draws.order.known_total(dataset.published()) if total is None else total

    def _last(self, drawn: int, total: int, within: int) -> list[Any]:
        draws = self._dataset._draws
        space, worker = draws.indices(), get_worker_info()
        rank, ending = space.rank, Ending.of(space.course, drawn, total)
        if self._tells and rank.dp_rank == 0 and (worker is None or worker.id == 0) and ending.leftover:
            done = {
                "drop": "they are not drawn",
                "pad": f"one more micro batch of each rank draws them, completed by the last {ending.missing} before",
                "loop": f"one more micro batch of each rank draws them, completed by the first {ending.missing}",
            }[self._at_end]
            space.tell(
                "leftover",
                f"{self._dataset.directory}: samples left over at the end of the epoch: {ending.leftover}, fewer than "
                f"dp_size * batch_size = {rank.dp_size} * {ending.batch_size}; at_end={self._at_end!r}: {done}",
            )
        return draws.read_samples(ending.batch(rank.dp_rank, self._at_end)[within:])


class _BlendPasses(_Passes):
    """Of a blend: until it ends by `stopping`, or up to `num_samples`."""

    def __init__(self, blend: BlendedDataset, *, by_stopping: bool) -> None:
        self.batch_size = blend._batch_size
        self._blend = blend
        self._by_stopping = by_stopping

    def samples(self, drawn: int, position: int, within: int) -> list[Any]:
        space = self._blend._space()
        indices = space.layout.lane_indices(space.rank.dp_rank)[position : position + self.batch_size]
        if not indices or (self._by_stopping and not self._blend.in_epoch(indices[0])):
            return []
        return self._blend.__getitems__(list(indices[within:]))

    def stop(self, drawn: int) -> int | None:
        return None if self._by_stopping else self._blend._space().layout.block

    def completes(self, drawn: int) -> bool:
        return False

    def go_on(self, state: dict[str, Any]) -> tuple[int, int] | None:
        blend, main = self._blend, get_worker_info() is None
        if main and blend._newest is None:
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
        return blend._space().part.draws, blend.consumed_before, blend.rank.dp_size


def _passes_of(
    dataset: LazyShardedDataset | BlendedDataset, at_end: AtEnd, *, endless: bool
) -> _StreamPasses | _BlendPasses:
    """Returns the passes over a data set, of which `endless` ones give its length up. Raises as `LazyShardedStream`."""
    if at_end not in get_args(AtEnd):
        raise ValueError(f"at_end is one of {', '.join(get_args(AtEnd))}, got {at_end!r}")
    if isinstance(dataset, BlendedDataset):
        if at_end != "drop":
            raise ValueError(f"at_end={at_end!r} is for a single stream: a blend ends by its `stopping`")
        passes = _BlendPasses(dataset, by_stopping=dataset._num_samples is None)
        if endless:
            dataset._give_up_length()
        return passes
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
