"""The consumers of a stream: their cursors, each written durably and atomically by the one run that owns it, and hints.

Files in `cursors/`: `NAME.json`, the cursor, read by the run's next start and by producers; `NAME.reading.json`, a hint
that is never synced; `.NAME.TOKEN` and `.NAME.reading.TOKEN` while these are being written, which a kill may leave; and
`.NAME.lock`, which a run locks while it owns the cursor and which holds the token of its last owner. For a stream in an
object store the lock is a file of this machine. The lock keeps out a second run on the same machine, the token in the
cursor (`lazyshard.format.state`) a run on any other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import filelock
import xxhash

from lazyshard import errors
from lazyshard.errors import CursorTaken, FileInvalid, FormatInvalid, StreamMissing, VersionUnsupported
from lazyshard.format import state as names
from lazyshard.format.records import CURSORS
from lazyshard.format.state import Cursor, CursorToken, ReadingHint, check_consumer, cursor_name, reading_name
from lazyshard.store.durable import remove, rename, sync_directory, write_new
from lazyshard.store.files import UrlPath, cache_folder, check_folder, find_record, list_names, read_file, stream_path
from lazyshard.stream.listing import names_in, read_manifest

_TRIES: Final = 5  # each try notices a cursor that another run has written since

# Errors of a filesystem without locks. A run does not fail for them: the token guards its cursor there
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
_log = logging.getLogger("lazyshard")
_told: set[str] = set()  # files for which this process has logged that they cannot be written


def write_cursor(
    directory: str | os.PathLike[str], cursor: Cursor, *, check: Callable[[], object] = lambda: None
) -> None:
    """Replaces a consumer's cursor; returns when the new one is on the device.

    If this process is killed or power is lost at any time, either the old or the new cursor is there, complete. Not
    guaranteed: if two processes write the same consumer's cursor at once, that the later one wins; see `CursorOwner`.

    Args:
        directory: the stream's directory.
        cursor: the new cursor; its checkpoint must already be on the device.
        check: called right before the rename; if it raises, the old cursor stays.

    Raises:
        StreamMissing: there is no such directory.
        OSError: the filesystem refused; the old cursor may still be in effect.
    """
    folder = _make_folder(stream_path(directory))
    if not isinstance(folder, UrlPath):
        # Always: the process that made the folder may have been killed before its name was durable.
        sync_directory(folder.parent)
    _replace(folder / cursor_name(cursor.consumer), cursor.encode(), check)


def read_cursor(directory: str | os.PathLike[str], consumer: str) -> Cursor | None:
    """Returns a consumer's cursor, None if it has not written one; the cursor's `stream_id` identifies its stream.

    Raises:
        FileInvalid, VersionUnsupported, OSError: the file cannot be used or read.
        ValueError: the name is not valid for a consumer.
    """
    path = check_folder(stream_path(directory) / CURSORS) / cursor_name(consumer)
    return find_record(path, lambda data, file: Cursor.decode(data, consumer, file))


class CursorOwner(contextlib.AbstractContextManager["CursorOwner"]):
    """The right of one run to write a consumer's cursor. Use it in one thread of the process that made it.

    A killed run leaves nothing that keeps its successor out. If two runs use one name, because they are on machines
    that do not share locks or because one took the cursor over, the run that began later continues, and the other's
    next write is refused. Not guaranteed: that a run notices a takeover between its check of the cursor and the rename
    that follows; it then overwrites the later run's cursor.

    Args:
        directory: the stream's directory.
        consumer: the consumer's name.
        take_over: continue although another run on this machine has the cursor; that run is refused from `begin` on.

    Attributes:
        begun: whether the run has written its first cursor.

    Raises:
        CursorTaken: another run on this machine has the cursor.
        StreamMissing: there is no such directory.
        VersionUnsupported, FileRefused, AccessRefused, OSError: the cursor cannot be used, or the filesystem refused.
        ValueError: the name is not valid for a consumer.
    """

    def __init__(self, directory: str | os.PathLike[str], consumer: str, *, take_over: bool = False) -> None:
        self.directory = stream_path(directory)
        self.consumer = check_consumer(consumer)
        self._pid = os.getpid()
        self._token = CursorToken(1, secrets.token_hex(8), self._pid, socket.gethostname() or "unknown")
        _make_folder(self.directory)
        self._lock = _lock_of(self.directory, consumer)
        self._path = Path(self._lock.lock_file)
        self.begun = self._told = self._closed = False
        self._holder: str | None = None
        if not self._try_lock() and not take_over:
            holder = str(_read_signature(self._path) or "a process that has not written its name yet")
            way = "stop it first, give this run another name, or let it take the cursor over"
            raise self._taken(holder, f"is running as {consumer!r} and writes that cursor; {way}")
        try:
            self._take_turn()
        except BaseException:
            self._lock.release()
            raise

    def put(self, cursor: Cursor) -> None:
        """Writes the cursor: the first time like `begin`, then like `write`. Raises as they do."""
        (self.write if self.begun else self.begin)(cursor)

    def begin(self, cursor: Cursor) -> None:
        """Writes the run's first cursor together with its token: from here on earlier runs are refused.

        The cursor may be behind the existing one, which is logged; its `owner` is filled in.

        Raises:
            VersionUnsupported: the existing cursor has a later format.
            ValueError, RuntimeError, OSError: as `write`, or the run has already begun.
        """
        self._check_use(cursor)
        if self.begun:
            raise RuntimeError(f"{self._path}: this run has already begun; write the cursor with `write`")
        found = self._take_turn()
        if found is not None and found.stream_id == cursor.stream_id and found.consumed > cursor.consumed:
            text = "%s: the cursor of %r moves back from %d to %d samples: this run began or resumed earlier"
            _log.warning(text, self.directory, self.consumer, found.consumed, cursor.consumed)
        write_cursor(self.directory, replace(cursor, owner=self._token.text))
        self.begun = True

    def write(self, cursor: Cursor) -> None:
        """Replaces the cursor durably unless another run has taken it over; its `owner` is filled in.

        Raises:
            CursorTaken: another run has taken the cursor over. Nothing was written, and this run cannot write again.
            OSError: the filesystem refused; the call may be repeated.
            ValueError: the cursor belongs to another consumer.
            RuntimeError: the run has not begun, was closed, or this is a fork of the process that owns the cursor.
        """
        self._check_use(cursor)
        if not self.begun:
            raise RuntimeError(f"{self._path}: this run has not begun; write its first cursor with `begin`")
        if self._holder is not None:
            raise self._fenced(self._holder)
        # A run that has taken over gets the lock once the other run has released it.
        self._try_lock()
        owned = replace(cursor, owner=self._token.text)
        if isinstance(self.directory, UrlPath):
            self._replace_object(self.directory / CURSORS / cursor_name(self.consumer), owned.encode())
        else:
            write_cursor(self.directory, owned, check=self._judge)

    def close(self) -> None:
        """Lets the next run in; the cursor stays. Does nothing in a fork or if called again."""
        if os.getpid() == self._pid:
            self._closed = True
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, read: Callable[[], Cursor | None] | None = None) -> None:
        """Checks that the existing cursor is still ours. Raises CursorTaken if it is not."""
        try:
            found = self._read(read)
        except VersionUnsupported as later:
            raise self._fenced("a run with a later release of lazyshard") from later
        if found is not None and found.owner != self._token.text:
            other = CursorToken.parse(found.owner)
            # A lower turn is from a run that checked before we began and wrote after; its next check refuses it.
            if other is None or other.turn >= self._token.turn:
                raise self._fenced(str(other or "a program that gives no name"))

    def _read(self, read: Callable[[], Cursor | None] | None = None) -> Cursor | None:
        """Returns the existing cursor, or the one `read` returns; None if there is none that can be read."""
        try:
            return read() if read else read_cursor(self.directory, self.consumer)
        except FileInvalid as error:
            if not self._told:
                _log.warning("%s; this run writes it again", error)
            self._told = True
            return None

    def _replace_object(self, target: UrlPath, data: bytes) -> None:
        store, key = target.store, target.key
        for _ in range(_TRIES):
            try:
                found, tag = store.get_tagged(key)
            except FileNotFoundError:
                done = store.swap(key, data, None)
            else:
                self._judge(partial(Cursor.decode, found, self.consumer, str(target)))
                done = store.swap(key, data, tag)
            if done:
                return
        what = f"{target}: another program replaced it at each of {_TRIES} tries to write it; find out which"
        raise errors.StoreUnavailable(what, url=str(target))

    def _take_turn(self) -> Cursor | None:
        """Takes a turn above all known ones, records it for processes that find the lock held; returns the cursor."""
        cursor = self._read()
        # The token in the lock file outlives a cursor that was torn or removed.
        known = (_read_signature(self._path), None if cursor is None else CursorToken.parse(cursor.owner))
        self._token = self._token._replace(turn=max(0 if other is None else other.turn for other in known) + 1)
        # If this fails, others only lack a name to report. In place, since the lock is on the file, not on its name.
        with contextlib.suppress(OSError):
            write_new(self._path, f"{self._token.text}\n".encode(), over=True)
        return cursor

    def _try_lock(self) -> bool:
        """Returns whether no other run holds the lock, as far as this machine can tell."""
        try:
            if not self._lock.is_locked:
                self._lock.acquire()
        except filelock.Timeout:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def _check_use(self, cursor: Cursor) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self._path}: the cursor belongs to process {self._pid}; this process is a fork of it")
        if self._closed:
            raise RuntimeError(f"{self._path}: the owner of this cursor was closed")
        if cursor.consumer != self.consumer:
            raise ValueError(f"expected a cursor of {self.consumer!r}, got one of {cursor.consumer!r}")

    def _fenced(self, holder: str) -> CursorTaken:
        self._holder = holder
        # The run that has taken over may have it now.
        self._lock.release()
        what = "so the producer may delete chunks that only this run needs. Stop one of them or give it another name"
        return self._taken(holder, f"has taken over the cursor of {self.consumer!r}, {what}")

    def _taken(self, holder: str, what: str) -> CursorTaken:
        where = str(self.directory)
        return CursorTaken(f"{where}: {holder} {what}", directory=where, consumer=self.consumer, holder=holder)


def _replace(target: Path, data: bytes, check: Callable[[], object] = lambda: None, *, durable: bool = True) -> None:
    """Replaces a file of a consumer; calls `check` right before. Not `durable`: a hint, tried once."""
    if isinstance(target, UrlPath):
        check()
        return target.store.put(target.key, data, patience_s=None if durable else 0)
    temporary = target.with_name(f".{target.stem}.{secrets.token_hex(8)}")
    try:
        write_new(temporary, data, durable=durable)
        check()
        rename(temporary, target)
        if durable:
            sync_directory(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def _make_folder(directory: Path) -> Path:
    """Returns the folder of a stream's cursors and makes it if needed; its name is not durable yet."""
    folder = directory / CURSORS
    if not isinstance(folder, UrlPath):
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError as cause:
            what = f"{directory}: no such directory, so no cursor can be written there"
            raise StreamMissing(what, directory=str(directory)) from cause
    return check_folder(folder)


def _lock_of(directory: Path, consumer: str) -> filelock.BaseFileLock:
    """Returns the lock: a file in the stream, or on this machine if the stream is in an object store."""
    path = directory / CURSORS / f".{check_consumer(consumer)}.lock"
    if isinstance(directory, UrlPath):
        path = cache_folder() / f".cursor-{xxhash.xxh3_128_hexdigest(f'{directory}/{path.name}'.encode())}.lock"
    return filelock.FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)


def _read_signature(path: Path) -> CursorToken | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return CursorToken.parse(read_file(path).decode().partition("\n")[0])
    return None


@dataclass(frozen=True, slots=True)
class Consumer:
    """The state of a consumer, as it has reported it. A consumer with a problem has finished no chunk."""

    name: str
    cursor: Cursor | None  # how far its durable checkpoints are; None if there is no valid one
    reading: ReadingHint | None  # what it needs to read on; None if there is no hint, or it is for another stream
    problem: str | None  # why its cursor is not valid, in words

    @property
    def chunks_before(self) -> int:
        """The consumer has finished the chunks [0, chunks_before); without a cursor, none."""
        return 0 if self.cursor is None else self.cursor.chunks_before


def list_consumers(directory: str | os.PathLike[str], published_chunks: int | None = None) -> tuple[Consumer, ...]:
    """Returns the consumers that have a cursor or a reading hint, by name.

    A cursor that is torn, unreadable, of another stream, or ahead of `published_chunks` (if given) never raises: it is
    a `problem` of its consumer, whose chunks must be kept.

    Raises:
        AccessRefused, OSError: the folder of cursors cannot be listed, so the consumers are unknown.
        FileInvalid, VersionUnsupported: `stream.json` cannot be used.
    """
    stream, found = stream_path(directory), set()
    stream_id = None if (manifest := read_manifest(stream, None)) is None else manifest.stream_id
    try:
        entries = names_in(check_folder(stream / CURSORS))
    except FileNotFoundError:
        return ()
    for entry in entries:
        if entry.endswith(names.CURSOR_SUFFIX):
            with contextlib.suppress(ValueError):
                found.add(check_consumer(entry.removesuffix(names.CURSOR_SUFFIX).removesuffix(".reading")))
    return tuple(_consumer(stream, name, stream_id, published_chunks) for name in sorted(found))


def _consumer(stream: Path, name: str, stream_id: str | None, published_chunks: int | None) -> Consumer:
    hint, cursor = read_reading(stream, name), None
    try:
        cursor = read_cursor(stream, name)
        problem = None if cursor is None else _problem(stream, cursor, stream_id, published_chunks)
    except (FormatInvalid, OSError) as error:
        problem = str(error)
    reading = hint if hint is not None and hint.stream_id == stream_id else None
    return Consumer(name, None if problem else cursor, reading, problem)


def _problem(stream: Path, cursor: Cursor, stream_id: str | None, published_chunks: int | None) -> str | None:
    """Returns why a readable cursor is not valid, None if it is."""
    path, chunks = stream / CURSORS / cursor_name(cursor.consumer), cursor.chunks_before
    if cursor.stream_id != stream_id:
        was, now = (f"stream {one}" if one else "a stream without stream.json" for one in (cursor.stream_id, stream_id))
        return f"{path}: belongs to {was}, but the directory holds {now}"
    if published_chunks is not None and chunks > published_chunks:
        return f"{path}: has finished {chunks:,} chunks, but only {published_chunks:,} are published"
    return None


def forget_consumer(directory: str | os.PathLike[str], name: str) -> bool:
    """Removes a consumer's cursor, reading hint and lock file; returns, once durable, whether any existed.

    From then on no chunk is kept for it. A consumer that is still running registers again with its next checkpoint.
    Raises ValueError: the name is not valid for a consumer. OSError: the filesystem refused.
    """
    stream = stream_path(directory)
    folder, own = check_folder(stream / CURSORS), (reading_name(name), cursor_name(name))
    try:
        found = set(list_names(folder))
    except FileNotFoundError:
        return False
    # Files that a kill has left half written are the consumer's too.
    left = filter(re.compile(rf"\.{re.escape(name)}\.(reading\.)?[0-9a-f]{{16}}").fullmatch, found)
    # The cursor last: while it exists the consumer is known, and this call can be repeated.
    for path in [folder / entry for entry in (*left, *own)]:
        if isinstance(path, UrlPath):
            path.store.delete(path.key)
        else:
            remove(path)
    lock = _lock_of(stream, name)
    # Not if a run holds it: without its file the lock would exclude no other run.
    with contextlib.suppress(filelock.Timeout, OSError):
        if os.path.lexists(lock.lock_file):
            with lock:
                remove(Path(lock.lock_file))
    if not isinstance(folder, UrlPath):
        sync_directory(folder)
    return not found.isdisjoint(own)


def write_reading(directory: str | os.PathLike[str], hint: ReadingHint) -> bool:
    """Replaces a consumer's reading hint atomically; returns whether it was written.

    Reading continues without it, so a filesystem error is logged, once per process and file. Not guaranteed: that the
    hint survives a power cut, or that the higher of two hints stays if two processes write at once.
    """
    stream = stream_path(directory)
    target = stream / CURSORS / reading_name(hint.consumer)
    try:
        _make_folder(stream)
        _replace(target, hint.encode(), durable=False)
    except OSError as error:
        if str(target) not in _told:
            refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            remedy = f"; let uid {os.geteuid()} write to {target.parent}" if refused else ""
            what = "so the producer cannot see how far this run reads, and may hold back chunks that it waits for"
            _log.warning(f"%s: cannot be written (%s), {what}%s", target, error.strerror or error, remedy)
        _told.add(str(target))
        return False
    return True


def read_reading(directory: str | os.PathLike[str], consumer: str) -> ReadingHint | None:
    """Returns a consumer's reading hint, None if there is none that can be used: it is only a hint.

    Compare its `stream_id` with the stream that is in the directory now.
    """
    path = stream_path(directory) / CURSORS / reading_name(consumer)
    with contextlib.suppress(OSError, FormatInvalid):
        check_folder(path.parent)
        return ReadingHint.decode(read_file(path), consumer, str(path))
    return None
