"""Programs of tests and pages, each in a fork of one process that has imported torch, and nothing else of weight."""

import atexit
import os
import runpy
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final

from tests.data.workers import DEADLINE_S
from tests.harness.processes.nursery import Nursery

AS_MODULE: Final = "-m "  # What a program begins with whose rest is the name of a module, as for `python -m`


def start_program(program: str, *arguments: object, folder: Path, out: Path | None = None, warn: str = "ignore") -> int:
    """Starts a program in a folder; returns its process id. `out`: where it prints, if not where it logs."""
    given = [str(argument) for argument in arguments]
    return programs().fork(_run, program, given, str(folder), None if out is None else str(out), warn)


def run_program(
    program: str, *arguments: object, folder: Path, merged: bool = False, warn: str = "ignore"
) -> CompletedProcess[str]:
    """Runs a program to its end. `merged`: its standard error too is where it prints."""
    with tempfile.TemporaryDirectory() as said:
        out = Path(said, "out")
        pid = start_program(program, *arguments, folder=folder, out=None if merged else out, warn=warn)
        ended = programs().reap(pid, DEADLINE_S)
        assert not ended.late, f"not done within {DEADLINE_S} s: {ended.said}"
        printed = ended.said if merged else out.read_text(encoding="utf-8")
    return CompletedProcess([*map(str, arguments)], ended.status, printed, "" if merged else ended.said)


@cache
def programs() -> Nursery:
    """The process whose forks they are."""
    folder = tempfile.TemporaryDirectory(prefix="lazyshard-programs-")
    nursery: Nursery = Nursery(Path(folder.name), "tests.data.workers").__enter__()
    atexit.register(folder.cleanup)
    atexit.register(nursery.__exit__, None, None, None)
    return nursery


def _run(program: str, arguments: list[str], folder: str, out: str | None, warn: str) -> object:
    os.chdir(folder)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    sys.path[0], sys.argv = folder, ["-c", *arguments]
    if out is not None:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    # What is printed stands where it belongs among what is logged.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    warnings.simplefilter(warn)  # type: ignore[arg-type]
    try:
        if program.startswith(AS_MODULE):
            runpy.run_module(program.removeprefix(AS_MODULE), run_name="__main__", alter_sys=True)
        else:
            exec(program, {"__name__": "__main__"})
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise AssertionError(ended.code) from ended
        return ended.code
    return 0
