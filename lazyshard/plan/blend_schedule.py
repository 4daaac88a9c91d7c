"""Weights of a blend that follow the steps of a run: from one set to the next at once, or along a line.

::

    steps      0 ......... 1000 ......... 5000 ......
    weights    1 0         1 0            1 1
    "steps"    1 0         1 0            1 1
    "linear"   1 0         1 0  ...  2 1  1 1          in up to 64 pieces from one to the next

A blend whose weights change on the way: one periodic table after another.

Pieces follow each other at known positions of a lane. Each begins its table anew, unless told how far into it it
begins, and goes on with every stream where the piece before has left it::

    pieces    (0, parts 1 1)    (4, parts 3 1)
    streams    0 1 0 1           0 1 0 0 | 0 1 0 0 | ...
    draws      0 0 1 1           2 2 3 4 | 5 3 6 7 | ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lazyshard.plan.blend import BlendTable, whole_parts


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


Ramp = Literal["steps", "linear"]

_PIECES: Final = 64
"""Pieces of a line at the most: each has a table of its own."""

_SHORT: Final = 1 << 10
_EACH: Final = 8
"""Periods of the pieces of a line are shorter, as there are many: of so many draws, or as many of each stream."""

_PLACES: Final = 512
"""Of a table that are looked at as beginnings of a piece."""

_STRIDE: Final = 0.6180339887498949


class BlendSchedule:
    """Which weights hold from which step on.

    Args:
        points: steps and the weights from there on, shape (streams,) each, 0 or more and not all 0; the first at
            step 0.
        ramp: "steps" holds each until the next; "linear" goes from each to the next along a line, in pieces of whole
            steps which have the weights of their middle. Behind the last point its weights hold.

    Raises:
        ValueError: there is no point, the first is not at step 0, they do not follow each other, or weights are wrong.
    """

    def __init__(self, points: Sequence[tuple[int, Sequence[float]]], ramp: Ramp = "steps") -> None:
        if ramp not in get_args(Ramp):
            raise ValueError(f"ramp is one of {', '.join(get_args(Ramp))}, got {ramp!r}")
        steps = [step for step, _ in points]
        for step in steps:
            if type(step) is not int:
                raise ValueError(f"the steps of a schedule are integers, got {step!r}")
        if not steps or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"the points of a schedule begin at step 0 and follow each other, got {steps}")
        streams = len(points[0][1])
        if any(len(weights) != streams for _, weights in points):
            raise ValueError(f"each point of a schedule has a weight for each of {streams} streams")
        # Each with its own table; a line that leads nowhere is no line.
        self._steps: list[int] = []
        self._parts: list[tuple[int, ...]] = []
        for step, parts in _stretches(points, ramp):
            if not self._parts or parts != self._parts[-1]:
                self._steps.append(step)
                self._parts.append(parts)

    @property
    def constant(self) -> bool:
        """Whether the weights never change."""
        return len(self._parts) == 1

    def parts(self, step: int) -> tuple[int, ...]:
        """Returns the draws of each stream in a period, as they are from a step on."""
        return self._parts[bisect_right(self._steps, step) - 1]

    def pieces(self, step: int, draws_per_step: int) -> tuple[BlendPiece, ...]:
        """Returns the pieces of a course that begins after so many steps.

        Args:
            step: steps trained before its first position.
            draws_per_step: positions of a lane in a step; only of importance if the weights change.
        """
        first = bisect_right(self._steps, step) - 1
        pieces = [BlendPiece(0, self._parts[first])]
        lag = np.zeros(len(self._parts[0]))
        begins = [(begin - step) * draws_per_step for begin in self._steps[first + 1 :]]
        lengths = [stop - begin for begin, stop in pairwise(begins)]
        for at, parts, draws in zip_longest(begins, self._parts[first + 1 :], lengths):
            last = pieces[-1]
            lag += _lag(last, at - last.first)
            pieces.append(BlendPiece(at, parts, _offset(parts, lag, draws)))
        return tuple(pieces)


def _lag(piece: BlendPiece, draws: int) -> npt.NDArray[np.float64]:
    """Returns how far each stream is behind its share after the first draws of a piece."""
    course = BlendCourse([piece._replace(first=0)])
    parts = np.array(piece.parts)
    lag: npt.NDArray[np.float64] = draws * parts / parts.sum() - np.array(course.counts(draws))
    return lag


def _offset(parts: tuple[int, ...], lag: npt.NDArray[np.float64], draws: int | None) -> int:
    """Returns where in its table a piece begins so that what streams lag behind their shares is made good.

    If each piece began its table anew, it would begin with the same streams, and where pieces are short these would get
    more than their shares.

    Args:
        parts: of the piece.
        lag: of each stream where it begins.
        draws: how many there are in the piece; None for a piece without an end.
    """
    period, shares = sum(parts), np.array(parts) / sum(parts)
    # Strewn by the golden ratio: places at even distances would all have the same stream's turn come next.
    places = np.arange(period)
    if period > _PLACES:
        places = (np.arange(_PLACES) * _STRIDE % 1 * period).astype(np.int64)
    streams, _ = BlendCourse([BlendPiece(0, parts, period)]).draws(0, 2 * period)
    before = np.zeros((2 * period + 1, len(parts)), dtype=np.int64)
    before[1:] = np.cumsum(streams[:, None] == np.arange(len(parts)), axis=0)
    if draws is None:
        # Where the table's own streams are as far behind.
        apart = places[:, None] * shares - before[places] - lag
    else:
        # So many draws from there leave them as near to their shares as can be.
        drawn = before[places + draws % period] - before[places]
        apart = lag + draws % period * shares - drawn
    # A stream that has no part in this piece cannot catch up in it.
    return period + int(places[int((apart[:, shares > 0] ** 2).sum(axis=1).argmin())])


def _stretches(points: Sequence[tuple[int, Sequence[float]]], ramp: Ramp) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields steps and the draws of a period from there on."""
    for (step, weights), (stop, target) in pairwise(points):
        if ramp == "steps":
            yield step, _parts(weights)
            continue
        _parts(weights)
        count = min(_PIECES, stop - step)
        bounds = [step + (stop - step) * number // count for number in range(count + 1)]
        for begin, end in pairwise(bounds):
            way = ((begin + end) / 2 - step) / (stop - step)
            between = [one + (other - one) * way for one, other in zip(weights, target, strict=True)]
            yield begin, _parts(between, max(_SHORT, _EACH * len(between)))
    yield points[-1][0], _parts(points[-1][1])


def _parts(weights: Sequence[float], longest: int | None = None) -> tuple[int, ...]:
    """Returns whole parts of the weights, 0 for those that are 0."""
    given = [weight for weight in weights if weight]
    whole = iter(whole_parts(given, longest))
    return tuple(next(whole) if weight else 0 for weight in weights)
