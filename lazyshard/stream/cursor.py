"""Cursors on disk: written durably and whole by the one run that owns them, read by its next start and by producers.

Files: `cursors/NAME.json`, one for each consumer; while it is being written `cursors/.NAME.TOKEN`, which a kill may
leave behind; and `cursors/.NAME.lock`, which is locked while a run owns the cursor and holds the token of the run that
had it last. Of a stream in an object store the lock is a file of this machine. The lock keeps out a second run on the
same machine, the token in the cursor (`lazyshard.format.cursor`) any other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import filelock
import xxhash

from lazyshard.errors import CursorTaken, FileInvalid, StoreUnavailable, StreamMissing, VersionUnsupported
from lazyshard.format.cursor import Cursor, CursorToken, check_consumer, cursor_name
from lazyshard.format.names import CURSORS
from lazyshard.store.durable import overwrite, remove, rename, sync_directory, write_new
from lazyshard.store.files import check_folder, read_file, read_record
from lazyshard.store.room import cache_folder
from lazyshard.store.urls import UrlPath, stream_path

_TRIES: Final = 5  # who has put a cursor beside ours is seen at the next one

_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What a filesystem says that has no locks: a run does not fail for that, the token is what guards its cursor there."""

_log = logging.getLogger("lazyshard")


def write_cursor(
    directory: str | os.PathLike[str], cursor: Cursor, *, check: Callable[[], object] = lambda: None
) -> None:
    """Replaces a consumer's cursor; returns when the new one is on the device.

    Whenever this process is killed or power is lost, the old cursor or the new one is there, whole. Not guaranteed:
    that of two processes which write the same consumer's cursor at a time the later one wins; see `CursorOwner`.

    Args:
        directory: the stream's directory.
        cursor: the new cursor; the checkpoint for which it stands must be on the device already.
        check: is called when only the rename is left to do; what it raises leaves the old cursor.

    Raises:
        StreamMissing: there is no such directory.
        OSError: the filesystem refused; the old cursor may still be the one that counts.
    """
    path = stream_path(directory)
    if isinstance(path, UrlPath):
        check()
        target = path / CURSORS / cursor_name(cursor.consumer)
        target.store.put(target.key, cursor.encode())
        return
    folder = _make_folder(directory)
    # Always: who has made the folder may have been killed before its name was durable.
    sync_directory(folder.parent)
    temporary = folder / f".{cursor.consumer}.{secrets.token_hex(8)}"
    try:
        write_new(temporary, cursor.encode(), durable=True)
        check()
        rename(temporary, folder / cursor_name(cursor.consumer))
        sync_directory(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def read_cursor(directory: str | os.PathLike[str], consumer: str) -> Cursor | None:
    """Returns a consumer's cursor, None if it has not written one; its `stream_id` tells of which stream it is.

    Raises:
        FileInvalid, VersionUnsupported, OSError: the file cannot be used or read.
        ValueError: there can be no consumer of this name.
    """
    path = check_folder(stream_path(directory) / CURSORS) / cursor_name(consumer)
    try:
        return read_record(path, lambda data, file: Cursor.decode(data, consumer, file))
    except FileNotFoundError:
        return None


def lock_name(consumer: str) -> str:
    """Returns the name of the file that is locked while a run owns a consumer's cursor."""
    return f".{check_consumer(consumer)}.lock"


def remove_lock(directory: str | os.PathLike[str], consumer: str) -> None:
    """Removes the lock file of a consumer that is forgotten, unless a run holds it; it would lock out nobody then."""
    path = _lock_path(stream_path(directory), consumer)
    if not os.path.lexists(path):
        return
    try:
        held = _lock(path).acquire()
    except (filelock.Timeout, OSError):
        return
    with held:
        remove(path)


class CursorOwner:
    """The right of one run to write the cursor of a consumer. For one thread of the process that made it.

    A run that is killed leaves nothing that keeps its successor out. Where two run under one name all the same, since
    they are on machines whose locks do not meet or one was told to take over, the one that began later goes on, and the
    other one is refused at its next write. Not guaranteed: that it notices between its look at the cursor and the
    rename that follows; then the later one writes over that.

    Args:
        directory: the stream's directory.
        consumer: the consumer's name.
        take_over: go on although another run on this machine has the cursor; that one is refused from `begin` on.

    Attributes:
        begun: whether the cursor with which the run starts is written.

    Raises:
        CursorTaken: another run on this machine has the cursor.
        StreamMissing: there is no such directory.
        VersionUnsupported, FileRefused, AccessRefused, OSError: the cursor cannot be used, or the filesystem refused.
        ValueError: there can be no consumer of this name.
    """

    def __init__(self, directory: str | os.PathLike[str], consumer: str, *, take_over: bool = False) -> None:
        self.directory = stream_path(directory)
        self.consumer = check_consumer(consumer)
        self._pid = os.getpid()
        self._token = CursorToken(1, secrets.token_hex(8), self._pid, socket.gethostname() or "unknown")
        self._path = _lock_path(self.directory, consumer, make=True)
        self._lock = _lock(self._path)
        self.begun = self._told = self._closed = False
        self._holder: str | None = None
        if not self._try_lock() and not take_over:
            token = _read_signature(self._path)
            holder = "a process that has not written its name yet" if token is None else str(token)
            what = f"is running as {consumer!r} and writes that cursor; stop it first, give this run another name, or"
            raise self._taken(holder, f"{what} let it take the cursor over")
        try:
            self._take_turn()
        except BaseException:
            self._lock.release()
            raise

    def put(self, cursor: Cursor) -> None:
        """Writes the cursor: the first time as `begin` does, then as `write`. Raises as they do."""
        if self.begun:
            self.write(cursor)
        else:
            self.begin(cursor)

    def begin(self, cursor: Cursor) -> None:
        """Writes the cursor with which the run starts, and with it the token: from here on earlier runs are refused.

        It may be before the cursor that is there; its `owner` is filled in.

        Raises:
            VersionUnsupported: the cursor that is there is of a later format.
            ValueError, RuntimeError, OSError: as `write`, or it has begun already.
        """
        self._check_use(cursor)
        if self.begun:
            raise RuntimeError(f"{self._path}: this run has begun already; write the cursor with `write`")
        self._take_turn()
        write_cursor(self.directory, replace(cursor, owner=self._token.text))
        self.begun = True

    def write(self, cursor: Cursor) -> None:
        """Replaces the cursor durably, if no other run has taken it over; its `owner` is filled in.

        Raises:
            CursorTaken: another run has taken the cursor over. Nothing was written, and never will be.
            OSError: the filesystem refused; may be called again.
            ValueError: it is another consumer's cursor.
            RuntimeError: it has not begun, was closed, or this is a fork of the process that owns the cursor.
        """
        self._check_use(cursor)
        if not self.begun:
            raise RuntimeError(f"{self._path}: this run has not begun; write its first cursor with `begin`")
        if self._holder is not None:
            raise self._fenced(self._holder)
        # Who has taken over gets the lock once the other one has let go of it.
        self._try_lock()
        owned = replace(cursor, owner=self._token.text)
        if isinstance(self.directory, UrlPath):
            self._replace_object(self.directory / CURSORS / cursor_name(self.consumer), owned.encode())
        else:
            write_cursor(self.directory, owned, check=self._judge)

    def close(self) -> None:
        """Lets the next run in. The cursor stays as it is. Does nothing in a fork, and when called again."""
        if os.getpid() == self._pid:
            self._closed = True
            self._lock.release()

    def __enter__(self) -> CursorOwner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, read: Callable[[], Cursor | None] | None = None) -> None:
        """Looks whether the cursor that is there is still ours. Raises CursorTaken: it is not."""
        try:
            found = self._read(read)
        except VersionUnsupported as later:
            raise self._fenced("a run with a later release of lazyshard") from later
        if found is None or found.owner == self._token.text:
            return
        other = CursorToken.parse(found.owner)
        # A lower turn is that of a run which looked before we began and wrote after: it is refused at its next look.
        if other is None or other.turn >= self._token.turn:
            raise self._fenced("a program that gives no name" if other is None else str(other))

    def _read(self, read: Callable[[], Cursor | None] | None = None) -> Cursor | None:
        """Returns the cursor that is there, or that `read` returns; None where there is none that can be read."""
        try:
            return read() if read else read_cursor(self.directory, self.consumer)
        except FileInvalid as error:
            if not self._told:
                self._told = True
                _log.warning("%s; this run writes it anew", error)
            return None

    def _replace_object(self, target: Path, data: bytes) -> None:
        assert isinstance(target, UrlPath)
        store, key = target.store, target.key
        for _ in range(_TRIES):
            try:
                found, tag = store.get_tagged(key)
            except FileNotFoundError:
                done = store.put_new(key, data)
            else:
                self._judge(partial(Cursor.decode, found, self.consumer, str(target)))
                done = store.put_matching(key, data, tag)
            if done:
                return
        what = f"{target}: it was replaced by somebody else at each of {_TRIES} tries to write it; see who that is"
        raise StoreUnavailable(what, url=str(target))

    def _take_turn(self) -> None:
        """Takes a turn above all that are known, and leaves word of it for those who find the lock held."""
        cursor = self._read()
        # That beside the lock outlives a cursor which was torn or removed.
        known = (_read_signature(self._path), None if cursor is None else CursorToken.parse(cursor.owner))
        last = max((other.turn for other in known if other is not None), default=0)
        self._token = replace(self._token, turn=last + 1)
        # Without it others have no name to tell, and no more. In place, since the lock is on the file, not on its name.
        with contextlib.suppress(OSError):
            overwrite(self._path, f"{self._token.text}\n".encode())

    def _try_lock(self) -> bool:
        """Returns whether no other run has the lock, as far as this machine can tell."""
        if self._lock.is_locked:
            return True
        try:
            self._lock.acquire()
        except filelock.Timeout:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def _check_use(self, cursor: Cursor) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self._path}: the cursor belongs to process {self._pid}, of which this one is a fork")
        if self._closed:
            raise RuntimeError(f"{self._path}: the owner of this cursor was closed")
        if cursor.consumer != self.consumer:
            raise ValueError(f"a cursor of {self.consumer!r} is written here, got one of {cursor.consumer!r}")

    def _fenced(self, holder: str) -> CursorTaken:
        self._holder = holder
        # Whoever has taken over may have it now.
        self._lock.release()
        what = f"has taken over the cursor of {self.consumer!r}; this run does not write it any more, so the producer"
        way = "may delete what only this run still needs. Stop one of the two, or give it another name"
        return self._taken(holder, f"{what} {way}")

    def _taken(self, holder: str, what: str) -> CursorTaken:
        where = str(self.directory)
        return CursorTaken(f"{where}: {holder} {what}", directory=where, consumer=self.consumer, holder=holder)


def _make_folder(directory: str | os.PathLike[str]) -> Path:
    """Returns the folder of a stream's cursors, made if it was not there; its name is not durable yet."""
    folder = stream_path(directory) / CURSORS
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as cause:
        what = f"{folder.parent}: no such directory, so no cursor can be written there"
        raise StreamMissing(what, directory=str(folder.parent)) from cause
    return check_folder(folder)


def _lock_path(directory: Path, consumer: str, *, make: bool = False) -> Path:
    """Returns the file that is locked: of a stream in an object store, one of this machine."""
    name = lock_name(consumer)
    if isinstance(directory, UrlPath):
        return cache_folder() / f".cursor-{xxhash.xxh3_128_hexdigest(f'{directory}/{name}'.encode())}.lock"
    return (_make_folder(directory) if make else directory / CURSORS) / name


def _read_signature(path: Path) -> CursorToken | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return CursorToken.parse(read_file(path).decode().partition("\n")[0])
    return None


def _lock(path: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
