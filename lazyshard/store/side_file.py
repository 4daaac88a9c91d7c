"""The arrays of a chunk from an object store, fetched into the chunk's local copy as its rows are read.

Arrays of more than `PART_BYTES` are a hole in the copy at first. A row is there if its bytes match its digest, so no
record of what was fetched is needed, and a process may be killed at any time. The process that fetches a range holds a
lock on these bytes of the copy (an open file description lock, see fcntl(2)); others that need them wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store.durable import write_all
from lazyshard.store.files import PART_BYTES, OpenFile, UrlPath

if TYPE_CHECKING:
    from lazyshard.store.mirror import Mirror

LEAST_BYTES: Final = 64 << 10  # a request for fewer bytes takes as long

POLL_S: Final = 0.02  # interval at which a waiting process checks whether another one has fetched the bytes

# A fetching process that gets no byte for this long has failed many times or was suspended; others stop waiting
STALLED_S: Final = 60.0


class SideFile(OpenFile):
    """The side file in a copy of a chunk. A row is there if its bytes match its digest; otherwise it is fetched.

    With it are fetched the rows that follow: as many bytes as this process has drawn from the chunk, so that at most
    half of what is fetched is never drawn, and up to `PART_BYTES` once all rows of other chunks were drawn. A row that
    does not match is fetched once more.
    """

    __slots__ = ("_chunk", "_digests", "_mirror", "_object", "_offsets")

    def __init__(self, mirror: Mirror, fd: int, path: UrlPath, seal: Seal, arrays: SealedArrays) -> None:
        super().__init__(fd, path, arrays.size, seal.size)
        self._mirror, self._object, self._chunk = mirror, path, seal.chunk
        # Of the rows that hold arrays.
        rows = np.flatnonzero(arrays.offsets[1:] > arrays.offsets[:-1])
        self._offsets = array("Q", np.append(arrays.offsets[rows], arrays.offsets[-1]).astype("=u8").tobytes())
        self._digests = array("Q", arrays.digests[rows].astype("=u8").tobytes())

    def read_into(self, memory: memoryview, start: int) -> int:
        """Reads whole rows, fetching those that are missing. Raises as `Mirror.open`."""
        done = super().read_into(memory, start)
        first, stop = bisect_left(self._offsets, start), bisect_left(self._offsets, start + len(memory))
        for row in range(first, stop):
            begin, end = self._offsets[row] - start, self._offsets[row + 1] - start
            if xxhash.xxh3_64_intdigest(memory[begin:end]) != self._digests[row]:
                self._fetch(row, stop)
                done = super().read_into(memory, start)
        self._mirror.drawn[self._chunk] += len(memory)
        return done

    def complete(self) -> bool:
        """Prefetches all rows that are missing; returns whether there was room for them. Raises as `read_into`."""
        found = os.fstat(self.fd)
        # Without holes no row needs to be compared with its digest.
        rows = range(len(self._digests) if 512 * found.st_blocks < found.st_size else 0)
        return all(self._fetch(row, self._fit(row, PART_BYTES), ahead=True) for row in rows)

    def _has(self, row: int) -> bool:
        start, stop = self._offsets[row], self._offsets[row + 1]
        return xxhash.xxh3_64_intdigest(self.read(start, stop - start)) == self._digests[row]

    def _fit(self, row: int, size: int) -> int:
        """Returns where the rows from `row` on stop that fit into `size` bytes; after one at least."""
        return max(row + 1, bisect_right(self._offsets, self._offsets[row] + size) - 1)

    def _fetch(self, row: int, stop: int, *, ahead: bool = False) -> bool:
        """Fetches a row, with those up to `stop` or later unless they are there; returns whether it is there.

        Another process may fetch it meanwhile. `ahead`: as of `Mirror.reserve`.
        """
        most, due = max(stop, self._fit(row, PART_BYTES)), time.monotonic() + STALLED_S
        while not self._lock(row, most) and time.monotonic() < due:
            time.sleep(POLL_S)
        try:
            if self._has(row):
                return True
            size = PART_BYTES if self._mirror.whole else max(LEAST_BYTES, self._mirror.drawn[self._chunk])
            stop = min(max(stop, self._fit(row, size)), most)
            stop = next((at for at in range(row + 1, stop) if self._has(at)), stop)
            if self._download(row, stop, ahead=ahead) and not self._has(row):
                self._mirror.check_identity()
                self._download(row, stop, ahead=ahead)
            return self._has(row)
        finally:
            self._lock(row, most, fcntl.F_UNLCK)

    def _lock(self, row: int, stop: int, kind: int = fcntl.F_WRLCK) -> bool:
        start, size = self._offsets[row], self._offsets[stop] - self._offsets[row]
        with contextlib.suppress(BlockingIOError):
            # struct flock: type, whence, start, length, pid
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, size, 0))
            return True
        return False

    def _download(self, row: int, stop: int, *, ahead: bool) -> bool:
        """Fetches the rows [row, stop) into the copy; returns whether there was room for them."""
        for at in range(self._offsets[row], self._offsets[stop], PART_BYTES):
            size = min(PART_BYTES, self._offsets[stop] - at)
            if size <= self._mirror.spare:
                self._mirror.spare -= size
            elif not self._mirror.reserve(self.fd, self.begin + at, size, ahead=ahead):
                return False
            write_all(self.fd, self._object.store.get_range(self._object.key, at, at + size), self.begin + at)
        return True
