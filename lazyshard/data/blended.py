"""`BlendedDataset`: several streams as one data set, by weights."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from torch.utils.data import get_worker_info

from lazyshard.data.blend_state import BlendSpace, BlendStates, Stopping, read_blend
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_reader import NOTHING, consecutive
from lazyshard.data.indexed import Indexed
from lazyshard.data.rank import ASKED, EPOCH, Stats
from lazyshard.data.run_state import epoch_of, mistaken, stands_elsewhere
from lazyshard.data.samples import RowsOf
from lazyshard.data.settings import Order, check_group
from lazyshard.errors import ChunkCorrupt, ChunkRetired, ConfigInvalid, LazyShardError, RowInvalid, StateInvalid
from lazyshard.format.cursor import blend_shares
from lazyshard.format.state import BlendState
from lazyshard.plan.course import Draw
from lazyshard.stream.chunk import LARGE_ROW_BYTES

_log = logging.getLogger("lazyshard")

_AHEAD_LINES: Final = 256
_AHEAD_BYTES: Final = 1 << 20
"""Merged at the most."""


class BlendDraw(NamedTuple):
    """What an index of a blend draws: which of its data sets, and epoch and sample in that."""

    dataset: int
    draw: Draw


class BlendedDataset(Indexed):
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

    _NAME = "blend"

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
        found = read_blend(datasets, schedule, order, batch_size, num_samples, stopping)
        self._datasets: list[LazyShardedDataset] = found[0]
        self._states: BlendStates = found[1]
        self._names, self._schedule = self._states.names, self._states.schedule
        for dataset in self._datasets:
            dataset._enter_blend()
        self._batch_size = batch_size
        self._num_samples = num_samples
        self._stopping: Stopping = stopping
        # Epoch, and its indices; None before the first use.
        self._newest: tuple[int, BlendSpace] | None = None
        self._attach()

    def _attach(self) -> None:
        # The epoch is that of the data sets: they tell their workers.
        self._numbers = self._datasets[0]._numbers
        self._lanes = BlendReader(self._datasets)

    def __repr__(self) -> str:
        """Tells what is blended; never waits, never raises."""
        if "_lanes" not in vars(self):
            return f"<{type(self).__name__}, not open>"
        streams = [f"{share:.4g} of {dataset!r}" for dataset, share in zip(self._datasets, self.shares, strict=True)]
        return f"<{type(self).__name__}: {', '.join(streams)}>"

    @property
    def datasets(self) -> tuple[LazyShardedDataset, ...]:
        """The data sets that are blended, in order."""
        return tuple(self._datasets)

    @property
    def names(self) -> tuple[str, ...]:
        """How a state calls the streams, in order: by their identities, or their directories where they have none."""
        return self._names

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
    def consumed_before(self) -> int:
        """Samples trained before the positions from which `rank_indices` count, over all ranks."""
        return self._space().before

    def ready(self, index: int) -> bool:
        """Returns whether a sample can be read without waiting, as far as is known without a look."""
        stream, inner = self._space().locate(operator.index(index))
        return self._datasets[stream]._space().ready(inner)

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch, of every stream and of the blend. Raises ValueError if it is negative."""
        for dataset in self._datasets:
            dataset.set_epoch(epoch)

    def stats(self) -> tuple[Stats, ...]:
        """Returns what the processes of each data set have met so far."""
        return tuple(dataset.stats() for dataset in self._datasets)

    def _fetch(self, indices: list[int]) -> list[Any]:
        samples: list[Any] = []
        epoch = self._numbers[EPOCH]
        # For what is raised outside of any data set.
        with self._datasets[0]._lanes:
            while len(samples) < len(indices):
                samples += self._lanes.read(self._space(), indices, len(samples), epoch)
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
                dataset._numbers[ASKED] = 1
        return self._goes_on(self._space(), operator.index(index), self.epoch)

    def _goes_on(self, space: BlendSpace, index: int, epoch: int) -> bool:
        position, size = space.layout.locate(index)[1], self._batch_size
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
            course, order = dataset._space(epoch).course, dataset._states.order
            stands.append((len(course.parts) - 1, course.current.draws))
            known = order.known_total(dataset.reader.seen)
            total = order.max_total_samples if known is None else known
            if total is None:
                lengths.append(None)
                continue
            if not course.full_epoch_length(total):
                text = f"the stream has {total} samples, fewer than one for each of {rank.dp_size} ranks: leave it out"
                raise ValueError(f"{dataset.directory}: {text}")
            lengths.append(0 if course.epoch(total) > epoch else course.epoch_length(total))
        return BlendSpace(self._states, epoch, rank, self._states.part(epoch, rank, stands), lengths)

    def _go_on(self, state: dict[str, Any], *, anywhere: bool = True) -> tuple[int, int] | None:
        """As `LazyShardedDataset._go_on`."""
        if (reason := mistaken(state, "blend")) is not None:
            raise StateInvalid(f"the state of a blend: {reason}")
        found, main = BlendState.from_dict(state, "the state of a blend"), get_worker_info() is None
        if main and not self._used:
            self._load(found)
            return None
        epoch = epoch_of(found)
        if main and anywhere:
            self.set_epoch(epoch)
        try:
            same = epoch == self.epoch and self._state_after(found.consumed if anywhere else None) == found
        except ValueError:
            same = False
        if not same:
            raise stands_elsewhere("this blend")
        return epoch, self._space().position_after(found.consumed)

    def _load(self, found: BlendState) -> None:
        stands = self._states.load(found)
        new = [name for name in self._names if name not in stands]
        out = [found.names[member] for member in found.parts[-1].members if found.names[member] not in self._names]
        if new or out:
            said = ", ".join(new) or "none", ", ".join(out) or "none"
            _log.warning("the blend goes on with other streams: new are %s, left out are %s", *said)
        for dataset, name in zip(self._datasets, self._names, strict=True):
            if name in stands:
                dataset.load_state_dict(stands[name].to_dict())
            # One that is new, or comes back from another epoch, begins this one.
            dataset.set_epoch(epoch_of(found))

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
        position = space.stands if consumed is None else space.position_after(consumed)
        members = {}
        for dataset, name, draws in zip(self._datasets, self._names, space.drawn(position), strict=True):
            members[name] = dataset._state_after(dataset._space().consumed(draws))
        return self._states.after(epoch, space.part, position, members)


def _exhausted(dataset: LazyShardedDataset, drawn: int, epoch: int) -> bool:
    with dataset._lanes:
        return drawn > 0 and dataset._entered(epoch).epoch_at(drawn) > epoch


class BlendReader:
    """Reads for the indices of one process's blend: lines of its streams, in the order of its indices.

    To ask another data set for each sample costs as much as to parse it. So the lines that the data sets have read
    ahead are merged, some hundred at a time: `ahead`. Where rows are encoded or large, made into samples in different
    ways, or one of them is bad, each data set makes its own samples.
    """

    def __init__(self, datasets: Sequence[LazyShardedDataset]) -> None:
        self._datasets = datasets
        self.ahead = NOTHING
        # Epoch, lane and position behind the last merged line, and each stream's next lines; none while somebody
        # merges, as a line that one thread has taken must not be missing in another one's order. Taking it out is one
        # step.
        self._next: list[tuple[tuple[int, int, int], list[Iterator[bytes]]]] = []
        self._row_bytes = _AHEAD_BYTES // _AHEAD_LINES
        # The process that has read, and what makes samples of lines there.
        self._known: tuple[int, RowsOf | None] = (0, None)

    def read(self, space: BlendSpace, wanted: list[int], start: int, epoch: int) -> list[Any]:
        """Returns the samples of a batch's indices from a place on that follow each other: at least one."""
        index, count = consecutive(wanted, start, space.step)
        if (lane := space.layout.locate(index)[0]) != space.rank.dp_rank:
            self._datasets[0]._space().tell_lane(index, lane, "blend")
        # The old lines are freed first, so that the new ones land where the CPU's caches are warm.
        self.ahead = NOTHING
        rows_of = self._rows_of()
        if rows_of is not None:
            lines = self._merge(space, index, count, epoch)
            rows = rows_of(lines[:count], None) if lines else []
            if rows:
                self.ahead = (index, space.step, epoch, lines, rows_of)
                return rows
        located = [space.locate(index + place * space.step) for place in range(count)]
        batches: dict[int, list[int]] = {}
        for stream, inner in located:
            batches.setdefault(stream, []).append(inner)
        read = {stream: iter(self._datasets[stream].__getitems__(batch)) for stream, batch in batches.items()}
        return [next(read[stream]) for stream, _ in located]

    def _rows_of(self) -> RowsOf | None:
        """Returns what makes samples of merged lines in this process; None where data sets differ in that, or encode.

        A line of one must not be taken for a line of another: only rows that somebody has checked may be parsed late.
        """
        pid, rows_of = self._known
        if pid != os.getpid():
            for dataset in self._datasets:
                dataset._entered()
            ways = [dataset._lanes.rows_of for dataset in self._datasets]
            rows_of = ways[0] if len({type(way) for way in ways}) == 1 else None
            self._known = (os.getpid(), rows_of)
        return rows_of

    def _merge(self, space: BlendSpace, index: int, wanted: int, epoch: int) -> list[bytes]:
        """Returns the lines of an index and of some that follow, of which only the wanted ones are waited for.

        Fewer than wanted only at the end of a lane; none where data sets have to make the samples themselves.
        """
        streams = space.streams(index, max(wanted, min(_AHEAD_LINES, _AHEAD_BYTES // self._row_bytes)))
        wanted = min(wanted, len(streams))
        lane, position = space.layout.locate(index)
        try:
            behind, nexts = self._next.pop()
        except IndexError:
            behind, nexts = (0, 0, -1), []
        if behind != (epoch, lane, position):
            nexts = [iter(())] * len(self._datasets)
        lines: list[bytes] = []
        while True:
            # Ends where a stream has no line left.
            lines.extend(map(next, map(nexts.__getitem__, streams[len(lines) :])))
            place = len(lines)
            if place == len(streams):
                break
            stream, inner = space.locate(index + place * space.step)
            try:
                found = self._lines_from(self._datasets[stream], inner, wait=place < wanted)
            except (ChunkCorrupt, ChunkRetired, RowInvalid):
                # The data set knows what to do about it.
                break
            except (LazyShardError, OSError):
                if place < wanted:
                    raise
                # It may be gone when it is that sample's turn.
                break
            if not found or len(found[0]) > LARGE_ROW_BYTES:
                break
            nexts[stream] = iter(found)
        if len(lines) < wanted:
            return []
        some = lines[:32]
        self._row_bytes = max(1, sum(map(len, some)) // len(some))
        self._next = [((epoch, lane, position + len(lines)), nexts)]
        return lines

    def _lines_from(self, dataset: LazyShardedDataset, index: int, *, wait: bool) -> list[bytes]:
        """Returns the checked line of an index, and those of the indices behind it that are read with it.

        None at all where `wait` is false and it may not be published yet.
        """
        epoch = dataset.epoch
        space = dataset._entered(epoch)
        return dataset._lanes.lines(space, index, epoch) if wait or space.ready(index) else []
