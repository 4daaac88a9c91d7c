"""Encoded samples kept on this node, for all of its processes, for later epochs and for restarts.

Files, in a folder of the user's choice, `lazyshard-kept-1/`: for each chunk one, `KEY.kept` (`kept_file`); `.room`, by
which the bytes of all are bounded (`kept_room`); and `.claims`, which stays empty: who encodes a row holds a record
lock on a byte of it that stands for this row, so that no other process of the node encodes it meanwhile. Locks end with
their processes, so nothing has to be cleared up after one that was killed.

What is read is checked against its digest, and against the line that it was made of: where anything in the folder was
changed, cut or lost, nothing is found, and the row is encoded anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard.errors import FileRefused
from lazyshard.format.kept_sample import KEPT_VERSION, MAX_RECORD_BYTES, Kept, table_size
from lazyshard.store.files import OpenFile
from lazyshard.store.kept_file import KeptFile, create_kept, open_kept
from lazyshard.store.kept_room import Room, drop, open_plain

FOLDER: Final = f"lazyshard-kept-{KEPT_VERSION}"

_CLAIMS: Final = ".claims"

_FOLDER_MODE: Final = 0o775
"""Before the umask."""

_OPEN_FILES: Final = 64
_OPEN_ROWS: Final = 1 << 20
"""Of all files held open, unless a single one has more: their slots take 24 bytes a row."""

_NOTE_S: Final = 60.0
"""How often a file that is read from is noted to be in use."""

_AGAIN_S: Final = 60.0
"""How long nothing is kept after the lock of the folder could not be had: its holder was stopped."""


class KeptSamples:
    """The samples kept in a folder. The folder is made when it is first needed.

    Safe under fork, and can be pickled (open files stay behind). Several threads may share one; what they encode at a
    time may be encoded twice.

    Args:
        directory: where the folder is to be. Who may rename or remove what lies there decides what is read, so it is
            held to what `_check_place` says.
        most: bytes that all files of chunks may take together.

    Attributes:
        damaged: records met by this process that were not what was kept.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self.folder = directory / FOLDER
        self.damaged = 0
        self._most = most
        self._room: Room | None = None
        self._claims: OpenFile | None = None
        self._files: dict[bytes, tuple[KeptFile, float]] = {}
        self._not_before = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Leaves open files behind."""
        return self.__dict__ | {"damaged": 0, "_room": None, "_claims": None, "_files": {}, "_not_before": 0.0}

    def can_fit(self, rows: int, size: int) -> bool:
        """Returns whether a record of so many bytes fits into an empty cache, in a chunk of so many rows."""
        return size <= MAX_RECORD_BYTES and table_size(rows) + size <= self._most

    def find(self, key: bytes, rows: int, row: int, line: int) -> Kept | None:
        """Returns what is kept of a row; None where nothing is.

        Args:
            key: of its chunk; see `lazyshard.format.kept_sample.chunk_key`.
            rows: of its chunk.
            row: which.
            line: digest of its line.

        Raises:
            FileRefused: the folder is somebody else's, or could be made so.
            OSError: the filesystem failed.
        """
        while (file := self._file(key, rows)) is not None:
            damaged = file.damaged
            found = file.read(row, line)
            self.damaged += file.damaged - damaged
            if not file.gone:
                return found
            self._files.pop(key, None)
        return None

    def keep(self, key: bytes, rows: int, row: int, line: int, record: bytes) -> bool:
        """Keeps the record of a row, unless one is kept already; returns whether one is now. Arguments as of `find`.

        Raises:
            FileRefused: the folder is somebody else's.
            OSError: the filesystem failed, or the disk is full.
        """
        if len(record) > MAX_RECORD_BYTES or time.monotonic() < self._not_before:
            return False
        room = self._open()
        path = room.path(key)
        with room.locked() as locked:
            if locked is None:
                self._not_before = time.monotonic() + _AGAIN_S
                return False
            file = self._file(key, rows)
            if file is not None and not file.is_current():
                self._files.pop(key, None)
                file = self._file(key, rows)
            if file is not None and file.read(row, line) is not None:
                return True
            table = 0 if file is not None else table_size(rows)
            if not room.reserve(locked, table + len(record), path):
                return False
            if file is None:
                # One that begins otherwise than it should.
                drop(path)
                file = self._hold(key, rows, create_kept(path, key, rows))
            file.append(row, record)
        return True

    def claim(self, key: bytes, row: int) -> bool:
        """Takes the right to encode a row; returns whether it was free. It ends with `release`, or with this process.

        Raises:
            FileRefused: the folder is somebody else's.
            OSError: the filesystem failed.
        """
        if self._claims is None:
            self._open()
            path = self.folder / _CLAIMS
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

    def _open(self) -> Room:
        if self._room is None:
            # Not writable to everybody, whatever the umask says.
            self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder, check in ((self.folder.parent, _check_place), (self.folder, _check)):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=_FOLDER_MODE)
                check(folder)
            self._room = Room(self.folder, self._most)
        return self._room

    def _file(self, key: bytes, rows: int) -> KeptFile | None:
        """Returns the open file of a chunk; None where there is none that is whole."""
        now = time.monotonic()
        held = self._files.pop(key, None)
        if held is not None and now - held[1] < _NOTE_S:
            # Taken out and put back, so that the dictionary is in the order of use.
            self._files[key] = held
            return held[0]
        file = held[0] if held is not None else open_kept(self._open().path(key), key, rows)
        return None if file is None else self._hold(key, rows, file)

    def _hold(self, key: bytes, rows: int, file: KeptFile) -> KeptFile:
        file.note_use()
        self._files[key] = (file, time.monotonic())
        most = min(_OPEN_FILES, max(1, _OPEN_ROWS // max(1, rows)))
        for old in list(self._files)[:-most]:
            self._files.pop(old, None)
        return file


def _place(key: bytes, row: int) -> int:
    """Returns the byte that stands for a row: one of 2**62, so that hardly ever two rows have the same."""
    return xxhash.xxh3_64_intdigest(key + row.to_bytes(8, "little")) >> 2


def _check_place(directory: Path) -> None:
    """Refuses a directory in which other users could put another folder in the place of ours.

    Its owner could, and whoever may write to it, unless it is sticky, as /tmp and /dev/shm are: there only owners
    rename and remove. Those of its group are trusted. The directories above it are not looked at.

    Raises:
        FileRefused: it is no directory; or it, or the link that stands for it, is another user's; or everybody may
            write to it.
        OSError: it cannot be looked at.
    """
    link, found = directory.lstat(), directory.stat()
    kind = f"one of uid {found.st_uid} with mode {stat.filemode(found.st_mode)}"
    trusted = (0, os.geteuid())
    if link.st_uid not in trusted and stat.S_ISLNK(link.st_mode):
        kind = f"a link of uid {link.st_uid}"
    elif not stat.S_ISDIR(found.st_mode):
        kind = "no directory"
    elif found.st_uid in trusted and (not found.st_mode & stat.S_IWOTH or found.st_mode & stat.S_ISVTX):
        return
    raise FileRefused(
        f"{directory}: expected a directory of uid {os.geteuid()} or of root to which not everybody may write, unless "
        f"it is sticky, found {kind}; name another place for encoded samples",
        file=str(directory),
        kind=kind,
    )


def _check(folder: Path) -> None:
    """Refuses a folder in which other users could put other samples in the place of ours.

    Raises:
        FileRefused: it is a link or a file, another user's, or anybody may write to it.
        OSError: it cannot be looked at.
    """
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH:
        return
    kind = f"one of uid {found.st_uid} with mode {stat.filemode(found.st_mode)}"
    raise FileRefused(
        f"{folder}: expected a folder of uid {os.geteuid()} to which not everybody may write, found {kind}; name "
        f"another place for encoded samples",
        file=str(folder),
        kind=kind,
    )
