"""Lines: blocks of bytes in, rows out, each with its place in the text; and plain files of them as a source of rows.

A newline ends a line and nothing else does. A byte order mark at the start is dropped, blank lines are left out and
counted, the last line needs no newline. A plain file may grow, during the run or after it.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, NamedTuple

import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format.row import parse_row
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import EMPTY, PLAIN_FIELDS, FilePosition, plain_name
from lazyshard_producer.sources import files
from lazyshard_producer.sources.files import FINGERPRINT_BYTES, digest
from lazyshard_producer.sources.source import PIECE_BYTES, Context, RowOrigin, Rows, Source, bad_row, too_long

_BOM: Final = b"\xef\xbb\xbf"

_SLACK_BYTES: Final = len(_BOM) + len(b"\r\n")  # what a line may hold besides the longest row
_HINT_BYTES: Final = 4096  # so much of a line that is too long is looked at to say what it may be
_CARRIAGE_RETURN: Final = 13
"""A line that begins with a greater byte is not blank, and hardly any line begins with a smaller one."""


class LineSplitter:
    """Cuts a text that comes in blocks into lines. A line longer than `max_row_bytes` is never held whole.

    `position` is where the text stands after the lines given so far, `pending` are the bytes of the line that has
    begun. Where the last line before the start had no newline, that comes first now, or the text is refused.
    """

    def __init__(self, name: str, max_row_bytes: int, start: FilePosition | None = None) -> None:
        self.position = start or FilePosition()
        self.pending = 0
        self._name, self._max_row_bytes = name, max_row_bytes
        self._held = bytearray()

    @property
    def fed(self) -> int:
        """Bytes of the text up to the end of the last block."""
        return self.position.offset + self.pending

    def feed(self, block: bytes) -> Rows:
        """Returns the rows of the lines that end in this block, which follows the one before; there may be none."""
        if self.position.open_end:
            block = self._close_line(block)
        # BytesIO does not copy the block, and its lines end at newlines only, which they keep.
        lines = io.BytesIO(block).readlines()
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if not lines:
            self._hold(rest)
            return Rows()
        complete = self.pending + len(block) - len(rest)
        self._hold(lines[0])
        lines[0], first_bytes = self._release()
        start = self.position
        if start.offset and complete <= self._max_row_bytes and min(map(itemgetter(0), lines)) > _CARRIAGE_RETURN:
            self.position = FilePosition(start.offset + complete, start.line + len(lines), start.blank)
            rows = _plain_rows(self._name, start, lines)
        else:
            rows = self._examine(lines, first_bytes)
        self._hold(rest)
        return rows

    def finish(self, *, only_row: bool = False) -> Rows:
        """Returns the row of the last line, which has no newline, if there is such a line.

        `only_row`: only if it is a JSON object. No object's beginning is one, so nothing of it is missing.
        """
        if not self.pending or self.position.open_end:
            return Rows()
        if only_row:
            try:
                parse_row(bytes(self._held) if self.pending <= self._max_row_bytes else b"")
            except RowInvalid:
                return Rows()
        line, length = self._release()
        if self.position.offset == 0 and line == _BOM:
            self.position = FilePosition(length)
            return Rows()
        return self._examine([line], length, open_end=True)

    def _close_line(self, block: bytes) -> bytes:
        """Takes the newline that the last line lacked; returns what follows it."""
        at, (held, _) = self.position, self._release()
        rest = held + block
        if rest in (b"", b"\r"):
            self._hold(rest)
            return b""
        newline = next((end for end in (b"\n", b"\r\n") if rest.startswith(end)), None)
        if newline is None:
            where = f"the row of line {at.line} was taken as it stood at the end, byte {at.offset}: "
            hint = ": the line was continued since"
            raise files.refuse_source(self._name, "a line end", repr(rest[:1]), hint, where=where)
        self.position = FilePosition(at.offset + len(newline), at.line, at.blank)
        return rest[len(newline) :]

    def _examine(self, lines: list[bytes], first_bytes: int, open_end: bool = False) -> Rows:
        """Returns the rows of lines of which some may be blank or too long, or begin with a byte order mark."""
        (offset, number, blank, *_), most = self.position, self._max_row_bytes
        rows: list[bytes | RowInvalid] = []
        positions: list[FilePosition] = []
        places: list[RowOrigin] = []
        length = first_bytes
        for line in lines:
            if offset == 0:
                line = line.removeprefix(_BOM)
            length = length or len(line)
            if line[0] <= _CARRIAGE_RETURN and not line.strip(b"\r\n"):
                blank += 1
            else:
                exceeds = len(line) > most and len(line.rstrip(b"\r\n")) > most
                rows.append(self._too_long(line) if exceeds or length > most + _SLACK_BYTES else line)
                places.append(RowOrigin(self._name, number + 1, offset))
                positions.append(FilePosition(offset + length, number + 1, blank, open_end))
            offset, number, length = offset + length, number + 1, 0
        self.position = FilePosition(offset, number, blank, open_end)
        if rows:
            positions[-1] = self.position  # behind the blank lines that follow it too
        return Rows(rows, positions.__getitem__, places.__getitem__)

    def _too_long(self, line: bytes) -> RowInvalid:
        hint = ""
        if b"\0" in line[:_HINT_BYTES]:
            hint = ", and it holds NUL bytes: space that was reserved but never written, or torn by a crash?"
        elif b"\r" in line[:_HINT_BYTES]:
            hint = ", and it holds carriage returns as line ends: convert it with `tr '\\r' '\\n'`"
        return bad_row(too_long(self._max_row_bytes, hint), byte=0)

    def _hold(self, part: bytes) -> None:
        """Keeps a part of a line; of one that is too long only the start, for the hint."""
        most = self._max_row_bytes + _SLACK_BYTES
        self._held += part if self.pending <= most else b""
        self.pending += len(part)
        if self.pending > most:
            del self._held[_HINT_BYTES:]

    def _release(self) -> tuple[bytes, int]:
        line, length = bytes(self._held), self.pending
        self._held, self.pending = bytearray(), 0
        return line, length


def _plain_rows(name: str, start: FilePosition, lines: Sequence[bytes]) -> Rows:
    """Returns the rows of a text from a place on, between which no other lines lie."""

    @cache
    def offsets() -> list[int]:
        # Not before somebody asks: most blocks are asked for few or none.
        return list(accumulate(map(len, lines), initial=start.offset))

    return Rows(
        lines,
        lambda index: FilePosition(offsets()[index + 1], start.line + index + 1, start.blank),
        lambda index: RowOrigin(name, start.line + index + 1, offsets()[index]),
    )


class TextPosition(NamedTuple):
    """A place between two lines of the text, and what tells the digest of the text up to a byte near it."""

    at: FilePosition
    digest: Callable[[int], str]

    def digested(self) -> FilePosition:
        """Returns the position with the digest: costs one of 1 MiB at the most."""
        return self.at._replace(digest=self.digest(self.at.offset))


def _digest(before: xxhash.xxh3_64, begin: int, block: bytes, offset: int) -> str:
    state = before.copy()
    state.update(memoryview(block)[: offset - begin])
    return state.hexdigest()


class DigestedText(LineSplitter):
    """Cuts a text into lines after the part that was read before, whose digest it checks; `remedy` says what to do.

    `read` bytes of the text came so far. The positions of its rows are `TextPosition`.
    """

    def __init__(self, name: str, max_row_bytes: int, position: FilePosition, remedy: str) -> None:
        super().__init__(name, max_row_bytes, position.place)
        self.read = 0
        self._known = position._replace(digest=position.digest or EMPTY)
        self._remedy, self._digest = remedy, xxhash.xxh3_64()
        self._digest_at: Callable[[int], str] = lambda offset: self._known.digest

    @property
    def behind(self) -> int:
        """Bytes still to come of the part that was read before."""
        return max(0, self._known.offset - self.read)

    @property
    def reached(self) -> TextPosition:
        """Where the text stands after all lines that were given, and after blank lines behind them."""
        return TextPosition(self.position, self._digest_at)

    def feed(self, block: bytes) -> Rows:
        """Returns the rows of the lines that end in this block; there may be none."""
        if behind := self.behind:
            self._digest.update(block[:behind])
            self.read += len(block[:behind])
            block = block[behind:]
            if not self.behind and (actual := self._digest.hexdigest()) != self._known.digest:
                at, where = self._known, "not the text whose rows are published: "
                expected = f"XXH3 {at.digest} of the first {at.offset} bytes ({at.line} lines)"
                raise files.refuse_source(self._name, expected, actual, self._remedy, where=where)
        return self._advance(block, partial(super().feed, block))

    def finish(self, *, only_row: bool = False) -> Rows:
        """Returns the row of the last line, which has no newline; see `LineSplitter.finish`."""
        if self.behind and not only_row:
            expected = f"at least the {self._known.offset} bytes that were read"
            raise files.refuse_source(self._name, expected, f"{self.read}: it was truncated or replaced", self._remedy)
        return self._advance(b"", partial(super().finish, only_row=only_row))

    def _advance(self, block: bytes, give: Callable[[], Rows]) -> Rows:
        before, digest_before = self.reached
        self._digest_at = digest = partial(_digest, self._digest.copy(), self.read, block)
        self._digest.update(block)
        self.read += len(block)
        rows = give()
        if self.position == before:
            # Of a block within a line: it cannot tell the digest up to a place before it.
            self._digest_at = digest_before
        return rows._replace(position=lambda index: TextPosition(rows.position(index), digest))


def decode_start(entry: dict[str, Any] | None, kinds: Sequence[str], name: str, fields: Sequence[str]) -> FilePosition:
    """Returns the position of an entry; that of the start for None. Raises SourceRefused."""
    return FilePosition() if entry is None else FilePosition.decode(entry, kinds, name, fields)


KIND: Final = "jsonl"


class JsonLinesFile(Source):
    """One plain file. Memory: a block of 1 MiB twice, and the row in hand."""

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name, self._path = plain_name(settings.path), settings.path
        at = decode_start(position, (KIND,), self.name, PLAIN_FIELDS)
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(files.open_source_file(self._path))
            self._fd: Final = self._file.fileno()
            files.check_ends(self._path, at, *files.committed_ends(self._fd, self._path, at.offset))
            self._file.seek(at.offset)
            stack.pop_all()
        self._splitter = LineSplitter(self.name, context.max_row_bytes, at.place)
        self._block, self._finished = b"", False
        self.start = self._reach()

    def _reach(self) -> FilePosition:
        at = self.reached = self._splitter.position
        self.blank, self.progress = at.blank, (at.offset, os.fstat(self._fd).st_size)
        return at

    def read(self) -> Rows | None:
        """Returns the next rows; None at the end of the file. Raises SourceRefused where it was truncated."""
        while not self._finished:
            with files.refusing(self._path):
                block = self._file.read(PIECE_BYTES)
            if not block and (size := os.fstat(self._fd).st_size) < self._splitter.fed:
                raise files.refuse_truncated(self._path, self._splitter.fed, size)
            self._block, self._finished = block or self._block, not block
            rows = self._splitter.feed(block) if block else self._splitter.finish()
            self._reach()
            if rows.lines:
                return rows
        return None

    def entry(self, position: FilePosition) -> dict[str, Any]:
        """Returns the entry of a position, with the fingerprint of all before it."""
        offset = position.offset
        head, tail = files.committed_ends(self._fd, self._path, offset)
        begin = self._splitter.fed - len(self._block)
        read = self._block[: max(0, offset - begin)][-FINGERPRINT_BYTES:]
        if not tail.endswith(read):
            raise SourceRefused(f"{self._path}: changed in its first {offset} bytes while it was read", file=self._path)
        at = position._replace(head=digest(head), tail=digest(tail)) if offset else position
        return {"kind": KIND, "path": self.name} | at.encode(PLAIN_FIELDS)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
