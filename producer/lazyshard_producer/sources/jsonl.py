"""JSON lines: the rows of one plain file, and where each of them is. See `lines` for what a line is.

The file may grow, until the run ends or after that: what follows is read then.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO, Final

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import FilePosition, plain_name
from lazyshard_producer.sources.lines import LineMark, LineRows, LineSplitter
from lazyshard_producer.sources.source import Context
from lazyshard_producer.sources.source_file import (
    FINGERPRINT_BYTES,
    check_committed,
    committed_ends,
    digest,
    open_source_file,
    read_at,
    refuse_os_error,
    refuse_truncated,
)

KIND: Final = "jsonl"

_BLOCK_BYTES: Final = 1 << 20


class JsonLinesFile:
    """A source of rows: one file. Memory: a block of 1 MiB twice, and the row in hand.

    Args:
        settings: its path.
        position: where to start; None for its start.
        context: the run.

    Raises:
        SourceRefused: the file cannot be read, or is not the one of the position.
    """

    live: Final = False

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        self._path = settings.path
        at = FilePosition(path=self.name) if position is None else FilePosition.decode(position, KIND)
        self._file: BinaryIO = open_source_file(self._path)
        try:
            check_committed(self._file, self._path, at)
            offset = at.offset + self._skipped(at)
            self._file.seek(offset)
        except BaseException:
            self._file.close()
            raise
        self.start = LineMark(offset, at.line, at.blank, at.open_end and offset == at.offset)
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
    def reached(self) -> LineMark:
        """Where it stands after all that was read."""
        return self._splitter.mark

    @property
    def blank(self) -> int:
        """Blank lines skipped."""
        return self._splitter.mark.blank

    @property
    def progress(self) -> tuple[int, int | None]:
        """(bytes read, bytes of the file)."""
        return self._splitter.mark.offset, os.fstat(self._file.fileno()).st_size

    def read(self) -> LineRows | None:
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
                if os.fstat(self._file.fileno()).st_size < self._block_end:
                    raise refuse_truncated(self._file, self._path, self._block_end)
                self._finished = True
                rows = self._splitter.finish()
            if rows.lines:
                return rows
        return None

    def wait(self, seconds: float) -> None:
        """Returns at once."""

    def waits_for(self) -> str:
        """Returns nothing: it does not wait."""
        return ""

    def position(self, mark: LineMark) -> dict[str, Any]:
        """Returns the position at a mark, with the fingerprint of all before it.

        Raises:
            SourceRefused: the file no longer holds what was read.
        """
        offset = mark.offset
        head, tail = committed_ends(self._file, self._path, offset)
        begin = self._block_end - len(self._block)
        read = self._block[: max(0, offset - begin)][-FINGERPRINT_BYTES:]
        if not tail.endswith(read):
            raise SourceRefused(f"{self._path}: changed in its first {offset} bytes while it was read", file=self._path)
        return FilePosition(
            path=self.name,
            offset=offset,
            line=mark.line,
            blank=mark.blank,
            head=digest(head) if offset else "",
            tail=digest(tail) if offset else "",
            open_end=mark.open_end,
        ).encode(KIND)

    def end(self) -> None:
        """Does nothing: it ends by itself."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
