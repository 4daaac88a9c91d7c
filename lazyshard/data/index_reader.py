"""Reads what the indices of a data set draw, in each of its processes: lines read ahead, and made into samples.

Without a shuffle the lines of a run of consecutive samples are read together. In a shuffled window the order is
computed at once, and its rows are read together.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, Final

from torch.utils.data import get_worker_info

from lazyshard.data.index_space import IndexSpace
from lazyshard.data.rank import ORDER_CHECKED, SharedNumbers, Stats, enter_process
from lazyshard.data.samples import RowsOf, SampleMaker, Samples, late_rows
from lazyshard.data.settings import tell_undone
from lazyshard.errors import ChunkCorrupt, ChunkRetired, LazyShardError, RowInvalid
from lazyshard.plan.deal import Gaps
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES, Held, ScatteredReader

Ahead = tuple[int, int, int, list[bytes], RowsOf | None]
"""What was read ahead: index of the first line, step, epoch, lines of it and of the indices that follow it in such
steps, and what makes samples of them, if that is all there is to do. One value that is only ever replaced, so that no
thread sees the lines of one place with the index of another."""

NOTHING: Final[Ahead] = (0, 1, 0, [], None)

_MOST: Final = 16_384
"""Positions whose order is computed together."""

_AHEAD_BYTES: Final = 512 << 10
"""Read ahead at the most, where calls follow each other in order, and 256 rows."""


_Located = tuple[Samples, int, Held | None, int, int]
"""Samples, and how their rows are read: those of a range together, or cut out of what is held, others each by itself.

Samples of consecutive positions, at least one, and more than wanted where they are known; the position of the first in
its lane; what is held, and its place there; how many rows are read, also beyond those wanted.
"""


class IndexReader:
    """Reads for the indices of one process's data set. Several threads may share it: what it keeps is only replaced.

    In windows, who reads on and on, perhaps in steps, as a DataLoader worker does, gets what is left of each window
    planned, and its chunks held where that pays; who jumps about gets each sample by itself. As a context it reports
    what was met, and what is raised then crosses to another process with its fields.
    """

    def __init__(self, reader: StreamReader, samples: SampleMaker, shared: SharedNumbers, *, late: bool) -> None:
        self.ahead = NOTHING
        # The process that has read; 0 for none yet.
        self._pid = 0
        self._reader = reader
        self._scattered = ScatteredReader(reader)
        self._samples = samples
        self._shared = shared
        self._late = late
        self._space: IndexSpace | None = None
        self._reported = Stats()
        # A run, or what is left of a window: lane, epoch, first position, samples, and where rows lie that are held.
        self._planned: tuple[int, int, int, Samples, Held | None] = 0, 0, 0, (), None
        # Lane, epoch and position behind the last call's; in windows, how many calls in a row went on near there.
        self._next = (-1, 0, 0)
        self._steady = 0

    def enter(self, space: IndexSpace) -> None:
        """Makes what is read with this process's own, if it is not."""
        if self._pid == os.getpid():
            return
        worker = get_worker_info()
        enter_process(self._reader, space.rank, worker)
        self._reader.on_wait = None if space.hints is None else space.hints.repeat
        self._samples.left_out = Gaps(gap for part in space.course.parts for gap in part.skip)
        if self._late and worker is not None and self._reader.stream_id is not None:
            self._samples.rows_of = partial(late_rows, self._reader)
        if self._pid:
            # A fork begins with the bad samples of its parent, but the limit is each process's own.
            self._samples.forget_met()
            self._reported = Stats(chunks_opened=self._reported.chunks_opened, waited_s=self._reported.waited_s)
        # Last, so that no other thread reads before the space is there.
        self._space, self._pid = space, os.getpid()

    def __enter__(self) -> None:
        """Begins to read."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, LazyShardError) and get_worker_info() is not None:
            error.carry_fields()
        self.report()

    def report(self) -> None:
        """Tells the other processes what was met since."""
        now, before = self._samples.stats, self._reported
        if now == before:
            return
        self._reported = now
        self._shared.report(now, before)
        space, numbers = self._space, self._shared.view
        first = now.chunks_opened and not before.chunks_opened and not numbers[ORDER_CHECKED]
        if first and space is not None and space.rank.dp_rank == 0:
            # With the first chunk, which tells how the rows were dealt.
            numbers[ORDER_CHECKED] = 1
            tell_undone(space.order, space.course.rules.unit, self._reader)

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
            lane, position = space.layout.locate(index)
            if lane != space.rank.dp_rank:
                space.tell_lane(index, lane)
            located = self._locate(space, lane, position, count, epoch)
            samples = located[0]
            count = min(count, len(samples))
            try:
                lines = self._lines_ahead(index, count, epoch) or self._load(space, index, count, epoch, located)
            except (ChunkCorrupt, RowInvalid) as cause:
                return [self._samples.substitute(int(samples[0]), cause)]
            return self._samples.of_lines(lines[:count], samples)
        except ChunkRetired as error:
            drawn = space.draw(index)
            if space.is_left_out(drawn, epoch):
                return [self._samples.read(self._reader.seen.samples - 1)]
            if not drawn.epoch:
                raise
            text = f"sample {drawn.sample} is drawn again in epoch {drawn.epoch}, its chunk {error.chunk} was deleted"
            way = "to train another epoch, produce the stream with --retain all, or more epochs of its rows in advance"
            stop = "" if space.order.num_samples is not None else "; or stop: ask `in_epoch(index)` before each step"
            raise ChunkRetired(f"{error.file}: {text} by its producer: {way}{stop}", **vars(error)) from error

    def lines(self, space: IndexSpace, index: int, epoch: int) -> list[bytes]:
        """Returns the checked line of an index, which may not be bad, and those behind it that are read with it."""
        try:
            if ahead := self._lines_ahead(index, sys.maxsize, epoch):
                return ahead
            lane, position = space.layout.locate(index)
            return self._load(space, index, 1, epoch, self._locate(space, lane, position, 1, epoch))
        finally:
            self.report()

    def _load(self, space: IndexSpace, index: int, count: int, epoch: int, located: _Located) -> list[bytes]:
        """Reads the lines of an index and of those behind it, and keeps them; returns all of them.

        Fewer than wanted where a bad row follows or rows are large; more where calls follow each other in order.
        """
        # The old lines are freed first, so that the new ones land where the CPU's caches are warm.
        self.ahead = NOTHING
        samples, position, held, place, ahead = located
        if isinstance(samples, range):
            lines = self._reader.lines_published(samples[0], samples[-1] + 1, count)
        elif held is not None:
            stop = min(place + max(count, ahead - ahead % count), len(held.samples))
            lines = self._scattered.lines(held, place, stop)
            # What was read ahead is taken without asking here.
            self._next = *self._next[:2], position + len(lines)
        else:
            lines = self._one_by_one([int(one) for one in samples[:count]])
        self.ahead = (index, space.step, epoch, lines, self.rows_of)
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

    def _lines_ahead(self, index: int, count: int, epoch: int) -> list[bytes]:
        """Returns the lines of the first of `count` consecutive indices that were read ahead."""
        first, step, ahead_epoch, lines, _ = self.ahead
        place, beside = divmod(index - first, step)
        return lines[place : place + count] if epoch == ahead_epoch and place >= 0 and not beside else []

    def _locate(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int) -> _Located:
        """Finds the samples that a position and the following ones draw, waiting until they are certain."""
        rules, last = space.course.rules, self._next
        gap = position - last[2] if last[:2] == (lane, epoch) else -1
        planned_lane, planned_epoch, first, planned, held = self._planned
        if planned_lane != lane or planned_epoch != epoch or not first <= position < first + len(planned):
            self._steady = self._steady + 1 if 0 <= gap <= rules.window else 0
            # Once two calls have gone on near where the last one stopped, the rest of the window is planned.
            far = self._steady < 2 if rules.window else count == 1 and not 0 <= gap < rules.unit
            if far:
                # To find the others costs as much again. Those behind a lane's last position are another lane's.
                stop = min(position + count, space.layout.block)
                first, held = position, None
                planned = [space.draw_at(lane, at).sample for at in range(position, stop)]
            elif rules.window:
                window = space.window(lane, position, _MOST)
                first, planned, held = position, window, self._scattered.prepare(window)
            else:
                run = space.run(lane, position)
                first, planned, held = run.first, range(run.sample, run.sample + run.stop - run.first), None
            if not far:
                self._planned = lane, epoch, first, planned, held
        samples = planned[position - first :]
        self._next = lane, epoch, position + min(count, len(samples))
        rows = min(256, _AHEAD_BYTES // held.row_bytes) if gap == 0 and held is not None else 0
        return samples, position, held, position - first, rows


def consecutive(indices: list[int], start: int, step: int) -> tuple[int, int]:
    """Returns the index at a place of a batch, and how many from there on follow each other in steps of `step`."""
    index, count = indices[start], len(indices) - start
    if count == 1 or (start == 0 and indices == list(range(index, index + count * step, step))):
        return index, count
    count = 1
    while start + count < len(indices) and indices[start + count] == index + count * step:
        count += 1
    return index, count
