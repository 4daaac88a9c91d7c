"""Single-flight polling per node: one process asks the filesystem for a stream's news, the others reuse its answer.

Nobody is elected. Each process keeps its own pace, and before it asks it reads what the others were told (`NodeFile`):
an answer no older than its own pause is as good as one of its own. Who lives on another's answers comes a little later
the next time, so the one that asks goes on asking. Where several would ask at once, a record lock on the slot decides;
one that keeps the lock for long (a filesystem that hangs, a stopped process) is not waited for.

Files: `/dev/shm/lazyshard-UID/` (mode 0700; stays, empty), and in it one file of some KB for each stream that is being
waited for. Whoever waits holds a shared flock on it; the last one to leave removes it, and whoever makes one also
removes those that nobody holds any more. Where there can be none, each process polls for itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from lazyshard.errors import FormatInvalid
from lazyshard.format.records import Head
from lazyshard.stream.listing import Published, are_whole

MEMORY: Final = "/dev/shm"  # noqa: S108
"""Memory of this node on every Linux; a fixed place, since processes of one job may differ in TMPDIR."""

SLOT_BYTES: Final = 16 << 10  # room for an answer: a head is below 1 KB, unless its note is very long

_DIGEST_BYTES: Final = 8
_HEADER: Final = struct.Struct("<dI")  # when the answer came, by CLOCK_MONOTONIC, and how many bytes it has

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

LATER_S: Final = 0.02
"""How much later than due a process comes that lives on another's answers, but of a short pause a quarter."""

ASKING_S: Final = 2.0
"""How long the answer of another process that is just asking is waited for: that of a busy server takes less."""

_SOON_S: Final = 0.001  # no pause is shorter; what is due within it is due


HEAD_SLOT: Final = 0  # the bytes of `head.json`
RETIRED_SLOT: Final = 1  # how many chunks are deleted, in decimal digits


@dataclass(slots=True)
class _Slot:
    """What a wait knows of one slot."""

    at: float = -math.inf  # since when
    own: bool = True  # by the filesystem's word, not by that of another process
    asking: bool = False  # whether another process is just asking
    refused_at: float | None = None  # since when it is


class NodePoll:
    """What one wait shares with those of other processes; nothing without a stream's identity.

    `identify` returns the status of its directory, at the first look that can be shared; `clock` gives seconds of
    CLOCK_MONOTONIC.
    """

    def __init__(
        self, stream_id: str | None, identify: Callable[[], os.stat_result], clock: Callable[[], float]
    ) -> None:
        self._stream_id, self._identify, self._clock = stream_id, identify, clock
        self._tries = 0 if stream_id is None else 3  # how often to try whether there can be a file
        self._file: NodeFile | None = None
        self._slots = (_Slot(), _Slot())

    def close(self) -> None:
        """Closes the file, for good."""
        self._tries = 0
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def renew(self, slot: int, age: float, ask: Callable[[], bytes | None], adopt: Callable[[bytes], bool]) -> None:
        """Sees to it that what is known is not older than `age` seconds; if another process is just asking, not yet.

        `ask` asks the filesystem, and returns the answer for the others, if it is one for them. `adopt` takes the
        answer of another process, or refuses it and returns False.
        """
        known = self._slots[slot]
        known.asking = False
        if self._file is None and age > 0 and self._tries > 0:
            self._tries -= 1
            with contextlib.suppress(OSError):
                self._file = NodeFile(file_name(str(self._stream_id), self._identify()))
        file = self._file
        if age <= 0 or file is None:
            self._ask(slot, ask)
            return
        if self._take(slot, file, age, adopt):
            return
        locked = file.lock(slot)
        if not locked:
            now = self._clock()
            known.refused_at = now if known.refused_at is None else known.refused_at
            if now < known.refused_at + ASKING_S:
                known.asking = True
                return
        try:
            if locked:
                known.refused_at = None
                # Somebody may have asked since.
                if self._take(slot, file, age, adopt):
                    return
            self._ask(slot, ask)
        finally:
            if locked:
                file.unlock(slot)

    def pause(self, slot: int, age: float) -> float:
        """Returns in how many seconds to come again, if what is known may be so many seconds old."""
        known, now, later = self._slots[slot], self._clock(), min(LATER_S, age / 4)
        if known.asking and known.refused_at is not None:
            return max(_SOON_S, later, (now - known.refused_at) / 10)
        return max(_SOON_S, known.at - now + age + (0.0 if known.own else later))

    def _take(self, slot: int, file: NodeFile, age: float, adopt: Callable[[bytes], bool]) -> bool:
        """Takes another's answer if there is a newer one; returns whether what is known then is young enough."""
        known, answer = self._slots[slot], None
        with contextlib.suppress(OSError):
            answer = file.read(slot)
        now = self._clock()
        # One from the future was written under another clock.
        if answer is not None and known.at < answer.at <= now and adopt(answer.data):
            known.at, known.own, known.refused_at = answer.at, False, None
        return now < known.at + age - _SOON_S

    def _ask(self, slot: int, ask: Callable[[], bytes | None]) -> None:
        data, known = ask(), self._slots[slot]
        known.at, known.own = self._clock(), True
        if self._file is not None and data is not None:
            # Where that fails, each of the others asks.
            with contextlib.suppress(OSError):
                self._file.write(slot, Answer(known.at, data))


def decode_head(data: bytes, samples_per_chunk: int) -> Published | None:
    """Returns what another process has found in `head.json`, None if that cannot be."""
    try:
        head = Head.decode(data)
    except FormatInvalid:
        return None
    if not are_whole(head.chunks, head.samples, head.ended, samples_per_chunk):
        return None
    return Published(head.chunks, head.samples, head.ended, head)


def decode_retired(data: bytes) -> int | None:
    """Returns how many chunks another process says were deleted, None if it is no such answer."""
    return int(data) if data.isdigit() and len(data) < 20 else None


class Answer(NamedTuple):
    """What a process was told, and when by CLOCK_MONOTONIC, which is one clock for all processes of a node."""

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
    # Of other slots than these it would begin with another number.
    return xxhash.xxh3_128_hexdigest(f"1 {stream_id} {directory.st_dev} {directory.st_ino}".encode())


class NodeFile:
    """The file of one stream, open, and made if need be. Raises OSError: it cannot be had, or is not this user's."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = f"{MEMORY}/lazyshard-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(os.fstat(self._folder), stat.S_IFDIR, folder)
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
        for _ in range(3):  # one that is being removed when it is opened is made anew
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
        for name in {*filter(_NAME.fullmatch, os.listdir(self._folder))} - {self.name}:
            with contextlib.suppress(OSError):
                fd = os.open(name, _FLAGS, dir_fd=self._folder)
                try:
                    self._remove(name, fd)
                finally:
                    os.close(fd)

    def _remove(self, name: str, fd: int) -> None:
        found = os.fstat(fd)
        _check(found, stat.S_IFREG, name)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The name may be that of a newer file.
        if os.path.samestat(found, os.stat(name, dir_fd=self._folder, follow_symlinks=False)):
            os.unlink(name, dir_fd=self._folder)


def _check(found: os.stat_result, kind: int, name: str) -> None:
    """Refuses what is of another kind than it should be, another user's, or what others may write to."""
    if stat.S_IFMT(found.st_mode) != kind or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "is not of the user's own making", name)
