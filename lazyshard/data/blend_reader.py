"""Reads the samples of a blend: the lines of its streams, put in the order of its indices and parsed together.

To ask another data set for each sample costs as much as to parse it. So the lines that the data sets have read ahead
are merged, some hundred at a time, and what is left for each batch is what a single data set does. Where rows are
encoded or large, made into samples in different ways, or one of them is bad, each data set makes its own samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from lazyshard.data.blend_space import BlendSpace
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.lane_reader import RowsOf, consecutive
from lazyshard.errors import ChunkCorrupt, ChunkRetired, LazyShardError, RowInvalid
from lazyshard.stream.chunk import LARGE_ROW_BYTES

__all__ = ["NOTHING", "BlendReader", "Merged"]

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
    """Reads for the indices of one process's blend.

    Args:
        datasets: that are blended.

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
                if dataset._pid != os.getpid():
                    dataset._enter_process()
            ways = [dataset._lanes.rows_of for dataset in self._datasets]
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
                found = self._datasets[stream]._lines_from(inner, wait=place < wanted)
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
