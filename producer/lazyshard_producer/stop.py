"""Signals. Each handler sets a flag that is checked between rows, so a publish that has begun is finished.

    SIGINT, SIGTERM   stop; the run can be resumed; a second signal of the same kind ends the process at once
    SIGUSR1           end: live sources deliver the rows that exist now, then the stream ends
    SIGHUP            reload the configuration file; stays ignored if it was ignored before, as under nohup

This module imports nothing slow, because the handlers are installed before the rest is loaded.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any


class GivenUp(Exception):
    """The current operation is abandoned because a signal requested a stop."""


class Stop:
    """A context manager that records signals: the first of SIGINT and SIGTERM, SIGUSR1, SIGHUP. Main thread only."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.end_requested = self.reload_ignored = self.reload_requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        """Installs the handlers."""
        self.reload_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number is not signal.SIGHUP or not self.reload_ignored:
                self._before[number] = signal.signal(number, self._note)
        return self

    def release(self, *_: object) -> None:
        """Restores the previous handlers, for work that may be interrupted anywhere. May be called twice."""
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    __exit__ = release

    def sleep(self, seconds: float) -> bool:
        """Sleeps, at most until the run is to stop; returns whether it is."""
        due = time.monotonic() + seconds
        while self.requested is None and (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        return self.requested is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.end_requested = True
        elif number == signal.SIGHUP:
            self.reload_requested = True
        else:
            if self.requested is None:
                self.requested = signal.Signals(number)
            signal.signal(number, signal.SIG_DFL)
