"""A wake-up call from the local filesystem, by watchdog.

A shortcut only: inotify never fires for another machine's writes, and a machine can run out of watches. Whoever waits
polls all the same, and is merely woken earlier here.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from lazyshard.format.names import END, HEAD, SEAL_SUFFIX


class _StoppedEmitter(logging.Filter):
    """Drops what watchdog reports as an error whenever an observer is stopped: its thread finds itself stopped."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether to keep a record."""
        return "thread is inactive" not in record.getMessage()


logging.getLogger("watchdog.observers.inotify").addFilter(_StoppedEmitter())


class Waker(FileSystemEventHandler):
    """Wakes a sleeper when the head, the end or a marker of a stream is written.

    Starts watching at the first sleep that finds the directory there. A context manager: leaving it ends the watching
    thread.
    """

    _refused: ClassVar[bool] = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._woken = threading.Event()
        self._observer: BaseObserver | None = None
        self._tried = False

    def sleep(self, seconds: float) -> None:
        """Sleeps for so many seconds, or until something that matters is written.

        Returns at once where it has only just begun to watch: what was written before that woke nobody, so the caller
        has to look once more.
        """
        if not self._tried and self._start():
            return
        if self._woken.wait(seconds):
            self._woken.clear()

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Called by watchdog's thread."""
        for path in (event.src_path, event.dest_path):
            name = str(path).rpartition("/")[2]
            if event.event_type not in ("opened", "closed_no_write") and (
                name in (HEAD, END) or name.endswith(SEAL_SUFFIX)
            ):
                self._woken.set()

    def _start(self) -> bool:
        """Begins to watch; returns whether it does."""
        if not self._directory.is_dir():
            return False
        self._tried = True
        # No inotify instance left, or another platform's observer failing: polling alone will do. It is not tried
        # again, since watchdog up to 6 loses three descriptors each time.
        if Waker._refused:
            return False
        try:
            self._observer = Observer()
            self._observer.daemon = True
            self._observer.schedule(self, str(self._directory), recursive=False)
            self._observer.start()
        except (OSError, RuntimeError):
            Waker._refused = True
        return not Waker._refused

    def __enter__(self) -> Waker:
        """Returns the waker."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the watching thread."""
        if self._observer is not None:
            # One that failed to start has to be stopped too: it holds descriptors, and a thread in watchdog 7.
            self._observer.stop()
            if self._observer.is_alive():
                self._observer.join()
