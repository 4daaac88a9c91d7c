"""Lines: blocks of bytes in, rows out, each with its place in the text. No I/O.

A newline ends a line and nothing else does, not even a lone carriage return. A byte order mark at the start of the text
is dropped, blank lines (nothing but a line end) are left out and counted, the last line needs no newline. Whether a
line is a row is for others to say.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Final, NamedTuple

from lazyshard.errors import RowInvalid
from lazyshard.format.row import parse_row
from lazyshard_producer.sources.source import Place

_BOM: Final = b"\xef\xbb\xbf"

_SLACK_BYTES: Final = len(_BOM) + len(b"\r\n")
"""What a line may hold besides the longest row."""

_HINT_BYTES: Final = 4096
"""So much of a line that is too long is looked at to say what it may be."""

_CARRIAGE_RETURN: Final = 13
"""A line that begins with a greater byte is not blank, and hardly any line begins with a smaller one."""

_first_byte: Final = itemgetter(0)


def is_row(line: bytes) -> bool:
    """Returns whether a line is a JSON object. No object's beginning is one, so then nothing of the line is missing."""
    try:
        parse_row(line)
    except RowInvalid:
        return False
    return True


class LineMark(NamedTuple):
    """Where a text stands between two lines.

    Attributes:
        offset: bytes before it, a byte order mark included.
        line: lines before it, blank ones included.
        blank: blank lines among them.
        open_end: the last of them had no newline.
    """

    offset: int
    line: int
    blank: int
    open_end: bool = False


class LineRows:
    """Rows of a text, in order: see `lazyshard_producer.sources.source.Rows`.

    Args:
        name: how to call the text in places.
        start: where it stood before them.
        end: where it stood after them.
        lines: the rows.
        table: for each of them where its line begins (bytes and lines before it) and where the text stands after it;
            None: no other lines lie between them, and each is as long as its row.
    """

    __slots__ = ("_end", "_name", "_offsets", "_start", "_table", "lines")

    def __init__(
        self,
        name: str,
        start: LineMark,
        end: LineMark,
        lines: Sequence[bytes | RowInvalid] = (),
        table: Sequence[tuple[int, int, LineMark]] | None = None,
    ) -> None:
        self.lines = lines
        self._name = name
        self._start = start
        self._end = end
        self._table = table
        self._offsets: list[int] | None = None

    def mark(self, index: int) -> LineMark:
        """Returns where the text stands after the row of this index: the last one's is after any blank lines too."""
        index = range(len(self.lines))[index]
        if index == len(self.lines) - 1:
            return self._end
        if self._table is not None:
            return self._table[index][2]
        return LineMark(self._offset(index + 1), self._start.line + index + 1, self._start.blank)

    def place(self, index: int) -> Place:
        """Returns where the row of this index begins."""
        if self._table is not None:
            offset, line, _ = self._table[index]
            return Place(self._name, line + 1, offset)
        index = range(len(self.lines))[index]
        return Place(self._name, self._start.line + index + 1, self._offset(index))

    def _offset(self, index: int) -> int:
        # Not before somebody asks: most blocks are never asked for any.
        if self._offsets is None:
            lengths = (len(line) for line in self.lines if isinstance(line, bytes))
            self._offsets = list(accumulate(lengths, initial=self._start.offset))
        return self._offsets[index]


class LineSplitter:
    """Cuts a text that comes in blocks into lines. Memory: the block in hand, and a line that goes on in the next one.

    A line longer than `max_row_bytes` is never held whole: a `RowInvalid` stands in its place.

    Args:
        name: how to call the text in places.
        max_row_bytes: longest row, in bytes without its line end.
        start: where to begin, at the start of a line; None: at the start of the text.

    Attributes:
        mark: where the text stands after the lines given so far.
    """

    def __init__(self, name: str, max_row_bytes: int, start: LineMark | None = None) -> None:
        self.mark = start or LineMark(0, 0, 0)
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0

    @property
    def pending(self) -> int:
        """Bytes of the line that has begun and is not given yet."""
        return self._held_bytes

    def feed(self, block: bytes) -> LineRows:
        """Returns the rows of the lines that end in this block, which follows the one before; there may be none."""
        # BytesIO does not copy the block, and its lines end at newlines only, which they keep.
        lines = io.BytesIO(block).readlines()
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if not lines:
            self._hold(rest)
            return self._nothing()
        complete = self._held_bytes + len(block) - len(rest)
        self._hold(lines[0])
        lines[0], first_bytes = self._release()
        start = self.mark
        if start.offset and complete <= self._max_row_bytes and min(map(_first_byte, lines)) > _CARRIAGE_RETURN:
            self.mark = LineMark(start.offset + complete, start.line + len(lines), start.blank)
            rows = LineRows(self._name, start, self.mark, lines)
        else:
            rows = self._examine(lines, first_bytes)
        self._hold(rest)
        return rows

    def finish_if(self, complete: Callable[[bytes], bool]) -> LineRows:
        """As `finish`, but of a text that may go on: the line is given only if it is complete, else none is."""
        if self._held_bytes <= self._max_row_bytes and complete(b"".join(self._held)):
            return self.finish()
        return self._nothing()

    def finish(self) -> LineRows:
        """Returns the row of the last line, which has no newline, if there is such a line."""
        if not self._held_bytes:
            return self._nothing()
        line, length = self._release()
        if self.mark.offset == 0 and line == _BOM:
            self.mark = LineMark(length, 0, 0)
            return self._nothing()
        return self._examine([line], length, open_end=True)

    def _examine(self, lines: list[bytes], first_bytes: int, open_end: bool = False) -> LineRows:
        """Returns the rows of lines of which some may be blank or too long, or begin with a byte order mark."""
        start = self.mark
        offset, number, blank, _ = start
        rows: list[bytes | RowInvalid] = []
        table: list[tuple[int, int, LineMark]] = []
        length = first_bytes
        for line in lines:
            if offset == 0:
                line = line.removeprefix(_BOM)
            length = length or len(line)
            begin = (offset, number)
            offset, number = offset + length, number + 1
            is_blank = line[0] <= _CARRIAGE_RETURN and not line.strip(b"\r\n")
            blank += is_blank
            if not is_blank:
                rows.append(self._too_long(line) if self._exceeds(line, length) else line)
                table.append((*begin, LineMark(offset, number, blank, open_end)))
            length = 0
        self.mark = LineMark(offset, number, blank, open_end)
        return LineRows(self._name, start, self.mark, rows, table)

    def _nothing(self) -> LineRows:
        return LineRows(self._name, self.mark, self.mark)

    def _exceeds(self, line: bytes, length: int) -> bool:
        if length > self._max_row_bytes + _SLACK_BYTES:
            return True
        return len(line) > self._max_row_bytes and len(line.rstrip(b"\r\n")) > self._max_row_bytes

    def _too_long(self, line: bytes) -> RowInvalid:
        hint = ""
        if b"\0" in line[:_HINT_BYTES]:
            hint = ", and it holds NUL bytes: space that was reserved but never written, or torn by a crash?"
        elif b"\r" in line[:_HINT_BYTES]:
            hint = ", and it holds carriage returns as line ends: convert it with `tr '\\r' '\\n'`"
        reason = f"longer than the {self._max_row_bytes} bytes of --max-row-bytes{hint}"
        return RowInvalid(f"not a row: {reason}", reason=reason, byte=0)

    def _hold(self, part: bytes) -> None:
        """Keeps a part of a line; of one that is too long only the start, for the hint."""
        if not part:
            return
        fits = self._held_bytes <= self._max_row_bytes + _SLACK_BYTES
        self._held_bytes += len(part)
        if self._held_bytes <= self._max_row_bytes + _SLACK_BYTES:
            self._held.append(part)
        elif fits:
            self._held.append(part)
            self._held = [b"".join(held[:_HINT_BYTES] for held in self._held)[:_HINT_BYTES]]

    def _release(self) -> tuple[bytes, int]:
        """Returns the line that was held, or the start of it, and its length in bytes."""
        line, length = b"".join(self._held), self._held_bytes
        self._held, self._held_bytes = [], 0
        return line, length
