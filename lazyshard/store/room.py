"""Folders of this node that hold a bounded number of bytes: locks, and what was used longest ago goes.

The cache for chunks of object stores serves all processes of a node, so its settings are variables of the environment.
Files in it: `.lock`, held (flock) for the moment in which room is made; and in the folder of a stream, for each chunk,
`chunk_N.jsonl` with its seal, and `chunk_N.arrays` of a chunk that has a side file; or `.chunk_N.jsonl.part` in the
place of the first while it is being fetched. Whoever reads a chunk holds a shared flock on its data file, who fetches
it an exclusive one on the part. So what may go is what can be locked, and a lock ends with its process: a part that can
be locked was left by one that was killed. A data file's modification time says when it was last opened, its access time
`_UNREAD` that it was fetched ahead and never opened yet.
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
from typing import Final, NamedTuple

import xxhash

from lazyshard.errors import ConfigInvalid
from lazyshard.format.names import ARRAYS_SUFFIX, DATA_SUFFIX, SEAL_SUFFIX
from lazyshard.store.durable import open_plain, refused, remove

FOLDER_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE"
BYTES_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE_BYTES"
AHEAD_VARIABLE: Final = "LAZYSHARD_OBJECTS_AHEAD"

CACHE_BYTES: Final = 16 << 30  # what a machine can spare that trains, and room for some chunks of each of its ranks
AHEAD: Final = 2  # one chunk that is there when the one before it is done with, and one that may take longer than usual

_FOLDER: Final = "/var/tmp/lazyshard-objects-{uid}"  # noqa: S108
"""On a disk nearly everywhere, where /tmp is often memory. A fixed place, since processes of one job may differ in
TMPDIR; who may write there is checked below."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

PART_SUFFIX: Final = ".part"

LOCK_S: Final = 10.0
"""Making room takes milliseconds. One that holds the lock for longer was stopped, and is not waited for."""

_UNREAD: Final = 0

_log = logging.getLogger("lazyshard")
_told: set[str] = set()

HELD: Final[set[int]] = set()
"""Descriptors that threads of this process hold locked: a lock that a fork shares would outlive the parent's death."""


def _let_go() -> None:
    while HELD:
        with contextlib.suppress(OSError):
            os.close(HELD.pop())


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def held(fd: int) -> Iterator[None]:
    """Has a fork let go of a descriptor meanwhile."""
    HELD.add(fd)
    try:
        yield
    finally:
        HELD.discard(fd)


class FoundFile(NamedTuple):
    """A file that takes room."""

    path: Path
    size: int
    used_at: int
    unread: bool


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
    """Keeps all others from making room meanwhile; gives the file of the lock, None where it cannot be had in time.

    Raises FileRefused, OSError: something else is in its place, or the folder cannot be written to.
    """
    fd = open_plain(path, os.O_CREAT)
    HELD.add(fd)
    try:
        due, pause = time.monotonic() + LOCK_S, 0.0001
        while not (mine := lock(fd, shared=False)) and time.monotonic() < due:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        yield fd if mine else None
    finally:
        # Of a fork that has let go of it the number may be another file's by now.
        if fd in HELD:
            HELD.discard(fd)
            os.close(fd)


def files_in(folder: Path) -> Iterator[FoundFile]:
    """Yields what lies in a folder; nothing if that is not there."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                yield FoundFile(path, found.st_size, found.st_mtime_ns, found.st_atime_ns == _UNREAD)


def evict(files: Iterable[FoundFile], taken: int, most: int, drop: Callable[[FoundFile], int]) -> int:
    """Drops files, in order, until no more than so many bytes are taken; returns how many are. `drop`: bytes freed."""
    for file in files:
        if taken <= most:
            break
        taken -= drop(file)
    return taken


def cache_folder() -> Path:
    """Returns the folder of all copies, made if it was not there.

    Raises FileRefused: it is no folder; or another user's, or others may write to it, who could put other rows there.
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


def cache_bytes() -> int:
    """Returns how many bytes all copies together may take. Raises ConfigInvalid: the variable says no such number."""
    return _number(BYTES_VARIABLE, CACHE_BYTES)


def chunks_ahead() -> int:
    """Returns how many chunks to fetch ahead. Raises ConfigInvalid: the variable says no such number."""
    return _number(AHEAD_VARIABLE, AHEAD)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise ConfigInvalid(f"{variable} is a number from 0 on, got {text!r}")
    return int(text)


def folder_of(url: str, stream_id: str) -> Path:
    """Returns the folder for the copies of one stream; it may not be there.

    A machine that was started again has others: nothing in it was ever synced, so that after a power cut the names may
    be there without the bytes.
    """
    return cache_folder() / xxhash.xxh3_128_hexdigest(f"1 {this_boot()} {url} {stream_id}".encode())


def reserve(root: Path, part: int, size: int, most: int, *, ahead: bool) -> bool:
    """Makes room in a cache of at most `most` bytes for a locked part, its seal included, and gives it that size.

    Returns whether it has; always if not `ahead`: then the cache may get larger than it should be, by what is being
    read, and that is logged. What nobody waits for yet displaces only what was read.
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
                    *(root, total + size, most, BYTES_VARIABLE),
                )
        os.ftruncate(part, size)
    return True


def part_of(data: Path) -> Path:
    """Returns the name under which a data file is fetched."""
    return data.with_name(f".{data.name}{PART_SUFFIX}")


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
        for file in (path, *_others(path)):
            remove(file)
    finally:
        os.close(fd)
    # The last one of a stream leaves an empty folder.
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def _make_room(root: Path, size: int, most: int, *, only_read: bool) -> int:
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    files = {file.path: file for folder in folders for file in files_in(folder)}
    total, copies = 0, []
    for path, file in files.items():
        if path.name.endswith(PART_SUFFIX):
            if drop(path):
                continue
        elif (data := _data_of(path)) is not None:
            # Looked at again, in this order: what is renamed while it is listed may be listed under neither name.
            if not part_of(data).exists() and not data.exists():
                # Of a chunk that was being fetched when its process was killed.
                remove(path)
                continue
        elif not (only_read and file.unread):
            copies.append(file)
        total += file.size

    def free(file: FoundFile) -> int:
        sizes = (files[other].size for other in (file.path, *_others(file.path)) if other in files)
        return sum(sizes) if drop(file.path) else 0

    return evict(sorted(copies, key=lambda copy: (copy.unread, copy.used_at)), total, most - size, free)


def _others(data: Path) -> list[Path]:
    return [data.with_name(data.name + SEAL_SUFFIX), data.with_suffix(ARRAYS_SUFFIX)]


def _data_of(other: Path) -> Path | None:
    """Returns the data file beside which something lies; None of a data file."""
    if other.name.endswith(SEAL_SUFFIX):
        return other.with_name(other.name.removesuffix(SEAL_SUFFIX))
    return other.with_suffix(DATA_SUFFIX) if other.suffix == ARRAYS_SUFFIX else None
