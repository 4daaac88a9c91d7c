"""Splits blocks of bytes into lines, each with its place in the text; and a source that reads plain files of lines.

Only a newline ends a line. A byte order mark at the start is dropped, blank lines are skipped and counted, and the last
line needs no newline. A plain file may grow, during the run or after it.
"""

from __future__ import annotations

import contextlib
import io
import os
from abc import abstractmethod
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, NamedTuple

import xxhash
from xxhash import xxh3_64_hexdigest as digest

from lazyshard.errors import RowInvalid
from lazyshard.format.row import parse_row
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import EMPTY, PLAIN_FIELDS, FilePosition, plain_name
from lazyshard_producer.sources import source
from lazyshard_producer.sources.source import Context, RowOrigin, Rows, Source, bad_row, too_long

BOM: Final = b"\xef\xbb\xbf"

_SLACK_BYTES: Final = len(BOM) + len(b"\r\n")  # bytes of a line in addition to the longest row
_HINT_BYTES: Final = 4096  # start of a line that is too long, kept for a hint in the message
_CARRIAGE_RETURN: Final = 13
"""A line that begins with a greater byte is not blank, and hardly any line begins with a smaller one."""


class LineSplitter:
    """Splits a text that arrives in blocks into lines. Never holds all of a line longer than `max_row_bytes`.

    `position` is the position after the lines returned so far, `pending` the number of bytes of the incomplete line. If
    the last line before the start had no newline, the text must continue with one, or it is refused.
    """

    def __init__(self, name: str, max_row_bytes: int, start: FilePosition | None = None) -> None:
        self.position, self.pending, self._held = start or FilePosition(), 0, bytearray()
        self._name, self._max_row_bytes = name, max_row_bytes
        self.read = self.to_reread = 0

    @property
    def reached(self) -> Any:
        """The position after all lines that were returned and the blank lines after them."""
        return self.position

    @property
    def fed(self) -> int:
        """Bytes of the text up to the end of the last block."""
        return self.position.offset + self.pending

    def feed(self, block: bytes) -> Rows:
        """Returns the rows of the lines that end in the next block; there may be none."""
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
        (before, number, blank, *_), name = self.position, self._name
        if before and complete <= self._max_row_bytes and min(map(itemgetter(0), lines)) > _CARRIAGE_RETURN:
            self.position = FilePosition(before + complete, number + len(lines), blank)
            # Computed on demand: for most blocks few positions are requested, or none.
            offsets = cache(lambda: list(accumulate(map(len, lines), initial=before)))
            rows = Rows(
                lines,
                lambda index: FilePosition(offsets()[index + 1], number + index + 1, blank),
                lambda index: RowOrigin(name, number + index + 1, offsets()[index]),
            )
        else:
            rows = self._examine(lines, first_bytes)
        self._hold(rest)
        return rows

    def finish(self, *, only_row: bool = False) -> Rows:
        """Returns the row of a last line without newline, if there is one.

        `only_row`: only if the line is a JSON object. No prefix of an object is one, so the line is complete.
        """
        if not self.pending or self.position.open_end:
            return Rows()
        if only_row:
            try:
                parse_row(bytes(self._held) if self.pending <= self._max_row_bytes else b"")
            except RowInvalid:
                return Rows()
        line, length = self._release()
        if self.position.offset == 0 and line == BOM:
            self.position = FilePosition(length)
            return Rows()
        return self._examine([line], length, open_end=True)

    def _close_line(self, block: bytes) -> bytes:
        """Consumes the missing newline of the last line; returns the rest of the block."""
        at, (held, _) = self.position, self._release()
        rest = held + block
        if rest in (b"", b"\r"):
            self._hold(rest)
            return b""
        if not rest.startswith((b"\n", b"\r\n")):
            where = f"the row of line {at.line} was read up to the end of the file at byte {at.offset}: "
            hint = ": the line was continued later"
            raise source.refuse_source(self._name, "a line end", repr(rest[:1]), hint, where=where)
        size = rest.index(b"\n") + 1
        self.position = FilePosition(at.offset + size, at.line, at.blank)
        return rest[size:]

    def _examine(self, lines: list[bytes], first_bytes: int, open_end: bool = False) -> Rows:
        """Returns the rows of lines; some lines may be blank, too long, or begin with a byte order mark."""
        (offset, number, blank, *_), most = self.position, self._max_row_bytes
        rows: list[bytes | RowInvalid] = []
        positions: list[FilePosition] = []
        places: list[RowOrigin] = []
        length = first_bytes
        for line in lines:
            if offset == 0:
                line = line.removeprefix(BOM)
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
            positions[-1] = self.position  # after the blank lines that follow the row
        return Rows(rows, positions.__getitem__, places.__getitem__)

    def _too_long(self, line: bytes) -> RowInvalid:
        reserved = ", and it contains NUL bytes: space that was reserved but never written, or torn by a crash?"
        other_ends = ", and it contains carriage returns as line ends: convert it with `tr '\\r' '\\n'`"
        start = line[:_HINT_BYTES]
        hint = reserved if b"\0" in start else other_ends if b"\r" in start else ""
        return bad_row(too_long(self._max_row_bytes, hint), byte=0)

    def _hold(self, part: bytes) -> None:
        """Keeps a part of a line, but only the start of a line that is too long, for the hint."""
        most = self._max_row_bytes + _SLACK_BYTES
        self._held += part if self.pending <= most else b""
        self.pending += len(part)
        if self.pending > most:
            del self._held[_HINT_BYTES:]

    def _release(self) -> tuple[bytes, int]:
        line, length = bytes(self._held), self.pending
        self._held, self.pending = bytearray(), 0
        return line, length


class TextPosition(NamedTuple):
    """A position between two lines of the text, and a function that returns the digest of the text up to a byte."""

    at: FilePosition
    digest: Callable[[int], str]

    def digested(self) -> FilePosition:
        """Returns the position with its digest, which takes the time to digest at most 1 MiB."""
        return self.at._replace(digest=self.digest(self.at.offset))


class DigestedText(LineSplitter):
    """Splits a text into lines after the part that earlier runs have read, whose digest is checked.

    `read` bytes were fed so far; `to_reread` bytes of that part are still expected. `remedy` is advice for errors. The
    positions of rows are of type `TextPosition`.
    """

    def __init__(self, name: str, max_row_bytes: int, position: FilePosition, remedy: str) -> None:
        super().__init__(name, max_row_bytes, position.place)
        self.to_reread = position.offset
        self._known = position._replace(digest=position.digest or EMPTY)
        self._remedy, self._digest = remedy, xxhash.xxh3_64()
        self._digest_at: Callable[[int], str] = lambda offset: self._known.digest

    @property
    def reached(self) -> TextPosition:
        """As in `LineSplitter`, with the function for digests."""
        return TextPosition(self.position, self._digest_at)

    def feed(self, block: bytes) -> Rows:
        """Returns the rows of the lines that end in this block; there may be none."""
        if self.to_reread:
            again, block = block[: self.to_reread], block[self.to_reread :]
            self._digest.update(again)
            self.read, self.to_reread = self.read + len(again), self.to_reread - len(again)
            if not self.to_reread and (actual := self._digest.hexdigest()) != self._known.digest:
                at, where = self._known, "not the text whose rows are published: "
                expected = f"XXH3 {at.digest} of the first {at.offset} bytes ({at.line} lines)"
                raise source.refuse_source(self._name, expected, actual, self._remedy, where=where)
        return self._advance(block, partial(super().feed, block))

    def finish(self, *, only_row: bool = False) -> Rows:
        """Returns the row of a last line without newline; see `LineSplitter.finish`."""
        if self.to_reread and not only_row:
            raise source.refuse_truncated(self._name, self._known.offset, self.read, self._remedy)
        return self._advance(b"", partial(super().finish, only_row=only_row))

    def _advance(self, block: bytes, give: Callable[[], Rows]) -> Rows:
        before, digest_before = self.reached
        state, begin = self._digest.copy(), self.read

        def digest(offset: int) -> str:
            at = state.copy()
            at.update(memoryview(block)[: offset - begin])
            return at.hexdigest()

        self._digest.update(block)
        self.read += len(block)
        rows = give()
        # A block in the middle of a line does not have the bytes for a digest up to the line's start.
        self._digest_at = digest_before if self.position == before else digest
        return rows._replace(position=lambda index: TextPosition(rows.position(index), digest))


class TextSource(Source):
    """A text that is fed to `_lines` block by block."""

    _lines: LineSplitter
    _finished = False

    def _begin(self, lines: LineSplitter, before: int = 0) -> None:
        self._lines, self._blank_before = lines, before
        self._reach()
        self.start = self.reached

    def _reach(self) -> None:
        self.reached, self.blank = self._lines.reached, self._blank_before + self._lines.position.blank

    @abstractmethod
    def _next(self) -> tuple[bytes, bool, bool]:
        """Returns the next block, whether the text ends with it, and whether its last line is then complete."""

    def read(self) -> Rows | None:
        """Returns the next rows, empty while the published part is read again or there is no input; None at the end."""
        rows: Rows | None = None
        # Bounded, so that the caller can check signals.
        for _ in range(16):
            if self._finished:
                break
            block, self._finished, complete = self._next()
            rows = self._lines.finish(only_row=not complete) if self._finished else self._lines.feed(block)
            self._reach()
            if rows.lines:
                return rows
            if not block:
                break
        return None if self._finished else rows

    def waits_for(self) -> str:
        """Returns in words what the source waits for, or why a restart takes long."""
        pipe = "standard input" if self.name == source.STANDARD_INPUT else f"the pipe {self.name}"
        what, done, left = pipe if self.live else self.name, self._lines.read, self._lines.to_reread
        if left:
            return f"the published part of {what} to be read again: {done} of {done + left} bytes so far"
        return f"rows on {what}" if self.live else ""


KIND: Final = "jsonl"


class JsonLinesFile(TextSource):
    """One plain file. Memory: two blocks of 1 MiB, and the current row."""

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name, self._path, self._block = plain_name(settings.path), settings.path, b""
        at = FilePosition.decode(position, self.name, PLAIN_FIELDS, KIND)
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(source.open_regular(self._path, text=True))
            self._fd: Final = self._file.fileno()
            source.check_ends(self._path, at, *source.committed_ends(self._fd, self._path, at.offset))
            self._file.seek(at.offset)
            stack.pop_all()
        self._begin(LineSplitter(self.name, context.max_row_bytes, at.place))

    def _reach(self) -> None:
        super()._reach()
        self.progress = self._lines.position.offset, os.fstat(self._fd).st_size

    def _next(self) -> tuple[bytes, bool, bool]:
        with source.refusing(self._path):
            block = self._file.read(source.PIECE_BYTES)
        if not block and (size := os.fstat(self._fd).st_size) < self._lines.fed:
            raise source.refuse_truncated(self._path, self._lines.fed, size)
        self._block = block or self._block
        return block, not block, True

    def entry(self, position: FilePosition) -> dict[str, Any]:
        """Returns the entry of a position, with the fingerprint of the part before it."""
        offset = position.offset
        head, tail = source.committed_ends(self._fd, self._path, offset)
        begin = self._lines.fed - len(self._block)
        read = self._block[: max(0, offset - begin)][-source.FINGERPRINT_BYTES :]
        if not tail.endswith(read):
            raise SourceRefused(f"{self._path}: changed in its first {offset} bytes while it was read", file=self._path)
        at = position._replace(head=digest(head), tail=digest(tail)) if offset else position
        return {"kind": KIND, "path": self.name} | at.encode(PLAIN_FIELDS)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
