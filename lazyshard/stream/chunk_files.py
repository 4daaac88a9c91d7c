"""The files of a chunk, rows that another process has checked, and memory for arrays.

Arrays are read with `preadv` into memory of the row's own: what is made of it are views, nothing is copied again.
`read_place` reads a row that another process has checked, out of the machine's page cache: cheaper than a pipe.
"""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from bisect import bisect_right
from collections import deque
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt, ChunkMissing
from lazyshard.format.arrays import MAX_ROW_BYTES
from lazyshard.format.seal import SealedArrays
from lazyshard.store.files import OpenFile, open_file

Bytes = npt.NDArray[np.uint8]

KEPT_BYTES: Final = 64 << 20  # what a process keeps at the most: a batch of 8 rows of 8 MiB
# Smaller memory is kept by the C library already (glibc's M_MMAP_THRESHOLD)
LEAST_BYTES: Final = 128 << 10

_PROBE: Final = [np.empty(0, np.uint8)]
_ALONE: Final = sys.getrefcount(_PROBE[0])  # references to an array that a container alone holds, counted as in `take`

_OPEN_FILES: Final = 8  # held open at the most: as many chunks as workers usually read at a time
_open_files: dict[str, OpenFile] = {}  # by path, in the order of use

_digest = xxhash.xxh3_64_digest


class FileOfRows:
    """An open file of chunk `number`. Raises ChunkCorrupt: it is shorter or longer than the offsets say.

    `offsets` are row starts, and the end of the last one: n + 1 numbers; `digests` XXH3 of each row, 8 big-endian bytes
    each, or None where nobody took any.
    """

    __slots__ = ("_digests", "_file", "_offsets", "number", "path")

    def __init__(self, file: OpenFile, number: int, offsets: array[int], digests: bytes | None) -> None:
        self.number, self.path = number, file.path
        self._file, self._offsets, self._digests = file, offsets, digests
        if file.size != offsets[-1]:
            known = "bytes when its rows were counted" if digests is None else "bytes as sealed"
            raise self._corrupt(None, f"{offsets[-1]} {known}", f"{file.size} bytes")

    def _check_size(self, row: int) -> int:
        """Returns the bytes of a row. Raises ChunkCorrupt: they cannot be read into memory."""
        size = self._offsets[row + 1] - self._offsets[row]
        if size > MAX_ROW_BYTES:
            raise self._corrupt(row, f"a row of at most {MAX_ROW_BYTES} bytes", f"one of {size}")
        return size

    def _corrupt(self, row: int | None, expected: str, actual: str) -> ChunkCorrupt:
        byte, sealed = None if row is None else self._offsets[row], self._digests is not None
        return damaged(self.path, self.number, row, byte, expected, actual, sealed=sealed)


class ChunkArrays(FileOfRows):
    """The side file of an open chunk."""

    __slots__ = ()
    _digests: bytes

    def __init__(self, file: OpenFile, number: int, sealed: SealedArrays) -> None:
        offsets = array("Q", sealed.offsets.astype("=u8").tobytes())
        super().__init__(file, number, offsets, sealed.digests.astype(">u8").tobytes())

    def size(self, first: int, stop: int) -> int:
        """Returns the bytes of the rows [first, stop)."""
        return self._offsets[stop] - self._offsets[first]

    def fit(self, first: int, stop: int, at_least: int, budget: int) -> int:
        """Returns before which row of [first, stop) to stop: after `at_least` rows and what fits into the budget."""
        fit = bisect_right(self._offsets, self._offsets[first] + budget, first, stop + 1) - 1
        return min(stop, max(first + at_least, fit))

    def read_rows(self, first: int, stop: int) -> Bytes:
        """Reads and checks the bytes of the rows [first, stop), in one system call: u8, the caller's own."""
        offsets = self._offsets
        for row in range(first, stop):
            self._check_size(row)
        start = offsets[first]
        data = ROW_MEMORY.take(offsets[stop] - start)
        view = data.data
        if (done := self._file.read_into(view, start)) < len(view):
            raise self._corrupt(None, f"{offsets[-1]} bytes", f"the end of the file at byte {start + done}")
        for row in range(first, stop):
            found = _digest(view[offsets[row] - start : offsets[row + 1] - start])
            if found != (sealed := self._digests[8 * row : 8 * row + 8]):
                raise self._corrupt(row, f"XXH3 {sealed.hex()} as sealed", found.hex())
        return data

    def ends(self, first: int, stop: int) -> npt.NDArray[np.uint64]:
        """Returns before which byte each of the rows [first, stop) ends, counted from the first byte of them."""
        return np.array(self._offsets[first + 1 : stop + 1], np.uint64) - np.uint64(self._offsets[first])

    def digests(self, first: int, stop: int) -> npt.NDArray[np.uint64]:
        """Returns the digests of the rows [first, stop)."""
        return np.frombuffer(self._digests, ">u8")[first:stop].astype(np.uint64)


def damaged(
    path: Path, chunk: int, row: int | None, byte: int | None, expected: str, actual: str, *, sealed: bool = True
) -> ChunkCorrupt:
    """Returns the error for a file that was changed since it was published; without a row, for all of it."""
    where = "" if row is None else f" row {row} (byte {byte}):"
    was = "sealed" if sealed else "marked complete"
    what = f"{path}:{where} expected {expected}, found {actual}; the file was changed or damaged after it was {was}"
    fields = {"file": str(path), "chunk": chunk, "row": row, "byte": byte, "expected": expected, "actual": actual}
    return ChunkCorrupt(f"{what}. Restore it from a copy", **fields)


class RowMemory:
    """Memory for the arrays of rows: what nobody looks at any more is used again.

    To touch memory for the first time costs several times as much as to read a file's bytes into it. That nobody looks
    at a row's memory is known from its count of references: every array that shares it holds one, and so does whatever
    is made of such an array, as a tensor, a memoryview or a DLPack capsule. Threads may share one. Beyond `limit`
    bytes, those in use included, the oldest memory is forgotten.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.size = 0  # bytes that are kept, in use or not
        self._limit = limit
        self._lock = Lock()
        self._buffers: deque[Bytes] = deque()

    def take(self, size: int) -> Bytes:
        """Returns u8 of shape (size,) that nobody else looks at, with anything in it."""
        # Never waits: a lock that a thread holds while its process forks stays locked in the child for ever.
        if not LEAST_BYTES <= size <= self._limit or not self._lock.acquire(blocking=False):
            return np.empty(size, np.uint8)
        buffers = self._buffers
        try:
            # Of so many, 3 microseconds at the most, from what was taken last: that is still in the CPU's caches, and
            # who looks at one row at a time has dropped it already. What is in use is not looked at first next time.
            for _ in range(min(len(buffers), 24)):
                if size <= buffers[-1].size <= size + size // 4 and sys.getrefcount(buffers[-1]) == _ALONE:
                    return buffers[-1][:size]
                buffers.rotate(1)
            # Rounded up by an eighth at the most, so that rows of nearly the same size fit into each other's.
            step = 1 << (size.bit_length() - 4)
            made = np.empty(-(-size // step) * step, np.uint8)
            buffers.append(made)
            self.size += made.size
            while self.size > self._limit:
                self.size -= buffers.popleft().size
            return made[:size]
        finally:
            self._lock.release()


ROW_MEMORY: Final = RowMemory()  # this process's


class RowPlace(NamedTuple):
    """A row of a sealed chunk: its absolute data file, number, first byte, bytes with the newline, and their XXH3."""

    path: str
    chunk: int
    row: int
    start: int
    size: int
    digest: bytes  # 8 big-endian bytes


def read_place(place: RowPlace) -> bytes:
    """Reads and checks a row that another process has checked. ChunkMissing, ChunkCorrupt: it is gone or changed."""
    # Twice, as a file that is open may be one that another has replaced since, or that its server has forgotten.
    with contextlib.suppress(OSError):
        line = _file_of(place).read(place.start, place.size)
        if _digest(line) == place.digest:
            return line
    _open_files.pop(place.path, None)
    line = _file_of(place).read(place.start, place.size)
    if (found := _digest(line)) == place.digest:
        return line
    actual = found.hex() if len(line) == place.size else f"{len(line)} bytes"
    expected = f"XXH3 {place.digest.hex()} of {place.size} bytes as sealed"
    raise damaged(Path(place.path), place.chunk, place.row, place.start, expected, actual)


def _file_of(place: RowPlace) -> OpenFile:
    # Each step is atomic, so threads need no lock, which a fork could leave locked.
    if (file := _open_files.pop(place.path, None)) is None:
        try:
            file = open_file(Path(place.path))
        except FileNotFoundError as cause:
            what = f"{place.path}: row {place.row} was read by a DataLoader worker, and the file is gone since"
            way = "let the producer delete chunks (--retain consumed), it spares those that are still read"
            raise ChunkMissing(f"{what}; {way}", file=place.path, chunk=place.chunk) from cause
        # What was used longest ago is closed, and what was deleted: it takes room on the disk while it is open.
        for path, other in list(_open_files.items()):
            if len(_open_files) >= _OPEN_FILES or not os.fstat(other.fd).st_nlink:
                _open_files.pop(path, None)
    _open_files[place.path] = file
    return file
