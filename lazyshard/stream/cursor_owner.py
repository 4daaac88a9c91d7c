"""One run writes the cursor of a consumer: a lock against a second one on the same machine, a token against any other.

The lock is on a file of its own, see `cursor_lock`; the token that counts is in the cursor, see
`lazyshard.format.cursor_token`. Nothing here depends on a clock. Where an object store puts under conditions, nothing
comes between the look at the cursor and its replacement.
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
from types import TracebackType
from typing import Final

import filelock

from lazyshard.errors import CursorInvalid, CursorTaken, VersionUnsupported
from lazyshard.format.cursor import CURSORS, Cursor, check_consumer, cursor_name
from lazyshard.format.cursor_token import CursorToken
from lazyshard.store.urls import UrlPath, stream_path
from lazyshard.stream.cursor import read_cursor, replace_object, write_cursor
from lazyshard.stream.cursor_lock import lock_path, read_signature, sign

_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What a filesystem says that has no locks: a run does not fail for that, the token is what guards its cursor there."""

_log = logging.getLogger("lazyshard")


class CursorOwner:
    """The right of one run to write the cursor of a consumer.

    A run that is killed leaves nothing that keeps its successor out. Where two run under one name all the same, since
    they are on machines whose locks do not meet or one was told to take over, the one that began later goes on, and the
    other one is refused at its next write. Not guaranteed: that it notices between its look at the cursor and the
    rename that follows; then the later one finds what it has just written, and writes over it.

    One owner is for one thread, and for the process that made it.

    Args:
        directory: the stream's directory.
        consumer: the consumer's name.
        take_over: go on although another run on this machine has the cursor; that one is refused from `begin` on.

    Raises:
        CursorTaken: another run on this machine has the cursor.
        StreamMissing: there is no such directory.
        VersionUnsupported: the cursor is of a later format.
        FileRefused, FileUnreadable, OSError: the filesystem refused.
        ValueError: there can be no consumer of this name.
    """

    def __init__(self, directory: str | os.PathLike[str], consumer: str, *, take_over: bool = False) -> None:
        self.directory = stream_path(directory)
        self.consumer = check_consumer(consumer)
        self._pid = os.getpid()
        self._token = CursorToken(1, secrets.token_hex(8), self._pid, socket.gethostname() or "unknown")
        self._path = lock_path(self.directory, consumer, make=True)
        self._lock = filelock.FileLock(self._path, timeout=0, thread_local=False, fallback_to_soft=False)
        self._begun = False
        self._holder: str | None = None
        self._told = False
        self._closed = False
        if not self._try_lock() and not take_over:
            raise self._refused()
        try:
            self._take_turn()
        except BaseException:
            self._lock.release()
            raise

    @property
    def begun(self) -> bool:
        """Whether the cursor with which the run starts is written."""
        return self._begun

    def put(self, cursor: Cursor) -> None:
        """Writes the cursor: the first time as `begin` does, then as `write`. Raises as they do."""
        if self._begun:
            self.write(cursor)
        else:
            self.begin(cursor)

    def begin(self, cursor: Cursor) -> None:
        """Writes the cursor with which the run starts, and with it the token: from here on earlier runs are refused.

        Args:
            cursor: where the run goes on, which may be before the cursor that is there; its `owner` is filled in.

        Raises:
            VersionUnsupported: the cursor that is there is of a later format.
            FileRefused, FileUnreadable, OSError: the filesystem refused; may be called again.
            ValueError: it is another consumer's cursor.
            RuntimeError: it has begun already, was closed, or this is a fork of the process that owns the cursor.
        """
        self._check_use(cursor)
        if self._begun:
            raise RuntimeError(f"{self._path}: this run has begun already; write the cursor with `write`")
        self._take_turn()
        write_cursor(self.directory, replace(cursor, owner=self._token.text))
        self._begun = True

    def write(self, cursor: Cursor) -> None:
        """Replaces the cursor durably, if no other run has taken it over.

        A cursor that is not there any more or is torn is written anew.

        Args:
            cursor: the new cursor; its `owner` is filled in.

        Raises:
            CursorTaken: another run has taken the cursor over. Nothing was written, and never will be.
            FileRefused, FileUnreadable, OSError: the filesystem refused; may be called again.
            ValueError: it is another consumer's cursor.
            RuntimeError: it has not begun, was closed, or this is a fork of the process that owns the cursor.
        """
        self._check_use(cursor)
        if not self._begun:
            raise RuntimeError(f"{self._path}: this run has not begun; write its first cursor with `begin`")
        if self._holder is not None:
            raise self._fenced(self._holder)
        # Who has taken over gets the lock once the other one has let go of it.
        self._try_lock()
        owned = replace(cursor, owner=self._token.text)
        if isinstance(self.directory, UrlPath):
            replace_object(self.directory, owned, lambda data: self._judge(self._decode(data)))
        else:
            write_cursor(self.directory, owned, check=lambda: self._judge(self._read()))

    def close(self) -> None:
        """Lets the next run in. The cursor stays as it is. Does nothing in a fork, and when called again."""
        if os.getpid() == self._pid:
            self._closed = True
            self._lock.release()

    def __enter__(self) -> CursorOwner:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    def _judge(self, found: Cursor | VersionUnsupported | None) -> None:
        """Looks whether the cursor that is there is still ours.

        Raises:
            CursorTaken: it is not.
        """
        if isinstance(found, VersionUnsupported):
            raise self._fenced("a run with a later release of lazyshard") from found
        if found is None or found.owner == self._token.text:
            return
        other = CursorToken.parse(found.owner)
        # A lower turn is that of a run which looked before we began and wrote after: it is refused at its next look.
        if other is None or other.turn >= self._token.turn:
            raise self._fenced(_called(other))

    def _read(self) -> Cursor | VersionUnsupported | None:
        """Returns the cursor that is there, None where there is none that can be read."""
        return self._tolerated(lambda: read_cursor(self.directory, self.consumer))

    def _decode(self, data: bytes | None) -> Cursor | VersionUnsupported | None:
        """Returns what the bytes of a cursor say, as `_read`."""
        name = str(self.directory / CURSORS / cursor_name(self.consumer))
        return self._tolerated(lambda: None if data is None else Cursor.decode(data, self.consumer, name))

    def _tolerated(self, read: Callable[[], Cursor | None]) -> Cursor | VersionUnsupported | None:
        try:
            return read()
        except VersionUnsupported as error:
            return error
        except CursorInvalid as error:
            if not self._told:
                self._told = True
                _log.warning("%s; this run writes it anew", error)
            return None

    def _take_turn(self) -> None:
        """Takes a turn above all that are known, and leaves word of it for those who find the lock held."""
        cursor = self._read()
        if isinstance(cursor, VersionUnsupported):
            raise cursor
        # That beside the lock outlives a cursor which was torn or removed.
        known = (read_signature(self._path), None if cursor is None else CursorToken.parse(cursor.owner))
        last = max((other.turn for other in known if other is not None), default=0)
        self._token = replace(self._token, turn=last + 1)
        # Without it others have no name to tell, and no more.
        with contextlib.suppress(OSError):
            sign(self._path, self._token)

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
            raise RuntimeError(
                f"{self._path}: the cursor belongs to process {self._pid}, of which this one is a fork; only that one "
                f"writes it"
            )
        if self._closed:
            raise RuntimeError(f"{self._path}: the owner of this cursor was closed")
        if cursor.consumer != self.consumer:
            raise ValueError(f"a cursor of {self.consumer!r} is written here, got one of {cursor.consumer!r}")

    def _refused(self) -> CursorTaken:
        holder = _called(read_signature(self._path), "a process that has not written its name yet")
        return CursorTaken(
            f"{self.directory}: {holder} is running as {self.consumer!r} and writes that cursor; stop it first, give "
            f"this run another name, or let it take the cursor over",
            directory=str(self.directory),
            consumer=self.consumer,
            holder=holder,
        )

    def _fenced(self, holder: str) -> CursorTaken:
        self._holder = holder
        # Whoever has taken over may have it now.
        self._lock.release()
        return CursorTaken(
            f"{self.directory}: {holder} has taken over the cursor of {self.consumer!r}; this run does not write it "
            f"any more, so the producer may delete what only this run still needs. Stop one of the two, or give it "
            f"another name",
            directory=str(self.directory),
            consumer=self.consumer,
            holder=holder,
        )


def _called(token: CursorToken | None, unknown: str = "a program that gives no name") -> str:
    return unknown if token is None else str(token)
