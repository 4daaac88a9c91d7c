"""The durable steps from which publishing is made; every byte that a writer puts on disk goes through here.

Rename is atomic but not durable: a name survives a power cut only once its directory was synced, and its content only
once the file was. So a publish is: write, sync the file, rename, sync the directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lazyshard.errors import FileRefused

_SYNC_FILE_RANGE_WRITE: Final = 2  # see sync_file_range(2)

NEW_FILE_MODE: Final = 0o666  # before the user's umask

_NO_LINKS: Final = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)
"""What filesystems say that have no hard links. Some say the first to a name that is taken, too."""


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Writes all the bytes, however many calls it takes. After an OSError some of them may have been written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_at(fd: int, data: bytes, start: int) -> None:
    """Writes all the bytes from a place in the file on. Raises as `write_all`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, start)
        view, start = view[written:], start + written


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
    """Begins bringing bytes of a file onto the device, so that a later `sync` has less to wait for; a hint."""
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
    """Gives a file its final name, in place of any file that has it. Raises OSError: that was not done.

    NFS may repeat a request whose answer was lost and report the repeat's error although the rename was done, so an
    error is checked against what is at the target.
    """
    before = os.stat(source, follow_symlinks=False)
    try:
        os.replace(source, target)
    except OSError:
        with contextlib.suppress(OSError):
            after = os.stat(target, follow_symlinks=False)
            if os.path.samestat(after, before) and not os.path.lexists(source):
                return
        raise


def create(path: Path) -> int:
    """Makes a new empty file for writing and returns its descriptor; what had the name loses it.

    Nothing that was there is ever opened: a link would lead elsewhere, a second name of another file would have that
    overwritten, and a named pipe would block.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(4):  # the name is free after the first one unless somebody plays with it
        try:
            return os.open(path, flags, NEW_FILE_MODE)
        except FileExistsError:
            remove(path)
    return os.open(path, flags, NEW_FILE_MODE)


def write_new(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Makes a file with this content under its own name; see `create`."""
    _fill(create(path), data, durable=durable)


def _fill(fd: int, data: bytes, *, durable: bool, cut: bool = False) -> None:
    try:
        write_all(fd, data)
        if cut:
            os.ftruncate(fd, len(data))
        if durable:
            sync(fd)
    finally:
        os.close(fd)


def overwrite(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a file in place, see `open_own`. What lies behind the new content is cut off last: it is never empty."""
    _fill(open_own(path), data, durable=durable, cut=True)


def publish_bytes(data: bytes, target: Path, temporary: Path, *, durable: bool = True, reserved: bool = False) -> None:
    """Makes a file appear with its whole content, or not at all; what had its name is replaced.

    It is written under a `temporary` name on the same filesystem, which may be left after an OSError. Not `durable`, it
    may return before content and name are on the device: for a hint that is rebuilt anyway. `reserved`: the temporary
    file is there and has its room already, for a disk that has none left.
    """
    if reserved:
        overwrite(temporary, data, durable=durable)
    else:
        write_new(temporary, data, durable=durable)
    rename(temporary, target)
    if durable:
        sync_directory(target.parent)


def publish_new_bytes(data: bytes, target: Path, temporary: Path) -> None:
    """As `publish_bytes`, durably, unless there is a file of that name: then it raises FileExistsError.

    Whether there is one is told by the server of a network filesystem, not by what this machine remembers: a link, in
    contrast to a rename, is refused there. Without hard links it is a rename.
    """
    write_new(temporary, data, durable=True)
    try:
        linked = _link(temporary, target)
    except OSError:
        # Nothing clears up before there is a stream, and on a full disk each try would leave one file more.
        with contextlib.suppress(OSError):
            remove(temporary)
        raise
    if not linked:
        rename(temporary, target)
    sync_directory(target.parent)
    if linked:
        remove(temporary)


def _link(source: Path, target: Path) -> bool:
    """Gives a file a second name that is free; returns False where there are no hard links."""
    try:
        os.link(source, target)
    except OSError as cause:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(source), os.lstat(target)):
                # As with `rename`: only the answer was lost, or is that to a repeated request.
                return True
        if cause.errno not in _NO_LINKS:
            raise
        # SFTP has no word for a name that is taken. If another name can be had, that is what it means.
        trial = source.with_name(f"{source.name}.link")
        try:
            os.link(source, trial)
        except OSError:
            return False
        remove(trial)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from cause
    return True


def open_own(path: Path) -> int:
    """Opens a file for reading and for writing in place, made if it is not there; returns its descriptor. Never blocks.

    Such a name stands for years where others may write. So what is opened must be a plain file of no other name, or it
    raises FileRefused: bytes must not go to somebody's file, through a link, or to a pipe or device.
    """
    return open_plain(path, os.O_CREAT)


def open_plain(path: Path, flags: int = 0) -> int:
    """As `open_own`, of a file that must be there unless `flags` has `os.O_CREAT`."""
    way = "; remove it, after a look at who has made it"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, NEW_FILE_MODE)
    except OSError as cause:
        if cause.errno in (errno.ELOOP, errno.ENXIO):
            raise refused(path, "a file", "a link" if cause.errno == errno.ELOOP else "a named pipe", way) from cause
        raise
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return fd
    os.close(fd)
    kind = "one with a second name" if stat.S_ISREG(found.st_mode) else "a named pipe or a device"
    raise refused(path, "a file", kind, way)


def refused(path: Path, expected: str, kind: str, way: str = "") -> FileRefused:
    """Returns the error of a path at which something else was found than expected; `way`: what to do, behind that."""
    return FileRefused(f"{path}: expected {expected}, found {kind}{way}", file=str(path), kind=kind)


def remove(path: Path) -> None:
    """Removes a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def clear_folder(folder: Path) -> bool:
    """Removes all files in a folder, if it is there; returns whether something is left in it.

    That may be a folder, or a file that this machine has open and a network filesystem keeps for it by another name.
    Raises NotADirectoryError: it is a link or a file.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    left = False
    try:
        # By the descriptor: the name may be given to another folder meanwhile, whose files are not ours to remove.
        with os.scandir(fd) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            left |= is_folder
            try:
                if not is_folder:
                    os.unlink(name, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError as cause:
                if cause.errno != errno.EBUSY:
                    raise
                left = True
    finally:
        os.close(fd)
    return left
