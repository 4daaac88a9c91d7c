"""What the indices of a data set mean: which sample each draws, and from when on that is known.

Every number here follows from the stream's published total and the settings, so all ranks agree without a word.
"""

from __future__ import annotations

import logging
import operator
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.data.rank import ASKED, Rank, SharedNumbers
from lazyshard.data.settings import RunOrder
from lazyshard.errors import LengthUnknown, StreamMismatch
from lazyshard.plan.course import Course, Draw, Run
from lazyshard.plan.deal import Layout
from lazyshard.stream import StreamReader
from lazyshard.stream.stream import open_now
from lazyshard.stream.token_lengths import lengths_not_ours, read_lengths

if TYPE_CHECKING:
    from lazyshard.data.commits import ReadingHints

_log = logging.getLogger("lazyshard")

_TO_ASK_S: Final = 5.0
"""How long a worker waits for a loop to ask about the batch before the one that it has come to."""

_POSITIONS: Final = 1 << 20
"""Drawn at a time: their samples take 8 MB."""


def as_count(consumed: object, what: str = "samples") -> int:
    """Returns what `state_dict` was given. Raises TypeError: it is no integer."""
    try:
        return operator.index(consumed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"consumed is a number of {what}, an int, got {consumed!r}") from None


class Space:
    """The indices of a data set, or of a blend, in one epoch that was set. Fixed once made.

    Attributes:
        layout: how the ranks' positions lie among the indices.
        step: how far apart the indices are that follow each other in a lane.
        stands: positions of each rank that were drawn in the state with which the run begins or goes on.
        before: samples that were trained before the first position, over all ranks.
    """

    def __init__(self, where: object, order: RunOrder, rank: Rank, block: int, stands: int, before: int) -> None:
        self.order = order
        self.rank = rank
        self.layout = Layout(rank.dp_size, block, strided=order.layout == "strided")
        self.step = 1 if order.layout == "block" else rank.dp_size
        self.stands = stands
        self.before = before
        self._where = where

    def lane_indices(self, position: int | None = None) -> range:
        """Returns the indices of this rank from a position on, None for where the run stands, in order."""
        return self.layout.lane_indices(self.rank.dp_rank)[self.stands if position is None else position :]

    def consumed(self, position: int) -> int:
        """Returns the samples that were trained, over all ranks, once each rank has drawn so many positions."""
        return self.before + self.layout.dp * position

    def position_after(self, consumed: int) -> int:
        """Returns the position after so many samples. Raises ValueError, TypeError as `state_dict`."""
        count, dp, size = as_count(consumed), self.layout.dp, self.order.batch_size
        # What was trained when the loaded state was saved, and all that there is.
        least, most = self.consumed(self.stands), self.consumed(max(self.layout.block, self.stands))
        position, beside = divmod(count - self.before, dp)
        if not least <= count <= most or beside or position % size:
            batch = f"it grows by whole micro batches of all ranks, dp_size * batch_size = {dp} * {size} a batch"
            raise ValueError(f"{self._where}: consumed is at least {least}, at most {most}, and {batch}, got {count}")
        return position


class IndexSpace(Space):
    """The indices of one stream, whatever it does afterwards.

    Attributes:
        total: what indices are counted with; None as long as the end is open and there is no maximum.
        course: what each rank draws, by position of the state's current part.
        wraps: later indices may draw a later epoch than the first ones.
        hints: the reading hint that this rank keeps, None if it keeps none.

    Raises:
        LengthUnknown: the stream is live and there is neither max_total_samples nor num_samples.
        ValueError: num_samples is less than one batch of every rank.
    """

    def __init__(
        self,
        order: RunOrder,
        rank: Rank,
        reader: StreamReader,
        course: Course,
        total: int | None,
        hints: ReadingHints | None,
        told: set[str],
        shared: SharedNumbers,
    ) -> None:
        block = order.block(course, total)
        if block is None:
            raise length_unknown(reader)
        super().__init__(reader.directory, order, rank, block, course.current.draws, course.consumed_before)
        self.total = total
        self.course = course
        self.hints = hints
        self._reader = reader
        self._told = told
        self._shared = shared
        published = reader.seen
        known = order.known_total(published)
        self.wraps = known is None or block > course.epoch_length(known)
        left = 0 if known is None else course.leftover(known)
        if left and known == published.samples and left >= known - (published.chunks - 1) * reader.samples_per_chunk:
            # No rank will open the last chunk, which proves the end of a foreign directory.
            reader.check_end()
        # With num_samples the caller decides where to stop, and `leftover` tells the rest.
        if left and order.num_samples is None and rank.dp_rank == 0:
            batch = f"fewer than dp_size * batch_size = {rank.dp_size} * {order.batch_size}"
            self.tell("leftover", f"{known} samples; left over in each epoch: {left}, {batch}")
        # Positions up to this one are certain, given this total: what needs fewer published samples than something
        # that was waited for needs no look. One value that is only ever replaced: a position must not meet the total
        # of another thread's.
        self._certain: tuple[int, int | None] = (-1, None)

    def draw(self, index: int) -> Draw:
        """Returns epoch and sample of an index, waiting until they are certain. Raises IndexError, WaitTimeout."""
        return self.draw_at(*self.layout.locate(index))

    def draw_at(self, lane: int, position: int) -> Draw:
        """Returns epoch and sample of a position. Waits and raises as `draw` does; so do the methods that follow."""
        return self.course.draw(lane, position, self._total(position))

    def epoch_at(self, position: int) -> int:
        """Returns the epoch of a run that has drawn so many positions; at its end still that one."""
        return self.draw_at(0, position - 1).epoch if position else self.course.epoch(self._total(0))

    def end_of(self, drawn: int, position: int) -> tuple[int, int] | None:
        """Returns where the epoch ends in which a run stands that has drawn so many positions: position, and total.

        None if the micro batch of `position` belongs to it and the end is still open. Waits until that is certain.
        """
        total = self._total(position)
        return None if total is None else (self.course.epoch_stop(drawn, total), total)

    def run(self, lane: int, position: int) -> Run:
        """Returns the neighbours of a position that draw consecutive samples."""
        run = self.course.run(lane, position, self._total(position))
        # The course goes on for ever, the indices of a lane do not.
        return run if run.stop <= self.layout.block else run._replace(stop=self.layout.block)

    def window(self, lane: int, position: int, most: int) -> npt.NDArray[np.int64]:
        """Returns the samples of a position and of those behind it in its window, at least one, as int64."""
        total = self._total(position)
        stop = min(self.course.window_stop(lane, position, total), position + most, self.layout.block)
        return self.course.draws(lane, np.arange(position, stop), total)[1]

    def ready(self, index: int) -> bool:
        """Returns whether a sample can be read without waiting, as far as is known without a look."""
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
                self.tell("cut", f"{published.samples} samples are published, but max_total_samples is {limit}")
        # Who gives num_samples wants to go on so, and who asks where the epoch ends stops there, though workers read
        # ahead.
        wrapped = self.wraps and total is not None and position >= self.course.epoch_length(total)
        if wrapped and self.order.num_samples is None and not self._shared.view[ASKED]:
            way = ". To stop instead, ask `dataset.in_epoch(index)` before each step"
            self.tell("wrapped", f"the stream has ended with {total} samples; what is read now is the next epoch{way}")
        return total

    def is_left_out(self, drawn: Draw, epoch: int) -> bool:
        """Returns whether a sample is behind the end at which the training loop stops, so that it is read in vain.

        A loader reads ahead of the loop's question whether a batch still is in the epoch. A worker waits for a moment
        for a loop that has not asked yet: at the latest it asks about the batch before.
        """
        if drawn.epoch <= epoch or (self.order.num_samples is not None and not self.order.blended):
            return False
        parent = self._reader.parent
        deadline = time.monotonic() + (0.0 if parent is None else _TO_ASK_S)
        while not self._shared.view[ASKED]:
            if time.monotonic() >= deadline or (parent is not None and parent.done()):
                return False
            time.sleep(0.05)
        return True

    def tell(self, what: str, text: str) -> None:
        """Logs a warning, once in each process for each kind; on the first two ranks, since all would say the same.

        Two, because a rank that is given another one's indices need not be the first.
        """
        if what not in self._told and self.rank.dp_rank < 2:
            self._told.add(what)
            _log.warning("%s: %s", self._where, text)

    def tell_lane(self, index: int, lane: int, name: str = "dataset") -> None:
        """Warns of an index that is another rank's."""
        asked = f"rank {self.rank.dp_rank} of {self.rank.dp_size} was asked for index {index}, which is rank {lane}'s"
        why = f"did you forget `sampler={name}.rank_indices`? Else choose another layout"
        self.tell(name, f"{asked}: {why}")


def length_unknown(reader: StreamReader) -> LengthUnknown:
    """Returns the error for a data set whose indices cannot be counted yet."""
    text = f"{reader.directory}: the stream is still being produced ({reader.seen.samples} samples so far)"
    way = "pass max_total_samples, the most of an epoch, or num_samples, of the run"
    return LengthUnknown(f"{text}, so the data set has no length yet: {way}", directory=str(reader.directory))


def lengths_by_sample(reader: StreamReader, total: int | None) -> npt.NDArray[np.uint32]:
    """Reads the lengths of `total` samples, from the seals, as u32. Raises LengthUnknown, StreamMismatch, OSError."""
    directory = reader.directory
    if total is None:
        text = f"{directory}: the stream is still being produced ({reader.seen.samples} samples so far)"
        raise LengthUnknown(f"{text}, so not all lengths are known; ask once it has ended", directory=str(directory))
    if reader.stream_id is None:
        raise lengths_not_ours(directory)
    stream = open_now(directory)
    if stream.stream_id != reader.stream_id:
        here, now = reader.stream_id, stream.stream_id
        text = f"{directory}: stream {here} was replaced by stream {now}"
        raise StreamMismatch(text, directory=str(directory), expected=here, actual=now)
    return read_lengths(stream, total)


def lengths_by_index(space: IndexSpace, by_sample: npt.NDArray[np.uint32]) -> npt.NDArray[np.signedinteger[Any]]:
    """Returns the length of what each index draws, of the lengths of all samples.

    As int32, or int64 if a sample is longer than that can say: torch has no reductions of unsigned numbers.
    """
    total, block = len(by_sample), space.layout.block
    kind = np.int32 if not total or by_sample.max() <= np.iinfo(np.int32).max else np.int64
    found: npt.NDArray[np.signedinteger[Any]] = np.zeros(space.layout.size, kind)
    for lane in range(space.layout.dp):
        indices = space.layout.lane_indices(lane)
        lengths = found[indices.start : indices.stop : indices.step]
        for first in range(0, block, _POSITIONS):
            positions = np.arange(first, min(first + _POSITIONS, block))
            lengths[positions] = by_sample[space.course.draws(lane, positions, total)[1]]
    return found
