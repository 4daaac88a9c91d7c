"""The file of one chunk in the folder of kept samples: see `lazyshard.format.kept_sample` for its bytes.

It is read without a lock, with one system call a sample. It is added to by who holds the lock of the folder: first the
record, at the end, then the slot that says where it is. Who is killed in between leaves bytes that no slot tells of.
Nothing is synced: what a power cut leaves is what its digests say is whole.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from lazyshard.format.kept_sample import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    SLOT_BYTES,
    Kept,
    Slot,
    decode_record,
    decode_slot,
    encode_head,
    encode_slot,
    slot_at,
    slot_of,
    table_size,
)
from lazyshard.store.durable import write_at
from lazyshard.store.files import OpenFile
from lazyshard.store.kept_room import open_plain


class KeptFile:
    """An open one. Memory: 24 bytes a row.

    Args:
        file: open for reading and writing.
        key: of the chunk.
        slots: of all rows, as they were when it was opened.

    Attributes:
        gone: whether it was found to be cut: another one has its name now, or none.
        damaged: records that were not what their slots say.
    """

    def __init__(self, file: OpenFile, key: bytes, slots: bytearray) -> None:
        self.gone = False
        self.damaged = 0
        self._file = file
        self._key = key
        self._slots = slots

    def read(self, row: int, line: int) -> Kept | None:
        """Returns what is kept of a row, made of a line with this digest; None where nothing is.

        Raises:
            OSError: it cannot be read.
        """
        slot = decode_slot(self._slots, row)
        if slot[0] and (found := self._record(slot, row, line)) is not None:
            return found
        # Somebody else may have kept it, or kept it anew, since.
        data = os.pread(self._file.fd, SLOT_BYTES, slot_at(row))
        if len(data) < SLOT_BYTES:
            self.gone = True
            return None
        self._slots[row * SLOT_BYTES : (row + 1) * SLOT_BYTES] = data
        newer = decode_slot(data)
        if newer != slot and newer[0]:
            slot, found = newer, self._record(newer, row, line)
            if found is not None:
                return found
        self.damaged += bool(slot[0])
        return None

    def is_current(self) -> bool:
        """Returns whether it still has its name, as far as the locked folder is concerned. Raises OSError."""
        return not self.gone and os.fstat(self._file.fd).st_nlink > 0

    def append(self, row: int, record: bytes) -> None:
        """Adds the record of a row, for which there is room; the folder is locked.

        Raises:
            OSError: the device refused; nothing was added.
        """
        fd = self._file.fd
        end = os.fstat(fd).st_size
        slot = encode_slot(slot_of(record, end))
        try:
            write_at(fd, record, end)
            write_at(fd, slot, slot_at(row))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, end)
            raise
        self._slots[row * SLOT_BYTES : (row + 1) * SLOT_BYTES] = slot

    def note_use(self) -> None:
        """Notes that it is used now: its time of modification decides what goes first."""
        with contextlib.suppress(OSError):
            os.utime(self._file.fd)

    def _record(self, slot: Slot, row: int, line: int) -> Kept | None:
        offset, size, digest = slot
        if not 0 < size <= MAX_RECORD_BYTES or offset >= 1 << 62:
            return None
        data = np.empty(size, np.uint8)
        if os.preadv(self._file.fd, [data.data], offset) != size:
            return None
        return decode_record(data, digest, self._key, row, line)


def open_kept(path: Path, key: bytes, rows: int) -> KeptFile | None:
    """Opens the file of a chunk; None where there is none, or one that begins otherwise than it should.

    Raises:
        FileRefused: something else is in its place.
        OSError: it cannot be opened or read.
    """
    try:
        file = OpenFile(open_plain(path), path, 0)
    except FileNotFoundError:
        return None
    size = table_size(rows)
    data = os.pread(file.fd, size, 0)
    if len(data) != size or data[:HEAD_BYTES] != encode_head(key, rows):
        return None
    return KeptFile(file, key, bytearray(data[HEAD_BYTES:]))


def create_kept(path: Path, key: bytes, rows: int) -> KeptFile:
    """Makes the file of a chunk, for which there is room; the folder is locked, and nothing has that name.

    Raises:
        OSError: the device refused; a file that is not whole may be left, which is none to `open_kept`.
    """
    fd = open_plain(path, os.O_CREAT | os.O_EXCL)
    file = OpenFile(fd, path, 0)
    os.ftruncate(fd, table_size(rows))
    write_at(fd, encode_head(key, rows), 0)
    return KeptFile(file, key, bytearray(rows * SLOT_BYTES))
