"""When to look at a followed directory again: soon after something happened in it, and now and then in any case.

On local filesystems watchdog (inotify) tells of files that appear, are renamed or closed. It never tells of another
machine's writes, and of those of a program that keeps its file open only the last; so the directory is looked at all
the same, ever more seldom while nothing changes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from watchdog.events import FileClosedEvent, FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

FIRST_PAUSE_S: Final = 0.2
LAST_PAUSE_S: Final = 2.0
"""Bounds of the pause between two looks while nothing happens: the upper one is the longest that a line of a file that
is kept open can lie unseen."""

_COST_SHARE: Final = 10.0
"""A look is followed by a pause of ten times its duration: one at a directory of 100,000 files takes 0.1 s and more."""


class DirectoryWatch:
    """Says when to look at a directory.

    Args:
        directory: its path.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._woken = threading.Event()
        self._pause = FIRST_PAUSE_S
        self._began = self._earliest = self._latest = clock()
        self._observer: BaseObserver | None = None
        self._tried = False

    def due(self) -> bool:
        """Returns whether it is time to look."""
        now = self._clock()
        return now >= self._latest or (self._woken.is_set() and now >= self._earliest)

    def look(self) -> None:
        """Takes notice that a look begins: what happens from now on is reason for another one."""
        self._woken.clear()
        self._began = self._clock()

    def looked(self, changed: bool) -> None:
        """Takes notice that a look is over, and whether it found anything new."""
        now = self._clock()
        self._pause = FIRST_PAUSE_S if changed else min(LAST_PAUSE_S, 1.5 * self._pause)
        rest = _COST_SHARE * (now - self._began)
        self._earliest = now + rest
        self._latest = now + max(rest, self._pause)

    def active(self) -> None:
        """Takes notice that lines came: more of them are likely."""
        self._pause = FIRST_PAUSE_S
        self._latest = min(self._latest, max(self._earliest, self._clock() + FIRST_PAUSE_S))

    def wait(self, seconds: float) -> None:
        """Waits until it is time to look, or so many seconds have passed."""
        self._start()
        until = min(self._clock() + seconds, self._latest)
        if self._woken.wait(max(0.0, until - self._clock())):
            # Something happened, but perhaps too soon after the last look.
            time.sleep(max(0.0, min(until, self._earliest) - self._clock()))

    def close(self) -> None:
        """Ends the watching thread. May be called twice."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            if observer.is_alive():
                observer.join()

    def _start(self) -> None:
        if self._tried:
            return
        self._tried = True
        events: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent, FileClosedEvent]
        # No inotify instance left, for example: looking now and then will do.
        with contextlib.suppress(OSError, RuntimeError):
            self._observer = Observer()
            self._observer.daemon = True
            self._observer.schedule(_Wake(self._woken), self._directory, event_filter=events)
            self._observer.start()


class _Wake(FileSystemEventHandler):
    """Called by watchdog's thread."""

    def __init__(self, woken: threading.Event) -> None:
        self._woken = woken

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._woken.set()
