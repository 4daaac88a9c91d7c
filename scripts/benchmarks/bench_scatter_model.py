"""Why a scatter from rank 0 gets slower with the number of ranks, as a formula; numbers in, numbers out.

With a core for every rank, a step's batches are there when the busiest process is through:

- Rank 0 scatters: it reads, parses, collates, pickles and sends what each of the R ranks gets, one after the other. So
  t(R) = fixed + each * R, with `fixed` for what a step costs it anyway, and `each` for the batch of one rank.
- Every rank reads its own: t(R) = own, whatever R is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """t(R) = fixed + each * R, in milliseconds a step with R ranks.

    Attributes:
        fixed: what a step takes however many ranks there are.
        each: what it takes more for each rank.
    """

    fixed: float
    each: float

    def at(self, ranks: int) -> float:
        """Returns the milliseconds of a step with so many ranks."""
        return self.fixed + self.each * ranks


def fit_line(measured: Mapping[int, float]) -> Line:
    """Returns the line through milliseconds by number of ranks, by least squares.

    Raises:
        ValueError: fewer than two numbers of ranks were measured.
    """
    if len(measured) < 2:
        raise ValueError(f"a line is fitted to two numbers of ranks or more, got {sorted(measured)}")
    slope, intercept = statistics.linear_regression(list(measured), list(measured.values()))
    return Line(intercept, slope)


def fit_constant(measured: Mapping[int, float]) -> Line:
    """Returns the line with no slope that is nearest to milliseconds by number of ranks, by least squares: their mean.

    Raises:
        ValueError: nothing was measured.
    """
    if not measured:
        raise ValueError("a constant is fitted to one number of ranks or more, got none")
    return Line(statistics.fmean(measured.values()), 0.0)


def misfit(line: Line, measured: Mapping[int, float]) -> float:
    """Returns how far what was measured is from a line where it is farthest, as a share of what was measured."""
    return max(abs(line.at(ranks) - ms) / ms for ranks, ms in measured.items())


def each_round(measured: Mapping[int, Sequence[float]]) -> list[dict[int, float]]:
    """Returns the milliseconds by number of ranks of each round, from those of every round by number of ranks."""
    return [dict(zip(measured, one, strict=True)) for one in zip(*measured.values(), strict=True)]


def failures(name: str, scattered: Mapping[int, Sequence[float]], own: Mapping[int, Sequence[float]]) -> list[str]:
    """Returns in words what does not hold: ours is faster with each number of ranks, and grows more slowly with it.

    What is compared is compared within a round, and the median over the rounds counts.

    Args:
        name: of the data.
        scattered: milliseconds a step where rank 0 scatters, of every round, by number of ranks.
        own: the same where each rank reads its own.
    """
    found = []
    for ranks, ms in scattered.items():
        ratio = statistics.median([a / b for a, b in zip(ms, own[ranks], strict=True)])
        if ratio <= 1:
            found.append(
                f"data {name}, {ranks} ranks: the dispatcher takes {ratio:.2f} of our time, asked for: more than 1"
            )
    rounds = zip(each_round(scattered), each_round(own), strict=True)
    growth = statistics.median([fit_line(a).each - fit_line(b).each for a, b in rounds])
    if growth <= 0:
        found.append(
            f"data {name}: each rank adds {growth:.3g} ms more to the dispatcher's step than to ours, asked for: more "
            f"than 0"
        )
    return found
