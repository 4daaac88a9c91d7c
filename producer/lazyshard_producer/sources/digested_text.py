"""The lines of a text that can only be read from its start, known again by the digest of all that was read.

To go on from a position the text is read up to there once more, its digest compared, and the lines after it are given.
Nothing is kept of the text but the block in hand, and what marks still refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

import xxhash

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import refuse_position
from lazyshard_producer.sources.lines import LineMark, LineRows, LineSplitter
from lazyshard_producer.sources.source import Place

EMPTY: Final = xxhash.xxh3_64_hexdigest(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPosition:
    """How far a text has been read: its committed part is the bytes of the half-open range [0, offset).

    Attributes:
        offset: bytes read.
        line: lines read, blank ones included.
        blank: blank lines among them, which are no rows.
        digest: XXH3 (64 bits, hexadecimal) of the committed part.
        open_end: the last line had no newline.
    """

    offset: int = 0
    line: int = 0
    blank: int = 0
    digest: str = EMPTY
    open_end: bool = False

    def encode(self) -> dict[str, Any]:
        """Returns the position as fields of JSON."""
        return asdict(self)

    @classmethod
    def decode(cls, entry: dict[str, Any], name: str) -> TextPosition:
        """Reads what `encode` returned; other fields are ignored.

        Raises:
            SourceRefused: a field is missing or wrong.
        """
        values: dict[str, Any] = {}
        for known in fields(cls):
            expected: type = {"int": int, "bool": bool}.get(str(known.type), str)
            value = entry.get(known.name)
            if type(value) is not expected or (type(value) is int and value < 0):
                raise refuse_position(name, f"{known.name} of a text", repr(value)[:120])
            values[known.name] = value
        return cls(**values)

    @property
    def mark(self) -> LineMark:
        """The position without the digest."""
        return LineMark(self.offset, self.line, self.blank, self.open_end)


class _Block(NamedTuple):
    """A part of the text, with the digest's state before it."""

    begin: int
    data: bytes
    before: xxhash.xxh3_64


class TextMark(NamedTuple):
    """Where the text stands between two lines, and what its digest there can be made of.

    Attributes:
        lines: where it stands.
        source: a block that holds that place, or the digest itself.
    """

    lines: LineMark
    source: _Block | str

    def position(self) -> TextPosition:
        """Returns the position: costs a digest of 1 MiB at the most."""
        digest = self.source
        if not isinstance(digest, str):
            state = digest.before.copy()
            state.update(memoryview(digest.data)[: self.lines.offset - digest.begin])
            digest = state.hexdigest()
        offset, line, blank, open_end = self.lines
        return TextPosition(offset=offset, line=line, blank=blank, digest=digest, open_end=open_end)


class TextRows:
    """Rows of the text: see `lazyshard_producer.sources.source.Rows`. Their marks are of `TextMark`."""

    __slots__ = ("_block", "_rows", "lines")

    def __init__(self, rows: LineRows, block: _Block | str) -> None:
        self.lines: Sequence[bytes | RowInvalid] = rows.lines
        self._rows = rows
        self._block = block

    def mark(self, index: int) -> TextMark:
        """Returns where the text stands after the row of this index."""
        return TextMark(self._rows.mark(index), self._block)

    def place(self, index: int) -> Place:
        """Returns where the row of this index begins."""
        return self._rows.place(index)


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

    def __init__(self, name: str, max_row_bytes: int, position: TextPosition, remedy: str) -> None:
        self.start = TextMark(position.mark, position.digest)
        self.read = 0
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._position = position
        self._remedy = remedy
        self._digest = xxhash.xxh3_64()
        self._block: _Block | str = position.digest
        self._unclosed = position.open_end
        self._unclosed_end = b""
        self._splitter = LineSplitter(name, max_row_bytes, position.mark)

    @property
    def behind(self) -> int:
        """Bytes still to come of the part that was read before."""
        return max(0, self._position.offset - self.read)

    @property
    def reached(self) -> TextMark:
        """Where the text stands after all lines that were given, and after blank lines behind them."""
        return TextMark(self._splitter.mark, self._block)

    def feed(self, block: bytes) -> TextRows:
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
        return TextRows(self._splitter.feed(block), self._block)

    def finish(self) -> TextRows:
        """Returns the row of the last line, which has no newline, if there is such a line.

        Raises:
            SourceRefused: the text is shorter than the position says.
        """
        if self.behind:
            expected = f"at least the {self._position.offset} bytes that were read"
            raise self._refuse(expected, f"{self.read}: it was truncated or replaced")
        return TextRows(self._splitter.finish(), self._block)

    def finish_if(self, complete: Callable[[bytes], bool]) -> TextRows:
        """As `finish`, but for a text that was left before its end: the last line is given only if it is complete."""
        return TextRows(self._splitter.finish_if(complete), self._block)

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
                mark = self._position.mark
                start = LineMark(mark.offset + len(newline), mark.line, mark.blank)
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
