"""A file of a followed directory as it is read: a plain one while it grows, a compressed one when it is complete.

A plain file is opened anew for every read: another machine's writes are seen so (network filesystems look again at an
open), and any number of files can be unfinished at a time. Whenever it is gone on with, the 4 KiB before that place
must be what they were; this fingerprint is made of the bytes in hand, so the file may be gone by then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition, plain_name
from lazyshard_producer.sources import files
from lazyshard_producer.sources.files import FINGERPRINT_BYTES, digest
from lazyshard_producer.sources.lines import DigestedText, LineSplitter
from lazyshard_producer.sources.sequential import PackedText
from lazyshard_producer.sources.source import PIECE_BYTES, Rows


class FollowedLines(NamedTuple):
    """Lines that follow each other in a file, and how far it is read before and with these.

    Positions of the rows are how far it is read with each, and with the blank lines behind the last one.
    """

    rows: Rows
    begin: FilePosition
    end: FilePosition


class Completion(Enum):
    """Why a file is taken for complete, and so what holds for its last line and for growth."""

    # A last line without newline is left for now (SETTLING), taken, or taken if it is a row (ASKED). Growth is refused
    # (SETTLING, FINAL), shows that the file was not complete (IDLE), or is read until an end is met (ASKED).
    SETTLING = "it has its name"
    FINAL = "it has its name or its marker, or the directory has its end marker"
    IDLE = "it has not grown for a while"
    ASKED = "the run is to end"


class _FollowedFile:
    """A file of a followed directory.

    Attributes:
        state: how far it is read.
        completion: whether it is taken for complete.
        begun: it is being read; not a compressed file that is not complete.
        finished: it was read to its end.
        at_end: at the last read there was nothing more to be had for now.
        diverged: it was found not to be what an earlier run has read here; it is read as it is now.
        size, still_since: its size at the last look, and when (monotonic) that was found first.
        in_turn: it waits for its turn to be read.
    """

    def __init__(self, path: str, max_row_bytes: int, state: FilePosition, now: float = 0.0) -> None:
        self.state = state
        self.completion: Completion | None = None
        self.begun = True
        self.finished = self.at_end = self.diverged = self.in_turn = False
        self.size, self.still_since = state.seen, now
        self._path, self._max_row_bytes = path, max_row_bytes


class PlainFile(_FollowedFile):
    """A plain file. Memory: nothing of the file between two reads, unless within a line."""

    def __init__(self, path: str, max_row_bytes: int, state: FilePosition, now: float = 0.0) -> None:
        super().__init__(path, max_row_bytes, state, now)
        self._identity: tuple[int, int] | None = None  # device and inode
        self._splitter: LineSplitter | None = None  # in the middle of a line perhaps
        # The first bytes of the file, if they are at hand, and the last that the splitter was fed: 4 KiB at the most.
        self._head = self._before = b""
        self._looked = state.offset  # no newline from `state` up to here
        self._end: int | None = None  # of the file that was taken for complete

    @property
    def seen(self) -> int:
        """Bytes that are known to be there."""
        return max(self.state.seen, self._looked)

    def check(self) -> None:
        """Checks that the part that was read is still what it was. Raises SourceRefused as `read`."""
        with self._opened() as fd:
            self._check_part(fd)

    def read(self, until: FilePosition | None = None) -> FollowedLines | None:
        """Returns the next lines, of about 1 MiB, up to where an earlier run came; None where nothing is new.

        Where the file is gone, the cause of the error is FileNotFoundError.
        """
        with self._opened() as fd:
            status = os.fstat(fd)
            if self._identity != (identity := (status.st_dev, status.st_ino)):
                self._splitter, self._identity = None, identity
            if status.st_size < self.seen:
                self._shrink(status.st_size)
            if self._splitter is None:
                if until is None and self.completion is None and not self._has_line_end(fd):
                    return None
                self._before = self._check_part(fd)
                self._head = self._before if self.state.offset < FINGERPRINT_BYTES else b""
                self._splitter = LineSplitter(plain_name(self._path), self._max_row_bytes, self.state.place)
            return self._read_on(fd, self._splitter, until)

    def close(self) -> None:
        """Forgets what is known of the line in hand."""
        self._splitter = None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        # A link was looked at when the name came, and may lead elsewhere since.
        file = files.open_regular(self._path, 0, links_out=False, expected="the plain file that it was")
        with file, files.refusing(self._path):
            yield file.fileno()

    def _shrink(self, size: int) -> None:
        """Takes notice that some of what was seen behind the lines that were taken is not there any more."""
        if self._end is not None:
            raise files.refuse_truncated(self._path, self._end, size)
        self._splitter = None
        self._looked = self.state.offset
        self.state = self.state._replace(seen=max(size, self.state.offset))

    def _has_line_end(self, fd: int) -> bool:
        """Looks at what was appended, 1 MiB at the most; returns whether a line may be complete now."""
        data = os.pread(fd, PIECE_BYTES, self._looked)
        if not data and os.fstat(fd).st_size < self._looked:
            self._check_part(fd)
            self._looked = self.state.offset  # what was cut is a line that nobody has seen
        self.at_end = len(data) < PIECE_BYTES
        if b"\n" in data:
            return True
        self._looked += len(data)
        return False

    def _read_on(self, fd: int, splitter: LineSplitter, until: FilePosition | None) -> FollowedLines:
        fed = splitter.fed
        wanted = PIECE_BYTES if until is None else min(PIECE_BYTES, until.offset - fed)
        data = os.pread(fd, wanted, fed)
        self.at_end = until is None and len(data) < wanted
        if until is not None and len(data) < wanted:
            self.diverged = True
        if data and self._end is not None:
            self._grow(fed + len(data))
        if fed < FINGERPRINT_BYTES:
            self._head = (self._head + data)[:FINGERPRINT_BYTES]
        rows = splitter.feed(data) if data else self._last_line(splitter, until)
        begin, text, fed, head = self.state, self._before + data, fed + len(data), self._head

        def of(at: FilePosition) -> FilePosition:
            """Returns how far the file is read at a place in the text, which ends where it was read to."""
            stop = len(text) - (fed - at.offset)
            known = begin.head if begin.offset >= FINGERPRINT_BYTES else digest(head[: at.offset])
            return at._replace(seen=fed, head=known, tail=digest(text[max(0, stop - FINGERPRINT_BYTES) : stop]))

        at = splitter.position
        self._before, self._looked = text[-FINGERPRINT_BYTES:], fed
        self.state = begin if at == begin.place else of(at)
        if until is not None:
            if self.state.offset >= until.offset:
                # Where an earlier run was: whether it was there.
                self._splitter = None
                self.diverged = self.state.place != until.place or self.state.tail != until.tail
        elif self.at_end:
            self._meet_end(splitter, bool(data))
        return FollowedLines(rows._replace(position=lambda index: of(rows.position(index))), begin, self.state)

    def _last_line(self, splitter: LineSplitter, until: FilePosition | None) -> Rows:
        """Returns the row of a last line without newline, if it is to be taken."""
        taken = self.completion in (Completion.FINAL, Completion.IDLE)
        if until is not None:
            # Of another text it would be a line that is cut.
            taken = until.open_end and not self.diverged and digest(self._before) == until.tail
            self.diverged = not taken
        if taken or self.completion is Completion.ASKED:
            return splitter.finish(only_row=not taken)
        return Rows()

    def _meet_end(self, splitter: LineSplitter, more: bool) -> None:
        """Takes notice that there is nothing behind what was read; `more`: the last look still found something."""
        if self.completion is None:
            self._splitter = None
            return
        self._end, settling = splitter.fed, self.completion is Completion.SETTLING
        self.finished = not splitter.pending or not (more or settling)
        if self.finished:
            self._splitter = None
        self.at_end = self.finished or settling

    def _grow(self, size: int) -> None:
        if self.completion in (Completion.SETTLING, Completion.FINAL):
            raise refuse_growth(self._path, self._end or 0, size)
        if self.completion is Completion.IDLE:
            self.completion = None
        self._end = None

    def _check_part(self, fd: int) -> bytes:
        """Checks the part that was read; returns its last bytes, 4 KiB at the most."""
        head, tail = files.committed_ends(fd, self._path, self.state.offset)
        if head and not self.state.head:
            self.state = self.state._replace(head=digest(head))
        files.check_ends(self._path, self.state, head, tail)
        return tail


def refuse_growth(path: str, expected: int, actual: int) -> SourceRefused:
    """Returns the error for a file that was complete, of `expected` bytes, and has now `actual` bytes."""
    hint = (
        ": it was still being written. Have files written under another name, a hidden one for instance, and renamed "
        "when they are complete (or, with markers, the marker made last); to take the rest of this one, start again "
        "with --finished-by idle"
    )
    return files.refuse_source(path, f"{expected} bytes", f"{actual} bytes", hint, where="taken for complete: ")


class PackedFile(_FollowedFile):
    """A compressed file. Memory: some MiB while it is open."""

    def __init__(self, path: str, max_row_bytes: int, state: FilePosition, now: float = 0.0) -> None:
        super().__init__(path, max_row_bytes, state, now)
        remedy = "; put the old file back, or choose another --out"
        self._lines = DigestedText(plain_name(path), max_row_bytes, state, remedy)
        self._text: PackedText | None = None
        self._left = b""
        self.end = 0  # of the file when it was opened

    def read(self, until: FilePosition | None = None) -> FollowedLines | None:
        """Returns the next lines; see `PlainFile.read`."""
        if self._text is None:
            self._text = PackedText(self._path, links_out=False)
            self.end = self._text.size
        left = self._left or self._text.read()
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
        return FollowedLines(rows._replace(position=lambda index: rows.position(index).digested()), begin, self.state)

    def close(self) -> None:
        """Closes the file."""
        if self._text is not None:
            self._text.close()
        self._text = None
