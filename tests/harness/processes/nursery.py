"""Runs the command in forks of a process that has loaded it already: a start costs milliseconds, not a second.

As a program (`python -m tests.harness.processes.nursery`) it reads requests from standard input, a JSON object a line,
and answers each with a line: a start with the process id, a wait with the exit status as `Popen.returncode` has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from tests.harness.disks.power import cut_power
from tests.harness.processes.kill_points import CALLS, KillPoint, When
from tests.producer.commands import ROOT, environment

_PR_SET_PDEATHSIG = 1

_COUNTED: Final = struct.Struct("<IB")
"""What a process leaves of the calls that it has counted, in memory that outlives it; see `Counted`."""


class Counted(NamedTuple):
    """What a process has counted of the calls that change files.

    Attributes:
        calls: how many it has begun.
        met: the name of the call at which it was to be killed or to fail; "" if it did not get there.
    """

    calls: int
    met: str


class Nursery:
    """A context manager; processes that are left at its end are killed.

    Args:
        directory: current directory of the commands, and place of what they write to their standard error.
        modules: to be loaded beside those that every run uses.

    Attributes:
        counted: what the process that was last waited for has counted; zero where it was to be stopped nowhere.
    """

    def __init__(self, directory: Path, *modules: str) -> None:
        self._directory = directory
        self.modules = modules
        self._count = 0
        self._said: dict[int, Path] = {}
        self.counted = Counted(0, "")

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
        among: Sequence[str] | None = None,
        always: bool = False,
        prepare: Sequence[str] = (),
        most_s: float = 0.0,
    ) -> int:
        """Starts the command and returns its process id.

        Args:
            arguments: its command line.
            stdin: what is its standard input.
            kill_at: the number of the call that changes a file at which it is killed, from 1; 0 only counts them.
            when: where in that call.
            by: what it is sent then.
            error: the number of the error that this call has, in place of a signal; 0 for none, so that a write that
                is stopped half way has only written less than it was to.
            power_of: a filesystem whose power is cut at that moment.
            no_answer_s: after so many seconds it says that it is stuck.
            among: only the calls of these names are counted; None for all that change a file.
            always: whether all later calls fail as well.
            prepare: functions that it calls first, as MODULE:NAME each: to break something in it, for instance.
            most_s: after so many seconds SIGALRM ends it; 0 for never.
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
            "among": CALLS if among is None else list(among),
            "always": always,
            "prepare": list(prepare),
            "most_s": most_s,
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
        status, calls, met = self._ask({"wait": pid})
        self.counted = Counted(calls, met)
        said = self._said.pop(pid)
        try:
            return status, said.read_text()
        finally:
            said.unlink()

    def wait_for_stop(self, pid: int) -> bool:
        """Waits until a process is stopped or has ended; returns whether it is stopped."""
        stopped: bool = self._ask({"stopped": pid})
        return stopped

    def run(self, *arguments: object, **options: Any) -> tuple[int, str]:
        """Starts the command and waits for its end."""
        return self.wait(self.start(*arguments, **options))

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.processes.nursery", *self.modules],
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
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # What is there now is never looked through again, nor copied for that in every fork.
    gc.freeze()
    pages: dict[int, mmap.mmap] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if "wait" in request:
            pid = request["wait"]
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with pages.pop(pid) as page:
                calls, met = _COUNTED.unpack_from(page)
            answer = [status, calls, CALLS[met - 1] if met else ""]
        elif "stopped" in request:
            found = os.waitid(os.P_PID, request["stopped"], os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            answer = found is not None and found.si_code == os.CLD_STOPPED
        else:
            page = mmap.mmap(-1, mmap.PAGESIZE)
            if not (answer := os.fork()):
                os._exit(_run(request, page))
            pages[answer] = page
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


def _run(request: dict[str, Any], page: mmap.mmap) -> int:
    from lazyshard_producer.cli import main

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    error = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(error, fd)
    # Of a named pipe this waits for whoever writes to it.
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    if request["no_answer_s"] is not None:
        going: Any = importlib.import_module("lazyshard_producer.going")
        going.Patience = partial(going.Patience, no_answer_s=request["no_answer_s"])
    signal.setitimer(signal.ITIMER_REAL, request["most_s"])
    for function in request["prepare"]:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)()
    if request["kill_at"] is not None:
        by = None if request["error"] is not None else signal.Signals(request["by"])
        KillPoint(
            request["kill_at"],
            request["when"],
            by,
            partial(_last, request["power_of"], request["error"]),
            among=request["among"],
            always=request["always"],
            tell=partial(_count, page, request["kill_at"]),
        ).install()
    code = main(request["arguments"])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _count(page: mmap.mmap, number: int, call: int, name: str, begins: bool) -> None:
    if begins:
        calls, met = _COUNTED.unpack_from(page)
        _COUNTED.pack_into(page, 0, max(calls, call), CALLS.index(name) + 1 if call == number else met)


def _last(power_of: str | None, error: int | None) -> None:
    if power_of is not None:
        cut_power(power_of)
    if error:
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    main()
