"""One writer a stream: a lock against a second producer on the same machine, an epoch against one anywhere.

Files: `.producer.lock` (held while a producer runs; stays, empty) and `stream.owner` (see `lazyshard.format.owner`).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path
from typing import Final

import filelock

from lazyshard.errors import OwnerInvalid, ProducerFenced, ProducerLocked
from lazyshard.format.names import LOCK, OWNER
from lazyshard.format.owner import Owner
from lazyshard.storage.durable import publish_bytes
from lazyshard.storage.files import check_folder, read_replaced_file

REMEMBERED_S: Final = 60.0
"""How long network filesystems may remember what another machine has removed; common settings are 3 to 60 s."""

_PAUSE_S: Final = 0.2


class WriterLock:
    """The right to write to a stream.

    Not guaranteed: that a fenced producer notices between its look at the owner and the rename that follows; see
    `lazyshard.format.owner`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / OWNER
        self._lock = filelock.FileLock(directory / LOCK, timeout=0, thread_local=False)
        self._owner: Owner | None = None

    def acquire(self, now: float, temporary: Path) -> Owner:
        """Takes the lock of this machine, then the ownership from whoever had it.

        Args:
            now: seconds since 1970.
            temporary: a directory on the same filesystem to write under.

        Raises:
            ProducerLocked: a producer on this machine is running on the stream.
            FileRefused: `temporary` is a link; what is left in it gets cleared, so it must be the stream's own.
            OSError: the filesystem failed.
        """
        try:
            self._lock.acquire()
        except filelock.Timeout as cause:
            holder = str(self._read() or "a process that has not written its name yet")
            raise ProducerLocked(
                f"{self._directory}: {holder} is already producing into this stream; stop it first, or choose another "
                f"directory",
                directory=str(self._directory),
                holder=holder,
            ) from cause
        try:
            before = self._read()
            owner = Owner(
                epoch=before.epoch + 1 if before else 1,
                token=secrets.token_hex(8),
                host=socket.gethostname() or "unknown",
                pid=os.getpid(),
                since=now,
            )
            self._publish(owner, temporary)
        except BaseException:
            self._lock.release()
            raise
        self._owner = owner
        return owner

    def _publish(self, owner: Owner, temporary: Path) -> None:
        """Writes the owner's file, and makes the directory for temporary files.

        A network filesystem may remember that directory although a producer elsewhere has removed it: then it can be
        neither made nor used until that is forgotten, which is waited for.
        """
        started = time.monotonic()
        while True:
            temporary.mkdir(exist_ok=True)
            check_folder(temporary)
            try:
                publish_bytes(owner.encode(), self._path, temporary / f"{OWNER}.{owner.token}")
            except FileNotFoundError:
                if not temporary.is_dir() or time.monotonic() - started > REMEMBERED_S:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return

    def check(self) -> None:
        """Looks whether the stream is still ours.

        Raises:
            ProducerFenced: another producer has taken it over, or its owner's file is gone.
        """
        found = self._read()
        if found is None:
            raise ProducerFenced(
                f"{self._path}: is gone or torn: somebody removes the stream, or has changed that file; this producer "
                f"stops, since it cannot know any more whether the stream is its own. If the stream is still wanted, "
                f"start it again: it goes on after the last sealed chunk",
                directory=str(self._directory),
            )
        if found != self._owner:
            holder = str(found)
            raise ProducerFenced(
                f"{self._directory}: {holder} has taken this stream over; this producer stops. Nothing is lost: the "
                f"other one goes on after the last sealed chunk",
                directory=str(self._directory),
                holder=holder,
            )

    def release(self) -> None:
        """Lets the next producer in."""
        self._lock.release()

    def _read(self) -> Owner | None:
        # An owner file that a power cut has emptied says as much as none: the lock of this machine is what keeps a
        # second producer out here, and whoever comes next writes a new one.
        try:
            return read_replaced_file(self._path, lambda data: Owner.decode(data, str(self._path)))
        except (FileNotFoundError, OwnerInvalid):
            return None
