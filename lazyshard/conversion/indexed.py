"""Megatron's IndexedDataset, `PREFIX.idx` and `PREFIX.bin`: the layout of its index, and a reader.

    byte    bytes                    of PREFIX.idx, all numbers little-endian
       0        9                    b"MMIDIDX", two zero bytes
       9        8                    version, 1
      17        1                    code of the type of a token
      18        8                    n, the number of sequences
      26        8                    d + 1, with d the number of documents
      34      4 n                    int32: tokens of each sequence
              8 n                    int64: byte of PREFIX.bin at which each sequence begins
              8 (d + 1)              int64: boundaries; document k is the sequences of [boundary k, boundary k + 1)
              n, or none             int8: modes, which neither Megatron's `GPTDataset` nor this reader reads

`PREFIX.bin` contains only tokens. The layout is that of megatron-core 0.16. Its own reader is not used: it maps the
index into memory, so a file truncated during reading kills the process (SIGBUS); it does not check sizes, offsets or
boundaries; and importing it loads torch. This reader uses `pread` and checks every number of an index before use.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.errors import FileInvalid
from lazyshard.part import Array, Int64Array
from lazyshard.store.files import OpenFile, open_given_file

INDEX_SUFFIX: Final = ".idx"
DATA_SUFFIX: Final = ".bin"
MAGIC: Final = b"MMIDIDX\0\0"
HEADER_BYTES: Final = 34

# Token types by name; the code of a type is its position in this list, from 1
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
}


class IndexHeader(NamedTuple):
    """The header of an `.idx` file; `token` is the type of a token, one of `DTYPES`."""

    token: np.dtype[Any]
    sequences: int
    documents: int

    @property
    def starts(self) -> tuple[int, int, int, int]:
        """Bytes at which the lengths, pointers, document boundaries and, if present, modes begin."""
        pointers = HEADER_BYTES + 4 * self.sequences
        boundaries = pointers + 8 * self.sequences
        return HEADER_BYTES, pointers, boundaries, boundaries + 8 * (self.documents + 1)

    @classmethod
    def decode(cls, head: bytes, size: int, file: str) -> IndexHeader:
        """Decodes the first `HEADER_BYTES` of a file, or fewer if it is shorter, and checks them against its size.

        So memory allocated by these numbers is limited by the size of the file. Raises FileInvalid.
        """
        if not head.startswith(MAGIC):
            actual = f"{head[: len(MAGIC)]!r}"
            # fairseq's older format, which megatron-core no longer reads either.
            if head.startswith(b"TNTIDX"):
                actual = "fairseq's old format; write it again with Megatron's tools/preprocess_data.py"
            raise refuse(file, f"an index of Megatron's IndexedDataset, which begins with {MAGIC!r}", actual)
        if len(head) < HEADER_BYTES:
            raise refuse(file, f"a header of {HEADER_BYTES} bytes", f"{size} bytes; the file was truncated")
        version, code, sequences, boundaries = struct.unpack("<QBQQ", head[len(MAGIC) : HEADER_BYTES])
        if version != 1:
            raise refuse(file, "version 1", f"version {version}")
        if not 1 <= code <= len(DTYPES):
            raise refuse(file, f"a token type from 1 to {len(DTYPES)}", f"code {code}")
        if boundaries == 0:
            raise refuse(file, "at least one document boundary", "none")
        header = cls(list(DTYPES.values())[code - 1], sequences, boundaries - 1)
        plain = header.starts[-1]
        if size not in (plain, plain + sequences):
            hint = "; the file was truncated, or is still being written" if size < plain else ""
            modes, of = f"{plain + sequences} with modes", f"{sequences} sequences and {boundaries - 1} documents"
            raise refuse(file, f"{plain} bytes, or {modes}, for {of}", f"{size}{hint}")
        return header


class IndexedSequences(NamedTuple):
    """Consecutive sequences of an index: the tokens of each, and its first byte in the data file."""

    lengths: Int64Array
    pointers: Int64Array


class IndexedReader:
    """An open pair of files: an `.idx` file and its `.bin` file in the same folder. Every method may raise OSError.

    Raises FileInvalid: a file is invalid, as far as the header, the first and last document boundary and the last
    sequence show; FileNotFoundError, FileRefused, AccessRefused: a file cannot be opened.
    """

    def __init__(self, index: str | os.PathLike[str]) -> None:
        self.index: Final = os.fspath(index)
        self.data: Final = data_path(self.index)
        self._index: OpenFile | None = open_given_file(Path(self.index))
        self._data: OpenFile | None = open_given_file(Path(self.data))
        self.data_size: Final = self._data.size
        head = self._index.read(0, min(HEADER_BYTES, self._index.size))
        self.header: Final = IndexHeader.decode(head, self._index.size, self.index)
        # Detects most truncated files before any data are read.
        self.boundaries(0, 0)
        self.boundaries(self.header.documents, self.header.documents)
        if self.header.sequences:
            self.sequences(self.header.sequences - 1, self.header.sequences)

    def boundaries(self, first: int, stop: int) -> Int64Array:
        """Returns the boundaries of the documents [first, stop), shape (stop - first + 1,), checked.

        Document first + k consists of the sequences [result[k], result[k + 1]).
        """
        found = self._numbers("<i8", self.header.starts[2], first, stop + 1)
        check_boundaries(found, first, self.header, self.index)
        return found

    def sequences(self, first: int, stop: int) -> IndexedSequences:
        """Returns the index entries of the sequences [first, stop), checked; 16 bytes of memory per sequence."""
        lengths_at, pointers_at, *_ = self.header.starts
        lengths = self._numbers("<i4", lengths_at, first, stop)
        pointers = self._numbers("<i8", pointers_at, first, stop)
        check_sequences(lengths, pointers, first, self.header, self.data_size, self.index)
        return IndexedSequences(lengths, pointers)

    def tokens(self, begin: int, count: int) -> Array:
        """Returns `count` tokens of the data file, in its own type and read-only, from the byte `begin` of a sequence.

        They are read into memory, so callers limit `count`. Raises FileInvalid: the file was truncated.
        """
        assert self._data is not None
        size = count * self.header.token.itemsize
        data = self._data.read(begin, size)
        if len(data) < size:
            actual = f"its end at byte {begin + len(data)}: the file was truncated while it was read"
            raise refuse(self.data, f"{size} bytes at byte {begin}", actual, byte=begin + len(data))
        return np.frombuffer(data, self.header.token)

    def close(self) -> None:
        """Closes both files. May be called twice."""
        self._index = self._data = None

    def _numbers(self, kind: str, begin: int, first: int, stop: int) -> Int64Array:
        assert self._index is not None and 0 <= first <= stop
        width = np.dtype(kind).itemsize
        data = self._index.read(begin + first * width, (stop - first) * width)
        if len(data) < (stop - first) * width:
            raise refuse(self.index, f"its {self._index.size} bytes", "fewer: it was truncated while it was read")
        return np.frombuffer(data, kind).astype(np.int64)


def check_boundaries(boundaries: Int64Array, first: int, header: IndexHeader, file: str) -> None:
    """Checks the document boundaries from number `first` on; raises FileInvalid."""
    back = np.concatenate([[False], boundaries[1:] < boundaries[:-1]])
    if (wrong := np.flatnonzero((boundaries < 0) | (boundaries > header.sequences) | back)).size:
        at = int(wrong[0])
        low = int(boundaries[at - 1]) if back[at] else 0
        what = f"document boundary {first + at} from {low} to {header.sequences}"
        raise refuse(file, what, str(boundaries[at]))
    if first == 0 and boundaries[0] != 0:
        raise refuse(file, "documents from sequence 0 on", f"from {boundaries[0]} on")
    if first + len(boundaries) == header.documents + 1 and boundaries[-1] != header.sequences:
        actual = f"{boundaries[-1]} of them; the program that wrote the file did not end the last document"
        raise refuse(file, f"all {header.sequences} sequences in documents", actual)


def check_sequences(
    lengths: Int64Array, pointers: Int64Array, first: int, header: IndexHeader, data_size: int, file: str
) -> None:
    """Checks that the sequences from number `first` on lie within the `.bin` file; raises FileInvalid."""
    width = header.token.itemsize
    # Lengths are below 2**31, so nothing overflows; pointers can have any value, so they are only compared.
    if not (wrong := np.flatnonzero((lengths < 0) | (pointers < 0) | (pointers > data_size - lengths * width))).size:
        return
    at = int(wrong[0])
    length, begin = int(lengths[at]), int(pointers[at])
    expected = f"sequence {first + at} within the {data_size} bytes of its {DATA_SUFFIX} file"
    actual = f"{length} tokens of {header.token.name} at byte {begin}, up to byte {begin + length * width}"
    if length >= 0 and begin >= 0:
        actual += f"; the {DATA_SUFFIX} file was truncated, is still being written, or belongs to another index"
    raise refuse(file, expected, actual, sequence=first + at)


def bounds_of(dtype: str) -> tuple[int, int]:
    """Returns the smallest and the largest integer of a token type; for floats, the finite range.

    >>> bounds_of("uint16"), bounds_of("int8")
    ((0, 65535), (-128, 127))
    """
    kind = DTYPES[dtype]
    limits = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
    return int(limits.min), int(limits.max)


def refuse(file: str, expected: str, actual: str, **fields: Any) -> FileInvalid:
    """Returns the error for an invalid index or data file."""
    message = f"{file}: expected {expected}, found {actual}"
    return FileInvalid(message, file=file, expected=expected, actual=actual, **fields)


def data_path(index: str) -> str:
    """Returns the path of the data file of an index; raises FileInvalid if the index has another suffix."""
    if not index.endswith(INDEX_SUFFIX):
        expected = f"a name that ends in {INDEX_SUFFIX}; the data are in the file of the same name with {DATA_SUFFIX}"
        raise refuse(index, expected, index)
    return index[: -len(INDEX_SUFFIX)] + DATA_SUFFIX
