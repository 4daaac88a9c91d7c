"""How fast a number grows that is only seen now and then. Time goes in as numbers."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final

_MEMORY_S: Final = 120.0
"""A rate is taken from the steps of so many seconds, from two at least: it rides over a slow window, and follows a
change within minutes."""


class Pace:
    """How fast a number grows, by the steps that were seen of it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()

    def step(self, at: float, value: float) -> None:
        """Takes what the number was at a time, in seconds; one that goes back makes everything before it void."""
        if self._steps and (at < self._steps[-1][0] or value < self._steps[-1][1]):
            self._steps.clear()
        if not self._steps or at > self._steps[-1][0]:
            self._steps.append((at, value))
        while len(self._steps) > 2 and self._steps[0][0] < at - _MEMORY_S:
            self._steps.popleft()

    def rate(self, now: float) -> float | None:
        """Returns the growth per second, None before the second step.

        Once no step has come for longer than twice the longest pause between two, that silence counts too, so that what
        stands still does not keep its rate.
        """
        if len(self._steps) < 2:
            return None
        times = [at for at, _ in self._steps]
        longest = max(later - earlier for earlier, later in itertools.pairwise(times))
        until = now if now - times[-1] > 2 * longest else times[-1]
        return (self._steps[-1][1] - self._steps[0][1]) / (until - times[0])


class ChangePace:
    """The pace of a number of which only the changes tell when it had a value."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._pace = Pace()

    def look(self, now: float, value: int) -> None:
        """Takes what the number is at a time, in seconds."""
        # When it came to have the value that the first look finds is not known.
        if self._last is not None and value != self._last:
            self._pace.step(now, value)
        self._last = value

    def rate(self, now: float) -> float | None:
        """Returns the growth per second as `Pace.rate` does, None before the second change."""
        return self._pace.rate(now)
