"""Reads the samples of consecutive indices: lines read ahead, parsed, and made into samples."""

from __future__ import annotations

from typing import Any, Final

from lazyshard.data.index_space import IndexSpace
from lazyshard.data.samples import SampleMaker
from lazyshard.errors import ChunkCorrupt, ChunkRetired, RowInvalid
from lazyshard.plan import Draw, Run
from lazyshard.storage import StreamReader

__all__ = ["LaneReader", "consecutive"]

_NOTHING: Final[tuple[int, list[bytes], int]] = (0, [], 0)


class LaneReader:
    """Reads for the indices of one process's data set.

    Args:
        reader: the stream.
        samples: makes samples of rows.
        plain: rows are samples as they are.

    Attributes:
        ahead: what was read ahead: index of the first line, lines of it and of the indices that follow it, epoch. One
            value that is only ever replaced, so that threads which share the data set never see the lines of one place
            with the index of another.
    """

    def __init__(self, reader: StreamReader, samples: SampleMaker, plain: bool) -> None:
        self.ahead = _NOTHING
        self._reader = reader
        self._samples = samples
        self._plain = plain
        # The run that was located last: lane, epoch and run.
        self._run: tuple[int, int, Run] | None = None

    def read(self, space: IndexSpace, index: int, count: int, epoch: int) -> list[Any]:
        """Returns the samples of the first of `count` consecutive indices: at least one of them.

        Raises:
            ChunkRetired: the chunk was deleted; says more where the sample was drawn in an epoch before.
            IndexError, LazyShardError: as `LazyShardedDataset.__getitem__`.
        """
        try:
            return self._read(space, index, count, epoch)
        except ChunkRetired as error:
            drawn = space.draw(index, self._reader)
            if not drawn.epoch:
                raise
            raise _drawn_again(error, drawn) from error

    def _read(self, space: IndexSpace, index: int, count: int, epoch: int) -> list[Any]:
        sample, stop = self._locate(space, index, epoch)
        try:
            lines = self._lines_ahead(index, count, epoch, space.step)
            if not lines:
                # The old lines are freed first, so that the new ones land where the CPU's caches are warm.
                self.ahead = _NOTHING
                ahead = self._reader.lines_published(sample, stop, count)
                self.ahead = (index, ahead, epoch)
                lines = ahead[:count]
            rows = self._reader.parse(lines, sample)
        except (ChunkCorrupt, RowInvalid) as cause:
            return [self._samples.substitute(sample, cause)]
        return rows if self._plain else [self._samples.make(sample + i, row) for i, row in enumerate(rows)]

    def _lines_ahead(self, index: int, count: int, epoch: int, step: int) -> list[bytes]:
        """Returns the lines of the first of `count` consecutive indices that were read ahead."""
        first, lines, ahead_epoch = self.ahead
        place, beside = divmod(index - first, step)
        return lines[place : place + count] if epoch == ahead_epoch and place >= 0 and not beside else []

    def _locate(self, space: IndexSpace, index: int, epoch: int) -> tuple[int, int]:
        """Returns the sample of an index, and the end of the samples that the following indices draw in turn."""
        lane, position = space.layout.locate(index)
        if lane != space.rank.dp_rank:
            space.tell_lane(index, lane, self._reader)
        if space.course.rules.window:
            sample = space.draw(index, self._reader).sample
            return sample, sample + 1
        known = self._run
        if known is None or known[:2] != (lane, epoch) or not known[2].first <= position < known[2].stop:
            known = self._run = (lane, epoch, space.run(lane, position, self._reader))
        run = known[2]
        return run.sample + position - run.first, run.sample + run.stop - run.first


def consecutive(indices: list[int], start: int, step: int) -> tuple[int, int]:
    """Returns the index at a place of a batch, and how many from there on follow each other in steps of `step`."""
    index = indices[start]
    count = len(indices) - start
    if count == 1 or (start == 0 and indices == list(range(index, index + count * step, step))):
        return index, count
    count = 1
    while start + count < len(indices) and indices[start + count] == index + count * step:
        count += 1
    return index, count


def _drawn_again(error: ChunkRetired, drawn: Draw) -> ChunkRetired:
    """Returns the error for a sample that was drawn in an epoch before, and whose chunk is gone since."""
    return ChunkRetired(
        f"{error.file}: sample {drawn.sample} is drawn again in epoch {drawn.epoch}, but its chunk {error.chunk} was "
        f"deleted by the stream's producer, as were all chunks below {error.chunks_before}. To train another epoch, "
        f"produce the stream with --retain all, or more epochs of its rows in advance",
        file=error.file,
        chunk=error.chunk,
        chunks_before=error.chunks_before,
    )
