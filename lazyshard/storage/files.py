"""Opens and reads the files of a stream that someone else writes, on filesystems that cache.

Nothing here blocks on a FIFO or follows a link out of the stream. ESTALE, which network filesystems give for a file
that was replaced since it was looked up, is answered by opening again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from lazyshard.errors import FileRefused, FileUnreadable

_STALE_TRIES: Final = 5
"""A name is looked up anew at each try; one more is enough unless the file is replaced again in that very moment."""

_READ_BYTES: Final = 1 << 20

_T = TypeVar("_T")

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class OpenFile:
    """A descriptor that is closed when nothing refers to this object any more.

    A reader holds a reference while it reads, so taking a file out of a cache in one thread cannot make another thread
    read from a descriptor number that meanwhile belongs to another file.
    """

    __slots__ = ("fd", "path", "size")

    def __init__(self, fd: int, path: Path, size: int) -> None:
        self.fd = fd
        self.path = path
        self.size = size

    def __del__(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)


def open_file(path: Path) -> OpenFile:
    """Opens a plain file of a stream for reading.

    Raises:
        FileNotFoundError: there is no such file (yet).
        FileRefused: it is not a plain file, or a link that leads out of the stream's directory.
        FileUnreadable: this process may not read it.
        OSError: the filesystem failed.
    """
    return again_if_stale(lambda: _open(path))


def read_file(path: Path) -> bytes:
    """Reads a small file of a stream whole. Raises as `open_file` does."""

    def read() -> bytes:
        file = _open(path)
        parts = []
        offset = 0
        while part := os.pread(file.fd, _READ_BYTES, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    return again_if_stale(read)


def again_if_stale(call: Callable[[], _T]) -> _T:
    """Returns what a call that opens a file returns, calling again where the server has forgotten the file."""
    for _ in range(_STALE_TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


def _open(path: Path) -> OpenFile:
    try:
        fd = _descriptor(path)
    except PermissionError as cause:
        raise unreadable(path) from cause
    except OSError as cause:
        if cause.errno == errno.ENXIO:
            raise _refused(path, "a named pipe, socket or device") from cause
        if cause.errno == errno.ELOOP:
            raise _refused(path, "a link that leads to itself") from cause
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, _KINDS.get(stat.S_IFMT(status.st_mode), "something else"))
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(fd, path, status.st_size)


def _descriptor(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except OSError as cause:
        if cause.errno != errno.ELOOP:
            raise
    # `Path.resolve` raises a RuntimeError for a circle of links in some releases of Python, this never does.
    target = Path(os.path.realpath(path))
    if Path(os.path.realpath(path.parent)) not in target.parents:
        raise _refused(path, f"a link to {target}, out of the stream")
    return os.open(target, flags)


def _refused(path: Path, kind: str) -> FileRefused:
    return FileRefused(f"{path}: expected a plain file, found {kind}", file=str(path), kind=kind)


def unreadable(path: Path) -> FileUnreadable:
    """Returns the error for what this process may not read."""
    uid = os.geteuid()
    return FileUnreadable(
        f"{path}: uid {uid} may not read it; check the permissions of the file and of the directories above it",
        file=str(path),
        uid=uid,
    )
