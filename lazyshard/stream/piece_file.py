"""A file under `.tmp/` to which pieces are appended: by steps, which bring it onto the device when it is whole."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Final

from lazyshard.store.durable import create, start_writing_back, sync, write_all
from lazyshard.stream.steps import Steps

BUFFER_BYTES: Final = 1 << 20
"""Pieces are of this size; more gains nothing, less costs calls."""

PIECE_BYTES: Final = 64 << 10
"""What comes together and is at least so much is a piece by itself: copying it would cost more."""


class PieceFile:
    """The file belongs to the steps: it is touched by nothing else until they have stopped.

    Args:
        path: where to write; created when the first piece is written.
        steps: does the writing.
    """

    def __init__(self, path: Path, steps: Steps) -> None:
        self.path = path
        self._steps = steps
        self._fd: int | None = None
        self._written = 0
        self._begun = 0  # bytes that are on their way to the device

    def append(self, piece: bytes | bytearray) -> None:
        """Hands a piece over, which must not be changed any more.

        Raises:
            OSError: the device refused what came before.
        """
        self._steps.do(functools.partial(self._write, piece), len(piece))

    def finish(self) -> None:
        """A step: brings the file onto the device and closes it; an empty one if there was no piece.

        Raises:
            OSError: it may not be there; it must be written anew.
        """
        if self._fd is None:
            self._fd = create(self.path)
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

    def _write(self, piece: bytes | bytearray) -> None:
        if self._fd is None:
            self._fd = create(self.path)
        write_all(self._fd, piece)
        self._written += len(piece)
        if self._written - self._begun >= BUFFER_BYTES:
            start_writing_back(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
