"""Source of JSON lines from the files of a directory into which other programs write.

Each file name is read once. The part of a file that was read must stay until the file is read to its end; then the file
may be deleted, and a new file of the same name is not read. A journal records the order of rows of several files.

Complete files are read one after another in the order of their discovery, those found together by name. Growing files
take turns of at most 1 MiB. By `finished_by`, a file is complete when it has its name, when it has its marker, or when
it has not grown for `idle_s` seconds. Until then only whole lines of plain files are read, and no compressed files.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused, count
from lazyshard_producer.following.journal import DIRECTORY, FollowPosition, Ledger, decode_line, resume
from lazyshard_producer.following.listing import DirectoryListing, DirectoryScan, DirectoryWatch, NameRules, is_packed
from lazyshard_producer.following.reading import Completion, PackedFile, PlainFile, refuse_growth
from lazyshard_producer.position import FilePosition, plain_name, refuse_position
from lazyshard_producer.sources.lines import LineSplitter
from lazyshard_producer.sources.source import PIECE_BYTES, Context, Rows, Source, open_regular, refuse_source

# Files checked in each scan: unfinished ones, whose size a network share may report late, and as many finished ones
_RECHECKED: Final = 100

_log = logging.getLogger("lazyshard")

Clock: TypeAlias = Callable[[], float]


class FollowedDirectory(Source):
    """A directory as a source of rows. Memory: some MiB, 64 bytes per finished file, 1 KiB per unfinished file."""

    live = True

    def __init__(
        self, settings: SourceSettings, position: dict[str, Any] | None, context: Context, clock: Clock = time.monotonic
    ) -> None:
        self.name = plain_name(settings.path)
        self.start = self.reached = FollowPosition(0)
        self._settings, self._max_row_bytes, self._clock = settings, context.max_row_bytes, clock
        self._ledger = Ledger(self.name, context, position)
        known = self._ledger.state
        self._plan = deque(known.plan)  # lines of the journal: what an earlier run read next
        self._rules = NameRules(settings.pattern, settings.marker, settings.end_marker)
        self._listing = DirectoryListing(settings.path, self._rules, known.finished.copy())
        self._watch = DirectoryWatch(settings.path, clock)
        self._files: dict[str, PlainFile | PackedFile] = {}  # not read to their end
        self._turns: OrderedDict[str, None] = OrderedDict()  # names of files that may have something to read
        self._backlog: deque[str] = deque()  # names of complete files that are not begun
        self._current: str | None = None  # the complete file that is being read
        self._ending: Completion | None = None  # once the last scan is done
        self._next = 0  # index of the next file to be read regardless of its size
        self._end_requested = self._marker_seen = False
        self._reach()
        for name, state in known.files.items():
            file = self._open(name, state)
            if isinstance(file, PlainFile):
                try:
                    file.check()
                except SourceRefused as error:
                    self._handle_missing(name, file, error)
        self._begin()

    def read(self) -> Rows | None:
        """Returns the next rows, empty if there are none now, None if the directory has ended."""
        # Bounded, so that the caller can check signals.
        for _ in range(64):
            if self._plan:
                found = self._replay()
                self._begin()
            else:
                self._scan()
                if not self._turns and not self._backlog:
                    return None if self._ending else Rows()
                found = self._step()
            self._reach()
            if found is not None:
                self._watch.active()
                if found.lines:
                    return found
        return Rows()

    def wait(self, seconds: float) -> None:
        """Waits until something happens in the directory or the next scan is due, at most `seconds`."""
        if not (self._plan or self._turns or self._backlog or self._ending):
            self._watch.wait(seconds)

    def waits_for(self) -> str:
        """Returns in words what the source waits for."""
        unfinished, settings = count(len(self._files) + len(self._backlog), "file"), self._settings
        return f"new lines in {self.name}/{settings.pattern} ({unfinished} unfinished), or its {settings.end_marker}"

    def entry(self, position: FollowPosition) -> dict[str, Any]:
        """Returns the entry of a position; see `Ledger.entry`."""
        return self._ledger.entry(position)

    def end(self) -> None:
        """Requests the end: the existing files are still read; of incomplete files only the complete lines."""
        self._end_requested = True

    def close(self) -> None:
        """Closes all files and the watch. May be called twice."""
        self._watch.close()
        for file in self._files.values():
            file.close()
        self._ledger.close()

    def _reach(self) -> None:
        size, self.blank = self._ledger.totals
        self.reached, self.progress = FollowPosition(self._ledger.serial), (size, None)

    def _path(self, name: str) -> str:
        return os.path.join(self._settings.path, name)

    def _begin(self) -> None:
        """Gives each begun file a turn, once the rows that an earlier run read are read again."""
        for name in () if self._plan else self._files:
            self._take_turn(name)

    def _replay(self) -> Rows | None:
        """Returns the rows that an earlier run read next."""
        try:
            name, until, size = decode_line(self._plan[0])
        except ValueError as cause:
            raise refuse_position(self.name, "a line of a journal", str(cause)[:120]) from cause
        file, rows = self._begun(name), None
        if size is not None:
            self._finish(name, file, size)
        elif file.state.offset < until.offset:
            try:
                rows = self._rows(name, file, until) or Rows()
            except SourceRefused as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                expected = f"the file of which {until.offset} bytes were read and not all rows are published"
                hint = "; restore it, or choose another --out"
                raise refuse_source(self._path(name), expected, "none", hint) from error
        if size is None and file.diverged:
            # For example, a user has fixed a line. No rows after these are published, so any order is right.
            path = plain_name(self._path(name))
            _log.warning("%s was changed after its published part; its present contents are used", path)
            self._plan.clear()
        elif rows is None:
            self._plan.popleft()
        return rows

    def _step(self) -> Rows | None:
        """Returns the next rows of the file whose turn it is, None if it has no lines now."""
        if self._current is None and self._backlog:
            name = self._current = self._backlog.popleft()
            self._open(name, FilePosition(), complete=True)
            self._take_turn(name)
        name, _ = self._turns.popitem(last=False)
        file = self._files[name]
        try:
            rows = self._rows(name, file)
        except SourceRefused as error:
            self._handle_missing(name, file, error)
            return None
        if file.finished:
            self._finish(name, file, file.end)
        elif not file.at_end:
            self._take_turn(name)
        elif name == self._current:
            self._current = None
        if file.seen > file.size:
            file.size, file.unchanged_since = file.seen, self._clock()
        return rows

    def _rows(self, name: str, file: PlainFile | PackedFile, until: FilePosition | None = None) -> Rows | None:
        """Returns the next rows of a file and records them in the ledger; None if there are no more lines."""
        piece = file.read(until)
        return None if piece is None or piece.end == piece.begin else self._ledger.add_piece(name, piece)

    def _scan(self) -> None:
        """Scans the directory if a scan is due, and detects its end."""
        # Only a scan that begins after the end marker appeared sees all files that precede the marker.
        last = self._end_requested or self._marker_seen
        if self._ending or not (last or self._watch.due()):
            return
        self._watch.begin_scan()
        now, scan = self._clock(), self._listing.scan(self._files)
        changed, self._marker_seen = self._take_up(scan, now), scan.ended
        by = self._settings.finished_by
        # A file that is complete by its name but does not end with a newline may still be being written.
        still_s = 1.0 if by == "rename" else self._settings.idle_s
        if last and (self._end_requested or self._marker_seen):
            self._ending = Completion.FINAL if self._marker_seen else Completion.REQUESTED
        for name, file in list(self._files.items()):
            done = self._is_marked(name, scan) if by == "marker" else now - file.unchanged_since >= still_s
            if self._ending or (done and name not in self._turns):
                self._complete(name, file, done)
        # Read some unfinished files regardless of their size, and check whether finished files have grown.
        names = list(islice(self._files, self._next, self._next + _RECHECKED))
        self._next = self._next + _RECHECKED if len(names) == _RECHECKED else 0
        for name in names:
            self._take_turn(name)
        for name, size in self._listing.check_finished(_RECHECKED):
            if name not in self._files:
                self._handle_growth(name, size)
        self._watch.end_scan(changed)

    def _take_up(self, scan: DirectoryScan, now: float) -> bool:
        """Processes the result of a scan; returns whether there is anything new."""
        changed = bool(scan.new or scan.grown)
        for name, size in scan.new.items():
            if self._settings.finished_by == "rename" or self._is_marked(name, scan):
                self._enqueue(name)
            else:
                file = self._open(name, FilePosition())
                file.size, file.begun = size, not is_packed(name)
                self._take_turn(name)
        for name, size in scan.grown.items():
            self._handle_growth(name, size)
        for name, size in scan.sizes.items():
            file = self._files[name]
            if size != file.size:
                changed = True
                file.size, file.unchanged_since = size, now
                self._take_turn(name)
        there = scan.sizes.keys() | scan.new.keys()
        for name in [name for name, file in self._files.items() if not file.begun and name not in there]:
            del self._files[name]
        return changed

    def _is_marked(self, name: str, scan: DirectoryScan) -> bool:
        return self._settings.finished_by == "marker" and (name in scan.marked or "" in scan.marked)

    def _complete(self, name: str, file: PlainFile | PackedFile, done: bool) -> None:
        """Schedules a complete file to be read to its end: now if it is begun, else after the backlog.

        Files that are not `done` are treated as complete if the directory has its end marker or the run is to end.
        """
        idle = self._settings.finished_by == "idle"
        if file.begun:
            file.completion = self._ending or (Completion.IDLE if idle else Completion.FINAL)
            self._take_turn(name)
            return
        del self._files[name]
        if done or self._ending is not Completion.REQUESTED:
            self._enqueue(name)
        else:
            _log.warning("%s is skipped: it is not complete", self._path(name))

    def _enqueue(self, name: str) -> None:
        self._listing.settled.add(name)
        self._backlog.append(name)

    def _handle_growth(self, name: str, size: int) -> None:
        """Reads on in a finished file that has grown, or refuses it."""
        if self._settings.finished_by != "idle" or is_packed(name):
            known = self._listing.finished.get(name)
            raise refuse_growth(self._path(name), known.offset if known else 0, size)
        self._listing.settled.discard(name)
        self._begun(name)
        self._take_turn(name)

    def _handle_missing(self, name: str, file: PlainFile | PackedFile, error: SourceRefused) -> None:
        """Handles a file that is missing before it was read to its end; raises any other error."""
        if not isinstance(error.__cause__, FileNotFoundError):
            raise error
        path, offset = self._path(name), file.state.offset
        if offset == 0:
            _log.warning("%s was deleted before it was read", path)
            self._forget(name)
            return
        all_taken = 0 < file.seen <= offset and self._settings.finished_by != "rename"
        marker = self._rules.marker_of(name)
        if not all_taken and not os.path.lexists(self._path(marker)):
            actual = "no file of this name: it was deleted or renamed before it was read to its end"
            hint = f"; restore it, or, to continue without the rest of it, create a file {marker}"
            raise refuse_source(path, f"the file that was read up to byte {offset}", actual, hint) from error
        _log.warning("%s was deleted; it was read up to byte %d", path, offset)
        self._finish(name, file, file.end)

    def _finish(self, name: str, file: PlainFile | PackedFile, size: int) -> None:
        """Records that a file was read to its end at this size."""
        if file.seen > file.state.offset:
            _log.warning("%s: its last line is incomplete and is skipped", self._path(name))
        self._forget(name)
        self._listing.finish(name, file.state, size)
        self._ledger.add_finished(name, size)

    def _forget(self, name: str) -> None:
        self._files.pop(name).close()
        self._listing.settled.discard(name)
        self._current = None if name == self._current else self._current

    def _take_turn(self, name: str) -> None:
        if self._files[name].begun:
            self._turns.setdefault(name)

    def _begun(self, name: str) -> PlainFile | PackedFile:
        """Returns the file of this name and begins it: at its start, or at its end if it was finished."""
        file = self._files.get(name) or self._open(name, self._listing.finished.get(name) or FilePosition())
        file.begun = True
        return file

    def _open(self, name: str, state: FilePosition, complete: bool = False) -> PlainFile | PackedFile:
        made = PackedFile if is_packed(name) else PlainFile
        file = self._files[name] = made(self._path(name), self._max_row_bytes, state, self._clock())
        by_name = Completion.SETTLING if self._settings.finished_by == "rename" else None
        file.completion = self._ending or by_name or (Completion.FINAL if complete else None)
        return file


def list_unread(settings: SourceSettings, entry: dict[str, Any], context: Context) -> list[tuple[str, int, int]]:
    """Returns the files of a directory that have unread rows: (path, bytes read, present size) of each.

    Blank lines and an incomplete line at the end of a plain file do not count.
    """
    known = resume(entry, context.out / DIRECTORY, plain_name(settings.path))
    known.apply_all(known.plan, plain_name(settings.path))
    begun, finished = known.files, known.finished
    rules = NameRules(settings.pattern, settings.marker, settings.end_marker)
    scan = DirectoryListing(settings.path, rules, finished).scan(begun)
    read = {name: begun[name].offset for name in scan.sizes if not is_packed(name)} | dict.fromkeys(scan.new, 0)
    read |= {name: ended.offset for name in scan.grown if (ended := finished.get(name)) is not None}
    unread = []
    for name, size in sorted(read.items()):
        path, there = os.path.join(settings.path, name), (scan.sizes | scan.new | scan.grown)[name]
        if there > size and (is_packed(name) or _holds_row(path, size, context.max_row_bytes)):
            unread.append((path, size, there))
    return unread


def _holds_row(path: str, offset: int, max_row_bytes: int) -> bool:
    splitter = LineSplitter(path, max_row_bytes, FilePosition(offset))
    with open_regular(path, links_out=False) as file:
        file.seek(offset)
        blocks = iter(partial(file.read, PIECE_BYTES), b"")
        return any(splitter.feed(block).lines for block in blocks) or bool(splitter.finish(only_row=True).lines)
