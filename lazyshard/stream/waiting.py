"""Helpers of a waiting reader: it is woken, shares its polls within a node, and reports calls that hang.

The loop is in `lazyshard.stream.reader`, its back-off `next_poll`. `Waker`, a notification from the local filesystem,
is only a shortcut: inotify never reports writes of another machine. `Watchdog` reports calls that hang; `Parent` is the
process that this one works for.

Single-flight polling per node, `NodePoll`: one process polls the filesystem for a stream, the others reuse its answer.
There is no election. Each process keeps its own interval, and before it polls it reads the answers of the others
(`NodeFile`): an answer no older than the interval is as good as its own. A process that reuses an answer polls a little
later the next time, so the one that polls continues to do so. If several would poll at once, a record lock on the slot
decides; if a process keeps the lock for long (a hanging filesystem, a stopped process), the others do not wait for it.

Files: `/dev/shm/lazyshard-UID/` (mode 0700; stays, empty), with one file of some KB per stream that is waited for.
Each waiting process holds a shared flock on the file. The last one to finish removes it, and a process that creates a
file removes those that no process holds.
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

FIRST_POLL_S: Final = 0.005  # the shortest pause between two polls
# The shortest pause if a poll is a request to an object store: requests cost money, and a prefix of a bucket answers
# only some thousands per second, which is what 1,000 nodes send at this pause
FIRST_REQUEST_S: Final = 0.2
_FOLLOW_S: Final = 2.0  # how often to check that the parent exists
_STUCK_S: Final = 10.0  # how long this process may go on working after the parent has ended
NO_ANSWER_S: Final = 60.0  # far longer than a working device, network or function takes

# Node-local memory on every Linux; a fixed place, since processes of one job may differ in TMPDIR
MEMORY: Final = "/dev/shm"  # noqa: S108
SLOT_BYTES: Final = 16 << 10  # room for an answer: a head is below 1 KB, unless its note is very long

_HEADER: Final = struct.Struct("<8xdI")  # after a digest: when the answer came, and its size in bytes
_NAME: Final = re.compile(r"[0-9a-f]{32}")

# How much later than due a process polls that reuses another's answers; for a short pause, a quarter of it
LATER_S: Final = 0.02
# How long to wait for the answer of another process that is polling: a busy server takes less
ASKING_S: Final = 2.0
_SOON_S: Final = 0.001  # the shortest pause; a poll that is due within it is due now
HEAD_SLOT: Final = 0  # the bytes of `head.json`
RETIRED_SLOT: Final = 1  # the number of retired chunks, in decimal digits
_FIRST_WARNER: Final = 2  # plus a process: a slot without an answer, locked by the wait that is warned of

_Clock = Callable[[], float]
_log = logging.getLogger("lazyshard")


def next_poll(waited: float, expected: float | None, least: float = FIRST_POLL_S) -> float:
    """Returns the pause before the next poll; `expected`: the wait by the producer's rate, None if unknown."""
    # A tenth of the time that has passed or is expected to pass, so polling adds at most that share. At most 5 s, which
    # bounds how long a chunk stays unseen and keeps thousands of waiting processes from overloading a metadata server
    # (4,000 processes on as many nodes: 800 opens per second).
    return min(5.0, max(least, (waited if expected is None else max(expected, waited / 10)) / 10))


def first_poll(directory: Path) -> float:
    """Returns the shortest pause between two polls of a stream."""
    return FIRST_REQUEST_S if isinstance(directory, UrlPath) else FIRST_POLL_S


@dataclass(slots=True)
class _Asked:
    what: Callable[[], str]
    since: float
    due_s: float
    told: bool = False


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Reports calls that take too long, from its own thread.

    Args:
        tell: called from that thread with the report, after `no_answer_s`.
        again: report again after twice as long, and so on; otherwise once per call.
        advice: appended to each report of a call that takes too long.
    """

    def __init__(self, tell: Callable[[str], object] = str, *, again: bool = False, advice: str = "") -> None:
        self.no_answer_s = NO_ANSWER_S
        self._tell, self._again, self._advice = tell, again, advice
        self._clock = time.monotonic
        self.forget()

    def forget(self) -> None:
        """Resets to the state without a thread: a fork has none, and nothing waits there."""
        self._asked: dict[int, _Asked] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, what: Callable[[], str]) -> Watchdog:
        """Records that this thread starts a call, one at a time; `what` describes it and runs in the other thread.

        Returns the watchdog, a context manager for the call.
        """
        self._asked[threading.get_ident()] = _Asked(what, self._clock(), self.no_answer_s)
        return self

    def answered(self, *_: object) -> None:
        """Records that the call has returned or failed."""
        asked = self._asked.pop(threading.get_ident(), None)
        if asked is not None and asked.told:
            self._tell(f"answered after {self._clock() - asked.since:.0f} s: {asked.what()}")

    __exit__ = answered

    def look(self) -> None:
        """Reports calls that take too long."""
        now = self._clock()
        for asked in list(self._asked.values()):
            if now - asked.since >= asked.due_s:
                asked.told = True
                self._tell(f"no answer for {asked.due_s:.0f} s: {asked.what()}{self._advice}")
                asked.due_s = 2 * asked.due_s if self._again else math.inf

    def start(self) -> None:
        """Starts the thread that checks from time to time, unless it runs already."""
        if self._thread is None:
            # A daemon: a hanging call may keep the process from exiting, this thread must not.
            self._thread = threading.Thread(target=self._run, name="lazyshard-watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stops the thread. May be called twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        over = self._over
        while not over.wait(self.no_answer_s / 10):
            self.look()


READERS: Final = Watchdog(_log.warning, again=True, advice="; the filesystem hangs, or its server does not respond")
"""The watchdog of all readers of this process."""

os.register_at_fork(after_in_child=READERS.forget)


# watchdog reports this error whenever an observer is stopped, because its thread finds itself stopped.
logging.getLogger("watchdog.observers.inotify").addFilter(lambda told: "thread is inactive" not in told.getMessage())


class Waker(contextlib.AbstractContextManager["Waker"]):
    """Wakes a sleeper when the head, the end or a marker of a stream is written. Never wakes for an object store.

    Starts watching at the first sleep after the directory exists; as a context manager it stops the thread.
    """

    _refused: ClassVar[bool] = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._woken = threading.Event()
        self._observer: BaseObserver | None = None
        self._tried = isinstance(directory, UrlPath)

    def sleep(self, seconds: float) -> bool:
        """Sleeps until something is written or time is up; returns whether to poll: at once if watching just began."""
        if not self._tried and self._start():
            return True
        if woken := self._woken.wait(seconds):
            self._woken.clear()
        return woken

    def dispatch(self, event: FileSystemEvent) -> None:
        """Called by watchdog's thread: this object is the event handler."""
        paths, told = (str(event.src_path), str(event.dest_path)), (f"/{HEAD}", f"/{END}", SEAL_SUFFIX)
        if event.event_type not in ("opened", "closed_no_write") and any(path.endswith(told) for path in paths):
            self._woken.set()

    def _events(self) -> list[type[FileSystemEvent]] | None:
        """Returns the events to watch for; None: all."""
        return None

    def _start(self) -> bool:
        # If no inotify instance is left, or another platform's observer fails, polling alone is enough. It is not tried
        # again, since watchdog up to version 6 leaks three descriptors each time.
        if Waker._refused or not self._directory.is_dir():
            return False
        self._tried = True
        # Processes that never wait need not import it.
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
            # An observer that failed to start must be stopped too: it holds descriptors, and in watchdog 7 a thread.
            self._observer.stop()
            if self._observer.is_alive():
                self._observer.join()


class Parent:
    """The process for which this one works. A worker that waits for data may otherwise outlive it by hours.

    `pid` None: the parent is unknown. Then create this object soon after this process has started, since `os.getppid`
    cannot detect a parent that was gone before. `done`: whether the parent needs nothing more from this process.
    """

    def __init__(self, pid: int | None = None, done: Callable[[], bool] | None = None) -> None:
        self.done = done or (lambda: False)
        self._pid = os.getppid() if pid is None else pid
        started_by = multiprocessing.parent_process()
        # A fork server starts processes for another one; only multiprocessing's pipe shows whether that one is alive.
        # Otherwise the process id is more reliable: processes forked later inherit the pipe's other end.
        self._served = None if started_by is None or started_by.pid == self._pid else started_by

    def gone(self) -> bool:
        """Returns whether the process has ended."""
        return os.getppid() != self._pid or (self._served is not None and not self._served.is_alive())

    def follow(self) -> None:
        """Ends this process soon after the parent has ended, even if it is stuck.

        If a worker was killed while it held the lock of a shared queue, the others would wait for the lock forever.
        """
        threading.Thread(target=self._follow, name="lazyshard-parent", daemon=True).start()

    def _follow(self) -> None:
        while not self.gone():
            time.sleep(_FOLLOW_S)
        time.sleep(_STUCK_S)
        os._exit(1)

    def leave_if_gone(self) -> bool:
        """Ends this process with SystemExit if the parent has ended, without logging: no process would read it.

        Returns whether the parent needs nothing more from this process.
        """
        if not self.gone():
            return self.done()
        # If that does not end it (raised in a thread, caught, flushing a pipe that is not read), a timer does.
        timer = threading.Timer(1.0, os._exit, (1,))
        timer.daemon = True
        timer.start()
        raise SystemExit(1)


@dataclass(slots=True)
class _Slot:
    """The state of one slot in one wait."""

    at: float = -math.inf  # when the answer came
    own: bool = True  # whether this process polled, not another one
    asking: bool = False  # whether another process is polling
    refused_at: float = math.inf  # since when it has been polling


class NodePoll:
    """The state that one wait shares with waits of other processes; shares nothing without a stream's identity.

    `identify` returns the status of the stream's directory; `clock` returns seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, stream_id: str | None, identify: Callable[[], os.stat_result], clock: _Clock) -> None:
        self._stream_id, self._identify, self._clock = stream_id, identify, clock
        self._tries = 0 if stream_id is None else 3  # remaining attempts to open the file
        self._file: NodeFile | None = None
        self._slots = (_Slot(), _Slot())

    def close(self) -> None:
        """Closes the file permanently."""
        self._tries = 0
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def warns_for(self, process: int) -> bool:
        """Returns whether this wait is the one to warn of, among those of a process and its children.

        It then is until it ends, or its process does. Without a file each wait is.
        """
        return self._file is None or self._file.lock(_FIRST_WARNER + process)

    def renew(self, slot: int, age: float, ask: Callable[[], bytes | None], adopt: Callable[[bytes], bool]) -> None:
        """Ensures that the answer is at most `age` seconds old, unless another process is polling for it now.

        `ask` polls the filesystem and returns the answer for others, if any; `adopt` uses theirs, or returns False.
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
            # Another process may have polled since.
            if not self._take(slot, file, age, adopt):
                self._ask(slot, ask)
        finally:
            file.unlock(slot)

    def pause(self, slot: int, age: float) -> float:
        """Returns in how many seconds to call `renew` again, if the answer may be `age` seconds old."""
        known, now, later = self._slots[slot], self._clock(), min(LATER_S, age / 4)
        if known.asking:
            return max(_SOON_S, later, (now - known.refused_at) / 10)
        return max(_SOON_S, known.at - now + age + (0.0 if known.own else later))

    def _take(self, slot: int, file: NodeFile, age: float, adopt: Callable[[bytes], bool]) -> bool:
        """Uses a newer answer of another process if there is one; returns whether the answer is recent enough."""
        known, answer = self._slots[slot], None
        with contextlib.suppress(OSError):
            answer = file.read(slot)
        now = self._clock()
        # An answer from the future was written under another clock.
        if answer is not None and known.at < answer[0] <= now and adopt(answer[1]):
            known.at, known.own, known.refused_at = answer[0], False, math.inf
        return now < known.at + age - _SOON_S

    def _ask(self, slot: int, ask: Callable[[], bytes | None]) -> None:
        data, known = ask(), self._slots[slot]
        known.at, known.own = self._clock(), True
        if self._file is not None and data is not None:
            # If this fails, each of the others polls.
            with contextlib.suppress(OSError):
                self._file.write(slot, (known.at, data))


Answer = tuple[float, bytes]  # when it came, by CLOCK_MONOTONIC (one clock for all processes of a node); and the data


def encode_answer(answer: Answer, name: str) -> bytes:
    """Returns the bytes of a slot in the file of that name."""
    body = _HEADER.pack(answer[0], len(answer[1]))[8:] + answer[1]
    return xxhash.xxh3_64_digest(name.encode() + body) + body


def decode_answer(slot: bytes, name: str) -> Answer | None:
    """Decodes a slot, which may hold more bytes after the answer; None if it holds no complete answer."""
    if len(slot) < _HEADER.size:
        return None
    at, size = _HEADER.unpack_from(slot)
    answer = at, slot[_HEADER.size : _HEADER.size + size]
    return answer if slot.startswith(encode_answer(answer, name)) else None


def file_name(stream_id: str, directory: os.stat_result) -> str:
    """Returns the name of a stream's file; a copy of the stream, or another mount of it, has another name."""
    # The number is the version: a file with other slots would start with another one.
    return xxhash.xxh3_128_hexdigest(f"1 {stream_id} {directory.st_dev} {directory.st_ino}".encode())


class NodeFile:
    """The file of one stream, created if needed. Raises OSError: it cannot be opened, or belongs to another user."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = Path(f"{MEMORY}/lazyshard-{os.geteuid()}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        found = folder.lstat()
        # Other users cannot write here, so they cannot plant anything.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "was not created by this user, or others may write to it", str(folder))
        self._file = self._open(folder / name)
        if os.fstat(self._file.fd).st_size == 0:
            for path in folder.iterdir():
                if _NAME.fullmatch(path.name) and path.name != name:
                    with contextlib.suppress(OSError):
                        self._remove(OpenFile(open_own(path, 0), path, 0))

    def read(self, slot: int) -> Answer | None:
        """Returns the answer of a slot, None if there is none. Raises OSError if it cannot be read."""
        return decode_answer(os.pread(self._file.fd, SLOT_BYTES, slot * SLOT_BYTES), self.name)

    def write(self, slot: int, answer: Answer) -> None:
        """Writes an answer into a slot, unless it is too long. Raises OSError if there is no room for it."""
        if len(data := encode_answer(answer, self.name)) <= SLOT_BYTES:
            os.pwrite(self._file.fd, data, slot * SLOT_BYTES)

    def lock(self, slot: int) -> bool:
        """Locks a slot, which is the right to poll for its answer; returns whether it was free."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot * SLOT_BYTES)
            return True
        return False

    def unlock(self, slot: int) -> None:
        """Unlocks a slot."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, slot * SLOT_BYTES)

    def close(self) -> None:
        """Closes the file, and removes it if no other process has it open."""
        with contextlib.suppress(OSError):
            self._remove(self._file)
        del self._file

    def _open(self, path: Path) -> OpenFile:
        for _ in range(3):  # a file that is being removed when it is opened is created again
            file = OpenFile(open_own(path), path, 0)
            # Once it is locked no process removes it, but one may have done so before.
            if lock(file.fd, shared=True) and os.fstat(file.fd).st_nlink:
                return file
        raise BlockingIOError(errno.EAGAIN, "is removed each time it is opened", str(path))

    def _remove(self, file: OpenFile) -> None:
        # The name may already belong to a newer file.
        if lock(file.fd, shared=False) and os.path.samestat(os.fstat(file.fd), file.path.lstat()):
            file.path.unlink()
