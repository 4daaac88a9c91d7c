"""Rows made by worker processes, given back in the order in which they went in.

How many rows travel at a time follows from how long they take: about `TARGET_S` of work, so that neither slow
transforms wait behind each other nor fast ones spend their time on the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Final, TypeAlias

from lazyshard.errors import RowInvalid
from lazyshard.format import EncodedRow
from lazyshard_producer.errors import WorkerFailed
from lazyshard_producer.rows.recipe import Made, Maker, Recipe

TARGET_S: Final = 0.05
"""Work that travels at a time: far more than the way takes, far less than anybody waits for."""

MAX_ROWS: Final = 256
"""Rows that travel at a time at the most: they bound the memory."""

_PER_WORKER: Final = 2
"""Pieces of work under way for each worker: one in hand, one at the door."""

_PR_SET_PDEATHSIG: Final = 1

Work: TypeAlias = "Future[tuple[list[Made], float]]"
"""Rows that were sent off."""

_maker: Maker | None = None
"""Of a worker process."""


class Workers:
    """A pool of processes.

    Args:
        recipe: what they do.
        count: how many.
    """

    def __init__(self, recipe: Recipe, count: int) -> None:
        _start_tracker()
        self._pool = ProcessPoolExecutor(
            count,
            # Not fork: this process may have threads.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(recipe, os.getpid()),
        )
        self.most: Final = count * _PER_WORKER
        self.rows = 1

    def submit(self, lines: Sequence[bytes | EncodedRow | RowInvalid], index: int) -> Work:
        """Sends rows off; the first has this index."""
        try:
            return self._pool.submit(_make, list(lines), index)
        except BrokenProcessPool as cause:
            raise _died() from cause

    def result(self, work: Work, timeout: float) -> list[Made] | None:
        """Returns what was made of rows that were sent off, None if that is not ready within so many seconds.

        Raises:
            WorkerFailed: a worker has died.
        """
        try:
            made, seconds = work.result(timeout)
        except NotReady:
            return None
        except BrokenProcessPool as cause:
            raise _died() from cause
        each = seconds / max(1, len(made))
        self.rows = max(1, min(MAX_ROWS, int(TARGET_S / each) if each > 0 else MAX_ROWS, 2 * self.rows))
        return made

    def close(self) -> None:
        """Ends the processes, those that are at work too, and returns when nothing of the pool is left.

        Its thread must not be left to the end of the interpreter: in Python 3.11 that wakes it up without its lock,
        in the middle of its own closing.
        """
        for process in list((self._pool._processes or {}).values()):
            with contextlib.suppress(OSError, ValueError):
                process.kill()
        # This end of the workers' pipe would keep the thread waiting for the rest of what one was sending.
        writer = getattr(self._pool._result_queue, "_writer", None)
        if writer is not None:
            writer.close()
        self._pool.shutdown(wait=True)


def _start_tracker() -> None:
    """Starts the process that removes the pool's semaphores where this one is killed, and has it do so silently.

    It would warn of each, in the middle of what the next run has to say. What it prints follows its environment.
    """
    name, before = "PYTHONWARNINGS", os.environ.get("PYTHONWARNINGS")
    os.environ[name] = ",".join(filter(None, (before, "ignore:resource_tracker")))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _begin(recipe: Recipe, parent: int) -> None:
    global _maker
    # The signals of a terminal and of service managers go to all processes of a group; the parent deals with them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        # Linux: nobody is left behind when the parent is killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It was killed before that was said.
        os._exit(1)
    _maker = Maker(recipe)


def _make(lines: list[bytes | EncodedRow | RowInvalid], index: int) -> tuple[list[Made], float]:
    assert _maker is not None
    started = time.perf_counter()
    made = [_maker.make(line, index + number) for number, line in enumerate(lines)]
    # What a function has printed must not be lost where this process is killed with its parent.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    return made, time.perf_counter() - started


def _died() -> WorkerFailed:
    return WorkerFailed(
        "a worker process has ended in the middle of its work: killed (out of memory?), or its modules cannot be "
        "imported there. What is published is safe; run the same command again, with fewer --workers or --workers 0"
    )
