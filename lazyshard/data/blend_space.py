"""What the indices of a blend mean: which stream each draws from, and where the blend ends; and their samples."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.data.blend_state import BlendStates, Stopping
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.lane import consecutive
from lazyshard.data.rank import Rank
from lazyshard.data.samples import RowsOf
from lazyshard.data.settings import LayoutName
from lazyshard.errors import ChunkCorrupt, ChunkRetired, LazyShardError, LengthUnknown, RankInvalid, RowInvalid
from lazyshard.format.blend_state import BlendPartState
from lazyshard.plan.blend_schedule import BlendCourse, BlendPiece
from lazyshard.plan.layout import Layout
from lazyshard.stream.chunk import LARGE_ROW_BYTES


class BlendSpace:
    """The indices of one blend in one epoch that was set. Fixed once made.

    Args:
        part: how the streams are blended, and where the run stands.
        rank: whose data set it is.
        layout: "block" or "strided".
        lengths: draws of a lane of each stream until its epoch ends, None where that is not known; 0 where a later one
            has begun.
        samples: how many indices there are to be at the most, over all ranks; None to end by `stopping`.
        stopping: where to end.
        begun: whether the run goes on from a state, which may be its end.

    Attributes:
        part: as given.
        rank: as given.
        course: which stream each position draws from.
        layout: how the ranks' positions lie among the indices.
        step: how far apart the indices are that follow each other in a lane.
        lengths: as given.

    Raises:
        LengthUnknown: there is no end.
        ValueError: there is less than one batch of every rank.
    """

    def __init__(
        self,
        part: BlendPartState,
        rank: Rank,
        layout: str,
        lengths: Sequence[int | None],
        samples: int | None,
        stopping: Stopping,
        *,
        begun: bool,
    ) -> None:
        self.part = part
        self.rank = rank
        self.course = BlendCourse([BlendPiece(*piece) for piece in part.pieces])
        self.lengths = tuple(lengths)
        self._stopping = stopping
        self._begins = [draws for _, draws in part.begins]
        self._first_draws = np.array(self._begins, dtype=np.int64)
        size = part.batch_size
        if samples is not None:
            block = max(samples, 0) // (rank.dp_size * size) * size
        else:
            end = self._end()
            block = end // size * size if stopping == "first_exhausted" else -(-end // size) * size
        if not block and not begun:
            raise ValueError(
                f"the blend has less than one batch of {size} for each of {rank.dp_size} ranks: a stream is too short "
                f"for its weight, or num_samples too small"
            )
        self.layout = Layout(rank.dp_size, max(block, part.draws), strided=layout == "strided")
        self.step = 1 if layout == "block" else rank.dp_size

    def drawn(self, position: int) -> tuple[int, ...]:
        """Returns how many draws of a lane each stream's current part has behind it at a position."""
        return tuple(map(sum, zip(self._begins, self.course.counts(position), strict=True)))

    def streams(self, index: int, count: int) -> list[int]:
        """Returns which stream an index, and those that follow it in its lane, draw from.

        Args:
            index: the first one.
            count: how many at the most; fewer at the end of the lane.

        Raises:
            IndexError: it is outside the data set.
        """
        position = self.layout.locate(index)[1]
        return self.course.streams_of(position, min(position + count, self.layout.block))

    def tell_lane(self, index: int, dataset: LazyShardedDataset) -> None:
        """Warns of an index that is another rank's, in the name of one of the data sets."""
        lane = self.layout.locate(index)[0]
        if lane != self.rank.dp_rank:
            dataset._draws.indices().tell(
                "lane of a blend",
                f"the blend of {dataset.directory} and others: rank {self.rank.dp_rank} of {self.rank.dp_size} was "
                f"asked for index {index}, which is rank {lane}'s. If every rank is asked for the same indices, "
                f"samples repeat: did you forget `sampler=blend.rank_indices`?",
            )

    def locate(self, index: int) -> tuple[int, int]:
        """Returns which stream an index draws from, and its index in that. Raises as `streams` does."""
        lane, position = self.layout.locate(index)
        stream, draw = self.course.draw(position)
        return stream, (self._begins[stream] + draw) * self.rank.dp_size + lane

    def located(self, index: int, count: int) -> tuple[list[int], list[int]]:
        """Returns the same, and the index of each in its stream. Arguments and errors as of `streams`."""
        lane, position = self.layout.locate(index)
        streams, draws = self.course.draws(position, min(position + count, self.layout.block))
        return streams.tolist(), ((self._first_draws[streams] + draws) * self.rank.dp_size + lane).tolist()

    def _end(self) -> int:
        """Returns how many positions there are by `stopping`."""
        ends = []
        for stream, length in enumerate(self.lengths):
            if length is None:
                if self._stopping == "first_exhausted":
                    continue
                raise LengthUnknown(self._unknown())
            left = length - self._begins[stream]
            if self._stopping == "first_exhausted":
                position = self.course.position(stream, max(left, 0))
                ends += [] if position is None else [position]
            elif left > 0:
                position = self.course.position(stream, left - 1)
                ends += [] if position is None else [position + 1]
        if self._stopping == "first_exhausted":
            if None in self.lengths or not ends:
                raise LengthUnknown(self._unknown())
            return min(ends)
        return max(ends, default=0)

    def _unknown(self) -> str:
        return (
            "the blend has no length yet, as a stream in it is still being produced: pass num_samples, how many to "
            "train on however many epochs of a stream that takes, or give that stream's data set max_total_samples"
        )


class BlendSpaces:
    """The index spaces of one blend, of which the newest is kept.

    Args:
        datasets: that are blended.
        states: where the run stands.
        layout: "block" or "strided".
        num_samples: how many indices there are to be at the most, over all ranks; None to end by `stopping`.
        stopping: where to end.

    Attributes:
        num_samples: as given; set before the first space is asked for.
        stopping: as given.
        used: whether a space was asked for.
    """

    def __init__(
        self,
        datasets: Sequence[LazyShardedDataset],
        states: BlendStates,
        layout: LayoutName,
        num_samples: int | None,
        stopping: Stopping,
    ) -> None:
        self.num_samples = num_samples
        self._datasets = datasets
        self._states = states
        self._layout = layout
        self.stopping = stopping
        self._newest: tuple[int, BlendSpace] | None = None

    @property
    def used(self) -> bool:
        """See above."""
        return self._newest is not None

    def current(self) -> BlendSpace:
        """Returns the indices of the epoch that is set.

        Raises:
            RankInvalid: the data sets are of different ranks.
            LengthUnknown: there is no end.
            ValueError: a stream is too short, or there is less than one batch of every rank.
        """
        epoch = self._datasets[0].epoch
        if self._newest is None or self._newest[0] != epoch:
            self._newest = (epoch, self._make(epoch))
        return self._newest[1]

    def in_epoch(self, index: int) -> bool:
        """Returns whether the blend goes on for the micro batch of an index; see `BlendedDataset.in_epoch`."""
        space = self.current()
        position, size = space.layout.locate(operator.index(index))[1], space.part.batch_size
        # Batches are trained whole: the one that would draw too much is not, the one with what is missing still is.
        begin = position - position % size
        last = begin + size - 1
        epoch = self._datasets[0].epoch
        # Where one that has ended is exhausted, the others need not be waited for.
        known = sorted(enumerate(space.drawn(last + 1)), key=lambda pair: not self._datasets[pair[0]].reader.seen.ended)
        over = (self._exhausted(stream, drawn, epoch) for stream, drawn in known)
        if self.stopping == "first_exhausted":
            return not any(over)
        for _ in over:
            # Waits until the samples up to the index are there.
            pass
        # An epoch counts as drawn once the next one would begin.
        return not all(self._exhausted(stream, count + 1, epoch) for stream, count in enumerate(space.drawn(begin)))

    def _exhausted(self, stream: int, drawn: int, epoch: int) -> bool:
        dataset = self._datasets[stream]
        return drawn > 0 and dataset._draws.epoch_at(drawn) > epoch

    def _make(self, epoch: int) -> BlendSpace:
        ranks = {dataset.rank for dataset in self._datasets}
        if len(ranks) != 1:
            raise RankInvalid(f"the data sets of a blend are of one rank, got {sorted(ranks)}")
        (rank,) = ranks
        courses = [dataset._draws.indices().course for dataset in self._datasets]
        stands = [(len(course.parts) - 1, course.current.draws) for course in courses]
        lengths: list[int | None] = []
        for dataset, course in zip(self._datasets, courses, strict=True):
            known = dataset._draws.order.known_total(dataset.reader.seen)
            total = dataset._draws.order.max_total_samples if known is None else known
            if total is not None and not course.full_epoch_length(total):
                raise ValueError(
                    f"{dataset.directory}: the stream has {total} samples, fewer than one for each of {rank.dp_size} "
                    f"ranks, so it cannot be repeated in a blend: leave it out"
                )
            if total is None:
                lengths.append(None)
            else:
                lengths.append(0 if course.epoch(total) > epoch else course.epoch_length(total))
        part = self._states.part(epoch, rank, stands)
        samples = self.num_samples
        if samples is not None:
            samples -= sum(one.dp * one.draws for one in self._states.before(epoch, part))
        begun = self._states.goes_on(epoch)
        return BlendSpace(part, rank, self._layout, lengths, samples, self.stopping, begun=begun)


_AHEAD_LINES: Final = 256
_AHEAD_BYTES: Final = 1 << 20
"""Merged at the most."""


class Merged(NamedTuple):
    """Lines in the order of a blend. One value that is only ever replaced, as several threads may share the data set.

    Attributes:
        first: index of the first line.
        step: how far apart the indices are.
        epoch: that was set.
        lines: checked.
        rows_of: makes samples of them.
    """

    first: int
    step: int
    epoch: int
    lines: list[bytes]
    rows_of: RowsOf | None


_SOME: Final = 32
"""Lines by which the size of rows is judged."""

_Next = tuple[tuple[int, int, int], list[Iterator[bytes]]]

NOTHING: Final = Merged(0, 1, 0, [], None)


class BlendReader:
    """Reads for the indices of one process's blend: lines of its streams, in the order of its indices.

    To ask another data set for each sample costs as much as to parse it. So the lines that the data sets have read
    ahead are merged, some hundred at a time. Where rows are encoded or large, made into samples in different ways, or
    one of them is bad, each data set makes its own samples.

    Attributes:
        merged: what was read ahead.
    """

    def __init__(self, datasets: Sequence[LazyShardedDataset]) -> None:
        self._datasets = datasets
        self.merged = NOTHING
        # Epoch, lane and position behind the last merged line, and each stream's next lines; none while somebody
        # merges, as a line that one thread has taken must not be missing in another one's order. Taking it out is one
        # step.
        self._next: list[_Next] = []
        self._row_bytes = _AHEAD_BYTES // _AHEAD_LINES
        # The process that has read, and what makes samples of lines there.
        self._known: tuple[int, RowsOf | None] = (0, None)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves what was read behind."""
        return {"_datasets": self._datasets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what is not pickled."""
        self.__init__(state["_datasets"])  # type: ignore[misc]

    def read(self, space: BlendSpace, wanted: list[int], start: int, epoch: int) -> list[Any]:
        """Returns the samples of the first of a batch's indices from a place on that follow each other: at least one.

        Raises:
            IndexError, LazyShardError: as `LazyShardedDataset.__getitem__`.
        """
        index, count = consecutive(wanted, start, space.step)
        space.tell_lane(index, self._datasets[0])
        # The old lines are freed first, so that the new ones land where the CPU's caches are warm.
        self.merged = NOTHING
        rows_of = self._rows_of()
        if rows_of is not None:
            lines = self._merge(space, index, count, epoch)
            rows = rows_of(lines[:count], None) if lines else []
            if rows:
                self.merged = Merged(index, space.step, epoch, lines, rows_of)
                return rows
        streams, indices = space.located(index, count)
        batches: dict[int, list[int]] = {}
        for stream, inner in zip(streams, indices, strict=True):
            batches.setdefault(stream, []).append(inner)
        read = {stream: iter(self._datasets[stream].__getitems__(batch)) for stream, batch in batches.items()}
        return [next(read[stream]) for stream in streams]

    def _rows_of(self) -> RowsOf | None:
        """Returns what makes samples of merged lines in this process; None where data sets differ in that, or encode.

        A line of one must not be taken for a line of another: only rows that somebody has checked may be parsed late.
        """
        pid, rows_of = self._known
        if pid != os.getpid():
            for dataset in self._datasets:
                dataset._draws.enter_process()
            ways = [dataset._draws.lanes.rows_of for dataset in self._datasets]
            rows_of = ways[0] if len({type(way) for way in ways}) == 1 else None
            self._known = (os.getpid(), rows_of)
        return rows_of

    def _merge(self, space: BlendSpace, index: int, wanted: int, epoch: int) -> list[bytes]:
        """Returns the lines of an index and of some that follow, of which only the wanted ones are waited for.

        Returns:
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
                found = self._datasets[stream]._draws.lines_from(inner, wait=place < wanted)
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
        some = lines[:_SOME]
        self._row_bytes = max(1, sum(map(len, some)) // len(some))
        self._next = [((epoch, lane, position + len(lines)), nexts)]
        return lines
