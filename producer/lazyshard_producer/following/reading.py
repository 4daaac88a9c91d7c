"""Reads a file of a followed directory: a plain file while it grows, a compressed file once it is complete.

A plain file is reopened for every read, to see the writes of other machines. Whenever reading continues, the preceding
4 KiB must be unchanged. The fingerprint is computed from bytes in memory, so the file may have been deleted by then.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Final, NamedTuple

from xxhash import xxh3_64_hexdigest as digest

from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition, plain_name
from lazyshard_producer.sources import source
from lazyshard_producer.sources.lines import DigestedText, LineSplitter
from lazyshard_producer.sources.sequential import PackedText
from lazyshard_producer.sources.source import FINGERPRINT_BYTES, PIECE_BYTES, Rows


class FollowedLines(NamedTuple):
    """Lines of a file, and its positions before and after them. `rows.position` gives the position after each row."""

    rows: Rows
    begin: FilePosition
    end: FilePosition


class Completion(Enum):
    """Why a file counts as complete, which decides about its last line and about growth."""

    # A last line without newline is postponed (SETTLING), read (FINAL, IDLE), or read if it is a row (REQUESTED).
    # Growth is refused (SETTLING, FINAL), means that the file was not complete (IDLE), or is read up to the end
    # (REQUESTED).
    SETTLING = "the file has its name"
    FINAL = "the file has its name or its marker, or the directory has its end marker"
    IDLE = "the file has not grown for a while"
    REQUESTED = "the run is to end"


class _FollowedFile:
    """A file of a followed directory, read up to `state`."""

    def __init__(self, path: str, max_row_bytes: int, state: FilePosition, now: float = 0.0) -> None:
        self.state = state
        self.completion: Completion | None = None  # None: not complete
        self.begun = True  # being read; False for a compressed file that is not complete
        self.finished = False  # read to its end
        self.at_end = False  # the last read reached the present end
        self.diverged = False  # differs from what an earlier run has read here; the present contents are read
        # at the last scan, and the first (monotonic) time of that size
        self.size, self.unchanged_since = state.seen, now
        self._path, self._max_row_bytes = path, max_row_bytes


class PlainFile(_FollowedFile):
    """A plain file. Between two reads no part of it is in memory, except of an incomplete line."""

    def __init__(self, path: str, max_row_bytes: int, state: FilePosition, now: float = 0.0) -> None:
        super().__init__(path, max_row_bytes, state, now)
        self._identity: tuple[int, int] | None = None  # device and inode
        self._splitter: LineSplitter | None = None  # may be in the middle of a line
        # The first bytes of the file, if known, and the last bytes that were fed to the splitter: at most 4 KiB each.
        self._head = self._before = b""
        self._scanned = state.offset  # no newline between `state` and here
        self._end: int | None = None  # size at which the file was considered complete

    @property
    def seen(self) -> int:
        """The known size in bytes."""
        return max(self.state.seen, self._scanned)

    @property
    def end(self) -> int:
        """The size of a file that was read to its end."""
        return self.state.offset

    def check(self) -> None:
        """Checks that the part that was read has not changed. Raises SourceRefused as `read`."""
        with source.open_regular(self._path, 0, links_out=False) as file, source.refusing(self._path):
            self._check_part(file.fileno())

    def read(self, until: FilePosition | None = None) -> FollowedLines | None:
        """Returns the next lines, about 1 MiB, at most up to position `until` of an earlier run; None if none are new.

        Raises SourceRefused. If the file is gone, the cause of the error is FileNotFoundError.
        """
        # A link was checked when its name appeared, and its target may have changed since.
        with source.open_regular(self._path, 0, links_out=False) as file, source.refusing(self._path):
            fd = file.fileno()
            status = os.fstat(fd)
            if self._identity != (identity := (status.st_dev, status.st_ino)):
                self._splitter, self._identity = None, identity
            if status.st_size < self.seen:
                # The file was truncated after the lines that were read.
                if self._end is not None:
                    raise source.refuse_truncated(self._path, self._end, status.st_size)
                self._splitter, self._scanned = None, self.state.offset
                self.state = self.state._replace(seen=max(status.st_size, self.state.offset))
            if self._splitter is None:
                if until is None and self.completion is None and not self._has_line_end(fd):
                    return None
                self._before = self._check_part(fd)
                self._head = self._before if self.state.offset < FINGERPRINT_BYTES else b""
                self._splitter = LineSplitter(plain_name(self._path), self._max_row_bytes, self.state.place)
            return self._read_on(fd, self._splitter, until)

    def close(self) -> None:
        """Discards the incomplete line."""
        self._splitter = None

    def _has_line_end(self, fd: int) -> bool:
        """Reads at most 1 MiB of appended bytes; returns whether a line may be complete now."""
        data = os.pread(fd, PIECE_BYTES, self._scanned)
        if not data and os.fstat(fd).st_size < self._scanned:
            self._check_part(fd)
            self._scanned = self.state.offset  # only an unread line was truncated
        self.at_end, found = len(data) < PIECE_BYTES, b"\n" in data
        self._scanned += 0 if found else len(data)
        return found

    def _read_on(self, fd: int, splitter: LineSplitter, until: FilePosition | None) -> FollowedLines:
        fed = splitter.fed
        wanted = PIECE_BYTES if until is None else min(PIECE_BYTES, until.offset - fed)
        short = len(data := os.pread(fd, wanted, fed)) < wanted
        self.at_end, self.diverged = until is None and short, self.diverged or (until is not None and short)
        if data and self._end is not None:
            if self.completion in (Completion.SETTLING, Completion.FINAL):
                raise refuse_growth(self._path, self._end, fed + len(data))
            self._end, self.completion = None, None if self.completion is Completion.IDLE else self.completion
        if fed < FINGERPRINT_BYTES:
            self._head = (self._head + data)[:FINGERPRINT_BYTES]
        rows = splitter.feed(data) if data else self._last_line(splitter, until)
        begin, text, fed, head = self.state, self._before + data, fed + len(data), self._head

        def of(at: FilePosition) -> FilePosition:
            """Returns the full position for a place in `text`."""
            stop = len(text) - (fed - at.offset)
            known = begin.head if begin.offset >= FINGERPRINT_BYTES else digest(head[: at.offset])
            return at._replace(seen=fed, head=known, tail=digest(text[max(0, stop - FINGERPRINT_BYTES) : stop]))

        at = splitter.position
        self._before, self._scanned = text[-FINGERPRINT_BYTES:], fed
        self.state = begin if at == begin.place else of(at)
        if until is not None:
            if self.state.offset >= until.offset:
                # The position of an earlier run is reached: compare with it.
                self._splitter = None
                self.diverged = self.state.place != until.place or self.state.tail != until.tail
        elif self.at_end and self.completion is None:
            self._splitter = None
        elif self.at_end:
            # The end is reached. If this read still returned data, the next one decides.
            self._end, settling = fed, self.completion is Completion.SETTLING
            self.finished = not splitter.pending or not (data or settling)
            self._splitter = None if self.finished else splitter
            self.at_end = self.finished or settling
        return FollowedLines(rows._replace(position=lambda index: of(rows.position(index))), begin, self.state)

    def _last_line(self, splitter: LineSplitter, until: FilePosition | None) -> Rows:
        """Returns the row of a last line without newline, if it is to be read."""
        taken = self.completion in (Completion.FINAL, Completion.IDLE)
        if until is not None:
            # In changed text this would be a truncated line.
            taken = until.open_end and not self.diverged and digest(self._before) == until.tail
            self.diverged = not taken
        requested = self.completion is Completion.REQUESTED
        return splitter.finish(only_row=not taken) if taken or requested else Rows()

    def _check_part(self, fd: int) -> bytes:
        """Checks the part that was read; returns its last bytes, at most 4 KiB."""
        head, tail = source.committed_ends(fd, self._path, self.state.offset)
        if head and not self.state.head:
            self.state = self.state._replace(head=digest(head))
        source.check_ends(self._path, self.state, head, tail)
        return tail


def refuse_growth(path: str, expected: int, actual: int) -> SourceRefused:
    """Returns the error for a file that was complete with `expected` bytes and now has `actual` bytes."""
    hint = (
        ": it was still being written. Write files under another name, such as a hidden one, and rename them when they "
        "are complete (with markers, create the marker last); to read the rest of this one, start again with "
        "--finished-by idle"
    )
    return source.refuse_source(path, f"{expected} bytes", f"{actual} bytes", hint, where="was considered complete: ")


class PackedFile(_FollowedFile):
    """A compressed file. Memory: some MiB while it is open."""

    seen: Final = 0

    def __init__(self, path: str, max_row_bytes: int, state: FilePosition, now: float = 0.0) -> None:
        super().__init__(path, max_row_bytes, state, now)
        remedy = "; restore the old file, or choose another --out"
        self._lines = DigestedText(plain_name(path), max_row_bytes, state, remedy)
        self._text: PackedText | None = None
        self._left = b""

    @property
    def end(self) -> int:
        """The file's size when it was opened."""
        return 0 if self._text is None else self._text.size

    def read(self, until: FilePosition | None = None) -> FollowedLines | None:
        """Returns the next lines; see `PlainFile.read`."""
        self._text = self._text or PackedText(self._path, links_out=False)
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
