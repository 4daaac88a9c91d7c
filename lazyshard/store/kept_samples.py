"""Encoded samples kept on this node, for all of its processes, for later epochs and for restarts.

Files, in a folder of the user's choice, `lazyshard-kept-1/`: for each chunk one, `KEY.kept` (its bytes are in
`lazyshard.format.arrays`); `.room`, which bounds the bytes of all; and `.claims`, which stays empty: who encodes a
row holds a record lock on a byte of it that stands for this row. Locks end with their processes.

A chunk's file is read without a lock, and added to by who holds the lock of the folder: first the record, at the end,
then the slot that says where it is. Nothing is synced. What is read is checked against its digest, and against the line
that it was made of: where anything was changed, cut or lost, nothing is found, and the row is encoded anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard.format import arrays
from lazyshard.format.arrays import MAX_RECORD_BYTES, SLOT_BYTES, Kept, decode_slot, slot_at
from lazyshard.store import room
from lazyshard.store.durable import open_plain, refused, remove, write_at
from lazyshard.store.files import OpenFile

FOLDER: Final = f"lazyshard-kept-{arrays.KEPT_VERSION}"

KEPT_SUFFIX: Final = ".kept"  # of the file of a chunk, behind its key

_NAME: Final = re.compile(rf"[0-9a-f]{{32}}{re.escape(KEPT_SUFFIX)}")
"""What has another name is not ours, and neither counted nor removed."""

_SPARE: Final = 16
"""When room is made, a part of it as large as this is left free: the files are then not looked at for each sample."""

_COUNT: Final = struct.Struct("<Q8sQ")  # bytes taken, which start of the machine it was, digest of both

_OPEN_FILES: Final = 64
_OPEN_ROWS: Final = 1 << 20
"""Of all files held open, unless a single one has more: their slots take 24 bytes a row."""

_NOTE_S: Final = 60.0  # how often a file that is read from is noted to be in use
_AGAIN_S: Final = 60.0  # how long nothing is kept after the lock of the folder could not be had: its holder was stopped


def drop(path: Path) -> None:
    """Removes the file of a chunk. It is cut before, so its room is free at once, whoever has it open."""
    with contextlib.suppress(FileNotFoundError):
        fd = open_plain(path)
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
    remove(path)


class _ChunkFile:
    """The open file of one chunk, with the slots of all rows as they were then. Memory: 24 bytes a row.

    Attributes:
        gone: whether it was found to be cut: another one has its name now, or none.
        damaged: records that were not what their slots say.
    """

    def __init__(self, file: OpenFile, key: bytes, slots: bytearray) -> None:
        self.gone = False
        self.damaged = 0
        self.file = file
        self._key = key
        self._slots = slots

    def read(self, row: int, line: int) -> Kept | None:
        """Returns what is kept of a row, made of a line with this digest; None where nothing is."""
        slot = decode_slot(self._slots, row)
        if slot[0] and (found := self._record(slot, row, line)) is not None:
            return found
        # Somebody else may have kept it, or kept it anew, since.
        data = os.pread(self.file.fd, SLOT_BYTES, slot_at(row))
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

    def append(self, row: int, record: bytes) -> None:
        """Adds the record of a row, for which there is room; the folder is locked. On an OSError nothing is added."""
        fd = self.file.fd
        end = os.fstat(fd).st_size
        slot = arrays.encode_slot(arrays.slot_of(record, end))
        try:
            write_at(fd, record, end)
            write_at(fd, slot, slot_at(row))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, end)
            raise
        self._slots[row * SLOT_BYTES : (row + 1) * SLOT_BYTES] = slot

    def _record(self, slot: arrays.Slot, row: int, line: int) -> Kept | None:
        offset, size, digest = slot
        if not 0 < size <= MAX_RECORD_BYTES or offset >= 1 << 62:
            return None
        data = np.empty(size, np.uint8)
        if os.preadv(self.file.fd, [data.data], offset) != size:
            return None
        return arrays.decode_record(data, digest, self._key, row, line)


def _open_file(path: Path, key: bytes, rows: int, *, make: bool = False) -> _ChunkFile | None:
    """Opens the file of a chunk, None where there is none that is whole; or makes it, for which there is room."""
    head, size = arrays.encode_head(key, rows), slot_at(rows)
    try:
        file = OpenFile(open_plain(path, os.O_CREAT | os.O_EXCL if make else 0), path, 0)
    except FileNotFoundError:
        return None
    if make:
        os.ftruncate(file.fd, size)
        write_at(file.fd, head, 0)
    data = os.pread(file.fd, size, 0)
    if len(data) != size or not data.startswith(head):
        return None
    return _ChunkFile(file, key, bytearray(data[len(head) :]))


class KeptSamples:
    """The samples kept in a folder, made when it is first needed: FileRefused is raised if it is somebody else's.

    Safe under fork, and can be pickled (open files stay behind). Several threads may share one; what they encode at a
    time may be encoded twice.

    `.room` holds how many bytes the files of chunks take at the most. Who adds to one of them, or removes some, has it
    locked for that moment. Bytes are counted before they are written, so who is killed in between has counted too many,
    never too few. Where the count cannot be believed, after a restart of the machine too, the files are looked at.

    Args:
        directory: where the folder is to be. Who may rename or remove what lies there decides what is read, so it is
            held to what `_check` says.
        most: bytes that all files of chunks may take together.

    Attributes:
        damaged: records met by this process that were not what was kept.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self.folder = directory / FOLDER
        self.damaged = 0
        self._most = most
        self._boot: bytes | None = None  # once the folder is there
        self._claims: OpenFile | None = None
        self._files: dict[bytes, tuple[_ChunkFile, float]] = {}
        self._not_before = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"damaged": 0, "_boot": None, "_claims": None, "_files": {}, "_not_before": 0.0}

    def can_fit(self, rows: int, size: int) -> bool:
        """Returns whether a record of so many bytes fits into an empty cache, in a chunk of so many rows."""
        return size <= MAX_RECORD_BYTES and slot_at(rows) + size <= self._most

    def find(self, key: bytes, rows: int, row: int, line: int) -> Kept | None:
        """Returns what is kept of one of so many rows of a chunk, made of a line with this digest."""
        while (file := self._file(key, rows)) is not None:
            damaged = file.damaged
            found = file.read(row, line)
            self.damaged += file.damaged - damaged
            if not file.gone:
                return found
            self._files.pop(key, None)
        return None

    def keep(self, key: bytes, rows: int, row: int, line: int, record: bytes) -> bool:
        """Keeps the record of a row, unless one is kept already; returns whether one is now. Arguments as of `find`."""
        if len(record) > MAX_RECORD_BYTES or time.monotonic() < self._not_before:
            return False
        self._open()
        path = self._path(key)
        with room.locked(self.folder / ".room") as locked:
            if locked is None:
                self._not_before = time.monotonic() + _AGAIN_S
                return False
            file = self._file(key, rows)
            if file is not None and (file.gone or not os.fstat(file.file.fd).st_nlink):
                self._files.pop(key, None)
                file = self._file(key, rows)
            if file is not None and file.read(row, line) is not None:
                return True
            table = 0 if file is not None else slot_at(rows)
            if not self._reserve(locked, table + len(record), path):
                return False
            if file is None:
                # One that begins otherwise than it should.
                drop(path)
                if (made := _open_file(path, key, rows, make=True)) is None:
                    return False
                file = self._hold(key, rows, made)
            file.append(row, record)
        return True

    def claim(self, key: bytes, row: int) -> bool:
        """Takes the right to encode a row; returns whether it was free. It ends by `release`, or with this process."""
        if self._claims is None:
            self._open()
            path = self.folder / ".claims"
            self._claims = OpenFile(open_plain(path, os.O_CREAT), path, 0)
        try:
            fcntl.lockf(self._claims.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(key, row))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, key: bytes, row: int) -> None:
        """Gives that right back."""
        if self._claims is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._claims.fd, fcntl.LOCK_UN, 1, _place(key, row))

    def _open(self) -> None:
        if self._boot is None:
            self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent, self.folder):
                # Not writable to everybody, whatever the umask says.
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o775)
                _check(folder, own=folder == self.folder)
            boot = room.this_boot()
            self._boot = xxhash.xxh3_64_digest(boot.encode()) if boot else bytes(8)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{KEPT_SUFFIX}"

    def _reserve(self, locked: int, size: int, keep: Path) -> bool:
        """Counts so many bytes of the file `keep` as taken, once there is room for them; returns whether there was."""
        data = os.pread(locked, _COUNT.size + 1, 0)
        taken: int = _COUNT.unpack(data)[0] if len(data) == _COUNT.size else -1
        if taken < 0 or data != self._count(taken) or taken + size > self._most:
            taken = self._make_room(size, keep)
        fits = taken + size <= self._most
        os.pwrite(locked, self._count(taken + size * fits), 0)
        return fits

    def _make_room(self, size: int, keep: Path) -> int:
        files = [file for file in room.files_in(self.folder) if _NAME.fullmatch(file.path.name)]
        taken = sum(file.size for file in files)
        if taken + size <= self._most or size > self._most:
            return taken

        def free(file: room.FoundFile) -> int:
            drop(file.path)
            return file.size

        others = sorted((file for file in files if file.path != keep), key=lambda one: one.used_at)
        return room.evict(others, taken, self._most - self._most // _SPARE - size, free)

    def _count(self, taken: int) -> bytes:
        assert self._boot is not None
        return _COUNT.pack(taken, self._boot, xxhash.xxh3_64_intdigest(taken.to_bytes(8, "little") + self._boot))

    def _file(self, key: bytes, rows: int) -> _ChunkFile | None:
        now = time.monotonic()
        held = self._files.pop(key, None)
        if held is not None and now - held[1] < _NOTE_S:
            # Taken out and put back, so that the dictionary is in the order of use.
            self._files[key] = held
            return held[0]
        self._open()
        file = held[0] if held is not None else _open_file(self._path(key), key, rows)
        return None if file is None else self._hold(key, rows, file)

    def _hold(self, key: bytes, rows: int, file: _ChunkFile) -> _ChunkFile:
        # Its time of modification decides what goes first.
        with contextlib.suppress(OSError):
            os.utime(file.file.fd)
        self._files[key] = (file, time.monotonic())
        most = min(_OPEN_FILES, max(1, _OPEN_ROWS // max(1, rows)))
        for old in list(self._files)[:-most]:
            self._files.pop(old, None)
        return file


def _place(key: bytes, row: int) -> int:
    """Returns the byte that stands for a row: one of 2**62, so that hardly ever two rows have the same."""
    return xxhash.xxh3_64_intdigest(key + row.to_bytes(8, "little")) >> 2


def _check(folder: Path, *, own: bool) -> None:
    """Refuses our `own` folder, or the directory that it lies in, where other users could put other samples there.

    The directory's owner could, and whoever may write to it, unless it is sticky, as /tmp and /dev/shm are: there only
    owners rename and remove. Those of its group are trusted. The directories above it are not looked at.
    """
    uid, link = os.geteuid(), folder.lstat()
    found = link if own else folder.stat()
    trusted = (uid,) if own else (0, uid)
    kind = f"one of uid {found.st_uid} with mode {stat.filemode(found.st_mode)}"
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in trusted:
        kind = f"a link of uid {link.st_uid}"
    elif not stat.S_ISDIR(found.st_mode):
        kind = kind if own else "no directory"
    elif found.st_uid in trusted and (not found.st_mode & stat.S_IWOTH or (not own and found.st_mode & stat.S_ISVTX)):
        return
    expected = f"a folder of uid {uid}{'' if own else ' or of root'} to which not everybody may write"
    way = "; name another place for encoded samples"
    raise refused(folder, expected if own else f"{expected}, unless it is sticky", kind, way)
