"""Folders of this node that hold a bounded number of bytes: locks, and what was used longest ago goes.

The cache for chunks of object stores serves all processes of a node, so its settings are variables of the environment.
Files in it: `.lock`, held (flock) for the moment in which room is made; and in the folder of a stream, for each chunk,
its copy, `chunk_N.jsonl`, or `.chunk_N.jsonl.part` while it is being fetched. Whoever reads a copy holds a shared flock
on it, who fetches it an exclusive one on the part. So what may go is what can be locked, and a lock ends with its
process: a part that can be locked was left by one that was killed. A copy's modification time says when it was last
opened, its access time `_UNREAD` that it was fetched ahead and never opened yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import xxhash

from lazyshard.errors import ConfigInvalid
from lazyshard.store.durable import open_own, refused, remove

FOLDER_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE"
BYTES_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE_BYTES"
AHEAD_VARIABLE: Final = "LAZYSHARD_OBJECTS_AHEAD"

# On a disk nearly everywhere, where /tmp is often memory. A fixed place, since processes of one job may differ in
# TMPDIR; who may write there is checked below
_FOLDER: Final = "/var/tmp/lazyshard-objects-{uid}"  # noqa: S108

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

PART_SUFFIX: Final = ".part"

# Making room takes milliseconds. One that holds the lock for longer was stopped, and is not waited for
LOCK_S: Final = 10.0

_UNREAD: Final = 0

_log = logging.getLogger("lazyshard")
_told: set[str] = set()

# Descriptors that threads of this process hold locked: a lock that a fork shares would outlive the parent's death
_held: Final[set[int]] = set()


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
    try:
        return BOOT_ID.read_text(encoding="ascii")
    except OSError:
        return ""


def lock(fd: int, *, shared: bool) -> bool:
    """Locks a file without waiting, or changes how it is locked; returns whether that was possible."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """Keeps all others from making room meanwhile; gives the file of the lock, None where it cannot be had in time."""
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


def files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields what lies in a folder; nothing if that is not there."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield path, path.lstat()


def evict(files: Iterable[tuple[Path, os.stat_result]], taken: int, most: int, drop: Callable[[Path], bool]) -> int:
    """Drops files, in order, until no more than so many bytes are taken; returns how many are."""
    for path, found in files:
        if taken <= most:
            break
        taken -= found.st_size * drop(path)
    return taken


def cache_folder() -> Path:
    """Returns the folder of all copies, made if it was not there.

    Raises FileRefused: it is none, or others may write to it, who could put other rows there.
    """
    uid, way = os.geteuid(), f"; name another one for the copies of chunks with {FOLDER_VARIABLE}"
    folder = Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER.format(uid=uid)).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as cause:
        raise refused(folder, "a folder", "a file", way) from cause
    found = folder.stat()
    if found.st_uid != uid or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        kind = f"one of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        raise refused(folder, f"a folder that only uid {uid} may write to", kind, way)
    return folder


def number_of(variable: str, default: int) -> int:
    """Returns the number that a variable of the environment says. Raises ConfigInvalid: it says none."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise ConfigInvalid(f"{variable} is a number from 0 on, got {text!r}")
    return int(text)


def folder_of(url: str, stream_id: str) -> Path:
    """Returns the folder for the copies of one stream; it may not be there.

    A machine that was started again has others: nothing in it was ever synced.
    """
    return cache_folder() / xxhash.xxh3_128_hexdigest(f"2 {this_boot()} {url} {stream_id}".encode())


def reserve(root: Path, part: int, size: int, most: int, *, ahead: bool) -> bool:
    """Makes room in a cache of at most `most` bytes for a locked part, and gives it that size; returns whether it has.

    Always if not `ahead`: the cache may then exceed its bound. What nobody waits for displaces only what was read.
    """
    with locked(root / ".lock"):
        total = _make_room(root, size, most, only_read=ahead)
        if total + size > most:
            if ahead:
                return False
            if str(root) not in _told:
                _told.add(str(root))
                _log.warning(
                    "%s: %d bytes of chunks are being read on this node, more than the %d that the cache may take; it "
                    "grows past that, and chunks may have to be fetched again: let it have room for all chunks that "
                    "the ranks of a node read at a time (their shuffle windows), with %s",
                    root,
                    total + size,
                    most,
                    BYTES_VARIABLE,
                )
        os.ftruncate(part, size)
    return True


def note_use(fd: int, *, read: bool) -> None:
    """Notes that a copy is used now; `read`: opened, not just fetched."""
    now = time.time_ns()
    os.utime(fd, ns=(now if read else _UNREAD, now))


def is_at(fd: int, path: Path) -> bool:
    """Returns whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def drop(path: Path) -> bool:
    """Removes a file of the cache that nobody reads or fetches; returns whether it was removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not lock(fd, shared=False) or not is_at(fd, path):
            return False
        remove(path)
    finally:
        os.close(fd)
    # The last one of a stream leaves an empty folder.
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def _make_room(root: Path, size: int, most: int, *, only_read: bool) -> int:
    total, copies = 0, []
    for folder in root.iterdir():
        for path, found in files_in(folder) if folder.is_dir() and not folder.is_symlink() else ():
            if path.name.endswith(PART_SUFFIX):
                if drop(path):
                    continue
            elif not (only_read and found.st_atime_ns == _UNREAD):
                copies.append((path, found))
            total += found.st_size
    copies.sort(key=lambda copy: (copy[1].st_atime_ns == _UNREAD, copy[1].st_mtime_ns))
    return evict(copies, total, most - size, drop)
