"""A blend whose weights change on the way: one periodic table after another.

Pieces follow each other at known positions of a lane. Each begins its table anew, unless told how far into it it
begins, and goes on with every stream where the piece before has left it::

    pieces    (0, parts 1 1)    (4, parts 3 1)
    streams    0 1 0 1           0 1 0 0 | 0 1 0 0 | ...
    draws      0 0 1 1           2 2 3 4 | 5 3 6 7 | ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan.blend_table import BlendTable

__all__ = ["BlendCourse", "BlendPiece"]


class BlendPiece(NamedTuple):
    """A stretch of a blend with the same weights.

    Attributes:
        first: position at which it begins.
        parts: draws of each stream in a period, shape (streams,); 0 for a stream that has none in this piece.
        offset: how far into its table it begins.
    """

    first: int
    parts: tuple[int, ...]
    offset: int = 0


class BlendCourse:
    """Which stream each position of a lane draws from, and which draw of that stream it is.

    Args:
        pieces: at least one; the first begins at position 0, each further one behind the one before.

    Attributes:
        pieces: as given.
        streams: how many there are.

    Raises:
        ValueError: there is no piece, they do not follow each other, or are not of the same number of streams.
    """

    def __init__(self, pieces: Sequence[BlendPiece]) -> None:
        self.pieces = tuple(pieces)
        self._firsts = [piece.first for piece in self.pieces]
        if (
            not self.pieces
            or self._firsts[0]
            or any(a >= b for a, b in zip(self._firsts, self._firsts[1:], strict=False))
        ):
            raise ValueError(f"the pieces of a blend begin at 0 and follow each other, got {self._firsts}")
        self.streams = len(self.pieces[0].parts)
        if any(len(piece.parts) != self.streams for piece in self.pieces):
            raise ValueError(f"all pieces of a blend are of the same {self.streams} streams")
        # Draws of each stream before each piece, shape (pieces, streams): how many that are not the table's own.
        before = [np.zeros(self.streams, dtype=np.int64)]
        for piece, stop in zip(self.pieces, self._firsts[1:], strict=False):
            drawn = _counts(piece, piece.offset + stop - piece.first) - _counts(piece, piece.offset)
            before.append(before[-1] + drawn)
        self._before = np.array(
            [one - _counts(piece, piece.offset) for piece, one in zip(self.pieces, before, strict=True)]
        )

    def draws(self, first: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns which stream each of the positions [first, stop) draws from, and which draw of that stream it is.

        Returns:
            Streams and draws, int64 of shape (stop - first,).
        """
        streams = np.empty(stop - first, dtype=np.int64)
        draws = np.empty(stop - first, dtype=np.int64)
        at = first
        while at < stop:
            place = bisect_right(self._firsts, at) - 1
            piece = self.pieces[place]
            end = min(stop, self._firsts[place + 1]) if place + 1 < len(self._firsts) else stop
            known, table = _table(piece.parts)
            found, drawn = table.draws(np.arange(at, end) - piece.first + piece.offset)
            of = known[found]
            streams[at - first : end - first] = of
            draws[at - first : end - first] = drawn + self._before[place][of]
            at = end
        return streams, draws

    def draw(self, position: int) -> tuple[int, int]:
        """Returns which stream a position draws from, and which draw of that stream it is."""
        place = bisect_right(self._firsts, position) - 1
        piece = self.pieces[place]
        known, table = _table(piece.parts)
        found, drawn = table.draw(position - piece.first + piece.offset)
        stream = int(known[found])
        return stream, drawn + int(self._before[place][stream])

    def streams_of(self, first: int, stop: int) -> list[int]:
        """Returns which stream each of the positions [first, stop) draws from."""
        streams: list[int] = []
        while first < stop:
            place = bisect_right(self._firsts, first) - 1
            piece = self.pieces[place]
            end = min(stop, self._firsts[place + 1]) if place + 1 < len(self._firsts) else stop
            known, table = _table(piece.parts)
            begin = piece.offset - piece.first
            found = table.streams(first + begin, end + begin)
            streams += found if len(known) == self.streams else known[found].tolist()
            first = end
        return streams

    def counts(self, position: int) -> tuple[int, ...]:
        """Returns how many draws of each stream come before a position."""
        place = bisect_right(self._firsts, position) - 1
        piece = self.pieces[place]
        found = self._before[place] + _counts(piece, position - piece.first + piece.offset)
        return tuple(found.tolist())

    def position(self, stream: int, draw: int) -> int | None:
        """Returns the position of a stream's draw, counted from 0; None if it is never drawn so often."""
        for place in range(len(self.pieces) - 1, -1, -1):
            piece, before = self.pieces[place], int(self._before[place][stream])
            if draw < before + int(_counts(piece, piece.offset)[stream]):
                continue
            if not piece.parts[stream]:
                return None
            known, table = _table(piece.parts)
            return piece.first - piece.offset + table.position(int(np.searchsorted(known, stream)), draw - before)
        raise AssertionError("the first piece begins with no draw")


@lru_cache(maxsize=256)
def _table(parts: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], BlendTable]:
    """Returns the streams that have draws, and the table of those."""
    known = np.flatnonzero(np.array(parts))
    return known, BlendTable([parts[stream] for stream in known.tolist()])


def _counts(piece: BlendPiece, position: int) -> npt.NDArray[np.int64]:
    known, table = _table(piece.parts)
    found = np.zeros(len(piece.parts), dtype=np.int64)
    found[known] = table.counts(position)
    return found
