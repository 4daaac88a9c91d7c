"""How long a run has waited, by reason, the wait that goes on included. For several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class WaitClock:
    """Adds up waits.

    Args:
        reasons: what can be waited for.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, reasons: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waited = dict.fromkeys(reasons, 0.0)
        self._reason: str | None = None
        self._since = 0.0
        # Else who asks between two steps would get a sum that falls later, which counters must not.
        self._lock = threading.Lock()

    def wait(self, reason: str | None) -> None:
        """Notes that this is waited for from now on; None: nothing is. Again with the same reason the wait goes on."""
        with self._lock:
            self._add()
            self._reason = reason

    def seconds(self) -> dict[str, float]:
        """Returns how many seconds each reason was waited for until now; never less than before."""
        with self._lock:
            self._add()
            return dict(self._waited)

    def _add(self) -> None:
        now = self._clock()
        if self._reason is not None:
            self._waited[self._reason] += max(0.0, now - self._since)
        self._since = now
