r"""The rate limit: when the next row is due. Decisions only: time goes in as a number.

Row n is due at start + n / rate, computed anew each time, so nothing drifts. After a pause of more than `BURST_S` the
start moves up, so what is caught up with is at most `BURST_S` worth of rows:

    rate 4:   |  0  1  2  3 ......... pause of 10 s ......... 4 5 6 7 8  9  10
                                                             \ 1 s worth at once, then every 0.25 s again
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 1.0
"""Rows of so many seconds may be made up for after a pause: enough to ride over a slow publish, no flood."""


class Pace:
    """Spreads rows evenly.

    Args:
        rate: rows a second, above 0.
        now: seconds of a monotonic clock.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._start = now
        self._taken = 0

    def delay(self, now: float) -> float:
        """Returns in how many seconds the next row is due; 0 if it is."""
        due = self._start + self._taken / self._rate
        if now - due > BURST_S:
            self._start += now - due - BURST_S
        return max(0.0, due - now)

    def due(self, now: float) -> int:
        """Returns how many rows are due."""
        if self.delay(now) > 0:
            return 0
        # At least the one of which `delay` says so, however the division is rounded.
        return max(1, int((now - self._start) * self._rate) + 1 - self._taken)

    def take(self, rows: int = 1) -> None:
        """Counts rows."""
        self._taken += rows
