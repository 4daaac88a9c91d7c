"""`LazyShardedDataset`: a stream as a map-style data set, each data-parallel rank with its own chunks."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson
from torch.utils.data import Dataset, get_worker_info

from lazyshard.data.index_reader import IndexReader
from lazyshard.data.lane import place_ahead
from lazyshard.data.rank import Rank, check_dealt, resolve_rank
from lazyshard.data.run_state import Ranges
from lazyshard.data.samples import LateRow, SampleMaker
from lazyshard.data.settings import ENDLESS, BadRows, EncodeCache, Order, RunOrder, check_group
from lazyshard.data.shared import ASKED, EPOCH, Stats
from lazyshard.data.steps import EncodeFn, Encoder, RowSteps, Step
from lazyshard.data.substitutes import BadRowCount
from lazyshard.memory import quick_loads
from lazyshard.plan.course import Draw
from lazyshard.store.urls import stream_path
from lazyshard.stream import Published, StreamReader

if TYPE_CHECKING:
    from lazyshard.data.batches import Batches
    from lazyshard.data.commits import Commits


class LazyShardedDataset(Dataset[Any]):
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
        max_total_samples: the most samples of an epoch, over all ranks. Samplers need it while the stream is live,
            since they ask for a length; `batches` does not. If the stream ends with fewer, later indices go on with
            the next epoch.
        num_samples: how many indices there are, over all ranks, for training by steps, or over several epochs without
            `set_epoch`. Rounded down to a multiple of dp_size * batch_size. Indices past the end of an epoch draw the
            next one, in its own order. A live stream then needs no `max_total_samples`.
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
        ConfigInvalid: a step is none, or there is no function of its name.
        WaitTimeout: no stream has appeared.
        StreamMissing: none can appear: the directory above is missing too.
        StreamMismatch, FileInvalid, StreamInvalid: the directory cannot be read.
        ConfigInvalid: rank and size are impossible.
        ValueError, TypeError: another argument is.

    Arrays in rows (docs/arrays.md) are writable numpy arrays of their own memory; `lazyshard.as_tensor` makes tensors
    of them without a copy.

    Rank and length are resolved when they are first needed, and never change after that. Not guaranteed: that ranks
    agree on the length if a live stream ends, with fewer than `max_total_samples`, just while they ask for it. Threads
    may share a data set. Forked and spawned processes each go on from a copy of their own, with the epoch and the
    statistics in common.
    """

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
        late = encode_fn is LateRow
        pipeline = RowSteps(steps, None if encode_fn is None or late else Encoder(encode_fn))
        if late and pipeline:
            raise ValueError("LateRow hands out rows unparsed, it cannot be used with steps, which need them parsed")
        run_order = RunOrder(
            **vars(order), batch_size=batch_size, max_total_samples=max_total_samples, num_samples=num_samples
        )
        self._commits: Commits | None = None
        if consumer is not None:
            from lazyshard.data.commits import Commits

            self._commits = Commits(stream_path(directory), consumer)
        rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        self._reader = StreamReader(directory, samples_per_chunk, max_wait=max_wait)
        given = self._reader, pipeline, BadRowCount(bad_rows), cache.memory_bytes, max_total_samples
        samples = SampleMaker(*given)
        if cache.directory is not None:
            from lazyshard.data.encode_cache import open_cached

            samples = open_cached(cache, encode_fn, *given)
        self._draws = IndexReader(run_order, rank, self._reader, samples, consumer, late=late)

    def __repr__(self) -> str:
        """Tells what is known without a look at the stream; never waits, never raises."""
        # Debuggers and tracebacks show objects whose constructor has failed.
        if "_draws" not in vars(self):
            return f"<{type(self).__name__}, not open>"
        seen, rank = self._reader.seen, self._draws.rank
        whose = "rank not known yet" if rank is None else f"rank {rank.dp_rank} of {rank.dp_size}"
        return (
            f"<{type(self).__name__} {str(self._reader.directory)!r}, {whose}: {seen.samples} samples published so "
            f"far, {'ended' if seen.ended else 'live'}>"
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
        return self._draws.indices().course.rules.unit

    @property
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        return self._draws.indices().rank

    @property
    def rank_indices(self) -> range:
        """The indices of this rank still to be drawn in the epoch that is set, in order: a sampler for that epoch."""
        return self._draws.counted().lane_indices()

    def batches(self, *, epochs: int = 1, **loader: Any) -> Batches:
        """Returns the micro batches of this rank, as an iterator that counts what is trained; see `Batches`.

        One loop iterates over it, and takes state, steps and commits from it. A live stream needs no length.

        Args:
            epochs: how many epochs the run has: as many times the batches are iterated over.
            loader: keyword arguments for the DataLoader, but for batch size and sampler.

        Raises:
            RuntimeError: the data set was used since a state was loaded, and has no `micro_batches_per_step`.
        """
        from lazyshard.data.batches import Batches

        order = self._draws.count_steps()
        by_epoch = order.num_samples in (None, ENDLESS)
        return Batches(self, order.batch_size, order.draws_per_step // order.batch_size, epochs, by_epoch, loader)

    def _left(self) -> range:
        """Returns `rank_indices`; of a live stream without a length as many as are asked for."""
        return self._draws.left()

    @property
    def leftover(self) -> int | None:
        """Samples that no rank draws in an epoch, fewer than dp_size * batch_size; None while the end is open."""
        total = self._draws.order.known_total(self.published())
        return None if total is None else self._draws.indices().course.leftover(total)

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._draws.numbers[EPOCH]

    @property
    def consumed(self) -> int:
        """Samples trained in the state that was loaded, over all ranks; 0 without one, or once another epoch is set."""
        return self._draws.states.consumed(self._draws.numbers[EPOCH])

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run, plain values for any checkpoint; the same on every rank.

        Args:
            consumed: samples that were trained, over all ranks, since the run began; where `set_epoch` begins the
                epochs, since this one began. None for what was loaded.

        Raises:
            ValueError: these are no whole micro batches of all ranks, fewer samples than the loaded state had trained,
                or more than there are indices.
            TypeError: it is no integer.
        """
        return self._draws.state_after(consumed).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a run stands, with any number of ranks: `rank_indices` then are what is left.

        To be called before the data set is used. In a DataLoader worker it only checks that the state is the one that
        the data set began with.

        Args:
            state: what `state_dict` returned; of the same stream, `order` and `max_total_samples`.

        Raises:
            StateInvalid, VersionUnsupported: it cannot be used.
            StateMismatch: it is of another stream or of other settings, goes on with chunks that are deleted, or the
                stream is shorter than what was drawn.
            RuntimeError: the data set is used already, and stands elsewhere.
        """
        self._draws.go_on(state, anywhere=False)

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
        self._draws.skip(samples, chunks, steps)

    def commit(
        self, consumed: int, *, last_epoch: bool, keep: Iterable[dict[str, Any]] = (), take_over: bool = False
    ) -> bool:
        """Tells the producer durably how far the checkpoints are, so that it may delete what no resume can need again.

        To be called on rank 0, once a checkpoint with `state_dict(consumed)` is safely on disk; and right after
        `load_state_dict`, with its `consumed`. On other ranks it does nothing.

        Args:
            consumed: as for `state_dict`.
            last_epoch: whether no other epoch follows this one. Otherwise every chunk is kept.
            keep: states of older checkpoints from which the run may still be resumed.
            take_over: go on although another run on this machine commits under the same name; that one is refused.

        Returns:
            Whether this is rank 0, and the cursor was written.

        Raises:
            CursorTaken: another run commits under the same name.
            StateInvalid, VersionUnsupported, StateMismatch: one of `keep` is none of this run; the first time also if
                chunks are deleted that come next.
            WriterFailed, FileRefused, StoreRefused, StoreUnavailable: it was not taken; the cursor before counts.
            ValueError: as `state_dict`; or the data set has no `consumer`.
            RuntimeError: in a DataLoader worker, or in a fork of the process that committed before.
        """
        if self._commits is None:
            raise ValueError(f"{self.directory}: a commit is that of a consumer; make the data set with consumer=NAME")
        if get_worker_info() is not None:
            raise RuntimeError(f"{self.directory}: a DataLoader worker reads ahead and commits nothing")
        state = self._draws.state_after(consumed)
        states = [state, *map(self._draws.states.read, keep)]
        if self.rank.dp_rank != 0:
            return False
        self._commits.commit(states, self._draws.order, self._reader, last_epoch=last_epoch, take_over=take_over)
        return True

    def published(self) -> Published:
        """Looks what is published now."""
        return self._reader.refresh()

    def stats(self) -> Stats:
        """Returns what this process and its DataLoader workers have met so far."""
        return self._draws.shared.stats()

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch, in running workers too. Raises ValueError if it is negative."""
        if epoch < 0:
            raise ValueError(f"epoch is 0 or more, got {epoch}")
        self._draws.numbers[EPOCH] = epoch

    def draw(self, index: int) -> Draw:
        """Returns epoch and number of the sample that an index draws, without reading it; waits until that is certain.

        Raises:
            IndexError: outside the data set.
            WaitTimeout: it was not certain within `max_wait`.
        """
        with self._draws:
            return self._draws.indices().draw(operator.index(index))

    def in_epoch(self, index: int) -> bool:
        """Returns whether an index draws a sample of the epoch that was set last (0 at first).

        False once the epoch has ended before the index, where a live stream ended early or with `num_samples`; for all
        ranks at the same step::

            for step, batch in enumerate(loader):
                if not dataset.in_epoch(dataset.rank_indices[step * batch_size]):
                    break

        A loader has read some of the next epoch by then. Raises as `draw` does.
        """
        self._draws.numbers[ASKED] = 1
        return self.draw(index).epoch == self._draws.numbers[EPOCH]

    def __len__(self) -> int:
        """Number of indices: by `num_samples`; else those of one epoch, by `max_total_samples` if first asked live.

        Raises:
            LengthUnknown: the stream was live and there is neither of the two; or a `LazyShardedStream` draws from it.
            WaitTimeout: with `Order(unit="auto")`, as the first use of the data set.
            ValueError: `num_samples` is less than one batch of every rank.
            ConfigInvalid: a DataLoader without a sampler asks, which would draw everything on each of several ranks.
        """
        space = self._draws.counted()
        check_dealt(space.rank, "dataset", self.directory)
        return space.layout.size

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns a sample, waiting for it if it is not published yet; or the lengths of all.

        ``dataset["lengths"]`` is what samplers that group by length ask for: tokens of the sample that each index draws
        in the epoch that is set, an int32 array of shape (len(dataset),), int64 where one is longer. Of a stream that
        has ended and whose producer has said how long its samples are.

        Raises:
            IndexError: outside the data set.
            LengthUnknown: the stream is live, or the lengths are not known.
            TypeError: neither an index nor "lengths".
            WaitTimeout: not published within `max_wait`.
            ChunkRetired: its chunk was deleted by the producer.
            BadSample, ChunkCorrupt, RowInvalid: see `BadRows`.
            BadSample: the steps drop row after row, 10,000 of them.
        """
        if type(index) is not int:
            if index == "lengths" and isinstance(index, str):
                return self._draws.lengths()
            # numpy's and torch's small integers wrap where they are subtracted.
            index = operator.index(index)
        draws = self._draws
        first, lines, epoch = draws.lanes.ahead
        place, step = index - first, draws.step
        if step != 1:
            place = -1 if place % step else place // step
        if 0 <= place < len(lines) and draws.plain and epoch == draws.numbers[EPOCH]:
            try:
                row = quick_loads(lines[place])
            except orjson.JSONDecodeError:
                row = None
            if type(row) is dict:
                return row
        return draws.fetch([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples of a batch. Raises as `__getitem__` does."""
        draws = self._draws
        first, lines, epoch = draws.lanes.ahead
        if lines and (rows_of := draws.lanes.rows_of) is not None and epoch == draws.numbers[EPOCH]:
            place = place_ahead(indices, first, draws.step, len(lines))
            if place >= 0 and (rows := rows_of(lines[place : place + len(indices)], None)):
                return rows
        return draws.fetch(list(map(operator.index, indices)))
