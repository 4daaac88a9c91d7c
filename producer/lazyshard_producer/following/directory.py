"""JSON lines in the files of a directory that other programs write into, now and later, as a source.

A name is taken once: what has been read of a file must stay as it is until that file was read to its end; after that it
may be deleted, and a new file of the same name is not read. The order in which rows of several files follow each other
is decided while they are written. So it is put into a journal, up to the last row that was read, before any position is
told: a seal names a place in the journal, and the rows behind that place come in the same order again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.store.durable import remove
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.following.files import FollowedFiles
from lazyshard_producer.following.journal import (
    DIRECTORY,
    KIND,
    Journal,
    JournalPosition,
    Resumed,
    Totals,
    apply,
    decode_line,
    finished_line,
    list_journals,
    resume,
    segment_line,
)
from lazyshard_producer.following.listing import DirectoryListing, DirectoryWatch, NameRules, is_packed
from lazyshard_producer.following.reading import FollowedLines
from lazyshard_producer.position import FilePosition, plain_name, refuse_position
from lazyshard_producer.sources.decompression import BLOCK_BYTES
from lazyshard_producer.sources.lines import LineSplitter
from lazyshard_producer.sources.source import Context, Rows, Source, open_regular
from lazyshard_producer.wording import count

_LONG_BYTES: Final = 4 << 20
"""A journal is begun anew at twice the size of what is known at its start, but not below this."""

_KEPT_ENTRIES: Final = 16
"""A journal that was replaced is deleted after so many further entries: by then a seal names the new one."""

_STEPS: Final = 64  # so many files are looked into for a row at a time: signals are looked at in between
_log = logging.getLogger("lazyshard")


class FollowPosition(NamedTuple):
    """A place between two rows: in the piece of this number, behind this row of it, or after it (None)."""

    serial: int
    piece: FollowedLines | None = None
    row: int = -1


@dataclass(slots=True)
class _Read:
    """What was read in one go of a file, and the sums behind it; or that its end was met, at the size `finished`.

    `position`: of the last piece of a line of the journal: that behind the line.
    """

    serial: int
    name: str
    begin: int
    end: FilePosition
    totals: Totals
    rows: bool = False
    finished: int | None = None
    position: JournalPosition | None = None

    def before(self, position: FollowPosition) -> bool:
        return not self.rows or self.serial < position.serial + (position.piece is None)


class _Ledger:
    """Turns what is read into positions. `serial` is the number of the last piece, `totals` the sums behind it."""

    def __init__(
        self, name: str, directory: Path, known: Resumed, entry: dict[str, Any] | None, context: Context
    ) -> None:
        self.serial, self.totals = 0, known.totals
        self._name = name
        self._directory = directory
        self._entry = entry
        self._check_owner = context.check_owner
        self._begun = False  # something was read in this run
        self._new: list[_Read] = []  # read since the last position
        self._pieces: deque[_Read] = deque()  # in the journal, and behind the last position
        self._committed, self._committed_totals = known.state, known.totals  # before them
        self._at = JournalPosition()
        self._within: tuple[str, FilePosition] | None = None  # how far that file is read behind `_at`
        self._journal: Journal | None = None
        self._begun_bytes = 0
        self._entries = 0
        # Journals, and the number of the entry at which each was replaced.
        stale = [path for path in list_journals(directory, name) if path != known.journal]
        self._replaced = deque([(path, -_KEPT_ENTRIES) for path in stale])
        if known.journal is not None:
            self._replaced.append((known.journal, 0))

    def add_piece(self, name: str, piece: FollowedLines) -> Rows:
        self.serial += 1
        serial, (begin, end) = self.serial, piece[1:]
        size, blank = self.totals
        self.totals = Totals(size + end.offset - begin.offset, blank + end.blank - begin.blank)
        last = len(piece.rows.lines) - 1
        self._add(_Read(serial, name, begin.offset, end, self.totals, rows=last >= 0))

        def position(index: int) -> FollowPosition:
            return FollowPosition(serial) if index == last else FollowPosition(serial, piece, index)

        return piece.rows._replace(position=position)

    def add_finished(self, name: str, size: int) -> None:
        self._add(_Read(self.serial, name, 0, FilePosition(), self.totals, finished=size))

    def _add(self, piece: _Read) -> None:
        self._begun = True
        self._new.append(piece)

    def entry(self, position: FollowPosition) -> dict[str, Any]:
        """Returns the entry of a position, with all that was read so far durable in the journal."""
        self._entries += 1
        new, self._new = self._new, []
        if self._journal is not None:
            self._append(new)
        self._pieces.extend(new)
        while self._pieces and self._pieces[0].before(position):
            piece = self._pieces.popleft()
            self._committed_totals = piece.totals
            if piece.finished is not None:
                self._committed.finish(piece.name, piece.finished)
            else:
                self._committed.files[piece.name] = piece.end
            self._within = (piece.name, piece.end)
            if piece.position is not None:
                self._at, self._within = piece.position, None
        if self._journal is None and not self._begun:
            return self._encode(None, self._committed_totals) if self._entry is None else self._entry
        if self._journal is None or self._journal.size > max(_LONG_BYTES, 2 * self._begun_bytes):
            self._begin()
        while self._replaced and self._entries - self._replaced[0][1] > _KEPT_ENTRIES:
            # Those that no seal can name any more. They were listed, or made, before: whoever takes the stream over
            # from here on has none among them.
            self._check_owner()
            remove(self._replaced.popleft()[0])
        at, totals = self._within, self._committed_totals
        if position.piece is not None and self._pieces and self._pieces[0].serial == position.serial:
            begin, end = position.piece.begin, position.piece.rows.position(position.row)
            at = self._pieces[0].name, end
            totals = Totals(totals.size + end.offset - begin.offset, totals.blank + end.blank - begin.blank)
        return self._encode(at, totals)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _append(self, pieces: Iterable[_Read]) -> None:
        """Writes pieces to the journal: those of one file that follow each other as one line."""
        assert self._journal is not None
        lines, last = [], []
        for _, group in groupby(pieces, key=lambda piece: piece.name if piece.finished is None else id(piece)):
            first, *rest = group
            last.append(rest[-1] if rest else first)
            if first.finished is None:
                lines.append(segment_line(first.name, first.begin, last[-1].end))
            else:
                lines.append(finished_line(first.name, first.finished))
        for piece, at in zip(last, self._journal.append(lines), strict=True):
            piece.position = at

    def _begin(self) -> None:
        """Begins a new journal with all that is known before the pieces behind the position, and these."""
        journal = Journal(self._directory, self._name)
        with contextlib.ExitStack() as stack:
            stack.callback(journal.close)
            at = journal.append(self._committed.lines())[-1]
            stack.pop_all()
        if self._journal is not None:
            self._journal.close()
            self._replaced.append((self._journal.path, self._entries))
        self._journal, self._at, self._within, self._begun_bytes = journal, at, None, at.size
        for piece in self._pieces:
            piece.position = None
        self._append(self._pieces)

    def _encode(self, at: tuple[str, FilePosition] | None, totals: Totals) -> dict[str, Any]:
        value = {
            "kind": KIND,
            "path": self._name,
            "journal": "" if self._journal is None else self._journal.path.name,
            "bytes": self._at.size,
            "digest": self._at.digest,
            "read": totals.size,
            "blank": totals.blank,
        }
        return value if at is None else value | {"at": segment_line(at[0], at[1].offset, at[1])}


class FollowedDirectory(Source):
    """A directory as a source of rows.

    Memory: some MiB, 64 bytes for each file that was read to its end, about 1 KiB for each that was not.
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
        self.start = self.reached = FollowPosition(0)
        self._path = settings.path
        self._end_marker = settings.end_marker
        journals = context.out / DIRECTORY
        known = resume(position, journals, self.name)
        self._plan = deque(known.plan)
        self._ledger = _Ledger(self.name, journals, known, position, context)
        self.progress, self.blank = (known.totals.size, None), known.totals.blank
        record, record_end = self._ledger.add_piece, self._ledger.add_finished
        self._files = FollowedFiles(settings, context.max_row_bytes, known.state, record, record_end, clock)
        self._watch = DirectoryWatch(settings.path, clock)
        self._asked = self._marker_seen = self._last = False
        if not self._plan:
            self._files.begin()

    def read(self) -> Rows | None:
        """Returns the next rows, none where there are none now; None where the directory has ended."""
        for _ in range(_STEPS):
            if self._plan:
                found = self._replay()
            else:
                self._look()
                if not self._files.has_turns:
                    return None if self._last else Rows()
                found = self._files.step()
            self.reached = FollowPosition(self._ledger.serial)
            self.progress, self.blank = (self._ledger.totals.size, None), self._ledger.totals.blank
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
        """Returns the entry of a position; see `_Ledger.entry`."""
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
        try:
            name, until, size = decode_line(self._plan[0])
        except ValueError as cause:
            raise refuse_position(self.name, "a line of a journal", str(cause)[:120]) from cause
        rows = None
        if size is not None:
            self._files.finish(name, size)
        else:
            rows, diverged = self._files.read(name, until)
            if diverged:
                # Somebody has mended a line, say. Nothing behind these rows is published, so any order will do.
                path = plain_name(os.path.join(self._path, name))
                _log.warning("%s was changed behind what is published of it; it is taken as it is now", path)
                self._plan.clear()
        if rows is None and self._plan:
            self._plan.popleft()
        if not self._plan:
            self._files.begin()
        return rows


def list_unread(
    settings: SourceSettings, entry: dict[str, Any], directory: Path, max_row_bytes: int
) -> list[tuple[str, int, int]]:
    """Returns what a directory holds behind all that was read of it: (path, bytes read, bytes there) of each file.

    A plain file is looked into: blank lines and, at its end, a piece of a line are nothing to be read.
    """
    known = resume(entry, directory, plain_name(settings.path))
    apply(known.state, known.plan, plain_name(settings.path))
    begun, finished = known.state.files, known.state.finished
    rules = NameRules(settings.pattern, settings.marker, settings.end_marker)
    look = DirectoryListing(settings.path, rules, finished).look(begun)
    read = {name: begun[name].offset for name in look.sizes if not is_packed(name)} | dict.fromkeys(look.new, 0)
    read |= {name: ended.offset for name in look.grown if (ended := finished.get(name)) is not None}
    unread = []
    for name, size in sorted(read.items()):
        path, there = os.path.join(settings.path, name), (look.sizes | look.new | look.grown)[name]
        if there > size and (is_packed(name) or _holds_row(path, size, max_row_bytes)):
            unread.append((path, size, there))
    return unread


def _holds_row(path: str, offset: int, max_row_bytes: int) -> bool:
    splitter = LineSplitter(path, max_row_bytes, FilePosition(offset))
    with open_regular(path, links_out=False) as file:
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            if splitter.feed(block).lines:
                return True
    return bool(splitter.finish(only_row=True).lines)
