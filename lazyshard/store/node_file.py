"""Files in the memory of this node by which its processes tell each other what they have seen of a stream.

Files: `/dev/shm/lazyshard-UID/` (mode 0700; stays, empty), and in it one file of some KB for each stream that is being
waited for. Whoever waits has it open, and holds a shared flock on it; the last one to leave removes it, and whoever
makes one also removes those that nobody holds any more: what killed processes have left.

A file has slots. An answer in a slot is written in one piece over the one before, behind a digest over all of it, so
half an answer, or one of something else, is none. The right to ask for a slot's answer is a record lock on its first
byte, which ends with its process.

Nothing here is needed: where the folder cannot be had or is somebody else's, the OSError that says so means that each
process looks for itself. Not guaranteed: that one process at a time has the right to ask (threads of one process share
it). Answers are believed as far as the user's own processes are: nobody else can write here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
from typing import Final, NamedTuple

import xxhash

MEMORY: Final = "/dev/shm"  # noqa: S108
"""Memory of this node on every Linux; a fixed place, since processes of one job may differ in TMPDIR."""

SLOT_BYTES: Final = 16 << 10
"""Room for an answer: a head is below 1 KB, unless its note is very long. Of what is not written nothing is kept."""

_DIGEST_BYTES: Final = 8
_HEADER: Final = struct.Struct("<dI")
"""When the answer came, in seconds of CLOCK_MONOTONIC, and how many bytes it has."""

_VERSION: Final = 1
"""Of what the slots hold and how; another one has other names."""

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_TRIES: Final = 3
"""A file that is being removed when it is opened is made anew; once is enough unless others come and go just then."""


class Answer(NamedTuple):
    """What a process was told.

    Attributes:
        at: when, in seconds of CLOCK_MONOTONIC, which is one clock for all processes of a node.
        data: what.
    """

    at: float
    data: bytes

    def encode(self, name: str) -> bytes:
        """Returns the bytes of a slot in the file of that name."""
        body = _HEADER.pack(self.at, len(self.data)) + self.data
        return xxhash.xxh3_64_digest(name.encode() + body) + body

    @classmethod
    def decode(cls, slot: bytes, name: str) -> Answer | None:
        """Reads a slot, which may hold more behind the answer; None where it holds none that is whole."""
        begin = _DIGEST_BYTES + _HEADER.size
        if len(slot) < begin:
            return None
        at, size = _HEADER.unpack_from(slot, _DIGEST_BYTES)
        answer = cls(at, slot[begin : begin + size])
        return answer if slot[: begin + size] == answer.encode(name) else None


def file_name(stream_id: str, directory: os.stat_result) -> str:
    """Returns the name of a stream's file; a copy of the stream or another mount of it has another one."""
    return xxhash.xxh3_128_hexdigest(f"{_VERSION} {stream_id} {directory.st_dev} {directory.st_ino}".encode())


class NodeFile:
    """The file of one stream, open, and made if need be.

    Args:
        name: as `file_name` gives it.

    Raises:
        OSError: it cannot be had, or is not this user's own.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = _open_folder()
        try:
            self._fd = self._open()
            if os.fstat(self._fd).st_size == 0:
                self._remove_left()
        except BaseException:
            os.close(self._folder)
            raise

    def read(self, slot: int) -> Answer | None:
        """Returns the answer of a slot, None where there is none. Raises OSError where it cannot be read."""
        return Answer.decode(os.pread(self._fd, SLOT_BYTES, slot * SLOT_BYTES), self.name)

    def write(self, slot: int, answer: Answer) -> None:
        """Puts an answer into a slot, unless it is too long for one. Raises OSError where there is no room for it."""
        data = answer.encode(self.name)
        if len(data) <= SLOT_BYTES:
            os.pwrite(self._fd, data, slot * SLOT_BYTES)

    def lock(self, slot: int) -> bool:
        """Takes the right to ask for the answer of a slot; returns whether it was free."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot * SLOT_BYTES)
        except OSError:
            return False
        return True

    def unlock(self, slot: int) -> None:
        """Gives that right back."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot * SLOT_BYTES)

    def close(self) -> None:
        """Leaves; removes the file if nobody else has it open."""
        with contextlib.suppress(OSError):
            self._remove(self.name, self._fd)
        os.close(self._fd)
        os.close(self._folder)

    def _open(self) -> int:
        for _ in range(_TRIES):
            fd = os.open(self.name, _FLAGS | os.O_CREAT, 0o600, dir_fd=self._folder)
            try:
                _check(os.fstat(fd), stat.S_IFREG, self.name)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    # From here on nobody removes it; somebody may have done so before.
                    if os.fstat(fd).st_nlink:
                        return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise BlockingIOError(errno.EAGAIN, "is being removed again and again", self.name)

    def _remove_left(self) -> None:
        for name in os.listdir(self._folder):
            if name == self.name or not _NAME.fullmatch(name):
                continue
            with contextlib.suppress(OSError):
                fd = os.open(name, _FLAGS, dir_fd=self._folder)
                try:
                    self._remove(name, fd)
                finally:
                    os.close(fd)

    def _remove(self, name: str, fd: int) -> None:
        """Removes a file if nobody else holds it."""
        found = os.fstat(fd)
        _check(found, stat.S_IFREG, name)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The name may be that of a newer file.
        if os.path.samestat(found, os.stat(name, dir_fd=self._folder, follow_symlinks=False)):
            os.unlink(name, dir_fd=self._folder)


def _open_folder() -> int:
    folder = f"{MEMORY}/lazyshard-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(fd), stat.S_IFDIR, folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(found: os.stat_result, kind: int, name: str) -> None:
    """Refuses what is of another kind than it should be, another user's, or what others may write to."""
    if stat.S_IFMT(found.st_mode) != kind or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "is not of the user's own making", name)
