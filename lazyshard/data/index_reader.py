"""Reads what the indices of a data set draw, in each of its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from lazyshard.data.index_space import IndexSpace, length_given_up, length_unknown, lengths_by_index, lengths_by_sample
from lazyshard.data.lane import LaneReader, consecutive
from lazyshard.data.rank import Rank, enter_process, resolve_rank, watch_forks
from lazyshard.data.run_state import Ranges, RunStates
from lazyshard.data.samples import LateRows, SampleMaker
from lazyshard.data.settings import ENDLESS, RunOrder, tell_undone
from lazyshard.data.shared import EPOCH, ORDER_CHECKED, SharedNumbers, Stats
from lazyshard.errors import LazyShardError, LengthUnknown
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps
from lazyshard.stream import Published, StreamReader
from lazyshard.stream.run_state import course_of

if TYPE_CHECKING:
    from lazyshard.data.commits import ReadingMarks


class IndexReader:
    """Reads for the indices of one data set. Rank and length are settled at the first use, and never change after that.

    Attributes:
        states: where the run stands.
        shared, numbers: what the processes of the data set share, and a flat view of it: `numbers[EPOCH]`.
        lanes: reads the samples of consecutive indices.
        plain: whether rows are samples as they are, parsed in this process.
        step: how far apart the indices are that follow each other in a lane.
    """

    # Epoch, and its indices; None before the first use. One value that is only ever replaced, so that no thread meets
    # the space of one epoch under another's number.
    _newest: tuple[int, IndexSpace] | None = None
    # A `LazyShardedStream`, or batches of a live stream, go on as long as it does.
    _length_given_up: bool = False
    # Tokens of all samples, once somebody has asked.
    _tokens: npt.NDArray[np.uint32] | None = None

    def __init__(
        self,
        order: RunOrder,
        rank: Rank | None,
        reader: StreamReader,
        samples: SampleMaker,
        consumer: str | None,
        *,
        late: bool,
    ) -> None:
        if late and reader.arrays:
            text = "the rows of this stream hold arrays, which LateRow does not hand out; leave it out"
            raise ValueError(f"{reader.directory}: {text}")
        self.order = order
        self.states = RunStates(order, reader)
        self.shared = SharedNumbers()
        self.step = 1
        self._rank = rank
        self._reader = reader
        self._samples = samples
        self._consumer = consumer
        self._late = late
        self._since = time.time()
        # The kinds of warnings that were logged already.
        self._told: set[str] = set()
        self._reported = Stats()
        self._attach()
        self._report()

    def _attach(self) -> None:
        self.numbers = self.shared.view
        self.plain = not self._samples.encodes and not self._reader.arrays
        self.lanes = LaneReader(self._reader, self._samples)
        # The process that has read; 0 for none yet.
        self._pid = 0
        watch_forks(self)

    def __getstate__(self) -> dict[str, Any]:
        """Settles rank and length first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self.indices()
        left = ("lanes", "numbers", "_pid", "_tokens")
        return {name: value for name, value in vars(self).items() if name not in left} | {"_reported": Stats()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    @property
    def used(self) -> bool:
        """Whether rank and length are settled."""
        return self._newest is not None

    @property
    def rank(self) -> Rank | None:
        """Data-parallel rank and size, as given or settled; None if neither was."""
        return self._rank if self._newest is None else self._newest[1].rank

    def indices(self, epoch: int | None = None) -> IndexSpace:
        """Returns the indices of an epoch, None for that which is set. Raises as `IndexSpace` and `settle_unit`."""
        newest = self._newest
        if epoch is None:
            epoch = self.numbers[EPOCH]
        if newest is None:
            made = self._first_space(epoch)
            # Before the space: who finds that relies on this.
            self.step = made.step
            # One step, so that of two threads that come here at once both go on with the same space.
            newest = vars(self).setdefault("_newest", (epoch, made))
        if newest[0] != epoch:
            settled = newest[1]
            newest = self._newest = (epoch, self._space(epoch, settled.rank, settled.total))
        return newest[1]

    def counted(self) -> IndexSpace:
        """Returns the indices of the epoch that is set. Raises LengthUnknown: their number means nothing."""
        if self._length_given_up:
            raise length_given_up(self._reader.directory)
        return self.indices()

    def left(self) -> range:
        """Returns the indices of this rank still to be drawn; of a stream without a length as many as asked for."""
        try:
            self.indices()
        except LengthUnknown:
            self.give_up_length()
        return self.indices().lane_indices()

    def lengths(self) -> npt.NDArray[np.signedinteger[Any]]:
        """Returns the tokens of the sample that each index draws; see `LazyShardedDataset.__getitem__`."""
        if self._length_given_up or self.order.blended:
            raise length_given_up(self._reader.directory)
        if self._tokens is None:
            self._tokens = lengths_by_sample(self._reader, self.order.known_total(self._reader.refresh()))
        return lengths_by_index(self.indices(), self._tokens)

    def give_up_length(self) -> None:
        """Goes on for ever, from epoch to epoch, as an iterable without a length does. Or raises RuntimeError."""
        if self.used or self.order.blended:
            raise self._too_late(
                "a LazyShardedStream takes a data set that is not used yet and in no blend; make a new one, or a "
                "stream of the blend"
            )
        self._length_given_up = self.order.num_samples is None
        self.order = replace(self.order, num_samples=self.order.num_samples or ENDLESS)

    def count_steps(self) -> RunOrder:
        """Returns the order, by which the steps of the run are known from now on, one micro batch each by default."""
        if self.order.micro_batches_per_step is None:
            if self.used and self.states.given:
                raise self._too_late(
                    "this data set is in use already, call batches() before its rank or its length is asked for, or "
                    "give it order=Order(micro_batches_per_step=1)"
                )
            self.order = self.states.order = replace(self.order, micro_batches_per_step=1)
        return self.order

    def enter_blend(self) -> None:
        """Becomes a stream of a blend, which says how often to draw and keeps the state; or raises RuntimeError."""
        if self.used or self.order.blended or self.states.given:
            raise self._too_late(
                "a blend takes data sets that are new: not used, not blended, without a state; load the state of the "
                "blend, and skip samples, once it is made"
            )
        # Draws one by one, without an end, in the same order.
        order = replace(self.order, layout="strided", num_samples=ENDLESS, micro_batches_per_step=None, blended=True)
        self.order = replace(order, batch_size=1, unit_batch=order.batch_size)
        self.states = RunStates(self.order, self._reader)

    def _too_late(self, text: str) -> RuntimeError:
        return RuntimeError(f"{self._reader.directory}: {text}")

    def _first_space(self, epoch: int) -> IndexSpace:
        rank = self._rank or resolve_rank()
        self._since = time.time()
        self.settle_unit(rank)
        known = self.order.known_total(self._reader.refresh())
        return self._space(epoch, rank, self.order.max_total_samples if known is None else known)

    def _space(self, epoch: int, rank: Rank, total: int | None) -> IndexSpace:
        course = course_of(self.states.of(epoch, rank.dp_size))
        marks = self._marks(rank, course)
        return IndexSpace(self.order, rank, self._reader, course, total, marks, self._told, self.shared)

    def _marks(self, rank: Rank, course: Course) -> ReadingMarks | None:
        if self._consumer is None or rank.dp_rank:
            return None
        from lazyshard.data.commits import ReadingMarks

        return ReadingMarks(self._consumer, course, self._reader, self._since)

    def settle_unit(self, rank: Rank) -> None:
        """Settles the unit of a run for good: that of the state which it goes on from, or of the settings.

        Where "auto" is not certain yet it waits until there is a full chunk for every rank, or the stream has ended: by
        the length of the stream alone, so that every rank finds the same. Raises WaitTimeout, LengthUnknown.
        """
        size, unit, order = self._reader.samples_per_chunk, self.states.unit, self.order
        if unit is None:
            unit = order.auto_unit(size, rank.dp_size, self._reader.refresh())
        if unit is None:
            if order.max_total_samples is None and order.num_samples is None:
                raise length_unknown(self._reader)
            unit = order.auto_unit(size, rank.dp_size, self._chunk_of_each(rank))
        assert unit is not None, "certain once there are so many samples or the stream has ended"
        self.states.settle(unit)

    def _chunk_of_each(self, rank: Rank) -> Published:
        """Waits for a full chunk for every rank, or for the end of the stream."""
        reader, size = self._reader, self._reader.samples_per_chunk
        # Until this process reads, and says so itself.
        reader.label = f"rank {rank.dp_rank} of {rank.dp_size}"
        course = Course(self.order.rules(size, size), [Part(rank.dp_size, self.order.batch_size)])
        if (marks := self._marks(rank, course)) is not None:
            # Or a producer that is held back by --max-ahead would wait for us, as we for it.
            marks.enter(0, self.order.max_total_samples, reader.seen.samples)
            reader.on_wait = marks.repeat
        return reader.wait_for(rank.dp_size * size)

    def state_after(self, consumed: int | None) -> RunState:
        """Returns the state after so many samples; see `LazyShardedDataset.state_dict`."""
        space = self.indices()
        state = self.states.after(consumed, self.numbers[EPOCH], space.rank.dp_size)
        block, course = space.layout.block, space.course
        if consumed is not None and state.parts[-1].draws > max(block, course.current.draws):
            most = course.consumed_before + course.dp * block
            raise ValueError(
                f"{self._reader.directory}: consumed is at most {most}, all that this data set has, got {consumed}"
            )
        return state

    def go_on(self, state: dict[str, Any], *, anywhere: bool = True) -> tuple[int, int] | None:
        """Loads a state, once used one of the same course; returns its epoch and position, None before that."""
        in_worker = get_worker_info() is not None
        settled = self.used or in_worker
        found = self.states.load(state, self.indices().rank.dp_size if settled else None, anywhere)
        if not in_worker:
            self.numbers[EPOCH] = found[0]
        return found if settled else None

    def skip(self, samples: Ranges, chunks: Ranges, steps: Ranges) -> None:
        """Leaves samples out; see `LazyShardedDataset.skip`."""
        if self.used:
            raise self._too_late("this data set is in use already, what to skip is said before")
        if self.states.unit is None:
            self.settle_unit(self._rank or resolve_rank())
        self.states.skip(samples, chunks, steps, lambda: self._rank or resolve_rank())

    def fetch(self, indices: list[int]) -> list[Any]:
        """Returns the samples of a batch. Raises as `LazyShardedDataset.__getitem__` does."""
        # One epoch for the whole batch, whenever another one is set.
        epoch = self.numbers[EPOCH]
        with self:
            space = self.indices(epoch)
            if len(indices) not in (1, self.order.batch_size):
                space.tell_batch(len(indices))
            samples: list[Any] = []
            while len(samples) < len(indices):
                index, count = consecutive(indices, len(samples), space.step)
                samples += self.lanes.read(space, index, count, epoch)
            return samples

    def end_of(self, drawn: int, position: int) -> tuple[int, int] | None:
        """As `IndexSpace.end_of`."""
        with self:
            return self.indices().end_of(drawn, position)

    def epoch_at(self, drawn: int) -> int:
        """As `IndexSpace.epoch_at`."""
        with self:
            return self.indices().epoch_at(drawn)

    def read_samples(self, samples: Iterable[int]) -> list[Any]:
        """Returns samples by their numbers, all of them published. Raises as `fetch` does."""
        with self:
            return [self.lanes.read_sample(sample) for sample in samples]

    def lines_from(self, index: int, *, wait: bool) -> list[bytes]:
        """Returns the checked line of an index, and those of the indices behind it that are read with it.

        None at all where rows are not handed out as they are, or `wait` is false and it may not be published yet.
        """
        self.enter_process()
        if self.lanes.rows_of is None:
            return []
        epoch = self.numbers[EPOCH]
        space = self.indices(epoch)
        if not wait and not space.ready(index):
            return []
        try:
            return self.lanes.lines(space, index, epoch)
        finally:
            self._report()

    def enter_process(self) -> None:
        """Makes what is read with this process's own, if it is not."""
        if self._pid == os.getpid():
            return
        space, worker = self.indices(), get_worker_info()
        enter_process(self._reader, space.rank, worker)
        self._reader.on_wait = None if self._consumer is None or space.rank.dp_rank else self._repeat_mark
        self._samples.left_out = Gaps(gap for part in space.course.parts for gap in part.skip)
        if self._late and worker is not None and self._reader.stream_id is not None:
            self.plain = False
            self._samples.rows_of = LateRows(self._reader)
        if self._pid:
            # A fork begins with the bad samples of its parent, but the limit is each process's own.
            self._samples.forget_met()
            self._reported = Stats(chunks_opened=self._reported.chunks_opened, waited_s=self._reported.waited_s)
        # Last, so that no other thread reads before the space is there.
        self._pid = os.getpid()

    def _repeat_mark(self) -> None:
        """Tells the producer again what is needed, if it is not told any more."""
        if self._newest is not None and (marks := self._newest[1].marks) is not None:
            marks.repeat()

    def __enter__(self) -> None:
        """Begins to read in this process; what is raised then crosses to another one with its fields."""
        try:
            self.enter_process()
        except BaseException as error:
            self.__exit__(None, error, None)
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, LazyShardError) and get_worker_info() is not None:
            error.carry_fields()
        self._report()

    def _report(self) -> None:
        now, before = self._samples.stats, self._reported
        if now == before:
            return
        self._reported = now
        self.shared.report(now, before)
        space = None if self._newest is None else self._newest[1]
        first = now.chunks_opened and not before.chunks_opened and not self.numbers[ORDER_CHECKED]
        if first and space is not None and space.rank.dp_rank == 0:
            # With the first chunk, which tells how the rows were dealt.
            self.numbers[ORDER_CHECKED] = 1
            tell_undone(self.order, space.course.rules.unit, self._reader)
