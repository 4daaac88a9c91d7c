"""One writer a stream: a lock against a second producer on the same machine, fencing against one anywhere.

Files: `.producer.lock` (held while a producer runs; stays, empty), `stream.owner` (see `lazyshard.format.records`), and
`.tmp/EPOCH.TOKEN/`, a producer's own directory for what is not published yet; epoch and token are its fencing token.

Whatever a producer makes appear in a stream, or takes out of it, it renames from or into its own directory. So one that
takes a stream over fences all before it by destroying their directories: a rename that has not happened by then never
will. No look before the rename could give that, since a process may be stopped between any two calls. It takes that a
rename is one step; that a directory which was removed is gone for whoever has used it; and that who makes a directory
and then lists the one that holds it sees all that were made before: of two that start at once the lower one gives up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Final

import filelock

from lazyshard.errors import FileInvalid, ProducerFenced
from lazyshard.format.names import LOCK, OWNER, TEMPORARY
from lazyshard.format.records import Owner
from lazyshard.store.durable import clear_folder, publish_bytes, remove, rename
from lazyshard.store.files import check_folder, read_record

REMEMBERED_S: Final = 60.0  # how long network filesystems may remember what was removed; settings are 3 to 60 s
_NAME: Final = re.compile(r"([0-9]{1,19})\.([0-9a-f]{16})(\.gone)?")
# Added to the name of a directory that is being destroyed: from there on its owner does not find it
_GONE: Final = ".gone"


def make_workplace(temporary: Path, least: int, token: str) -> int:
    """Makes the directory `EPOCH.TOKEN` in `.tmp`, of a higher epoch than all there and at least `least`; returns that.

    A network filesystem may remember `.tmp` although a producer elsewhere has removed it, which is waited for.
    """
    started = time.monotonic()
    while True:
        # Not `exist_ok`, which refuses one that another producer removes at this moment.
        with contextlib.suppress(FileExistsError):
            temporary.mkdir()
        check_folder(temporary)
        try:
            epoch = max(least, *(found + 1 for found, _ in list_workplaces(temporary)), 1)
            with contextlib.suppress(FileExistsError):  # the answer to a request that was sent twice
                (temporary / f"{epoch}.{token}").mkdir()
            return epoch
        except FileNotFoundError:
            if time.monotonic() - started > REMEMBERED_S:
                raise
            time.sleep(0.2)


def list_workplaces(temporary: Path) -> dict[tuple[int, str], str]:
    """Returns the names of all producers' directories, by epoch and token."""
    found = filter(None, map(_NAME.fullmatch, os.listdir(temporary)))
    return {(int(parsed[1]), parsed[2]): parsed[0] for parsed in found}


def destroy(directory: Path) -> None:
    """Removes another producer's directory for good, if it is there, whatever that one does meanwhile."""
    gone = directory.with_name(directory.name.removesuffix(_GONE) + _GONE)
    if gone != directory:
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, gone)
    started, left = time.monotonic(), False
    # What is left is open in a process of this machine, and kept by NFS for that: by this name it does not find it.
    while not left:
        try:
            left = clear_folder(gone)
            os.rmdir(gone)
            return
        except FileNotFoundError:
            return
        except OSError as cause:
            # A client of NFS that works by handles may still find its way in, until the directory itself is gone.
            if cause.errno not in (errno.ENOTEMPTY, errno.EEXIST) or time.monotonic() - started > REMEMBERED_S:
                raise


class WriterLock:
    """The right to write to a stream; files get into it, and out of it, by way of `place` only, our own directory."""

    place: Path

    def __init__(self, directory: Path) -> None:
        self._directory, self._path = directory, directory / OWNER
        self._lock = filelock.FileLock(directory / LOCK, timeout=0, thread_local=False)
        self._mine = (0, secrets.token_hex(8))  # epoch and token
        self._owner: Owner | None = None
        self._released = False

    def acquire(self, now: float) -> None:
        """Takes the lock of this machine, then the ownership from whoever had it, who can change nothing from then on.

        Raises ProducerFenced: a producer on this machine is running on the stream, or another one takes it at this
        moment. FileRefused, OSError: as `make_workplace`.
        """
        directory, temporary = str(self._directory), self._directory / TEMPORARY
        try:
            self._lock.acquire()
        except filelock.Timeout as cause:
            holder = str(self._read() or "a process that has not written its name yet")
            what = f"{directory}: {holder} is already producing into this stream; stop it first, or choose another"
            raise ProducerFenced(f"{what} directory", directory=directory, holder=holder) from cause
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.release)
            before, token = self._read(), self._mine[1]
            self._mine = make_workplace(temporary, before.epoch + 1 if before else 1, token), token
            self.place = temporary / f"{self._mine[0]}.{token}"
            try:
                self._take_over(temporary, now)
            except BaseException as cause:
                if isinstance(cause, OSError) and self.is_gone():
                    raise self._fenced(self._read()) from cause
                self._remove_place()
                raise
            undo.pop_all()

    def _take_over(self, temporary: Path, now: float) -> None:
        # In this order: who has left before the first look has been the owner by the second.
        others, mine = list_workplaces(temporary), self._mine
        if (found := self._read()) is not None:
            # By its name too: a listing may be old.
            others.setdefault((found.epoch, found.token), f"{found.epoch}.{found.token}")
        if max(others, default=mine) > mine:
            raise self._fenced(found)
        for other, name in sorted(others.items()):
            # The owner's file may hold anything.
            if other != mine and _NAME.fullmatch(name):
                destroy(temporary / name)
        self._owner = Owner(*mine, socket.gethostname() or "unknown", os.getpid(), now)
        publish_bytes(self._owner.encode(), self._path, self.path(OWNER))

    def path(self, name: str) -> Path:
        """Returns under which name to write the file that is to be called `name`."""
        return self.place / name

    def is_gone(self) -> bool:
        """Whether our directory is not there any more. Asks the server, not what this machine remembers."""
        try:
            os.close(os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        except OSError as cause:
            return cause.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
        return False

    def take_out(self, path: Path) -> None:
        """Removes a file of the stream if it is there. Raises FileNotFoundError: somebody has taken the stream over."""
        mine = self.path(path.name)
        try:
            rename(path, mine)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
        else:
            remove(mine)

    def check(self, *, closely: bool = False) -> None:
        """Raises ProducerFenced if another producer has taken the stream over, or its owner's file is gone.

        `closely`, as after an error, it looks at our directory too, which who takes over removes first.
        """
        if (found := self._read()) is None:
            what = (
                f"{self._path}: is gone or torn: somebody removes the stream, or has changed that file; this one stops"
            )
            way = "If the stream is still wanted, start it again: it continues after the last sealed chunk"
            raise ProducerFenced(f"{what}. {way}", directory=str(self._directory))
        if found != self._owner or (closely and not self._released and self.is_gone()):
            raise self._fenced(found)

    def lost(self) -> ProducerFenced | None:
        """Returns the error of `check`, closely, None where the stream is ours or the filesystem does not tell."""
        with contextlib.suppress(OSError):
            try:
                self.check(closely=True)
            except ProducerFenced as fenced:
                return fenced
        return None

    def release(self) -> None:
        """Lets the next producer in, and removes what is not published."""
        if self._owner is not None and not self._released:
            self._released = True
            self._remove_place()
        self._lock.release()

    def _remove_place(self) -> None:
        with contextlib.suppress(OSError):
            clear_folder(self.place)
            os.rmdir(self.place)
        with contextlib.suppress(OSError):
            os.rmdir(self.place.parent)

    def _fenced(self, found: Owner | None) -> ProducerFenced:
        """Returns the error of one that has to stop; `found` is the owner, which may still be the one of before."""
        later = found is not None and found != self._owner and (found.epoch, found.token) >= self._mine
        holder = str(found) if later else None
        who = f"{holder} has taken this stream over" if holder else "another producer is taking this stream over"
        way = "this producer stops. Nothing is lost: the other one continues after the last sealed chunk"
        return ProducerFenced(f"{self._directory}: {who}; {way}", directory=str(self._directory), holder=holder)

    def _read(self) -> Owner | None:
        # An owner file that a power cut has emptied says as much as none: the lock of this machine is what keeps a
        # second producer out here, and whoever comes next writes a new one.
        try:
            return read_record(self._path, Owner.decode)
        except (FileNotFoundError, FileInvalid):
            return None
