"""What was read from a followed directory, in order: kept until it is published, told as positions.

The order in which rows of several files follow each other is decided while they are written, so a restart could not
find it again. It is put into a journal, up to the last row that was read, before any position is told: so a seal names
a place in the journal, and the rows behind that place come in the same order again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.errors import RowInvalid
from lazyshard_producer.following.journal import Journal, Spot, remove_journal
from lazyshard_producer.following.piece import Piece
from lazyshard_producer.following.state import FileState, FollowState, finished_line, segment_line
from lazyshard_producer.sources.source import Place

KIND: Final = "follow"

_LONG_BYTES: Final = 4 << 20
"""A journal is begun anew at twice the size of what is known at its start, but not below this."""

_KEPT_POSITIONS: Final = 16
"""A journal that was replaced is deleted after so many further positions: by then a seal names the new one."""


_START: Final = Spot(0, "")


class FollowMark(NamedTuple):
    """A place between two rows.

    Attributes:
        serial: number of the piece that it is in; the pieces of lower numbers are wholly before it.
        piece: that piece; None if it is wholly before it too.
        row: index of the row before it in the piece.
    """

    serial: int
    piece: Piece | None = None
    row: int = -1


class FollowRows:
    """Rows of one file; see `lazyshard_producer.sources.source.Rows`."""

    __slots__ = ("_piece", "_serial", "lines")

    def __init__(self, serial: int, piece: Piece | None) -> None:
        self.lines: Sequence[bytes | RowInvalid] = () if piece is None else piece.lines
        self._serial = serial
        self._piece = piece

    def mark(self, index: int) -> FollowMark:
        """Returns where the source stands after the row of this index."""
        index = range(len(self.lines))[index]
        if index == len(self.lines) - 1:
            return FollowMark(self._serial)
        return FollowMark(self._serial, self._piece, index)

    def place(self, index: int) -> Place:
        """Returns where the row of this index comes from."""
        assert self._piece is not None
        return self._piece.place(index)


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
        spot: the place in the journal behind the line.
    """

    name: str
    begin: int
    totals: Totals
    finished: int | None = None
    ends: list[tuple[int, FileState, Totals]] = field(default_factory=list)
    last_rows: int = -1
    spot: Spot = _START

    def encode(self) -> dict[str, Any]:
        """Returns the line's JSON."""
        if self.finished is not None:
            return finished_line(self.name, self.finished)
        return segment_line(self.name, self.begin, self.ends[-1][1])

    def before(self, mark: FollowMark) -> bool:
        """Returns whether all rows of the line are before a mark."""
        return self.last_rows < mark.serial or (self.last_rows == mark.serial and mark.piece is None)


class Ledger:
    """Turns what is read into positions.

    Args:
        directory: where journals are kept; made when the first one is written.
        name: the source's name.
        state: how far all files are read at the start.
        totals: sums up to there.
        position: the position of the start; None if it is the very start.
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
        position: dict[str, Any] | None,
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
        self._position = position
        self._begun = False  # something was read in this run
        self._serial = 0
        self._open: list[_Line] = []  # read since the last position
        self._lines: deque[_Line] = deque()  # in the journal, and behind the last mark
        self._spot = _START
        self._journal: Journal | None = None
        self._begun_bytes = 0
        self._stale = stale
        self._check_owner = check_owner
        self._replaced = deque([(replaced, 0)] if replaced else [])
        self._positions = 0

    @property
    def reached(self) -> FollowMark:
        """The place after all that was read."""
        return FollowMark(self._serial)

    def add_piece(self, name: str, piece: Piece) -> int:
        """Takes notice of a piece of a file; returns its serial."""
        self._begun = True
        self._serial += 1
        begin, end = piece.begin, piece.end
        size, blank = self.totals
        self.totals = Totals(size + end.offset - begin.offset, blank + end.blank - begin.blank)
        line = self._open[-1] if self._open else None
        if line is None or line.name != name or line.finished is not None:
            line = _Line(name, begin.offset, self.totals)
            self._open.append(line)
        line.ends.append((self._serial, end, self.totals))
        line.totals = self.totals
        if piece.lines:
            line.last_rows = self._serial
        return self._serial

    def add_finished(self, name: str, size: int) -> None:
        """Takes notice that a file was read to its end, being of this size in bytes."""
        self._begun = True
        self._open.append(_Line(name, 0, self.totals, finished=size))

    def position(self, mark: FollowMark) -> dict[str, Any]:
        """Returns the position at a mark, with all that was read so far durable in the journal.

        Raises:
            ProducerFenced: another producer has taken the stream over, and journals were to be deleted.
            OSError: the journal cannot be written.
        """
        self._positions += 1
        new, self._open = self._open, []
        if self._journal is not None:
            self._append(new)
        self._lines.extend(new)
        while self._lines and self._lines[0].before(mark):
            self._commit(self._lines.popleft())
        at, totals = self._within(mark)
        if self._journal is None and not self._begun:
            return self._encode(None, totals) if self._position is None else self._position
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
        for line, spot in zip(lines, self._journal.append(line.encode() for line in lines), strict=True):
            line.spot = spot

    def _commit(self, line: _Line) -> None:
        """Takes notice that all of a line is before the mark."""
        self._spot = line.spot
        self._committed_totals = line.totals
        if line.finished is not None:
            self._committed.finish(line.name, line.finished)
        else:
            self._committed.files[line.name] = line.ends[-1][1]

    def _within(self, mark: FollowMark) -> tuple[tuple[str, FileState] | None, Totals]:
        """Returns the file and how far it is read where a mark is within the first line behind it, and the sums."""
        totals = self._committed_totals
        found: FileState | None = None
        for serial, end, sums in self._lines[0].ends if self._lines else ():
            if serial == mark.serial and mark.piece is not None:
                found, begin = mark.piece.state(mark.row), mark.piece.begin
                totals = Totals(totals.size + found.offset - begin.offset, totals.blank + found.blank - begin.blank)
            elif serial <= mark.serial:
                found, totals = end, sums
        return None if found is None else (self._lines[0].name, found), totals

    def _begin(self) -> None:
        """Begins a new journal with all that is known before the first line behind the mark, and the lines from there.

        How far the mark is within that line is in every position, so a journal does not have to say it.
        """
        journal = Journal(self._directory, self._name)
        try:
            spot = journal.append(self._committed.lines())[-1]
        except BaseException:
            journal.close()
            raise
        if self._journal is not None:
            self._journal.close()
            self._replaced.append((self._journal.path, self._positions))
        self._journal, self._spot, self._begun_bytes = journal, spot, spot.size
        self._append(self._lines)

    def _clear(self) -> None:
        """Deletes the journals that no seal can name any more."""
        if self._stale:
            # They were listed before: whoever takes the stream over from here on has none among them.
            self._check_owner()
        for path in self._stale:
            remove_journal(path)
        self._stale = []
        while self._replaced and self._positions - self._replaced[0][1] > _KEPT_POSITIONS:
            remove_journal(self._replaced.popleft()[0])

    def _encode(self, at: tuple[str, FileState] | None, totals: Totals) -> dict[str, Any]:
        journal = "" if self._journal is None else self._journal.path.name
        value = {
            "kind": KIND,
            "path": self._name,
            "journal": journal,
            "bytes": self._spot.size,
            "digest": self._spot.digest,
            "read": totals.size,
            "blank": totals.blank,
        }
        return value if at is None else value | {"at": segment_line(at[0], at[1].offset, at[1])}
