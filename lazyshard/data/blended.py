"""`BlendedDataset`: several streams as one data set, by weights."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from lazyshard.data.batches import Batches
from lazyshard.data.blend_space import BlendReader, BlendSpace
from lazyshard.data.blend_state import (
    BlendStates,
    Stopping,
    blend_members,
    blend_schedule,
    check_settings,
    epoch_of_blend,
    stream_names,
    trained,
)
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_space import length_given_up
from lazyshard.data.lane import place_ahead
from lazyshard.data.rank import Rank, check_dealt
from lazyshard.data.run_state import only_of_a_stream
from lazyshard.data.settings import ENDLESS, Order, check_group
from lazyshard.data.shared import ASKED, EPOCH, Stats
from lazyshard.errors import ConfigInvalid, LazyShardError, LengthUnknown, StateInvalid
from lazyshard.format.cursor import blend_shares
from lazyshard.format.state import BlendState
from lazyshard.plan.course import Draw

_log = logging.getLogger("lazyshard")


class BlendDraw(NamedTuple):
    """What an index of a blend draws: which of its data sets, and epoch and sample in that."""

    dataset: int
    draw: Draw


class BlendedDataset(Dataset[Any]):
    """Streams as one map-style data set, in the proportion of their weights, on every rank alike.

    ::

        blend = BlendedDataset(
            [(LazyShardedDataset("chat", encode), 0.8), (LazyShardedDataset("code", encode), 0.2)],
            batch_size=8,
            num_samples=1_000_000,
        )
        for batch in blend.batches(num_workers=4):
            train(batch)

    At each position every rank draws from the same stream: that which lags most behind its share, the first of equals
    (Megatron Core's `BlendedDataset`), by a table that repeats, so that any position is found at once. A stream that
    comes to its end goes on with its next epoch. Nothing is written to disk, and no rank talks to another.

    Args:
        datasets: data sets and their weights, in samples. The data sets are new ones, each of another stream, with any
            settings but these of their own: `batch_size`, `num_samples`, and `layout` and `micro_batches_per_step` of
            the order are the blend's. Weights are divided by their sum; `shares` says what came of it.
        batch_size: samples of one rank in a micro batch.
        num_samples: samples over all ranks, however many epochs of a stream that takes. None to end by `stopping`.
        stopping: "first_exhausted": before the first sample that would begin another epoch of any stream.
            "all_exhausted": once every stream was drawn whole, the others repeating meanwhile.
        schedule: other weights on the way: optimiser steps, counted from the beginning of the run, and the weights of
            all data sets from there on. Those of `datasets` hold until the first one. A weight may be 0 for a while.
            Needs `Order(micro_batches_per_step=...)`.
        order: `layout` and `micro_batches_per_step`; unit, window and seed are those of each data set.

    Raises:
        TypeError: these are no pairs of a data set and a weight, or of a step and weights.
        ValueError: there is no data set, weights are negative or all 0, two are of the same stream, or a setting is
            wrong.
        RuntimeError: a data set is used already.
        ConfigInvalid: the data sets are of different ranks.

    On resume weights may be others, and streams may be added or left out: each goes on where it was.
    """

    def __init__(
        self,
        datasets: Iterable[tuple[LazyShardedDataset, float]],
        *,
        batch_size: int = 1,
        num_samples: int | None = None,
        stopping: Stopping = "first_exhausted",
        schedule: Iterable[tuple[int, Sequence[float]]] = (),
        order: Order = Order(),
    ) -> None:
        check_group("order", order, Order)
        self._datasets, weights = blend_members(datasets)
        self._schedule = blend_schedule(weights, schedule)
        check_settings(batch_size, num_samples, stopping, order)
        self._names = stream_names(self._datasets)
        for dataset in self._datasets:
            dataset._draws.enter_blend()
        self._batch_size = batch_size
        self._num_samples = num_samples
        self._stopping: Stopping = stopping
        self._layout = order.layout
        draws_per_step = batch_size * (order.micro_batches_per_step or 0)
        if not self._schedule.constant and not draws_per_step:
            raise ValueError("a schedule counts in optimiser steps: give order=Order(micro_batches_per_step=...)")
        self._states = BlendStates(self._names, self._schedule, batch_size, draws_per_step)
        # Epoch, and its indices; None before the first use.
        self._newest: tuple[int, BlendSpace] | None = None
        self._length_given_up = False
        # The epoch is that of the data sets: they tell their workers.
        self._numbers = self._datasets[0]._draws.numbers
        self._reader = BlendReader(self._datasets)

    def __getstate__(self) -> dict[str, Any]:
        """Settles rank and length first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self._space()
        return {name: value for name, value in self.__dict__.items() if name != "_numbers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._numbers = self._datasets[0]._draws.numbers

    def __repr__(self) -> str:
        """Tells what is blended; never waits, never raises."""
        if "_reader" not in vars(self):
            return f"<{type(self).__name__}, not open>"
        streams = ", ".join(
            f"{share:.4g} of {dataset!r}" for dataset, share in zip(self._datasets, self.shares, strict=True)
        )
        return f"<{type(self).__name__}: {streams}>"

    @property
    def datasets(self) -> tuple[LazyShardedDataset, ...]:
        """The data sets that are blended, in order."""
        return tuple(self._datasets)

    @property
    def names(self) -> tuple[str, ...]:
        """How a state calls the streams, in order: by their identities, or their directories where they have none."""
        return tuple(self._names)

    @property
    def shares(self) -> tuple[float, ...]:
        """What each data set gives of all samples: its weight divided by their sum, as whole draws of a period.

        With a schedule at its beginning; `shares_at` tells of later.
        """
        return self.shares_at(0)

    @property
    def period(self) -> int:
        """Positions after which each stream has had exactly its share."""
        return sum(self._schedule.parts(0))

    def shares_at(self, step: int) -> tuple[float, ...]:
        """Returns what each data set gives of the samples of an optimiser step, the first one of a run being 0."""
        parts = self._schedule.parts(step)
        return tuple(part / sum(parts) for part in parts)

    @property
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        return self._space().rank

    @property
    def rank_indices(self) -> range:
        """The indices of this rank that are still to be drawn, in order: a sampler. As of `LazyShardedDataset`."""
        if self._length_given_up:
            raise length_given_up("the blend")
        return self._left()

    def batches(self, *, epochs: int = 1, **loader: Any) -> Batches:
        """Returns the micro batches of this rank, as `LazyShardedDataset.batches`; an epoch ends by `stopping`."""
        if not self._states.draws_per_step:
            if self._newest is not None:
                raise RuntimeError(
                    "this blend is in use already, call batches() before its rank or its length is asked for, or give "
                    "it order=Order(micro_batches_per_step=1)"
                )
            self._states.draws_per_step = self._batch_size
        per_step = self._states.draws_per_step // self._batch_size
        by_epoch = self._num_samples in (None, ENDLESS)
        return Batches(self, self._batch_size, per_step, epochs, by_epoch, loader)

    def _left(self) -> range:
        try:
            space = self._space()
        except LengthUnknown:
            self._give_up_length()
            space = self._space()
        return space.layout.lane_indices(space.rank.dp_rank)[space.part.draws :]

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._datasets[0].epoch

    @property
    def consumed(self) -> int:
        """Samples trained in the state that was loaded, over all ranks; 0 without one, or once another epoch is set."""
        return self._states.consumed(self.epoch)

    @property
    def consumed_before(self) -> int:
        """Samples trained before the positions from which `rank_indices` count, over all ranks."""
        return trained(self._states.before(self.epoch, self._space().part))

    def ready(self, index: int) -> bool:
        """Returns whether a sample can be read without waiting, as far as is known without a look."""
        stream, inner = self._space().locate(operator.index(index))
        dataset = self._datasets[stream]
        return dataset._draws.indices().ready(inner)

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch, of every stream and of the blend. Raises ValueError if it is negative."""
        for dataset in self._datasets:
            dataset.set_epoch(epoch)

    def stats(self) -> tuple[Stats, ...]:
        """Returns what the processes of each data set have met so far."""
        return tuple(dataset.stats() for dataset in self._datasets)

    def __len__(self) -> int:
        """Number of indices: by `num_samples`, or until `stopping`.

        Raises:
            LengthUnknown: a stream was live, and there is neither `num_samples` nor its `max_total_samples`.
            ValueError: it is less than one batch of every rank.
        """
        if self._length_given_up:
            raise length_given_up("the blend")
        space = self._space()
        check_dealt(space.rank, "blend", "the blend")
        return space.layout.size

    def __getitem__(self, index: int) -> Any:
        """Returns a sample. Raises as `LazyShardedDataset.__getitem__` does."""
        index = operator.index(index)
        first, step, epoch, lines, rows_of = self._reader.merged
        place = index - first
        if step != 1:
            place = -1 if place % step else place // step
        if 0 <= place < len(lines) and rows_of is not None and epoch == self._numbers[EPOCH]:
            rows = rows_of([lines[place]], None)
            if rows:
                return rows[0]
        return self._fetch([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples of a batch. Raises as `__getitem__` does."""
        first, step, epoch, lines, rows_of = self._reader.merged
        if rows_of is not None and epoch == self._numbers[EPOCH]:
            place = place_ahead(indices, first, step, len(lines))
            if place >= 0 and (rows := rows_of(lines[place : place + len(indices)], None)):
                return rows
        return self._fetch(list(map(operator.index, indices)))

    def _fetch(self, wanted: list[int]) -> list[Any]:
        samples: list[Any] = []
        epoch = self._numbers[EPOCH]
        try:
            while len(samples) < len(wanted):
                samples += self._reader.read(self._space(), wanted, len(samples), epoch)
        except LazyShardError as error:
            if get_worker_info() is not None:
                error.carry_fields()
            raise
        return samples

    def draw(self, index: int) -> BlendDraw:
        """Returns what an index draws, without reading it. Waits and raises as `LazyShardedDataset.draw` does."""
        stream, inner = self._space().locate(operator.index(index))
        return BlendDraw(stream, self._datasets[stream].draw(inner))

    def in_epoch(self, index: int) -> bool:
        """Returns whether the blend, by `stopping`, has not come to its end within the micro batch of an index.

        The same on every rank, for live streams too. Waits and raises as `draw` does.
        """
        if self._stopping == "first_exhausted":
            # What one of them would draw of its next epoch is not trained.
            for dataset in self._datasets:
                dataset._draws.numbers[ASKED] = 1
        return self._goes_on(self._space(), operator.index(index), self.epoch)

    def _goes_on(self, space: BlendSpace, index: int, epoch: int) -> bool:
        position, size = space.layout.locate(index)[1], space.part.batch_size
        # Batches are trained whole: the one that would draw too much is not, the one with what is missing still is.
        begin = position - position % size
        # Where one that has ended is exhausted, the others need not be waited for.
        drawn = zip(self._datasets, space.drawn(begin + size), strict=True)
        known = sorted(drawn, key=lambda pair: not pair[0].reader.seen.ended)
        over = (_exhausted(dataset, count, epoch) for dataset, count in known)
        if self._stopping == "first_exhausted":
            return not any(over)
        # Waits until the samples up to the index are there. An epoch counts as drawn once the next one would begin.
        list(over)
        counts = zip(self._datasets, space.drawn(begin), strict=True)
        return not all(_exhausted(dataset, count + 1, epoch) for dataset, count in counts)

    def _space(self, epoch: int | None = None) -> BlendSpace:
        """Returns the indices of an epoch, None for that which is set. Raises ConfigInvalid, or as `BlendSpace`."""
        if epoch is None:
            epoch = self.epoch
        if self._newest is None or self._newest[0] != epoch:
            self._newest = (epoch, self._make_space(epoch))
        return self._newest[1]

    def _make_space(self, epoch: int) -> BlendSpace:
        ranks = {dataset.rank for dataset in self._datasets}
        if len(ranks) != 1:
            raise ConfigInvalid(f"the data sets of a blend are of one rank, got {sorted(ranks)}")
        (rank,) = ranks
        stands, lengths = [], list[int | None]()
        for dataset in self._datasets:
            course, order = dataset._draws.indices(epoch).course, dataset._draws.order
            stands.append((len(course.parts) - 1, course.current.draws))
            known = order.known_total(dataset.reader.seen)
            total = order.max_total_samples if known is None else known
            if total is None:
                lengths.append(None)
                continue
            if not course.full_epoch_length(total):
                raise ValueError(
                    f"{dataset.directory}: the stream has {total} samples, fewer than one for each of {rank.dp_size} "
                    f"ranks, so it cannot be repeated in a blend: leave it out"
                )
            lengths.append(0 if course.epoch(total) > epoch else course.epoch_length(total))
        part = self._states.part(epoch, rank, stands)
        samples = self._num_samples
        if samples is not None:
            samples -= trained(self._states.before(epoch, part))
        begun = self._states.goes_on(epoch)
        return BlendSpace(part, rank, self._layout, lengths, samples, self._stopping, begun=begun)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run, plain values for any checkpoint; the same on every rank.

        Args:
            consumed: samples that were trained, over all ranks and streams, since the run began; where `set_epoch`
                begins the epochs, since this one began. None for what was loaded.

        Raises: as `LazyShardedDataset.state_dict`.
        """
        return self._state_after(consumed).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a run stands, with any number of ranks, other weights, and streams added or left out.

        To be called before the data set is used. In a DataLoader worker it only checks that the state is the one that
        the data set began with.

        Raises:
            StateInvalid, VersionUnsupported: it cannot be used.
            StateMismatch: it knows none of the streams; or as `LazyShardedDataset.load_state_dict`, of one of them.
            RuntimeError: the data set is used already, and stands elsewhere.
        """
        if (reason := only_of_a_stream(state)) is not None:
            raise StateInvalid(f"the state of a blend: {reason}")
        found = BlendState.from_dict(state, "the state of a blend")
        if self._newest is not None or get_worker_info() is not None:
            if found == self._state_after(None):
                return
            raise RuntimeError(
                "this blend is in use already and stands elsewhere; load the state into a new one, before its length, "
                "its rank_indices or a loader's workers are asked for"
            )
        stands = self._states.load(found)
        new = [name for name in self._names if name not in stands]
        out = [found.names[member] for member in found.parts[-1].members if found.names[member] not in self._names]
        if new or out:
            _log.warning(
                "the blend goes on with other streams: new are %s, left out are %s",
                ", ".join(new) or "none",
                ", ".join(out) or "none",
            )
        for dataset, name in zip(self._datasets, self._names, strict=True):
            if name in stands:
                dataset.load_state_dict(stands[name].to_dict())
            # One that is new, or comes back from another epoch, begins this one.
            dataset.set_epoch(epoch_of_blend(found))

    def commit(
        self, consumed: int, *, last_epoch: bool, keep: Iterable[dict[str, Any]] = (), take_over: bool = False
    ) -> bool:
        """Commits how far the checkpoints are to every stream whose data set has a `consumer`.

        As `LazyShardedDataset.commit`. Of a stream that a state of `keep` does not know yet, every chunk is kept. Where
        it raises, some cursors may be written, others not: call it again.

        Args:
            consumed: as for `state_dict`.
            last_epoch: whether no stream begins another epoch. Otherwise every chunk is kept.
            keep: states of older checkpoints of the blend from which the run may still be resumed.
            take_over: as of `LazyShardedDataset.commit`.

        Returns:
            Whether this is rank 0, and the cursors were written.
        """
        committing = [pair for pair in zip(self._datasets, self._names, strict=True) if pair[0]._commits is not None]
        if not committing:
            raise ValueError("a commit is that of a consumer; make the data sets of the blend with consumer=NAME")
        state = self._state_after(consumed)
        blend = blend_shares(state, dict(zip(self._names, (one.directory for one in self._datasets), strict=True)))
        kept = [BlendState.from_dict(one, "a state to keep") for one in keep]
        wrote = False
        for dataset, name in committing:
            older = [one.members[one.names.index(name)].to_dict() for one in kept if name in one.names]
            mine = state.members[state.names.index(name)].consumed
            assert dataset._commits is not None
            dataset._commits.blend = blend
            # Who goes on from before a stream was added begins it anew, and needs all of it.
            known = len(older) == len(kept)
            wrote = dataset.commit(mine, last_epoch=last_epoch and known, keep=older, take_over=take_over)
        return wrote

    def _state_after(self, consumed: int | None) -> BlendState:
        epoch, space = self.epoch, self._space()
        position = self._states.position(epoch, space.part, consumed, space.layout.block)
        members = {}
        for dataset, name, draws in zip(self._datasets, self._names, space.drawn(position), strict=True):
            course = dataset._draws.indices().course
            members[name] = dataset._draws.state_after(course.consumed_before + course.dp * draws)
        return self._states.after(epoch, space.part, position, members)

    def _give_up_length(self) -> None:
        """Becomes the data set of an iterable without a length; see `IndexReader.give_up_length`."""
        if self._newest is not None:
            raise RuntimeError("a LazyShardedStream takes a blend that is not used yet; make a new one")
        if self._num_samples is None:
            self._num_samples, self._length_given_up = ENDLESS, True


def _exhausted(dataset: LazyShardedDataset, drawn: int, epoch: int) -> bool:
    draws = dataset._draws
    with draws:
        return drawn > 0 and draws.indices(epoch).epoch_at(drawn) > epoch
