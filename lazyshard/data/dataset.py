"""`LazyShardedDataset`: a map-style data set over a stream, in which each data-parallel rank reads its own chunks."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.utils.data import get_worker_info

from lazyshard.data import index_space
from lazyshard.data.index_space import IndexReader, IndexSpace
from lazyshard.data.map_style import Indexed
from lazyshard.data.rank import EPOCH, IN_EPOCH_CALLED, Rank, SharedNumbers, Stats, resolve_rank
from lazyshard.data.run_state import Ranges, RunStates, StateDicts, epoch_of
from lazyshard.data.samples import BadRowCount, LateRow, SampleMaker
from lazyshard.data.settings import BadRows, EncodeCache, EncodeFn, Order, RowSteps, RunOrder, Step, check_group
from lazyshard.format.state import RunState
from lazyshard.part import Array, Part, SplitOf, UInt32Array
from lazyshard.plan.course import Course, Draw
from lazyshard.plan.deal import Gaps
from lazyshard.store.files import stream_path
from lazyshard.stream import Published, StreamReader
from lazyshard.stream.run_parts import course_of, with_consumed

if TYPE_CHECKING:
    from lazyshard.data.commits import Commits, ReadingHints


class LazyShardedDataset(Indexed[IndexSpace]):
    """A map-style data set over a stream, live or ended.

    It has dp_size * B indices, where B is the number of samples that one rank draws per epoch (or its share of
    `num_samples`), a multiple of `batch_size`. Every index is valid on every rank; if the layout fits the sampler, a
    rank reads only its own chunks. Train on `batches`, or use `rank_indices` as the sampler of another loader::

        dataset = LazyShardedDataset("stream", template.encode, batch_size=8)
        for batch in dataset.batches(num_workers=2, collate_fn=collate):
            train(batch)

    Samples are dealt to the ranks in units: with `Order(unit="chunk")`, chunk k belongs to rank k % dp_size. Each epoch
    draws every sample exactly once, except for a leftover of fewer than dp_size * batch_size samples.

    Args:
        directory: the stream's directory, or its URL in an object store, such as ``s3://bucket/prefix`` (needs the
            extra `objects`; see docs/object-storage.md). If it holds no stream yet, the constructor waits for one.
        encode_fn: makes a sample from a row, in the worker. It is called with ``return_length=True`` if it accepts
            that, as ms-swift's `template.encode` does. None returns the rows unchanged. Pass the class `LateRow` to
            have workers return unparsed rows, which is faster than pickling dicts if the `collate_fn` does not look
            into the rows, for example ``list``.
        dp_rank: this data-parallel rank. None takes it from Megatron, then from torch.distributed
            (`lazyshard.data.resolve_rank`), at the first use of the data set.
        dp_size: number of data-parallel ranks. Pass both `dp_rank` and `dp_size`, or neither.
        samples_per_chunk: only for directories that another program fills; lazyshard's streams record it.
        max_total_samples: maximum number of samples per epoch, over all ranks. Samplers, unlike `batches`, need it
            while the stream is live. If the stream ends with fewer samples, later indices draw from the next epoch.
        num_samples: number of indices, over all ranks, for training by steps, or over several epochs without
            `set_epoch`. Rounded down to a multiple of dp_size * batch_size. Indices past the end of an epoch draw from
            the next one. A live stream then needs no `max_total_samples`.
        batch_size: samples of one rank in a micro batch.
        max_wait: maximum time to wait for data that is not published yet, in seconds.
        consumer: name under which rank 0 commits, and reports to the producer how much of the stream it needs next.
            Set it if the producer is limited by --max-ahead, or deletes chunks.
        steps: applied to each row, in order, between parsing and encoding: `MessageTransform`, `Filter` and `Map`
            (docs/pipeline.md). A dropped row is replaced by another row of its chunk, the same one on every rank and in
            every run; `stats` counts dropped and replaced rows.
        order: how samples are dealt to the ranks, laid out and shuffled.
        bad_rows: what to do with rows that cannot be read or encoded.
        cache: where encoded samples are kept, on this node and in memory.

    Raises:
        WaitTimeout: no stream appeared within `max_wait`.
        StreamMissing: no stream can appear, because the parent directory is missing too.
        StreamMismatch, FileInvalid, StreamInvalid: the directory cannot be read.
        ConfigInvalid: rank and size are invalid, a step is not a `Step`, or the function that it names does not exist.
        ValueError, TypeError: another argument is invalid.

    Arrays in rows (docs/arrays.md) are writable numpy arrays that own their memory; `lazyshard.as_tensor` turns them
    into tensors without a copy.

    Rank and length are resolved at their first use and never change afterwards. If a live stream ends with fewer than
    `max_total_samples` samples just while the ranks resolve the length, the ranks are not guaranteed to agree on it.
    Threads may share a data set; forked and spawned processes share its epoch and its statistics.
    """

    _NAME = "dataset"
    _states: RunStates
    # The rank to which the sequences made of the rows are dealt; the rows themselves are read as rank 0 of 1.
    _sequence_ranks: Rank | None = None
    # Tokens of each sample, computed at the first request.
    _tokens: UInt32Array | None = None

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
            raise ValueError("LateRow returns rows unparsed; it cannot be combined with steps, which need parsed rows")
        limit = max_total_samples
        run = RunOrder(**vars(order), batch_size=batch_size, max_total_samples=limit, num_samples=num_samples)
        self._commits: Commits | None = None
        if consumer is not None:
            from lazyshard.data.commits import Commits

            self._commits = Commits(stream_path(directory), consumer)
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        self.reader = reader = StreamReader(directory, samples_per_chunk, max_wait=max_wait)
        """Reads the stream for this data set."""
        self.directory = self._where = reader.directory
        """The stream's directory; for a stream in an object store it prints as the URL."""
        self.stream_id = reader.stream_id
        """The stream's identity; None for a directory that another program fills."""
        self.samples_per_chunk = reader.samples_per_chunk
        """Rows in every chunk except possibly the last one."""
        made = reader, pipeline, BadRowCount(bad_rows), cache.memory_bytes, limit
        self._samples = SampleMaker(*made)
        if cache.directory is not None:
            from lazyshard.data.encode_cache import CachedSampleMaker

            self._samples = CachedSampleMaker(cache, encode_fn, *made)
        self._states = RunStates(run, reader)
        self._shared, self._since = SharedNumbers(), time.time()
        self._warned = set[str]()  # The kinds of warnings that were already logged
        self._attach()
        self._lanes.report()

    def _attach(self) -> None:
        self._numbers = self._shared.view
        self._lanes: IndexReader = IndexReader(self.reader, self._samples, self._shared, late=self._late)

    def _make_space(self, epoch: int) -> IndexSpace:
        """Returns the indices of an epoch. Raises the errors of `IndexSpace` and `_settle_unit`."""
        order, shared = self._states.order, (self.reader, self._warned, self._shared)
        if self._newest is None:
            rank, self._since = self._rank or resolve_rank(), time.time()
            self._settle_unit(rank)
            self.reader.share = self._share(order.gaps.split, rank.dp_size)
            known = order.known_total(self.reader.refresh())
            total = order.max_total_samples if known is None else known
        else:
            rank, total = self._newest[1].rank, self._newest[1].total
        course = course_of(self._states.of(epoch, rank.dp_size))
        return IndexSpace(order, rank, course, total, self._hints(rank, course), shared)

    def _share(self, split: SplitOf | None, dp: int) -> float:
        """Returns which share of a chunk's rows the processes of this node read, about."""
        share = 1.0 if split is None else split.shares[split.number] / sum(split.shares)
        if (self._states.unit or 0) < self.samples_per_chunk:
            share *= min(dp, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)) / dp
        return share

    def _hints(self, rank: Rank, course: Course) -> ReadingHints | None:
        rank = self._sequence_ranks or rank
        if self._commits is None or rank.dp_rank:
            return None
        hints = self._commits.hints(course, self.reader, self._since, rank.dp_size)
        self.reader.on_wait = hints.repeat
        return hints

    def _settle_unit(self, rank: Rank) -> None:
        """Fixes the unit of the run: that of its state, else of the settings. Raises WaitTimeout, LengthUnknown.

        If "auto" is undecided, waits until there is a full chunk for every rank or the stream has ended.
        """
        reader, order = self.reader, self._states.order
        size, dp = reader.samples_per_chunk, rank.dp_size
        unit = self._states.unit or order.auto_unit(size, dp, reader.refresh())
        if unit is None:
            if order.max_total_samples is None and order.num_samples is None:
                raise index_space.still_open(reader)
            # Overwritten once this process reads.
            reader.label = f"rank {rank.dp_rank} of {dp}"
            if (hints := self._hints(rank, Course(order.rules(size, size), [Part(dp, order.batch_size)]))) is not None:
                # Otherwise a producer that is limited by --max-ahead and this process wait for each other.
                hints.enter(0, order.max_total_samples, reader.seen.samples)
            last = order.gaps.nth(0, dp * size - 1)
            unit = order.auto_unit(size, dp, reader.wait_for(last + 1))
        assert unit is not None, "decided once that many samples are published or the stream has ended"
        self._states.settled = unit

    def _enter_blend(self) -> None:
        """Makes this data set part of a blend, which sets the draws and keeps the state. Raises RuntimeError."""
        order = self._states.order
        if self._newest is not None or order.blended or self._states.loaded is not None:
            text = "a blend takes unused data sets: create the blend first, then load its state, or call skip"
            raise RuntimeError(f"{self.directory}: {text}")
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
        """Describes the data set without reading the stream; never waits, never raises."""
        # Debuggers and tracebacks print objects whose constructor failed.
        if "_lanes" not in vars(self):
            return f"<{type(self).__name__}, not open>"
        seen, rank = self.reader.seen, self._rank if self._newest is None else self._newest[1].rank
        whose = "rank not known yet" if rank is None else f"rank {rank.dp_rank} of {rank.dp_size}"
        what = f"{seen.samples} samples published so far, {'ended' if seen.ended else 'live'}"
        return f"<{type(self).__name__} {str(self.directory)!r}, {whose}: {what}>"

    @property
    def unit(self) -> int:
        """Number of consecutive samples that each rank is dealt; for "auto", the number that was chosen."""
        return self._space().course.rules.unit

    @property
    def leftover(self) -> int | None:
        """Samples that no rank draws in an epoch, fewer than dp_size * batch_size; None until the total is known."""
        total = self._states.order.known_total(self.published())
        return None if total is None else self._space().course.leftover(total)

    def skip(self, samples: Ranges = (), chunks: Ranges = (), steps: Ranges = ()) -> None:
        """Excludes samples from now on, in every epoch. Later states keep the exclusion.

        Call it after `load_state_dict` and before the first use of the data set; call it again to exclude more.

        Args:
            samples: half-open ranges of sample numbers.
            chunks: half-open ranges of chunk numbers.
            steps: half-open ranges of optimiser steps that are not trained yet, where the first step of a run is 1.
                Needs `micro_batches_per_step`. Steps that come next are passed over; later steps keep their numbers
                and train the samples that follow instead.

        Raises:
            ValueError: a range is empty or negative, or its steps are unknown or already trained.
            RuntimeError: the data set was already used.
            LengthUnknown, WaitTimeout: the unit of "auto" cannot be decided yet.
        """
        if self._newest is not None:
            raise RuntimeError(f"{self.directory}: this data set is already in use: call skip before its first use")
        if self._states.unit is None:
            self._settle_unit(self._rank or resolve_rank())
        self._states.skip(samples, chunks, steps, lambda: self._rank or resolve_rank())

    def dropped_samples(self) -> list[tuple[int, int]]:
        """Returns the samples that `steps` and `encode_fn` drop, as half-open ranges to pass to `skip`.

        ::

            dataset.skip(dataset.dropped_samples())

        Then no other row is trained in their places, and each kept row is trained once. Makes all samples, so their
        number must be known. All ranks must skip the same ranges: each calls this, or one sends them to the others.
        With `EncodeCache(directory)` the processes of a node share the work, and training encodes nothing again.

        Raises LengthUnknown: the stream is live and has fewer than `max_total_samples` samples; BadSample, as reading.
        """
        others, total = self._states.order.gaps, self._states.order.known_total(self.reader.refresh())
        if total is None:
            raise index_space.still_open(self.reader, "the dropped samples are not known yet")
        own = (sample for sample in range(total) if sample not in others)
        return list(Gaps((sample, sample + 1) for sample in self._samples.dropped(own)).ranges)

    def commit(self, consumed: int, *, last_epoch: bool, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Durably reports the progress of the checkpoints, so that the producer may delete chunks that no resume needs.

        Call it on rank 0, once a checkpoint with `state_dict(consumed)` is safely on disk, and right after
        `load_state_dict`, with the `consumed` of that state. On other ranks it does nothing.

        Args:
            consumed: as for `state_dict`.
            last_epoch: whether this is the last epoch. Otherwise every chunk is kept.
            keep: states of older checkpoints from which the run may still be resumed.
            take_over: continue although another run on this machine commits under the same name; the other run's
                commits then fail.

        Returns:
            Whether this is rank 0 and the cursor was written.

        Raises:
            CursorTaken: another run commits under the same name.
            StateInvalid, VersionUnsupported, StateMismatch: one of `keep` is not a state of this run; on the first call
                also if chunks that the run needs next are deleted.
            WriterFailed, FileRefused, AccessRefused, StoreUnavailable: the write failed; the previous cursor counts.
            ValueError: as `state_dict`; or the data set has no `consumer`.
            RuntimeError: called in a DataLoader worker, or in a fork of the process that committed before.
        """
        if self._commits is None:
            raise ValueError(f"{self.directory}: commit needs a consumer; create the data set with consumer=NAME")
        if get_worker_info() is not None:
            raise RuntimeError(f"{self.directory}: a DataLoader worker reads ahead and cannot commit")
        states = [self._state_after(consumed), *map(self._states.read, keep)]
        if self.rank.dp_rank != 0:
            return False
        self._commits.commit(states, self._states.order, self.reader, last_epoch=last_epoch, take_over=take_over)
        return True

    def published(self) -> Published:
        """Reads how much of the stream is published now."""
        return self.reader.refresh()

    def stats(self) -> Stats:
        """Returns the statistics of this process and its DataLoader workers so far."""
        return self._shared.stats()

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch, in running workers too. Raises ValueError if it is negative."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, got {epoch}")
        self._numbers[EPOCH] = epoch

    def draw(self, index: int) -> Draw:
        """Returns the epoch and number of the sample that an index draws, without reading the sample.

        Waits until that is decided. Raises IndexError: outside the data set; WaitTimeout: undecided after `max_wait`.
        """
        with self._lanes:
            return self._entered().draw(operator.index(index))

    def in_epoch(self, index: int) -> bool:
        """Returns whether an index draws a sample of the epoch that was last set; all ranks agree for the same step.

        False if the epoch ends before the index: a live stream ended early, or `num_samples` spans several epochs::

            for step, batch in enumerate(loader):
                if not dataset.in_epoch(dataset.rank_indices[step * batch_size]):
                    break

        By then the loader has read ahead into the next epoch. Raises the errors of `draw`.
        """
        self._numbers[IN_EPOCH_CALLED] = 1
        return self.draw(index).epoch == self._numbers[EPOCH]

    def _lengths(self) -> Array:
        order = self._states.order
        if self._length_given_up or order.blended:
            raise index_space.no_length(self.directory, "a stream or blend draws from it: pass that to the loader")
        if self._tokens is None:
            self._tokens = index_space.lengths_by_sample(self.reader, order.known_total(self.reader.refresh()))
        return index_space.lengths_by_index(self._space(), self._tokens)
