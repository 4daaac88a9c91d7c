"""The side file of a published chunk, open for reading: the bytes of the arrays of each row, checked before use.

Read with `preadv` into memory of the row's own: what is made of it are views, nothing is copied again, and who changes
an array changes nobody else's. Once nobody looks at it any more, another row may be read into it: see `row_memory`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt
from lazyshard.format import SealedArrays
from lazyshard.format.arrays import MAX_ROW_BYTES
from lazyshard.store.files import OpenFile
from lazyshard.stream.chunk_damage import damaged
from lazyshard.stream.complete_file import CompleteFile
from lazyshard.stream.row_memory import ROW_MEMORY, Bytes


class ChunkArrays:
    """The side file of an open chunk.

    Args:
        file: the side file.
        number: the chunk's number.
        sealed: what the chunk's seal says of it.

    Raises:
        ChunkCorrupt: the file is shorter or longer than that.
    """

    __slots__ = ("_digests", "_file", "_number", "_offsets")

    def __init__(self, file: OpenFile, number: int, sealed: SealedArrays) -> None:
        self._file = CompleteFile(file)
        self._number = number
        self._offsets = array("Q", sealed.offsets.astype("=u8").tobytes())
        self._digests = sealed.digests
        if file.size != sealed.size:
            raise self._corrupt(None, f"{sealed.size} bytes as sealed", f"{file.size} bytes")

    def size(self, first: int, stop: int) -> int:
        """Returns the bytes of the rows [first, stop)."""
        return self._offsets[stop] - self._offsets[first]

    def fit(self, first: int, stop: int, at_least: int, budget: int) -> int:
        """Returns before which row of [first, stop) to stop: after `at_least` rows and what fits into the budget."""
        fit = bisect_right(self._offsets, self._offsets[first] + budget, first, stop + 1) - 1
        return min(stop, max(first + at_least, fit))

    def read(self, row: int) -> Bytes:
        """Reads and checks the bytes of a row, in one system call.

        Returns:
            u8 of shape (bytes,), which is the caller's own.

        Raises:
            ChunkCorrupt: they are not what was sealed, or the file was cut.
            OSError: the filesystem failed.
        """
        return self.read_rows(row, row + 1)

    def read_rows(self, first: int, stop: int) -> Bytes:
        """Reads and checks the bytes of the rows [first, stop), which lie one behind the other. Raises as `read`."""
        offsets = self._offsets
        for row in range(first, stop):
            if (size := offsets[row + 1] - offsets[row]) > MAX_ROW_BYTES:
                raise self._corrupt(row, f"arrays of at most {MAX_ROW_BYTES} bytes in a row", f"{size} bytes")
        start = offsets[first]
        data = ROW_MEMORY.take(offsets[stop] - start)
        view = data.data
        done = self._file.read_into(view, start)
        if done < len(view):
            raise self._corrupt(None, f"{offsets[-1]} bytes", f"the end of the file at byte {start + done}")
        for row in range(first, stop):
            found = xxhash.xxh3_64_intdigest(view[offsets[row] - start : offsets[row + 1] - start])
            if found != (sealed := int(self._digests[row])):
                raise self._corrupt(row, f"XXH3 {sealed:016x} as sealed", f"{found:016x}")
        return data

    def ends(self, first: int, stop: int) -> npt.NDArray[np.uint64]:
        """Returns before which byte each of the rows [first, stop) ends, counted from the first byte of them."""
        return np.array(self._offsets[first + 1 : stop + 1], np.uint64) - np.uint64(self._offsets[first])

    def digests(self, first: int, stop: int) -> npt.NDArray[np.uint64]:
        """Returns the digests of the rows [first, stop)."""
        return self._digests[first:stop]

    def all_digests(self) -> bytes:
        """Returns the digests of all rows, 8 bytes each."""
        return self._digests.astype("<u8").tobytes()

    def _corrupt(self, row: int | None, expected: str, actual: str) -> ChunkCorrupt:
        byte = None if row is None else self._offsets[row]
        return damaged(self._file.path, self._number, row, byte, expected, actual)
