"""Reads the samples of consecutive indices: lines read ahead, parsed, and made into samples.

Without a shuffle the lines of a run of consecutive samples are read together. In a shuffled window the order is
computed at once, and its rows are read together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.data.index_space import IndexSpace
from lazyshard.data.samples import SampleMaker
from lazyshard.errors import ChunkCorrupt, ChunkRetired, RowInvalid
from lazyshard.format.row import parse_lines
from lazyshard.plan.course import Draw, Run
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES
from lazyshard.stream.scattered import Held, ScatteredReader

_Samples = range | npt.NDArray[np.int64]

RowsOf = Callable[[list[bytes], Sequence[int] | npt.NDArray[np.int64] | None], list[Any]]

_NOTHING: Final[tuple[int, list[bytes], int]] = (0, [], 0)


class LaneReader:
    """Reads for the indices of one process's data set.

    Args:
        reader: the stream.
        samples: makes samples of rows.
        rows_of: makes rows of checked lines, and nothing if it cannot, where rows are samples as they are; it is told
            whose lines they are, if that is known. None where rows are parsed and encoded, or hold arrays, which are
            not to be had without knowing whose they are.

    Attributes:
        rows_of: the same.
        ahead: what was read ahead: index of the first line, lines of it and of the indices that follow it, epoch. One
            value that is only ever replaced, so that threads which share the data set never see the lines of one place
            with the index of another.
    """

    def __init__(self, reader: StreamReader, samples: SampleMaker, rows_of: RowsOf | None) -> None:
        self.ahead = _NOTHING
        self._reader = reader
        self._windows = WindowReader(reader)
        self._samples = samples
        self.rows_of = rows_of
        self._parsed: RowsOf = FilledRows(reader) if reader.arrays else parsed_rows
        # The run that was located last: lane, epoch and run.
        self._run: tuple[int, int, Run] | None = None
        # Lane, epoch and position that were read last.
        self._last = (0, 0, -1)

    def read(self, space: IndexSpace, index: int, count: int, epoch: int) -> list[Any]:
        """Returns the samples of the first of `count` consecutive indices: at least one of them.

        Of an index behind the end at which a training loop stops, whose chunk was deleted: the stream's last sample,
        which is not trained. Its chunk is never deleted.

        Raises:
            ChunkRetired: the chunk was deleted; says more where the sample was drawn in an epoch before.
            IndexError, LazyShardError: as `LazyShardedDataset.__getitem__`.
        """
        try:
            return self._read(space, index, count, epoch)
        except ChunkRetired as error:
            drawn = space.draw(index, self._reader)
            if space.is_left_out(drawn, epoch, self._reader):
                return [self.read_sample(self._reader.seen.samples - 1)]
            if not drawn.epoch:
                raise
            raise _drawn_again(error, drawn, space) from error

    def lines(self, space: IndexSpace, index: int, epoch: int) -> list[bytes]:
        """Returns the checked line of an index, and those of the indices behind it that are read with it.

        Raises:
            ChunkCorrupt, RowInvalid: the line is bad.
            IndexError, LazyShardError: as `read`.
        """
        ahead = self._lines_ahead(index, sys.maxsize, epoch, space.step)
        if ahead:
            return ahead
        lane, position = space.layout.locate(index)
        samples, located = self._find(space, lane, position, 1, epoch)
        return self._load(index, 1, epoch, samples, located)

    def _read(self, space: IndexSpace, index: int, count: int, epoch: int) -> list[Any]:
        lane, position = space.layout.locate(index)
        if lane != space.rank.dp_rank:
            space.tell_lane(index, lane, self._reader)
        samples, located = self._find(space, lane, position, count, epoch)
        count = min(count, len(samples))
        try:
            lines = self._lines_ahead(index, count, epoch, space.step)
            if not lines:
                lines = self._load(index, count, epoch, samples, located)[:count]
            rows = [] if self._samples.takes_lines else self._rows(lines, samples)
        except (ChunkCorrupt, RowInvalid) as cause:
            return [self._samples.substitute(int(samples[0]), cause)]
        return self._samples.of_lines(lines, samples) if self._samples.takes_lines else self._made(rows, samples)

    def read_sample(self, sample: int) -> Any:
        """Returns a sample that is published, by its number.

        Raises:
            ChunkRetired: the chunk was deleted.
            LazyShardError: as `LazyShardedDataset.__getitem__`.
        """
        samples = range(sample, sample + 1)
        try:
            lines = self._reader.lines_published(sample, sample + 1)
            rows = [] if self._samples.takes_lines else self._rows(lines, samples)
        except (ChunkCorrupt, RowInvalid) as cause:
            return self._samples.substitute(sample, cause)
        return (self._samples.of_lines(lines, samples) if self._samples.takes_lines else self._made(rows, samples))[0]

    def _rows(self, lines: list[bytes], samples: _Samples) -> list[Any]:
        return (self.rows_of or self._parsed)(lines, samples) or self._parse(lines, samples)

    def _made(self, rows: list[Any], samples: _Samples) -> list[Any]:
        if self.rows_of is not None:
            return rows
        return [self._samples.make(int(sample), row) for sample, row in zip(samples, rows, strict=False)]

    def _find(
        self, space: IndexSpace, lane: int, position: int, count: int, epoch: int
    ) -> tuple[_Samples, Located | None]:
        """Returns the samples that a position and the following ones draw, and where they lie in a window."""
        if not space.course.rules.window:
            return self._locate(space, lane, position, count, epoch), None
        located = self._windows.locate(space, lane, position, count, epoch)
        return located.samples, located

    def _load(self, index: int, count: int, epoch: int, samples: _Samples, located: Located | None) -> list[bytes]:
        """Reads the lines of an index and of those behind it, and keeps them; returns all of them."""
        # The old lines are freed first, so that the new ones land where the CPU's caches are warm.
        self.ahead = _NOTHING
        if located is None:
            lines = self._reader.lines_published(int(samples[0]), int(samples[-1]) + 1, count)
        else:
            lines = self._windows.lines(located, count)
        self.ahead = (index, lines, epoch)
        return lines

    def _parse(self, lines: list[bytes], samples: _Samples) -> list[dict[str, Any]]:
        """Parses lines one by one up to the first that is bad, by itself or its arrays; raises if that is the first."""
        rows: list[dict[str, Any]] = []
        for line, sample in zip(lines, samples, strict=False):
            try:
                rows += self._reader.parse([line], int(sample))
            except (ChunkCorrupt, RowInvalid):
                if not rows:
                    raise
                break
        return rows

    def _lines_ahead(self, index: int, count: int, epoch: int, step: int) -> list[bytes]:
        """Returns the lines of the first of `count` consecutive indices that were read ahead."""
        first, lines, ahead_epoch = self.ahead
        place, beside = divmod(index - first, step)
        return lines[place : place + count] if epoch == ahead_epoch and place >= 0 and not beside else []

    def _locate(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int) -> range:
        """Returns the samples that a position and the following ones draw in turn.

        Of a single position that is far from the one before only itself: to find the others costs as much again.
        """
        known, last = self._run, self._last
        self._last = lane, epoch, position
        if known is None or known[:2] != (lane, epoch) or not known[2].first <= position < known[2].stop:
            near = last[:2] == (lane, epoch) and 0 < position - last[2] <= space.course.rules.unit
            if count == 1 and not near:
                sample = space.draw_at(lane, position, self._reader).sample
                return range(sample, sample + 1)
            known = self._run = (lane, epoch, space.run(lane, position, self._reader))
        run = known[2]
        return range(run.sample + position - run.first, run.sample + run.stop - run.first)


class FilledRows:
    """Makes rows of checked lines, with their arrays."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    def __call__(
        self, lines: list[bytes], samples: Sequence[int] | npt.NDArray[np.int64] | None
    ) -> list[dict[str, Any]]:
        """Parses the lines of the first of these samples; returns nothing if one is bad, or they are not known."""
        rows = parse_lines(lines)
        if samples is None:
            return []
        try:
            for row, line, sample in zip(rows, lines, samples, strict=False):
                self._reader.fill(row, line, int(sample))
        except (ChunkCorrupt, RowInvalid):
            return []
        return rows


def parsed_rows(lines: list[bytes], samples: Sequence[int] | npt.NDArray[np.int64] | None) -> list[dict[str, Any]]:
    """Parses lines; returns nothing if one of them is not a JSON object."""
    return parse_lines(lines)


def place_ahead(indices: Any, first: int, step: int, count: int) -> int:
    """Returns the place of a batch among lines that were read ahead; -1 if not all of it is there, in their order.

    Args:
        indices: of the batch; anything but a list of ints is not there.
        first: index of the first line.
        step: how far apart the lines' indices are.
        count: how many lines there are.
    """
    if type(indices) is not list or not indices or type(start := indices[0]) is not int:
        return -1
    place, beside = divmod(start - first, step)
    size = len(indices)
    if beside or place < 0 or place + size > count or indices != list(range(start, start + size * step, step)):
        return -1
    return place


def consecutive(indices: list[int], start: int, step: int) -> tuple[int, int]:
    """Returns the index at a place of a batch, and how many from there on follow each other in steps of `step`."""
    index = indices[start]
    count = len(indices) - start
    if count == 1 or (start == 0 and indices == list(range(index, index + count * step, step))):
        return index, count
    count = 1
    while start + count < len(indices) and indices[start + count] == index + count * step:
        count += 1
    return index, count


def _drawn_again(error: ChunkRetired, drawn: Draw, space: IndexSpace) -> ChunkRetired:
    """Returns the error for a sample that was drawn in an epoch before, and whose chunk is gone since."""
    stop = "" if space.order.num_samples is not None else "; to stop instead, ask `in_epoch(index)` before each step"
    return ChunkRetired(
        f"{error.file}: sample {drawn.sample} is drawn again in epoch {drawn.epoch}, but its chunk {error.chunk} was "
        f"deleted by the stream's producer, as were all chunks below {error.chunks_before}. To train another epoch, "
        f"produce the stream with --retain all, or more epochs of its rows in advance{stop}",
        file=error.file,
        chunk=error.chunk,
        chunks_before=error.chunks_before,
    )


_MOST: Final = 16_384
"""Positions whose order is computed together."""

_AHEAD_BYTES: Final = 512 << 10
_AHEAD_ROWS: Final = 256
"""Read ahead at the most, where calls follow each other in order."""

_STEADY: Final = 2
"""After so many calls that go on near where the last one stopped, the rest of the window is planned."""


class _Window(NamedTuple):
    """What is left of a window. One value that is only ever replaced, as several threads may share the reader.

    Attributes:
        lane: whose it is.
        epoch: the epoch that was set when it was computed.
        first: position of its first sample.
        samples: int64, of consecutive positions.
        held: where their rows lie if their chunks are held, else None.
    """

    lane: int
    epoch: int
    first: int
    samples: npt.NDArray[np.int64]
    held: Held | None


class Located(NamedTuple):
    """Samples, and how their rows are read.

    Attributes:
        samples: int64, of consecutive positions: at least one, and more than wanted where they are known.
        held: what they are cut out of; None if each row is read by itself.
        position: of the first one.
        place: of the first one in `held`.
        ahead: how many rows to read, also beyond those wanted; 0 for no more than those.
    """

    samples: npt.NDArray[np.int64]
    position: int
    held: Held | None
    place: int
    ahead: int


_NO_WINDOW: Final = _Window(0, 0, 0, np.empty(0, dtype=np.int64), None)


class WindowReader:
    """Reads for the positions of a course with windows.

    Who reads on and on, perhaps in steps, as a DataLoader worker does, gets what is left of each window planned, and
    its chunks held where that pays; who jumps about gets each sample by itself.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._scattered = ScatteredReader(reader)
        self._window = _NO_WINDOW
        # Lane, epoch and position behind the last call's; how many calls in a row went on near there.
        self._next = (-1, 0, 0)
        self._steady = 0

    def locate(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int) -> Located:
        """Finds the samples that a position and some behind it draw, waiting until they are certain.

        Raises:
            IndexError, LazyShardError: as `IndexSpace.draw`.
        """
        window, last = self._window, self._next
        place, held = position - window.first, None
        if window.lane == lane and window.epoch == epoch and 0 <= place < len(window.samples):
            samples, held = window.samples[place:], window.held
        else:
            near = last[:2] == (lane, epoch) and 0 <= position - last[2] <= space.course.rules.window
            self._steady = self._steady + 1 if near else 0
            if self._steady < _STEADY:
                # The indices behind a lane's last position are those of another lane.
                stop = min(position + count, space.layout.block)
                draws = [space.draw_at(lane, at, self._reader).sample for at in range(position, stop)]
                samples = np.array(draws, dtype=np.int64)
            else:
                samples = space.window(lane, position, _MOST, self._reader)
                place, held = 0, self._scattered.prepare(samples)
                self._window = _Window(lane, epoch, position, samples, held)
        self._next = lane, epoch, position + min(count, len(samples))
        follows = last == (lane, epoch, position)
        rows = min(_AHEAD_ROWS, _AHEAD_BYTES // held.row_bytes) if follows and held is not None else 0
        return Located(samples, position, held, place, rows)

    def lines(self, located: Located, count: int) -> list[bytes]:
        """Returns the checked lines of samples, ahead of what is wanted where calls follow each other in order.

        Returns:
            Lines from the first on; fewer than wanted, but never none, where a bad row follows or rows are large.

        Raises:
            ChunkCorrupt, RowInvalid: the first one is bad.
            ChunkRetired, ChunkMissing, OSError: as `StreamReader.lines_published`.
        """
        held, place, ahead = located.held, located.place, located.ahead
        if held is None:
            return self._one_by_one(located.samples[:count])
        lines = self._scattered.lines(held, place, min(place + max(count, ahead - ahead % count), len(held.samples)))
        # What was read ahead is taken without asking here.
        self._next = *self._next[:2], located.position + len(lines)
        return lines

    def _one_by_one(self, samples: npt.NDArray[np.int64]) -> list[bytes]:
        lines: list[bytes] = []
        for sample in samples.tolist():
            try:
                lines += self._reader.lines_published(sample, sample + 1)
            except (ChunkCorrupt, RowInvalid):
                if not lines:
                    raise
                break
            if len(lines[-1]) > LARGE_ROW_BYTES:
                break
        return lines
