"""Encoded samples kept on this node, for all of its processes, for later epochs and for restarts.

Files, in a folder of the user's choice, `lazyshard-kept-1/`: for each chunk one, `KEY.kept` (its bytes are in
`lazyshard.format.arrays`), read without a lock and never synced: what is read is checked by digests. `.room`, locked
by who adds or removes, holds the bytes that all take; who encodes a row holds a record lock on a byte of `.claims`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard.format import arrays
from lazyshard.format.arrays import MAX_RECORD_BYTES, SLOT, Kept, slot_at
from lazyshard.store.durable import locked, open_own, refused, remove, this_boot, write_all
from lazyshard.store.files import OpenFile, evict, files_in

FOLDER: Final = f"lazyshard-kept-{arrays.KEPT_VERSION}"

KEPT_SUFFIX: Final = ".kept"  # of the file of a chunk, behind its key

# What has another name is not ours, and neither counted nor removed
_NAME: Final = re.compile(rf"[0-9a-f]{{32}}{re.escape(KEPT_SUFFIX)}")

_OPEN_FILES: Final = 64


class _Gone(Exception):
    """The file of a chunk was cut: another one has its name now, or none."""


class KeptSamples:
    """The samples kept in a folder, made when it is first needed: FileRefused is raised if it is somebody else's.

    Safe under fork, and can be pickled (open files stay behind). Several threads may share one; what they encode at a
    time may be encoded twice. Bytes are counted before they are written, so who is killed in between has counted too
    many; where the count cannot be believed, after a restart of the machine too, the files are looked at.

    Args:
        directory: where the folder is to be; held to what `_check` says.
        most: bytes that all files of chunks may take together.

    Attributes:
        damaged: records met by this process that were not what was kept.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self.folder = directory / FOLDER
        self.damaged = 0
        self._most = most
        self._boot: str | None = None  # once the folder is there
        self._claims: OpenFile | None = None
        # In the order of use, each with when it was noted to be in use.
        self._files: dict[bytes, tuple[OpenFile, float]] = {}
        self._not_before = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"damaged": 0, "_boot": None, "_claims": None, "_files": {}, "_not_before": 0.0}

    def can_fit(self, rows: int, size: int) -> bool:
        """Returns whether a record of so many bytes fits into an empty cache, in a chunk of so many rows."""
        return size <= MAX_RECORD_BYTES and slot_at(rows) + size <= self._most

    def find(self, key: bytes, rows: int, row: int, line: int) -> Kept | None:
        """Returns what is kept of one of so many rows of a chunk, made of a line with this digest."""
        while (file := self._file(key, rows)) is not None:
            try:
                return self._read(file, key, row, line)
            except _Gone:
                self._files.pop(key, None)
        return None

    def keep(self, key: bytes, rows: int, row: int, line: int, record: bytes) -> bool:
        """Keeps the record of a row, unless one is kept already; returns whether one is now. Arguments as of `find`."""
        if len(record) > MAX_RECORD_BYTES or time.monotonic() < self._not_before:
            return False
        self._open()
        path = self._path(key)
        with locked(self.folder / ".room") as counted:
            if counted is None:
                # Its holder was stopped.
                self._not_before = time.monotonic() + 60.0
                return False
            if key in self._files and not os.fstat(self._files[key][0].fd).st_nlink:
                self._files.pop(key, None)
            if self.find(key, rows, row, line) is not None:
                return True
            file = self._file(key, rows)
            if not self._reserve(counted, len(record) + (0 if file is not None else slot_at(rows)), path):
                return False
            if file is None:
                # One that begins otherwise than it should.
                _drop(path)
                file = OpenFile(open_own(path, os.O_CREAT | os.O_EXCL), path, 0)
                os.ftruncate(file.fd, slot_at(rows))
                write_all(file.fd, arrays.encode_head(key, rows), 0)
                self._files[key] = file, time.monotonic()
            _append(file.fd, row, record)
        return True

    def claim(self, key: bytes, row: int) -> bool:
        """Takes the right to encode a row; returns whether it was free. It ends by `release`, or with this process."""
        if self._claims is None:
            self._open()
            path = self.folder / ".claims"
            self._claims = OpenFile(open_own(path), path, 0)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._claims.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(key, row))
            return True
        return False

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
            self._boot = this_boot()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{KEPT_SUFFIX}"

    def _read(self, file: OpenFile, key: bytes, row: int, line: int) -> Kept | None:
        """Returns what is kept of a row; None where nothing is."""
        data = os.pread(file.fd, SLOT.size, slot_at(row))
        if len(data) < SLOT.size:
            raise _Gone
        offset, size, digest = SLOT.unpack(data)
        if not offset:
            return None
        found = None
        if 0 < size <= MAX_RECORD_BYTES and offset < 1 << 62:
            record = np.empty(size, np.uint8)
            if os.preadv(file.fd, [record.data], offset) == size:
                found = arrays.decode_record(record, digest, key, row, line)
        if found is None and not os.fstat(file.fd).st_size:
            raise _Gone
        self.damaged += found is None
        return found

    def _reserve(self, counted: int, size: int, keep: Path) -> bool:
        """Counts so many bytes of the file `keep` as taken, once there is room for them; returns whether there was."""
        data = os.pread(counted, 25, 0)  # one byte more than there should be
        taken = int.from_bytes(data[:8], "little")
        if data != self._count(taken) or taken + size > self._most:
            files = [file for file in files_in(self.folder) if _NAME.fullmatch(file[0].name)]
            taken = sum(found.st_size for _, found in files)
            if taken + size > self._most >= size:
                others = sorted((file for file in files if file[0] != keep), key=lambda one: one[1].st_mtime_ns)
                # A part of it is left free, so that the files are not looked at for each sample.
                taken = evict(others, taken, self._most - self._most // 16 - size, _drop)
        fits = taken + size <= self._most
        os.pwrite(counted, self._count(taken + size * fits), 0)
        return fits

    def _count(self, taken: int) -> bytes:
        # With a digest of it and of which start of the machine it was.
        data = taken.to_bytes(8, "little")
        return data + xxhash.xxh3_128_digest(data + str(self._boot).encode())

    def _file(self, key: bytes, rows: int) -> OpenFile | None:
        """Returns the file of a chunk, None where there is none that is whole."""
        now, (file, noted) = time.monotonic(), self._files.pop(key, (None, float("-inf")))
        if file is None:
            self._open()
            with contextlib.suppress(FileNotFoundError):
                file = OpenFile(open_own(self._path(key), 0), self._path(key), 0)
            head = arrays.encode_head(key, rows)
            if file is None or os.pread(file.fd, len(head), 0) != head or os.fstat(file.fd).st_size < slot_at(rows):
                return None
        if now - noted >= 60.0:
            noted = now
            # Its time of modification decides what goes first.
            with contextlib.suppress(OSError):
                os.utime(file.fd)
        self._files[key] = file, noted
        for old in list(self._files)[:-_OPEN_FILES] if len(self._files) > _OPEN_FILES else ():
            self._files.pop(old, None)
        return file


def _append(fd: int, row: int, record: bytes) -> None:
    """Adds the record of a row, for which there is room; the folder is locked. On an OSError nothing is added."""
    end = os.fstat(fd).st_size
    try:
        write_all(fd, record, end)
        write_all(fd, arrays.encode_slot(record, end), slot_at(row))
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, end)
        raise


def _drop(path: Path) -> bool:
    """Removes the file of a chunk. It is cut before, so its room is free at once, whoever has it open."""
    with contextlib.suppress(FileNotFoundError):
        file = OpenFile(open_own(path, 0), path, 0)
        os.ftruncate(file.fd, 0)
    remove(path)
    return True


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
