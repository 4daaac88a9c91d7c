"""The durable steps of publishing: write, sync the file, rename, sync the directory; and locks within a node.

Rename is atomic but not durable: a new name survives a power failure only after its directory is synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lazyshard.errors import FileRefused

NEW_FILE_MODE: Final = 0o666  # before the user's umask

# Errors of filesystems without hard links; some also report the first one (EPERM) if the name exists
_NO_LINKS: Final = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

# Work under a lock takes milliseconds. A process that holds the lock longer was suspended; others stop waiting
LOCK_S: Final = 10.0

# Descriptors locked by threads of this process: a lock shared with a fork would outlive the parent's death
_held: Final[set[int]] = set()

# Not available in every libc; see sync_file_range(2)
_sync_file_range: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)


def write_all(fd: int, data: bytes | bytearray | memoryview, start: int | None = None) -> None:
    """Writes all bytes, in as many calls as needed, from the offset `start` on if given.

    After an OSError some of them may have been written.
    """
    view = memoryview(data)
    while view:
        written = os.write(fd, view) if start is None else os.pwrite(fd, view, start)
        view, start = view[written:], None if start is None else start + written


def sync(fd: int) -> None:
    """Waits until the content of a file is on the device."""
    os.fsync(fd)


def start_writing_back(fd: int, offset: int, size: int) -> None:
    """Starts writing bytes of a file to the device, so that a later `sync` takes less time; a hint."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE


def sync_directory(directory: Path) -> None:
    """Waits until the names in a directory are on the device."""
    sync_file(directory, os.O_DIRECTORY)


def sync_file(path: Path, flags: int = os.O_NOFOLLOW) -> None:
    """Waits until the bytes of a file are on the device; it is opened with `flags`."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        sync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Gives a file its final name, replacing any file of that name. Raises OSError: it was not renamed.

    NFS may repeat a request whose response was lost, and report an error although the first succeeded: this is checked.
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
    """Creates a new empty file for writing, replacing any file of that name, and returns its descriptor.

    An existing file is never opened: a link could lead elsewhere, and a named pipe would block.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(4):  # the first removal frees the name, unless another process keeps creating it
        try:
            return os.open(path, flags, NEW_FILE_MODE)
        except FileExistsError:
            remove(path)
    return os.open(path, flags, NEW_FILE_MODE)


def write_new(path: Path, data: bytes, *, durable: bool = False, over: bool = False) -> None:
    """Creates a file with this content, see `create`, or if `over` overwrites the existing one, see `open_own`."""
    fd = open_own(path) if over else create(path)
    try:
        write_all(fd, data)
        if over:
            # Truncate last, so that the file is never empty.
            os.ftruncate(fd, len(data))
        if durable:
            sync(fd)
    finally:
        os.close(fd)


def publish_bytes(data: bytes, target: Path, temporary: Path, *, durable: bool = True, reserved: bool = False) -> None:
    """Publishes a file with its whole content or not at all, replacing any file of that name.

    It is written under a `temporary` name on the same filesystem, which may be left after an OSError. Not `durable`:
    for hints, which can be rebuilt. `reserved`: the temporary file exists and has reserved space, for a full disk.
    """
    write_new(temporary, data, durable=durable, over=reserved)
    rename(temporary, target)
    if durable:
        sync_directory(target.parent)


def publish_new_bytes(data: bytes, target: Path, temporary: Path) -> None:
    """As `publish_bytes`, durably, but raises FileExistsError if the name exists.

    On a network filesystem the server decides: it refuses the hard link. Without hard links, the file is renamed.
    """
    write_new(temporary, data, durable=True)
    try:
        if not link(temporary, target):
            rename(temporary, target)
        sync_directory(target.parent)
    finally:
        # Before there is a stream nothing cleans up, and on a full disk each attempt would leave another file.
        with contextlib.suppress(OSError):
            remove(temporary)


def link(source: Path, target: Path) -> bool:
    """Creates a hard link with a free name; returns False if hard links are not supported."""
    try:
        os.link(source, target)
    except OSError as cause:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(source), os.lstat(target)):
                # As with `rename`: only the response was lost, or it is the response to a repeated request.
                return True
        if cause.errno not in _NO_LINKS:
            raise
        # SFTP has no error for an existing name. If another name can be linked, the name existed.
        trial = source.with_name(f"{source.name}.link")
        try:
            os.link(source, trial)
        except OSError:
            return False
        remove(trial)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from cause
    return True


def copy(source: Path, target: Path) -> None:
    """Copies a file durably to a name that is free; the system moves the bytes."""
    shutil.copyfile(source, target, follow_symlinks=False)
    sync_file(target)


def open_own(path: Path, flags: int = os.O_CREAT) -> int:
    """Opens a file to read and to write in place, created if missing; returns its descriptor. Never blocks.

    Raises FileRefused unless it is a plain file with one hard link: writes must not reach foreign files or a pipe.
    """
    way = "; check which program created it, then remove it"
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
    kind = "one with several hard links" if stat.S_ISREG(found.st_mode) else "a named pipe or a device"
    raise refused(path, "a file", kind, way)


def refused(path: Path, expected: str, kind: str, way: str = "") -> FileRefused:
    """Returns the error for a path with another kind of file than expected; `way` says what to do."""
    return FileRefused(f"{path}: expected {expected}, found {kind}{way}", file=str(path), kind=kind)


def remove(path: Path) -> None:
    """Removes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def clear_folder(folder: Path) -> bool:
    """Removes all files in a folder, if it exists; returns whether something is left.

    Folders are left, and on a network filesystem files that are open here. Raises NotADirectoryError: it is a link.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    left = False
    try:
        # By descriptor: the name may be given to another folder meanwhile, whose files must not be removed.
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


def _close_inherited() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_inherited)


@contextlib.contextmanager
def held(fd: int) -> Iterator[None]:
    """Makes children that are forked in this context close the descriptor."""
    _held.add(fd)
    try:
        yield
    finally:
        _held.discard(fd)


def this_boot() -> str:
    """Returns the boot id of the machine, "" if unknown."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii")
    return ""


def lock(fd: int, *, shared: bool) -> bool:
    """Locks a file without waiting, or changes its lock; returns whether that was possible."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """Holds an exclusive lock file; yields its descriptor, None if the lock was not available in time."""
    fd = open_own(path)
    _held.add(fd)
    try:
        due, pause = time.monotonic() + LOCK_S, 0.0001
        while not (mine := lock(fd, shared=False)) and time.monotonic() < due:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        yield fd if mine else None
    finally:
        # In a fork that closed the descriptor, its number may belong to another file by now.
        if fd in _held:
            _held.discard(fd)
            os.close(fd)
