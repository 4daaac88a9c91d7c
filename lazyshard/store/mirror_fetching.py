"""What a mirror fetches from the store: a chunk's seal, and the bytes that it is about, checked against it."""

from __future__ import annotations

import os
from typing import Final

import xxhash

from lazyshard.format import Seal, SealedArrays
from lazyshard.format.names import seal_name
from lazyshard.store.durable import write_at
from lazyshard.store.files import PART_BYTES, read_file
from lazyshard.store.urls import UrlPath

_CHECK_BYTES: Final = 8 << 20


class Downloads:
    """The objects of one stream, fetched into open files.

    All methods raise FileNotFoundError where an object is not there (yet), StoreRefused and StoreUnavailable where the
    store does not give it, and OSError where it cannot be written here.

    Args:
        directory: the stream's URL.

    Attributes:
        fetched: data files of chunks that were fetched.
    """

    def __init__(self, directory: UrlPath) -> None:
        self._directory = directory
        self.fetched = 0

    def seal(self, chunk: int) -> tuple[Seal, bytes]:
        """Returns a chunk's seal, and its bytes. Raises FileNotFoundError, SealInvalid, and what stores raise."""
        path = self._directory / seal_name(chunk)
        data = read_file(path)
        return Seal.decode(data, chunk, str(path)), data

    def is_other_size(self, fd: int, name: str, seal: Seal | SealedArrays) -> bool:
        """Looks, of a large chunk, whether its object has the size that the seal tells, before room is made for that.

        If not, the file gets the size that was found, so that who opens it says so.
        """
        if seal.size <= PART_BYTES:
            return False
        path = self._directory / name
        found = path.store.size(path.key)
        if found != seal.size:
            os.ftruncate(fd, found)
        return found != seal.size

    def download(self, fd: int, name: str, seal: Seal | SealedArrays) -> bool:
        """Fetches an object of a chunk; returns whether it is what the seal tells."""
        path = self._directory / name
        for _ in range(2):
            start = 0
            while start < seal.size:
                # One byte more than there should be, to see that there are no more.
                wanted = min(PART_BYTES, seal.size + 1 - start)
                data = path.store.get_range(path.key, start, start + wanted)
                write_at(fd, data, start)
                start += len(data)
                if len(data) < wanted:
                    break
            self.fetched += isinstance(seal, Seal)
            if start == seal.size and _rows_are(fd, seal):
                return True
        # So that who opens it says what it has found.
        os.ftruncate(fd, path.store.size(path.key) if start != seal.size else start)
        return False


def _rows_are(fd: int, seal: Seal | SealedArrays) -> bool:
    """Returns whether a file's rows are those of which a seal has the digests."""
    offsets, digests = seal.offsets.tolist(), seal.digests.tolist()
    row, rows = 0, len(digests)
    while row < rows:
        start = offsets[row]
        stop = row + 1
        while stop < rows and offsets[stop + 1] - start <= _CHECK_BYTES:
            stop += 1
        data = memoryview(os.pread(fd, offsets[stop] - start, start))
        for at in range(row, stop):
            if xxhash.xxh3_64_intdigest(data[offsets[at] - start : offsets[at + 1] - start]) != digests[at]:
                return False
        row = stop
    return True
