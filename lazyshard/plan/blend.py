"""Selects the stream of each sample of a blend, by weights that are constant or change during the run.

The next sample is drawn from the stream that lags its share most: the one with the greatest
``weight * max(n, 1) - drawn`` before draw n, the first one on a tie, as in Megatron Core's `BlendedDataset`
(`build_blending_indices` in `megatron/core/datasets/helpers.cpp`)::

    weights  0.5 0.25 0.25      draws  0 1 2 0 | 0 1 2 0 | ...

If the weights are integer parts of a period, all errors are zero again after each period, so one table gives any
position, in integers. Megatron's floats are guaranteed to give the same order only if they represent the weights
exactly. At the first draw the rule looks one draw ahead, so the first period has a separate table::

    parts 1 3    1 0 1 1 | 0 1 1 1 | 0 1 1 1 | ...
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Final, NamedTuple

import numpy as np

from lazyshard.part import FloatArray, Int64Array

Counts = tuple[int, ...]


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Returns the weights divided by their sum. Raises ValueError: a weight is not a finite number above 0."""
    if wrong := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
        raise ValueError(f"a weight must be a finite number above 0, got {wrong[0]}")
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ValueError(f"weights need a finite sum above 0, got {list(weights)}")
    return tuple(weight / total for weight in weights)


def next_stream(shares: Sequence[float], drawn: Sequence[int], among: Sequence[int] | None = None) -> int:
    """Returns the stream to draw from next, given the draws of each; `among` restricts it to some, ascending."""
    total = float(max(sum(drawn), 1))
    best, greatest = -1, -math.inf
    for stream in range(len(shares)) if among is None else among:
        error = shares[stream] * total - drawn[stream]
        if error > greatest:
            best, greatest = stream, error
    return best


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the weights as integer parts of their sum, the period. Raises ValueError as `shares`.

    Weights such as 0.8, 12 or 1/3 give their exact shares, unless the period would be too long. In that case they are
    rounded by the largest remainder method, with at least one part for each stream.
    """
    count = len(shares(weights))
    # Shares are exact within 1/32768; with many streams the period is halved, as each draw scans all of them.
    longest = max(1 << 14 if count < 64 else 1 << 13, 8 * count)
    exact = [_simplest(weight) for weight in weights]
    shared = math.lcm(*(one.denominator for one in exact))
    parts = [one.numerator * (shared // one.denominator) for one in exact]
    common = math.gcd(*parts)
    parts = [part // common for part in parts]
    return tuple(parts) if sum(parts) <= longest else _rounded(parts, longest)


def _simplest(weight: float) -> Fraction:
    """Returns the simplest fraction with the same float value: 1/3 for 0.3333333333333333."""
    exact = Fraction(weight)
    simple = exact.limit_denominator(1_000_000)
    return simple if simple and float(simple) == float(weight) else exact


def _rounded(parts: Sequence[int], longest: int) -> tuple[int, ...]:
    total, spare = sum(parts), longest - len(parts)
    # Each stream gets one part; the rest is dealt in proportion to what is then missing of its share.
    missing = [max(0, part * longest - total) for part in parts]
    whole = sum(missing)
    dealt = [one * spare // whole for one in missing]
    largest = sorted(range(len(parts)), key=lambda stream: (-(missing[stream] * spare % whole), stream))
    for stream in largest[: spare - sum(dealt)]:
        dealt[stream] += 1
    return tuple(1 + one for one in dealt)


class BlendTable:
    """The order of a blend in which each stream has `parts` draws per period; some streams may have none."""

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts = tuple(parts)
        self.period = sum(self.parts)
        known = np.flatnonzero(self.parts)
        own = np.array(self.parts, dtype=np.int64)[known]
        later = known[_order(own, ahead=False)]
        # The first draw is from the largest stream. If later periods begin with it too, all periods are the same.
        first = later if later[0] == known[own.argmax()] else known[_order(own, ahead=True)]
        # Later periods are repeated, so that `streams` rarely needs to concatenate.
        self._streams: list[int] = first.tolist() + later.tolist() * (1 + 4096 // self.period)
        # For the first and later periods: the places of each stream; for each place, the earlier draws of its stream.
        self._places = [np.split(np.argsort(one, kind="stable"), np.cumsum(self.parts)[:-1]) for one in (first, later)]
        self._nth: list[int] = []
        for places in self._places:
            nth = np.empty(self.period, dtype=np.int64)
            nth[np.concatenate(places)] = np.concatenate([np.arange(part) for part in self.parts])
            self._nth += nth.tolist()

    def draw(self, position: int) -> tuple[int, int]:
        """Returns the stream of a position, and how many draws of that stream precede it."""
        periods = position // self.period
        place = position - max(periods - 1, 0) * self.period
        stream = self._streams[place]
        return stream, self._nth[place] + periods * self.parts[stream]

    def streams(self, first: int, stop: int) -> list[int]:
        """Returns the stream of each of the positions [first, stop)."""
        found = self._streams[first:stop]
        while (at := first + len(found)) < stop:
            place = self.period + at % self.period
            found += self._streams[place : place + stop - at]
        return found

    def counts(self, position: int) -> tuple[int, ...]:
        """Returns how many draws of each stream precede a position."""
        periods, place = divmod(position, self.period)
        each = zip(self.parts, self._places[periods > 0], strict=True)
        return tuple(periods * part + int(np.searchsorted(own, place)) for part, own in each)

    def position(self, stream: int, draw: int) -> int:
        """Returns the position of a stream's draw, counted from 0; the stream must have draws."""
        periods, nth = divmod(draw, self.parts[stream])
        return periods * self.period + int(self._places[periods > 0][stream][nth])


def _order(parts: Int64Array, ahead: bool) -> list[int]:
    """Returns the draws of a period; `ahead` if the first uses the errors of the second, as in the first period."""
    period, order = int(parts.sum()), []
    errors = parts.copy() if ahead else np.zeros_like(parts)
    for draw in range(period):
        if draw > ahead:
            errors += parts
        stream = int(errors.argmax())
        errors[stream] -= period
        order.append(stream)
    return order


_table = lru_cache(maxsize=256)(BlendTable)


class BlendPiece(NamedTuple):
    """A part of a blend that begins at position `first`: draws of each stream per period, and its table offset."""

    first: int
    parts: tuple[int, ...]
    offset: int = 0

    @property
    def table(self) -> BlendTable:
        """The order of its draws."""
        return _table(self.parts)


class BlendCourse:
    """Maps each position of a lane to a stream and a draw of that stream, by a sequence of tables.

    The first piece begins at 0. Each piece continues every stream where the previous piece left it::

        pieces    (0, parts 1 1)    (4, parts 3 1)
        streams    0 1 0 1           0 1 0 0 | 0 1 0 0 | ...
        draws      0 0 1 1           2 2 3 4 | 5 3 6 7 | ...
    """

    def __init__(self, pieces: Sequence[tuple[int, tuple[int, ...], int]]) -> None:
        self.pieces = tuple(BlendPiece(*piece) for piece in pieces)
        self._firsts = [piece.first for piece in self.pieces]
        self._tables = [piece.table for piece in self.pieces]
        self._shifts = [piece.offset - piece.first for piece in self.pieces]
        # Draws of each stream before each piece that its own table does not count, shape (pieces, streams).
        self._before: list[Int64Array] = []
        drawn = np.zeros(len(self.pieces[0].parts), dtype=np.int64)
        for piece, stop in zip_longest(self.pieces, self._firsts[1:]):
            self._before.append(drawn - piece.table.counts(piece.offset))
            if stop is not None:
                drawn = self._before[-1] + piece.table.counts(piece.offset + stop - piece.first)

    def draw(self, position: int) -> tuple[int, int]:
        """Returns the stream of a position, and the number of the draw in that stream."""
        place = bisect_right(self._firsts, position) - 1
        stream, drawn = self._tables[place].draw(position + self._shifts[place])
        return stream, drawn + int(self._before[place][stream])

    def streams_of(self, first: int, stop: int) -> list[int]:
        """Returns the stream of each of the positions [first, stop)."""
        streams: list[int] = []
        while first < stop:
            place = bisect_right(self._firsts, first) - 1
            shift, end = self._shifts[place], min([stop, *self._firsts[place + 1 : place + 2]])
            streams += self._tables[place].streams(first + shift, end + shift)
            first = end
        return streams

    def counts(self, position: int) -> tuple[int, ...]:
        """Returns how many draws of each stream precede a position."""
        place = bisect_right(self._firsts, position) - 1
        return tuple((self._before[place] + self._tables[place].counts(position + self._shifts[place])).tolist())

    def position(self, stream: int, draw: int) -> int | None:
        """Returns the position of a stream's draw, counted from 0; None if the stream never has that many draws."""
        for piece, befores in zip(reversed(self.pieces), reversed(self._before), strict=True):
            before = int(befores[stream])
            if draw < before + piece.table.counts(piece.offset)[stream]:
                continue
            if not piece.parts[stream]:
                return None
            return piece.first - piece.offset + piece.table.position(stream, draw - before)
        raise AssertionError("the first piece begins with no draw")


def goes_on(
    stopping: str, exhausted: Callable[[int, int], bool], streams: Sequence[int], before: Counts, after: Counts
) -> bool:
    """Returns whether a blend does not end, by `stopping`, between two positions: the draws of each stream up to them.

    `exhausted` returns whether that many draws of a stream exceed its epoch, waiting until that is certain. If a stream
    is exhausted, those after it in `streams` need not be waited for.
    """
    over = (exhausted(stream, after[stream]) for stream in streams)
    if stopping == "first_exhausted":
        return not any(over)
    # Waits until all draws up to there are certain. An epoch is complete once the next one would begin.
    list(over)
    return not all(exhausted(stream, before[stream] + 1) for stream in streams)


_PLACES: Final = 512  # Offsets of a table that are tried as the beginning of a piece


class BlendSchedule:
    """Weights (0 or more, not all 0) by the step from which they apply. Raises ValueError: invalid points."""

    def __init__(self, points: Sequence[tuple[int, Sequence[float]]]) -> None:
        steps = [step for step, _ in points]
        if wrong := [step for step in steps if type(step) is not int]:
            raise ValueError(f"the steps of a schedule must be integers, got {wrong[0]!r}")
        if not steps or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"the points of a schedule must begin at step 0 and ascend, got {steps}")
        streams = len(points[0][1])
        if any(len(weights) != streams for _, weights in points):
            raise ValueError(f"each point of a schedule must have a weight for each of {streams} streams")
        # Points with the same table as the previous point are no change.
        each = [_parts(weights) for _, weights in points]
        changed = [number for number, parts in enumerate(each) if not number or parts != each[number - 1]]
        self._steps = [steps[number] for number in changed]
        self._parts = [each[number] for number in changed]

    @property
    def constant(self) -> bool:
        """Whether the weights never change."""
        return len(self._parts) == 1

    def parts(self, step: int) -> tuple[int, ...]:
        """Returns the draws of each stream per period that apply at a step."""
        return self._parts[bisect_right(self._steps, step) - 1]

    def pieces(self, step: int, draws_per_step: int) -> tuple[BlendPiece, ...]:
        """Returns the pieces of a course that begins after `step` steps, each with `draws_per_step` lane positions."""
        first = bisect_right(self._steps, step) - 1
        pieces, lag = [BlendPiece(0, self._parts[first])], np.zeros(len(self._parts[0]))
        begins = [(begin - step) * draws_per_step for begin in self._steps[first + 1 :]]
        lengths = [stop - begin for begin, stop in pairwise(begins)]
        for at, parts, draws in zip_longest(begins, self._parts[first + 1 :], lengths):
            last, own = pieces[-1], np.array(pieces[-1].parts)
            drawn = np.subtract(last.table.counts(last.offset + at - last.first), last.table.counts(last.offset))
            lag += (at - last.first) * own / own.sum() - drawn
            pieces.append(BlendPiece(at, parts, _offset(parts, lag, draws)))
        return tuple(pieces)


def _offset(parts: tuple[int, ...], lag: FloatArray, draws: int | None) -> int:
    """Returns the table offset at which a piece begins so that it makes up for the lag of streams.

    `draws` is the length of the piece, None if it has no end. If each piece began at the start of its table, short
    pieces would give the first streams more than their shares.
    """
    period, shares = sum(parts), np.array(parts) / sum(parts)
    places = np.arange(period)
    if period > _PLACES:
        # Spread by the golden ratio: at evenly spaced offsets the same stream would always come next.
        places = (np.arange(_PLACES) * 0.6180339887498949 % 1 * period).astype(np.int64)
    streams = np.array([-1, *_table(parts).streams(period, 3 * period)])
    before = np.cumsum(streams[:, None] == np.arange(len(parts)), axis=0)
    if draws is None:
        # Match the lag in the table with the lag of the streams.
        apart = places[:, None] * shares - before[places] - lag
    else:
        # After `draws` draws from the offset, streams are as close to their shares as possible.
        apart = lag + draws % period * shares - (before[places + draws % period] - before[places])
    # Streams without a part in this piece cannot catch up in it.
    return period + int(places[int((apart[:, shares > 0] ** 2).sum(axis=1).argmin())])


def _parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns integer parts of the weights, 0 for weights of 0."""
    whole = iter(whole_parts([weight for weight in weights if weight]))
    return tuple(next(whole) if weight else 0 for weight in weights)
