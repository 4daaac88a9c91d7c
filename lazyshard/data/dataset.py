"""`LazyShardedDataset`: a stream as a map-style data set, each data-parallel rank with its own chunks.

The stock `torch.utils.data.DataLoader` and samplers drive it. An index is turned into a sample number by arithmetic
(`lazyshard.plan`), so no index is built and nothing is agreed upon between ranks; a sample that is not published yet is
waited for.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from torch.utils.data import Dataset, get_worker_info

from lazyshard.data.auto_unit import settle_unit
from lazyshard.data.bad_samples import BadSamples, ErrorCount, OnBadSample
from lazyshard.data.batches import Batches
from lazyshard.data.cache import SampleCache
from lazyshard.data.commits import Commits, chunks_done
from lazyshard.data.dealt_order import may_undo, tell_undone
from lazyshard.data.encode import EncodeFn, Encoder
from lazyshard.data.encode_cache_opening import open_encode_cache
from lazyshard.data.epoch_spaces import EpochSpaces
from lazyshard.data.index_lengths import lengths_by_index, lengths_by_sample
from lazyshard.data.index_space import IndexSpace, length_given_up
from lazyshard.data.lane_reader import LaneReader, consecutive, parsed_rows, place_ahead
from lazyshard.data.late_row import LateRows
from lazyshard.data.order import ENDLESS, LayoutName, Order, UnitName
from lazyshard.data.rank import Rank, check_dealt, resolve_rank
from lazyshard.data.run_states import Ranges, RunStates
from lazyshard.data.samples import Met, SampleMaker
from lazyshard.data.shared import ASKED, EPOCH, TOLD, SharedNumbers, Stats
from lazyshard.data.state_checks import check_data
from lazyshard.data.steps import RowSteps, Step
from lazyshard.data.worker_parent import watch_forks
from lazyshard.errors import LazyShardError, LengthUnknown
from lazyshard.format import check_consumer
from lazyshard.format.encoding import Fact
from lazyshard.format.state import RunState
from lazyshard.memory import quick_loads
from lazyshard.plan import Draw, Gaps
from lazyshard.store.urls import stream_path
from lazyshard.stream import Published, StreamReader

_loads = quick_loads


class LazyShardedDataset(Dataset[Any]):
    """A stream, live or ended, as a map-style data set.

    It has dp_size * B indices; B, the samples of one rank in an epoch (or its share of `num_samples`), is a multiple
    of `batch_size`. Any index works on any rank; with the layout that fits the sampler a rank meets only its own
    chunks. A training loop takes `batches`; for loaders of your own `rank_indices` is a sampler::

        dataset = LazyShardedDataset("stream", template.encode, batch_size=8)
        for batch in dataset.batches(num_workers=2, collate_fn=collate):
            train(batch)

    The order: samples are dealt to the ranks in units; with `unit="chunk"`, chunk k is rank k % dp_size's, and each
    rank reads its chunks in order. Every sample is drawn exactly once an epoch, but for fewer than dp_size *
    batch_size left over.

    Args:
        directory: the stream's directory, or its URL in an object store, like ``s3://bucket/prefix`` (the extra
            `objects`; docs/object-storage.md); if there is no stream in it yet, the constructor waits for one.
        encode_fn: makes a sample of a row, in the worker; called with ``return_length=True`` if it takes that, as
            ms-swift's `template.encode` does. None returns the rows as they are.
        dp_rank: this data-parallel rank; None asks Megatron, then torch.distributed (`lazyshard.data.resolve_rank`),
            when the data set is first used.
        dp_size: number of data-parallel ranks; given exactly if `dp_rank` is.
        samples_per_chunk: only for directories that another program fills; streams of ours know it.
        max_total_samples: the most samples of an epoch, over all ranks. Samplers need it while the stream is live,
            since they ask for a length before it has one; `batches` does not. If the stream ends with fewer, later
            indices go on with the next epoch.
        num_samples: how many indices there are, over all ranks, where that is not one epoch: for training that goes by
            steps, or over several epochs without `set_epoch`. Rounded down to a multiple of dp_size * batch_size.
            Indices past the end of an epoch draw the next one, in its own order. A live stream then needs no
            `max_total_samples`; if given, an epoch still ends there.
        batch_size: samples of one rank in a micro batch.
        unit: what is dealt in turn: "chunk", "sample", "batch" (`batch_size` samples), a number of samples, or "auto":
            chunks if the stream, up to `max_total_samples`, has a full one for every rank, else batches. A run goes on
            with the unit with which it began, which its state names. On a live stream whose published samples do not
            tell yet, the first use waits until they do; with chunks the first sample would have to wait for as many.
        layout: "block" for samplers that give each rank a contiguous piece (`rank_indices`, ms-swift's
            ``data_sharding=True``), "strided" for those that give rank r the indices r, r + dp_size, ... (the same
            without shuffle, Hugging Face's).
        shuffle_window: how many chunks' worth of samples each rank shuffles among; 0 keeps the order, which a stream
            whose rows were dealt by cost needs (docs/balance.md). `lazyshard.window_for_distance` finds the one that
            moves neighbours as far apart as you want. In each epoch the order is another; with a window as wide as all
            that a rank has of an ended stream it is shuffled whole.
        seed: of the shuffle.
        max_wait: how many seconds to wait at the most for anything that is still to be published.
        on_bad_sample: what to do with a sample that cannot be read or encoded: "substitute" trains another of its
            chunk, the same on every rank and in every run, and logs it; "raise" raises.
        max_bad_samples: how many different bad samples one process (each DataLoader worker) substitutes before it
            raises; None for any number.
        cache_bytes: bytes of encoded samples that each process keeps for later epochs. 0 by default: on the first
            pass over a stream nothing comes back.
        consumer: name under which rank 0 commits, and tells the producer, about once a window, how much of the stream
            is needed to read on (`cursors/NAME.reading.json`). Give it where the producer is held back by --max-ahead,
            or deletes chunks: as long as this consumer has no cursor, its chunks are kept. None tells nothing. What
            cannot be written there is logged, never raised.
        micro_batches_per_step: micro batches of one rank in an optimiser step; the state of the run then knows its
            steps, for `lazyshard trace`, `audit` and `skip`. None for not known; `batches` takes that for 1.
        late_parsing: without `encode_fn`, DataLoader workers hand out `LateRow`s, which become plain dicts in the main
            process: small ones cross as they lie on disk and are parsed there, of rows above 64 KiB only the place
            crosses, and the main process reads them again, out of the page cache. That is quicker than to pickle dicts
            (docs/performance.md). For a `collate_fn` that does not look into the rows, as ``list``; not for filesystems
            without a page cache. Rows of directories that another program fills are parsed in the worker, as nobody has
            checked them before. Not for streams whose rows hold arrays.
        steps: what is done with each row between parsing and encoding it, in order: `MessageTransform`, `Filter` and
            `Map` (docs/pipeline.md). In the place of a dropped row another one of its chunk is trained, the same on
            every rank and in every run, so ranks stay equal; `stats` counts both.
        max_error_count: the error budget of steps and encoder, in place of `on_bad_sample` and `max_bad_samples`: 0
            raises the first error, N substitutes N different samples in each process before it raises, None any number.
        encode_cache: a directory of this node, on its disk or in /dev/shm, where what is made of rows is kept for all
            processes that draw the same ones: peers of a model-parallel group, workers, later epochs, the next start
            (docs/encode-cache.md). Not for an `encode_fn` that makes another sample of a row each time.
        encode_cache_bytes: what it may take, as a number of at least 4,096 bytes or as a text like ``"20GB"`` or
            ``"512MiB"``; chunks that were used longest ago go first. None stands for 16 GiB.
        encode_fingerprint: plain facts that change whenever another sample would be made of a row: what was kept under
            other facts is not found. By default the attribute `fingerprint` of `encode_fn`; needed where that has none,
            and with `steps`.

    Raises:
        StepInvalid: a step is none, or there is no function of its name.
        WaitTimeout: no stream has appeared.
        StreamMissing: none can appear: the directory above is missing too.
        StreamMismatch, StreamUnsealed, StreamInvalid, ManifestInvalid: the directory cannot be read.
        RankInvalid: rank and size are impossible.
        ValueError: another argument is.

    Where rows hold arrays (docs/arrays.md) they are numpy arrays, each in its place in the row, writable and views of
    memory that is the row's own; `lazyshard.as_tensor` makes tensors of them without a copy.

    Samples whose chunk the producer has deleted raise `ChunkRetired`, a second pass over them included.

    The rank and the length are resolved when they are first needed, and never change after that. Not guaranteed:
    that ranks agree on the length if a live stream ends, with fewer than `max_total_samples`, just while they ask
    for it; start ranks while it is clearly live or ended.

    Threads may share a data set. Forked and spawned processes each go on from a copy of their own, with the epoch
    and the statistics in common.
    """

    # Set once, by `_indices`.
    _spaces: EpochSpaces | None = None

    # By a `LazyShardedStream` that draws from it.
    _length_given_up: bool = False

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
        unit: UnitName | int = "chunk",
        layout: LayoutName = "block",
        shuffle_window: int = 0,
        seed: int = 0,
        max_wait: float = 600.0,
        on_bad_sample: OnBadSample = "substitute",
        max_bad_samples: int | None = 100,
        cache_bytes: int = 0,
        consumer: str | None = None,
        micro_batches_per_step: int | None = None,
        late_parsing: bool = False,
        steps: Iterable[Step] | Step = (),
        max_error_count: ErrorCount = "max_bad_samples",
        encode_cache: str | os.PathLike[str] | None = None,
        encode_cache_bytes: int | str | None = None,
        encode_fingerprint: Mapping[str, Fact] | None = None,
    ) -> None:
        pipeline = RowSteps(steps, None if encode_fn is None else Encoder(encode_fn))
        if late_parsing and pipeline:
            name = "steps, which need" if encode_fn is None else "encode_fn, which needs"
            raise ValueError(f"late_parsing hands out rows, it cannot be used with {name} them parsed")
        self._order = Order(
            batch_size, unit, layout, shuffle_window, seed, max_total_samples, num_samples, micro_batches_per_step
        )
        bad = BadSamples.within(on_bad_sample, max_bad_samples, max_error_count)
        cache = SampleCache(cache_bytes)
        self._consumer = None if consumer is None else check_consumer(consumer)
        self._commits = None if consumer is None else Commits(stream_path(directory), consumer)
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        self._shared = SharedNumbers()
        self._reader = StreamReader(directory, samples_per_chunk, max_wait=max_wait)
        if late_parsing and self._reader.arrays:
            raise ValueError(
                f"{self._reader.directory}: the rows of this stream hold arrays, which late_parsing does not hand out; "
                f"leave it out"
            )
        self._states = RunStates(self._order, self._reader)
        shared = open_encode_cache(
            self._reader, encode_cache, encode_cache_bytes, encode_fingerprint, encode_fn, pipeline
        )
        self._samples = SampleMaker(self._reader, pipeline, bad, cache, max_total_samples, shared)
        self._late = late_parsing
        # How far apart the indices are that follow each other in a lane.
        self._step = 1
        self._reported = (Met(0, 0, 0), 0, 0.0)
        self._attach()
        self._report()

    def _enter_stream(self) -> None:
        """Becomes the data set of an iterable without a length: indices go on for ever, from epoch to epoch.

        Raises:
            RuntimeError: it is used already, or blended.
        """
        if self._spaces is not None or self._order.blended:
            raise RuntimeError(
                f"{self.directory}: a LazyShardedStream takes a data set that is not used yet and in no blend; make a "
                f"new one, or a stream of the blend"
            )
        self._length_given_up = self._order.num_samples is None
        self._order = self._order.without_end()

    def _enter_blend(self) -> None:
        """Becomes a stream of a blend, which decides how often it is drawn from, and keeps its state.

        Raises:
            RuntimeError: it is used already, or stands somewhere already.
        """
        if self._spaces is not None or self._order.blended or self._states.given:
            raise RuntimeError(
                f"{self.directory}: a blend takes data sets that are new: not used, not blended, without a state; load "
                f"the state of the blend, and skip samples, once it is made"
            )
        self._order = self._order.in_blend()
        self._states = RunStates(self._order, self._reader)

    def _attach(self) -> None:
        # Rows are samples as they are, parsed here.
        self._plain = not self._samples.encodes and not self._reader.arrays
        self._lanes = LaneReader(self._reader, self._samples, parsed_rows if self._plain else None)
        self._numbers = self._shared.view
        # The process that has read; 0 for none yet.
        self._pid = 0
        watch_forks(self)

    def __getstate__(self) -> dict[str, Any]:
        """Settles rank and length first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self._indices()
        state = self.__dict__ | {"_reported": (Met(0, 0, 0), 0, 0.0)}
        for name in ("_lanes", "_numbers", "_pid"):
            del state[name]
        state.pop("_tokens", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what is not pickled."""
        self.__dict__.update(state)
        self._attach()

    def __repr__(self) -> str:
        """Tells what is known without a look at the stream; never waits, never raises."""
        # Any of it may be missing: debuggers and tracebacks show objects whose constructor has failed.
        known = vars(self)
        reader: StreamReader | None = known.get("_reader")
        spaces: EpochSpaces | None = known.get("_spaces")
        rank: Rank | None = known.get("_rank") if spaces is None else spaces.rank
        if reader is None:
            return f"<{type(self).__name__}, not open>"
        seen = reader.seen
        whose = "rank not known yet" if rank is None else f"rank {rank.dp_rank} of {rank.dp_size}"
        return (
            f"<{type(self).__name__} {str(reader.directory)!r}, {whose}: {seen.samples} samples published so far, "
            f"{'ended' if seen.ended else 'live'}>"
        )

    @property
    def directory(self) -> Path:
        """The stream's directory; shows the URL where it is none."""
        return self._reader.directory

    @property
    def reader(self) -> StreamReader:
        """What reads the stream for this data set."""
        return self._reader

    @property
    def stream_id(self) -> str | None:
        """The stream's identity; None for a directory that another program fills."""
        return self._reader.stream_id

    @property
    def samples_per_chunk(self) -> int:
        """Rows in every chunk but possibly the last."""
        return self._reader.samples_per_chunk

    @property
    def unit(self) -> int:
        """Samples that each rank is dealt in a row; which of them "auto" stands for, too."""
        return self._indices().course.rules.unit

    @property
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        return self._indices().rank

    @property
    def rank_indices(self) -> range:
        """The indices of this rank that are still to be drawn in the epoch that is set, in order: a sampler.

        Those of the whole epoch, or what is left of it where a loaded state stands. ``rank_indices[n:]`` goes on after
        n more samples of this rank. Ask again for each epoch: the next one is a whole one.
        """
        if self._length_given_up:
            raise length_given_up(self.directory)
        return self._indices().lane_indices()

    def batches(self, *, epochs: int = 1, **loader: Any) -> Batches:
        """Returns the micro batches of this rank, as an iterator that counts what is trained; see `Batches`.

        One loop iterates over it, and takes state, steps and commits from it. A live stream needs no length for that.

        Args:
            epochs: how many epochs the run has: as many times the batches are iterated over.
            loader: keyword arguments for the DataLoader: `num_workers`, `collate_fn` and others. Batch size and sampler
                are those of the data set.

        Raises:
            ValueError: there is no such number of epochs, or `num_samples` says how long the run is.
            TypeError: the DataLoader has no such option, or it is that of the data set.
            RuntimeError: the data set was used since a state was loaded, and has no `micro_batches_per_step`.
        """
        order = self._order
        if order.micro_batches_per_step is None:
            if self._spaces is not None and self._states.given:
                raise RuntimeError(
                    f"{self.directory}: this data set is in use already, call batches() before its rank or its length "
                    f"is asked for, or give it micro_batches_per_step=1"
                )
            order = self._order = replace(order, micro_batches_per_step=1)
            self._states.order = order
        by_epoch = order.num_samples in (None, ENDLESS)
        return Batches(self, order.batch_size, order.draws_per_step // order.batch_size, epochs, by_epoch, loader)

    def _left(self) -> range:
        """Returns `rank_indices`; of a live stream without a length as many as are asked for."""
        try:
            return self._indices().lane_indices()
        except LengthUnknown:
            self._enter_stream()
            return self._indices().lane_indices()

    @property
    def leftover(self) -> int | None:
        """Samples that no rank draws in an epoch, fewer than dp_size * batch_size; None while the end is open."""
        total = self._order.known_total(self.published())
        return None if total is None else self._indices().course.leftover(total)

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._numbers[EPOCH]

    @property
    def consumed(self) -> int:
        """Samples trained in the state that was loaded, over all ranks; 0 without one, or once another epoch is set."""
        return self._states.consumed(self._numbers[EPOCH])

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run, plain values for any checkpoint; the same on every rank.

        Args:
            consumed: samples that were trained, over all ranks, since the run began; where `set_epoch` begins the
                epochs, since this one began. It never follows from what was read: workers read ahead. None for what
                was loaded.

        Raises:
            ValueError: these are no whole micro batches of all ranks, fewer samples than the loaded state had trained,
                or more than there are indices.
            TypeError: it is no integer.
        """
        return self._state_after(consumed).to_dict()

    def _state_after(self, consumed: int | None) -> RunState:
        state, space = self._states.after(consumed, self.epoch, self.rank.dp_size), self._indices()
        block, course = space.layout.block, space.course
        if consumed is not None and state.parts[-1].draws > max(block, course.current.draws):
            most = course.consumed_before + course.dp * block
            raise ValueError(
                f"{self.directory}: consumed is at most {most}, all that this data set has, got {consumed}"
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a run stands, with any number of ranks: `rank_indices` then are what is left.

        To be called before the data set is used: before its length, `rank_indices` or a sample is asked for. In a
        DataLoader worker it only checks that the state is the one that the data set began with.

        Args:
            state: what `state_dict` returned; of the same stream, `unit`, `shuffle_window`, `seed` and
                `max_total_samples`.

        Raises:
            StateInvalid, VersionUnsupported: it cannot be used.
            StateMismatch: it is of another stream or of other settings, goes on with chunks that are deleted, or the
                stream is shorter than what was drawn.
            RuntimeError: the data set is used already, and stands elsewhere.
        """
        self._go_on(state, anywhere=False)

    def _go_on(self, state: dict[str, Any], *, anywhere: bool = True) -> tuple[int, int] | None:
        """Loads a state; once this data set is used it has to be of the same course, and may be `anywhere` in it.

        Returns:
            Epoch and position of the state, None where this data set was not used yet and now stands there.
        """
        settled = self._spaces is not None or get_worker_info() is not None
        found = self._states.load(state, self._reader, self.rank.dp_size if settled else None, anywhere)
        if get_worker_info() is None:
            self._numbers[EPOCH] = found[0]
        return found if settled else None

    def skip(self, samples: Ranges = (), chunks: Ranges = (), steps: Ranges = ()) -> None:
        """Leaves samples out from here on, in every epoch: the known remedy for a loss spike. The state keeps them.

        To be called after `load_state_dict` and before the data set is used; again to leave out more. A state that is
        saved later has it.

        Args:
            samples: half-open ranges of sample numbers.
            chunks: half-open ranges of chunks.
            steps: half-open ranges of optimiser steps that are still to be trained, as the run would go on, numbered as
                `lazyshard trace` and trainers' logs do: the first one of a run is step 1; needs
                `micro_batches_per_step`. The next ones are passed over; in the place of later ones the steps of these
                numbers train what follows.

        Raises:
            ValueError: a range is empty or negative, or of steps that are not known or trained already.
            RuntimeError: the data set is used already.
            LengthUnknown, WaitTimeout: it is not known which unit "auto" stands for.
        """
        if self._spaces is not None:
            raise RuntimeError(f"{self.directory}: this data set is in use already, what to skip is said before")
        if self._states.unit is None:
            rank = self._rank or resolve_rank()
            settle_unit(self._states, self._order, rank, self._reader, self._consumer, time.time())
        self._states.skip(samples, chunks, steps, lambda: self._rank or resolve_rank(), self._reader)

    def commit(
        self, consumed: int, *, last_epoch: bool, keep: Iterable[dict[str, Any]] = (), take_over: bool = False
    ) -> bool:
        """Tells the producer durably how far the checkpoints are, so that it may delete what no resume can need again.

        To be called by one process, of rank 0, once a checkpoint with `state_dict(consumed)` is safely on disk; and
        right after `load_state_dict`, with its `consumed`: then the cursor stands where this run does. Other ranks may
        call it too, nothing is done there.

        Args:
            consumed: as for `state_dict`.
            last_epoch: whether no other epoch follows this one. Otherwise every chunk is kept.
            keep: states of older checkpoints from which the run may still be resumed.
            take_over: go on although another run on this machine commits under the same name; that one is refused.

        Returns:
            Whether this is rank 0, and the cursor was written.

        Raises:
            CursorTaken: another run commits under the same name.
            StateInvalid, VersionUnsupported, StateMismatch: one of `keep` is none of this run.
            StateMismatch: the first time also if chunks are deleted that come next, as where a run starts anew.
            CursorUnwritable, FileRefused, StoreRefused, StoreUnavailable: it was not taken; the cursor before counts.
            ValueError: as `state_dict`; or the data set has no `consumer`.
            RuntimeError: in a DataLoader worker, or in a fork of the process that committed before.
        """
        if self._commits is None:
            raise ValueError(f"{self.directory}: a commit is that of a consumer; make the data set with consumer=NAME")
        if get_worker_info() is not None:
            raise RuntimeError(f"{self.directory}: a DataLoader worker reads ahead and commits nothing")
        state = self._state_after(consumed)
        states = [state, *map(self._states.read, keep)]
        if self.rank.dp_rank != 0:
            return False
        if not self._commits.begun:
            # Before the cursor of a run that is further is overwritten by one that cannot go on.
            check_data(state, self._order, self._reader)
        done = chunks_done(states, self._order.known_total(self.published())) if last_epoch else 0
        self._commits.write(state, done, take_over=take_over)
        return True

    def published(self) -> Published:
        """Looks what is published now."""
        return self._reader.refresh()

    def stats(self) -> Stats:
        """Returns what this process and its DataLoader workers have met so far."""
        return self._shared.stats()

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch: the indices draw that epoch's order from now on, in running workers too.

        Raises:
            ValueError: the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch is 0 or more, got {epoch}")
        self._numbers[EPOCH] = epoch

    def draw(self, index: int) -> Draw:
        """Returns epoch and number of the sample that an index draws, without reading it.

        Waits until that is certain. On a live stream that has ended before `max_total_samples` the epoch tells where it
        ended, and to all ranks alike; `in_epoch` asks just that.

        Raises:
            IndexError: outside the data set.
            WaitTimeout: it was not certain within `max_wait`.
        """
        with self._reading():
            return self._indices().draw(operator.index(index), self._reader)

    def in_epoch(self, index: int) -> bool:
        """Returns whether an index draws a sample of the epoch that was set last (0 at first).

        False once the epoch has ended before the index, where a live stream ended early or with `num_samples`: what
        follows is the next epoch. All ranks find so at the same step, without a word between them::

            for step, batch in enumerate(loader):
                if not dataset.in_epoch(dataset.rank_indices[step * batch_size]):
                    break

        A loader has read the first batch of the next epoch by then, and its workers some more; where the producer has
        deleted what that needs, they hold the stream's last sample instead.

        Raises: as `draw`.
        """
        self._numbers[ASKED] = 1
        return self.draw(index).epoch == self._numbers[EPOCH]

    def __len__(self) -> int:
        """Number of indices: by `num_samples`, or those of one epoch.

        The latter is exact if the stream had ended when first asked, else `max_total_samples` says it.

        Raises:
            LengthUnknown: the stream was live and there is neither of the two; or a `LazyShardedStream` draws from it.
            WaitTimeout: with `unit="auto"`, as the first use of the data set.
            ValueError: `num_samples` is less than one batch of every rank.
            RankInvalid: a DataLoader without a sampler asks, which would draw everything on each of several ranks.
        """
        if self._length_given_up:
            raise length_given_up(self.directory)
        size, rank = self._indices().layout.size, self.rank
        check_dealt(rank, "dataset", self.directory)
        return size

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns a sample, waiting for it if it is not published yet; or the lengths of all.

        ``dataset["lengths"]`` is what samplers that group by length ask for: tokens of the sample that each index draws
        in the epoch that is set, an array of shape (len(dataset),), of int32 as a rule. Of a stream that has ended, and
        whose producer has said how long its samples are, or which `lazyshard measure` has measured. A row of which no
        sample is made counts 0, one that is drawn in the place of another as that one. Read once: 4 bytes a sample.

        Raises:
            IndexError: outside the data set.
            LengthsMissing: the stream is live, or the lengths are not known.
            TypeError: neither an index nor "lengths".
            WaitTimeout: not published within `max_wait`.
            ChunkRetired: its chunk was deleted by the producer.
            BadSample, TooManyBadSamples, ChunkCorrupt, RowInvalid: see `on_bad_sample`.
            NothingKept: the steps drop row after row, 10,000 of them.
        """
        if type(index) is not int:
            if index == "lengths" and isinstance(index, str):
                return self._lengths()
            # numpy's and torch's small integers wrap where they are subtracted.
            index = operator.index(index)
        first, lines, epoch = self._lanes.ahead
        place, step = index - first, self._step
        if step != 1:
            place = -1 if place % step else place // step
        if 0 <= place < len(lines) and self._plain and epoch == self._numbers[EPOCH]:
            try:
                row = _loads(lines[place])
            except orjson.JSONDecodeError:
                row = None
            if type(row) is dict:
                return row
        return self._fetch([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples of a batch. Raises as `__getitem__` does."""
        first, lines, epoch = self._lanes.ahead
        if lines and (rows_of := self._lanes.rows_of) is not None and epoch == self._numbers[EPOCH]:
            place = place_ahead(indices, first, self._step, len(lines))
            if place >= 0 and (rows := rows_of(lines[place : place + len(indices)], None)):
                return rows
        return self._fetch(list(map(operator.index, indices)))

    def _lengths(self) -> npt.NDArray[np.signedinteger[Any]]:
        if self._length_given_up or self._order.blended:
            raise length_given_up(self.directory)
        tokens = self._tokens
        if tokens is None:
            tokens = self._tokens = lengths_by_sample(self._reader, self._order.known_total(self.published()))
        return lengths_by_index(self._indices(), tokens)

    def _indices(self, epoch: int | None = None) -> IndexSpace:
        """Returns the indices of an epoch, None for that which is set."""
        spaces = self._spaces
        if epoch is None:
            epoch = self._numbers[EPOCH]
        if spaces is None:
            made = EpochSpaces(
                self._order,
                self._rank or resolve_rank(),
                self._reader,
                self._consumer,
                self._states,
                epoch,
                self._shared,
            )
            # Before the spaces: who finds those relies on this.
            self._step = 1 if self._order.layout == "block" else made.rank.dp_size
            # One step, so that of two threads that come here at once both go on with the same spaces.
            spaces = vars(self).setdefault("_spaces", made)
        return spaces.at(epoch, self._reader)

    def _fetch(self, indices: list[int]) -> list[Any]:
        try:
            if self._pid != os.getpid():
                self._enter_process()
            # One epoch for the whole batch, whenever another one is set.
            epoch = self._numbers[EPOCH]
            space = self._indices(epoch)
            if len(indices) not in (1, self._order.batch_size):
                space.tell_batch(len(indices), self._reader)
            samples: list[Any] = []
            while len(samples) < len(indices):
                index, count = consecutive(indices, len(samples), space.step)
                samples += self._lanes.read(space, index, count, epoch)
            return samples
        except LazyShardError as error:
            if get_worker_info() is not None:
                error.carry_fields()
            raise
        finally:
            self._report()

    def _end_of(self, drawn: int, position: int) -> tuple[int, int] | None:
        """Returns the end of an epoch, waiting if it must; see `IndexSpace.end_of`."""
        with self._reading():
            return self._indices().end_of(drawn, position, self._reader)

    def _epoch_at(self, drawn: int) -> int:
        """Returns the epoch in which a run stands, waiting if it must; see `IndexSpace.epoch_at`."""
        with self._reading():
            return self._indices().epoch_at(drawn, self._reader)

    def _read_samples(self, samples: Iterable[int]) -> list[Any]:
        """Returns samples by their numbers, all of them published. Raises as `__getitem__` does."""
        with self._reading():
            return [self._lanes.read_sample(sample) for sample in samples]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            if self._pid != os.getpid():
                self._enter_process()
            yield
        except LazyShardError as error:
            if get_worker_info() is not None:
                error.carry_fields()
            raise
        finally:
            self._report()

    def _lines_from(self, index: int, *, wait: bool) -> list[bytes]:
        """Returns the checked line of an index, and those of the indices behind it that are read with it.

        None at all where rows are not handed out as they are, or `wait` is false and it may not be published yet.

        Raises: as `__getitem__`; a bad row is not substituted.
        """
        if self._pid != os.getpid():
            self._enter_process()
        if self._lanes.rows_of is None:
            return []
        epoch = self._numbers[EPOCH]
        space = self._indices(epoch)
        if not wait and not space.ready(index, self._reader):
            return []
        try:
            return self._lanes.lines(space, index, epoch)
        finally:
            self._report()

    def _enter_process(self) -> None:
        self._indices()
        assert self._spaces is not None
        worker = get_worker_info()
        self._spaces.enter(self._reader, worker)
        parts = self._spaces.at(self._numbers[EPOCH], self._reader).course.parts
        self._samples.leave_out(Gaps(gap for part in parts for gap in part.skip))
        if self._late and worker is not None and self._reader.stream_id is not None:
            self._plain, self._lanes.rows_of = False, LateRows(self._reader)
        if self._pid:
            # A fork begins with the bad samples of its parent, but the limit is each process's own.
            self._samples.forget_met()
            self._reported = (Met(0, 0, 0), *self._reported[1:])
        # Last, so that no other thread reads before the space is there.
        self._pid = os.getpid()

    def _report(self) -> None:
        met = (self._samples.met, self._reader.chunks_opened, self._reader.waited_s)
        if met != self._reported:
            before, self._reported = self._reported, met
            waited_ms = round(met[2] * 1000) - round(before[2] * 1000)
            now, then = ((*found[:3], *found.cache) for found in (met[0], before[0]))
            bad, *others = (new - old for new, old in zip(now, then, strict=True))
            self._shared.report(bad, met[1] - before[1], waited_ms, *others)
            if met[1] and not before[1] and not self._numbers[TOLD]:
                self._tell_undone()

    def _tell_undone(self) -> None:
        """Warns, once, of an order that undoes how the rows were dealt; with the first chunk, which tells it."""
        spaces = self._spaces
        if spaces is not None and spaces.rank.dp_rank == 0 and may_undo(self._order):
            self._numbers[TOLD] = 1
            tell_undone(self._order, self.unit, self._reader)
