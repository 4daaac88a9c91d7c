"""Waits as they are shown: which ones are worth a line in the log. Decisions only: time goes in as a number.

A live source that trickles makes a run wait a little after every row. A line is for waits that last; those that come
one after another get one line together, and the regular lines say the rest.
"""

from __future__ import annotations

from typing import Final

LASTING_S: Final = 5.0
"""From here on a wait is worth a line; the heartbeat in head.json says `waiting` after the same time."""


class Waits:
    """The wait that goes on, if one does.

    Args:
        every_s: seconds between two lines at the least.

    Attributes:
        every_s: the same.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._reason: str | None = None
        self._began = 0.0
        self._told_at: float | None = None
        self._told = False

    def begin(self, reason: str, now: float) -> bool:
        """Notes that a wait goes on, from the first call to `end`; returns whether to say so now.

        Args:
            reason: what is waited for; it may change while the wait goes on.
            now: seconds of a monotonic clock.
        """
        if self._reason is None:
            self._began = now
        self._reason = reason
        if self._told or now - self._began < LASTING_S:
            return False
        if self._told_at is not None and now - self._told_at < self.every_s:
            return False
        self._told, self._told_at = True, now
        return True

    def end(self, now: float) -> float | None:
        """Notes that it is over; returns how many seconds it took if its begin was said."""
        told, self._told, self._reason = self._told, False, None
        return now - self._began if told else None

    def lasting(self, now: float) -> str | None:
        """Returns what is waited for, if that has gone on long enough to be of interest."""
        return self._reason if self._reason is not None and now - self._began >= LASTING_S else None
