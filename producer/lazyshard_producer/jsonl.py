"""JSON lines: the rows of one file, and where each of them is.

A byte order mark at the start of the file is dropped, blank lines (nothing but a line end) are skipped and counted, the
last line needs no newline. Whether a line is a row is for the writer to say.
"""

from __future__ import annotations

import os
from typing import BinaryIO, Final

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition
from lazyshard_producer.source import Place
from lazyshard_producer.source_file import (
    FINGERPRINT_BYTES,
    check_committed,
    committed_ends,
    digest,
    open_source_file,
    read_at,
    refuse_os_error,
    refuse_truncated,
)

_BOM: Final = b"\xef\xbb\xbf"

_LINE_END_BYTES: Final = 2


class JsonLinesFile:
    """A source of rows: one file. Memory: a read buffer of 1 MiB, and the row in hand.

    Args:
        path: the file.
        position: where to start.
        max_row_bytes: longest row, in bytes without its line end.

    Raises:
        SourceRefused: the file cannot be read, or is not the one of the position.
    """

    def __init__(self, path: str, position: FilePosition, max_row_bytes: int) -> None:
        self._path = path
        self._name = position.path
        self._max_row_bytes = max_row_bytes
        self._limit = max_row_bytes + _LINE_END_BYTES
        self._file: BinaryIO = open_source_file(path)
        try:
            check_committed(self._file, path, position)
            self._offset = position.offset + self._skipped(position)
            self._file.seek(self._offset)
        except BaseException:
            self._file.close()
            raise
        self._readline = self._file.readline
        self._start = self._offset
        self._line = position.line
        self._blank = position.blank
        self._duplicate = position.duplicate
        self._open_end = position.open_end and self._offset == position.offset
        self._last = b""

    def _skipped(self, position: FilePosition) -> int:
        """Returns how many bytes at the position are no part of any line."""
        if position.offset == 0:
            return len(_BOM) if read_at(self._file, self._path, len(_BOM), 0) == _BOM else 0
        if not position.open_end:
            return 0
        rest = read_at(self._file, self._path, 2, position.offset)
        return rest.index(b"\n") + 1 if b"\n" in rest else 0

    @property
    def offset(self) -> int:
        """Bytes read."""
        return self._offset

    @property
    def blank(self) -> int:
        """Blank lines skipped."""
        return self._blank

    @property
    def duplicate(self) -> int:
        """Rows that name a key twice, as counted by `count_duplicate`."""
        return self._duplicate

    @property
    def place(self) -> Place:
        """Where the line begins that was read last."""
        return Place(self._name, self._line, self._start)

    def read(self) -> bytes | None:
        """Returns the next line that is not blank, with its line end; None at the end of the file.

        Raises:
            RowInvalid: the line is too long.
            SourceRefused: the file was truncated meanwhile, or the filesystem failed.
        """
        while True:
            try:
                line = self._readline(self._limit)
            except OSError as cause:
                raise refuse_os_error(self._path, cause) from cause
            if not line:
                self._check_size()
                return None
            self._start = self._offset
            self._offset += len(line)
            self._line += 1
            self._last = line
            if len(line) > self._max_row_bytes and len(line.rstrip(b"\r\n")) > self._max_row_bytes:
                raise _too_long(self.place, line, self._max_row_bytes)
            if line.isspace() and not line.strip(b"\r\n"):
                self._blank += 1
                continue
            return line

    def position(self) -> FilePosition:
        """Returns the position after the line that was read last, with the fingerprint of all that was read.

        Raises:
            SourceRefused: the file no longer holds what was read.
        """
        head, tail = committed_ends(self._file, self._path, self._offset)
        if not tail.endswith(self._last[-FINGERPRINT_BYTES:]):
            raise SourceRefused(
                f"{self._path}: changed in its first {self._offset} bytes while it was read", file=self._path
            )
        return FilePosition(
            path=self._name,
            offset=self._offset,
            line=self._line,
            blank=self._blank,
            duplicate=self._duplicate,
            head=digest(head) if self._offset else "",
            tail=digest(tail) if self._offset else "",
            open_end=not self._last.endswith(b"\n") if self._last else self._open_end,
        )

    def count_duplicate(self) -> int:
        """Counts the row read last among those that name a key twice, and returns how many these are now."""
        self._duplicate += 1
        return self._duplicate

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _check_size(self) -> None:
        if os.fstat(self._file.fileno()).st_size < self._offset:
            raise refuse_truncated(self._file, self._path, self._offset)


def locate(error: RowInvalid, place: Place) -> RowInvalid:
    """Returns the error for a refused row with its place: file, line, and byte in the file."""
    byte = place.byte + (error.byte or 0)
    return RowInvalid(
        f"{place.file}:{place.line}: byte {byte} of the file: {error.reason}. Mend that line and run the same command "
        f"again; nothing is lost",
        reason=error.reason,
        file=place.file,
        line=place.line,
        byte=byte,
    )


def _too_long(place: Place, start: bytes, limit: int) -> RowInvalid:
    hint = ""
    if b"\0" in start[:FINGERPRINT_BYTES]:
        hint = ", and it holds NUL bytes: space that was reserved but never written, or torn by a crash?"
    elif b"\r" in start[:FINGERPRINT_BYTES]:
        hint = ", and it holds carriage returns as line ends: convert it with `tr '\\r' '\\n'`"
    reason = f"longer than the {limit} bytes of --max-row-bytes{hint}"
    return locate(RowInvalid(reason, reason=reason, byte=0), place)
