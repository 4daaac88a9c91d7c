"""Plays runs in forks of a process that has loaded torch, the package and the producer once: a run costs no start.

As a program (`python -m tests.harness.runs.nursery`) it reads requests from standard input, a pickle in base64 a line,
and answers each with what became of the run, likewise.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import io
import os
import pickle
import pkgutil
import selectors
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.harness.processes.forks import forked, kill, last_words, reap
from tests.harness.runs.plan import RunPlan
from tests.harness.runs.play import Played, play
from tests.producer.commands import environment

RUN_S: Final = 100.0
"""How long a run may take; what hangs in it says so itself before that."""


class Nursery:
    """A context manager.

    Args:
        folder: place of the runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def play(self, run: RunPlan, mutant: str | None = None) -> Played:
        """Plays a run; see `runs.play.play`. What it writes is removed if everything held."""
        self._count += 1
        folder = self._folder / f"run-{self._count}-seed-{run.seed}"
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(_line((run, mutant, folder)))
        self._process.stdin.flush()
        played: Played = _read(self._process.stdout.readline())
        if played.kind is None:
            shutil.rmtree(folder)
        return played

    def __enter__(self) -> Nursery:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.runs.nursery"],
            cwd=self._folder,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    _load()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_line(_answer(*_read(line))))
        sys.stdout.buffer.flush()


def _line(value: object) -> bytes:
    return base64.b64encode(pickle.dumps(value)) + b"\n"


def _read(line: bytes) -> Any:
    return pickle.loads(base64.b64decode(line))


def _load() -> None:
    producer = importlib.import_module("lazyshard_producer")
    for found in pkgutil.walk_packages(producer.__path__, "lazyshard_producer."):
        # Ray is slow, and no affair of the command's; the program would run.
        if ".ray" not in found.name and not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    # What is imported only when a command line is read.
    with contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module("lazyshard_producer.cli").main(["run", "--source", "/nowhere", "--out", "nowhere"])
    # So that forks share what is loaded for good.
    gc.collect()
    gc.freeze()


def _answer(run: RunPlan, mutant: str | None, folder: Path) -> Played:
    told, tell = os.pipe()
    said = folder.with_suffix(".log")

    def work() -> int:
        os.close(told)
        # A session of its own, so that its process groups are.
        os.setsid()
        os.write(tell, _line(play(run, mutant, folder)))
        return 0

    pid = forked(work, said)
    os.close(tell)
    answer = b""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(told, selectors.EVENT_READ)
            in_time = bool(selector.select(RUN_S))
        while in_time and (more := os.read(told, 65536)):
            answer += more
    finally:
        os.close(told)
    if not in_time:
        kill(pid)
    status = reap(pid, f"the run of seed {run.seed}")
    if answer:
        played: Played = _read(answer)
        return played
    how = f"took more than {RUN_S:.0f} s" if not in_time else f"ended with {status}"
    return Played(run.seed, kind="error" if in_time else "hang", text=f"the run {how}: {last_words(said)}")


if __name__ == "__main__":
    main()
