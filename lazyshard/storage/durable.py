"""The durable steps from which publishing is made; every byte that a writer puts on disk goes through here.

Rename is atomic but not durable: a name survives a power cut only once its directory was synced, and its content only
once the file was. So a publish is: write, sync the file, rename, sync the directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_SYNC_FILE_RANGE_WRITE: Final = 2
"""Of the system's own constants; see sync_file_range(2)."""


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Writes all the bytes, however many calls it takes.

    Raises:
        OSError: the device refused; some of the bytes may have been written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync(fd: int) -> None:
    """Waits until the file's content is on the device."""
    os.fsync(fd)


def _find_sync_file_range() -> Callable[..., Any] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range: Final = _find_sync_file_range()


def start_writing_back(fd: int, offset: int, size: int) -> None:
    """Asks the system to begin bringing bytes of a file onto the device, so that a later `sync` has less to wait for.

    A hint: nothing is certain afterwards. What fails meanwhile is reported by `sync`, which knows every failure since
    the file was opened.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


def sync_directory(directory: Path) -> None:
    """Waits until the names in a directory are on the device."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Gives a file its final name, in place of any file that has it.

    NFS may repeat a request whose answer was lost and report the repeat's error although the rename was done, so an
    error is checked against what is at the target.

    Raises:
        OSError: the rename was not done.
    """
    before = os.stat(source, follow_symlinks=False)
    try:
        os.replace(source, target)
    except OSError:
        with contextlib.suppress(OSError):
            after = os.stat(target, follow_symlinks=False)
            if (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino) and not os.path.lexists(source):
                return
        raise


def create(path: Path) -> int:
    """Opens a new empty file for writing and returns its descriptor; what had the name is emptied."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def publish_bytes(data: bytes, target: Path, temporary: Path, *, durable: bool = True) -> None:
    """Makes a file appear with its whole content, or not at all.

    Args:
        data: the content.
        target: its final name; what had it is replaced.
        temporary: a name on the same filesystem to write it under.
        durable: whether to return only when content and name are on the device. A hint that is rebuilt anyway may skip
            that.

    Raises:
        OSError: nothing was published; the temporary file may be left.
    """
    fd = create(temporary)
    try:
        write_all(fd, data)
        if durable:
            sync(fd)
    finally:
        os.close(fd)
    rename(temporary, target)
    if durable:
        sync_directory(target.parent)


def remove(path: Path) -> None:
    """Removes a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
