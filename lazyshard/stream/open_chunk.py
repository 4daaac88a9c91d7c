"""The chunk that a writer is filling: rows go to a file under `.tmp/`, their offsets and digests stay in memory.

Their arrays, in a stream whose rows hold some, go to a second file: see `open_arrays`.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lazyshard.format import CheckedLines, Seal
from lazyshard.stream.open_arrays import OpenArrays
from lazyshard.stream.piece_file import BUFFER_BYTES, PIECE_BYTES, PieceFile
from lazyshard.stream.steps import Steps


class OpenChunk:
    """A chunk under construction. Memory: one buffer, and 20 bytes a row.

    Rows are added by the writer's caller. The files belong to the steps: they are touched by nothing else until those
    have stopped.

    Args:
        number: the chunk's number.
        path: where to write the rows; created when the first piece is written.
        steps: does the writing.
        arrays: takes the arrays of the rows; None in a stream whose rows hold none.
    """

    def __init__(self, number: int, path: Path, steps: Steps, arrays: OpenArrays | None = None) -> None:
        self.number = number
        self.path = path
        self.arrays = arrays
        self._file = PieceFile(path, steps)
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
        if len(self._buffer) >= BUFFER_BYTES:
            self._pass_on_rows()

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
        if self.arrays is not None:
            self.arrays.extend(rows.arrays, len(rows))
        if len(rows.data) < PIECE_BYTES:
            self._buffer += rows.data
            if len(self._buffer) >= BUFFER_BYTES:
                self._pass_on_rows()
        else:
            self._pass_on_rows()
            self._file.append(rows.data)

    def pass_on(self) -> None:
        """Hands what rows are left in memory to the files; after the last one, before `finish`.

        Raises:
            OSError: the device refused the rows so far.
        """
        self._pass_on_rows()
        if self.arrays is not None:
            self.arrays.pass_on()

    def finish(self) -> None:
        """A step: brings the rows onto the device and closes the files.

        Raises:
            OSError: they may not be there; the chunk must be written anew.
        """
        self._file.finish()
        if self.arrays is not None:
            self.arrays.file.finish()

    def discard(self) -> None:
        """A step, or when all of them are done: closes the files and removes them, if it can."""
        self._file.discard()
        if self.arrays is not None:
            self.arrays.file.discard()

    def abandon(self) -> None:
        """Closes the files as they are."""
        self._file.abandon()
        if self.arrays is not None:
            self.arrays.file.abandon()

    def seal(self, source: Any, now: float) -> Seal:
        """Returns the seal of the rows so far; lengths only if every row has one."""
        return Seal(
            chunk=self.number,
            offsets=np.asarray(self._offsets, dtype=np.uint64),
            digests=np.asarray(self._digests, dtype=np.uint64),
            tokens=np.asarray(self._tokens, dtype=np.uint32) if len(self._tokens) == len(self) else None,
            source=source,
            sealed_at=now,
            arrays=None if self.arrays is None else self.arrays.sealed(),
        )

    def _pass_on_rows(self) -> None:
        if self._buffer:
            piece, self._buffer = self._buffer, bytearray()
            self._file.append(piece)
