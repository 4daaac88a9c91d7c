"""Signals: each sets a mark that is looked at between rows, so a publish that has begun is finished.

    SIGINT, SIGTERM   stop, to be resumed; a second one of its kind ends the process at once
    SIGUSR1           end: live sources give what is there by now, then the stream ends
    SIGHUP            reload the configuration file; stays ignored where it was ignored before, as under nohup

Imports nothing slow: it is in force before the rest.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class GivenUp(Exception):
    """What was under way is broken off by whoever wanted it: a signal asks to stop."""


class Stop:
    """A context manager in which signals are noted, for the main thread: the first of SIGINT and SIGTERM; SIGUSR1."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.end_requested = self.reload_ignored = self.reload_requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        """Begins to note signals."""
        self.reload_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number is not signal.SIGHUP or not self.reload_ignored:
                self._before[number] = signal.signal(number, self._note)
        return self

    def release(self, *_: object) -> None:
        """Puts back what was in force before; for what may be broken off anywhere. May be called twice."""
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    __exit__ = release

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.end_requested = True
        elif number == signal.SIGHUP:
            self.reload_requested = True
        else:
            if self.requested is None:
                self.requested = signal.Signals(number)
            signal.signal(number, signal.SIG_DFL)
