"""Looks at something that all viewers of a page share: one at a time, in a thread of its own, while somebody asks.

Whoever asks is answered at once, with what the last look has found: a share that hangs holds up the thread that looks,
and no viewer. How long it has given no answer is part of what they are told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from lazyshard.errors import LazyShardError, StreamMissing

IDLE_S: Final = 60.0
"""So long after somebody has asked last, looking goes on: a page that is open asks every few seconds, Prometheus every
15 or 60 s, and a page that nobody sees any more shall cost no requests to an object store."""

SILENT_S: Final = 5.0
"""A look takes milliseconds, on a busy share a second: who has heard nothing for longer is told so."""

_PATIENCE_S: Final = 1.0
"""So long who asks waits for a look where there is none yet, or only an old one."""

_LOAD: Final = 0.1
"""The share of the time in which it looks, at the most: where the chunks have to be listed, that may take a second."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts(Generic[T]):
    """What is known of what is looked at.

    Attributes:
        last: what the last look has found that has succeeded, None before the first one.
        error: why the last look has failed, in words; None where it has not, and before the first one.
        answered_at: when the last look was over, failed or not, in seconds since 1970; None before.
        silent_since: when the look began that has had no answer for `SILENT_S` and more, in seconds since 1970; None
            where none has to wait for so long.
        missing: the last look has found no stream, so `error` says: none has been begun yet, or it is gone.
    """

    last: T | None
    error: str | None
    answered_at: float | None
    silent_since: float | None
    missing: bool = False

    @property
    def current(self) -> T | None:
        """What was found, None where it is not of now: the last look has failed, or has no answer."""
        return self.last if self.error is None and self.silent_since is None else None


class SharedLooks(Generic[T]):
    """Looks every so often, from `start` to `close`.

    Args:
        look: looks once.
        interval: seconds between two looks.
        clock: returns seconds since 1970.
    """

    def __init__(
        self,
        look: Callable[[], T],
        interval: float,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval = interval
        self._look = look
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False
        self._asked_at = float("-inf")
        # Of the look that is under way: when it began, by the clock and by the monotonic one.
        self._began: tuple[float, float] | None = None
        self._ended_at = float("-inf")
        self._took = 0.0
        self._last: T | None = None
        self._error: str | None = None
        self._missing = False
        self._answered_at: float | None = None
        # A daemon: a look that hangs must not keep the command from ending.
        self._thread = threading.Thread(target=self._run, name="lazyshard-watch", daemon=True)

    def start(self) -> None:
        """Begins to look as soon as somebody asks."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more. Does not wait for a look that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def facts(self, patience: float | None = None) -> Facts[T]:
        """Returns what is known; waits for a moment only where there is nothing yet, or only something old.

        Args:
            patience: seconds of that moment, 0 to wait in no case; None for a second.
        """
        patience = _PATIENCE_S if patience is None else patience
        with self._changed:
            now = time.monotonic()
            self._asked_at = now
            self._changed.notify_all()
            if patience and now - self._ended_at > self.interval + _PATIENCE_S and not self._silent(now):
                before = self._ended_at
                self._changed.wait_for(lambda: self._ended_at > before or self._closed, patience)
            silent = self._began is not None and self._silent(time.monotonic())
            return Facts(
                self._last,
                self._error,
                self._answered_at,
                self._began[0] if silent and self._began is not None else None,
                self._missing,
            )

    def _silent(self, now: float) -> bool:
        return self._began is not None and now - self._began[1] >= SILENT_S

    def _run(self) -> None:
        while self._wait_until_asked():
            found, error, missing = None, None, False
            try:
                found = self._look()
            except (LazyShardError, OSError) as failure:
                error, missing = str(failure), isinstance(failure, StreamMissing)
            except Exception as failure:
                # Else the thread would end, and the page would say for ever that the share gives no answer.
                error = f"unexpected {type(failure).__name__}: {failure}; this should not happen, report it"
            self._tell(found, error, missing)

    def _wait_until_asked(self) -> bool:
        """Waits for the pause, and for somebody who asks; then notes that a look begins. Returns False once closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                seconds = seconds_to_next(now, self._asked_at, self._ended_at + self._pause)
                if seconds == 0.0:
                    self._began = self._clock(), now
                    return True
                self._changed.wait(seconds)
        return False

    @property
    def _pause(self) -> float:
        return max(self.interval, self._took / _LOAD)

    def _tell(self, found: T | None, error: str | None, missing: bool = False) -> None:
        with self._changed:
            assert self._began is not None
            self._ended_at = time.monotonic()
            self._took = self._ended_at - self._began[1]
            self._began = None
            self._answered_at, self._error, self._missing = self._clock(), error, missing
            if found is not None:
                self._last = found
            self._changed.notify_all()


def seconds_to_next(now: float, asked_at: float, due: float) -> float | None:
    """Returns in how many seconds the next look is to be made; None: not before somebody asks.

    Args:
        now: seconds of some clock.
        asked_at: when somebody has asked last.
        due: when the pause since the last look is over.
    """
    return None if now - asked_at > IDLE_S else max(0.0, due - now)
