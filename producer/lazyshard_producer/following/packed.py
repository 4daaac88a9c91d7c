"""A compressed file of a followed directory. It is read when it is complete, from its start to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.following.state import FileState
from lazyshard_producer.sources.decompression import BLOCK_BYTES, CompressedText, open_text
from lazyshard_producer.sources.digested_text import DigestedText, TextMark, TextRows
from lazyshard_producer.sources.read_ahead import ReadAhead
from lazyshard_producer.sources.regular_file import open_regular
from lazyshard_producer.sources.source import Place

_AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""Compressed size from which on a thread is worth its start."""


class PackedPiece:
    """Lines of a compressed file; see `lazyshard_producer.following.piece.Piece`."""

    __slots__ = ("_rows", "begin", "end", "lines")

    def __init__(self, rows: TextRows, begin: FileState, end: FileState) -> None:
        self.lines: Sequence[bytes | RowInvalid] = rows.lines
        self._rows = rows
        self.begin = begin
        self.end = end

    def state(self, index: int) -> FileState:
        """Returns how far the file is read with the row of this index."""
        return _state(self._rows.mark(index))

    def place(self, index: int) -> Place:
        """Returns where the row of this index begins, in the text."""
        return self._rows.place(index)


class PackedFile:
    """A compressed file of a followed directory. Memory: some MiB while it is open.

    Args:
        path: the file.
        name: how to call it in places.
        max_row_bytes: longest row, in bytes without its line end.
        state: how far it has been read.

    Attributes:
        state, finished, at_end, diverged: see `lazyshard_producer.following.piece.FollowedFile`.
    """

    def __init__(self, path: str, name: str, max_row_bytes: int, state: FileState) -> None:
        self.state = state
        self.finished = False
        self.at_end = False
        self.diverged = False
        self.size = 0
        self._path = path
        remedy = "put the old file back, or choose another --out"
        self._lines = DigestedText(name, max_row_bytes, state.text, remedy)
        self._text: CompressedText | None = None
        self._left = b""

    def read(self, until: FileState | None = None) -> PackedPiece | None:
        """Returns the next lines; see `lazyshard_producer.following.piece.FollowedFile`."""
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
        begin, self.state = self.state, _state(self._lines.reached)
        if until is not None and self.state.offset >= until.offset:
            self.diverged = self.state != until
        return PackedPiece(rows, begin, self.state)

    def close(self) -> None:
        """Closes the file."""
        if isinstance(self._text, ReadAhead):
            self._text.close()
        if self._text is not None:
            self._file.close()
        self._text = None

    def _open(self) -> CompressedText:
        try:
            self._file = open_regular(self._path, links_out=False)
        except SourceRefused as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            raise
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            text = open_text(self._file, self._path)
        except BaseException:
            self._file.close()
            raise
        self._text = ReadAhead(text) if self.size > _AHEAD_BYTES else text
        return self._text


def _state(mark: TextMark) -> FileState:
    at = mark.position()
    return FileState(offset=at.offset, line=at.line, blank=at.blank, open_end=at.open_end, digest=at.digest)
