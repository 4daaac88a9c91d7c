"""The lines of a plain file of a followed directory as they are read, block by block, each place with its fingerprint.

The fingerprint of a place is made of the bytes in hand: nothing is read again for it, so the file may be gone by then.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazyshard.errors import RowInvalid
from lazyshard_producer.following.state import FileState
from lazyshard_producer.sources.lines import LineMark, LineRows, LineSplitter
from lazyshard_producer.sources.source import Place
from lazyshard_producer.sources.source_file import FINGERPRINT_BYTES, digest


class Reading:
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
        self.fed = splitter.mark.offset
        self.before = before
        self.head = before if self.fed < FINGERPRINT_BYTES else b""
        self.identity = identity

    def feed(self, data: bytes) -> LineRows:
        """Returns the rows of the lines that end in this data."""
        if self.fed < FINGERPRINT_BYTES:
            self.head = (self.head + data)[:FINGERPRINT_BYTES]
        self.fed += len(data)
        return self.splitter.feed(data)


class PlainPiece:
    """Lines of a plain file; see `lazyshard_producer.following.piece.Piece`."""

    __slots__ = ("_head", "_rows", "_seen", "_text", "begin", "end", "lines")

    def __init__(self, rows: LineRows, begin: FileState, reading: Reading, text: bytes) -> None:
        self.lines: Sequence[bytes | RowInvalid] = rows.lines
        self._rows = rows
        self._text = text  # up to where the file was read
        self._seen = reading.fed
        self._head = reading.head
        self.begin = begin
        mark = reading.splitter.mark
        self.end = begin if mark == begin.mark else self._state(mark)

    def state(self, index: int) -> FileState:
        """Returns how far the file is read with the row of this index."""
        return self._state(self._rows.mark(index))

    def place(self, index: int) -> Place:
        """Returns where the row of this index begins."""
        return self._rows.place(index)

    def _state(self, mark: LineMark) -> FileState:
        stop = len(self._text) - (self._seen - mark.offset)
        tail = self._text[max(0, stop - FINGERPRINT_BYTES) : stop]
        known = self.begin.offset >= FINGERPRINT_BYTES
        return FileState(
            offset=mark.offset,
            line=mark.line,
            blank=mark.blank,
            open_end=mark.open_end,
            seen=self._seen,
            head=self.begin.head if known else digest(self._head[: mark.offset]),
            tail=digest(tail),
        )
