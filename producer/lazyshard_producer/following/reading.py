"""A file of a followed directory as it is read: a plain one while it grows, a compressed one when it is complete.

A plain file is opened anew for every read: another machine's writes are seen so (network filesystems look again at an
open), and any number of files can be unfinished at a time. Whenever it is gone on with, the 4 KiB before that place
must be what they were. This fingerprint of a place is made of the bytes in hand: nothing is read again for it, so the
file may be gone by then.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lazyshard.store.files import open_inside
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition, LinePosition
from lazyshard_producer.sources.decompression import BLOCK_BYTES, PackedText
from lazyshard_producer.sources.files import (
    FINGERPRINT_BYTES,
    digest,
    refuse_continued,
    refuse_os_error,
    refuse_source,
    refuse_truncated,
)
from lazyshard_producer.sources.lines import LineSplitter, is_row
from lazyshard_producer.sources.sequential import DigestedText, TextPosition
from lazyshard_producer.sources.source import Rows


class FollowedLines(NamedTuple):
    """Lines that follow each other in a file.

    Attributes:
        rows: the rows among them; there may be none.
        begin: how far the file was read before.
        end: how far it is read with these.
        of: returns how far it is read at a position that the rows give.
    """

    rows: Rows
    begin: FilePosition
    end: FilePosition
    of: Callable[[Any], FilePosition]

    def at(self, index: int) -> FilePosition:
        """Returns how far it is read with the row of this index, and with the blank lines behind the last one."""
        return self.of(self.rows.position(index))


class _Reading:
    """Where the reading of a file is, in the middle of a line perhaps.

    Attributes:
        splitter: cuts the lines.
        fed: bytes of the file that it has got.
        before: the last of them, 4 KiB at the most.
        head: the first of them, 4 KiB at the most; nothing if they are not at hand.
        identity: device and inode of the file.
    """

    __slots__ = ("before", "fed", "head", "identity", "splitter")

    def __init__(self, splitter: LineSplitter, before: bytes, identity: tuple[int, int]) -> None:
        self.splitter = splitter
        self.fed = splitter.position.offset
        self.before = before
        self.head = before if self.fed < FINGERPRINT_BYTES else b""
        self.identity = identity

    def feed(self, data: bytes) -> Rows:
        """Returns the rows of the lines that end in this data."""
        if self.fed < FINGERPRINT_BYTES:
            self.head = (self.head + data)[:FINGERPRINT_BYTES]
        self.fed += len(data)
        return self.splitter.feed(data)


class Completion(Enum):
    """Why a file is taken for complete, and so what holds for its last line and for growth."""

    SETTLING = "it has its name"
    """A last line without newline is left for now. Growth is refused."""
    FINAL = "it has its name or its marker, or the directory has its end marker"
    """A last line without newline is taken. Growth is refused."""
    IDLE = "it has not grown for a while"
    """A last line without newline is taken. If it grows, it was not complete."""
    ASKED = "the run is to end"
    """A last line without newline is taken if it is a row. What grows is read until an end is met."""


class PlainFile:
    """A plain file of a followed directory. Memory: nothing of the file between two reads, unless within a line.

    Args:
        max_row_bytes: longest row, in bytes without its line end.

    Attributes:
        completion: whether it is taken for complete.
        state: how far it is read.
        finished: it was read to its end.
        at_end: at the last read there was nothing more to be had for now.
        diverged: at the last read it was found not to be what an earlier run has read here. What was read of it by this
            run is what it holds now.
    """

    def __init__(self, path: str, name: str, max_row_bytes: int, state: FilePosition) -> None:
        self.state = state
        self.completion: Completion | None = None
        self.finished = False
        self.at_end = False
        self.diverged = False
        self._path = path
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._reading: _Reading | None = None
        self._looked = state.offset  # no newline from `state` up to here
        self._end: int | None = None  # of the file that was taken for complete

    @property
    def size(self) -> int:
        """Bytes that are read."""
        return self.state.offset

    @property
    def seen(self) -> int:
        """Bytes that are known to be there."""
        return max(self.state.seen, self._looked)

    def check(self) -> None:
        """Checks that the part that was read is still what it was, by its first and last bytes.

        Raises:
            FileNotFoundError: it is gone.
            SourceRefused: it was truncated or replaced, or cannot be read.
        """
        with self._opened() as fd:
            self._check_part(fd)

    def read(self, until: FilePosition | None = None) -> FollowedLines | None:
        """Returns the next lines, of about 1 MiB, up to a place that an earlier run came to; None where nothing is new.

        Raises:
            FileNotFoundError: it is gone.
            SourceRefused: it is not what it was, or cannot be read.
        """
        with self._opened() as fd:
            status = os.fstat(fd)
            identity = (status.st_dev, status.st_ino)
            if self._reading is not None and self._reading.identity != identity:
                self._reading = None
            if status.st_size < self.seen:
                self._shrink(status.st_size)
            if self._reading is None:
                if until is None and self.completion is None and not self._has_line_end(fd):
                    return None
                self._reading = self._begin(fd, identity)
            return self._read_on(fd, self._reading, until)

    def close(self) -> None:
        """Forgets what is known of the line in hand."""
        self._reading = None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            # A link was looked at when the name came, and may lead elsewhere since.
            fd = open_inside(Path(self._path))
        except FileNotFoundError:
            raise
        except OSError as cause:
            raise refuse_os_error(self._path, cause) from cause
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise refuse_source(self._path, "the plain file that it was", "something else")
            yield fd
        except OSError as cause:
            raise refuse_os_error(self._path, cause) from cause
        finally:
            os.close(fd)

    def _shrink(self, size: int) -> None:
        """Takes notice that some of what was seen is not there any more, behind the lines that were taken.

        What is missing of those lines themselves is found where the part that was read is checked.
        """
        if self._end is not None:
            raise refuse_truncated(self._path, self._end, size)
        self._reading = None
        self._looked = self.state.offset
        self.state = replace(self.state, seen=max(size, self.state.offset))

    def _has_line_end(self, fd: int) -> bool:
        """Looks at what was appended, 1 MiB at the most; returns whether a line may be complete now."""
        data = os.pread(fd, BLOCK_BYTES, self._looked)
        if not data and os.fstat(fd).st_size < self._looked:
            self._check_part(fd)
            self._looked = self.state.offset  # what was cut is a line that nobody has seen
        self.at_end = len(data) < BLOCK_BYTES
        if b"\n" in data:
            return True
        self._looked += len(data)
        return False

    def _begin(self, fd: int, identity: tuple[int, int]) -> _Reading:
        """Returns a reading from `state` on."""
        before = self._check_part(fd)
        if self.state.open_end:
            before = self._close_line(fd, before)
        return _Reading(LineSplitter(self._name, self._max_row_bytes, self.state.lines), before, identity)

    def _read_on(self, fd: int, reading: _Reading, until: FilePosition | None) -> FollowedLines | None:
        wanted = BLOCK_BYTES if until is None else min(BLOCK_BYTES, until.offset - reading.fed)
        data = os.pread(fd, wanted, reading.fed)
        self.at_end = until is None and len(data) < wanted
        if until is not None and len(data) < wanted:
            self.diverged = True
        if data and self._end is not None:
            self._grow(reading.fed + len(data))
        rows = reading.feed(data) if data else self._last_line(reading, until)
        text = reading.before + data
        of = partial(_plain_position, self.state, text, reading.fed, reading.head)
        at = reading.splitter.position
        piece = FollowedLines(rows, self.state, self.state if at == self.state.lines else of(at), of)
        reading.before = text[-FINGERPRINT_BYTES:]
        self.state = piece.end
        self._looked = reading.fed
        if until is not None:
            self._arrive(until)
        elif self.at_end:
            self._meet_end(reading, bool(data))
        return piece

    def _last_line(self, reading: _Reading, until: FilePosition | None) -> Rows:
        """Returns the row of a last line without newline, if it is to be taken."""
        if until is not None:
            # Of another text it would be a line that is cut.
            taken = until.open_end and not self.diverged and digest(reading.before) == until.tail
            self.diverged = not taken
        else:
            taken = self.completion in (Completion.FINAL, Completion.IDLE)
        if taken:
            return reading.splitter.finish()
        return reading.splitter.finish_if(is_row if self.completion is Completion.ASKED else _never)

    def _meet_end(self, reading: _Reading, more: bool) -> None:
        """Takes notice that there is nothing behind what was read; `more`: the last look still found something."""
        if self.completion is None:
            self._reading = None
            return
        self._end = reading.fed
        settling = self.completion is Completion.SETTLING
        if not reading.splitter.pending or not (more or settling):
            self.finished = True
            self._reading = None
        self.at_end = self.finished or settling

    def _arrive(self, until: FilePosition) -> None:
        """Looks, at the place where an earlier run was, whether it was there."""
        if self.state.offset < until.offset:
            return
        self._reading = None
        self.diverged = self.state.lines != until.lines or self.state.tail != until.tail

    def _grow(self, size: int) -> None:
        """Takes notice that a file that was taken for complete goes on."""
        if self.completion in (Completion.SETTLING, Completion.FINAL):
            raise refuse_growth(self._path, self._end or 0, size)
        if self.completion is Completion.IDLE:
            self.completion = None
        self._end = None

    def _check_part(self, fd: int) -> bytes:
        """Checks the part that was read; returns its last bytes, 4 KiB at the most."""
        state = self.state
        count = min(state.offset, FINGERPRINT_BYTES)
        tail = os.pread(fd, count, state.offset - count)
        if len(tail) < count:
            raise refuse_truncated(self._path, state.offset, os.fstat(fd).st_size)
        if count:
            head = tail if state.offset == count else os.pread(fd, count, 0)
            if not state.head:
                self.state = replace(state, head=digest(head))
            elif digest(head) != state.head:
                raise self._changed(state, "first", state.head, digest(head))
            if digest(tail) != state.tail:
                raise self._changed(state, "last", state.tail, digest(tail))
        return tail

    def _close_line(self, fd: int, before: bytes) -> bytes:
        """Moves behind the newline that the last line lacked; returns what is before that then."""
        state = self.state
        rest = os.pread(fd, 2, state.offset)
        newline = next((end for end in (b"\n", b"\r\n") if rest.startswith(end)), b"")
        if rest not in (b"", b"\r") and not newline:
            raise refuse_continued(self._path, state.lines, rest)
        before = (before + newline)[-FINGERPRINT_BYTES:]
        if newline:
            offset = state.offset + len(newline)
            head = digest(before) if offset <= FINGERPRINT_BYTES else state.head
            self.state = replace(state, offset=offset, open_end=False, tail=digest(before), head=head)
        return before

    def _changed(self, state: FilePosition, where: str, expected: str, actual: str) -> SourceRefused:
        count = min(state.offset, FINGERPRINT_BYTES)
        part = f"the {where} {count} bytes of the part read ({state.offset} bytes, {state.line} lines)"
        hint = "; put the old file back (appending is fine)"
        return refuse_source(self._path, f"XXH3 {expected} of {part}", actual, hint)


def refuse_growth(path: str, expected: int, actual: int) -> SourceRefused:
    """Returns the error for a file that was complete, of `expected` bytes, and has now `actual` bytes."""
    return SourceRefused(
        f"{path}: taken for complete at {expected} bytes, and now it has {actual}: it was still being written. Have "
        f"files written under another name, a hidden one for instance, and renamed when they are complete (or, with "
        f"markers, the marker made last); to take the rest of this one, start again with --finished-by idle",
        file=path,
        expected=f"{expected} bytes",
        actual=f"{actual} bytes",
    )


def _never(line: bytes) -> bool:
    return False


class PackedFile:
    """A compressed file of a followed directory. Memory: some MiB while it is open.

    Args:
        max_row_bytes: longest row, in bytes without its line end.

    Attributes:
        state, finished, at_end, diverged: see `PlainFile`.
    """

    def __init__(self, path: str, name: str, max_row_bytes: int, state: FilePosition) -> None:
        self.state = state
        self.finished = False
        self.at_end = False
        self.diverged = False
        self.size = 0
        self._path = path
        remedy = "put the old file back, or choose another --out"
        self._lines = DigestedText(name, max_row_bytes, state, remedy)
        self._text: PackedText | None = None
        self._left = b""

    def read(self, until: FilePosition | None = None) -> FollowedLines | None:
        """Returns the next lines; see `PlainFile.read`."""
        text = self._open() if self._text is None else self._text
        left = self._left or text.read()
        room = len(left) if until is None else max(0, until.offset - self._lines.read)
        block, self._left = left[:room], left[room:]
        if block:
            rows = self._lines.feed(block)
        elif until is None or (until.open_end and not left and self._lines.read == until.offset):
            rows = self._lines.finish()
            self.finished = until is None
        else:
            rows = self._lines.feed(b"")
            self.diverged = True
        begin, self.state = self.state, self._lines.reached.digested()
        if until is not None and self.state.offset >= until.offset:
            self.diverged = self.state != until
        return FollowedLines(rows, begin, self.state, TextPosition.digested)

    def close(self) -> None:
        """Closes the file."""
        if self._text is not None:
            self._text.close()
        self._text = None

    def _open(self) -> PackedText:
        try:
            self._text = PackedText(self._path, links_out=False)
        except SourceRefused as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            raise
        self.size = self._text.size
        return self._text


def _plain_position(begin: FilePosition, text: bytes, seen: int, head: bytes, at: LinePosition) -> FilePosition:
    """Returns how far a file is read at a place in a text that ends where the file was read to, at byte `seen`."""
    stop = len(text) - (seen - at.offset)
    known = begin.offset >= FINGERPRINT_BYTES
    return FilePosition(
        **at._asdict(),
        seen=seen,
        head=begin.head if known else digest(head[: at.offset]),
        tail=digest(text[max(0, stop - FINGERPRINT_BYTES) : stop]),
    )
