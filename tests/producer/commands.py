"""A run of the command in a fork, which costs milliseconds: what tests ask of a process, and the memory it takes."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.nursery import has_ended, kill, leave
from tests.stream.damage import checkpoint

Fails = Callable[..., str]  # Of the fixture `fails`


class Running:
    """A run that was started; it is killed at the end of a block if it is still there."""

    def __init__(self, nursery: Commands, *arguments: object, **options: Any) -> None:
        self._nursery = nursery
        self._ended: tuple[int, str] | None = None
        self.pid = nursery.start(*arguments, **options)

    def said(self) -> str:
        return self._nursery.said(self.pid) if self._ended is None else self._ended[1]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert not has_ended(self.pid, 0.0), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.002)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Sends a signal, if there is one, and waits for the end; returns the exit status and what was said."""
        if number is not None:
            self.send(number)
        if self._ended is None:
            ended = self._nursery.reap(self.pid, DEADLINE_S)
            self._ended = (ended.status, ended.said)
        assert "Traceback" not in self._ended[1]
        return self._ended

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self._ended is None:
            kill(self.pid)
            self._nursery.reap(self.pid)


def commit(out: Path, chunks: int, samples_per_chunk: int) -> None:
    checkpoint(out, "trainer", chunks * samples_per_chunk, chunks, time.time())


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def peak_growth(work: Callable[..., object], *arguments: Any) -> object:
    """In a fork: calls a function, and leaves by how many bytes the peak of the process' memory has grown."""
    before = _peak()
    code = work(*arguments)
    leave(b"%d" % (_peak() - before))
    return code


def _peak() -> int:
    # Not ru_maxrss: that begins with what the parent took.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
