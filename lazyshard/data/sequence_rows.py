"""The rows of which sequences are made, window by window: how long each is, where it lies, and what is made of it."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.data.blend_state import BlendSpace
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.commits import REPEAT_S, is_due
from lazyshard.data.rank import Rank
from lazyshard.data.steps import RowSteps
from lazyshard.errors import LazyShardError
from lazyshard.format.cursor import ReadingMark
from lazyshard.stream import StreamReader
from lazyshard.stream.consumers import read_reading, write_reading
from lazyshard.stream.token_lengths import WindowLengths, lengths_not_ours

_Integers = npt.NDArray[np.int64]


class SourceRow(NamedTuple):
    """Where a row lies, and what is done with it."""

    reader: StreamReader
    sample: int
    steps: RowSteps


class StreamRows:
    """The rows of one stream, in windows of so many chunks; the number of a row is that of its sample.

    Attributes:
        name: how a state calls the stream.
        rows: of a window, but of the last one.
        readers: of all streams.
        marks: tells the producer which window is needed; None for nobody.
    """

    def __init__(self, reader: StreamReader, steps: RowSteps, chunks: int) -> None:
        self._lengths = WindowLengths(reader, chunks)
        assert reader.stream_id is not None, "others have no lengths"
        self.name = reader.stream_id
        self.rows = self._lengths.rows
        self.marks: WindowMarks | None = None
        self.readers = (reader,)
        self._reader = reader
        self._steps = steps

    def lengths(self, window: int, epoch: int) -> npt.NDArray[np.uint32]:
        """Returns the lengths of a window's rows, fewer at the end of the stream. Waits, and raises, as `of` does."""
        if self.marks is not None:
            self.marks.enter(window)
        return self._lengths.of(window)

    def digest(self, first: int, stop: int, epoch: int) -> str:
        """Returns the digest of the lengths of the windows [first, stop)."""
        return self._lengths.digest(first, stop)

    def refresh(self) -> None:
        """Looks what is published now."""
        self._reader.refresh()

    def place(self, row: int, epoch: int) -> SourceRow:
        """Returns where a row lies."""
        return SourceRow(self._reader, row, self._steps)

    def ended(self, epoch: int) -> int | None:
        """Returns how many rows there are if that is known."""
        return self._reader.seen.samples if self._reader.seen.ended else None


class WindowMarks:
    """Keeps the reading mark of a consumer whose rank 0 reads window by window; see `lazyshard.data.commits`."""

    def __init__(self, consumer: str, rank: Rank, reader: StreamReader, chunks: int, since: float) -> None:
        self._consumer = consumer
        self._rank = rank
        self._reader = reader
        self._chunks = chunks
        self._since = since
        self._looked_at = 0.0
        self._mark: ReadingMark | None = None

    def enter(self, window: int) -> None:
        """Tells that a window is needed, before it is waited for."""
        if self._mark is None or window > self._mark.window:
            reader, needs = self._reader, (window + 1) * self._chunks
            now = time.time()
            self._mark = ReadingMark(self._consumer, reader.stream_id, self._rank.dp_size, window, needs, now)
            self._tell(self._mark)

    def repeat(self) -> None:
        """Tells again what is needed if it is not told any more. For who waits; looks about once a second."""
        if self._mark is not None and time.monotonic() - self._looked_at >= REPEAT_S:
            self._tell(self._mark)

    def _tell(self, mark: ReadingMark) -> None:
        self._looked_at = time.monotonic()
        if is_due(read_reading(self._reader.directory, self._consumer), mark, self._since):
            write_reading(self._reader.directory, mark)


_KEPT = 4
"""Windows of a blend of which the rows are known."""


class BlendRows:
    """The rows of a blend, in the order of its indices, in windows; the number of a row is its index in an epoch.

    Attributes: as of `StreamRows`; nobody is told what is needed.
    """

    marks: WindowMarks | None = None

    def __init__(self, blend: BlendedDataset, rows: int, *, by_stopping: bool) -> None:
        self.name = ",".join(blend.names)
        self.rows = rows
        self.readers = tuple(dataset.reader for dataset in blend.datasets)
        self._blend = blend
        self._by_stopping = by_stopping
        self._lengths = [WindowLengths(reader, 1) for reader in self.readers]
        # By epoch and window: of each row the stream, the sample there, and its length.
        self._known: dict[tuple[int, int], tuple[_Integers, _Integers, npt.NDArray[np.uint32]]] = {}

    def lengths(self, window: int, epoch: int) -> npt.NDArray[np.uint32]:
        """Returns the lengths of a window's rows, fewer at the end of the blend. Waits, and raises, as a draw does."""
        return self._window(window, epoch)[2]

    def digest(self, first: int, stop: int, epoch: int) -> str:
        """Returns the digest of the lengths of the windows [first, stop)."""
        digest = xxhash.xxh3_64()
        for window in range(first, stop):
            digest.update(self.lengths(window, epoch).astype("<u4").tobytes())
        return digest.hexdigest()

    def refresh(self) -> None:
        """Looks what is published now."""
        for reader in self.readers:
            reader.refresh()

    def place(self, row: int, epoch: int) -> SourceRow:
        """Returns where a row lies."""
        window, within = divmod(row, self.rows)
        streams, samples, _ = self._window(window, epoch)
        dataset = self._blend.datasets[streams[within]]
        return SourceRow(dataset.reader, int(samples[within]), dataset._samples._steps)

    def ended(self, epoch: int) -> int | None:
        """Returns how many rows there are if that is known."""
        return None if self._by_stopping else self._blend._space(epoch).layout.block

    def _window(self, window: int, epoch: int) -> tuple[_Integers, _Integers, npt.NDArray[np.uint32]]:
        found = self._known.get((epoch, window))
        if found is not None:
            return found
        space, first = self._blend._space(epoch), window * self.rows
        located = np.array([space.locate(row) for row in range(first, self._stop(space, first, epoch))], np.int64)
        streams, indices = located.reshape(-1, 2).T
        samples, lengths = np.zeros(len(streams), np.int64), np.zeros(len(streams), np.uint32)
        for stream, dataset in enumerate(self._blend.datasets):
            own, reader = np.flatnonzero(streams == stream), dataset.reader
            drawn = dataset._space(epoch)
            samples[own] = [drawn.draw(index).sample for index in indices[own].tolist()]
            chunks, rows = np.divmod(samples[own], reader.samples_per_chunk)
            for chunk in np.unique(chunks).tolist():
                at = chunks == chunk
                lengths[own[at]] = self._lengths[stream].of(chunk)[rows[at]]
        if len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[epoch, window] = streams, samples, lengths
        return streams, samples, lengths

    def _stop(self, space: BlendSpace, first: int, epoch: int) -> int:
        """Returns the row behind a window, waiting until it is certain that the blend does not end before."""
        stop = max(first, min(first + self.rows, space.layout.block))
        if not self._by_stopping or stop == first or self._blend._goes_on(space, stop - 1, epoch):
            return stop
        rows = range(first, stop)
        return first + bisect_left(rows, True, key=lambda row: not self._blend._goes_on(space, row, epoch))


Rows = StreamRows | BlendRows


def enter_blend(blend: BlendedDataset) -> bool:
    """Has a blend give rows to sequences, and no samples any more; returns whether it ends by its `stopping`.

    Raises:
        ValueError: its data sets are of ranks, have a consumer, or it has micro batches or a schedule.
        RuntimeError: it is used already.
    """
    if blend._batch_size != 1 or not blend._schedule.constant:
        raise ValueError("sequences are made of the rows of a blend with batch_size=1 and without a schedule")
    for dataset in blend.datasets:
        if dataset._rank not in (None, Rank(0, 1)):
            raise ValueError(
                f"{dataset.directory}: sequences are dealt to the ranks, not rows: make the data sets of the blend "
                f"without dp_rank and dp_size, and give these to the sequences"
            )
        if dataset._commits is not None:
            raise ValueError(f"{dataset.directory}: a blend of which sequences are made commits nothing: no consumer")
    by_stopping = blend._num_samples is None
    blend._give_up_length()
    for dataset in blend.datasets:
        dataset._rank = Rank(0, 1)
    return by_stopping


def blend_facts(blend: BlendedDataset) -> str:
    """Returns what decides the rows of a blend, but for its streams, as a state keeps it."""
    orders = [
        [order.unit, order.shuffle_window, order.seed, order.max_total_samples]
        for order in (dataset._states.order for dataset in blend.datasets)
    ]
    samples = None if blend._length_given_up else blend._num_samples
    return json.dumps([blend._schedule.parts(0), blend._stopping, samples, orders])


def open_stream(directory: str | os.PathLike[str], max_wait: float) -> StreamReader:
    """Opens a stream. Raises LengthsMissing: another program fills the directory; or as `StreamReader`."""
    try:
        return StreamReader(directory, max_wait=max_wait)
    except ValueError as cause:
        if isinstance(cause, LazyShardError):
            raise
        # It asks for the size of chunks, which is all that it misses.
        raise lengths_not_ours(directory) from cause
