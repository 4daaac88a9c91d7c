"""JSON lines in a file compressed by gzip or zstd. See `decompression` for what is refused, `lines` for what a line is.

A restart decompresses the part that is published once more and compares its digest, which costs as long as the
decompressor takes; nothing cheaper would know the file again. Members or frames may be appended between two runs, and
the file may be compressed anew: what counts is the text.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO, Final

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.position import PACKED_SIZE, plain_name, refuse_position
from lazyshard_producer.sources.decompression import BLOCK_BYTES, CompressedText, ZstdText, open_text
from lazyshard_producer.sources.digested_text import DigestedText, TextMark, TextPosition, TextRows
from lazyshard_producer.sources.read_ahead import ReadAhead
from lazyshard_producer.sources.regular_file import open_regular
from lazyshard_producer.sources.source import Context

GZIP: Final = "jsonl.gz"
ZSTD: Final = "jsonl.zst"

_BLOCKS: Final = 16
"""So many blocks are looked at for a row at a time: signals are looked at in between."""

_AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""Compressed size from which on a thread is worth its start."""


class CompressedJsonLines:
    """A source of rows: one compressed file. Memory: blocks of 1 MiB that are read ahead, and the row in hand.

    Args:
        settings: its path.
        position: where to start; None for its start.
        context: the run.

    Raises:
        SourceRefused: the file cannot be read.
        ExtraMissing: the package for zstd is not installed.

    That the text up to the position is still what it was shows only when it has been read: `read` raises then, before
    it gives any row.
    """

    live: Final = False

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        self._path = settings.path
        at = TextPosition() if position is None else TextPosition.decode(_known_kind(position, self.name), self.name)
        remedy = "put the old file back (appending is fine), or choose another --out"
        self._lines = DigestedText(self.name, context.max_row_bytes, at, remedy)
        self._file: BinaryIO = open_regular(self._path)
        try:
            self._packed = open_text(self._file, self._path)
            self._bytes = os.fstat(self._file.fileno()).st_size
        except BaseException:
            self._file.close()
            raise
        self._kind = ZSTD if isinstance(self._packed, ZstdText) else GZIP
        self._text: CompressedText | None = None
        self._finished = False

    @property
    def start(self) -> TextMark:
        """Where it stood when it was opened."""
        return self._lines.start

    @property
    def reached(self) -> TextMark:
        """Where it stands after all that was given."""
        return self._lines.reached

    @property
    def blank(self) -> int:
        """Blank lines skipped so far."""
        return self._lines.reached.lines.blank

    @property
    def progress(self) -> tuple[int, int | None]:
        """(compressed bytes read, compressed bytes there are)."""
        return self._packed.consumed, self._bytes

    def read(self) -> TextRows | None:
        """Returns the next rows; none while the published part is read again; None at the end.

        Raises:
            SourceRefused: the file is cut, damaged, or not the one of the position.
        """
        if self._text is None:
            self._text = ReadAhead(self._packed) if self._bytes > _AHEAD_BYTES else self._packed
        for _ in range(_BLOCKS):
            if self._finished:
                return None
            block = self._text.read()
            self._finished = not block
            rows = self._lines.feed(block) if block else self._lines.finish()
            if rows.lines:
                return rows
        return rows

    def wait(self, seconds: float) -> None:
        """Returns at once."""

    def waits_for(self) -> str:
        """Returns in words what takes long at a restart."""
        done, behind = self._lines.read, self._lines.behind
        return f"the part of {self.name} that is published: {done} of {done + behind} bytes" if behind else ""

    def position(self, mark: TextMark) -> dict[str, Any]:
        """Returns the position at a mark."""
        entry = {"kind": self._kind, "path": self.name} | mark.position().encode()
        return entry | {PACKED_SIZE: self._packed.consumed} if self._finished and mark == self.reached else entry

    def end(self) -> None:
        """Does nothing: it ends by itself."""

    def close(self) -> None:
        """Closes the file."""
        if isinstance(self._text, ReadAhead):
            self._text.close()
        self._file.close()


def _known_kind(position: dict[str, Any], name: str) -> dict[str, Any]:
    kind = position.get("kind")
    if kind not in (GZIP, ZSTD):
        raise refuse_position(name, f"a source of kind {GZIP!r} or {ZSTD!r}", repr(kind)[:120])
    return position
