"""The side file of the chunk that a writer is filling: the arrays of its rows, one row behind the other."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import xxhash

from lazyshard.format import CheckedArrays, SealedArrays
from lazyshard.stream.piece_file import BUFFER_BYTES, PIECE_BYTES, PieceFile
from lazyshard.stream.steps import Steps


class OpenArrays:
    """The arrays of a chunk under construction. Memory: one buffer, and 16 bytes a row.

    Args:
        path: where to write them.
        steps: does the writing.

    Attributes:
        file: what is written, once it was passed on.
    """

    def __init__(self, path: Path, steps: Steps) -> None:
        self.file = PieceFile(path, steps)
        self._buffer = bytearray()
        self._offsets = array("Q", [0])
        self._digests = array("Q")

    def append(self, data: bytes) -> None:
        """Adds the bytes of a row, which may be none.

        Raises:
            OSError: the device refused the rows so far.
        """
        self._offsets.append(self._offsets[-1] + len(data))
        self._digests.append(xxhash.xxh3_64_intdigest(data))
        self._take(data)

    def extend(self, rows: CheckedArrays | None, count: int) -> None:
        """Adds the bytes of so many rows; None where they have none. Raises as `append`."""
        if rows is None:
            self._offsets.extend([self._offsets[-1]] * count)
            self._digests.extend([xxhash.xxh3_64_intdigest(b"")] * count)
            return
        self._offsets.frombytes((rows.ends + np.uint64(self._offsets[-1])).tobytes())
        self._digests.frombytes(rows.digests.tobytes())
        self._take(rows.data)

    def pass_on(self) -> None:
        """Hands what is left in memory to the file. Raises as `append`."""
        if self._buffer:
            piece, self._buffer = self._buffer, bytearray()
            self.file.append(piece)

    def sealed(self) -> SealedArrays:
        """Returns what the seal says of the rows so far."""
        return SealedArrays(np.asarray(self._offsets, dtype=np.uint64), np.asarray(self._digests, dtype=np.uint64))

    def _take(self, data: bytes) -> None:
        if len(data) < PIECE_BYTES:
            self._buffer += data
            if len(self._buffer) >= BUFFER_BYTES:
                self.pass_on()
        else:
            self.pass_on()
            self.file.append(data)
