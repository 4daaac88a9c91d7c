"""Pieces: the rows of one write task of Ray, on their way from the task to the process that publishes them.

A piece is one file under `STREAM/.ray/WRITE/`, named after its task, and there for as long as that write runs:

    rows                n lines of JSON, each with its newline
    ends                n × u64, little-endian: row i ends before byte ends[i]
    digests             n × u64: XXH3 of each row
    trailer             8 bytes of magic, n, and how many bytes the rows have (u64 each)

It is written under a name of its own and renamed when it is whole and on the device. A task that Ray runs again
replaces what it left before; a half-written file is never seen under the task's name.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import ChunkCorrupt
from lazyshard.format import CheckedLines
from lazyshard.store.durable import create, rename, sync, write_all
from lazyshard.store.files import open_file

_MAGIC: Final = b"LSPIECE1"
_TRAILER: Final = struct.Struct("<8sQQ")
_SUFFIX: Final = ".piece"
_NAME: Final = re.compile(r"([0-9]{8,18})\.piece")


def piece_path(folder: Path, task: int) -> Path:
    """Returns where the piece of a task is."""
    return folder / f"{task:08d}{_SUFFIX}"


def list_pieces(folder: Path) -> set[int]:
    """Returns the tasks whose pieces are there. A hint: on a network filesystem it may lag by seconds."""
    names = os.listdir(folder)
    return {int(found[1]) for found in map(_NAME.fullmatch, names) if found}


class PieceWriter:
    """Writes the piece of a task. Memory: 16 bytes a row.

    Args:
        folder: the write's folder.
        task: the task's number.

    Raises:
        FileNotFoundError: the folder has gone: nobody waits for pieces any more.
        OSError: the filesystem refused.
    """

    def __init__(self, folder: Path, task: int) -> None:
        self._target = piece_path(folder, task)
        self._temporary = folder / f".{task:08d}.{secrets.token_hex(8)}"
        self._ends = array("Q")
        self._digests = array("Q")
        self._length = 0
        self._fd = create(self._temporary)

    def __len__(self) -> int:
        """Rows so far."""
        return len(self._digests)

    def add(self, lines: Sequence[bytes]) -> None:
        """Adds rows, each a line of JSON with its newline, about 1 MiB of them at a time.

        Raises:
            OSError: the filesystem refused.
        """
        for line in lines:
            self._length += len(line)
            self._ends.append(self._length)
            self._digests.append(xxhash.xxh3_64_intdigest(line))
        write_all(self._fd, b"".join(lines))

    def commit(self) -> int:
        """Gives the piece its name, durably; returns a digest of all its rows.

        Raises:
            OSError: the filesystem refused; nothing is there.
        """
        tables = [np.asarray(table, dtype="<u8").tobytes() for table in (self._ends, self._digests)]
        write_all(self._fd, b"".join(tables) + _TRAILER.pack(_MAGIC, len(self), self._length))
        sync(self._fd)
        self._close()
        rename(self._temporary, self._target)
        return xxhash.xxh3_64_intdigest(tables[1])

    def abandon(self) -> None:
        """Removes what was written, unless it is committed."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PieceReader:
    """Reads a piece. Memory: 16 bytes a row.

    Attributes:
        ends: u64 of shape (rows,): row i ends before this byte.
        digests: u64 of shape (rows,).

    Raises:
        FileNotFoundError: it is not there.
        FileRefused: it is no plain file.
        ChunkCorrupt: it is not what was written.
        OSError: the filesystem refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        opened = open_file(path)
        self._file = os.fdopen(os.dup(opened.fd), "rb")
        try:
            size = self._file.seek(0, os.SEEK_END)
            magic, rows, length = self._unpack(size)
            if magic != _MAGIC or size != length + 16 * rows + _TRAILER.size:
                raise self._corrupt("a whole piece", f"one of {size} bytes")
            self.ends = self._table(length, rows)
            self.digests = self._table(length + 8 * rows, rows)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PieceReader:
        """Returns the piece."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Closes the file."""
        self._file.close()

    def __len__(self) -> int:
        """Rows."""
        return len(self.digests)

    def fit(self, first: int, most_rows: int, most_bytes: int) -> int:
        """Returns the end of a range of rows from `first` on that has so many rows and bytes, but at least one row."""
        limit = self._start(first) + most_bytes
        last = int(np.searchsorted(self.ends, np.uint64(limit), side="right"))
        return min(max(last, first + 1), first + most_rows, len(self))

    def read(self, first: int, last: int) -> CheckedLines:
        """Returns the rows of the half-open range [first, last), which is not empty.

        Raises:
            ChunkCorrupt: their bytes are not those that were written.
            OSError: the filesystem refused.
        """
        start = self._start(first)
        data = self._bytes(start, int(self.ends[last - 1]) - start)
        ends = self.ends[first:last] - np.uint64(start)
        before, view = 0, memoryview(data)
        for row, (end, expected) in enumerate(
            zip(ends.tolist(), self.digests[first:last].tolist(), strict=True), first
        ):
            actual = xxhash.xxh3_64_intdigest(view[before:end])
            if actual != expected:
                raise self._corrupt(f"XXH3 {expected:016x} of row {row}", f"{actual:016x}")
            before = end
        return CheckedLines(data=data, ends=ends, digests=self.digests[first:last])

    def _start(self, row: int) -> int:
        return int(self.ends[row - 1]) if row else 0

    def _unpack(self, size: int) -> tuple[bytes, int, int]:
        if size < _TRAILER.size:
            raise self._corrupt("a whole piece", f"one of {size} bytes")
        magic, rows, length = _TRAILER.unpack(self._bytes(size - _TRAILER.size, _TRAILER.size))
        return magic, rows, length

    def _table(self, offset: int, rows: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._bytes(offset, 8 * rows), dtype="<u8").astype(np.uint64)

    def _bytes(self, offset: int, count: int) -> bytes:
        self._file.seek(offset)
        data = self._file.read(count)
        if len(data) != count:
            raise self._corrupt(f"{count} bytes at {offset}", f"{len(data)}")
        return data

    def _corrupt(self, expected: str, actual: str) -> ChunkCorrupt:
        return ChunkCorrupt(
            f"{self._path}: expected {expected}, found {actual}: the filesystem has lost or changed what a task wrote; "
            f"run the same write again",
            file=str(self._path),
            expected=expected,
            actual=actual,
        )
