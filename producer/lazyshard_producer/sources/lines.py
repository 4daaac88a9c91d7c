"""Lines: blocks of bytes in, rows out, each with its place in the text; and plain files of them as a source of rows.

A newline ends a line and nothing else does. A byte order mark at the start is dropped, blank lines (nothing but a line
end) are left out and counted, the last line needs no newline. A plain file may grow, during the run or after it.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final

from lazyshard.errors import RowInvalid
from lazyshard.format.row import parse_row
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import PLAIN_FIELDS, FilePosition, plain_name
from lazyshard_producer.sources.source import (
    FINGERPRINT_BYTES,
    Context,
    RowOrigin,
    Rows,
    Source,
    check_ends,
    committed_ends,
    digest,
    find_line_end,
    open_source_file,
    read_at,
    refuse_truncated,
    refusing,
    too_long,
)

_BOM: Final = b"\xef\xbb\xbf"

_SLACK_BYTES: Final = len(_BOM) + len(b"\r\n")  # what a line may hold besides the longest row
_HINT_BYTES: Final = 4096  # so much of a line that is too long is looked at to say what it may be
_CARRIAGE_RETURN: Final = 13
"""A line that begins with a greater byte is not blank, and hardly any line begins with a smaller one."""

_first_byte: Final = itemgetter(0)

_Table = Sequence[tuple[int, int, FilePosition]]
"""Of each row where its line begins (bytes and lines before it), and where the text stands after it."""


def _line_rows(
    name: str,
    start: FilePosition,
    end: FilePosition,
    lines: Sequence[bytes | RowInvalid] = (),
    table: _Table | None = None,
) -> Rows:
    """Returns rows of the text between two places; without a table no other lines lie between them."""
    offsets: list[int] = []

    def offset(index: int) -> int:
        # Not before somebody asks: most blocks are never asked for any.
        if not offsets:
            lengths = (len(line) for line in lines if isinstance(line, bytes))
            offsets.extend(accumulate(lengths, initial=start.offset))
        return offsets[index]

    def position(index: int) -> FilePosition:
        if index == len(lines) - 1:
            return end  # behind the blank lines that follow it too
        if table is not None:
            return table[index][2]
        return FilePosition(offset(index + 1), start.line + index + 1, start.blank)

    def place(index: int) -> RowOrigin:
        begin, line = (offset(index), start.line + index) if table is None else table[index][:2]
        return RowOrigin(name, line + 1, begin)

    return Rows(lines, position, place)


class LineSplitter:
    """Cuts a text that comes in blocks into lines. Memory: the block in hand, and a line that goes on in the next one.

    A line longer than `max_row_bytes` is never held whole: a `RowInvalid` stands in its place. `position` is where the
    text stands after the lines given so far, `pending` are the bytes of the line that has begun.
    """

    def __init__(self, name: str, max_row_bytes: int, start: FilePosition | None = None) -> None:
        self.position = start or FilePosition()
        self.pending = 0
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._held: list[bytes] = []

    def feed(self, block: bytes) -> Rows:
        """Returns the rows of the lines that end in this block, which follows the one before; there may be none."""
        # BytesIO does not copy the block, and its lines end at newlines only, which they keep.
        lines = io.BytesIO(block).readlines()
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if not lines:
            self._hold(rest)
            return _line_rows(self._name, self.position, self.position)
        complete = self.pending + len(block) - len(rest)
        self._hold(lines[0])
        lines[0], first_bytes = self._release()
        start = self.position
        if start.offset and complete <= self._max_row_bytes and min(map(_first_byte, lines)) > _CARRIAGE_RETURN:
            self.position = FilePosition(start.offset + complete, start.line + len(lines), start.blank)
            rows = _line_rows(self._name, start, self.position, lines)
        else:
            rows = self._examine(lines, first_bytes)
        self._hold(rest)
        return rows

    def finish(self, *, only_row: bool = False) -> Rows:
        """Returns the row of the last line, which has no newline, if there is such a line.

        `only_row`: of a text that may go on: only if it is a JSON object. No object's beginning is one, so then nothing
        of it is missing.
        """
        if not self.pending or (only_row and not self._holds_row()):
            return _line_rows(self._name, self.position, self.position)
        line, length = self._release()
        if self.position.offset == 0 and line == _BOM:
            self.position = FilePosition(length)
            return _line_rows(self._name, self.position, self.position)
        return self._examine([line], length, open_end=True)

    def _holds_row(self) -> bool:
        if self.pending > self._max_row_bytes:
            return False
        try:
            parse_row(b"".join(self._held))
        except RowInvalid:
            return False
        return True

    def _examine(self, lines: list[bytes], first_bytes: int, open_end: bool = False) -> Rows:
        """Returns the rows of lines of which some may be blank or too long, or begin with a byte order mark."""
        start = self.position
        offset, number, blank = start.offset, start.line, start.blank
        rows: list[bytes | RowInvalid] = []
        table: list[tuple[int, int, FilePosition]] = []
        length, most = first_bytes, self._max_row_bytes
        for line in lines:
            if offset == 0:
                line = line.removeprefix(_BOM)
            length = length or len(line)
            begin = (offset, number)
            offset, number = offset + length, number + 1
            if line[0] <= _CARRIAGE_RETURN and not line.strip(b"\r\n"):
                blank += 1
            else:
                exceeds = len(line) > most and len(line.rstrip(b"\r\n")) > most
                rows.append(self._too_long(line) if exceeds or length > most + _SLACK_BYTES else line)
                table.append((*begin, FilePosition(offset, number, blank, open_end)))
            length = 0
        self.position = FilePosition(offset, number, blank, open_end)
        return _line_rows(self._name, start, self.position, rows, table)

    def _too_long(self, line: bytes) -> RowInvalid:
        hint = ""
        if b"\0" in line[:_HINT_BYTES]:
            hint = ", and it holds NUL bytes: space that was reserved but never written, or torn by a crash?"
        elif b"\r" in line[:_HINT_BYTES]:
            hint = ", and it holds carriage returns as line ends: convert it with `tr '\\r' '\\n'`"
        reason = too_long(self._max_row_bytes, hint)
        return RowInvalid(f"not a row: {reason}", reason=reason, byte=0)

    def _hold(self, part: bytes) -> None:
        """Keeps a part of a line; of one that is too long only the start, for the hint."""
        most = self._max_row_bytes + _SLACK_BYTES
        if part and self.pending <= most:
            self._held.append(part)
            if self.pending + len(part) > most:
                self._held = [b"".join(held[:_HINT_BYTES] for held in self._held)[:_HINT_BYTES]]
        self.pending += len(part)

    def _release(self) -> tuple[bytes, int]:
        line, length = b"".join(self._held), self.pending
        self._held, self.pending = [], 0
        return line, length


KIND: Final = "jsonl"

_BLOCK_BYTES: Final = 1 << 20


class JsonLinesFile(Source):
    """One plain file. Memory: a block of 1 MiB twice, and the row in hand."""

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        self._path = settings.path
        at = FilePosition()
        if position is not None:
            at = FilePosition.decode(position, (KIND,), self.name, PLAIN_FIELDS)
        self._file = open_source_file(self._path)
        self._fd: Final = self._file.fileno()
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            check_ends(self._path, at, *committed_ends(self._fd, self._path, at.offset))
            start = at.place
            if at.open_end:
                newline = find_line_end(self._path, at, read_at(self._fd, self._path, 2, at.offset))
                start = start._replace(offset=at.offset + len(newline), open_end=not newline)
            self._file.seek(start.offset)
            stack.pop_all()
        self.start = start
        self._reach(start)
        self._splitter = LineSplitter(self.name, context.max_row_bytes, start)
        self._block = b""
        self._block_end = start.offset
        self._finished = False

    def _reach(self, at: FilePosition) -> None:
        self.reached, self.blank = at, at.blank
        self.progress = at.offset, os.fstat(self._fd).st_size

    def read(self) -> Rows | None:
        """Returns the next rows; None at the end of the file. Raises SourceRefused where it was truncated."""
        while not self._finished:
            with refusing(self._path):
                block = self._file.read(_BLOCK_BYTES)
            if block:
                self._block, self._block_end = block, self._block_end + len(block)
                rows = self._splitter.feed(block)
            else:
                if (size := os.fstat(self._fd).st_size) < self._block_end:
                    raise refuse_truncated(self._path, self._block_end, size)
                self._finished = True
                rows = self._splitter.finish()
            self._reach(self._splitter.position)
            if rows.lines:
                return rows
        return None

    def entry(self, position: FilePosition) -> dict[str, Any]:
        """Returns the entry of a position, with the fingerprint of all before it."""
        offset = position.offset
        head, tail = committed_ends(self._fd, self._path, offset)
        begin = self._block_end - len(self._block)
        read = self._block[: max(0, offset - begin)][-FINGERPRINT_BYTES:]
        if not tail.endswith(read):
            raise SourceRefused(f"{self._path}: changed in its first {offset} bytes while it was read", file=self._path)
        at = position._replace(head=digest(head), tail=digest(tail)) if offset else position
        return {"kind": KIND, "path": self.name} | at.encode(PLAIN_FIELDS)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
