"""`BlendedDataset`: several streams as one data set, blended by weights."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from lazyshard.data.blend_state import BlendSpace, BlendStates
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_space import NOTHING, consecutive, still_open
from lazyshard.data.map_style import Indexed
from lazyshard.data.rank import IN_EPOCH_CALLED, Stats, log
from lazyshard.data.run_state import StateDicts, Stopping, epoch_of
from lazyshard.data.samples import RowsOf
from lazyshard.data.settings import Order, RunOrder, check_choice, check_group
from lazyshard.errors import ChunkCorrupt, ChunkRetired, ConfigInvalid, LazyShardError, RowInvalid, redact
from lazyshard.format.state import BlendState, blend_shares
from lazyshard.plan.blend import BlendSchedule, goes_on, shares
from lazyshard.plan.course import Draw
from lazyshard.store.files import stream_name
from lazyshard.stream.chunk import LARGE_ROW_BYTES

# Maximum number of lines, and of bytes, that are merged at a time.
_AHEAD_LINES: Final = 256
_AHEAD_BYTES: Final = 1 << 20


class BlendDraw(NamedTuple):
    """The draw at an index of a blend: the number of the data set, and the epoch and sample in it."""

    dataset: int
    draw: Draw


class BlendedDataset(Indexed[BlendSpace]):
    """A map-style data set that blends streams in proportion to their weights, identically on every rank.

    ::

        blend = BlendedDataset(
            [(LazyShardedDataset("chat", encode), 0.8), (LazyShardedDataset("code", encode), 0.2)],
            batch_size=8,
            num_samples=1_000_000,
        )
        for batch in blend.batches(num_workers=4):
            train(batch)

    At each position every rank draws from the same stream: the one furthest below its share, and the first of them on a
    tie (as Megatron Core's `BlendedDataset`). The table of draws is periodic, so any position is found directly. A
    stream that ends continues with its next epoch. Nothing is written to disk, and ranks do not communicate.

    Args:
        datasets: data sets and their weights, in samples. The data sets must be unused, each over another stream. All
            their settings apply except `batch_size`, `num_samples`, and the `layout` and `micro_batches_per_step` of
            their order, which the blend sets. Weights are divided by their sum; `shares` returns the result.
        batch_size: samples of one rank in a micro batch.
        num_samples: samples over all ranks, over any number of epochs of a stream. None to end by `stopping`.
        stopping: "first_exhausted" ends before the first sample that would begin another epoch of any stream.
            "all_exhausted" ends once every stream was drawn completely, while the others repeat.
        schedule: changes of the weights: pairs of an optimiser step, counted from the beginning of the run, and the
            weights of all data sets from that step on. The weights of `datasets` hold until the first change. A weight
            may be 0 for some time. Needs `Order(micro_batches_per_step=...)`.
        order: `layout` and `micro_batches_per_step`. Set all else on each data set.

    Raises:
        TypeError: an item is not a pair of a data set and a weight, or of a step and weights.
        ValueError: there is no data set, weights are negative or all 0, two data sets read the same stream, or a
            setting is invalid.
        RuntimeError: a data set was already used.
        ConfigInvalid: the data sets have different ranks.

    On resume, weights may change and streams may be added or removed; each stream continues at its position.
    """

    _NAME, _where = "blend", "the blend"

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
        pairs = _pairs(datasets, "a blend takes pairs of a data set and its weight, such as [(one, 0.8), (other, 0.2)]")
        self.datasets: tuple[LazyShardedDataset, ...] = tuple(dataset for dataset, _ in pairs)
        """The data sets that are blended, in order."""
        weights = _numbers([weight for _, weight in pairs])
        for dataset in self.datasets:
            if not isinstance(dataset, LazyShardedDataset):
                raise TypeError(f"a blend takes data sets, {redact(repr(dataset)):.100} is not a LazyShardedDataset")
        if not self.datasets:
            raise ValueError("a blend needs at least one data set, got none")
        if order != Order(layout=order.layout, micro_batches_per_step=order.micro_batches_per_step):
            raise ValueError("set unit, shuffle_window, seed and split on each data set of a blend, not on the blend")
        check_choice("stopping", stopping, Stopping)
        run_order = RunOrder(**vars(order), batch_size=batch_size, max_total_samples=None, num_samples=num_samples)
        expected = "a schedule takes pairs of a step and the weights from that step on, such as [(1000, [1, 3])]"
        points = _pairs(schedule, expected)
        if not points:
            shares(weights)
        blending = BlendSchedule([(0, weights), *((step, _numbers(changed)) for step, changed in points)])
        if not blending.constant and not run_order.draws_per_step:
            raise ValueError("a schedule counts optimiser steps: pass order=Order(micro_batches_per_step=...)")
        names = [dataset.stream_id or stream_name(dataset.directory) for dataset in self.datasets]
        for name in names:
            same = [str(one.directory) for one, other in zip(self.datasets, names, strict=True) if other == name]
            if len(same) > 1:
                raise ValueError(f"data sets of a blend read the same stream, {', '.join(same)}: pass it once")
        self._states: BlendStates = BlendStates(names, blending, run_order, stopping)
        self.names = self._states.names
        """Names of the streams in a state, in order: their identities, or their directories if they have none."""
        self.shares = self.shares_at(0)
        """Initial share of each data set in all samples: its weight divided by the sum of weights, in whole draws."""
        self.period = sum(blending.parts(0))
        """Number of positions after which each stream has exactly its share, initially."""
        for dataset in self.datasets:
            dataset._enter_blend()
        self._attach()

    def _attach(self) -> None:
        # The epoch is stored in the data sets, which share it with their workers.
        self._numbers, self._lanes = self.datasets[0]._numbers, BlendReader(self.datasets)

    def __repr__(self) -> str:
        """Describes the blend; never waits, never raises."""
        if "_lanes" not in vars(self):
            return f"<{type(self).__name__}, not open>"
        streams = [f"{share:.4g} of {dataset!r}" for dataset, share in zip(self.datasets, self.shares, strict=True)]
        return f"<{type(self).__name__}: {', '.join(streams)}>"

    def shares_at(self, step: int) -> tuple[float, ...]:
        """Returns the share of each data set in the samples of an optimiser step; the first step of a run is 0."""
        parts = self._states.schedule.parts(step)
        return tuple(part / sum(parts) for part in parts)

    @property
    def consumed_before(self) -> int:
        """Samples trained, over all ranks, before the positions from which `rank_indices` count."""
        return self._space().before

    def ready(self, index: int) -> bool:
        """Returns whether a sample can be read without waiting, judging by what was last read of its stream."""
        stream, inner = self._space().locate(operator.index(index))
        return self.datasets[stream]._space().ready(inner)

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch of the blend and of every stream. Raises ValueError if it is negative."""
        for dataset in self.datasets:
            dataset.set_epoch(epoch)

    def stats(self) -> tuple[Stats, ...]:
        """Returns the statistics of each data set so far, over all its processes."""
        return tuple(dataset.stats() for dataset in self.datasets)

    def draw(self, index: int) -> BlendDraw:
        """Returns what an index draws, without reading it. Waits and raises as `LazyShardedDataset.draw`."""
        stream, inner = self._space().locate(operator.index(index))
        return BlendDraw(stream, self.datasets[stream].draw(inner))

    def in_epoch(self, index: int) -> bool:
        """Returns whether the blend, by `stopping`, does not end within the micro batch of an index.

        The result is the same on every rank, for live streams too. Waits and raises as `draw`.
        """
        space, stopping = self._space(), self._states.stopping
        if stopping == "first_exhausted":
            # Samples that a stream would draw from its next epoch are not trained.
            for dataset in self.datasets:
                dataset._numbers[IN_EPOCH_CALLED] = 1
        position = space.layout.locate(operator.index(index))[1]
        # Batches are trained whole: a batch that would draw too much is not trained ("first_exhausted"), the batch with
        # the last missing samples is ("all_exhausted").
        begin = position - position % space.order.batch_size
        # If an ended stream is exhausted, the others need not be waited for.
        streams = sorted(range(len(self.datasets)), key=lambda stream: not self.datasets[stream].reader.seen.ended)
        drawn = space.drawn(begin), space.drawn(begin + space.order.batch_size)
        return goes_on(stopping, partial(self._exhausted, self.epoch), streams, *drawn)

    def _exhausted(self, epoch: int, stream: int, drawn: int) -> bool:
        dataset = self.datasets[stream]
        with dataset._lanes:
            return drawn > 0 and dataset._entered(epoch).draw_at(0, drawn - 1).epoch > epoch

    def _make_space(self, epoch: int) -> BlendSpace:
        states, (rank, *others) = self._states, sorted({dataset.rank for dataset in self.datasets})
        if others:
            raise ConfigInvalid(f"the data sets of a blend must have the same rank, got {[rank, *others]}")
        drawn, lengths = [], list[int]()
        for dataset in self.datasets:
            course, order = dataset._space(epoch).course, dataset._states.order
            drawn.append((len(course.parts) - 1, course.current.draws))
            known = order.known_total(dataset.reader.seen)
            total = order.max_total_samples if known is None else known
            if total is None and states.order.num_samples is None:
                raise still_open(dataset.reader, "the blend has no length yet: set num_samples, or max_total_samples")
            if total is not None and not course.begin(total).full:
                text = f"the stream has {total} samples, fewer than one for each of {rank.dp_size} ranks: remove it"
                raise ValueError(f"{dataset.directory}: {text}")
            if total is not None and states.order.num_samples is None:
                lengths.append(0 if course.epoch(total) > epoch else course.begin(total).length)
        parts, first = states.parts(epoch, rank, drawn), states.stopping == "first_exhausted"
        space = BlendSpace(states.order, rank, parts, lengths, first)
        if not space.layout.block and states.in_epoch(epoch) is None:
            few = f"less than one batch of {states.order.batch_size} for each of {rank.dp_size} ranks"
            raise ValueError(f"the blend has {few}: num_samples, or a stream for its weight, is too small")
        return space

    def _load(self, found: BlendState) -> None:
        loaded = self._states.load(found)
        new = [name for name in self.names if name not in loaded]
        out = [found.names[member] for member in found.parts[-1].members if found.names[member] not in self.names]
        if new or out:
            names = ", ".join(new) or "none", ", ".join(out) or "none"
            log.warning("the blend resumes with other streams: added are %s, removed are %s", *names)
        for dataset, name in zip(self.datasets, self.names, strict=True):
            if name in loaded:
                dataset.load_state_dict(loaded[name].to_dict())
            # A stream that is new, or returns from another epoch, begins this one.
            dataset.set_epoch(epoch_of(found))

    def _position_of(self, found: BlendState, anywhere: bool) -> int | None:
        same = epoch_of(found) == self.epoch and self._state_after(found.consumed if anywhere else None) == found
        return self._space().position_after(found.consumed) if same else None

    def commit(self, consumed: int, *, last_epoch: bool, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Commits the progress of the checkpoints to every stream whose data set has a `consumer`.

        As `LazyShardedDataset.commit`; `last_epoch` applies to all streams, and `keep` are states of the blend. If one
        of these does not contain a stream yet, every chunk of that stream is kept. If it raises, some cursors may be
        written and others not: call it again.
        """
        own = dict(zip(self.names, self.datasets, strict=True))
        committing = [(dataset, name, dataset._commits) for name, dataset in own.items() if dataset._commits]
        if not committing:
            raise ValueError("commit needs a consumer; create the data sets of the blend with consumer=NAME")
        state, wrote = self._state_after(consumed), False
        blend = blend_shares(state, {name: dataset.directory for name, dataset in own.items()})
        kept = [BlendState.from_dict(one, "a state to keep") for one in keep]
        for dataset, name, commits in committing:
            older = [one.members[one.names.index(name)].to_dict() for one in kept if name in one.names]
            mine, commits.blend = state.members[state.names.index(name)].consumed, blend
            # A run resumed from a state without this stream begins the stream from its start and needs all of it.
            known = len(older) == len(kept)
            wrote = dataset.commit(mine, last_epoch=last_epoch and known, keep=older, take_over=take_over)
        return wrote

    def _state_after(self, consumed: int | None) -> BlendState:
        space = self._space()
        position = space.start if consumed is None else space.position_after(consumed)
        members = {}
        for dataset, name, draws in zip(self.datasets, self.names, space.drawn(position), strict=True):
            members[name] = dataset._state_after(dataset._space().consumed(draws))
        return self._states.after(space.parts, position, members)


class BlendReader:
    """Reads the samples of a blend's indices in one process: lines of its streams, in the order of its indices.

    Calling another data set for each sample costs as much as parsing it. Therefore the lines that the data sets have
    read ahead are merged, some hundred at a time, into `ahead`. If rows are encoded or large, the data sets make
    samples in different ways, or a row is bad, each data set makes its own samples.
    """

    def __init__(self, datasets: Sequence[LazyShardedDataset]) -> None:
        self.ahead, self._datasets = NOTHING, datasets
        # The next lines of each stream, by epoch, lane and the position after the last merged line. A thread takes the
        # entry, atomically, while it merges: two threads must not consume the same lines.
        self._next: dict[tuple[int, int, int], list[Iterator[bytes]]] = {}
        self._row_bytes = _AHEAD_BYTES // _AHEAD_LINES
        # The process that has entered, and the function that makes samples from merged lines there; None if the data
        # sets use different functions, or encode.
        self._pid = 0
        self._rows_of: RowsOf | None = None

    def enter(self, _: BlendSpace) -> None:
        """Sets up the readers for this process, if that was not done yet."""
        if self._pid == os.getpid():
            return
        for dataset in self._datasets:
            dataset._entered()
        ways = [dataset._lanes.rows_of for dataset in self._datasets]
        self._rows_of, self._pid = ways[0] if len(set(map(type, ways))) == 1 else None, os.getpid()

    def __enter__(self) -> None:
        """Does nothing; `__exit__` reports errors."""

    def __exit__(self, *error: Any) -> None:
        # For errors that are raised outside of any data set.
        self._datasets[0]._lanes.__exit__(*error)

    def read(self, space: BlendSpace, wanted: list[int], start: int, epoch: int) -> list[Any]:
        """Returns the samples of consecutive indices of a batch from place `start` on, at least one."""
        index, count = consecutive(wanted, start, space.step)
        if (lane := space.layout.locate(index)[0]) != space.rank.dp_rank:
            self._datasets[0]._space().warn_of_lane(index, lane, "blend")
        # Free the old lines first, so that the new ones reuse memory that is warm in the CPU's caches.
        self.ahead = NOTHING
        if (rows_of := self._rows_of) is not None:
            lines = self._merge(space, index, count, epoch)
            if rows := rows_of(lines[:count], None) if lines else []:
                self.ahead = (index, space.step, epoch, lines, rows_of)
                return rows
        located = [space.locate(index + place * space.step) for place in range(count)]
        batches: dict[int, list[int]] = {}
        for stream, inner in located:
            batches.setdefault(stream, []).append(inner)
        read = {stream: iter(self._datasets[stream].__getitems__(batch)) for stream, batch in batches.items()}
        return [next(read[stream]) for stream, _ in located]

    def _merge(self, space: BlendSpace, index: int, wanted: int, epoch: int) -> list[bytes]:
        """Returns the lines of an index and of some following ones; waits only for the wanted ones.

        Empty if the data sets have to make the samples themselves.
        """
        streams = space.streams(index, max(wanted, min(_AHEAD_LINES, _AHEAD_BYTES // self._row_bytes)))
        wanted, (lane, position) = min(wanted, len(streams)), space.layout.locate(index)
        nexts = self._next.pop((epoch, lane, position), None) or [iter(())] * len(self._datasets)
        lines: list[bytes] = []
        while True:
            # Stops when a stream has no line left.
            lines.extend(map(next, map(nexts.__getitem__, streams[len(lines) :])))
            place = len(lines)
            if place == len(streams):
                break
            stream, inner = space.locate(index + place * space.step)
            dataset, found = self._datasets[stream], list[bytes]()
            try:
                own = dataset._entered(dataset.epoch)
                if place < wanted or own.ready(inner):
                    found = dataset._lanes.lines(own, inner, dataset.epoch)
            except (ChunkCorrupt, ChunkRetired, RowInvalid):
                break  # The data set handles it
            except (LazyShardError, OSError):
                if place < wanted:
                    raise
                break  # It may be resolved by the time the sample is wanted
            if not found or len(found[0]) > LARGE_ROW_BYTES:
                break
            nexts[stream] = iter(found)
        if len(lines) < wanted:
            return []
        some = lines[:32]
        self._row_bytes = max(1, sum(map(len, some)) // len(some))
        self._next = {(epoch, lane, position + len(lines)): nexts}
        return lines


def _pairs(given: Any, expected: str) -> list[Any]:
    """Returns a list of pairs. Raises TypeError for anything else, also for a data set, which is iterable."""
    found = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(one, (list, tuple)) and len(one) == 2 for one in found):
        raise TypeError(f"{expected}; got {redact(repr(given)):.100}")
    return found


def _numbers(weights: Any) -> list[float]:
    try:
        return [float(weight) for weight in weights]
    except (TypeError, ValueError) as cause:
        raise type(cause)(f"weights must be numbers, got {weights!r:.100}") from None
