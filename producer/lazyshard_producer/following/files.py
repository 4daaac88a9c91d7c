"""The files of a followed directory: which there are, which are complete, and whose turn it is.

Complete files are read one after another as they were found, those found together by name. Files that grow take turns,
of 1 MiB at the most, with each other and with the complete one. A file is complete, by `finished_by`: when it has its
name (rename), its marker (marker), or has not grown for `idle_s` seconds of this process (idle). Until then whole lines
of plain files are taken; compressed files are left alone.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.following.journal import FollowState
from lazyshard_producer.following.listing import DirectoryListing, Look, NameRules, is_packed
from lazyshard_producer.following.reading import Completion, FollowedLines, PackedFile, PlainFile, refuse_growth
from lazyshard_producer.position import FilePosition, plain_name
from lazyshard_producer.sources.source import Rows, refuse_source

SETTLE_S: Final = 1.0
"""A file that is complete by its name, without a last newline, is watched for so long: it may still be written."""

_LOOKS: Final = 100
"""So many unfinished files, whose size a network share may know late, and finished ones are looked at each time."""

_log = logging.getLogger("lazyshard")


@dataclass(slots=True)
class _Entry:
    """A file that is not read to its end: its size at the last look, and when (monotonic) that was found first.

    `file` reads it; None for a compressed file that is not complete.
    """

    file: PlainFile | PackedFile | None
    size: int
    still_since: float
    in_turn: bool = False


class FollowedFiles:
    """Knows the files and reads them. Tells `record` each piece that is read, in order, and `record_end` each end."""

    def __init__(
        self,
        settings: SourceSettings,
        max_row_bytes: int,
        state: FollowState,
        record: Callable[[str, FollowedLines], Rows],
        record_end: Callable[[str, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._path = settings.path
        self._by = settings.finished_by
        self._idle_s = settings.idle_s
        self._max_row_bytes = max_row_bytes
        self._record = record
        self._record_end = record_end
        self._clock = clock
        self._rules = NameRules(settings.pattern, settings.marker, settings.end_marker)
        self._listing = DirectoryListing(settings.path, self._rules, state.finished.copy())
        self._entries: dict[str, _Entry] = {}
        self._turns: deque[str] = deque()
        self._backlog: deque[str] = deque()
        self._current: str | None = None
        self._ending: Completion | None = None
        self._unfinished_round: Iterator[str] = iter(())
        for name, file_state in state.files.items():
            file = self._open(name, file_state)
            if isinstance(file, PlainFile):
                try:
                    file.check()
                except SourceRefused as error:
                    self._gone(name, file, error)

    @property
    def unfinished(self) -> int:
        """Files that are there, or begun, and not read to their end."""
        return len(self._entries) + len(self._backlog)

    @property
    def has_turns(self) -> bool:
        """Whether there is a file that may have something to read."""
        return bool(self._turns or self._backlog)

    def step(self) -> Rows | None:
        """Returns the next rows of the file whose turn it is; None if it has no lines now."""
        if self._current is None and self._backlog:
            name = self._current = self._backlog.popleft()
            self._entries[name] = _Entry(self._new_file(name, FilePosition(), complete=True), 0, self._clock())
            self._take_turn(name)
        name = self._turns.popleft()
        entry = self._entries[name]
        entry.in_turn = False
        file = entry.file
        assert file is not None
        try:
            piece = file.read()
        except SourceRefused as error:
            self._gone(name, file, error)
            return None
        rows = self._rows(name, piece)
        if file.finished:
            self._finish(name, file)
        elif not file.at_end:
            self._take_turn(name)
        elif name == self._current:
            self._current = None
        if isinstance(file, PlainFile) and file.seen > entry.size:
            entry.size, entry.still_since = file.seen, self._clock()
        return rows

    def read(self, name: str, until: FilePosition) -> tuple[Rows | None, bool]:
        """Returns the next rows of a file on the way to where an earlier run came, None if it is there.

        And whether it is not what that run has read: it was changed behind what is published of it.
        """
        file = self._begun(name)
        if file.state.offset >= until.offset:
            return None, file.diverged
        try:
            return self._rows(name, file.read(until)) or Rows(), file.diverged
        except SourceRefused as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            expected = f"the file of which {until.offset} bytes were read, and not all is published"
            path = os.path.join(self._path, name)
            raise refuse_source(path, expected, "none", "; put it back, or choose another --out") from error

    def finish(self, name: str, size: int) -> None:
        """Takes over from an earlier run that a file was read to its end, being of this size in bytes."""
        self._finish(name, self._begun(name), size)

    def begin(self) -> None:
        """Gives all files a turn that are begun: what an earlier run read is read again."""
        for name in self._entries:
            self._take_turn(name)

    def look(self) -> tuple[bool, bool]:
        """Looks at the directory; returns whether anything has changed, and whether the end marker is there."""
        now = self._clock()
        look = self._listing.look(self._entries)
        changed = bool(look.new or look.grown)
        for name, size in look.new.items():
            self._add(name, size, look, now)
        for name, size in look.grown.items():
            self._grown(name, size)
        for name, size in look.sizes.items():
            entry = self._entries[name]
            if size != entry.size:
                changed = True
                entry.size, entry.still_since = size, now
                self._take_turn(name)
        there = look.sizes.keys() | look.new.keys()
        for name in [name for name, entry in self._entries.items() if entry.file is None and name not in there]:
            del self._entries[name]
        self._complete(look, now)
        # Some unfinished files are read without regard to their size, and some finished ones may have grown.
        names = list(islice(self._unfinished_round, _LOOKS))
        if len(names) < _LOOKS:
            self._unfinished_round = iter(list(self._entries))
            names += islice(self._unfinished_round, _LOOKS - len(names))
        for name in names:
            if name in self._entries:
                self._take_turn(name)
        for name, size in self._listing.look_again(_LOOKS):
            if name not in self._entries:
                self._grown(name, size)
        return changed, look.ended

    def complete_all(self, asked: bool) -> None:
        """Takes all files for complete: because the directory has its end marker, or because the run is to end."""
        self._ending = Completion.ASKED if asked else Completion.FINAL
        for name, entry in list(self._entries.items()):
            if entry.file is not None or not asked:
                self._start(name, entry, self._ending)
            else:
                del self._entries[name]
                _log.warning("%s is left out: it is not complete", os.path.join(self._path, name))

    def close(self) -> None:
        """Lets go of what is open. May be called twice."""
        for entry in self._entries.values():
            if entry.file is not None:
                entry.file.close()

    def _rows(self, name: str, piece: FollowedLines | None) -> Rows | None:
        """Returns the rows of a piece, which is recorded, unless it holds no line."""
        return None if piece is None or piece.end == piece.begin else self._record(name, piece)

    def _add(self, name: str, size: int, look: Look, now: float) -> None:
        entry = self._entries[name] = _Entry(None, size, now)
        if self._by == "rename" or self._is_marked(name, look):
            self._start(name, entry)
        elif not is_packed(name):
            entry.file = self._new_file(name, FilePosition())
            self._take_turn(name)

    def _complete(self, look: Look, now: float) -> None:
        still_s = {"rename": SETTLE_S, "idle": self._idle_s}.get(self._by, 0.0)
        for name, entry in list(self._entries.items()):
            done = self._is_marked(name, look) if self._by == "marker" else now - entry.still_since >= still_s
            if done and not entry.in_turn:
                self._start(name, entry, Completion.IDLE if self._by == "idle" else Completion.FINAL)

    def _is_marked(self, name: str, look: Look) -> bool:
        return self._by == "marker" and (name in look.marked or "" in look.marked)

    def _start(self, name: str, entry: _Entry, completion: Completion | None = None) -> None:
        """Has a complete file read to its end: now if it is begun, else after those before it."""
        if isinstance(entry.file, PlainFile):
            entry.file.completion = completion
        if entry.file is not None:
            self._take_turn(name)
        else:
            del self._entries[name]
            self._listing.settled.add(name)
            self._backlog.append(name)

    def _grown(self, name: str, size: int) -> None:
        """Takes up a file again that was finished and has grown since, or refuses it."""
        if self._by != "idle" or is_packed(name):
            known = self._listing.finished.get(name)
            raise refuse_growth(os.path.join(self._path, name), known.offset if known else 0, size)
        self._listing.settled.discard(name)
        self._begun(name)
        self._take_turn(name)

    def _gone(self, name: str, file: PlainFile | PackedFile, error: SourceRefused) -> None:
        """Deals with a file that is not there although it is not read to its end; raises any other error."""
        if not isinstance(error.__cause__, FileNotFoundError):
            raise error
        path, offset = os.path.join(self._path, name), file.state.offset
        if offset == 0:
            _log.warning("%s was deleted before anything of it was read", path)
            self._forget(name)
            return
        all_taken = isinstance(file, PlainFile) and file.seen <= offset and self._by != "rename"
        marker = self._rules.marker_of(name)
        if not all_taken and not os.path.lexists(os.path.join(self._path, marker)):
            actual = "none of this name: it was deleted or renamed before its end was met"
            hint = f"; put it back, or, to go on without the rest of it, make a file {marker}"
            raise refuse_source(path, f"the file that was read up to byte {offset}", actual, hint) from error
        _log.warning("%s was deleted; what was there of it is taken, up to byte %d", path, offset)
        self._finish(name, file)

    def _finish(self, name: str, file: PlainFile | PackedFile, size: int | None = None) -> None:
        if isinstance(file, PlainFile) and file.seen > file.state.offset:
            _log.warning("%s: its last line is incomplete and left out", os.path.join(self._path, name))
        state = file.state
        if size is None:
            size = file.size if isinstance(file, PackedFile) else state.offset
        self._forget(name)
        self._listing.finish(name, state, size)
        self._record_end(name, size)

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._listing.settled.discard(name)
        if entry.file is not None:
            entry.file.close()
        if name == self._current:
            self._current = None

    def _take_turn(self, name: str) -> None:
        entry = self._entries[name]
        if not entry.in_turn and entry.file is not None:
            entry.in_turn = True
            self._turns.append(name)

    def _begun(self, name: str) -> PlainFile | PackedFile:
        """Returns the file of this name, opened at its start if it is not begun, and at its end if it was finished."""
        entry = self._entries.get(name)
        if entry is not None and entry.file is not None:
            return entry.file
        known = self._listing.finished.get(name)
        return self._open(name, known or FilePosition())

    def _open(self, name: str, state: FilePosition) -> PlainFile | PackedFile:
        file = self._new_file(name, state)
        self._entries[name] = _Entry(file, state.seen, self._clock())
        return file

    def _new_file(self, name: str, state: FilePosition, complete: bool = False) -> PlainFile | PackedFile:
        path = os.path.join(self._path, name)
        shown = plain_name(path)
        if is_packed(name):
            return PackedFile(path, shown, self._max_row_bytes, state)
        file = PlainFile(path, shown, self._max_row_bytes, state)
        if self._ending is not None:
            file.completion = self._ending
        elif self._by == "rename":
            file.completion = Completion.SETTLING
        elif complete:
            file.completion = Completion.FINAL
        return file
