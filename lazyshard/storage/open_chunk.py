"""The chunk that a writer is filling: rows go to a file under `.tmp/`, their offsets and digests stay in memory."""

from __future__ import annotations

import contextlib
import functools
import os
from array import array
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard.format import CheckedLines, Seal
from lazyshard.storage.durable import create, start_writing_back, sync, write_all
from lazyshard.storage.steps import Steps

_BUFFER_BYTES: Final = 1 << 20
"""Rows are handed to the system in pieces of this size; more gains nothing, less costs calls."""

_PIECE_BYTES: Final = 64 << 10
"""Rows that come together and are at least so much are a piece by themselves: copying them would cost more."""


class OpenChunk:
    """A chunk under construction. Memory: one buffer, and 20 bytes a row.

    Rows are added by the writer's caller. The file belongs to the steps: it is touched by nothing else until they have
    stopped.

    Args:
        number: the chunk's number.
        path: where to write the rows; created when the first piece is written.
        steps: does the writing.
    """

    def __init__(self, number: int, path: Path, steps: Steps) -> None:
        self.number = number
        self.path = path
        self._steps = steps
        self._fd: int | None = None
        self._written = 0
        self._begun = 0  # bytes that are on their way to the device
        self._buffer = bytearray()
        self._offsets = array("Q", [0])
        self._digests = array("Q")
        self._tokens = array("I")
        self._end = 0

    def __len__(self) -> int:
        """Rows so far."""
        return len(self._digests)

    def append(self, line: bytes, tokens: int | None) -> None:
        """Adds a row, its newline included.

        Raises:
            OSError: the device refused the rows so far.
        """
        self._end += len(line)
        self._offsets.append(self._end)
        self._digests.append(xxhash.xxh3_64_intdigest(line))
        if tokens is not None:
            self._tokens.append(tokens)
        self._buffer += line
        if len(self._buffer) >= _BUFFER_BYTES:
            self.pass_on()

    def extend(self, rows: CheckedLines) -> None:
        """Adds rows.

        Raises:
            OSError: the device refused the rows so far.
        """
        self._offsets.frombytes((rows.ends + np.uint64(self._end)).tobytes())
        self._digests.frombytes(rows.digests.tobytes())
        if rows.tokens is not None:
            self._tokens.frombytes(rows.tokens.astype(np.uint32).tobytes())
        self._end += len(rows.data)
        if len(rows.data) < _PIECE_BYTES:
            self._buffer += rows.data
            if len(self._buffer) >= _BUFFER_BYTES:
                self.pass_on()
        else:
            self.pass_on()
            self._pass_on(rows.data)

    def pass_on(self) -> None:
        """Hands what rows are left in memory to the file; after the last one, before `finish`.

        Raises:
            OSError: the device refused the rows so far.
        """
        if self._buffer:
            piece, self._buffer = self._buffer, bytearray()
            self._pass_on(piece)

    def finish(self) -> None:
        """A step: brings the rows onto the device and closes the file.

        Raises:
            OSError: they may not be there; the chunk must be written anew.
        """
        assert self._fd is not None
        sync(self._fd)
        self._close()

    def discard(self) -> None:
        """A step, or when all of them are done: closes the file and removes it, if it can."""
        self.abandon()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Closes the file as it is."""
        with contextlib.suppress(OSError):
            self._close()

    def seal(self, source: Any, now: float) -> Seal:
        """Returns the seal of the rows so far; lengths only if every row has one."""
        return Seal(
            chunk=self.number,
            offsets=np.asarray(self._offsets, dtype=np.uint64),
            digests=np.asarray(self._digests, dtype=np.uint64),
            tokens=np.asarray(self._tokens, dtype=np.uint32) if len(self._tokens) == len(self) else None,
            source=source,
            sealed_at=now,
        )

    def _pass_on(self, piece: bytes | bytearray) -> None:
        self._steps.do(functools.partial(self._write, piece), len(piece))

    def _write(self, piece: bytes | bytearray) -> None:
        if self._fd is None:
            self._fd = create(self.path)
        write_all(self._fd, piece)
        self._written += len(piece)
        if self._written - self._begun >= _BUFFER_BYTES:
            start_writing_back(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
