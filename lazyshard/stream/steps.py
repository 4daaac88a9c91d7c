"""In which thread a writer's file steps are done: in the caller's, or one after another in a thread of their own.

Python's lock is let go while the system works, so a thread can write and sync one chunk while the caller parses the
rows of the next. The order of the steps is that of the calls either way, and after one that failed no other is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

_BACKLOG_BYTES: Final = 8 << 20
"""Rows that may wait for the thread: what the caller makes while a chunk is synced, little beside other memory."""


class Steps(Protocol):
    """Does steps in order."""

    def do(self, step: Callable[[], object], size: int = 0) -> int:
        """Does a step, or sees to it that it will be done. Returns its number.

        Args:
            step: what to do.
            size: bytes that it holds on to until it is done.

        Raises:
            BaseException: what this step raised, or an earlier one; no other will be done.
        """

    def wait(self, number: int | None = None) -> None:
        """Returns when the step of that number and those before it are done, all of them if it is None.

        Raises:
            BaseException: as `do`.
        """

    def stop(self) -> bool:
        """Waits until no step is left, does none from then on, and raises nothing that a step raised.

        Returns:
            Whether that is so: False where an interrupt has ended the wait.
        """


class StepsAtOnce:
    """Each step is done when `do` returns."""

    def do(self, step: Callable[[], object], size: int = 0) -> int:
        """See `Steps`."""
        step()
        return 0

    def wait(self, number: int | None = None) -> None:
        """See `Steps`."""

    def stop(self) -> bool:
        """See `Steps`."""
        return True


class StepsInThread:
    """Steps are done in a thread that lives until `stop`, at the latest until the interpreter ends."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lazyshard-writer")
        self._pending: deque[tuple[int, int, Future[None]]] = deque()
        self._bytes = 0
        self._number = 0
        self._failed = False
        self._stopping = False
        self._stopped = False

    def do(self, step: Callable[[], object], size: int = 0) -> int:
        """See `Steps`."""
        while self._pending and (self._pending[0][2].done() or self._bytes + size > _BACKLOG_BYTES):
            self._take()
        self._number += 1
        try:
            self._pending.append((self._number, size, self._executor.submit(self._run, step)))
            self._bytes += size
        except RuntimeError as cause:
            if "shutdown" not in str(cause):  # no thread can be started
                raise
            # The interpreter is ending, in an `atexit` function for instance: its threads are gone, their work is done.
            self.wait()
            self._run(step)
        return self._number

    def wait(self, number: int | None = None) -> None:
        """See `Steps`."""
        while self._pending and (number is None or self._pending[0][0] <= number):
            self._take()

    def stop(self) -> bool:
        """See `Steps`."""
        if not self._stopping:
            self._stopping = True
            self._executor.shutdown(wait=True)
            self._stopped = True
        return self._stopped

    def _take(self) -> None:
        _, size, done = self._pending[0]
        try:
            done.result()
        finally:
            if done.done():
                self._pending.popleft()
                self._bytes -= size

    def _run(self, step: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            step()
        except BaseException:
            self._failed = True
            raise
