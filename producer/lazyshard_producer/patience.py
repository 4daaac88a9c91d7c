"""Says what a run is stuck in: a share that hangs, a source or a function of the user's that does not come back.

Nothing can be done about it from here, and it may pass; but nobody should have to guess. A thread of its own looks,
since the one that is stuck cannot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

NO_ANSWER_S: Final = 60.0
"""Far longer than a device, a network or a function takes that works."""


class _Asked(NamedTuple):
    what: Callable[[], str]
    since: float


class Patience:
    """Waits for answers together with the run, and says so when one takes too long.

    Args:
        tell: is told, from another thread.
        no_answer_s: how long is too long.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        tell: Callable[[str], None] = lambda text: None,
        no_answer_s: float = NO_ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._no_answer_s = no_answer_s
        self._clock = clock
        self._asked: _Asked | None = None
        self._told: _Asked | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, what: Callable[[], str]) -> None:
        """Notes that something is asked for; `what` returns in words what, and is called from the other thread."""
        self._asked = _Asked(what, self._clock())

    def answered(self) -> None:
        """Notes that it has come, or has failed."""
        asked, self._asked = self._asked, None
        if asked is not None and asked is self._told:
            self._tell(f"answered after {self._clock() - asked.since:.0f} s: {asked.what()}")

    def look(self) -> None:
        """Tells of what is asked for if that takes too long; once for each."""
        asked = self._asked
        if asked is None or asked is self._told or self._clock() - asked.since < self._no_answer_s:
            return
        self._told = asked
        self._tell(f"no answer for {self._no_answer_s:.0f} s: {asked.what()}")

    def start(self) -> None:
        """Begins to look now and then."""
        # A daemon: what it tells of may keep the process from ending, this must not.
        self._thread = threading.Thread(target=self._run, name="patience", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends that. May be called twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._no_answer_s / 10):
            self.look()
