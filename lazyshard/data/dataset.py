"""`LazyShardedDataset`: a stream as a map-style data set, each data-parallel rank with its own chunks."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from lazyshard.data import index_space
from lazyshard.data.index_space import IndexReader, IndexSpace
from lazyshard.data.map_style import Indexed
from lazyshard.data.rank import ASKED, EPOCH, Rank, SharedNumbers, Stats, resolve_rank
from lazyshard.data.run_state import Ranges, RunStates, StateDicts, epoch_of
from lazyshard.data.samples import BadRowCount, LateRow, SampleMaker
from lazyshard.data.settings import BadRows, EncodeCache, EncodeFn, Order, RowSteps, RunOrder, Step, check_group
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.course import Course, Draw
from lazyshard.store.files import stream_path
from lazyshard.stream import Published, StreamReader
from lazyshard.stream.run_parts import course_of, with_consumed

if TYPE_CHECKING:
    from lazyshard.data.commits import Commits, ReadingHints


class LazyShardedDataset(Indexed[IndexSpace]):
    """A stream, live or ended, as a map-style data set.

    It has dp_size * B indices; B, the samples of one rank in an epoch (or its share of `num_samples`), is a multiple
    of `batch_size`. Any index works on any rank; with the layout that fits the sampler a rank meets only its own
    chunks. A training loop takes `batches`; for loaders of your own `rank_indices` is a sampler::

        dataset = LazyShardedDataset("stream", template.encode, batch_size=8)
        for batch in dataset.batches(num_workers=2, collate_fn=collate):
            train(batch)

    Samples are dealt to the ranks in units: with `Order(unit="chunk")`, chunk k is rank k % dp_size's. Every sample is
    drawn exactly once an epoch, but for fewer than dp_size * batch_size left over.

    Args:
        directory: the stream's directory, or its URL in an object store, like ``s3://bucket/prefix`` (the extra
            `objects`; docs/object-storage.md). If there is no stream in it yet, the constructor waits for one.
        encode_fn: makes a sample of a row, in the worker; called with ``return_length=True`` if it takes that, as
            ms-swift's `template.encode` does. None returns the rows as they are. The class `LateRow` stands for rows
            that workers hand out unparsed: quicker than to pickle dicts, for a `collate_fn` that does not look into the
            rows, as ``list``.
        dp_rank: this data-parallel rank; None asks Megatron, then torch.distributed (`lazyshard.data.resolve_rank`),
            when the data set is first used.
        dp_size: number of data-parallel ranks; given exactly if `dp_rank` is.
        samples_per_chunk: only for directories that another program fills; streams of ours know it.
        max_total_samples: the most samples of an epoch, over all ranks. Samplers, unlike `batches`, need it while the
            stream is live. If the stream ends with fewer, later indices draw the next epoch.
        num_samples: how many indices there are, over all ranks, for training by steps, or over several epochs without
            `set_epoch`. Rounded down to a multiple of dp_size * batch_size. Indices past the end of an epoch draw the
            next one. A live stream then needs no `max_total_samples`.
        batch_size: samples of one rank in a micro batch.
        max_wait: how many seconds to wait at the most for anything that is still to be published.
        consumer: name under which rank 0 commits, and tells the producer how much of the stream is needed to read on.
            Give it where the producer is held back by --max-ahead, or deletes chunks.
        steps: what is done with each row between parsing and encoding it, in order: `MessageTransform`, `Filter` and
            `Map` (docs/pipeline.md). In the place of a dropped row another one of its chunk is trained, the same on
            every rank and in every run; `stats` counts both.
        order: how samples are dealt to the ranks, laid out and shuffled.
        bad_rows: what to do with rows that cannot be read or encoded.
        cache: where encoded samples are kept, on this node and in memory.

    Raises:
        WaitTimeout: no stream has appeared.
        StreamMissing: none can appear: the directory above is missing too.
        StreamMismatch, FileInvalid, StreamInvalid: the directory cannot be read.
        ConfigInvalid: rank and size are impossible, a step is none, or there is no function of its name.
        ValueError, TypeError: another argument is impossible.

    Arrays in rows (docs/arrays.md) are writable numpy arrays of their own memory; `lazyshard.as_tensor` makes tensors
    of them without a copy.

    Rank and length are resolved when they are first needed, and never change after that. Not guaranteed: that ranks
    agree on the length if a live stream ends, with fewer than `max_total_samples`, just while they ask for it. Threads
    may share a data set; forked and spawned processes share its epoch and its statistics.
    """

    _NAME = "dataset"
    _states: RunStates
    # To whom the sequences are dealt that are made of its rows, one rank's.
    _sequence_ranks: Rank | None = None
    # Tokens of all samples, once somebody has asked.
    _tokens: npt.NDArray[np.uint32] | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        encode_fn: EncodeFn | None = None,
        *,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        samples_per_chunk: int | None = None,
        max_total_samples: int | None = None,
        num_samples: int | None = None,
        batch_size: int = 1,
        max_wait: float = 600.0,
        consumer: str | None = None,
        steps: Iterable[Step] | Step = (),
        order: Order = Order(),
        bad_rows: BadRows = BadRows(),
        cache: EncodeCache = EncodeCache(),
    ) -> None:
        check_group("order", order, Order)
        check_group("bad_rows", bad_rows, BadRows)
        check_group("cache", cache, EncodeCache)
        self._late = encode_fn is LateRow
        pipeline = RowSteps(steps, None if self._late else encode_fn)
        if self._late and pipeline:
            raise ValueError("LateRow hands out rows unparsed, it cannot be used with steps, which need them parsed")
        limit = max_total_samples
        run = RunOrder(**vars(order), batch_size=batch_size, max_total_samples=limit, num_samples=num_samples)
        self._commits: Commits | None = None
        if consumer is not None:
            from lazyshard.data.commits import Commits

            self._commits = Commits(stream_path(directory), consumer)
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        self.reader = reader = StreamReader(directory, samples_per_chunk, max_wait=max_wait)
        """What reads the stream for this data set."""
        self.directory = self._where = reader.directory
        """The stream's directory; shows the URL where it is none."""
        self.stream_id = reader.stream_id
        """The stream's identity; None for a directory that another program fills."""
        self.samples_per_chunk = reader.samples_per_chunk
        """Rows in every chunk but possibly the last."""
        made = reader, pipeline, BadRowCount(bad_rows), cache.memory_bytes, limit
        self._samples = SampleMaker(*made)
        if cache.directory is not None:
            from lazyshard.data.encode_cache import CachedSampleMaker

            self._samples = CachedSampleMaker(cache, encode_fn, *made)
        if self._late and reader.arrays:
            raise ValueError(f"{directory}: LateRow does not hand out arrays, which the rows of this stream hold")
        self._states = RunStates(run, reader)
        self._shared, self._since = SharedNumbers(), time.time()
        self._told = set[str]()  # The kinds of warnings that were logged already
        self._attach()
        self._lanes.report()

    def _attach(self) -> None:
        self._numbers = self._shared.view
        self._lanes: IndexReader = IndexReader(self.reader, self._samples, self._shared, late=self._late)

    def _make_space(self, epoch: int) -> IndexSpace:
        """Returns the indices of an epoch. Raises as `IndexSpace` and `_settle_unit`."""
        order, near = self._states.order, (self.reader, self._told, self._shared)
        if self._newest is None:
            rank, self._since = self._rank or resolve_rank(), time.time()
            self._settle_unit(rank)
            known = order.known_total(self.reader.refresh())
            total = order.max_total_samples if known is None else known
        else:
            rank, total = self._newest[1].rank, self._newest[1].total
        course = course_of(self._states.of(epoch, rank.dp_size))
        return IndexSpace(order, rank, course, total, self._hints(rank, course), near)

    def _hints(self, rank: Rank, course: Course) -> ReadingHints | None:
        rank = self._sequence_ranks or rank
        if self._commits is None or rank.dp_rank:
            return None
        hints = self._commits.hints(course, self.reader, self._since, rank.dp_size)
        self.reader.on_wait = hints.repeat
        return hints

    def _settle_unit(self, rank: Rank) -> None:
        """Settles the unit of a run for good: that of its state, or of the settings. Raises WaitTimeout, LengthUnknown.

        Where "auto" is not certain it waits until there is a full chunk for every rank, or the stream has ended.
        """
        reader, order = self.reader, self._states.order
        size, dp = reader.samples_per_chunk, rank.dp_size
        unit = self._states.unit or order.auto_unit(size, dp, reader.refresh())
        if unit is None:
            if order.max_total_samples is None and order.num_samples is None:
                raise index_space.still_open(reader)
            # Until this process reads, and says so itself.
            reader.label = f"rank {rank.dp_rank} of {dp}"
            if (hints := self._hints(rank, Course(order.rules(size, size), [Part(dp, order.batch_size)]))) is not None:
                # Or a producer that is held back by --max-ahead would wait for us, as we for it.
                hints.enter(0, order.max_total_samples, reader.seen.samples)
            unit = order.auto_unit(size, dp, reader.wait_for(dp * size))
        assert unit is not None, "certain once there are so many samples or the stream has ended"
        self._states.settled = unit

    def _enter_blend(self) -> None:
        """Becomes a stream of a blend, which says how often to draw and keeps the state; or raises RuntimeError."""
        order = self._states.order
        if self._newest is not None or order.blended or self._states.loaded is not None:
            raise RuntimeError(f"{self.directory}: a blend takes new data sets: load its state, or skip, afterwards")
        self._states.order = order.in_blend()

    def _state_after(self, consumed: int | None) -> RunState:
        space = self._space()
        state = self._states.of(self.epoch, space.rank.dp_size)
        return state if consumed is None else with_consumed(state, space.consumed(space.position_after(consumed)))

    def _load(self, found: RunState) -> None:
        from lazyshard.data.commits import check_data

        check_data(found, self._states.order, self.reader)
        self._states.loaded, self._numbers[EPOCH] = found, epoch_of(found)

    def _position_of(self, found: RunState, anywhere: bool) -> int | None:
        return self._states.position_of(found, self.rank.dp_size, anywhere=anywhere)

    def __repr__(self) -> str:
        """Tells what is known without a look at the stream; never waits, never raises."""
        # Debuggers and tracebacks show objects whose constructor has failed.
        if "_lanes" not in vars(self):
            return f"<{type(self).__name__}, not open>"
        seen, rank = self.reader.seen, self._rank if self._newest is None else self._newest[1].rank
        whose = "rank not known yet" if rank is None else f"rank {rank.dp_rank} of {rank.dp_size}"
        what = f"{seen.samples} samples published so far, {'ended' if seen.ended else 'live'}"
        return f"<{type(self).__name__} {str(self.directory)!r}, {whose}: {what}>"

    @property
    def unit(self) -> int:
        """Samples that each rank is dealt in a row; which of them "auto" stands for, too."""
        return self._space().course.rules.unit

    @property
    def leftover(self) -> int | None:
        """Samples that no rank draws in an epoch, fewer than dp_size * batch_size; None while the end is open."""
        total = self._states.order.known_total(self.published())
        return None if total is None else self._space().course.leftover(total)

    def skip(self, samples: Ranges = (), chunks: Ranges = (), steps: Ranges = ()) -> None:
        """Leaves samples out from here on, in every epoch. Later states keep that.

        To be called after `load_state_dict` and before the data set is used; again to leave out more.

        Args:
            samples: half-open ranges of sample numbers.
            chunks: half-open ranges of chunks.
            steps: half-open ranges of optimiser steps still to be trained, of which the first one of a run is 1; needs
                `micro_batches_per_step`. The next ones are passed over; in the place of later ones the steps of these
                numbers train what follows.

        Raises:
            ValueError: a range is empty or negative, or of steps that are not known or trained already.
            RuntimeError: the data set is used already.
            LengthUnknown, WaitTimeout: it is not known which unit "auto" stands for.
        """
        if self._newest is not None:
            raise RuntimeError(f"{self.directory}: this data set is in use already, what to skip is said before")
        if self._states.unit is None:
            self._settle_unit(self._rank or resolve_rank())
        self._states.skip(samples, chunks, steps, lambda: self._rank or resolve_rank())

    def commit(self, consumed: int, *, last_epoch: bool, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Tells the producer durably how far the checkpoints are, so that it may delete what no resume can need again.

        To be called on rank 0, once a checkpoint with `state_dict(consumed)` is safely on disk; and right after
        `load_state_dict`, with its `consumed`. On other ranks it does nothing.

        Args:
            consumed: as for `state_dict`.
            last_epoch: whether no other epoch follows this one. Otherwise every chunk is kept.
            keep: states of older checkpoints from which the run may still be resumed.
            take_over: continue although another run on this machine commits under the same name; that one is refused.

        Returns:
            Whether this is rank 0, and the cursor was written.

        Raises:
            CursorTaken: another run commits under the same name.
            StateInvalid, VersionUnsupported, StateMismatch: one of `keep` is none of this run; the first time also if
                chunks are deleted that come next.
            WriterFailed, FileRefused, AccessRefused, StoreUnavailable: it was not taken; the cursor before counts.
            ValueError: as `state_dict`; or the data set has no `consumer`.
            RuntimeError: in a DataLoader worker, or in a fork of the process that committed before.
        """
        if self._commits is None:
            raise ValueError(f"{self.directory}: a commit is that of a consumer; make the data set with consumer=NAME")
        if get_worker_info() is not None:
            raise RuntimeError(f"{self.directory}: a DataLoader worker reads ahead and commits nothing")
        states = [self._state_after(consumed), *map(self._states.read, keep)]
        if self.rank.dp_rank != 0:
            return False
        self._commits.commit(states, self._states.order, self.reader, last_epoch=last_epoch, take_over=take_over)
        return True

    def published(self) -> Published:
        """Looks what is published now."""
        return self.reader.refresh()

    def stats(self) -> Stats:
        """Returns what this process and its DataLoader workers have met so far."""
        return self._shared.stats()

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch, in running workers too. Raises ValueError if it is negative."""
        if epoch < 0:
            raise ValueError(f"epoch is 0 or more, got {epoch}")
        self._numbers[EPOCH] = epoch

    def draw(self, index: int) -> Draw:
        """Returns epoch and number of the sample that an index draws, without reading it; waits until that is certain.

        Raises IndexError: outside the data set; WaitTimeout: it was not certain within `max_wait`.
        """
        with self._lanes:
            return self._entered().draw(operator.index(index))

    def in_epoch(self, index: int) -> bool:
        """Returns whether an index draws a sample of the epoch that was set last; for all ranks at the same step.

        False once the epoch has ended before the index, where a live stream ended early or with `num_samples`::

            for step, batch in enumerate(loader):
                if not dataset.in_epoch(dataset.rank_indices[step * batch_size]):
                    break

        A loader has read some of the next epoch by then. Raises as `draw` does.
        """
        self._numbers[ASKED] = 1
        return self.draw(index).epoch == self._numbers[EPOCH]

    def _lengths(self) -> npt.NDArray[np.signedinteger[Any]]:
        order = self._states.order
        if self._length_given_up or order.blended:
            raise index_space.no_length(self.directory, "a stream or blend draws from it: give that to the loader")
        if self._tokens is None:
            self._tokens = index_space.lengths_by_sample(self.reader, order.known_total(self.reader.refresh()))
        return index_space.lengths_by_index(self._space(), self._tokens)
