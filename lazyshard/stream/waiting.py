"""`Waiting`: what a reader does while a filesystem gives no answer, and while a producer has nothing new for it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from lazyshard.errors import WaitTimeout
from lazyshard.store.urls import UrlPath
from lazyshard.stream.node_poll import NodePoll
from lazyshard.stream.pacing import FIRST_POLL_S, FIRST_REQUEST_S, expected_wait, next_poll, next_report
from lazyshard.stream.patience import READERS
from lazyshard.stream.reader_words import ReaderWait
from lazyshard.stream.watch import Parent, Waker

_ASIDE_S: Final = 0.5
"""How often a waiting reader does what it does besides, such as a look whether its parent is still there; a look at the
stream costs more and comes less often."""

_QUIET_S: Final = 0.02
"""Waits shorter than this are slept through; for longer ones it is worth to start watching the directory."""

_ANSWER_S: Final = 5.0
"""What a look at the filesystem takes beyond this is no time in which a producer could have been waited for."""

_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")


class Waiting:
    """Asks a filesystem, which may hang, and waits for what somebody has still to publish there.

    Args:
        directory: what is asked and watched.
        max_wait: see the attribute.

    Attributes:
        directory: the stream's directory, or its URL.
        max_wait: how many seconds to wait at the most for anything that a producer has still to publish.
        label: how to call this reader in log lines; empty by default.
        quiet: whether it waits without a word, because somebody else waits for the same and tells.
        parent: the process for which this one reads; once it has gone, a wait leaves this process too, and once it
            wants nothing more, the wait ends.
        on_wait: is called while this reader waits, at least about once a second.
        waited_s: seconds spent waiting for the producer.
    """

    def __init__(self, directory: Path, max_wait: float) -> None:
        self.directory = directory
        self.max_wait = max_wait
        self.label = ""
        self.quiet = False
        self.parent: Parent | None = None
        self.on_wait: Callable[[], None] | None = None
        self.waited_s = 0.0
        self._least_poll = FIRST_REQUEST_S if isinstance(directory, UrlPath) else FIRST_POLL_S
        self._hung_s = 0.0

    def _wait(
        self,
        look: Callable[[float], _T | None],
        told: Callable[[float], ReaderWait],
        poll: NodePoll | None = None,
    ) -> _T:
        """Waits until there is what is wanted.

        Args:
            look: looks for it; what it returns may rest on what was seen so many seconds before.
            told: says what is waited for, after so many seconds.
            poll: shares what is seen with the other processes of this node.

        Raises:
            WaitTimeout: it has not come within `max_wait`, or nobody wants it any more.
        """
        started = self._clock()
        reported = 0.0
        age = 0.0
        with Waker(self.directory) as waker, poll or contextlib.nullcontext():
            while True:
                found = look(age)
                waited = self._clock() - started
                if found is not None:
                    self.waited_s += waited
                    return found
                wait = told(waited)
                if waited >= self.max_wait:
                    if poll is not None and age > 0:
                        # Nobody gives up by what was seen before.
                        age = 0.0
                        continue
                    self.waited_s += waited
                    raise wait.timeout(time.time())
                if waited >= next_report(reported):
                    reported = next_report(reported)
                    if not self.quiet:
                        _log.warning("%s", wait.describe(time.time()))
                age = next_poll(waited, expected_wait(wait.samples, wait.seen), self._least_poll)
                due = age if poll is None else poll.head.pause(age)
                pause = min(due, self.max_wait - waited, next_report(reported) - waited)
                if self._pause(pause, time.sleep if max(waited, pause) < _QUIET_S else waker.sleep):
                    age = 0.0

    def _pause(self, seconds: float, sleep: Callable[[float], bool | None]) -> bool:
        """Sleeps until the next look is due, with an eye on the parent if there is one.

        Returns:
            Whether something that matters has come before.

        Raises:
            WaitTimeout: the parent wants nothing more. Nobody gets to hear it.
        """
        if self.parent is None and self.on_wait is None:
            return bool(sleep(seconds))
        due = time.monotonic() + seconds
        while seconds > 0:
            if self.parent is not None:
                self.parent.leave_if_gone()
                if self.parent.done():
                    raise WaitTimeout(
                        f"{self.directory}: nobody waits for this any more", directory=str(self.directory)
                    )
            if self.on_wait is not None:
                self.on_wait()
            if sleep(min(seconds, _ASIDE_S)):
                return True
            seconds = due - time.monotonic()
        return False

    def _ask(self, call: Callable[[], _T], what: str, *of: object) -> _T:
        """Calls the filesystem; where no answer comes, says what was asked for, `what % of`."""
        asked = time.monotonic()
        quiet = self.quiet
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
