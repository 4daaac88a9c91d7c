"""Lines: blocks of bytes in, rows out, each with its place in the text; and plain files of them as a source of rows.

A newline ends a line and nothing else does, not even a lone carriage return. A byte order mark at the start of the text
is dropped, blank lines (nothing but a line end) are left out and counted, the last line needs no newline. Whether a
line is a row is for others to say. A plain file may grow, until the run ends or after that: what follows is read then.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, BinaryIO, Final

from lazyshard.errors import RowInvalid
from lazyshard.format.row import parse_row
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import PLAIN_FIELDS, FilePosition, LinePosition, plain_name
from lazyshard_producer.sources.files import (
    FINGERPRINT_BYTES,
    check_committed,
    committed_ends,
    digest,
    open_source_file,
    read_at,
    refuse_os_error,
    refuse_truncated,
)
from lazyshard_producer.sources.source import Context, RowOrigin, Rows, Source

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


_Table = Sequence[tuple[int, int, LinePosition]]
"""Of each row where its line begins (bytes and lines before it), and where the text stands after it."""


def _line_rows(
    name: str,
    start: LinePosition,
    end: LinePosition,
    lines: Sequence[bytes | RowInvalid] = (),
    table: _Table | None = None,
) -> Rows:
    """Returns rows of a text, the last of which is before any blank lines that follow it.

    Args:
        name: how to call the text in places.
        start: where it stood before them.
        end: where it stood after them.
        lines: the rows.
        table: None: no other lines lie between them, and each is as long as its row.
    """
    offsets: list[int] = []

    def offset(index: int) -> int:
        # Not before somebody asks: most blocks are never asked for any.
        if not offsets:
            lengths = (len(line) for line in lines if isinstance(line, bytes))
            offsets.extend(accumulate(lengths, initial=start.offset))
        return offsets[index]

    def position(index: int) -> LinePosition:
        index = range(len(lines))[index]
        if index == len(lines) - 1:
            return end
        if table is not None:
            return table[index][2]
        return LinePosition(offset(index + 1), start.line + index + 1, start.blank)

    def place(index: int) -> RowOrigin:
        index = range(len(lines))[index]
        begin, line = (offset(index), start.line + index) if table is None else table[index][:2]
        return RowOrigin(name, line + 1, begin)

    return Rows(lines, position, place)


class LineSplitter:
    """Cuts a text that comes in blocks into lines. Memory: the block in hand, and a line that goes on in the next one.

    A line longer than `max_row_bytes` is never held whole: a `RowInvalid` stands in its place.

    Args:
        name: how to call the text in places.
        max_row_bytes: longest row, in bytes without its line end.
        start: where to begin, at the start of a line; None: at the start of the text.

    Attributes:
        position: where the text stands after the lines given so far.
    """

    def __init__(self, name: str, max_row_bytes: int, start: LinePosition | None = None) -> None:
        self.position = start or LinePosition()
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0

    @property
    def pending(self) -> int:
        """Bytes of the line that has begun and is not given yet."""
        return self._held_bytes

    def feed(self, block: bytes) -> Rows:
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
        start = self.position
        if start.offset and complete <= self._max_row_bytes and min(map(_first_byte, lines)) > _CARRIAGE_RETURN:
            self.position = LinePosition(start.offset + complete, start.line + len(lines), start.blank)
            rows = _line_rows(self._name, start, self.position, lines)
        else:
            rows = self._examine(lines, first_bytes)
        self._hold(rest)
        return rows

    def finish_if(self, complete: Callable[[bytes], bool]) -> Rows:
        """As `finish`, but of a text that may go on: the line is given only if it is complete, else none is."""
        if self._held_bytes <= self._max_row_bytes and complete(b"".join(self._held)):
            return self.finish()
        return self._nothing()

    def finish(self) -> Rows:
        """Returns the row of the last line, which has no newline, if there is such a line."""
        if not self._held_bytes:
            return self._nothing()
        line, length = self._release()
        if self.position.offset == 0 and line == _BOM:
            self.position = LinePosition(length, 0, 0)
            return self._nothing()
        return self._examine([line], length, open_end=True)

    def _examine(self, lines: list[bytes], first_bytes: int, open_end: bool = False) -> Rows:
        """Returns the rows of lines of which some may be blank or too long, or begin with a byte order mark."""
        start = self.position
        offset, number, blank, _ = start
        rows: list[bytes | RowInvalid] = []
        table: list[tuple[int, int, LinePosition]] = []
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
                table.append((*begin, LinePosition(offset, number, blank, open_end)))
            length = 0
        self.position = LinePosition(offset, number, blank, open_end)
        return _line_rows(self._name, start, self.position, rows, table)

    def _nothing(self) -> Rows:
        return _line_rows(self._name, self.position, self.position)

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


KIND: Final = "jsonl"

_BLOCK_BYTES: Final = 1 << 20


class JsonLinesFile(Source):
    """One plain file. Memory: a block of 1 MiB twice, and the row in hand.

    Args:
        settings: its path.
        position: where to start; None for its start.
        context: the run.

    Raises:
        SourceRefused: the file cannot be read, or is not the one of the position.
    """

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        self._path = settings.path
        at = FilePosition()
        if position is not None:
            at = FilePosition.decode(position, (KIND,), self.name, PLAIN_FIELDS)
        self._file: BinaryIO = open_source_file(self._path)
        try:
            check_committed(self._file, self._path, at)
            offset = at.offset + self._skipped(at)
            self._file.seek(offset)
        except BaseException:
            self._file.close()
            raise
        self.start = LinePosition(offset, at.line, at.blank, at.open_end and offset == at.offset)
        self._splitter = LineSplitter(self.name, context.max_row_bytes, self.start)
        self._block = b""
        self._block_end = offset
        self._finished = False

    def _skipped(self, position: FilePosition) -> int:
        """Returns how many bytes at the position are only the end of a line that is published."""
        if not position.open_end:
            return 0
        rest = read_at(self._file, self._path, 2, position.offset)
        return rest.index(b"\n") + 1 if b"\n" in rest else 0

    @property
    def reached(self) -> LinePosition:
        """Where it stands after all that was read."""
        return self._splitter.position

    @property
    def blank(self) -> int:
        """Blank lines skipped."""
        return self._splitter.position.blank

    @property
    def progress(self) -> tuple[int, int | None]:
        """(bytes read, bytes of the file)."""
        return self._splitter.position.offset, os.fstat(self._file.fileno()).st_size

    def read(self) -> Rows | None:
        """Returns the next rows; None at the end of the file.

        Raises:
            SourceRefused: the file was truncated meanwhile, or the filesystem failed.
        """
        while not self._finished:
            try:
                block = self._file.read(_BLOCK_BYTES)
            except OSError as cause:
                raise refuse_os_error(self._path, cause) from cause
            if block:
                self._block, self._block_end = block, self._block_end + len(block)
                rows = self._splitter.feed(block)
            else:
                if (size := os.fstat(self._file.fileno()).st_size) < self._block_end:
                    raise refuse_truncated(self._path, self._block_end, size)
                self._finished = True
                rows = self._splitter.finish()
            if rows.lines:
                return rows
        return None

    def entry(self, position: LinePosition) -> dict[str, Any]:
        """Returns the entry of a position, with the fingerprint of all before it.

        Raises:
            SourceRefused: the file no longer holds what was read.
        """
        offset = position.offset
        head, tail = committed_ends(self._file, self._path, offset)
        begin = self._block_end - len(self._block)
        read = self._block[: max(0, offset - begin)][-FINGERPRINT_BYTES:]
        if not tail.endswith(read):
            raise SourceRefused(f"{self._path}: changed in its first {offset} bytes while it was read", file=self._path)
        ends = (digest(head), digest(tail)) if offset else ("", "")
        at = FilePosition(**position._asdict(), head=ends[0], tail=ends[1])
        return {"kind": KIND, "path": self.name} | at.encode(PLAIN_FIELDS)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
