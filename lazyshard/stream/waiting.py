"""What a reader does while a filesystem gives no answer, and while a producer has nothing new for it.

`Waiting` polls, with a back-off; `Waker`, the call from the local filesystem, is a shortcut only: inotify never fires
for another machine's writes. `Watchdog` says what somebody is stuck in; `Parent` is the process that is worked for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

from lazyshard.errors import WaitTimeout
from lazyshard.format.names import END, HEAD, SEAL_SUFFIX
from lazyshard.store.files import list_names
from lazyshard.store.urls import UrlPath
from lazyshard.stream import head as heads
from lazyshard.stream.head import expected_wait, format_seconds, next_poll, next_report, process_ended, process_gone
from lazyshard.stream.listing import Published, has_unpublished_rows, other_files
from lazyshard.stream.node_poll import HEAD_SLOT, NodePoll

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent
    from watchdog.observers.api import BaseObserver

_FOLLOW_S: Final = 2.0  # how often to look whether the process worked for is there
_STUCK_S: Final = 10.0  # how long after its end this one may still be at work
# What a look at the filesystem takes beyond this is no time in which a producer could have been waited for
_ANSWER_S: Final = 5.0
NO_ANSWER_S: Final = 60.0  # far longer than a device, a network or a function takes that works

_T = TypeVar("_T")
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


class Waiting:
    """Asks a filesystem, which may hang, and waits for what somebody has still to publish there.

    Attributes:
        label: how to call this reader in log lines; empty by default.
        quiet: whether it waits without a word, because somebody else waits for the same and tells.
        parent: the process for which this one reads; once it has gone, a wait leaves this process too, and once it
            wants nothing more, the wait ends.
        on_wait: is called while this reader waits, at least about once a second.
        seen: what was published at the last look.
        waited_s: seconds spent waiting for the producer.
    """

    stream_id: str | None = None

    def __init__(self, directory: Path, max_wait: float) -> None:
        self.directory, self.max_wait = directory, max_wait
        self.label, self.quiet = "", False
        self.parent: Parent | None = None
        self.on_wait: Callable[[], None] | None = None
        self.waited_s = self._hung_s = 0.0
        self.seen = Published(0, 0, False)
        self._least_poll = heads.FIRST_REQUEST_S if isinstance(directory, UrlPath) else heads.FIRST_POLL_S

    def _wait(self, look: Callable[[float], _T | None], samples: int, chunk: int | None, poll: NodePoll | None) -> _T:
        """Waits until there is what is wanted. Raises WaitTimeout: not within `max_wait`, or nobody wants it any more.

        `look` may rest on what was seen so many seconds before; `chunk` has the last of the samples, None for a stream.
        """
        started = self._clock()
        reported = age = 0.0
        with Waker(self.directory) as waker, contextlib.closing(poll) if poll else contextlib.nullcontext():
            while True:
                found = look(age)
                waited = self._clock() - started
                if found is not None:
                    self.waited_s += waited
                    return found
                if waited >= self.max_wait:
                    if poll is not None and age > 0:
                        # Nobody gives up by what was seen before.
                        age = 0.0
                        continue
                    self.waited_s += waited
                    raise self._timeout(samples, chunk, waited)
                if waited >= next_report(reported):
                    reported = next_report(reported)
                    if not self.quiet:
                        _log.warning("%s", self._describe(samples, chunk, waited))
                age = next_poll(waited, expected_wait(samples, self.seen), self._least_poll)
                due = age if poll is None else poll.pause(HEAD_SLOT, age)
                pause = min(due, self.max_wait - waited, next_report(reported) - waited)
                # For longer waits than this it is worth to start watching the directory.
                if self._pause(pause, time.sleep if max(waited, pause) < 0.02 else waker.sleep):
                    age = 0.0

    def _describe(self, samples: int, chunk: int | None, waited: float) -> str:
        """Says what is waited for, and what the producer is doing."""
        who = f"{self.label}: " if self.label else ""
        so_far = f"({format_seconds(waited)} of at most {format_seconds(self.max_wait)})"
        if chunk is None:
            hint = _path_hint(self.directory)
            return f"{who}{self.directory}: no stream there yet, waiting for a producer to create it {so_far}{hint}"
        seen, head, now = self.seen, self.seen.head, time.time()
        gone, open_rows, end = False, None, ""
        if head is not None and head.state in ("running", "waiting"):
            # A producer of this machine has ended, or is silent and has no process.
            silent = now - head.updated_at >= heads.STALE_HEARTBEAT_S
            gone = process_ended(head) or (silent and process_gone(head) is True)
            if head.state == "running" and not head.open:
                look = partial(has_unpublished_rows, self.directory, seen.chunks)
                open_rows = self._ask(look, "looking for rows that are not published yet in %s", self.directory)
        elif head is None and self.stream_id is None and seen.gap is None and seen.short is None:
            end = f"; if no more are to come, an empty file {self.directory / END} says so"
        producer = heads.describe_producer(seen, samples, now, gone, open_rows)
        return f"{who}waiting for chunk {chunk} of {self.directory} {so_far}: {producer}{end}"

    def _timeout(self, samples: int, chunk: int | None, waited: float) -> WaitTimeout:
        head = self.seen.head
        hint = "start its producer" if head is None else "see to its producer"
        what = f"{self._describe(samples, chunk, waited)}. Gave up: {hint}, or wait longer with max_wait"
        fields = {"state": head and head.state, "heartbeat_age": heads.heartbeat_age(self.seen, time.time())}
        return WaitTimeout(what, directory=str(self.directory), chunk=chunk, waited=waited, **fields)

    def _pause(self, seconds: float, sleep: Callable[[float], bool | None]) -> bool:
        """Sleeps, with an eye on the parent; returns whether something has come. WaitTimeout: nobody wants more."""
        if self.parent is None and self.on_wait is None:
            return bool(sleep(seconds))
        due = time.monotonic() + seconds
        while seconds > 0:
            if self.parent is not None:
                self.parent.leave_if_gone()
                if self.parent.done():
                    where = str(self.directory)
                    raise WaitTimeout(f"{where}: nobody waits for this any more", directory=where)
            if self.on_wait is not None:
                self.on_wait()
            if sleep(min(seconds, 0.5)):
                return True
            seconds = due - time.monotonic()
        return False

    def _ask(self, call: Callable[[], _T], what: str, *of: object) -> _T:
        """Calls the filesystem; where no answer comes, says what was asked for, `what % of`."""
        asked, quiet = time.monotonic(), self.quiet
        if not quiet:
            READERS.start()
            READERS.ask(lambda: f"{self.label}: {what % of}" if self.label else what % of)
        try:
            return call()
        finally:
            if not quiet:
                READERS.answered()
            self._hung_s += max(0.0, time.monotonic() - asked - _ANSWER_S)

    def _clock(self) -> float:
        """Returns seconds for measuring waits: while the filesystem gives no answer, this clock stands still."""
        return time.monotonic() - self._hung_s


# What watchdog reports as an error whenever an observer is stopped: its thread finds itself stopped.
logging.getLogger("watchdog.observers.inotify").addFilter(lambda told: "thread is inactive" not in told.getMessage())


class Waker:
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
        names = {str(path).rpartition("/")[2] for path in (event.src_path, event.dest_path)}
        if event.event_type not in ("opened", "closed_no_write") and any(
            name in (HEAD, END) or name.endswith(SEAL_SUFFIX) for name in names
        ):
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

    def __enter__(self) -> Waker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._observer is not None:
            # One that failed to start has to be stopped too: it holds descriptors, and a thread in watchdog 7.
            self._observer.stop()
            if self._observer.is_alive():
                self._observer.join()


def _path_hint(directory: Path) -> str:
    """Returns a hint where not even the directory is there, which a producer makes, or it holds something else."""
    try:
        found = "" if isinstance(directory, UrlPath) else other_files(list_names(directory))
    except FileNotFoundError:
        return "; there is no such directory yet, so see whether the path is right"
    except OSError:
        found = ""
    return f"; the directory holds other files ({found}), so see whether the path is right" if found else ""


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

    def leave_if_gone(self) -> None:
        """Ends this process by SystemExit if the other one has ended, without a word: there is nobody to hear it."""
        if not self.gone():
            return
        # If that does not end it (raised in a thread, caught, flushing a pipe that nobody reads), a timer does.
        timer = threading.Timer(1.0, os._exit, (1,))
        timer.daemon = True
        timer.start()
        raise SystemExit(1)
