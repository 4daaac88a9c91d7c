"""Looks at chunks in several processes, and gives what they find in the order of the chunks.

Processes and not threads, since parsing holds the interpreter's lock. They come to an end with this one, however it
ends: each waits for work on a pipe that nobody else holds. They have a session of their own, so that a Ctrl-C on the
terminal is answered by this process alone.

Memory: a few batches a process.
"""

from __future__ import annotations

import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from lazyshard.inspection.verification_chunks import ChunkBatch, ChunkVerdict, check_batch

_ALONE_S: Final = 0.5
"""So long this process works alone: to start another one takes about as long."""

_AHEAD: Final = 4
"""Batches a process that may be done before their turn."""

_PROGRAM: Final = """
import sys
sys.path[:] = {path!r}
from lazyshard.inspection.verification_processes import serve
serve()
"""


def check_in_order(batches: Sequence[ChunkBatch], jobs: int, alone_s: float = _ALONE_S) -> Iterator[list[ChunkVerdict]]:
    """Yields what is found in each batch, in their order.

    Args:
        batches: the batches.
        jobs: how many processes may work at a time.
        alone_s: how many seconds this process may take before it starts others.

    Raises:
        ChildProcessError: a process has ended before its work was done.
        MemoryError: there is not enough memory for a row.
    """
    started = time.monotonic()
    done = 0
    while done < len(batches) and (jobs == 1 or time.monotonic() - started < alone_s):
        yield check_batch(batches[done])
        done += 1
    if done < len(batches):
        yield from _check_by_others(batches, done, min(jobs, len(batches) - done))


def serve() -> None:
    """What another process does: looks at the batches that come on its stdin until there are no more."""
    while True:
        try:
            batch = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
        except EOFError:
            return
        found: list[ChunkVerdict] | MemoryError
        try:
            found = check_batch(batch)
        except MemoryError as error:
            found = MemoryError(*error.args)
        try:
            pickle.dump(found, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # Nobody waits for it any more; what is left in the buffer must not fail once more at the end.
            sys.stdout = None
            return


class _Process:
    """Another process, which has one batch at a time."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(  # noqa: S603 - this Python, and a program that is a constant
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.index = 0

    def fileno(self) -> int:
        assert self.popen.stdout is not None
        return self.popen.stdout.fileno()

    def give(self, index: int, batch: ChunkBatch) -> None:
        self.index = index
        assert self.popen.stdin is not None
        try:
            pickle.dump(batch, self.popen.stdin)
            self.popen.stdin.flush()
        except BrokenPipeError as cause:
            raise self._ended() from cause

    def take(self) -> list[ChunkVerdict]:
        assert self.popen.stdout is not None
        try:
            found: list[ChunkVerdict] | MemoryError = pickle.load(self.popen.stdout)  # noqa: S301 - of our own child
        except (EOFError, pickle.UnpicklingError) as cause:
            raise self._ended() from cause
        if isinstance(found, MemoryError):
            raise found
        return found

    def end(self) -> None:
        self.popen.kill()
        # Unlike wait, it closes the pipes as well.
        self.popen.communicate()

    def _ended(self) -> ChildProcessError:
        code = self.popen.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return ChildProcessError(f"a process that looked at chunks {how}; if memory was short, use fewer --jobs")


def _check_by_others(batches: Sequence[ChunkBatch], first: int, jobs: int) -> Iterator[list[ChunkVerdict]]:
    given = due = first
    found: dict[int, list[ChunkVerdict]] = {}
    processes: list[_Process] = []
    idle: list[_Process] = []
    selector = selectors.DefaultSelector()
    try:
        for _ in range(jobs):
            process = _Process()
            processes.append(process)
            idle.append(process)
            selector.register(process, selectors.EVENT_READ, process)
        while due < len(batches):
            while idle and given < min(len(batches), due + _AHEAD * jobs):
                idle.pop().give(given, batches[given])
                given += 1
            for key, _ in selector.select():
                process = key.data
                found[process.index] = process.take()
                idle.append(process)
            while due in found:
                yield found.pop(due)
                due += 1
    finally:
        selector.close()
        for process in processes:
            process.end()
