"""The rate of late: after a week, rows a second since the start say little of now."""

from __future__ import annotations

from collections import deque


class RecentRate:
    """Rows a second over the last while.

    Args:
        window_s: how far to look back, in seconds; further back only where nothing was noted since.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._noted: deque[tuple[float, int]] = deque()

    def note(self, rows: int, seconds: float) -> float:
        """Notes that there were so many rows after so many seconds, and returns the rate; 0 until time has passed."""
        while len(self._noted) > 1 and self._noted[1][0] <= seconds - self._window_s:
            self._noted.popleft()
        self._noted.append((seconds, rows))
        first_seconds, first_rows = self._noted[0]
        return (rows - first_rows) / (seconds - first_seconds) if seconds > first_seconds else 0.0
