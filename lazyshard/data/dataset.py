"""`LazyShardedDataset`: a stream as a map-style data set, each data-parallel rank with its own chunks.

The stock `torch.utils.data.DataLoader` and samplers drive it. An index is turned into a sample number by arithmetic
(`lazyshard.plan`), so no index is built and nothing is agreed upon between ranks; a sample that is not published yet is
waited for.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from torch.utils.data import Dataset, get_worker_info

from lazyshard.data.bad_samples import BadSamples, OnBadSample
from lazyshard.data.cache import SampleCache
from lazyshard.data.encode import EncodeFn, Encoder
from lazyshard.data.index_space import IndexSpace, LayoutName, Order, UnitName
from lazyshard.data.rank import Rank, resolve_rank
from lazyshard.data.samples import SampleMaker
from lazyshard.data.shared import EPOCH, SharedNumbers, Stats
from lazyshard.errors import ChunkCorrupt, ChunkRetired, LazyShardError, RowInvalid
from lazyshard.format import check_consumer
from lazyshard.plan import Draw, Run
from lazyshard.storage import Published, StreamReader
from lazyshard.storage.chunk import parse_lines
from lazyshard.storage.watch import Parent

_NOTHING: Final[tuple[int, list[bytes], int]] = (0, [], 0)
"""Nothing read ahead: index of the first line, lines of it and of the indices that follow it, epoch."""

_loads = orjson.loads


class LazyShardedDataset(Dataset[Any]):
    """A stream, live or ended, as a map-style data set.

    It has dp_size * B indices; B, the samples of one rank in an epoch (or its share of `num_samples`), is a multiple
    of `batch_size`. Any index works on any rank; with the layout that fits the sampler a rank meets only its own
    chunks. For a plain loop, `rank_indices` is a sampler::

        dataset = LazyShardedDataset("stream", template.encode, batch_size=8, max_total_samples=1_000_000)
        loader = DataLoader(dataset, sampler=dataset.rank_indices, batch_size=8, num_workers=2, collate_fn=collate)

    The order: samples are dealt to the ranks in units; with `unit="chunk"`, chunk k is rank k % dp_size's, and each
    rank reads its chunks in order. Every sample is drawn exactly once an epoch, but for fewer than dp_size *
    batch_size left over.

    Args:
        directory: the stream's directory; if there is no stream in it yet, the constructor waits for one.
        encode_fn: makes a sample of a row, in the worker; called with ``return_length=True`` if it takes that, as
            ms-swift's `template.encode` does. None returns the rows as they are.
        dp_rank: this data-parallel rank; None asks Megatron, then torch.distributed (`lazyshard.data.resolve_rank`),
            when the data set is first used.
        dp_size: number of data-parallel ranks; given exactly if `dp_rank` is.
        samples_per_chunk: only for directories that another program fills; streams of ours know it.
        max_total_samples: the most samples of an epoch, over all ranks. Needed while the stream is live, since
            samplers ask for a length before it has one. If the stream ends with fewer, later indices go on with the
            next epoch.
        num_samples: how many indices there are, over all ranks, where that is not one epoch: for training that goes by
            steps, or over several epochs without `set_epoch`. Rounded down to a multiple of dp_size * batch_size.
            Indices past the end of an epoch draw the next one, in its own order. A live stream then needs no
            `max_total_samples`; if given, an epoch still ends there.
        batch_size: samples of one rank in a micro batch.
        unit: what is dealt in turn: "chunk", "sample", "batch", or a number of samples.
        layout: "block" for samplers that give each rank a contiguous piece (`rank_indices`, ms-swift's
            ``data_sharding=True``), "strided" for those that give rank r the indices r, r + dp_size, ... (the same
            without shuffle, Hugging Face's).
        shuffle_window: how many chunks' worth of samples each rank shuffles among; 0 keeps the order.
        seed: of the shuffle.
        max_wait: how many seconds to wait at the most for anything that is still to be published.
        on_bad_sample: what to do with a sample that cannot be read or encoded: "substitute" trains another of its
            chunk, the same on every rank and in every run, and logs it; "raise" raises.
        max_bad_samples: how many different bad samples one process (each DataLoader worker) substitutes before it
            raises.
        cache_bytes: bytes of encoded samples that each process keeps for later epochs. 0 by default: on the first
            pass over a stream nothing comes back.
        consumer: name under which rank 0 tells the producer, about once a window, how much of the stream is needed to
            read on (`cursors/NAME.reading.json`). Give it where the producer is held back by --max-ahead, or deletes
            chunks: as long as this consumer has no cursor, its chunks are kept. None tells nothing. What cannot be
            written there is logged, never raised.

    Raises:
        WaitTimeout: no stream has appeared.
        StreamMismatch, StreamUnsealed, StreamInvalid, ManifestInvalid: the directory cannot be read.
        RankInvalid: rank and size are impossible.
        ValueError: another argument is.

    Samples whose chunk the producer has deleted raise `ChunkRetired`, a second pass over them included.

    The rank and the length are resolved when they are first needed, and never change after that. Not guaranteed:
    that ranks agree on the length if a live stream ends, with fewer than `max_total_samples`, just while they ask
    for it; start ranks while it is clearly live or ended.

    Threads may share a data set. Forked and spawned processes each go on from a copy of their own, with the epoch
    and the statistics in common.
    """

    # Set once, by `_indices`.
    _space: IndexSpace | None = None

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
        max_bad_samples: int = 100,
        cache_bytes: int = 0,
        consumer: str | None = None,
    ) -> None:
        self._order = Order(batch_size, unit, layout, shuffle_window, seed, max_total_samples, num_samples)
        encoder = None if encode_fn is None else Encoder(encode_fn)
        bad = BadSamples(on_bad_sample, max_bad_samples)
        cache = SampleCache(cache_bytes)
        self._consumer = None if consumer is None else check_consumer(consumer)
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        self._shared = SharedNumbers()
        self._reader = StreamReader(directory, samples_per_chunk, max_wait=max_wait)
        self._samples = SampleMaker(self._reader, encoder, bad, cache)
        # Rows are samples as they are.
        self._plain = encoder is None
        # How far apart the indices are that follow each other in a lane.
        self._step = 1
        self._reported = (0, 0, 0.0)
        self._attach()
        self._report()

    def _attach(self) -> None:
        # Lines read ahead. One value that is only ever replaced, so that threads which share the data set never see
        # the lines of one place with the index of another.
        self._ahead = _NOTHING
        # The run that was located last: lane, epoch and run.
        self._run: tuple[int, int, Run] | None = None
        self._numbers = self._shared.view
        # The process that has read; 0 for none yet.
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        """Settles rank and length first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self._indices()
        state = self.__dict__ | {"_reported": (0, 0, 0.0)}
        for name in ("_ahead", "_run", "_numbers", "_pid"):
            del state[name]
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
        space: IndexSpace | None = known.get("_space")
        rank: Rank | None = known.get("_rank") if space is None else space.rank
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
        """The stream's directory."""
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
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        return self._indices().rank

    @property
    def rank_indices(self) -> range:
        """The indices of this rank, in order: a sampler. ``rank_indices[consumed:]`` goes on after so many samples."""
        space = self._indices()
        return space.layout.lane_indices(space.rank.dp_rank)

    @property
    def leftover(self) -> int | None:
        """Samples that no rank draws in an epoch, fewer than dp_size * batch_size; None while the end is open."""
        total = self._order.known_total(self.published())
        return None if total is None else self._indices().plan.leftover(total)

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
        try:
            if self._pid != os.getpid():
                self._enter_process()
            return self._indices().draw(operator.index(index), self._numbers[EPOCH], self._reader)
        finally:
            self._report()

    def in_epoch(self, index: int) -> bool:
        """Returns whether an index draws a sample of the epoch that was set last (0 at first).

        False once the epoch has ended before the index, where a live stream ended early or with `num_samples`: what
        follows is the next epoch. All ranks find so at the same step, without a word between them::

            for step, batch in enumerate(loader):
                if not dataset.in_epoch(dataset.rank_indices[step * batch_size]):
                    break

        Raises: as `draw`.
        """
        return self.draw(index).epoch == self._numbers[EPOCH]

    def __len__(self) -> int:
        """Number of indices: by `num_samples`, or those of one epoch.

        The latter is exact if the stream had ended when first asked, else `max_total_samples` says it.

        Raises:
            LengthUnknown: the stream was live and there is neither of the two.
            ValueError: `num_samples` is less than one batch of every rank.
        """
        return self._indices().layout.size

    def __getitem__(self, index: int) -> Any:
        """Returns a sample, waiting for it if it is not published yet.

        Raises:
            IndexError: outside the data set.
            WaitTimeout: not published within `max_wait`.
            ChunkRetired: its chunk was deleted by the producer.
            BadSample, TooManyBadSamples, ChunkCorrupt, RowInvalid: see `on_bad_sample`.
        """
        if type(index) is not int:
            # numpy's and torch's small integers wrap where they are subtracted.
            index = operator.index(index)
        first, lines, epoch = self._ahead
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
        first, lines, epoch = self._ahead
        if (
            lines
            and type(indices) is list
            and indices
            and type(start := indices[0]) is int
            and self._plain
            and epoch == self._numbers[EPOCH]
        ):
            place, step = start - first, self._step
            if step != 1:
                place = -1 if place % step else place // step
            stop = place + len(indices)
            if place >= 0 and stop <= len(lines) and indices == list(range(start, first + stop * step, step)):
                rows = parse_lines(lines[place:stop])
                if rows:
                    return rows
        return self._fetch(list(map(operator.index, indices)))

    def _indices(self) -> IndexSpace:
        space = self._space
        if space is None:
            made = IndexSpace(self._order, self._rank or resolve_rank(), self._reader, self._consumer)
            # Before the space: who finds that one relies on this.
            self._step = 1 if self._order.layout == "block" else made.rank.dp_size
            # One step, so that of two threads that come here at once both go on with the same space.
            space = vars(self).setdefault("_space", made)
        return space

    def _fetch(self, indices: list[int]) -> list[Any]:
        try:
            if self._pid != os.getpid():
                self._enter_process()
            if self._space is not None and self._space.wraps and len(indices) not in (1, self._order.batch_size):
                self._tell_batch(len(indices))
            # One epoch for the whole batch, whenever another one is set.
            epoch = self._numbers[EPOCH]
            samples: list[Any] = []
            while len(samples) < len(indices):
                index, count = self._consecutive(indices, len(samples))
                samples += self._read_kept(index, count, epoch)
            return samples
        except LazyShardError as error:
            if get_worker_info() is not None:
                error.carry_fields()
            raise
        finally:
            self._report()

    def _tell_lane(self, index: int, lane: int) -> None:
        self._indices().tell(
            "lane",
            f"{self.directory}: rank {self.rank.dp_rank} of {self.rank.dp_size} was asked for index {index}, which is "
            f"rank {lane}'s in the {self._order.layout!r} layout. If every rank is asked for the same indices, samples "
            f"repeat: did you forget `sampler=dataset.rank_indices`? If the sampler deals them out, each rank reads "
            f"the chunks of all: choose the layout that fits it",
        )

    def _tell_batch(self, size: int) -> None:
        self._indices().tell(
            "batch",
            f"{self.directory}: asked for a batch of {size}, batch_size is {self._order.batch_size}: where an epoch "
            f"ends, a batch may then mix it with the next. Give the data set the batch size of the loader",
        )

    def _enter_process(self) -> None:
        space, worker = self._indices(), get_worker_info()
        rank = f"rank {space.rank.dp_rank} of {space.rank.dp_size}"
        self._reader.label = rank if worker is None else f"{rank}, worker {worker.id}"
        # Newer releases of torch have workers that are threads: those end with their process.
        apart = worker is not None and getattr(worker, "worker_method", "multiprocessing") == "multiprocessing"
        self._reader.parent = Parent() if apart else None
        self._reader.on_wait = None if space.marks is None else space.marks.repeat
        if self._pid:
            # A fork begins with the bad samples of its parent, but the limit is each process's own.
            self._samples.forget_bad()
            self._reported = (0, *self._reported[1:])
        # Last, so that no other thread reads before the space is there.
        self._pid = os.getpid()

    def _consecutive(self, indices: list[int], start: int) -> tuple[int, int]:
        """Returns the index at a place of a batch, and how many from there on follow each other as a rank's do."""
        index, step = indices[start], self._step
        count = len(indices) - start
        if count == 1 or (start == 0 and indices == list(range(index, index + count * step, step))):
            return index, count
        count = 1
        while start + count < len(indices) and indices[start + count] == index + count * step:
            count += 1
        return index, count

    def _read_kept(self, index: int, count: int, epoch: int) -> list[Any]:
        """Returns what `_read` does; of a chunk that is gone it says more where the sample was drawn before."""
        try:
            return self._read(index, count, epoch)
        except ChunkRetired as error:
            drawn = self._indices().draw(index, epoch, self._reader)
            if not drawn.epoch:
                raise
            raise ChunkRetired(
                f"{error.file}: sample {drawn.sample} is drawn again in epoch {drawn.epoch}, but its chunk "
                f"{error.chunk} was deleted by the stream's producer, as were all chunks below {error.chunks_before}. "
                f"To train another epoch, produce the stream with --retain all, or more epochs of its rows in advance",
                file=error.file,
                chunk=error.chunk,
                chunks_before=error.chunks_before,
            ) from error

    def _read(self, index: int, count: int, epoch: int) -> list[Any]:
        """Returns the samples of the first of `count` consecutive indices: at least one of them."""
        sample, stop = self._locate(index, epoch)
        try:
            lines = self._lines_ahead(index, count, epoch)
            if not lines:
                # The old lines are freed first, so that the new ones land where the CPU's caches are warm.
                self._ahead = _NOTHING
                ahead = self._reader.lines_published(sample, stop, count)
                self._ahead = (index, ahead, epoch)
                lines = ahead[:count]
            rows = self._reader.parse(lines, sample)
        except (ChunkCorrupt, RowInvalid) as cause:
            return [self._samples.substitute(sample, cause)]
        return rows if self._plain else [self._samples.make(sample + i, row) for i, row in enumerate(rows)]

    def _lines_ahead(self, index: int, count: int, epoch: int) -> list[bytes]:
        """Returns the lines of the first of `count` consecutive indices that were read ahead."""
        first, lines, ahead_epoch = self._ahead
        place, beside = divmod(index - first, self._step)
        return lines[place : place + count] if epoch == ahead_epoch and place >= 0 and not beside else []

    def _locate(self, index: int, epoch: int) -> tuple[int, int]:
        """Returns the sample of an index, and the end of the samples that the following indices draw in turn."""
        space = self._indices()
        lane, position = space.layout.locate(index)
        if lane != space.rank.dp_rank:
            self._tell_lane(index, lane)
        if space.plan.window:
            sample = space.draw(index, epoch, self._reader).sample
            return sample, sample + 1
        known = self._run
        if known is None or known[:2] != (lane, epoch) or not known[2].first <= position < known[2].stop:
            known = self._run = (lane, epoch, space.run(lane, position, epoch, self._reader))
        run = known[2]
        return run.sample + position - run.first, run.sample + run.stop - run.first

    def _report(self) -> None:
        met = (self._samples.bad_samples, self._reader.chunks_opened, self._reader.waited_s)
        if met != self._reported:
            before, self._reported = self._reported, met
            waited_ms = round(met[2] * 1000) - round(before[2] * 1000)
            self._shared.report(met[0] - before[0], met[1] - before[1], waited_ms)
