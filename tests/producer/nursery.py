"""Runs the command in forks of a process that has loaded it already: a start costs milliseconds, not a second.

As a program (`python -m tests.producer.nursery`) it reads requests from standard input, a JSON object a line, and
answers each with a line: a start with the process id, a wait with the exit status as `Popen.returncode` has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.producer.commands import ROOT, environment
from tests.producer.kill_points import KillPoint, When
from tests.producer.power import cut_power

_PR_SET_PDEATHSIG = 1


class Nursery:
    """A context manager; processes that are left at its end are killed.

    Args:
        directory: current directory of the commands, and place of what they write to their standard error.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._said: dict[int, Path] = {}

    def start(
        self,
        *arguments: object,
        stdin: Path | None = None,
        kill_at: int | None = None,
        when: When = "before",
        by: signal.Signals = signal.SIGKILL,
        error: int | None = None,
        power_of: Path | None = None,
        no_answer_s: float | None = None,
    ) -> int:
        """Starts the command and returns its process id.

        Args:
            arguments: its command line.
            stdin: what is its standard input.
            kill_at: the number of the call that changes a file at which it is killed, from 1.
            when: where in that call.
            by: what it is sent then.
            error: the number of the error that this call has, in place of a signal.
            power_of: a filesystem whose power is cut at that moment.
            no_answer_s: after so many seconds it says that it is stuck.
        """
        self._count += 1
        said = self._directory / f"stderr-{self._count}"
        request = {
            "arguments": [str(argument) for argument in arguments],
            "stdin": os.devnull if stdin is None else str(stdin),
            "stderr": str(said),
            "kill_at": kill_at,
            "when": when,
            "by": by,
            "error": error,
            "no_answer_s": no_answer_s,
            "power_of": None if power_of is None else str(power_of),
        }
        pid: int = self._ask(request)
        self._said[pid] = said
        return pid

    def said(self, pid: int) -> str:
        """Returns what is in a process's standard error so far."""
        try:
            return self._said[pid].read_text()
        except FileNotFoundError:
            return ""

    def wait(self, pid: int) -> tuple[int, str]:
        """Returns the exit status of a process, negative for a signal, and what is in its standard error."""
        status: int = self._ask({"wait": pid})
        return status, self._said.pop(pid).read_text()

    def wait_for_stop(self, pid: int) -> bool:
        """Waits until a process is stopped or has ended; returns whether it is stopped."""
        stopped: bool = self._ask({"stopped": pid})
        return stopped

    def run(self, *arguments: object, **options: Any) -> tuple[int, str]:
        """Starts the command and waits for its end."""
        return self.wait(self.start(*arguments, **options))

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.producer.nursery"],
            cwd=self._directory,
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

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def main() -> None:
    _load()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif "stopped" in request:
            found = os.waitid(os.P_PID, request["stopped"], os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            answer = found is not None and found.si_code == os.CLD_STOPPED
        elif not (answer := os.fork()):
            os._exit(_run(request))
        print(json.dumps(answer), flush=True)


def _load() -> None:
    for path in (ROOT / "producer" / "lazyshard_producer").glob("*.py"):
        # Ray is slow, and no affair of the command's.
        if path.stem[0] != "_" and not path.stem.startswith("ray"):
            importlib.import_module(f"lazyshard_producer.{path.stem}")
    for name in ("pyarrow.parquet", "pyarrow.ipc", "zstandard"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # What is imported only when a command line is read.
    with contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module("lazyshard_producer.cli").main(["run", "--source", "/nowhere", "--out", "nowhere"])


def _run(request: dict[str, Any]) -> int:
    from lazyshard_producer.cli import main

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    error = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(error, fd)
    # Of a named pipe this waits for whoever writes to it.
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    if request["no_answer_s"] is not None:
        run: Any = importlib.import_module("lazyshard_producer.run")
        run.Patience = partial(run.Patience, no_answer_s=request["no_answer_s"])
    if request["kill_at"] is not None:
        by = None if request["error"] is not None else signal.Signals(request["by"])
        KillPoint(
            request["kill_at"], request["when"], by, partial(_last, request["power_of"], request["error"])
        ).install()
    code = main(request["arguments"])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _last(power_of: str | None, error: int | None) -> None:
    if power_of is not None:
        cut_power(power_of)
    if error is not None:
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    main()
