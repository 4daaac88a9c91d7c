"""JSON lines in a text that can only be read from its start: in a compressed file, a named pipe or standard input.

To go on from a position the text is read up to there once more and its digest compared; nothing cheaper would know it
again. What was read from a pipe is gone: a restart expects the same input once more, or takes all as new (`resume`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import xxhash

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.position import EMPTY, PACKED_SIZE, TEXT_FIELDS, FilePosition, plain_name, read_entry
from lazyshard_producer.sources.decompression import PackedText
from lazyshard_producer.sources.lines import LineSplitter
from lazyshard_producer.sources.source import (
    STANDARD_INPUT,
    Context,
    Rows,
    Source,
    find_line_end,
    refuse_source,
    refusing,
)


class TextPosition(NamedTuple):
    """A place between two lines of the text, and what tells the digest of the text up to a byte near it."""

    at: FilePosition
    digest: Callable[[int], str]

    def digested(self) -> FilePosition:
        """Returns the position with the digest: costs one of 1 MiB at the most."""
        return self.at._replace(digest=self.digest(self.at.offset))


def _digest(before: xxhash.xxh3_64, begin: int, block: bytes, offset: int) -> str:
    state = before.copy()
    state.update(memoryview(block)[: offset - begin])
    return state.hexdigest()


class DigestedText:
    """Cuts a text that comes in blocks into lines, after the part that was read before.

    `remedy` says what to do about another text than that of the position. `read` bytes of the text came so far.
    """

    def __init__(self, name: str, max_row_bytes: int, position: FilePosition, remedy: str) -> None:
        self._position = position._replace(digest=position.digest or EMPTY)
        self._digest_at: Callable[[int], str] = lambda offset: self._position.digest
        self.start = TextPosition(position.place, self._digest_at)
        self.read = 0
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._remedy = remedy
        self._digest = xxhash.xxh3_64()
        self._unclosed = position.open_end
        self._unclosed_end = b""
        self._splitter = LineSplitter(name, max_row_bytes, position.place)

    @property
    def behind(self) -> int:
        """Bytes still to come of the part that was read before."""
        return max(0, self._position.offset - self.read)

    @property
    def reached(self) -> TextPosition:
        """Where the text stands after all lines that were given, and after blank lines behind them."""
        return TextPosition(self._splitter.position, self._digest_at)

    def feed(self, block: bytes) -> Rows:
        """Returns the rows of the lines that end in this block; there may be none."""
        if behind := self.behind:
            self._add(block[:behind])
            block = block[behind:]
            if not self.behind and (actual := self._digest.hexdigest()) != self._position.digest:
                committed = f"the first {self._position.offset} bytes ({self._position.line} lines)"
                expected = f"XXH3 {self._position.digest} of {committed}"
                where = "not the text whose rows are published: "
                raise refuse_source(self._name, expected, actual, self._remedy, where=where)
        if self._unclosed and block:
            block = self._close_line(block)
        if block:
            self._digest_at = partial(_digest, self._digest.copy(), self.read, block)
            self._add(block)
        return self._rows(self._splitter.feed(block))

    def finish(self, *, only_row: bool = False) -> Rows:
        """Returns the row of the last line, which has no newline; see `LineSplitter.finish`."""
        if self.behind and not only_row:
            expected = f"at least the {self._position.offset} bytes that were read"
            raise refuse_source(self._name, expected, f"{self.read}: it was truncated or replaced", self._remedy)
        return self._rows(self._splitter.finish(only_row=only_row))

    def _add(self, data: bytes) -> None:
        self._digest.update(data)
        self.read += len(data)

    def _rows(self, rows: Rows) -> Rows:
        digest = self._digest_at
        return rows._replace(position=lambda index: TextPosition(rows.position(index), digest))

    def _close_line(self, block: bytes) -> bytes:
        """Takes the newline that the last line lacked; returns what follows it."""
        rest = self._unclosed_end + block
        newline = find_line_end(self._name, self._position, rest)
        if not newline:
            self._unclosed_end = rest
            return b""
        self._unclosed = False
        self._add(newline)
        at = self._position
        start = FilePosition(at.offset + len(newline), at.line, at.blank)
        self._splitter = LineSplitter(self._name, self._max_row_bytes, start)
        self._digest_at = partial(_digest, self._digest.copy(), self.read, b"")
        return rest[len(newline) :]


GZIP: Final = "jsonl.gz"
ZSTD: Final = "jsonl.zst"
STDIN: Final = "stdin"

_BLOCKS: Final = 16  # so many blocks are looked at for a row at a time: signals are looked at in between
_BLOCK_BYTES: Final = 1 << 20
"""So much is read at a time where it is there. Pipes are given this size too: it is what Linux allows to everybody."""


class _TextSource(Source):
    """A text that is read from its start.

    That it is up to the position what it was shows only when it has been read: `read` raises then, before any row.
    """

    _lines: DigestedText
    _finished = False
    _blank_before = 0

    def _begin(self, at: FilePosition, context: Context, remedy: str) -> None:
        self._lines = DigestedText(self.name, context.max_row_bytes, at, remedy)
        self.start = self.reached = self._lines.start
        self.blank = self._blank_before + at.blank

    def _give(self, block: bytes, ended: bool, *, only_row: bool = False) -> Rows:
        self._finished = ended
        rows = self._lines.finish(only_row=only_row) if ended else self._lines.feed(block)
        self.reached = self._lines.reached
        self.blank = self._blank_before + self.reached.at.blank
        return rows


class CompressedJsonLines(_TextSource):
    """One compressed file. Memory: blocks of 1 MiB that are read ahead, and the row in hand."""

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        at = FilePosition()
        if position is not None:
            at = FilePosition.decode(position, (GZIP, ZSTD), self.name, TEXT_FIELDS)
        self._begin(at, context, "; put the old file back (appending is fine), or choose another --out")
        self._packed = PackedText(settings.path)
        self.progress = 0, self._packed.size

    def read(self) -> Rows | None:
        """Returns the next rows; none while the published part is read again; None at the end."""
        rows = None
        for _ in range(_BLOCKS):
            if self._finished:
                return None
            block = self._packed.read()
            rows = self._give(block, not block)
            self.progress = self._packed.consumed, self._packed.size
            if rows.lines:
                break
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


class StandardInput(_TextSource):
    """Standard input or a named pipe. Memory: a block of 1 MiB twice, and the row in hand.

    It ends where the last writer has closed it, but not before the first one has opened it.
    """

    live = True

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        self._what = "standard input" if settings.path == STANDARD_INPUT else f"the pipe {self.name}"
        at, self._bytes_before, self._blank_before = FilePosition(), 0, 0
        if position is not None:
            at = FilePosition.decode(position, (STDIN,), self.name, TEXT_FIELDS)
            before = read_entry(position, self.name, STDIN, bytes_before=int, blank_before=int)
            self._bytes_before, self._blank_before = before
        if settings.resume == "append":
            self._bytes_before += at.offset
            self._blank_before += at.blank
            at = FilePosition()
        remedy = (
            "; give the same input from its start, as for the first run; to take the input as new rows, give "
            "--resume append; to start anew, choose another --out"
        )
        self._begin(at, context, remedy)
        self.progress = self._bytes_before + at.offset, None
        self._fd = 0 if settings.path == STANDARD_INPUT else _open_pipe(settings.path)
        self._ended = False
        self._ending = False
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _BLOCK_BYTES)

    def read(self) -> Rows | None:
        """Returns the rows that have come; None where the input is at its end."""
        if self._finished:
            return None
        block = self._read_block()
        # Asked to end, nobody knows whether what has come is all of the last line.
        rows = self._give(block, not block and (self._ended or self._ending), only_row=not self._ended)
        self.progress = self._bytes_before + max(self._lines.read, self.start.at.offset), None
        return rows if rows.lines or not self._finished else None

    def wait(self, seconds: float) -> None:
        """Returns when something has come, the input has ended, or so many seconds have passed."""
        if not self._finished:
            self._poll.poll(seconds * 1000)

    def waits_for(self) -> str:
        """Returns in words what it waits for."""
        done, behind = self._lines.read, self._lines.behind
        if behind:
            return f"the part of {self._what} that is published, once more: {done} of {done + behind} bytes have come"
        return f"rows on {self._what}"

    def entry(self, position: TextPosition) -> dict[str, Any]:
        """Returns the entry of a position."""
        before = {"bytes_before": self._bytes_before, "blank_before": self._blank_before}
        return {"kind": STDIN, "path": self.name} | position.digested().encode(TEXT_FIELDS) | before

    def end(self) -> None:
        """Asks it to finish: what has come by now is given; a last line only if it is complete."""
        self._ending = True

    def close(self) -> None:
        """Closes a named pipe."""
        if self._fd > 0:
            os.close(self._fd)
            self._fd = -1

    def _read_block(self) -> bytes:
        block = bytearray()
        with refusing(self.name), contextlib.suppress(BlockingIOError):
            while len(block) < _BLOCK_BYTES and not self._ended and self._poll.poll(0):
                # It does not block although standard input may: something has come, or the end.
                part = os.read(self._fd, _BLOCK_BYTES - len(block))
                self._ended = not part
                block += part
        return bytes(block)


def _open_pipe(path: str) -> int:
    with refusing(path):
        # O_NONBLOCK: opening would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise refuse_source(path, "a named pipe", "something else")
    return fd
