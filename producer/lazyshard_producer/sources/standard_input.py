"""JSON lines that come through standard input or a named pipe. See `lines` for what a line is.

What was read from a pipe is gone. So a restart either expects the same input from its start again, passes over the part
that is published and compares its digest (`resume="skip"`: every row exactly once, if the program before the pipe gives
the same rows again), or takes all that comes as new (`resume="append"`: rows that were read and not yet published when
the last run stopped are lost, unless the program before the pipe repeats them).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
from typing import Any, Final

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.position import TEXT_FIELDS, FilePosition, plain_name, read_count
from lazyshard_producer.sources.compressed import DigestedText, TextPosition
from lazyshard_producer.sources.files import refuse_os_error, refuse_source
from lazyshard_producer.sources.lines import is_row
from lazyshard_producer.sources.source import Context, Rows, Source

KIND: Final = "stdin"

STANDARD_INPUT: Final = "-"

_BLOCK_BYTES: Final = 1 << 20
"""So much is read at a time where it is there. Pipes are given this size too: it is what Linux allows to everybody."""


class StandardInput(Source):
    """Standard input or a named pipe. Memory: a block of 1 MiB twice, and the row in hand.

    It ends where the last writer has closed it, but not before the first one has opened it.

    Args:
        settings: its path, "-" for standard input, and `resume`.
        position: where to start; None for its start.
        context: the run.

    Raises:
        SourceRefused: it cannot be opened, or is neither.

    That the input up to the position is what it was shows only when it has come again: `read` raises then, before it
    gives any row.
    """

    live = True

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name = plain_name(settings.path)
        self._what = "standard input" if settings.path == STANDARD_INPUT else f"the pipe {self.name}"
        at, self._bytes_before, self._blank_before = FilePosition(), 0, 0
        if position is not None:
            at = FilePosition.decode(position, (KIND,), self.name, TEXT_FIELDS)
            self._bytes_before = read_count(position, "bytes_before", self.name)
            self._blank_before = read_count(position, "blank_before", self.name)
        if settings.resume == "append":
            self._bytes_before += at.offset
            self._blank_before += at.blank
            at = FilePosition()
        remedy = (
            "give the same input from its start, as for the first run; to take the input as new rows, give "
            "--resume append; to start anew, choose another --out"
        )
        self._lines = DigestedText(self.name, context.max_row_bytes, at, remedy)
        self._fd = 0 if settings.path == STANDARD_INPUT else _open_pipe(settings.path)
        self._ended = False
        self._ending = False
        self._finished = False
        self.start = self._reached = self._lines.start
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _BLOCK_BYTES)

    @property
    def reached(self) -> TextPosition:
        """Where it stands after all that was given."""
        return self._reached

    @property
    def blank(self) -> int:
        """Blank lines skipped so far."""
        return self._blank_before + self._reached.lines.blank

    @property
    def progress(self) -> tuple[int, int | None]:
        """(bytes read, None): nobody knows how much will come."""
        return self._bytes_before + max(self._lines.read, self.start.lines.offset), None

    def read(self) -> Rows | None:
        """Returns the rows that have come; None where the input is at its end.

        Raises:
            SourceRefused: it is not the one of the position.
        """
        if self._finished:
            return None
        block = self._read_block()
        rows = self._lines.feed(block)
        if not block and (self._ended or self._ending):
            self._finished = True
            # Asked to end, nobody knows whether what has come is all of the last line.
            rows = self._lines.finish() if self._ended else self._lines.finish_if(is_row)
        self._reached = self._lines.reached
        return rows if rows.lines or not self._finished else None

    def wait(self, seconds: float) -> None:
        """Returns when something has come, the input has ended, or so many seconds have passed."""
        if not self._finished:
            self._poll.poll(seconds * 1000)

    def waits_for(self) -> str:
        """Returns in words what it waits for."""
        if behind := self._lines.behind:
            done = self._lines.read
            return f"the part of {self._what} that is published, once more: {done} of {done + behind} bytes have come"
        return f"rows on {self._what}"

    def entry(self, position: TextPosition) -> dict[str, Any]:
        """Returns the entry of a position."""
        before = {"bytes_before": self._bytes_before, "blank_before": self._blank_before}
        return {"kind": KIND, "path": self.name} | position.digested().encode(TEXT_FIELDS) | before

    def end(self) -> None:
        """Asks it to finish: what has come by now is given; a last line only if it is complete."""
        self._ending = True

    def close(self) -> None:
        """Closes a named pipe."""
        if self._fd > 0:
            os.close(self._fd)
            self._fd = -1

    def _read_block(self) -> bytes:
        """Returns what is there, 1 MiB at the most, and notes where the end is met."""
        parts: list[bytes] = []
        size = 0
        while size < _BLOCK_BYTES and not self._ended and self._poll.poll(0):
            try:
                # It does not block although standard input may: something has come, or the end.
                part = os.read(self._fd, _BLOCK_BYTES - size)
            except BlockingIOError:
                break
            except OSError as cause:
                raise refuse_os_error(self.name, cause) from cause
            self._ended = not part
            parts.append(part)
            size += len(part)
        return b"".join(parts)


def _open_pipe(path: str) -> int:
    try:
        # O_NONBLOCK: opening would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise refuse_source(path, "a named pipe", "something else")
    return fd
