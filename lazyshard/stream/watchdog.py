"""Says what somebody is stuck in: a share that hangs, a source or a function of the user's that does not come back.

Nothing can be done about it from here, and it may pass; but nobody should have to guess. A thread of its own looks,
since whoever asks is stuck.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Final

NO_ANSWER_S: Final = 60.0
"""Far longer than a device, a network or a function takes that works."""

_log = logging.getLogger("lazyshard")


class _Asked:
    __slots__ = ("due_s", "since", "told", "what")

    def __init__(self, what: Callable[[], str], since: float, due_s: float) -> None:
        self.what = what
        self.since = since
        self.due_s = due_s
        self.told = False


class Watchdog:
    """Waits for answers together with those who ask, and says so when one takes too long.

    Args:
        tell: is told, from another thread.
        no_answer_s: how long is too long.
        clock: returns seconds of a monotonic clock.
        again: tell again after twice as long, and so on; otherwise once for each question.
        advice: stands behind what is told of one that takes too long.
    """

    def __init__(
        self,
        tell: Callable[[str], None] = lambda text: None,
        no_answer_s: float = NO_ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
        *,
        again: bool = False,
        advice: str = "",
    ) -> None:
        self.no_answer_s = no_answer_s
        self._tell = tell
        self._clock = clock
        self._again = again
        self._advice = advice
        self.forget()

    def forget(self) -> None:
        """Begins anew, without a thread: in a fork there is none, and nobody waits there."""
        self._asked: dict[int, _Asked] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, what: Callable[[], str]) -> None:
        """Notes that this thread asks for something, one thing at a time.

        Args:
            what: returns in words what; is called from the other thread.
        """
        self._asked[threading.get_ident()] = _Asked(what, self._clock(), self.no_answer_s)

    def answered(self) -> None:
        """Notes that it has come, or has failed."""
        asked = self._asked.pop(threading.get_ident(), None)
        if asked is not None and asked.told:
            self._tell(f"answered after {self._clock() - asked.since:.0f} s: {asked.what()}")

    def look(self) -> None:
        """Tells of what takes too long."""
        now = self._clock()
        for asked in list(self._asked.values()):
            if now - asked.since < asked.due_s:
                continue
            asked.told = True
            self._tell(f"no answer for {asked.due_s:.0f} s: {asked.what()}{self._advice}")
            asked.due_s = 2 * asked.due_s if self._again else math.inf

    def start(self) -> None:
        """Begins to look now and then, if it does not already."""
        if self._thread is None:
            # A daemon: what it tells of may keep the process from ending, this must not.
            self._thread = threading.Thread(target=self._run, name="lazyshard-watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends that. May be called twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        over = self._over
        while not over.wait(self.no_answer_s / 10):
            self.look()


READERS: Final = Watchdog(_log.warning, again=True, advice="; the filesystem hangs, or its server is away")
"""That of all readers of this process."""

os.register_at_fork(after_in_child=READERS.forget)
