"""Single-flight polling per node: one process asks the filesystem for a stream's news, the others reuse its answer.

Nobody is elected. Each process keeps its own pace, and before it asks it reads what the others were told (`NodeFile`):
an answer no older than its own pause is as good as one of its own. Who lives on another's answers comes a little later
the next time, so the one that asks continues to. Where several would ask at once, a record lock on the slot decides;
one that keeps the lock for long (a filesystem that hangs, a stopped process) is not waited for.

Files: `/dev/shm/lazyshard-UID/` (mode 0700; stays, empty), and in it one of some KB for each stream that is waited for.
Who waits holds a shared flock on it; the last one to leave removes it, and who makes one those that nobody holds.
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
from pathlib import Path
from typing import Final

import xxhash

from lazyshard.errors import FormatInvalid
from lazyshard.format.records import Head
from lazyshard.store.durable import lock, open_own
from lazyshard.store.files import OpenFile
from lazyshard.stream.listing import Published, are_whole

# Memory of this node on every Linux; a fixed place, since processes of one job may differ in TMPDIR
MEMORY: Final = "/dev/shm"  # noqa: S108
SLOT_BYTES: Final = 16 << 10  # room for an answer: a head is below 1 KB, unless its note is very long

_HEADER: Final = struct.Struct("<8xdI")  # behind a digest: when the answer came, and how many bytes it has

_NAME: Final = re.compile(r"[0-9a-f]{32}")

# How much later than due a process comes that lives on another's answers, but of a short pause a quarter
LATER_S: Final = 0.02
# How long the answer of another process that is just asking is waited for: that of a busy server takes less
ASKING_S: Final = 2.0
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

    `identify` returns the status of its directory; `clock` gives seconds of CLOCK_MONOTONIC.
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

        `ask` asks the filesystem, and returns the answer for others, if any; `adopt` takes theirs, or returns False.
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
        try:
            if locked:
                known.refused_at = None
            else:
                now = self._clock()
                known.refused_at = now if known.refused_at is None else known.refused_at
                if now < known.refused_at + ASKING_S:
                    known.asking = True
                    return
            # Somebody may have asked since.
            if not (locked and self._take(slot, file, age, adopt)):
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
        if answer is not None and known.at < answer[0] <= now and adopt(answer[1]):
            known.at, known.own, known.refused_at = answer[0], False, None
        return now < known.at + age - _SOON_S

    def _ask(self, slot: int, ask: Callable[[], bytes | None]) -> None:
        data, known = ask(), self._slots[slot]
        known.at, known.own = self._clock(), True
        if self._file is not None and data is not None:
            # Where that fails, each of the others asks.
            with contextlib.suppress(OSError):
                self._file.write(slot, (known.at, data))


def decode_head(data: bytes, samples_per_chunk: int) -> Published | None:
    """Returns what another process has found in `head.json`, None if that cannot be."""
    with contextlib.suppress(FormatInvalid):
        head = Head.decode(data)
        if are_whole(head.chunks, head.samples, head.ended, samples_per_chunk):
            return Published(head.chunks, head.samples, head.ended, head)
    return None


Answer = tuple[float, bytes]  # when it came, by CLOCK_MONOTONIC, one clock for all processes of a node; and what it is


def encode_answer(answer: Answer, name: str) -> bytes:
    """Returns the bytes of a slot in the file of that name."""
    body = _HEADER.pack(answer[0], len(answer[1]))[8:] + answer[1]
    return xxhash.xxh3_64_digest(name.encode() + body) + body


def decode_answer(slot: bytes, name: str) -> Answer | None:
    """Reads a slot, which may hold more behind the answer; None where it holds none that is whole."""
    if len(slot) < _HEADER.size:
        return None
    at, size = _HEADER.unpack_from(slot)
    answer = at, slot[_HEADER.size : _HEADER.size + size]
    return answer if slot.startswith(encode_answer(answer, name)) else None


def file_name(stream_id: str, directory: os.stat_result) -> str:
    """Returns the name of a stream's file; a copy of the stream or another mount of it has another one."""
    # Of other slots than these it would begin with another number.
    return xxhash.xxh3_128_hexdigest(f"1 {stream_id} {directory.st_dev} {directory.st_ino}".encode())


class NodeFile:
    """The file of one stream, open, and made if need be. Raises OSError: it cannot be had, or is not this user's."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = Path(f"{MEMORY}/lazyshard-{os.geteuid()}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        found = folder.lstat()
        # Who cannot write here cannot plant anything in it either.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "is not of the user's own making", str(folder))
        self._file = self._open(folder / name)
        if os.fstat(self._file.fd).st_size == 0:
            for path in folder.iterdir():
                if _NAME.fullmatch(path.name) and path.name != name:
                    with contextlib.suppress(OSError):
                        self._remove(OpenFile(open_own(path, 0), path, 0))

    def read(self, slot: int) -> Answer | None:
        """Returns the answer of a slot, None where there is none. Raises OSError where it cannot be read."""
        return decode_answer(os.pread(self._file.fd, SLOT_BYTES, slot * SLOT_BYTES), self.name)

    def write(self, slot: int, answer: Answer) -> None:
        """Puts an answer into a slot, unless it is too long for one. Raises OSError where there is no room for it."""
        if len(data := encode_answer(answer, self.name)) <= SLOT_BYTES:
            os.pwrite(self._file.fd, data, slot * SLOT_BYTES)

    def lock(self, slot: int) -> bool:
        """Takes the right to ask for the answer of a slot; returns whether it was free."""
        try:
            fcntl.lockf(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot * SLOT_BYTES)
        except OSError:
            return False
        return True

    def unlock(self, slot: int) -> None:
        """Gives that right back."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, slot * SLOT_BYTES)

    def close(self) -> None:
        """Leaves; removes the file if nobody else has it open."""
        with contextlib.suppress(OSError):
            self._remove(self._file)
        del self._file

    def _open(self, path: Path) -> OpenFile:
        for _ in range(3):  # one that is being removed when it is opened is made anew
            file = OpenFile(open_own(path), path, 0)
            # From the lock on nobody removes it; somebody may have done so before.
            if lock(file.fd, shared=True) and os.fstat(file.fd).st_nlink:
                return file
        raise BlockingIOError(errno.EAGAIN, "is being removed again and again", str(path))

    def _remove(self, file: OpenFile) -> None:
        # The name may be that of a newer file.
        if lock(file.fd, shared=False) and os.path.samestat(os.fstat(file.fd), file.path.lstat()):
            file.path.unlink()
