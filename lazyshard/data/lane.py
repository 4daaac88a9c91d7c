"""Reads the samples of consecutive indices: lines read ahead, and made into samples.

Without a shuffle the lines of a run of consecutive samples are read together. In a shuffled window the order is
computed at once, and its rows are read together.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.data.index_space import IndexSpace
from lazyshard.data.samples import RowsOf, SampleMaker
from lazyshard.errors import ChunkCorrupt, ChunkRetired, RowInvalid
from lazyshard.plan.course import Draw, Run
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES, Held, ScatteredReader

_NOTHING: Final[tuple[int, list[bytes], int]] = (0, [], 0)

_MOST: Final = 16_384
"""Positions whose order is computed together."""

# Read ahead at the most, where calls follow each other in order.
_AHEAD_BYTES: Final = 512 << 10
_AHEAD_ROWS: Final = 256

_STEADY: Final = 2
"""After so many calls that go on near where the last one stopped, the rest of the window is planned."""


class Located(NamedTuple):
    """Samples, and how their rows are read: those of a range together, or cut out of `held`, others each by itself.

    Attributes:
        samples: of consecutive positions, at least one, and more than wanted where they are known.
        position, place: of the first one, in its lane and in `held`.
        ahead: how many rows to read, also beyond those wanted; 0 for no more than those.
    """

    samples: range | npt.NDArray[np.int64]
    position: int = 0
    held: Held | None = None
    place: int = 0
    ahead: int = 0


class _Window(NamedTuple):
    """What is left of a window: samples of consecutive positions, and where their rows lie if their chunks are held."""

    lane: int
    epoch: int
    first: int
    samples: npt.NDArray[np.int64]
    held: Held | None


class LaneReader:
    """Reads for the indices of one process's data set. Several threads may share it: what it keeps is only replaced.

    In windows, who reads on and on, perhaps in steps, as a DataLoader worker does, gets what is left of each window
    planned, and its chunks held where that pays; who jumps about gets each sample by itself.

    Attributes:
        ahead: what was read ahead: index of the first line, lines of it and of the indices that follow it, epoch. One
            value, so that no thread sees the lines of one place with the index of another.
    """

    def __init__(self, reader: StreamReader, samples: SampleMaker) -> None:
        self.ahead = _NOTHING
        self._reader = reader
        self._scattered = ScatteredReader(reader)
        self._samples = samples
        # The run that was located last: lane, epoch and run; and the window.
        self._run: tuple[int, int, Run] | None = None
        self._window = _Window(0, 0, 0, np.empty(0, dtype=np.int64), None)
        # Lane, epoch and position behind the last call's; in windows, how many calls in a row went on near there.
        self._next = (-1, 0, 0)
        self._steady = 0

    @property
    def rows_of(self) -> RowsOf | None:
        """Makes samples of lines where rows are samples as they are; None where they are encoded, or hold arrays."""
        return None if self._samples.encodes else self._samples.rows_of

    def read(self, space: IndexSpace, index: int, count: int, epoch: int) -> list[Any]:
        """Returns the samples of the first of `count` consecutive indices: at least one of them.

        Of an index behind the end at which a training loop stops, whose chunk was deleted: the stream's last sample,
        which is not trained. Its chunk is never deleted. Raises as `LazyShardedDataset.__getitem__`.
        """
        try:
            return self._read(space, index, count, epoch)
        except ChunkRetired as error:
            drawn = space.draw(index)
            if space.is_left_out(drawn, epoch):
                return [self.read_sample(self._reader.seen.samples - 1)]
            if not drawn.epoch:
                raise
            raise _drawn_again(error, drawn, space) from error

    def lines(self, space: IndexSpace, index: int, epoch: int) -> list[bytes]:
        """Returns the checked line of an index, which may not be bad, and those behind it that are read with it."""
        ahead = self._lines_ahead(index, sys.maxsize, epoch, space.step)
        if ahead:
            return ahead
        lane, position = space.layout.locate(index)
        return self._load(index, 1, epoch, self._locate(space, lane, position, 1, epoch))

    def read_sample(self, sample: int) -> Any:
        """Returns a sample that is published, by its number. Raises as `read`."""
        try:
            lines = self._reader.lines_published(sample, sample + 1)
        except (ChunkCorrupt, RowInvalid) as cause:
            return self._samples.substitute(sample, cause)
        return self._samples.of_lines(lines, range(sample, sample + 1))[0]

    def _read(self, space: IndexSpace, index: int, count: int, epoch: int) -> list[Any]:
        lane, position = space.layout.locate(index)
        if lane != space.rank.dp_rank:
            space.tell_lane(index, lane)
        located = self._locate(space, lane, position, count, epoch)
        samples = located.samples
        count = min(count, len(samples))
        try:
            lines = self._lines_ahead(index, count, epoch, space.step)
            if not lines:
                lines = self._load(index, count, epoch, located)[:count]
        except (ChunkCorrupt, RowInvalid) as cause:
            return [self._samples.substitute(int(samples[0]), cause)]
        return self._samples.of_lines(lines, samples)

    def _load(self, index: int, count: int, epoch: int, located: Located) -> list[bytes]:
        """Reads the lines of an index and of those behind it, and keeps them; returns all of them.

        Fewer than wanted where a bad row follows or rows are large; more where calls follow each other in order.
        """
        # The old lines are freed first, so that the new ones land where the CPU's caches are warm.
        self.ahead = _NOTHING
        samples, held, place, ahead = located.samples, located.held, located.place, located.ahead
        if isinstance(samples, range):
            lines = self._reader.lines_published(samples[0], samples[-1] + 1, count)
        elif held is not None:
            stop = min(place + max(count, ahead - ahead % count), len(held.samples))
            lines = self._scattered.lines(held, place, stop)
            # What was read ahead is taken without asking here.
            self._next = *self._next[:2], located.position + len(lines)
        else:
            lines = self._one_by_one(samples[:count].tolist())
        self.ahead = (index, lines, epoch)
        return lines

    def _one_by_one(self, samples: list[int]) -> list[bytes]:
        lines: list[bytes] = []
        for sample in samples:
            try:
                lines += self._reader.lines_published(sample, sample + 1)
            except (ChunkCorrupt, RowInvalid):
                if not lines:
                    raise
                break
            if len(lines[-1]) > LARGE_ROW_BYTES:
                break
        return lines

    def _lines_ahead(self, index: int, count: int, epoch: int, step: int) -> list[bytes]:
        """Returns the lines of the first of `count` consecutive indices that were read ahead."""
        first, lines, ahead_epoch = self.ahead
        place, beside = divmod(index - first, step)
        return lines[place : place + count] if epoch == ahead_epoch and place >= 0 and not beside else []

    def _locate(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int) -> Located:
        """Finds the samples that a position and the following ones draw, waiting until they are certain."""
        last = self._next
        gap = position - last[2] if last[:2] == (lane, epoch) else -1
        locate = self._in_window if space.course.rules.window else self._in_run
        located = locate(space, lane, position, count, epoch, gap)
        self._next = lane, epoch, position + min(count, len(located.samples))
        return located

    def _in_run(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int, gap: int) -> Located:
        known = self._run
        if known is None or known[:2] != (lane, epoch) or not known[2].first <= position < known[2].stop:
            if count == 1 and not 0 <= gap < space.course.rules.unit:
                # Far from the one before only itself: to find the others costs as much again.
                sample = space.draw_at(lane, position).sample
                return Located(range(sample, sample + 1))
            known = self._run = (lane, epoch, space.run(lane, position))
        run = known[2]
        return Located(range(run.sample + position - run.first, run.sample + run.stop - run.first))

    def _in_window(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int, gap: int) -> Located:
        window = self._window
        place, held = position - window.first, None
        if window.lane == lane and window.epoch == epoch and 0 <= place < len(window.samples):
            samples, held = window.samples[place:], window.held
        else:
            self._steady = self._steady + 1 if 0 <= gap <= space.course.rules.window else 0
            if self._steady < _STEADY:
                # The indices behind a lane's last position are those of another lane.
                stop = min(position + count, space.layout.block)
                draws = [space.draw_at(lane, at).sample for at in range(position, stop)]
                samples = np.array(draws, dtype=np.int64)
            else:
                samples = space.window(lane, position, _MOST)
                place, held = 0, self._scattered.prepare(samples)
                self._window = _Window(lane, epoch, position, samples, held)
        rows = min(_AHEAD_ROWS, _AHEAD_BYTES // held.row_bytes) if gap == 0 and held is not None else 0
        return Located(samples, position, held, place, rows)


def place_ahead(indices: Any, first: int, step: int, count: int) -> int:
    """Returns the place of a batch among `count` lines that were read ahead, from index `first` on, in steps.

    It is -1 if not all of the batch is there, in their order; anything but a list of ints is not there.
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
        **vars(error),
    )
