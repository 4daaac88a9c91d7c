"""What a data set has in common with a blend: its own indices, batches and length, and rows that were read ahead."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

import orjson
from torch.utils.data import BatchSampler, DataLoader, Dataset, get_worker_info

from lazyshard.data.index_space import Space, no_length
from lazyshard.data.rank import EPOCH, Rank, check_dealt, log
from lazyshard.data.run_state import BlendStates, RunStates, StateDicts, epoch_of
from lazyshard.data.samples import parsed_rows
from lazyshard.data.settings import ENDLESS, RunOrder
from lazyshard.errors import LengthUnknown
from lazyshard.format.state import BlendState, RunState
from lazyshard.memory import quick_loads

_OWN: Final = frozenset({"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})

_S = TypeVar("_S", bound=Space)


class Indexed(Dataset[Any], Generic[_S]):
    """A data set, or a blend, of which every index draws a sample, and each rank has indices of its own."""

    _NAME: ClassVar[str]
    _where: object
    # Of this process; `_attach` finds them: what reads, also ahead, and the shared numbers.
    _lanes: Any
    _numbers: memoryview[int]
    _attach: Callable[[], None]
    _states: RunStates | BlendStates
    _state_after: Callable[[int | None], RunState | BlendState]
    _load: Callable[[Any], None]
    _position_of: Callable[[Any, bool], int | None]
    _make_space: Callable[[int], _S]
    set_epoch: Callable[[int], None]
    in_epoch: Callable[[int], bool]
    commit: Callable[..., bool]
    # Epoch, and its indices; None before the first use. One value that is only ever replaced, so that no thread meets
    # the space of one epoch under another's number.
    _newest: tuple[int, _S] | None = None
    # A `LazyShardedStream`, or batches of a live stream, continue as long as it does.
    _length_given_up: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Settles rank and length first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self._space()
        return {name: value for name, value in vars(self).items() if name not in ("_lanes", "_numbers", "_tokens")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    def _space(self, epoch: int | None = None) -> _S:
        """Returns the indices of an epoch, None for that which is set. Raises as `_make_space`."""
        newest = self._newest
        if epoch is None:
            epoch = self._numbers[EPOCH]
        if newest is None:
            # One step, so that of two threads that come here at once both continue with the same space.
            newest = vars(self).setdefault("_newest", (epoch, self._make_space(epoch)))
        if newest[0] != epoch:
            newest = self._newest = (epoch, self._make_space(epoch))
        return newest[1]

    def _entered(self, epoch: int | None = None) -> _S:
        """Returns the indices of an epoch, to be read in this process."""
        space = self._space(epoch)
        self._lanes.enter(space)
        return space

    def _fetch(self, indices: list[int]) -> list[Any]:
        # One epoch for the whole batch, whenever another one is set.
        epoch, samples = self._numbers[EPOCH], list[Any]()
        with self._lanes:
            space = self._entered(epoch)
            while len(samples) < len(indices):
                samples += self._lanes.read(space, indices, len(samples), epoch)
        return samples

    @property
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        return self._space().rank

    @property
    def rank_indices(self) -> range:
        """The indices of this rank still to be drawn in the epoch that is set, in order: a sampler for that epoch."""
        return self._counted().lane_indices()

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._numbers[EPOCH]

    @property
    def consumed(self) -> int:
        """Samples trained in the state that was loaded, over all ranks; 0 without one, or once another epoch is set."""
        loaded = self._states.in_epoch(self.epoch)
        return 0 if loaded is None else loaded.consumed

    def batches(self, *, epochs: int = 1, **loader: Any) -> Batches:
        """Returns the micro batches of this rank, as an iterator that counts what is trained; see `Batches`.

        A live stream needs no length. An epoch of a blend ends by its `stopping`.

        Args:
            epochs: how many epochs the run has: as many times the batches are iterated over.
            loader: keyword arguments for the DataLoader, but for batch size and sampler.

        Raises RuntimeError: the data set was used since a state was loaded, and has no `micro_batches_per_step`.
        """
        order = self._states.order
        if order.micro_batches_per_step is None:
            if self._newest is not None and (self._states.loaded is not None or self._NAME == "blend"):
                raise RuntimeError(f"{self._where} is in use: call batches() before, or set micro_batches_per_step")
            order = self._states.order = replace(order, micro_batches_per_step=1)
        return Batches(self, order, epochs, loader)

    def _give_up_length(self) -> None:
        """Continues for ever, from epoch to epoch, as an iterable without a length does. Or raises RuntimeError."""
        order = self._states.order
        if self._newest is not None or order.blended:
            raise RuntimeError(f"{self._where}: a LazyShardedStream takes what is not used yet and in no blend")
        self._length_given_up = order.num_samples is None
        self._states.order = replace(order, num_samples=order.num_samples or ENDLESS)

    def _counted(self) -> _S:
        """Returns the indices of the epoch that is set. Raises LengthUnknown: their number means nothing."""
        if self._length_given_up:
            raise no_length(self._where, "a LazyShardedStream draws from it: give the stream to the loader")
        return self._space()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run, plain values for any checkpoint; the same on every rank.

        Args:
            consumed: samples that were trained, over all ranks, since the run began; where `set_epoch` begins the
                epochs, since this one began. None for what was loaded.

        Raises ValueError: these are no whole micro batches of all ranks, fewer samples than the loaded state had
        trained, or more than there are indices; TypeError: it is no integer.
        """
        return self._state_after(consumed).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a run stands, with any number of ranks: `rank_indices` then are what is left.

        A blend also continues with other weights, and with streams added or left out. To be called before the data set
        is used. In a DataLoader worker it only checks that the state is the one that the data set began with.

        `state` is what `state_dict` returned, of the same stream, `order` and `max_total_samples`.

        Raises:
            StateInvalid, VersionUnsupported: it cannot be used.
            StateMismatch: it is of another stream or of other settings, continues with chunks that are deleted, or the
                stream is shorter than what was drawn; that of a blend knows none of the streams.
            RuntimeError: the data set is used already, and stands elsewhere.
        """
        self._go_on(state, anywhere=False)

    def _go_on(self, state: dict[str, Any], *, anywhere: bool = True) -> tuple[int, int] | None:
        """Loads a state, once used one of the same course; returns its epoch and position, None before that."""
        found, in_worker = self._states.read(state), get_worker_info() is not None
        if self._newest is None and not in_worker:
            self._load(found)
            return None
        was, epoch = self.epoch, epoch_of(found)
        if not in_worker:
            self.set_epoch(epoch)
        with contextlib.suppress(ValueError):
            if (position := self._position_of(found, anywhere)) is not None:
                return epoch, position
        if not in_worker:
            self.set_epoch(was)
        raise RuntimeError(f"{self._where}: this {self._NAME} is in use already and stands elsewhere: take a new one")

    def __len__(self) -> int:
        """Number of indices: by `num_samples`; else those of one epoch, by `max_total_samples` if first asked live.

        Raises:
            LengthUnknown: the stream was live and there is neither of the two; or a `LazyShardedStream` draws from it.
            WaitTimeout: with `Order(unit="auto")`, as the first use of the data set.
            ValueError: `num_samples` is less than one batch of every rank.
            ConfigInvalid: a DataLoader without a sampler asks, which would draw everything on each of several ranks.
        """
        space = self._counted()
        check_dealt(space.rank, self._NAME, self._where)
        return space.layout.size

    def _lengths(self) -> Any:
        raise TypeError("a blend has no lengths, and its indices are integers, got 'lengths'")

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns a sample, waiting for it if it is not published yet; or the lengths of all.

        ``dataset["lengths"]``, for samplers that group by length: tokens of the sample that each index draws in the
        epoch that is set, int32 (or int64) of shape (len(dataset),), of a single stream with lengths that has ended.

        Raises:
            IndexError: outside the data set.
            TypeError: neither an index nor "lengths".
            LengthUnknown: the stream is live, or the lengths are not known.
            WaitTimeout: not published within `max_wait`.
            ChunkRetired: its chunk was deleted by the producer.
            BadSample, ChunkCorrupt, RowInvalid: see `BadRows`; or the steps drop row after row, 10,000 of them.
        """
        if type(index) is not int:
            if index == "lengths" and isinstance(index, str):
                return self._lengths()
            # numpy's and torch's small integers wrap where they are subtracted.
            index = operator.index(index)
        first, step, epoch, lines, rows_of = self._lanes.ahead
        place = index - first
        if step != 1:
            place = -1 if place % step else place // step
        if rows_of is not None and 0 <= place < len(lines) and epoch == self._numbers[EPOCH]:
            if rows_of is not parsed_rows:
                return rows_of([lines[place]], None)[0]
            try:
                row = quick_loads(lines[place])
            except orjson.JSONDecodeError:
                row = None
            if type(row) is dict:
                return row
        return self._fetch([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples of a batch. Raises as `__getitem__` does."""
        first, step, epoch, lines, rows_of = self._lanes.ahead
        # Anything but a list of ints that follow each other in such steps is none of these lines.
        if rows_of is not None and epoch == self._numbers[EPOCH] and type(indices) is list and indices:
            start, size = indices[0], len(indices)
            place, beside = divmod(start - first, step) if type(start) is int else (-1, 0)
            there = not beside and 0 <= place <= len(lines) - size
            if there and indices == list(range(start, start + size * step, step)):
                rows: list[Any] = rows_of(lines[place : place + size], None)
                if rows:
                    return rows
        return self._fetch(list(map(operator.index, indices)))


class Batches(Iterator[Any]):
    """The micro batches of this rank, from where the run stands to the end of the epoch; made by `dataset.batches`.

    ::

        batches = dataset.batches(num_workers=2, collate_fn=collate)
        for batch in batches:
            train(batch)
            if batches.step % 100 == 0:
                save({"model": model.state_dict(), "data": batches.state_dict()})
                batches.commit()

    A micro batch counts as trained once it was handed out, so save after training on it; what workers read ahead never
    counts. The epoch ends on every rank after as many micro batches, and after a whole optimiser step: with
    `micro_batches_per_step`, fewer micro batches than a step takes are left over.

    A loop that was left with `break`, or by an error, continues in the next ``for``. A ``for`` behind the end of an
    epoch begins the next one, of as many as `epochs` says; `dataset.set_epoch` sets another one.

    Raises:
        ValueError: there is no such number of epochs, or `num_samples` says how long the run is.
        TypeError: an option of the DataLoader is that of the data set.
    """

    def __init__(self, dataset: Indexed[Any], order: RunOrder, epochs: int, options: dict[str, Any]) -> None:
        if type(epochs) is not int or epochs < 1:
            raise ValueError(f"epochs is an integer from 1, got {epochs!r}")
        if epochs > 1 and not order.by_epoch:
            raise ValueError("with num_samples the run ends there, however many epochs that takes: leave epochs out")
        if own := ", ".join(sorted(_OWN & options.keys())):
            raise TypeError(f"{own}: the data set decides that in batches(); give it the batch_size")
        self._dataset, self._options, self._size = dataset, options, order.batch_size
        self._per_step = order.draws_per_step // order.batch_size
        self._epochs = epochs if order.by_epoch else None
        self._sampler = BatchSampler(range(0), self._size, drop_last=False)
        self._running: Any = None
        self._loader = self._make_loader()
        # What follows is that of the epoch, which is begun once somebody asks: a state may be loaded before.
        self._epoch: int | None = None
        self._indices, self._over = range(0), False
        # Samples, and micro batches of the state's current part, that were trained before; steps before that part; and
        # micro batches that were handed out since.
        self._consumed = self._before = self._first_step = self._trained = 0

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._dataset.epoch

    @property
    def consumed(self) -> int:
        """Samples trained over all ranks, in whole steps, since the run began; with `set_epoch` since the epoch did."""
        behind = self._behind()
        trained = max(0, behind - behind % self._per_step - self._before)
        return self._consumed + trained * self._size * self._dataset.rank.dp_size

    @property
    def step(self) -> int:
        """Whole optimiser steps handed out, counted as `consumed`, and as `lazyshard trace` numbers them."""
        return self._behind() // self._per_step + self._first_step  # `_behind` may begin an epoch

    @property
    def step_complete(self) -> bool:
        """Whether the micro batch handed out last is the last one of its optimiser step."""
        return self._behind() % self._per_step == 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run after `step`, the last whole one: plain values, the same on every rank."""
        return self._dataset.state_dict(self.consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a run stands, with any number of ranks: as `load_state_dict` of the data set, as early."""
        self._dataset.load_state_dict(state)
        self._epoch = None

    def commit(self, *, last_epoch: bool | None = None, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Tells the producer that the checkpoint with `state_dict()` is safely on disk, as `commit` of the data set.

        `last_epoch` None is as `epochs` says; where `num_samples` says how long the run is, it keeps every chunk.
        """
        if last_epoch is None:
            last_epoch = self._epochs is not None and self.epoch + 1 >= self._epochs
        return self._dataset.commit(self.consumed, last_epoch=last_epoch, keep=keep, take_over=take_over)

    def __iter__(self) -> Batches:
        """Continues, or begins the next epoch at the end of this one. Raises RuntimeError: there is none any more."""
        self._behind()
        if self._epochs is None and self._over:
            raise RuntimeError("all of num_samples is trained: a longer run takes a larger number")
        if self._epochs is not None and self.epoch + self._over >= self._epochs:
            raise RuntimeError(f"the run has {self._epochs} epochs: batches(epochs=...) says how many there are")
        if self._over:
            self._dataset.set_epoch(self.epoch + 1)
        return self

    def __next__(self) -> Any:
        """Returns the next micro batch, waiting for what is not published yet. Raises as the data set does."""
        self._behind()
        if self._over or not self._goes_on():
            if not self._over and self._dataset.rank.dp_rank == 0:
                self._tell_end()
            self._over, self._running = True, None
            raise StopIteration
        try:
            if self._running is None:
                self._sampler.sampler = self._indices[self._trained * self._size :]
                self._running = iter(self._loader)
            batch = next(self._running)
        except BaseException:
            # It would continue behind what it has failed to hand out. Its workers end here, not with the traceback.
            getattr(self._running, "_shutdown_workers", int)()
            self._loader, self._running = self._make_loader(), None
            raise
        self._trained += 1
        return batch

    def _tell_end(self) -> None:
        if not self._trained:
            log.warning("epoch %d is trained already: it ended with step %d", self.epoch, self.step)
        elif self._epochs is not None:
            # The last index of each micro batch that is left.
            ends = self._indices[(self._trained + 1) * self._size - 1 :: self._size]
            left = sum(1 for _ in itertools.takewhile(self._dataset.in_epoch, ends))
            if samples := left * self._size * self._dataset.rank.dp_size:
                said = "epoch %d ends with step %d; left over are %d, too few for the %d micro batches of a step"
                log.warning(said, self.epoch, self.step, samples, self._per_step)

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(self._dataset, batch_sampler=self._sampler, **self._options)

    def _behind(self) -> int:
        """Returns how many micro batches of the state's current part were trained; begins the epoch that is set."""
        if self._epoch != self._dataset.epoch:
            try:
                self._dataset._space()
            except LengthUnknown:
                self._dataset._give_up_length()
            self._indices, state = self._dataset._space().lane_indices(), self._dataset._state_after(None)
            self._consumed, self._before = state.consumed, state.parts[-1].draws // self._size
            self._first_step = state.parts[-1].first_step
            self._epoch, self._trained, self._running, self._over = self._dataset.epoch, 0, None, False
        return self._before + self._trained

    def _goes_on(self) -> bool:
        """Returns whether the next micro batch is one of a whole step in this epoch, waiting until that is certain."""
        within = self._behind() % self._per_step
        if within and self._trained:
            return True
        last = (self._trained + self._per_step - within) * self._size - 1
        return last < len(self._indices) and (self._epochs is None or self._dataset.in_epoch(self._indices[last]))
