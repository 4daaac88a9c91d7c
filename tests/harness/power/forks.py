"""Calls functions in forks of a process that has loaded everything once: a life costs milliseconds, not a second.

As a program (`python -m tests.harness.power.forks`) it reads requests from standard input, a JSON object a line, and
answers each with the exit status as `Popen.returncode` has it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from tests.producer.commands import environment

_PR_SET_PDEATHSIG: Final = 1
_MOST_SAID: Final = 2000
"""Characters of what a life has said that are worth reading: its end."""


class Forks:
    """A context manager.

    Args:
        folder: current directory of the lives, and place of what they write to their standard error.
    """

    def __init__(self, folder: Path) -> None:
        self._said = folder / "said"
        self._folder = folder

    def call(self, function: str, **arguments: Any) -> int:
        """Calls `MODULE:FUNCTION` in a fork, which returns its exit status; a signal's number is negative.

        A module that has a function `load` gets it called before the first fork.

        Args:
            function: what to call.
            arguments: its keyword arguments, JSON.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"function": function, "arguments": arguments, "said": str(self._said)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the forks has ended with {self._process.wait()}: {self.said()}")
        return int(line)

    def said(self) -> str:
        """Returns the end of what the last life has written to its standard error, on one line."""
        try:
            return " | ".join(self._said.read_text().split("\n"))[-_MOST_SAID:]
        except FileNotFoundError:
            return ""

    def __enter__(self) -> Forks:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.power.forks"],
            cwd=self._folder,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["function"].partition(":")
        loaded = _load(module)
        if not (pid := os.fork()):
            os._exit(_live(getattr(loaded, name), request["arguments"], request["said"]))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _load(name: str) -> ModuleType:
    known = name in sys.modules
    module = importlib.import_module(name)
    if not known and hasattr(module, "load"):
        module.load()
        # What is there by now is never looked through again, so the forks share its memory.
        gc.freeze()
    return module


def _live(function: Any, arguments: dict[str, Any], said: str) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    error = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(error, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        code = int(function(**arguments))
    except BaseException:
        traceback.print_exc()
        code = 99
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


if __name__ == "__main__":
    main()
