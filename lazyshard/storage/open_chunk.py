"""The chunk that a writer is filling: rows go to a file under `.tmp/`, their offsets and digests stay in memory."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard.format import Seal
from lazyshard.storage.durable import create, sync, write_all

_BUFFER_BYTES: Final = 1 << 20
"""Rows are handed to the system in pieces of this size; more gains nothing, less costs calls."""


class OpenChunk:
    """A chunk under construction. Memory: one buffer, and 20 bytes a row.

    Args:
        number: the chunk's number.
        path: where to write the rows; created when the first piece is written.
    """

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        self._fd: int | None = None
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
            self._flush()

    def finish(self) -> None:
        """Brings the rows onto the device and closes the file.

        Raises:
            OSError: they may not be there; the chunk must be written anew.
        """
        self._flush()
        assert self._fd is not None
        sync(self._fd)
        self.abandon()

    def abandon(self) -> None:
        """Closes the file as it is."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

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

    def _flush(self) -> None:
        if self._fd is None:
            self._fd = create(self.path)
        write_all(self._fd, self._buffer)
        self._buffer.clear()
