"""What the indices of a blend mean: which stream each draws from, and where the blend ends; and their samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from lazyshard.data.blend_state import Stopping
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.lane import consecutive
from lazyshard.data.rank import Rank
from lazyshard.data.samples import RowsOf
from lazyshard.errors import ChunkCorrupt, ChunkRetired, LazyShardError, LengthUnknown, RowInvalid
from lazyshard.format.state import BlendPartState
from lazyshard.plan.blend import BlendCourse
from lazyshard.plan.deal import Layout
from lazyshard.stream.chunk import LARGE_ROW_BYTES


class BlendSpace:
    """The indices of one blend in one epoch that was set, from where the run stands (`part`). Fixed once made.

    Raises LengthUnknown: there is no end; ValueError: there is less than one batch of every rank.
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
        # `lengths` are the draws of a lane of each stream until its epoch ends, None where that is not known; `samples`
        # how many indices there are at the most, None to end by `stopping`; `begun` says that there may be none left.
        self.part = part
        self.rank = rank
        self.course = BlendCourse(part.pieces)
        self._begins = [draws for _, draws in part.begins]
        size = part.batch_size
        if samples is not None:
            block = max(samples, 0) // (rank.dp_size * size) * size
        else:
            end = self._end(lengths, stopping)
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
        """Returns which stream an index, and up to so many that follow it in its lane, draw from. Raises IndexError."""
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

    def _end(self, lengths: Sequence[int | None], stopping: Stopping) -> int:
        ends = []
        for stream, length in enumerate(lengths):
            if length is None:
                raise LengthUnknown(
                    "the blend has no length yet, as a stream in it is still being produced: pass num_samples, how "
                    "many to train on however many epochs of a stream that takes, or give that stream's data set "
                    "max_total_samples"
                )
            left = length - self._begins[stream]
            if stopping == "first_exhausted":
                ends.append(self.course.position(stream, max(left, 0)))
            elif left > 0 and (last := self.course.position(stream, left - 1)) is not None:
                ends.append(last + 1)
        known = [end for end in ends if end is not None]
        return min(known) if stopping == "first_exhausted" else max(known, default=0)


_AHEAD_LINES: Final = 256
_AHEAD_BYTES: Final = 1 << 20
"""Merged at the most."""

_SOME: Final = 32
"""Lines by which the size of rows is judged."""


class Merged(NamedTuple):
    """Lines in the order of a blend, from an index on, and what makes samples of them.

    One value that is only ever replaced, as several threads may share the data set.
    """

    first: int
    step: int
    epoch: int
    lines: list[bytes]
    rows_of: RowsOf | None


_Next = tuple[tuple[int, int, int], list[Iterator[bytes]]]

NOTHING: Final = Merged(0, 1, 0, [], None)


class BlendReader:
    """Reads for the indices of one process's blend: lines of its streams, in the order of its indices.

    To ask another data set for each sample costs as much as to parse it. So the lines that the data sets have read
    ahead are merged, some hundred at a time: `merged`. Where rows are encoded or large, made into samples in different
    ways, or one of them is bad, each data set makes its own samples.
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

    def __reduce__(self) -> tuple[type[BlendReader], tuple[Sequence[LazyShardedDataset]]]:
        """Leaves what was read behind."""
        return BlendReader, (self._datasets,)

    def read(self, space: BlendSpace, wanted: list[int], start: int, epoch: int) -> list[Any]:
        """Returns the samples of a batch's indices from a place on that follow each other: at least one."""
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
                dataset._draws.enter_process()
            ways = [dataset._draws.lanes.rows_of for dataset in self._datasets]
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
