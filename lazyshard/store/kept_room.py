"""Room in the folder of kept samples: how much is taken, and what goes when something new comes.

Files: `.room` holds how many bytes the files of chunks take at the most. Whoever adds to one of them, or removes some,
holds a flock on it for that moment, so one process at a time does; a lock ends with its process, however that ends.
Bytes are counted before they are written, so who is killed in between has counted too many, never too few. Where the
count cannot be believed, which a restart of the machine is a reason for too, the files are looked at.

What was used longest ago goes first, a chunk at a time. A file is cut before its name is taken away: so its room is
free at once, also where another process has it open. That one reads nothing there any more, and opens the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from lazyshard.store.durable import open_plain, remove

KEPT_SUFFIX: Final = ".kept"
"""Of the file of a chunk, behind its key."""

_ROOM: Final = ".room"
_NAME: Final = re.compile(rf"[0-9a-f]{{32}}{re.escape(KEPT_SUFFIX)}")
"""What has another name is not ours, and neither counted nor removed."""

_LOCK_S: Final = 10.0
"""To add a sample takes microseconds, to make room milliseconds. One that holds the lock for longer was stopped."""

_FIRST_PAUSE_S: Final = 0.0001
_LAST_PAUSE_S: Final = 0.01

_SPARE: Final = 16
"""When room is made, a part of it as large as this is left free: the files are then not looked at for each sample."""

_COUNT: Final = struct.Struct("<Q8sQ")
"""Bytes taken, which start of the machine it was, digest of both."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_held: set[int] = set()
"""Descriptors of `.room` that threads of this process hold locked."""


def _let_go() -> None:
    """Leaves to the parent what its threads hold: a lock that a fork shares would outlive the parent's death."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


class _KeptFile(NamedTuple):
    path: Path
    size: int
    used_at: int


class Room:
    """The room of one folder.

    Args:
        folder: it is there.
        most: bytes that the files of chunks may take together.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._boot = _this_boot()

    def path(self, key: bytes) -> Path:
        """Returns the name of the file of a chunk."""
        return self._folder / f"{key.hex()}{KEPT_SUFFIX}"

    @contextlib.contextmanager
    def locked(self) -> Iterator[int | None]:
        """Keeps all others from adding and removing meanwhile; gives None where that cannot be had in time.

        Raises:
            FileRefused: something else is in the place of `.room`.
            OSError: the folder cannot be written to.
        """
        fd = open_plain(self._folder / _ROOM, os.O_CREAT)
        _held.add(fd)
        try:
            yield fd if _lock(fd) else None
        finally:
            # Of a fork that has let go of it the number may be another file's by now.
            if fd in _held:
                _held.discard(fd)
                os.close(fd)

    def reserve(self, locked: int, size: int, keep: Path) -> bool:
        """Counts so many bytes as taken, once there is room for them.

        Args:
            locked: as `locked` gives it.
            size: bytes that will be added.
            keep: the file that they will be added to, which does not go for them.

        Returns:
            Whether there was room; if not, nothing is counted.
        """
        taken = self._read(locked)
        if taken is None or taken + size > self._most:
            taken = self._make_room(size, keep)
        fits = taken + size <= self._most
        self._write(locked, taken + size * fits)
        return fits

    def _make_room(self, size: int, keep: Path) -> int:
        """Removes what was used longest ago until so many bytes are free, and some to spare; returns what is taken."""
        files = list(_files(self._folder))
        taken = sum(file.size for file in files)
        if taken + size <= self._most or size > self._most:
            return taken
        for file in sorted(files, key=lambda one: one.used_at):
            if taken + size <= self._most - self._most // _SPARE:
                break
            if file.path != keep:
                drop(file.path)
                taken -= file.size
        return taken

    def _read(self, fd: int) -> int | None:
        data = os.pread(fd, _COUNT.size + 1, 0)
        if len(data) != _COUNT.size:
            return None
        taken: int = _COUNT.unpack(data)[0]
        return taken if data == self._encoded(taken) else None

    def _write(self, fd: int, taken: int) -> None:
        os.pwrite(fd, self._encoded(taken), 0)

    def _encoded(self, taken: int) -> bytes:
        face = taken.to_bytes(8, "little") + self._boot
        return _COUNT.pack(taken, self._boot, xxhash.xxh3_64_intdigest(face))


def drop(path: Path) -> None:
    """Removes the file of a chunk, and frees its room at once. Raises FileRefused, OSError: as `open_plain`."""
    with contextlib.suppress(FileNotFoundError):
        fd = open_plain(path)
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
    remove(path)


def _files(folder: Path) -> Iterator[_KeptFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield _KeptFile(folder / entry.name, found.st_size, found.st_mtime_ns)


def _lock(fd: int) -> bool:
    due, pause = time.monotonic() + _LOCK_S, _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= due:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
        else:
            return True


def _this_boot() -> bytes:
    try:
        return xxhash.xxh3_64_digest(_BOOT_ID.read_bytes())
    except OSError:
        return bytes(8)
