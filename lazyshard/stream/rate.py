"""How fast samples come, as a producer tells its readers."""

from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 30.0
"""Time constant of the average: rides over one slow chunk, and follows a change within a minute."""


class RateMeter:
    """Exponentially weighted samples per second.

    Args:
        now: seconds of a monotonic clock.
        count: samples already counted.
    """

    def __init__(self, now: float, count: int = 0) -> None:
        self._last = now
        self._count = count
        self._sum = 0.0
        self._weight = 0.0

    def update(self, now: float, count: int) -> float:
        """Takes the number of samples so far and returns the rate; 0 until time has passed."""
        elapsed = now - self._last
        if elapsed > 0:
            fade = math.exp(-elapsed / _MEMORY_S)
            self._sum = self._sum * fade + (count - self._count) / elapsed * (1 - fade)
            self._weight = self._weight * fade + (1 - fade)
            self._last, self._count = now, count
        return self._sum / self._weight if self._weight else 0.0
