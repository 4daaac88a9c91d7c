"""Reads Megatron's IndexedDataset, `PREFIX.idx` with `PREFIX.bin`, piece by piece.

By `pread` and not by mapping the files: of a mapped file that somebody cuts, or whose filesystem fails, the system ends
the process (SIGBUS); here it is an error that says where. Nothing is read but what is asked for, so opening a file
costs the same however large it is, and every number of an index is checked before anything is done by it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.errors import IndexedInvalid
from lazyshard.format.indexed import (
    BOUNDARY,
    DATA_SUFFIX,
    HEADER_BYTES,
    INDEX_SUFFIX,
    LENGTH,
    MODE,
    POINTER,
    IndexHeader,
    Ints,
    check_boundaries,
    check_sequences,
    refuse,
)
from lazyshard.store.files import OpenFile, open_given_file

_READ_BYTES: Final = 64 << 20
"""As much is asked for at a time: Linux gives at most 2 GiB, and memory is taken for what is asked."""


class Sequences(NamedTuple):
    """Sequences that follow each other in an index, m of them.

    Attributes:
        lengths: tokens of each, shape (m,).
        pointers: byte of the data file at which each begins, shape (m,).
        modes: mode of each, shape (m,); None where the file has none.
    """

    lengths: Ints
    pointers: Ints
    modes: Ints | None


class IndexedReader:
    """An open pair of files.

    Args:
        index: path of the `.idx` file; the `.bin` file lies beside it.

    Raises:
        IndexedInvalid: one of them is not what it has to be, as far as the header, the first and last boundary of
            documents and the last sequence tell.
        FileNotFoundError, FileRefused, FileUnreadable, OSError: one of them cannot be opened or read.

    Attributes:
        header: what the index says of itself.
        index: path of the index.
        data: path of the data file.
        data_size: bytes of the data file when it was opened.
    """

    def __init__(self, index: str | os.PathLike[str]) -> None:
        self.index: Final = os.fspath(index)
        self.data: Final = data_path(self.index)
        self._index: OpenFile | None = open_given_file(Path(self.index))
        self._data: OpenFile | None = open_given_file(Path(self.data))
        self.data_size: Final = self._data.size
        head = _pread(self._index, min(HEADER_BYTES, self._index.size), 0)
        self.header: Final = IndexHeader.decode(head, self._index.size, self.index)
        self._check_ends()

    def boundaries(self, first: int, stop: int) -> Ints:
        """Returns the boundaries of the documents [first, stop): which sequences each one holds.

        Returns:
            Shape (stop - first + 1,): document first + k is the sequences [result[k], result[k + 1]).

        Raises:
            IndexedInvalid: a boundary is outside of the index, or below the one before.
            OSError: the filesystem failed.
        """
        found = self._numbers(BOUNDARY, self.header.boundaries_at, first, stop + 1)
        check_boundaries(found, first, self.header, self.index)
        return found

    def sequences(self, first: int, stop: int) -> Sequences:
        """Returns what the index says of the sequences [first, stop). It takes 20 bytes of memory for each.

        Raises:
            IndexedInvalid: one of them does not lie in the data file.
            OSError: the filesystem failed.
        """
        header = self.header
        lengths = self._numbers(LENGTH, header.lengths_at, first, stop)
        pointers = self._numbers(POINTER, header.pointers_at, first, stop)
        check_sequences(lengths, pointers, first, header, self.data_size, self.index)
        modes = self._numbers(MODE, header.modes_at, first, stop) if header.has_modes else None
        return Sequences(lengths, pointers, modes)

    def tokens(self, begin: int, count: int) -> npt.NDArray[Any]:
        """Returns tokens of the data file, of its own type; read-only.

        Args:
            begin: byte at which the first begins, of a sequence that `sequences` has given.
            count: how many; memory is taken for them, so callers see to it that it is not too much.

        Raises:
            IndexedInvalid: the file has become shorter since it was opened.
            OSError: the filesystem failed.
        """
        assert self._data is not None
        size = count * self.header.token.itemsize
        data = _pread(self._data, size, begin)
        if len(data) < size:
            actual = f"its end at byte {begin + len(data)}: the file was cut while it was read"
            raise refuse(self.data, f"{size} bytes at byte {begin}", actual, byte=begin + len(data))
        return np.frombuffer(data, self.header.token)

    def close(self) -> None:
        """Closes both files. May be called twice."""
        self._index = self._data = None

    def _check_ends(self) -> None:
        """Looks at the ends of what the index says: so files that were cut are mostly refused before any is read."""
        header = self.header
        self.boundaries(0, 0)
        self.boundaries(header.documents, header.documents)
        if header.sequences:
            self.sequences(header.sequences - 1, header.sequences)

    def _numbers(self, kind: np.dtype[Any], begin: int, first: int, stop: int) -> Ints:
        assert self._index is not None
        assert 0 <= first <= stop
        size = (stop - first) * kind.itemsize
        data = _pread(self._index, size, begin + first * kind.itemsize)
        if len(data) < size:
            raise refuse(self.index, f"the {self._index.size} bytes that it had", "fewer: it was cut while it was read")
        return np.frombuffer(data, kind).astype(np.int64)


def data_path(index: str) -> str:
    """Returns the path of the data file that belongs to an index.

    Raises:
        IndexedInvalid: the name of the index does not end in `.idx`, so nothing tells.
    """
    if not index.endswith(INDEX_SUFFIX):
        raise IndexedInvalid(
            f"{index}: expected a name that ends in {INDEX_SUFFIX}, as the data are in the file of that name with "
            f"{DATA_SUFFIX} instead",
            file=index,
            expected=f"a name that ends in {INDEX_SUFFIX}",
            actual=index,
        )
    return index[: -len(INDEX_SUFFIX)] + DATA_SUFFIX


def _pread(file: OpenFile, count: int, offset: int) -> bytes:
    """Returns so many bytes, fewer at the end of the file."""
    parts = []
    while count > 0 and (part := os.pread(file.fd, min(count, _READ_BYTES), offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
