"""What a reader does while a filesystem gives no answer, and while a producer has nothing new for it.

A reader polls, with a back-off; `Waker`, the call from the local filesystem, is a shortcut only: inotify never fires
for another machine's writes. `Watchdog` says what somebody is stuck in; `Parent` is the process that is worked for.

Single-flight polling per node, `NodePoll`: one process asks the filesystem for a stream's news, the others reuse its
answer. Nobody is elected. Each process keeps its own pace, and before it asks it reads what the others were told
(`NodeFile`): an answer no older than its own pause is as good as one of its own. Who lives on another's answers comes a
little later the next time, so the one that asks continues to. Where several would ask at once, a record lock on the
slot decides; one that keeps the lock for long (a filesystem that hangs, a stopped process) is not waited for.

Files: `/dev/shm/lazyshard-UID/` (mode 0700; stays, empty), and in it one of some KB for each stream that is waited for.
Who waits holds a shared flock on it; the last one to leave removes it, and who makes one those that nobody holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import multiprocessing
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import xxhash

from lazyshard.format.records import END, HEAD, SEAL_SUFFIX
from lazyshard.store.durable import lock, open_own
from lazyshard.store.files import OpenFile, UrlPath

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent
    from watchdog.observers.api import BaseObserver

_FOLLOW_S: Final = 2.0  # how often to look whether the process worked for is there
_STUCK_S: Final = 10.0  # how long after its end this one may still be at work
NO_ANSWER_S: Final = 60.0  # far longer than a device, a network or a function takes that works

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

_Clock = Callable[[], float]
_log = logging.getLogger("lazyshard")


@dataclass(slots=True)
class _Asked:
    what: Callable[[], str]
    since: float
    due_s: float
    told: bool = False


class Watchdog:
    """Waits for answers together with those who ask, and says so when one takes too long, from a thread of its own.

    Args:
        tell: is told, from that thread, after `no_answer_s`.
        again: tell again after twice as long, and so on; otherwise once for each question.
        advice: stands behind what is told of one that takes too long.
    """

    def __init__(self, tell: Callable[[str], object] = str, *, again: bool = False, advice: str = "") -> None:
        self.no_answer_s = NO_ANSWER_S
        self._tell, self._again, self._advice = tell, again, advice
        self._clock = time.monotonic
        self.forget()

    def forget(self) -> None:
        """Begins anew, without a thread: in a fork there is none, and nobody waits there."""
        self._asked: dict[int, _Asked] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, what: Callable[[], str]) -> None:
        """Notes that this thread asks for something, one thing at a time; `what` is called from the other thread."""
        self._asked[threading.get_ident()] = _Asked(what, self._clock(), self.no_answer_s)

    def answered(self) -> None:
        """Notes that it has come, or has failed."""
        asked = self._asked.pop(threading.get_ident(), None)
        if asked is not None and asked.told:
            self._tell(f"answered after {self._clock() - asked.since:.0f} s: {asked.what()}")

    def look(self) -> None:
        """Tells of what takes too long."""
        now = self._clock()
        for asked in list(self._asked.values()):
            if now - asked.since >= asked.due_s:
                asked.told = True
                self._tell(f"no answer for {asked.due_s:.0f} s: {asked.what()}{self._advice}")
                asked.due_s = 2 * asked.due_s if self._again else math.inf

    def start(self) -> None:
        """Begins to look now and then, if it does not already."""
        if self._thread is None:
            # A daemon: what it tells of may keep the process from ending, this must not.
            self._thread = threading.Thread(target=self._run, name="lazyshard-watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends that. May be called twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        over = self._over
        while not over.wait(self.no_answer_s / 10):
            self.look()


READERS: Final = Watchdog(_log.warning, again=True, advice="; the filesystem hangs, or its server is away")
"""That of all readers of this process."""

os.register_at_fork(after_in_child=READERS.forget)


# What watchdog reports as an error whenever an observer is stopped: its thread finds itself stopped.
logging.getLogger("watchdog.observers.inotify").addFilter(lambda told: "thread is inactive" not in told.getMessage())


class Waker(contextlib.AbstractContextManager["Waker"]):
    """Wakes a sleeper when the head, the end or a marker of a stream is written. Nobody is woken by an object store.

    Starts watching at the first sleep that finds the directory there; as a context manager it ends the thread.
    """

    _refused: ClassVar[bool] = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._woken = threading.Event()
        self._observer: BaseObserver | None = None
        self._tried = isinstance(directory, UrlPath)

    def sleep(self, seconds: float) -> bool:
        """Sleeps, or until something is written; returns whether to look: at once where it has just begun to watch."""
        if not self._tried and self._start():
            return True
        if woken := self._woken.wait(seconds):
            self._woken.clear()
        return woken

    def dispatch(self, event: FileSystemEvent) -> None:
        """Called by watchdog's thread, whose event handler this is."""
        paths, told = (str(event.src_path), str(event.dest_path)), (f"/{HEAD}", f"/{END}", SEAL_SUFFIX)
        if event.event_type not in ("opened", "closed_no_write") and any(path.endswith(told) for path in paths):
            self._woken.set()

    def _events(self) -> list[type[FileSystemEvent]] | None:
        """Returns which events are asked for; None: all."""
        return None

    def _start(self) -> bool:
        # Where no inotify instance is left, or another platform's observer fails, polling alone will do. It is not
        # tried again, since watchdog up to 6 loses three descriptors each time.
        if Waker._refused or not self._directory.is_dir():
            return False
        self._tried = True
        # Who never waits need not import it.
        from watchdog.observers import Observer

        try:
            self._observer = Observer()
            self._observer.daemon = True
            self._observer.schedule(self, str(self._directory), event_filter=self._events())  # type: ignore[arg-type]
            self._observer.start()
        except (OSError, RuntimeError):
            Waker._refused = True
        return not Waker._refused

    def __exit__(self, *_: object) -> None:
        if self._observer is not None:
            # One that failed to start has to be stopped too: it holds descriptors, and a thread in watchdog 7.
            self._observer.stop()
            if self._observer.is_alive():
                self._observer.join()


class Parent:
    """The process for which this one works. A worker that waits for data may otherwise outlive it by hours.

    `pid` None is for an unknown parent: then make this soon after this process has begun, since of a parent that was
    gone before, `os.getppid` tells nothing. `done`: whether the parent wants nothing more of this process.
    """

    def __init__(self, pid: int | None = None, done: Callable[[], bool] | None = None) -> None:
        self.done = done or (lambda: False)
        self._pid = os.getppid() if pid is None else pid
        started_by = multiprocessing.parent_process()
        # A fork server starts processes for another one, of which only multiprocessing's pipe tells whether it lives.
        # Otherwise the number is surer: the pipe's other end is inherited by whatever is forked later.
        self._served = None if started_by is None or started_by.pid == self._pid else started_by

    def gone(self) -> bool:
        """Returns whether the process has ended."""
        return os.getppid() != self._pid or (self._served is not None and not self._served.is_alive())

    def follow(self) -> None:
        """Has this process end soon after the other one has, wherever it may be stuck then.

        Where one worker was killed with the lock of the queue that all share, the others would wait for it for ever.
        """
        threading.Thread(target=self._follow, name="lazyshard-parent", daemon=True).start()

    def _follow(self) -> None:
        while not self.gone():
            time.sleep(_FOLLOW_S)
        time.sleep(_STUCK_S)
        os._exit(1)

    def leave_if_gone(self) -> bool:
        """Ends this process by SystemExit if the other one has ended, without a word: there is nobody to hear it.

        Returns whether the other one wants nothing more of it.
        """
        if not self.gone():
            return self.done()
        # If that does not end it (raised in a thread, caught, flushing a pipe that nobody reads), a timer does.
        timer = threading.Timer(1.0, os._exit, (1,))
        timer.daemon = True
        timer.start()
        raise SystemExit(1)


@dataclass(slots=True)
class _Slot:
    """What a wait knows of one slot."""

    at: float = -math.inf  # since when
    own: bool = True  # by the filesystem's word, not by that of another process
    asking: bool = False  # whether another process is just asking
    refused_at: float = math.inf  # since when it is


class NodePoll:
    """What one wait shares with those of other processes; nothing without a stream's identity.

    `identify` returns the status of its directory; `clock` gives seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, stream_id: str | None, identify: Callable[[], os.stat_result], clock: _Clock) -> None:
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
            return self._ask(slot, ask)
        if self._take(slot, file, age, adopt):
            return
        if not file.lock(slot):
            known.refused_at = min(self._clock(), known.refused_at)
            known.asking = self._clock() < known.refused_at + ASKING_S
            if not known.asking:
                self._ask(slot, ask)
            return
        known.refused_at = math.inf
        try:
            # Somebody may have asked since.
            if not self._take(slot, file, age, adopt):
                self._ask(slot, ask)
        finally:
            file.unlock(slot)

    def pause(self, slot: int, age: float) -> float:
        """Returns in how many seconds to come again, if what is known may be so many seconds old."""
        known, now, later = self._slots[slot], self._clock(), min(LATER_S, age / 4)
        if known.asking:
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
            known.at, known.own, known.refused_at = answer[0], False, math.inf
        return now < known.at + age - _SOON_S

    def _ask(self, slot: int, ask: Callable[[], bytes | None]) -> None:
        data, known = ask(), self._slots[slot]
        known.at, known.own = self._clock(), True
        if self._file is not None and data is not None:
            # Where that fails, each of the others asks.
            with contextlib.suppress(OSError):
                self._file.write(slot, (known.at, data))


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
