"""What was read from a followed directory, in order: kept until it is published, told as positions.

The order in which rows of several files follow each other is decided while they are written, so a restart could not
find it again. It is put into a journal, up to the last row that was read, before any position is told: so a seal names
a place in the journal, and the rows behind that place come in the same order again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.store.durable import remove
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.following.journal import (
    FollowState,
    Journal,
    JournalPosition,
    finished_line,
    is_journal_name,
    read_journal,
    segment_line,
)
from lazyshard_producer.following.listing import DirectoryListing, NameRules, is_packed
from lazyshard_producer.following.reading import FollowedLines
from lazyshard_producer.position import (
    FilePosition,
    LinePosition,
    check_entry,
    plain_name,
    read_count,
    refuse_position,
)
from lazyshard_producer.sources.decompression import BLOCK_BYTES
from lazyshard_producer.sources.files import open_regular
from lazyshard_producer.sources.lines import LineSplitter, is_row
from lazyshard_producer.sources.source import Rows

KIND: Final = "follow"

_LONG_BYTES: Final = 4 << 20
"""A journal is begun anew at twice the size of what is known at its start, but not below this."""

_KEPT_ENTRIES: Final = 16
"""A journal that was replaced is deleted after so many further entries: by then a seal names the new one."""


_START: Final = JournalPosition(0, "")


class FollowPosition(NamedTuple):
    """A place between two rows.

    Attributes:
        serial: number of the piece that it is in; the pieces of lower numbers are wholly before it.
        piece: that piece; None if it is wholly before it too.
        row: index of the row before it in the piece.
    """

    serial: int
    piece: FollowedLines | None = None
    row: int = -1


class Totals(NamedTuple):
    """Sums over all files and runs: bytes read (of text), blank lines among what was read."""

    size: int
    blank: int


@dataclass(slots=True)
class _Line:
    """A line of the journal: pieces of one file that follow each other, or the end of a file.

    Attributes:
        name: of the file.
        begin: where the first piece begins, in bytes.
        totals: sums behind the line.
        finished: size of the file of which the end was met.
        ends: of each piece its serial, how far the file was read with it, and the sums then.
        last_rows: serial of the last piece with rows, -1 if none has any.
        position: that in the journal behind the line.
    """

    name: str
    begin: int
    totals: Totals
    finished: int | None = None
    ends: list[tuple[int, FilePosition, Totals]] = field(default_factory=list)
    last_rows: int = -1
    position: JournalPosition = _START

    def encode(self) -> dict[str, Any]:
        """Returns the line's JSON."""
        if self.finished is not None:
            return finished_line(self.name, self.finished)
        return segment_line(self.name, self.begin, self.ends[-1][1])

    def before(self, position: FollowPosition) -> bool:
        """Returns whether all rows of the line are before a position."""
        return self.last_rows < position.serial or (self.last_rows == position.serial and position.piece is None)


class Ledger:
    """Turns what is read into positions.

    Args:
        directory: where journals are kept; made when the first one is written.
        state: how far all files are read at the start.
        totals: sums up to there.
        entry: that of the start; None if it is the very start.
        replaced: the journal that it names.
        stale: journals that no seal names, unless another producer has the stream by now.
        check_owner: raises `ProducerFenced` where it has.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        state: FollowState,
        totals: Totals,
        entry: dict[str, Any] | None,
        *,
        replaced: Path | None,
        stale: list[Path],
        check_owner: Callable[[], object],
    ) -> None:
        self.totals = totals
        self._directory = directory
        self._name = name
        self._committed = state
        self._committed_totals = totals
        self._entry = entry
        self._begun = False  # something was read in this run
        self._serial = 0
        self._open: list[_Line] = []  # read since the last position
        self._lines: deque[_Line] = deque()  # in the journal, and behind the last mark
        self._at = _START
        self._journal: Journal | None = None
        self._begun_bytes = 0
        self._stale = stale
        self._check_owner = check_owner
        self._replaced = deque([(replaced, 0)] if replaced else [])
        self._entries = 0

    @property
    def reached(self) -> FollowPosition:
        """The place after all that was read."""
        return FollowPosition(self._serial)

    def add_piece(self, name: str, piece: FollowedLines) -> Rows:
        """Takes notice of a piece of a file; returns its rows."""
        self._begun = True
        serial = self._serial = self._serial + 1
        begin, end = piece.begin, piece.end
        size, blank = self.totals
        self.totals = Totals(size + end.offset - begin.offset, blank + end.blank - begin.blank)
        line = self._open[-1] if self._open else None
        if line is None or line.name != name or line.finished is not None:
            line = _Line(name, begin.offset, self.totals)
            self._open.append(line)
        line.ends.append((serial, end, self.totals))
        line.totals = self.totals
        lines = piece.rows.lines
        if lines:
            line.last_rows = serial

        def position(index: int) -> FollowPosition:
            index = range(len(lines))[index]
            return FollowPosition(serial) if index == len(lines) - 1 else FollowPosition(serial, piece, index)

        return Rows(lines, position, piece.rows.place)

    def add_finished(self, name: str, size: int) -> None:
        """Takes notice that a file was read to its end, being of this size in bytes."""
        self._begun = True
        self._open.append(_Line(name, 0, self.totals, finished=size))

    def entry(self, position: FollowPosition) -> dict[str, Any]:
        """Returns the entry of a position, with all that was read so far durable in the journal.

        Raises:
            ProducerFenced: another producer has taken the stream over, and journals were to be deleted.
            OSError: the journal cannot be written.
        """
        self._entries += 1
        new, self._open = self._open, []
        if self._journal is not None:
            self._append(new)
        self._lines.extend(new)
        while self._lines and self._lines[0].before(position):
            self._commit(self._lines.popleft())
        at, totals = self._within(position)
        if self._journal is None and not self._begun:
            return self._encode(None, totals) if self._entry is None else self._entry
        if self._journal is None or self._journal.size > max(_LONG_BYTES, 2 * self._begun_bytes):
            self._begin()
        self._clear()
        return self._encode(at, totals)

    def close(self) -> None:
        """Closes the journal. May be called twice."""
        if self._journal is not None:
            self._journal.close()

    def _append(self, lines: Sequence[_Line]) -> None:
        assert self._journal is not None
        for line, at in zip(lines, self._journal.append(line.encode() for line in lines), strict=True):
            line.position = at

    def _commit(self, line: _Line) -> None:
        """Takes notice that all of a line is before the position."""
        self._at = line.position
        self._committed_totals = line.totals
        if line.finished is not None:
            self._committed.finish(line.name, line.finished)
        else:
            self._committed.files[line.name] = line.ends[-1][1]

    def _within(self, position: FollowPosition) -> tuple[tuple[str, FilePosition] | None, Totals]:
        """Returns the file and how far it is read where a position is within the first line behind it, and the sums."""
        totals = self._committed_totals
        found: FilePosition | None = None
        for serial, end, sums in self._lines[0].ends if self._lines else ():
            if serial == position.serial and position.piece is not None:
                found, begin = position.piece.at(position.row), position.piece.begin
                totals = Totals(totals.size + found.offset - begin.offset, totals.blank + found.blank - begin.blank)
            elif serial <= position.serial:
                found, totals = end, sums
        return None if found is None else (self._lines[0].name, found), totals

    def _begin(self) -> None:
        """Begins a new journal with all that is known before the first line behind the position, and what is behind.

        How far the position is within that line is in every entry, so a journal does not have to say it.
        """
        journal = Journal(self._directory, self._name)
        try:
            at = journal.append(self._committed.lines())[-1]
        except BaseException:
            journal.close()
            raise
        if self._journal is not None:
            self._journal.close()
            self._replaced.append((self._journal.path, self._entries))
        self._journal, self._at, self._begun_bytes = journal, at, at.size
        self._append(self._lines)

    def _clear(self) -> None:
        """Deletes the journals that no seal can name any more."""
        if self._stale:
            # They were listed before: whoever takes the stream over from here on has none among them.
            self._check_owner()
        for path in self._stale:
            remove(path)
        self._stale = []
        while self._replaced and self._entries - self._replaced[0][1] > _KEPT_ENTRIES:
            remove(self._replaced.popleft()[0])

    def _encode(self, at: tuple[str, FilePosition] | None, totals: Totals) -> dict[str, Any]:
        journal = "" if self._journal is None else self._journal.path.name
        value = {
            "kind": KIND,
            "path": self._name,
            "journal": journal,
            "bytes": self._at.size,
            "digest": self._at.digest,
            "read": totals.size,
            "blank": totals.blank,
        }
        return value if at is None else value | {"at": segment_line(at[0], at[1].offset, at[1])}


class Resumed(NamedTuple):
    """What an entry says.

    Attributes:
        state: how far all files are read.
        totals: sums up to there.
        plan: lines of the journal behind it: what was read next, in this order.
        journal: the journal that it names, None if there was none yet.
    """

    state: FollowState
    totals: Totals
    plan: list[dict[str, Any]]
    journal: Path | None


def resume(entry: dict[str, Any] | None, directory: Path, name: str) -> Resumed:
    """Returns what an entry says, None for the very start.

    Raises:
        SourceRefused: it says nothing that can be gone on from, or its journal is missing or damaged.
    """
    state = FollowState()
    if entry is None:
        return Resumed(state, Totals(0, 0), [], None)
    check_entry(entry, name, KIND)
    size, read, blank = (read_count(entry, field, name) for field in ("bytes", "read", "blank"))
    digest, journal, at = entry.get("digest"), entry.get("journal"), entry.get("at", {})
    if not isinstance(digest, str):
        raise refuse_position(name, "digest: a text", repr(digest)[:120])
    if not isinstance(journal, str) or (journal and not is_journal_name(journal)):
        raise refuse_position(name, "journal: the name of one, or none", repr(journal)[:120])
    if not isinstance(at, dict):
        raise refuse_position(name, "at: an object", repr(at)[:120])
    totals = Totals(read, blank)
    if not journal:
        return Resumed(state, totals, [], None)
    path = directory / journal
    before, behind = read_journal(path, JournalPosition(size, digest), name)
    _apply(state, [*before, *([at] if "at" in entry else [])], name)
    return Resumed(state, totals, behind, path)


def _apply(state: FollowState, lines: Iterable[dict[str, Any]], name: str) -> None:
    try:
        for line in lines:
            state.apply(line)
    except (TypeError, AttributeError, ValueError) as cause:
        raise refuse_position(name, "lines of a journal", str(cause)[:120]) from cause


def list_unread(
    settings: SourceSettings, entry: dict[str, Any], directory: Path, max_row_bytes: int
) -> list[tuple[str, int, int]]:
    """Returns what a directory holds behind all that was read of it: (path, bytes read, bytes there) of each file.

    A plain file is looked into: blank lines and, at its end, a piece of a line are nothing to be read.

    Raises:
        SourceRefused: as `resume`, or the directory or a file cannot be read.
    """
    known = resume(entry, directory, plain_name(settings.path))
    _apply(known.state, known.plan, plain_name(settings.path))
    begun, finished = known.state.files, known.state.finished
    rules = NameRules(settings.pattern, settings.marker, settings.end_marker)
    sizes = DirectoryListing(settings.path, rules).look(()).new
    new, grown = finished.compare({name: size for name, size in sizes.items() if name not in begun})
    read = dict.fromkeys(new, 0) | {name: ended.size for name in grown if (ended := finished.get(name)) is not None}
    read |= {name: state.offset for name, state in begun.items() if name in sizes and not is_packed(name)}
    unread = []
    for name, size in sorted(read.items()):
        path = os.path.join(settings.path, name)
        if sizes[name] > size and (is_packed(name) or _holds_row(path, size, max_row_bytes)):
            unread.append((path, size, sizes[name]))
    return unread


def _holds_row(path: str, offset: int, max_row_bytes: int) -> bool:
    """Returns whether there is a row behind a place in a plain file."""
    splitter = LineSplitter(path, max_row_bytes, LinePosition(offset))
    with open_regular(path, links_out=False) as file:
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            if splitter.feed(block).lines:
                return True
    return bool(splitter.finish_if(is_row).lines)
