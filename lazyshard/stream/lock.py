"""One writer a stream: a lock against a second producer on the same machine, fencing against one anywhere.

Files: `.producer.lock` (held while a producer runs; stays, empty), `stream.owner` (see `lazyshard.format.owner`), and a
directory under `.tmp/` (see `lazyshard.stream.workplace`).
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import filelock

from lazyshard.errors import OwnerInvalid, ProducerFenced, ProducerLocked
from lazyshard.format.names import LOCK, OWNER, TEMPORARY
from lazyshard.format.owner import Owner
from lazyshard.store.durable import publish_bytes
from lazyshard.store.files import read_replaced_file
from lazyshard.stream.workplace import Workplace, destroy, is_workplace, list_workplaces, make_workplace


class WriterLock:
    """The right to write to a stream.

    Attributes:
        workplace: the only directory from which files get into the stream, and into which they are taken out of it.
    """

    workplace: Workplace

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / OWNER
        self._lock = filelock.FileLock(directory / LOCK, timeout=0, thread_local=False)
        self._owner: Owner | None = None
        self._released = False

    def acquire(self, now: float) -> Owner:
        """Takes the lock of this machine, then the ownership from whoever had it, who can change nothing from then on.

        Args:
            now: seconds since 1970.

        Raises:
            ProducerLocked: a producer on this machine is running on the stream.
            ProducerFenced: another one takes it at this moment.
            FileRefused: `.tmp` is a link; what is left in it gets cleared, so it must be the stream's own.
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
            least = before.epoch + 1 if before else 1
            self.workplace = make_workplace(self._directory / TEMPORARY, least, secrets.token_hex(8))
            try:
                self._owner = self._take_over(now)
            except BaseException as cause:
                if isinstance(cause, OSError) and self.workplace.is_gone():
                    raise self._fenced(self._read()) from cause
                self.workplace.remove()
                raise
        except BaseException:
            self._lock.release()
            raise
        return self._owner

    def _take_over(self, now: float) -> Owner:
        """Fences all who came before, and becomes the owner."""
        mine = (self.workplace.epoch, self.workplace.token)
        temporary = self.workplace.directory.parent
        # In this order: who has left before the first look has been the owner by the second.
        others = list_workplaces(temporary)
        found = self._read()
        if found is not None:
            # By its name too: a listing may be old.
            others.setdefault((found.epoch, found.token), f"{found.epoch}.{found.token}")
        if max(others, default=mine) > mine:
            raise self._fenced(found)
        for other, name in sorted(others.items()):
            # The owner's file may hold anything.
            if other != mine and is_workplace(name):
                destroy(temporary / name)
        owner = Owner(
            epoch=self.workplace.epoch,
            token=self.workplace.token,
            host=socket.gethostname() or "unknown",
            pid=os.getpid(),
            since=now,
        )
        publish_bytes(owner.encode(), self._path, self.workplace.path(OWNER))
        return owner

    def check(self, *, closely: bool = False) -> None:
        """Looks whether the stream is still ours.

        Args:
            closely: whether to look at our directory too, as after an error: who takes the stream over removes that
                first, and writes his own name after it.

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
        if found != self._owner or (closely and not self._released and self.workplace.is_gone()):
            raise self._fenced(found)

    def release(self) -> None:
        """Lets the next producer in, and removes what is not published."""
        if self._owner is not None and not self._released:
            self._released = True
            self.workplace.remove()
        self._lock.release()

    def _fenced(self, found: Owner | None) -> ProducerFenced:
        """Returns the error of one that has to stop; `found` is the owner, which may still be the one of before."""
        mine = (self.workplace.epoch, self.workplace.token)
        later = found is not None and found != self._owner and (found.epoch, found.token) >= mine
        holder = str(found) if later else None
        who = f"{holder} has taken this stream over" if holder else "another producer is taking this stream over"
        return ProducerFenced(
            f"{self._directory}: {who}; this producer stops. Nothing is lost: the other one goes on after the last "
            f"sealed chunk",
            directory=str(self._directory),
            holder=holder,
        )

    def _read(self) -> Owner | None:
        # An owner file that a power cut has emptied says as much as none: the lock of this machine is what keeps a
        # second producer out here, and whoever comes next writes a new one.
        try:
            return read_replaced_file(self._path, lambda data: Owner.decode(data, str(self._path)))
        except (FileNotFoundError, OwnerInvalid):
            return None
