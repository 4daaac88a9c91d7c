"""JSON lines in a text that can only be read from its start, such as that of a file compressed by gzip or zstd.

To go on from a position the text is read up to there once more, its digest compared, and the lines after it are given;
nothing cheaper would know it again. Nothing is kept of the text but the block in hand, and what positions still refer
to. Members or frames may be appended to a compressed file between two runs, and it may be compressed anew: what counts
is the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import xxhash

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import EMPTY, PACKED_SIZE, TEXT_FIELDS, FilePosition, LinePosition, plain_name
from lazyshard_producer.sources.decompression import PackedText
from lazyshard_producer.sources.lines import LineSplitter
from lazyshard_producer.sources.source import Context, Rows, Source


class _Block(NamedTuple):
    """A part of the text, with the digest's state before it."""

    begin: int
    data: bytes
    before: xxhash.xxh3_64


class TextPosition(NamedTuple):
    """Where the text stands between two lines, and what its digest there can be made of.

    Attributes:
        lines: where it stands.
        source: a block that holds that place, or the digest itself.
    """

    lines: LinePosition
    source: _Block | str

    def digested(self) -> FilePosition:
        """Returns the position with the digest: costs one of 1 MiB at the most."""
        digest = self.source
        if not isinstance(digest, str):
            state = digest.before.copy()
            state.update(memoryview(digest.data)[: self.lines.offset - digest.begin])
            digest = state.hexdigest()
        return FilePosition(**self.lines._asdict(), digest=digest)


class DigestedText:
    """Cuts a text that comes in blocks into lines, after the part that was read before.

    Args:
        name: how to call the text.
        max_row_bytes: longest row, in bytes without its line end.
        position: where to go on.
        remedy: what to do about another text than that of the position.

    Attributes:
        start: where it goes on.
        read: bytes of the text that came so far.
    """

    def __init__(self, name: str, max_row_bytes: int, position: FilePosition, remedy: str) -> None:
        known = position.digest or EMPTY
        self.start = TextPosition(position.lines, known)
        self.read = 0
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._position = replace(position, digest=known)
        self._remedy = remedy
        self._digest = xxhash.xxh3_64()
        self._block: _Block | str = known
        self._unclosed = position.open_end
        self._unclosed_end = b""
        self._splitter = LineSplitter(name, max_row_bytes, position.lines)

    @property
    def behind(self) -> int:
        """Bytes still to come of the part that was read before."""
        return max(0, self._position.offset - self.read)

    @property
    def reached(self) -> TextPosition:
        """Where the text stands after all lines that were given, and after blank lines behind them."""
        return TextPosition(self._splitter.position, self._block)

    def feed(self, block: bytes) -> Rows:
        """Returns the rows of the lines that end in this block; there may be none.

        Raises:
            SourceRefused: the text is not the one of the position.
        """
        if behind := self.behind:
            self._digest.update(block[:behind])
            self.read += len(block[:behind])
            block = block[behind:]
            if self.read == self._position.offset:
                self._check_digest()
        if self._unclosed and block:
            block = self._close_line(block)
        if block:
            self._block = _Block(self.read, block, self._digest.copy())
            self._digest.update(block)
            self.read += len(block)
        return self._rows(self._splitter.feed(block))

    def finish(self) -> Rows:
        """Returns the row of the last line, which has no newline, if there is such a line.

        Raises:
            SourceRefused: the text is shorter than the position says.
        """
        if self.behind:
            expected = f"at least the {self._position.offset} bytes that were read"
            raise self._refuse(expected, f"{self.read}: it was truncated or replaced")
        return self._rows(self._splitter.finish())

    def finish_if(self, complete: Callable[[bytes], bool]) -> Rows:
        """As `finish`, but for a text that was left before its end: the last line is given only if it is complete."""
        return self._rows(self._splitter.finish_if(complete))

    def _rows(self, rows: Rows) -> Rows:
        block = self._block
        return rows._replace(position=lambda index: TextPosition(rows.position(index), block))

    def _check_digest(self) -> None:
        actual = self._digest.hexdigest()
        if actual != self._position.digest:
            committed = f"the first {self._position.offset} bytes ({self._position.line} lines)"
            raise self._refuse(f"XXH3 {self._position.digest} of {committed}, whose rows are published", actual)

    def _close_line(self, block: bytes) -> bytes:
        """Takes the newline that the last line lacked; returns what follows it."""
        rest = self._unclosed_end + block
        if rest == b"\r":
            self._unclosed_end = rest
            return b""
        for newline in (b"\n", b"\r\n"):
            if rest.startswith(newline):
                self._unclosed = False
                self._digest.update(newline)
                self.read += len(newline)
                at = self._position
                start = LinePosition(at.offset + len(newline), at.line, at.blank)
                self._splitter = LineSplitter(self._name, self._max_row_bytes, start)
                self._block = self._digest.hexdigest()
                return rest[len(newline) :]
        raise SourceRefused(
            f"{self._name}:{self._position.line}: the row is published as it stood at the end of the text, byte "
            f"{self._position.offset}; expected a line end there, found {rest[:1]!r}: the line was continued since",
            file=self._name,
            expected="a line end",
            actual=repr(rest[:1]),
        )

    def _refuse(self, expected: str, actual: str) -> SourceRefused:
        return SourceRefused(
            f"{self._name}: not the text whose rows are published: expected {expected}, found {actual}; {self._remedy}",
            file=self._name,
            expected=expected,
            actual=actual,
        )


GZIP: Final = "jsonl.gz"
ZSTD: Final = "jsonl.zst"

_BLOCKS: Final = 16
"""So many blocks are looked at for a row at a time: signals are looked at in between."""


class CompressedJsonLines(Source):
    """One compressed file. Memory: blocks of 1 MiB that are read ahead, and the row in hand.

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

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        self._path = settings.path
        at = FilePosition()
        if position is not None:
            at = FilePosition.decode(position, (GZIP, ZSTD), self.name, TEXT_FIELDS)
        remedy = "put the old file back (appending is fine), or choose another --out"
        self._lines = DigestedText(self.name, context.max_row_bytes, at, remedy)
        self.start = self._lines.start
        self._packed = PackedText(self._path)
        self._finished = False

    @property
    def reached(self) -> TextPosition:
        """Where it stands after all that was given."""
        return self._lines.reached

    @property
    def blank(self) -> int:
        """Blank lines skipped so far."""
        return self._lines.reached.lines.blank

    @property
    def progress(self) -> tuple[int, int | None]:
        """(compressed bytes read, compressed bytes there are)."""
        return self._packed.consumed, self._packed.size

    def read(self) -> Rows | None:
        """Returns the next rows; none while the published part is read again; None at the end.

        Raises:
            SourceRefused: the file is cut, damaged, or not the one of the position.
        """
        for _ in range(_BLOCKS):
            if self._finished:
                return None
            block = self._packed.read()
            self._finished = not block
            rows = self._lines.feed(block) if block else self._lines.finish()
            if rows.lines:
                return rows
        return rows

    def waits_for(self) -> str:
        """Returns in words what takes long at a restart."""
        done, behind = self._lines.read, self._lines.behind
        return f"the part of {self.name} that is published: {done} of {done + behind} bytes" if behind else ""

    def entry(self, position: TextPosition) -> dict[str, Any]:
        """Returns the entry of a position."""
        kind = ZSTD if self._packed.is_zstd else GZIP
        entry = {"kind": kind, "path": self.name} | position.digested().encode(TEXT_FIELDS)
        return entry | {PACKED_SIZE: self._packed.consumed} if self._finished and position == self.reached else entry

    def close(self) -> None:
        """Closes the file."""
        self._packed.close()
