"""Reads the samples of shuffled windows: a window's order is computed at once, and its rows are read together."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.data.index_space import IndexSpace
from lazyshard.errors import ChunkCorrupt, RowInvalid
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES
from lazyshard.stream.scattered import Held, ScatteredReader

__all__ = ["Located", "WindowReader"]

_MOST: Final = 16_384
"""Positions whose order is computed together."""

_AHEAD_BYTES: Final = 512 << 10
_AHEAD_ROWS: Final = 256
"""Read ahead at the most, where calls follow each other in order."""

_STEADY: Final = 2
"""After so many calls that go on near where the last one stopped, the rest of the window is planned."""


class _Window(NamedTuple):
    """What is left of a window. One value that is only ever replaced, as several threads may share the reader.

    Attributes:
        lane: whose it is.
        epoch: the epoch that was set when it was computed.
        first: position of its first sample.
        samples: int64, of consecutive positions.
        held: where their rows lie if their chunks are held, else None.
    """

    lane: int
    epoch: int
    first: int
    samples: npt.NDArray[np.int64]
    held: Held | None


class Located(NamedTuple):
    """Samples, and how their rows are read.

    Attributes:
        samples: int64, of consecutive positions: at least one, and more than wanted where they are known.
        held: what they are cut out of; None if each row is read by itself.
        position: of the first one.
        place: of the first one in `held`.
        ahead: how many rows to read, also beyond those wanted; 0 for no more than those.
    """

    samples: npt.NDArray[np.int64]
    position: int
    held: Held | None
    place: int
    ahead: int


_NO_WINDOW: Final = _Window(0, 0, 0, np.empty(0, dtype=np.int64), None)


class WindowReader:
    """Reads for the positions of a course with windows.

    Who reads on and on, perhaps in steps, as a DataLoader worker does, gets what is left of each window planned, and
    its chunks held where that pays; who jumps about gets each sample by itself.

    Args:
        reader: the stream.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._scattered = ScatteredReader(reader)
        self._window = _NO_WINDOW
        # Lane, epoch and position behind the last call's; how many calls in a row went on near there.
        self._next = (-1, 0, 0)
        self._steady = 0

    def locate(self, space: IndexSpace, lane: int, position: int, count: int, epoch: int) -> Located:
        """Finds the samples that a position and some behind it draw, waiting until they are certain.

        Args:
            space: the indices.
            lane: whose position.
            position: the first one.
            count: how many are wanted.
            epoch: the epoch that is set.

        Raises:
            IndexError, LazyShardError: as `IndexSpace.draw`.
        """
        window, last = self._window, self._next
        place, held = position - window.first, None
        if window.lane == lane and window.epoch == epoch and 0 <= place < len(window.samples):
            samples, held = window.samples[place:], window.held
        else:
            near = last[:2] == (lane, epoch) and 0 <= position - last[2] <= space.course.rules.window
            self._steady = self._steady + 1 if near else 0
            if self._steady < _STEADY:
                # The indices behind a lane's last position are those of another lane.
                stop = min(position + count, space.layout.block)
                draws = [space.draw_at(lane, at, self._reader).sample for at in range(position, stop)]
                samples = np.array(draws, dtype=np.int64)
            else:
                samples = space.window(lane, position, _MOST, self._reader)
                place, held = 0, self._scattered.prepare(samples)
                self._window = _Window(lane, epoch, position, samples, held)
        self._next = lane, epoch, position + min(count, len(samples))
        follows = last == (lane, epoch, position)
        rows = min(_AHEAD_ROWS, _AHEAD_BYTES // held.row_bytes) if follows and held is not None else 0
        return Located(samples, position, held, place, rows)

    def lines(self, located: Located, count: int) -> list[bytes]:
        """Returns the checked lines of samples, ahead of what is wanted where calls follow each other in order.

        Args:
            located: what `locate` has returned.
            count: how many are wanted.

        Returns:
            Lines from the first on; fewer than wanted, but never none, where a bad row follows or rows are large.

        Raises:
            ChunkCorrupt, RowInvalid: the first one is bad.
            ChunkRetired, ChunkMissing, OSError: as `StreamReader.lines_published`.
        """
        held, place, ahead = located.held, located.place, located.ahead
        if held is None:
            return self._one_by_one(located.samples[:count])
        lines = self._scattered.lines(held, place, min(place + max(count, ahead - ahead % count), len(held.samples)))
        # What was read ahead is taken without asking here.
        self._next = *self._next[:2], located.position + len(lines)
        return lines

    def _one_by_one(self, samples: npt.NDArray[np.int64]) -> list[bytes]:
        lines: list[bytes] = []
        for sample in samples.tolist():
            try:
                lines += self._reader.lines_published(sample, sample + 1)
            except (ChunkCorrupt, RowInvalid):
                if not lines:
                    raise
                break
            if len(lines[-1]) > LARGE_ROW_BYTES:
                break
        return lines
