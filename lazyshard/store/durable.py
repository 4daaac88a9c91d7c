"""The durable steps of publishing: write, sync the file, rename, sync the directory; and locks of a node.

Rename is atomic but not durable: a name survives a power cut only once its directory was synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lazyshard.errors import FileRefused

NEW_FILE_MODE: Final = 0o666  # before the user's umask

# What filesystems say that have no hard links; some say the first of a name that is taken, too
_NO_LINKS: Final = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

# What is done under a lock takes milliseconds. One that holds it for longer was stopped, and is not waited for
LOCK_S: Final = 10.0

# Descriptors that threads of this process hold locked: a lock that a fork shares would outlive the parent's death
_held: Final[set[int]] = set()

# Not every libc has it; see sync_file_range(2)
_sync_file_range: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)


def write_all(fd: int, data: bytes | bytearray | memoryview, start: int | None = None) -> None:
    """Writes all the bytes, however many calls it takes, from a place in the file on if one is given.

    After an OSError some of them may have been written.
    """
    view = memoryview(data)
    while view:
        written = os.write(fd, view) if start is None else os.pwrite(fd, view, start)
        view, start = view[written:], None if start is None else start + written


def sync(fd: int) -> None:
    """Waits until the file's content is on the device."""
    os.fsync(fd)


def start_writing_back(fd: int, offset: int, size: int) -> None:
    """Begins bringing bytes of a file onto the device, so that a later `sync` has less to wait for; a hint."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE


def sync_directory(directory: Path) -> None:
    """Waits until the names in a directory are on the device."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Gives a file its final name, in place of any file that has it. Raises OSError: that was not done.

    NFS may repeat a request whose answer was lost, and report the repeat's error although it was done: it is checked.
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

    Nothing that was there is ever opened: a link would lead elsewhere, and a named pipe would block.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(4):  # the name is free after the first one unless somebody plays with it
        try:
            return os.open(path, flags, NEW_FILE_MODE)
        except FileExistsError:
            remove(path)
    return os.open(path, flags, NEW_FILE_MODE)


def write_new(path: Path, data: bytes, *, durable: bool = False, over: bool = False) -> None:
    """Makes a file with this content under its own name, see `create`, or `over` the one there, see `open_own`."""
    fd = open_own(path) if over else create(path)
    try:
        write_all(fd, data)
        if over:
            # Last: so it is never empty.
            os.ftruncate(fd, len(data))
        if durable:
            sync(fd)
    finally:
        os.close(fd)


def publish_bytes(data: bytes, target: Path, temporary: Path, *, durable: bool = True, reserved: bool = False) -> None:
    """Makes a file appear with its whole content, or not at all; what had its name is replaced.

    It is written under a `temporary` name on the same filesystem, which may be left after an OSError. Not `durable`: a
    hint that is rebuilt anyway. `reserved`: the temporary file is there and has its room, for a full disk.
    """
    write_new(temporary, data, durable=durable, over=reserved)
    rename(temporary, target)
    if durable:
        sync_directory(target.parent)


def publish_new_bytes(data: bytes, target: Path, temporary: Path) -> None:
    """As `publish_bytes`, durably, unless there is a file of that name: then it raises FileExistsError.

    The server of a network filesystem tells whether there is one: it refuses a link. Without hard links it is a rename.
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


def open_own(path: Path, flags: int = os.O_CREAT) -> int:
    """Opens a file for reading and for writing in place, made if it is not there; returns its descriptor. Never blocks.

    Raises FileRefused for all but a plain file of no other name: bytes must not go to somebody's file, or to a pipe.
    """
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

    That may be a folder, or a file that is open here on a network filesystem. Raises NotADirectoryError: it is a link.
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


def _let_go() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def held(fd: int) -> Iterator[None]:
    """Has a fork let go of a descriptor meanwhile."""
    _held.add(fd)
    try:
        yield
    finally:
        _held.discard(fd)


def this_boot() -> str:
    """Returns which start of the machine this is, "" where that cannot be told."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii")
    return ""


def lock(fd: int, *, shared: bool) -> bool:
    """Locks a file without waiting, or changes how it is locked; returns whether that was possible."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """Keeps others out by a lock file meanwhile; gives its descriptor, None where it cannot be had in time."""
    fd = open_own(path)
    _held.add(fd)
    try:
        due, pause = time.monotonic() + LOCK_S, 0.0001
        while not (mine := lock(fd, shared=False)) and time.monotonic() < due:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        yield fd if mine else None
    finally:
        # Of a fork that has let go of it the number may be another file's by now.
        if fd in _held:
            _held.discard(fd)
            os.close(fd)
