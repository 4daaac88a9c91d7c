"""The file that is locked while a run owns a consumer's cursor, with the token of the run that had it last.

It is `cursors/.NAME.lock` in the stream's directory; of a stream in an object store a file of this machine, beside
the copies of chunks. It stays until the consumer is forgotten, and means nothing by being there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import filelock
import xxhash

from lazyshard.format.cursor import CURSORS, check_consumer
from lazyshard.format.cursor_token import CursorToken
from lazyshard.store.durable import open_own, remove, write_all
from lazyshard.store.files import read_file
from lazyshard.store.mirror_room import cache_folder
from lazyshard.store.urls import UrlPath, stream_path
from lazyshard.stream.cursor import make_folder


def lock_name(consumer: str) -> str:
    """Returns the name of the file, in the folder of cursors, that is locked while a run owns a consumer's cursor.

    Raises:
        ValueError: there can be no consumer of this name.
    """
    return f".{check_consumer(consumer)}.lock"


def remove_lock(directory: str | os.PathLike[str], consumer: str) -> None:
    """Removes the lock file of a consumer that is forgotten, unless a run holds it; it would lock out nobody then.

    Raises:
        ValueError: there can be no consumer of this name.
        OSError: the filesystem refused.
    """
    path = lock_path(stream_path(directory), consumer)
    if not os.path.lexists(path):
        return
    lock = filelock.FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError):
        return
    try:
        remove(path)
    finally:
        lock.release()


def lock_path(directory: Path, consumer: str, *, make: bool = False) -> Path:
    """Returns the file that is locked: of a stream in an object store, one of this machine.

    Raises as `make_folder` does, if it is to `make` the folder.
    """
    name = lock_name(consumer)
    if isinstance(directory, UrlPath):
        return cache_folder() / f".cursor-{xxhash.xxh3_128_hexdigest(f'{directory}/{name}'.encode())}.lock"
    return (make_folder(directory) if make else directory / CURSORS) / name


def read_signature(path: Path) -> CursorToken | None:
    """Returns the token of the run that had the lock last, None where it cannot be told."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return CursorToken.parse(read_file(path).decode().partition("\n")[0])
    return None


def sign(path: Path, token: CursorToken) -> None:
    """Writes a token into the lock file: in place, since the lock is on the file and not on its name."""
    fd = open_own(path)
    try:
        line = f"{token.text}\n".encode()
        write_all(fd, line)
        # Afterwards, so that no moment shows nothing; what is behind the line is not read.
        os.ftruncate(fd, len(line))
    finally:
        os.close(fd)
