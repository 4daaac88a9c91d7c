"""Maps the indices of a data set to samples, waits until a draw is decided, and reads the samples in each process.

Every number follows from the stream's published total and the settings, so all ranks agree without communication.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from torch.utils.data import get_worker_info

from lazyshard.data.rank import IN_EPOCH_CALLED, ORDER_CHECKED, Rank, SharedNumbers, Stats, enter_process, log
from lazyshard.data.run_state import warn_if_undone
from lazyshard.data.samples import RowsOf, SampleMaker, Samples, late_rows
from lazyshard.data.settings import RunOrder
from lazyshard.errors import ChunkCorrupt, ChunkRetired, LazyShardError, LengthUnknown, RowInvalid
from lazyshard.part import Array, Int64Array, UInt32Array
from lazyshard.plan.course import Course, Draw, Run
from lazyshard.plan.deal import Layout
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES
from lazyshard.stream.scattered import Held, ScatteredReader
from lazyshard.stream.stream import lengths_missing, read_lengths

if TYPE_CHECKING:
    from lazyshard.data.commits import ReadingHints

_NO_LENGTH: Final = "the data set has no length yet; set max_total_samples (per epoch) or num_samples (of the run)"
_IN_EPOCH_WAIT_S: Final = 5.0  # How long a worker waits for the training loop to call `in_epoch` for the previous batch
_POSITIONS: Final = 1 << 20  # Positions computed at a time: their samples take 8 MB

# Lines read ahead: index of the first line, step, epoch, the lines of that index and the following ones at this step,
# and the function that makes samples from them, if no more is needed. Only ever replaced as one value, so that no
# thread combines the lines of one place with the index of another.
Ahead: TypeAlias = "tuple[int, int, int, list[bytes], RowsOf | None]"

# Shared by all index spaces of a data set: its reader, the kinds of warnings already logged, and the shared numbers.
Shared = tuple[StreamReader, set[str], SharedNumbers]

NOTHING: Final[Ahead] = (0, 1, 0, [], None)

_MOST: Final = 16_384  # Positions whose order is computed together
_AHEAD_BYTES: Final = 512 << 10  # Maximum read ahead if calls follow each other in order; also at most 256 rows

# Samples of consecutive positions: at least one, and more than wanted if they are known; the position of the first one
# in its lane; the held rows and the place in them; and how many rows to read, including rows beyond the wanted ones.
# Rows of a range are read together, others are copied from the held rows, or read one by one.
_Located = tuple[Samples, int, Held | None, int, int]


def as_count(consumed: object, what: str = "samples") -> int:
    """Returns the `consumed` of `state_dict` as an int. Raises TypeError: it is not an integer."""
    try:
        return operator.index(consumed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"consumed must be a number of {what}, an int, got {consumed!r}") from None


class Space:
    """The indices of a data set or a blend in one epoch: `block` positions of each rank.

    Each rank has drawn `start` positions in the state from which the run begins or continues, and `before` samples
    were trained before the first position. Consecutive indices of a lane are `step` apart.
    """

    def __init__(self, where: object, order: RunOrder, rank: Rank, block: int, start: int, before: int) -> None:
        self.order, self.rank, self.start, self.before = order, rank, start, before
        self.layout = Layout(rank.dp_size, block, strided=order.layout == "strided")
        self.step, self._where = 1 if order.layout == "block" else rank.dp_size, where

    def lane_indices(self, position: int | None = None) -> range:
        """Returns the indices of this rank from a position on, in order; None means the position of the run."""
        return self.layout.lane_indices(self.rank.dp_rank)[self.start if position is None else position :]

    def consumed(self, position: int) -> int:
        """Returns the number of samples trained, over all ranks, once each rank has drawn `position` positions."""
        return self.before + self.layout.dp * position

    def position_after(self, consumed: int) -> int:
        """Returns the position after `consumed` samples. Raises ValueError, TypeError as `state_dict`."""
        count, dp, size = as_count(consumed), self.layout.dp, self.order.batch_size
        # The bounds: what was trained when the loaded state was saved, and all there is.
        least, most = self.consumed(self.start), self.consumed(max(self.layout.block, self.start))
        position, rest = divmod(count - self.before, dp)
        if not least <= count <= most or rest or position % size:
            step = f"in steps of dp_size * batch_size = {dp} * {size}"
            raise ValueError(f"{self._where}: consumed must be at least {least}, at most {most}, {step}, got {count}")
        return position


class IndexSpace(Space):
    """The indices of one stream, which stay valid however the stream continues.

    `total` is the number of samples that lengths are based on; None if the end is open and there is no maximum.
    `wraps`: later indices may draw a later epoch than the first ones. `hints`: the reading hint of this rank, or None.
    Raises LengthUnknown: there is no end, no max_total_samples and no num_samples; ValueError as `order.block`.
    """

    def __init__(
        self, order: RunOrder, rank: Rank, course: Course, total: int | None, hints: ReadingHints | None, shared: Shared
    ) -> None:
        reader, self._warned, self._shared = shared
        block = order.block(course, total)
        if block is None:
            raise still_open(reader)
        super().__init__(reader.directory, order, rank, block, course.current.draws, course.consumed_before)
        self.total, self.course, self.hints = total, course, hints
        self._reader, published = reader, reader.seen
        known = order.known_total(published)
        self.wraps = known is None or block > course.begin(known).length
        left = 0 if known is None else course.leftover(known)
        if known == published.samples:
            last = max(0, published.chunks - 1) * reader.samples_per_chunk
            if left >= course.gaps.kept(last, known):
                # No rank will open the last chunk, which validates the end of a foreign directory.
                reader.check_end()
        # With num_samples the caller decides where to stop; `leftover` returns the rest.
        if left and order.num_samples is None and rank.dp_rank == 0:
            batch = f"fewer than dp_size * batch_size = {rank.dp_size} * {order.batch_size}"
            kept = course.gaps.kept(0, known or 0)
            self.warn_once("leftover", f"{kept} samples; left over in each epoch: {left}, {batch}")
        # Positions up to this one are decided, given this total: if a position needs fewer published samples than one
        # that was already waited for, the stream is not read. Only ever replaced as one value, so that no thread
        # combines a position with the total of another thread.
        self._certain: tuple[int, int | None] = (-1, None)

    def draw(self, index: int) -> Draw:
        """Returns epoch and sample of an index, waiting until they are decided. Raises IndexError, WaitTimeout."""
        return self.draw_at(*self.layout.locate(index))

    def draw_at(self, lane: int, position: int) -> Draw:
        """Returns epoch and sample of a position. Waits and raises as `draw`; so do the methods below."""
        return self.course.draw(lane, position, self._total(position))

    def sample_at(self, lane: int, position: int) -> int:
        """Returns the sample of a position, as `draw_at`."""
        segment, shift, _ = self.course.begin(self._total(position)).around(position)
        return segment.sample(lane, position + shift)

    def end_of(self, drawn: int, position: int) -> tuple[int, int] | None:
        """Returns the position where the epoch of a run ends that has drawn `drawn` positions, and the total.

        None if the micro batch of `position` belongs to the epoch and the end is still open. Waits until that is
        decided.
        """
        total = self._total(position)
        return None if total is None else (self.course.epoch_stop(drawn, total), total)

    def run(self, lane: int, position: int) -> Run:
        """Returns the run of consecutive samples around a position."""
        run = self.course.run(lane, position, self._total(position))
        # The course is endless, the indices of a lane are not.
        return run if run.stop <= self.layout.block else run._replace(stop=self.layout.block)

    def window(self, lane: int, position: int, most: int) -> Int64Array:
        """Returns the samples of a position and of those after it in its window, at least one, as int64."""
        total = self._total(position)
        stop = min(self.course.window_stop(lane, position, total), position + most, self.layout.block)
        return self.course.draws(lane, np.arange(position, stop), total)[1]

    def ready(self, index: int) -> bool:
        """Returns whether a sample can be read without waiting, judging by what was last read of the stream."""
        position, seen = self.layout.locate(index)[1], self._reader.seen
        return position <= self._certain[0] or seen.ended or self.course.needed(position) <= seen.samples

    def _total(self, position: int) -> int | None:
        certain, total = self._certain
        limit = self.order.max_total_samples
        if self.hints is not None and position >= self.hints.stop:
            seen = self._reader.seen
            known = self.order.known_total(seen)
            self.hints.enter(position, limit if known is None else known, seen.samples)
        if position > certain:
            needed = self.course.needed(position)
            published = self._reader.wait_for(needed if limit is None else min(needed, limit))
            total = self.order.known_total(published)
            self._certain = (position if total is None else self.layout.block, total)
            if limit is not None and published.samples > limit:
                self.warn_once("cut", f"{published.samples} samples are published, but max_total_samples is {limit}")
        # With num_samples continuing is intended; a caller of `in_epoch` stops at the end, though workers read ahead.
        wrapped = self.wraps and total is not None and position >= self.course.begin(total).length
        if wrapped and self.order.num_samples is None and not self._shared.view[IN_EPOCH_CALLED]:
            way = ". To stop instead, call `dataset.in_epoch(index)` before each step"
            text = f"the stream has ended with {total} samples; the following ones are of the next epoch{way}"
            self.warn_once("wrapped", text)
        return total

    def is_left_out(self, drawn: Draw, epoch: int) -> bool:
        """Returns whether a sample lies after the end at which the training loop stops, so that it is never trained.

        A worker, which reads ahead, waits briefly for the loop to call `in_epoch`.
        """
        if drawn.epoch <= epoch or (self.order.num_samples is not None and not self.order.blended):
            return False
        parent = self._reader.parent
        deadline = time.monotonic() + (0.0 if parent is None else _IN_EPOCH_WAIT_S)
        while not self._shared.view[IN_EPOCH_CALLED]:
            if time.monotonic() >= deadline or (parent is not None and parent.done()):
                return False
            time.sleep(0.05)
        return True

    def warn_once(self, what: str, text: str) -> None:
        """Logs a warning, once in each process for each kind."""
        # All ranks would log the same, so only ranks 0 and 1 do; not 0 alone, as misuse may only show on another rank.
        if what not in self._warned and self.rank.dp_rank < 2:
            self._warned.add(what)
            log.warning("%s: %s", self._where, text)

    def warn_of_lane(self, index: int, lane: int, name: str = "dataset") -> None:
        """Warns of an index that belongs to another rank."""
        given = f"rank {self.rank.dp_rank} of {self.rank.dp_size} was given index {index}, which belongs to rank {lane}"
        self.warn_once(name, f"{given}: pass `sampler={name}.rank_indices`, or choose another layout")


def no_length(where: object, why: str) -> LengthUnknown:
    """Returns the error for an object without a length."""
    return LengthUnknown(f"{where}: {why}", directory=str(where))


def still_open(reader: StreamReader, so: str = _NO_LENGTH) -> LengthUnknown:
    """Returns the error for a number that is unknown because the stream is live."""
    live = f"the stream is still being produced ({reader.seen.samples} samples so far)"
    return no_length(reader.directory, f"{live}, so {so}")


def lengths_by_sample(reader: StreamReader, total: int | None) -> UInt32Array:
    """Reads the lengths of `total` samples, from the seals, as u32. Raises LengthUnknown, StreamMismatch, OSError."""
    if total is None:
        raise still_open(reader, "not all lengths are known; read them once it has ended")
    if reader.stream_id is None:
        raise lengths_missing(reader.directory)
    reader._stream.check_identity()
    return read_lengths(reader._stream, total)


def lengths_by_index(space: IndexSpace, by_sample: UInt32Array) -> Array:
    """Returns the length of each index's sample, as int32 or int64, as torch cannot reduce unsigned integers."""
    total, block = len(by_sample), space.layout.block
    kind = np.int32 if not total or by_sample.max() <= np.iinfo(np.int32).max else np.int64
    found: Array = np.zeros(space.layout.size, kind)
    for lane in range(space.layout.dp):
        indices = space.layout.lane_indices(lane)
        lengths = found[indices.start : indices.stop : indices.step]
        for first in range(0, block, _POSITIONS):
            positions = np.arange(first, min(first + _POSITIONS, block))
            lengths[positions] = by_sample[space.course.draws(lane, positions, total)[1]]
    return found


class IndexReader:
    """Reads the samples of indices in one process. Threads may share it: its values are only replaced.

    With shuffle windows, a caller that reads in order, possibly with a step, has the rest of each window planned and
    its chunks held where that pays off; for random access each sample is read on its own. As a context manager it
    reports the statistics.
    """

    def __init__(self, reader: StreamReader, samples: SampleMaker, shared: SharedNumbers, *, late: bool) -> None:
        self.ahead = NOTHING
        self.rows_of: RowsOf | None = None
        self._pid = 0  # The process that has entered; 0 for none yet
        self._reader, self._samples, self._shared, self._late = reader, samples, shared, late
        self._scattered = ScatteredReader(reader)
        self._space: IndexSpace | None = None
        self._reported = Stats()
        # A run, or the rest of a window: lane, epoch, first position, samples, and where held rows lie.
        self._planned: tuple[int, int, int, Samples, Held | None] = 0, 0, 0, (), None
        # Lane, epoch and position after the last call; with windows, how many consecutive calls continued near there.
        self._next = (-1, 0, 0)
        self._steady = 0

    def enter(self, space: IndexSpace) -> None:
        """Sets up the reader for this process, if that was not done yet."""
        if self._pid == os.getpid():
            return
        enter_process(self._reader, space.rank)
        self._reader.on_wait = None if space.hints is None else space.hints.repeat
        self._samples.left_out = space.course.gaps
        if self._late and get_worker_info() is not None and self._reader.stream_id is not None:
            self._samples.rows_of = partial(late_rows, self._reader)
        # Makes samples from lines if rows are used as they are; None if they are encoded or hold arrays.
        self.rows_of = None if self._samples.encodes or self._reader.arrays else self._samples.rows_of
        if self._pid:
            # A fork inherits the bad samples of its parent, but the limit applies to each process.
            self._samples.reset_counts()
            self._reported = Stats(chunks_opened=self._reported.chunks_opened, waited_s=self._reported.waited_s)
        # Set last, so that no other thread reads before the space is set.
        self._space, self._pid = space, os.getpid()

    def __enter__(self) -> None:
        """Begins to read."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, LazyShardError) and get_worker_info() is not None:
            error.carry_fields()
        self.report()

    def report(self) -> None:
        """Adds the statistics since the last report to the shared ones."""
        stats, before = self._samples.stats, self._reported
        if stats == before:
            return
        now = self._reported = Stats._make(stats)
        self._shared.report(now, before)
        space, numbers = self._space, self._shared.view
        first = now.chunks_opened and not before.chunks_opened and not numbers[ORDER_CHECKED]
        if first and space is not None and space.rank.dp_rank == 0:
            # After the first chunk, which records how the rows were dealt.
            numbers[ORDER_CHECKED] = 1
            warn_if_undone(space.order, space.course.rules.unit, self._reader)

    def read(self, space: IndexSpace, wanted: list[int], start: int, epoch: int) -> list[Any]:
        """Returns the samples of consecutive indices of a batch from place `start` on, at least one.

        If the samples lie after the end at which a training loop stops and their chunk is deleted, returns the stream's
        last sample instead, whose chunk is kept and which is not trained. Raises as `LazyShardedDataset.__getitem__`.
        """
        if (count := len(wanted)) == 1:
            index = wanted[0]
        else:
            if space.wraps and count != (size := space.order.batch_size) and not space.order.blended:
                space.warn_once("batch", f"got a batch of {count}, batch_size is {size}: set it to the loader's")
            index, count = consecutive(wanted, start, space.step)
        try:
            lane, position = space.layout.locate(index)
            if lane != space.rank.dp_rank:
                space.warn_of_lane(index, lane)
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
            way = "produce the stream with --retain all, or several epochs of its rows in advance"
            stop = "" if space.order.num_samples is not None else "; or stop: call `in_epoch(index)` before each step"
            raise ChunkRetired(f"{error.file}: {text} by its producer: {way}{stop}", **vars(error)) from error

    def lines(self, space: IndexSpace, index: int, epoch: int) -> list[bytes]:
        """Returns the checked line of an index, which must not be bad, and the following lines read with it."""
        if ahead := self._lines_ahead(index, sys.maxsize, epoch):
            return ahead
        try:
            lane, position = space.layout.locate(index)
            return self._load(space, index, 1, epoch, self._locate(space, lane, position, 1, epoch))
        finally:
            self.report()

    def _load(self, space: IndexSpace, index: int, count: int, epoch: int, located: _Located) -> list[bytes]:
        """Reads and keeps the lines of an index and of some after it: fewer than wanted if one is bad or large."""
        # Free the old lines first, so that the new ones reuse memory that is warm in the CPU's caches.
        self.ahead = NOTHING
        samples, position, held, place, ahead = located
        lines: list[bytes] = []
        if isinstance(samples, range):
            lines = self._reader.lines_published(samples[0], samples[-1] + 1, count)
        elif held is not None:
            stop = min(place + max(count, ahead - ahead % count), len(held.samples))
            lines = self._scattered.lines(held, place, stop)
            # Lines that were read ahead are served without another call to `_locate`.
            self._next = *self._next[:2], position + len(lines)
        else:
            for sample in map(int, samples[:count]):
                try:
                    lines += self._reader.lines_published(sample, sample + 1)
                except (ChunkCorrupt, RowInvalid):
                    if not lines:
                        raise
                    break
                if len(lines[-1]) > LARGE_ROW_BYTES:
                    break
        if len(lines) > 1:
            self.ahead = (index, space.step, epoch, lines, self.rows_of)
        return lines

    def _lines_ahead(self, index: int, count: int, epoch: int) -> list[bytes]:
        """Returns the lines read ahead for the first of `count` consecutive indices."""
        first, step, ahead_epoch, lines, _ = self.ahead
        if not lines:
            return lines
        place, rest = divmod(index - first, step)
        return lines[place : place + count] if epoch == ahead_epoch and place >= 0 and not rest else []

    def _locate(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int) -> _Located:
        """Finds the samples that a position and the following ones draw, waiting until they are decided."""
        rules, last = space.course.rules, self._next
        gap = position - last[2] if last[0] == lane and last[1] == epoch else -1
        planned_lane, planned_epoch, first, planned, held = self._planned
        if planned_lane != lane or planned_epoch != epoch or not first <= position < first + len(planned):
            if count == 1 and not rules.window and not 0 <= gap < rules.unit:
                # A single position: finding its neighbours would cost as much again.
                self._next = lane, epoch, position + 1
                return [space.sample_at(lane, position)], position, None, 0, 0
            self._steady = self._steady + 1 if 0 <= gap <= rules.window else 0
            first, held = position, None
            # Once two calls have continued near the end of the previous one, the rest of the window is planned.
            if rules.window and self._steady < 2:
                # Planning more would cost as much again. Positions after a lane's last one belong to another lane.
                stop = min(position + count, space.layout.block)
                planned = [space.sample_at(lane, at) for at in range(position, stop)]
            else:
                if rules.window:
                    planned = window = space.window(lane, position, _MOST)
                    held = self._scattered.prepare(window)
                else:
                    run = space.run(lane, position)
                    first, planned = run.first, range(run.sample, run.sample + run.stop - run.first)
                self._planned = lane, epoch, first, planned, held
        samples = planned[position - first :]
        self._next = lane, epoch, position + min(count, len(samples))
        rows = min(256, _AHEAD_BYTES // held.row_bytes) if gap == 0 and held is not None else 0
        return samples, position, held, position - first, rows


def consecutive(indices: list[int], start: int, step: int) -> tuple[int, int]:
    """Returns the index at a place of a batch, and how many indices from there on follow each other at `step`."""
    index, count = indices[start], len(indices) - start
    if count == 1 or (start == 0 and indices == list(range(index, index + count * step, step))):
        return index, count
    count = 1
    while start + count < len(indices) and indices[start + count] == index + count * step:
        count += 1
    return index, count
