"""JSON lines in the files of a directory that other programs write into, now and later.

See `listing` for which files are taken, `files` for when they are complete and in which order they are read, `ledger`
for what a restart goes on from.

A name is taken once: what has been read of a file must stay as it is until that file was read to its end; after that it
may be deleted, and a new file of the same name is not read.

On local filesystems watchdog (inotify) tells of files that appear, are renamed or closed. It never tells of another
machine's writes, and of those of a program that keeps its file open only the last; so the directory is looked at all
the same, ever more seldom while nothing changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from watchdog.events import FileClosedEvent, FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.following.files import FollowedFiles
from lazyshard_producer.following.journal import DIRECTORY, decode_name, finished_size, list_journals
from lazyshard_producer.following.ledger import FollowPosition, Ledger, resume
from lazyshard_producer.position import FilePosition, plain_name, refuse_position
from lazyshard_producer.sources.source import Context, Rows, Source
from lazyshard_producer.wording import count

FIRST_PAUSE_S: Final = 0.2
LAST_PAUSE_S: Final = 2.0
"""Bounds of the pause between two looks while nothing happens: the upper one is the longest that a line of a file that
is kept open can lie unseen."""

_COST_SHARE: Final = 10.0
"""A look is followed by a pause of ten times its duration: one at a directory of 100,000 files takes 0.1 s and more."""


class DirectoryWatch:
    """Says when to look at a directory."""

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


_STEPS: Final = 64
"""So many files are looked into for a row at a time: signals are looked at in between."""

_log = logging.getLogger("lazyshard")


class FollowedDirectory(Source):
    """A directory as a source of rows.

    Memory: some MiB, 64 bytes for each file that was read to its end, about 1 KiB for each that was not.

    Args:
        settings: its path, and how it is followed.
        position: where to start; None for its start.
        context: the run; journals are kept in the stream's directory.

    Raises:
        SourceRefused: the directory cannot be read, or a file that is not read to its end is not what it was.
    """

    live = True

    def __init__(
        self,
        settings: SourceSettings,
        position: dict[str, Any] | None,
        context: Context,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = plain_name(settings.path)
        self.start = FollowPosition(0)
        self._path = settings.path
        self._end_marker = settings.end_marker
        journals = context.out / DIRECTORY
        known = resume(position, journals, self.name)
        stale = [path for path in list_journals(journals, self.name) if path != known.journal]
        self._plan = deque(known.plan)
        self._ledger = Ledger(
            journals,
            self.name,
            known.state,
            known.totals,
            position,
            replaced=known.journal,
            stale=stale,
            check_owner=context.check_owner,
        )
        self._files = FollowedFiles(settings, context.max_row_bytes, known.state, self._ledger, clock)
        self._watch = DirectoryWatch(settings.path, clock)
        self._asked = False
        self._marker_seen = False
        self._last = False
        if not self._plan:
            self._files.begin()

    @property
    def reached(self) -> FollowPosition:
        """Where it stands after all that was given."""
        return self._ledger.reached

    @property
    def blank(self) -> int:
        """Blank lines skipped so far."""
        return self._ledger.totals.blank

    @property
    def progress(self) -> tuple[int, int | None]:
        """(bytes of text read, None): nobody knows how much will come."""
        return self._ledger.totals.size, None

    def read(self) -> Rows | None:
        """Returns the next rows, none where there are none now; None where the directory has ended.

        Raises:
            SourceRefused: a file is not what it was, or cannot be read.
        """
        for _ in range(_STEPS):
            if self._plan:
                found = self._replay()
            else:
                self._look()
                if not self._files.has_turns:
                    return None if self._last else Rows()
                found = self._files.step()
            if found is not None:
                self._watch.active()
                if found.lines:
                    return found
        return Rows()

    def wait(self, seconds: float) -> None:
        """Returns when something has happened in the directory, when it is time to look, or after so many seconds."""
        if not self._plan and not self._files.has_turns and not self._last:
            self._watch.wait(seconds)

    def waits_for(self) -> str:
        """Returns in words what it waits for."""
        unfinished = count(self._files.unfinished, "file")
        return f"new lines in {self.name} ({unfinished} unfinished), or {self._end_marker} there"

    def entry(self, position: FollowPosition) -> dict[str, Any]:
        """Returns the entry of a position; all that was read so far is in the journal then.

        Raises:
            OSError: the journal cannot be written.
        """
        return self._ledger.entry(position)

    def end(self) -> None:
        """Asks it to finish: what is there by now is given; of files that are not complete the complete lines."""
        self._asked = True

    def close(self) -> None:
        """Lets go of what is open. May be called twice."""
        self._watch.close()
        self._files.close()
        self._ledger.close()

    def _look(self) -> None:
        """Looks at the directory if it is time, and finds out whether all is there that will come."""
        if self._last or not (self._asked or self._marker_seen or self._watch.due()):
            return
        # What was there before the marker is seen by a look that begins after it.
        last = self._asked or self._marker_seen
        self._watch.look()
        changed, self._marker_seen = self._files.look()
        self._watch.looked(changed)
        if last and (self._asked or self._marker_seen):
            self._last = True
            self._files.complete_all(asked=self._asked and not self._marker_seen)

    def _replay(self) -> Rows | None:
        """Returns what an earlier run read next."""
        line = self._plan[0]
        try:
            name = decode_name(line.get("file"))
            size, until = finished_size(line), FilePosition.of(line)
        except ValueError as cause:
            raise refuse_position(self.name, "a line of a journal", str(cause)[:120]) from cause
        rows = None
        if size is not None:
            self._files.finish(name, size)
        else:
            rows = self._files.read(name, until)
            if self._files.has_diverged(name):
                # Somebody has mended a line, say. Nothing behind these rows is published, so any order will do.
                path = plain_name(os.path.join(self._path, name))
                _log.warning("%s was changed behind what is published of it; it is taken as it is now", path)
                self._plan.clear()
                self._files.begin()
                return rows
        if rows is None:
            self._plan.popleft()
            if not self._plan:
                self._files.begin()
        return rows
