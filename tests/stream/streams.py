"""Small streams, children and waits that the tests of storage share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.names import seal_name
from lazyshard.format.records import Head
from lazyshard.format.seal import Seal

DEADLINE_S: Final = 30.0
"""How long a test waits for what must come at once; only a failing one ever waits so long."""

HERE: Final = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to become another user")


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"id": i} for i in range(start, stop)]


def produce(directory: Path, samples: int, per_chunk: int = 2, *, end: bool = True) -> Path:
    """Adds rows up to `samples`."""
    writer = ChunkWriter(directory, per_chunk)
    for row in rows(writer.published_samples, samples):
        writer.write(row)
    writer.close(end)
    return directory


def foreign(directory: Path, *chunks: bytes, end: bool = False) -> Path:
    directory.mkdir(exist_ok=True)
    for number, data in enumerate(chunks):
        (directory / f"chunk_{number:05d}.jsonl").write_bytes(data)
        (directory / f"chunk_{number:05d}.jsonl.completed").touch()
    if end:
        (directory / "stream.end").touch()
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def head(directory: Path) -> Head:
    return Head.decode((directory / "head.json").read_bytes())


def seal(directory: Path, chunk: int) -> Seal:
    return Seal.decode((directory / seal_name(chunk)).read_bytes(), chunk)


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.002)


def forked(work: Callable[[], object]) -> int:
    """Runs `work` in a fork and returns its exit code: 0 when it returned, 1 when it raised, -N killed by signal N."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(reap(pid))


def reap(pid: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child hung for {DEADLINE_S:.0f} s")
        time.sleep(0.001)


def python(source: str, *arguments: object, before: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, `before` being a command that starts it."""
    return subprocess.run(
        [*before, sys.executable, "-c", source, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
