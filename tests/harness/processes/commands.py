"""Runs of the producer's command in forks, some of which are killed or have an error at a numbered call."""

import atexit
import contextlib
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

from tests.harness.disks import cut_power
from tests.harness.processes.environment import ROOT
from tests.harness.processes.kill_points import CALLS, KillPoint, When
from tests.harness.processes.nursery import Nursery, leave


class Counted(NamedTuple):
    calls: int  # how many it has begun
    met: str  # the name of the call at which it was to be killed or to fail; "" if it did not get there


class Commands(Nursery):  # A nursery of the command. `modules`: to be loaded beside those that every run uses.
    def __init__(self, folder: Path, *modules: str) -> None:
        super().__init__(folder, __name__, *modules)
        self.counted = Counted(0, "")  # of the process that was last waited for; zero where nothing was to stop it

    def start(
        self,
        *arguments: object,
        stdin: Path | None = None,
        kill_at: int | None = None,  # the number of the call that changes a file at which it is killed; 0 only counts
        when: When = "before",
        by: signal.Signals = signal.SIGKILL,
        error: int | None = None,  # what this call has instead; 0 for none, where a write only writes less
        power_of: Path | None = None,  # a filesystem whose power is cut at that moment
        no_answer_s: float | None = None,  # after so many seconds it says that it is stuck
        among: Sequence[str] | None = None,  # only the calls of these names are counted
        always: bool = False,  # whether all later calls fail as well
        prepare: Sequence[str] = (),  # functions that it calls first, as MODULE:NAME
        most_s: float = 0.0,  # after so many seconds SIGALRM ends it; 0 for never
    ) -> int:
        point = None
        if kill_at is not None:
            at_last = partial(_last, None if power_of is None else str(power_of), error)
            signal_or_none = by if error is None else None
            counted = CALLS if among is None else tuple(among)
            point = partial(KillPoint, kill_at, when, signal_or_none, at_last, among=counted, always=always)
        line = [str(argument) for argument in arguments]
        return self.fork(_run, line, point, no_answer_s, tuple(prepare), most_s, stdin=stdin)

    def wait(self, pid: int) -> tuple[int, str]:
        ended = self.reap(pid)
        self.counted = pickle.loads(ended.left) if ended.left else Counted(0, "")
        return ended.status, ended.said

    def run(self, *arguments: object, **options: Any) -> tuple[int, str]:
        return self.wait(self.start(*arguments, **options))


_one_at_a_time: Final = Lock()


def run_apart(
    arguments: Sequence[str], variables: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a fork of a shared process. Raises subprocess.TimeoutExpired: it was killed after so long."""
    with tempfile.TemporaryDirectory() as said, _one_at_a_time:
        given = list(arguments), dict(variables), str(folder), said
        ended = _shared().call(_run_apart, *given, within_s=timeout_s)
        if ended.late:
            raise subprocess.TimeoutExpired(list(arguments), timeout_s)
        paths = [Path(said, str(fd)) for fd in (1, 2)]
        texts = [path.read_text(encoding="utf-8") if path.exists() else "" for path in paths]
    return subprocess.CompletedProcess(list(arguments), ended.status, texts[0], texts[1] + ended.said)


@cache
def _shared() -> Commands:
    folder = tempfile.TemporaryDirectory(prefix="lazyshard-commands-")
    nursery: Commands = Commands(Path(folder.name)).__enter__()
    atexit.register(folder.cleanup)
    atexit.register(nursery.__exit__, None, None, None)
    return nursery


def _run_apart(arguments: list[str], variables: dict[str, str], folder: str, said: str) -> object:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # As `python -m` has them.
    sys.path[0], sys.argv = folder, [str(ROOT / "producer" / "lazyshard_producer" / "__main__.py"), *arguments]
    for fd in (1, 2):
        os.dup2(os.open(f"{said}/{fd}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
    try:
        return importlib.import_module("lazyshard_producer.cli").main()
    except SystemExit as ended:
        return ended.code


def load() -> None:
    for path in (ROOT / "producer" / "lazyshard_producer").glob("*.py"):
        if path.stem[0] != "_" and not path.stem.startswith("ray"):  # Ray is slow, and no affair of the command's
            importlib.import_module(f"lazyshard_producer.{path.stem}")
    for name in ("pyarrow.parquet", "pyarrow.ipc", "zstandard"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.redirect_stderr(io.StringIO()):  # What is imported only when a command line is read
        importlib.import_module("lazyshard_producer.cli").main(["run", "--source", "/nowhere", "--out", "nowhere"])


def call_first(functions: Sequence[str]) -> None:
    for function in functions:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)()


def _run(arguments: list[str], point: Any, no_answer_s: float | None, prepare: Sequence[str], most_s: float) -> int:
    from lazyshard_producer.cli import main

    if no_answer_s is not None:
        waiting: Any = importlib.import_module("lazyshard.stream.waiting")
        waiting.NO_ANSWER_S = no_answer_s
    signal.setitimer(signal.ITIMER_REAL, most_s)
    call_first(prepare)
    if point is not None:
        point(tell=partial(_count, [0, ""], point.args[0])).install()
    return main(arguments)


def _count(counted: list[Any], number: int, call: int, name: str, begins: bool) -> None:
    if begins:
        counted[:] = max(counted[0], call), name if call == number else counted[1]
        leave(pickle.dumps(Counted(*counted)))


def _last(power_of: str | None, error: int | None) -> None:
    if power_of is not None:
        cut_power(power_of)
    if error:
        raise OSError(error, os.strerror(error))
