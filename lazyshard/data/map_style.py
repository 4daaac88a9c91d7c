"""Common base of a data set and a blend: rank indices, batches, length, and rows that were read ahead."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar

import orjson
from torch.utils.data import BatchSampler, DataLoader, Dataset, get_worker_info

from lazyshard.data.index_space import Space, no_length
from lazyshard.data.rank import EPOCH, Rank, check_dealt, log
from lazyshard.data.run_state import RunStates, StateDicts, epoch_of
from lazyshard.data.samples import parsed_rows
from lazyshard.data.settings import ENDLESS, RunOrder
from lazyshard.errors import LengthUnknown
from lazyshard.format.state import BlendState, RunState
from lazyshard.memory import quick_loads
from lazyshard.plan.deal import check_field

if TYPE_CHECKING:
    from lazyshard.data.blend_state import BlendStates

_OWN: Final = frozenset({"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})

_S = TypeVar("_S", bound=Space)


class Indexed(Dataset[Any], Generic[_S]):
    """A data set, or a blend, in which every index draws a sample and each rank has its own indices."""

    _NAME: ClassVar[str]
    _where: object
    # Set by `_attach` in each process: the reader, which also reads ahead, and the shared numbers.
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
    # Epoch and its indices; None before the first use. Only ever replaced as one value, so that no thread sees the
    # space of one epoch with the number of another.
    _newest: tuple[int, _S] | None = None
    # Set if a `LazyShardedStream`, or batches of a live stream, draw from it without a known length.
    _length_given_up: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Resolves rank and length first: a spawned worker cannot query Megatron or torch.distributed."""
        self._space()
        return {name: value for name, value in vars(self).items() if name not in ("_lanes", "_numbers", "_tokens")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    def _space(self, epoch: int | None = None) -> _S:
        """Returns the indices of an epoch, by default of the current one. Raises the errors of `_make_space`."""
        newest = self._newest
        if epoch is None:
            epoch = self._numbers[EPOCH]
        if newest is None:
            # One atomic step: if two threads get here at the same time, both continue with the same space.
            newest = vars(self).setdefault("_newest", (epoch, self._make_space(epoch)))
        if newest[0] != epoch:
            newest = self._newest = (epoch, self._make_space(epoch))
        return newest[1]

    def _entered(self, epoch: int | None = None) -> _S:
        """Returns the indices of an epoch and prepares to read them in this process."""
        space = self._space(epoch)
        self._lanes.enter(space)
        return space

    def _fetch(self, indices: list[int]) -> list[Any]:
        # The whole batch uses one epoch, even if another one is set meanwhile.
        epoch, lanes, samples = self._numbers[EPOCH], self._lanes, list[Any]()
        with lanes:
            space = self._entered(epoch)
            while len(samples) < len(indices):
                samples += lanes.read(space, indices, len(samples), epoch)
        return samples

    @property
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        return self._space().rank

    @property
    def rank_indices(self) -> range:
        """The indices that this rank still has to draw in the current epoch, in order: a sampler for that epoch."""
        return self._counted().lane_indices()

    @property
    def epoch(self) -> int:
        """The current epoch: initially 0, that of the state once one is loaded."""
        return self._numbers[EPOCH]

    @property
    def consumed(self) -> int:
        """Samples trained in the loaded state, over all ranks; 0 without a state, or once another epoch is set."""
        loaded = self._states.in_epoch(self.epoch)
        return 0 if loaded is None else loaded.consumed

    def batches(self, *, epochs: int = 1, **loader: Any) -> Batches:
        """Returns an iterator over the micro batches of this rank that counts the trained samples; see `Batches`.

        A live stream needs no length. An epoch of a blend ends according to its `stopping`.

        Args:
            epochs: number of epochs of the run; iterate over the batches once per epoch.
            loader: keyword arguments of the DataLoader, except for batch size and sampler.

        Raises RuntimeError: the data set was used since a state was loaded and has no `micro_batches_per_step`.
        """
        order = self._states.order
        if order.micro_batches_per_step is None:
            if self._newest is not None and (self._states.loaded is not None or self._NAME == "blend"):
                raise RuntimeError(f"{self._where} is in use: call batches() first, or set micro_batches_per_step")
            order = self._states.order = replace(order, micro_batches_per_step=1)
        return Batches(self, order, epochs, loader)

    def _give_up_length(self) -> None:
        """Makes the indices continue without an end, from epoch to epoch, for an iterable. Raises RuntimeError."""
        order = self._states.order
        if self._newest is not None or order.blended:
            raise RuntimeError(f"{self._where}: a LazyShardedStream needs a data set that is unused and in no blend")
        self._length_given_up = order.num_samples is None
        self._states.order = replace(order, num_samples=order.num_samples or ENDLESS)

    def _counted(self) -> _S:
        """Returns the indices of the current epoch. Raises LengthUnknown if their number has no meaning."""
        if self._length_given_up:
            raise no_length(self._where, "a LazyShardedStream draws from it: pass the stream to the loader")
        return self._space()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run as plain values for any checkpoint; the same on every rank.

        Args:
            consumed: number of samples trained, over all ranks, since the run began, or since the epoch began if the
                epochs are begun with `set_epoch`. None for that of the loaded state.

        Raises ValueError: it is not a whole number of micro batches of all ranks, less than in the loaded state, or
        more than there are indices; TypeError: it is not an integer.
        """
        return self._state_after(consumed).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes a run, with any number of ranks: `rank_indices` then are the remaining indices.

        A blend can also resume with other weights and with streams added or removed. Call it before the data set is
        used. In a DataLoader worker it only checks that the data set began with this state.

        `state` is the result of `state_dict`, for the same stream, `order` and `max_total_samples`.

        Raises:
            StateInvalid, VersionUnsupported: the state cannot be used.
            StateMismatch: it belongs to another stream or other settings, it continues with deleted chunks, the stream
                is shorter than what was drawn, or a blend's state contains none of the streams.
            RuntimeError: the data set was already used and is at another position.
        """
        self._resume(state, anywhere=False)

    def _resume(self, state: dict[str, Any], *, anywhere: bool = True) -> tuple[int, int] | None:
        """Loads a state; once used, only one of the same course. Returns its epoch and position, None if unused."""
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
        text = f"this {self._NAME} is already in use and at another position: create a new one"
        raise RuntimeError(f"{self._where}: {text}")

    def __len__(self) -> int:
        """Number of indices: that of `num_samples`, else of one epoch (of `max_total_samples` if live when first read).

        Raises:
            LengthUnknown: the stream was live and neither setting is given, or a `LazyShardedStream` draws from it.
            WaitTimeout: with `Order(unit="auto")`, as for the first use of the data set.
            ValueError: `num_samples` is less than one batch for every rank.
            ConfigInvalid: called for a DataLoader without a sampler, which would draw everything on each of several
                ranks.
        """
        space = self._counted()
        check_dealt(space.rank, self._NAME, self._where)
        return space.layout.size

    def _lengths(self) -> Any:
        raise TypeError("a blend has no lengths, and its indices are integers, got 'lengths'")

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns a sample, waiting for it if it is not published yet; or the lengths of all samples.

        ``dataset["lengths"]`` is for samplers that group by length: the number of tokens of the sample that each index
        draws in the current epoch, int32 (or int64) of shape (len(dataset),), for a single ended stream with lengths.

        Raises:
            IndexError: the index is outside the data set.
            TypeError: neither an index nor "lengths".
            LengthUnknown: the stream is live, or the lengths are not known.
            WaitTimeout: the sample was not published within `max_wait`.
            ChunkRetired: the producer deleted its chunk.
            BadSample, ChunkCorrupt, RowInvalid: see `BadRows`; or the steps dropped 10,000 rows in a row.
        """
        if type(index) is not int:
            if index == "lengths" and isinstance(index, str):
                return self._lengths()
            # Subtracting small integers of numpy or torch wraps around.
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
        # Only a list of ints at exactly this step can be served from the lines read ahead.
        if rows_of is not None and epoch == self._numbers[EPOCH] and type(indices) is list and indices:
            start, size = indices[0], len(indices)
            place, rest = divmod(start - first, step) if type(start) is int else (-1, 0)
            there = not rest and 0 <= place <= len(lines) - size
            if there and indices == list(range(start, start + size * step, step)):
                rows: list[Any] = rows_of(lines[place : place + size], None)
                if rows:
                    return rows
        return self._fetch(list(map(operator.index, indices)))


class Batches(Iterator[Any]):
    """The micro batches of this rank, from the position of the run to the end of the epoch; made by `dataset.batches`.

    ::

        batches = dataset.batches(num_workers=2, collate_fn=collate)
        for batch in batches:
            train(batch)
            if batches.step % 100 == 0:
                save({"model": model.state_dict(), "data": batches.state_dict()})
                batches.commit()

    A micro batch counts as trained once it is returned, so save after training on it; batches that workers prefetch are
    not counted. The epoch ends on every rank after the same number of micro batches, and after a whole optimiser step:
    with `micro_batches_per_step`, a remainder of fewer micro batches than one step is left over.

    After a `break` or an error, the next ``for`` continues the epoch. A ``for`` after the end of an epoch begins the
    next of `epochs` epochs; `dataset.set_epoch` sets another one.

    Raises:
        ValueError: the number of epochs is invalid, or `num_samples` already sets the length of the run.
        TypeError: an option of the DataLoader is one that the data set decides.
    """

    def __init__(self, dataset: Indexed[Any], order: RunOrder, epochs: int, options: dict[str, Any]) -> None:
        check_field("epochs", epochs, 1)
        if epochs > 1 and not order.by_epoch:
            raise ValueError("num_samples sets the length of the run, over any number of epochs: omit epochs")
        if own := ", ".join(sorted(_OWN & options.keys())):
            raise TypeError(f"{own}: the data set sets this: pass it batch_size=, order=Order(shuffle_window=N)")
        self._dataset, self._options, self._size = dataset, options, order.batch_size
        self._per_step = order.draws_per_step // order.batch_size
        self._epochs = epochs if order.by_epoch else None
        self._sampler = BatchSampler(range(0), self._size, drop_last=False)
        self._running: Any = None
        self._loader = self._make_loader()
        # Values of the epoch, set at its first use, so that a state may still be loaded before.
        self._epoch: int | None = None
        self._indices, self._over = range(0), False
        # Trained before: samples, and micro batches of the state's current part. Then the steps before that part, and
        # the micro batches returned since.
        self._consumed = self._before = self._first_step = self._trained = 0

    @property
    def epoch(self) -> int:
        """The current epoch: initially 0, that of the state once one is loaded."""
        return self._dataset.epoch

    @property
    def consumed(self) -> int:
        """Samples trained over all ranks, in whole steps, since the run began, or since the epoch with `set_epoch`."""
        count = self._trained_in_part()
        trained = max(0, count - count % self._per_step - self._before)
        return self._consumed + trained * self._size * self._dataset.rank.dp_size

    @property
    def step(self) -> int:
        """Whole optimiser steps returned, counted like `consumed` and numbered as in `lazyshard trace`."""
        # In this order: `_trained_in_part` may begin an epoch, which sets `_first_step`.
        return self._trained_in_part() // self._per_step + self._first_step

    @property
    def step_complete(self) -> bool:
        """Whether the last returned micro batch is the last one of its optimiser step."""
        return self._trained_in_part() % self._per_step == 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run after `step`, the last whole step: plain values, the same on every rank."""
        return self._dataset.state_dict(self.consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes a run, with any number of ranks. Same conditions and errors as the data set's `load_state_dict`."""
        self._dataset.load_state_dict(state)
        self._epoch = None

    def commit(self, *, last_epoch: bool | None = None, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Reports that the checkpoint with `state_dict()` is safely on disk; see `commit` of the data set.

        `last_epoch` None derives it from `epochs`; if `num_samples` sets the length of the run, every chunk is kept.
        """
        if last_epoch is None:
            last_epoch = self._epochs is not None and self.epoch + 1 >= self._epochs
        return self._dataset.commit(self.consumed, last_epoch=last_epoch, keep=keep, take_over=take_over)

    def __iter__(self) -> Batches:
        """Continues the epoch, or begins the next one at its end. Raises RuntimeError: no epoch is left."""
        self._trained_in_part()
        if self._epochs is None and self._over:
            raise RuntimeError("all of num_samples is trained: set a larger num_samples for a longer run")
        if self._epochs is not None and self.epoch + self._over >= self._epochs:
            raise RuntimeError(f"the run has {self._epochs} epochs: batches(epochs=...) sets their number")
        if self._over:
            self._dataset.set_epoch(self.epoch + 1)
        return self

    def __next__(self) -> Any:
        """Returns the next micro batch, waiting for unpublished samples. Raises the errors of the data set."""
        self._trained_in_part()
        if self._over or not self._has_next():
            if not self._over and self._dataset.rank.dp_rank == 0:
                self._log_end()
            self._over, self._running = True, None
            raise StopIteration
        try:
            if self._running is None:
                self._sampler.sampler = self._indices[self._trained * self._size :]
                self._running = iter(self._loader)
            batch = next(self._running)
        except BaseException:
            # This iterator would skip the batch that failed. Shut its workers down now, not with the traceback.
            getattr(self._running, "_shutdown_workers", int)()
            self._loader, self._running = self._make_loader(), None
            raise
        self._trained += 1
        return batch

    def _log_end(self) -> None:
        if not self._trained and not self.step:
            log.warning("epoch %d has no step: fewer samples are left than in one micro batch of all ranks", self.epoch)
        elif not self._trained:
            what = "epoch %d is trained already: it ended with step %d; for more epochs give batches(epochs=N)"
            log.warning(what, self.epoch, self.step)
        elif self._epochs is not None:
            # The last index of each remaining micro batch.
            ends = self._indices[(self._trained + 1) * self._size - 1 :: self._size]
            left = sum(1 for _ in itertools.takewhile(self._dataset.in_epoch, ends))
            if samples := left * self._size * self._dataset.rank.dp_size:
                said = "epoch %d ends with step %d; left over: %d samples, too few for the %d micro batches of a step"
                log.warning(said, self.epoch, self.step, samples, self._per_step)

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(self._dataset, batch_sampler=self._sampler, **self._options)

    def _trained_in_part(self) -> int:
        """Returns how many micro batches of the state's current part were trained; begins the current epoch."""
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

    def _has_next(self) -> bool:
        """Returns whether the next micro batch belongs to a whole step of this epoch, waiting until that is decided."""
        within = self._trained_in_part() % self._per_step
        if within and self._trained:
            return True
        last = (self._trained + self._per_step - within) * self._size - 1
        return last < len(self._indices) and (self._epochs is None or self._dataset.in_epoch(self._indices[last]))
