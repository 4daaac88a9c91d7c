"""Blending by the greatest error: which of several streams gives the next sample.

Before draw n the stream is taken that lags most behind its share: the greatest ``weight * max(n, 1) - drawn``, the
first of equals. It is the rule of Megatron Core's `BlendedDataset` (`build_blending_indices` in
`megatron/core/datasets/helpers.cpp`). After any number of draws each stream is less than one sample per stream away
from its share, nothing is random, and the counts alone are the state::

    weights  0.5 0.25 0.25      draws  0 1 2 0 | 0 1 2 0 | ...

A blend of streams that repeats: which stream gives a position's sample, and which of that stream's draws it is.

The order is that of the greatest error, as in `lazyshard.plan.blend`, with weights that are whole parts of a period.
Then every stream has had exactly its part after each period, all errors are zero again, and one table says it for any
position, however far, in the same time. The first period has a table of its own: at its first draw Megatron's rule
looks one draw ahead, so that the largest stream begins; wherever else all errors are zero the first stream is taken::

    parts 1 3    1 0 1 1 | 0 1 1 1 | 0 1 1 1 | ...

Computed in integers, nothing is rounded. Megatron's `build_blending_indices` computes in floats: where two errors are
equal but for rounding, it takes one or the other, and so the same weights as here give the same order only where floats
hold them exactly, as with a period that is a power of two (`tests/plan/test_blend_table.py` compares both).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their sum.

    Raises:
        ValueError: there is none, or one is not a finite number above 0.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a weight is a finite number above 0, got {weight}")
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ValueError(f"weights need a finite sum above 0, got {list(weights)}")
    return tuple(weight / total for weight in weights)


def next_stream(shares: Sequence[float], drawn: Sequence[int], among: Sequence[int] | None = None) -> int:
    """Return the stream to draw from next.

    Args:
        shares: what each stream should have of all samples, shape (streams,); see `shares`.
        drawn: how many samples each has given, shape (streams,).
        among: the streams to choose from, ascending; None for all. At least one.
    """
    total = float(max(sum(drawn), 1))
    best, greatest = -1, -math.inf
    for stream in range(len(shares)) if among is None else among:
        error = shares[stream] * total - drawn[stream]
        if error > greatest:
            best, greatest = stream, error
    return best


_LONGEST: Final = 1 << 14
"""Longest period of some streams: shares are then met within 1/32768."""

_LONGEST_OF_MANY: Final = 1 << 13
_MANY: Final = 64
"""From so many streams on a period is shorter, as each draw looks at all of them."""

_PARTS_EACH: Final = 8
"""Of very many streams each has about so many draws in a period at least."""

_FEW: Final = 16
"""Up to so many streams a list is quicker than an array."""

_LARGEST_DENOMINATOR: Final = 1_000_000


def whole_parts(weights: Sequence[float], longest: int | None = None) -> tuple[int, ...]:
    """Returns the weights as whole parts of their sum, the period of their blend.

    Weights such as 0.8, 12 or 1/3 give their exact shares. Where those would make a period longer than `longest` they
    are rounded to parts of that, by the largest remainder, each stream keeping one part at least.

    Args:
        weights: shape (streams,), above 0.
        longest: of a period; None for a length that is quickly computed, 8192 at the least.

    Raises:
        ValueError: there is none, one is not a finite number above 0, or there are more streams than `longest`.
    """
    of = shares(weights)
    if longest is None:
        longest = max(_LONGEST if len(of) < _MANY else _LONGEST_OF_MANY, _PARTS_EACH * len(of))
    if len(of) > longest:
        raise ValueError(f"a period of {longest} has no part for each of {len(of)} streams")
    exact = [_simplest(weight) for weight in weights]
    shared = math.lcm(*(one.denominator for one in exact))
    parts = [one.numerator * (shared // one.denominator) for one in exact]
    common = math.gcd(*parts)
    parts = [part // common for part in parts]
    return tuple(parts) if sum(parts) <= longest else _rounded(parts, longest)


def _simplest(weight: float) -> Fraction:
    """Returns the fraction that a person meant: 1/3 for 0.3333333333333333."""
    exact = Fraction(weight)
    simple = exact.limit_denominator(_LARGEST_DENOMINATOR)
    return simple if simple and float(simple) == float(weight) else exact


def _rounded(parts: Sequence[int], longest: int) -> tuple[int, ...]:
    total, spare = sum(parts), longest - len(parts)
    # Each stream has a part for certain; the rest is dealt by what is missing of its share then.
    missing = [max(0, part * longest - total) for part in parts]
    whole = sum(missing)
    dealt = [one * spare // whole for one in missing]
    largest = sorted(range(len(parts)), key=lambda stream: (-(missing[stream] * spare % whole), stream))
    for stream in largest[: spare - sum(dealt)]:
        dealt[stream] += 1
    return tuple(1 + one for one in dealt)


class BlendTable:
    """The order of a blend.

    Args:
        parts: how many draws of a period each stream has, shape (streams,), at least 1 each; see `whole_parts`.

    Attributes:
        parts: the same.
        period: their sum.

    Raises:
        ValueError: there is none, or one is below 1.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts = tuple(parts)
        if not self.parts or min(self.parts) < 1:
            raise ValueError(f"each stream of a blend has one draw of a period or more, got {list(parts)}")
        self.period = sum(self.parts)
        self._cycle = later = _order(self.parts, ahead=False)
        self._begun = _begun(self.parts, later)
        streams = np.array([self._begun, later], dtype=np.int32)
        self._streams = streams.reshape(-1)
        # Of each entry: how many of its stream come before it in the period.
        nth = np.empty((2, self.period), dtype=np.int64)
        places = np.empty((2, self.period), dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(self.parts)))
        for order, ranks, found in zip(streams, nth, places, strict=True):
            by_stream = np.argsort(order, kind="stable")
            ranks[by_stream] = np.arange(self.period) - starts[order[by_stream]]
            found[:] = by_stream
        self._nth = nth.reshape(-1)
        # Places of each stream's entries in the first and in later periods, one stream after the other.
        self._places = places
        self._starts = starts
        self._parts = np.array(self.parts, dtype=np.int64)

    def draws(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Returns which stream each position draws from, and how many draws of that stream come before.

        Args:
            positions: int64 of any shape, from 0 on.

        Returns:
            Streams, int32, and draws, int64, of the same shape.
        """
        periods = positions // self.period
        places = positions - np.maximum(periods - 1, 0) * self.period
        streams = self._streams[places]
        draws: npt.NDArray[np.int64] = self._nth[places] + periods * self._parts[streams]
        return streams, draws

    def draw(self, position: int) -> tuple[int, int]:
        """Returns the same of one position."""
        periods = position // self.period
        place = position - max(periods - 1, 0) * self.period
        stream = int(self._streams[place])
        return stream, int(self._nth[place]) + periods * self.parts[stream]

    def streams(self, first: int, stop: int) -> list[int]:
        """Returns which stream each of the positions [first, stop) draws from."""
        if first < self.period:
            begun = self._begun[first : min(stop, self.period)]
            return begun + self.streams(self.period, stop) if stop > self.period else begun
        place = first % self.period
        cycle = self._cycle
        # Twice as long as it was, so that it is seldom made longer.
        while len(cycle) < place + stop - first:
            cycle = self._cycle = cycle + cycle
        return cycle[place : place + stop - first]

    def counts(self, position: int) -> tuple[int, ...]:
        """Returns how many draws of each stream come before a position."""
        periods, place = divmod(position, self.period)
        later = periods > 0
        return tuple(
            periods * part + int(np.searchsorted(self._of(stream, later), place))
            for stream, part in enumerate(self.parts)
        )

    def position(self, stream: int, draw: int) -> int:
        """Returns the position of a stream's draw, counted from 0."""
        periods, nth = divmod(draw, self.parts[stream])
        return periods * self.period + int(self._of(stream, periods > 0)[nth])

    def _of(self, stream: int, later: bool) -> npt.NDArray[np.int64]:
        return self._places[int(later), self._starts[stream] : self._starts[stream + 1]]


def _begun(parts: tuple[int, ...], later: list[int]) -> list[int]:
    """Returns the first period, of which all is as in later ones once the same draws lie behind."""
    greatest = parts.index(max(parts))
    if later[0] == greatest:
        return later
    return _order(parts, ahead=True)


def _order(parts: tuple[int, ...], ahead: bool) -> list[int]:
    """Returns a period's draws: each time the stream whose error is greatest, the first of equals.

    Args:
        parts: of the streams.
        ahead: whether the first draw is made by the errors of the second, as at the very beginning.
    """
    period = sum(parts)
    order = []
    if len(parts) <= _FEW:
        errors = list(parts) if ahead else [0] * len(parts)
        for draw in range(period):
            if draw > ahead:
                errors = [error + part for error, part in zip(errors, parts, strict=True)]
            stream = errors.index(max(errors))
            errors[stream] -= period
            order.append(stream)
        return order
    each = np.array(parts, dtype=np.int64)
    greatest = each.copy() if ahead else np.zeros_like(each)
    for draw in range(period):
        if draw > ahead:
            greatest += each
        stream = int(greatest.argmax())
        greatest[stream] -= period
        order.append(stream)
    return order
