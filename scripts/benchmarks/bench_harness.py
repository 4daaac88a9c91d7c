"""Shared by all benchmarks: rows of the table, rounds in which the sides alternate, child processes, environments.

A figure is a cost, so less is better. The ratio of a row is the other side's figure divided by the subject's, so more
is better, and the goal is a minimum. Ratios are computed within a round, as noise of the machine affects all sides of a
round alike. The first round warms the caches and is not counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
OURS: Final = (ROOT, ROOT / "producer", ROOT / "integrations" / "swift")
"""Where our packages are."""

TIMEOUT_S: Final = 900.0
"""Timeout of a child process."""

Figures = Mapping[str, float]
"""What one turn of a side has measured, by unit."""

Side = Callable[[], Figures]
"""Does the work of a side once; what it needs is made on the first call."""


class Missing(Exception):
    """A side cannot run here: a package or program is missing, or another loader fails."""


class Failed(Exception):
    """A side of lazyshard failed, or a side read wrong rows."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: on the command line, within its benchmark.
        subject: the measured side.
        against: the side that it is compared with, or a bound in the row's unit.
        unit: of the figures.
        goal: the minimum ratio; None if the ratio is only reported.
    """

    name: str
    subject: str
    against: str | float
    unit: str
    goal: float | None = None


def bound(name: str, subject: str, most: float, unit: str) -> Row:
    """Returns a row with an upper bound of its figure."""
    return Row(name, subject, most, unit, 1.0)


@dataclass(frozen=True)
class Benchmark:
    """A group of rows with the same preparation.

    Attributes:
        name: on the command line.
        about: what is measured, for the list.
        rows: of the table.
        prepare: returns the sides by name; those that no selected row needs are not called.
    """

    name: str
    about: str
    rows: tuple[Row, ...]
    prepare: Callable[[Setting], Mapping[str, Side]]


class Environments:
    """Environments of other packages, one for each, as their requirements conflict.

    An environment is made when first needed, which takes some minutes and gigabytes, and kept.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._reasons: dict[str, str] = {}

    def python(self, package: str) -> str:
        """Returns the interpreter that has a package.

        Raises:
            Missing: it cannot be installed.
        """
        python = self._place / package / "bin" / "python"
        if package not in self._reasons:
            self._reasons[package] = "" if (self._place / package / "ready").exists() else self._make(package)
        if reason := self._reasons[package]:
            raise Missing(f"{package} cannot be installed: {reason}")
        return str(python)

    def _make(self, package: str) -> str:
        """Returns "", or the reason why it could not be made."""
        print(f"making an environment for {package} in {self._place}", file=sys.stderr, flush=True)
        self._place.mkdir(parents=True, exist_ok=True)
        # Not for git, wherever it is.
        (self._place / ".gitignore").write_text("*\n")
        constraints = self._place / "constraints.txt"
        locked = (ROOT / "scripts" / "locked.txt").read_text().splitlines()
        # The one torch for everybody.
        constraints.write_text("\n".join(line for line in locked if line.startswith("torch==")) + "\n")
        place = self._place / package
        venv.create(place, with_pip=True, clear=True)
        command = [str(place / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        command += ["-c", str(constraints), "orjson", "torch", package]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        (place / "pip.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            return last_line(done.stderr)
        (place / "ready").touch()
        return ""


@dataclass(frozen=True)
class Setting:
    """Where and how a benchmark runs.

    Attributes:
        place: an empty directory, which is removed afterwards.
        quick: tiny sizes, to see that it works.
        environments: of other packages; None: without them.
        rounds: that are counted.
    """

    place: Path
    quick: bool = False
    environments: Environments | None = None
    rounds: int = 5

    def size(self, usual: int, quick: int) -> int:
        """Returns one of two sizes."""
        return quick if self.quick else usual

    def python(self, package: str) -> str:
        """Returns the interpreter that has a package; raises `Missing` where there is none."""
        if self.environments is None:
            raise Missing("other packages were not asked for (--no-peers)")
        return self.environments.python(package)


@dataclass(frozen=True)
class Result:
    """The result of a row: figures and ratios of each round, or the reason why there are none.

    Attributes:
        row: the row.
        subject: figures of the subject.
        against: those of the other side.
        reason: why it was left out, or "".
    """

    row: Row
    subject: list[float] = field(default_factory=list)
    against: list[float] = field(default_factory=list)
    reason: str = ""

    @property
    def ratios(self) -> list[float]:
        """Those of the rounds."""
        return [other / own if own else float("inf") for own, other in zip(self.subject, self.against, strict=True)]

    @property
    def missed(self) -> bool:
        """Whether the median ratio is below the goal."""
        return not self.reason and self.row.goal is not None and statistics.median(self.ratios) < self.row.goal


def measure(benchmark: Benchmark, rows: Sequence[Row], setting: Setting) -> list[Result]:
    """Runs the rounds and returns a result for each row.

    Raises:
        Failed: a side of ours failed.
    """
    sides = benchmark.prepare(setting)
    names = list(dict.fromkeys(name for row in rows for name in (row.against, row.subject) if isinstance(name, str)))
    taken: dict[str, list[Figures]] = {name: [] for name in names}
    reasons: dict[str, str] = {}
    for number in range(setting.rounds + 1):
        # Not always behind the same neighbour.
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if name not in reasons:
                try:
                    figures = sides[name]()
                except Missing as cause:
                    reasons[name] = f"{name}: {cause}"
                    continue
                if number:
                    taken[name].append(figures)
    return [_result(row, taken, reasons) for row in rows]


def _result(row: Row, taken: Mapping[str, Sequence[Figures]], reasons: Mapping[str, str]) -> Result:
    for name in (row.subject, row.against):
        if name in reasons:
            return Result(row, reason=reasons[str(name)])
    subject = [one[row.unit] for one in taken[row.subject]]
    if isinstance(row.against, str):
        return Result(row, subject, [one[row.unit] for one in taken[row.against]])
    return Result(row, subject, [row.against] * len(subject))


def variables(home: Path, ours: bool) -> dict[str, str]:
    """Returns the environment of a child: loaders leave their files in `home` and do not use the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    homes = dict.fromkeys(("HOME", "HF_HOME", "TMPDIR", "XDG_CACHE_HOME"), str(home))
    path = os.pathsep.join(map(str, OURS if ours else OURS[:1]))
    more = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return kept | homes | more | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def command(function: str, settings: Mapping[str, Any], python: str = "") -> list[str]:
    """Returns the command line of a child process: see `bench_process`."""
    return [python or sys.executable, "-m", "scripts.benchmarks.bench_process", function, json.dumps(settings)]


def child(function: str, settings: Mapping[str, Any], place: Path, python: str = "", **more: str) -> dict[str, Any]:
    """Runs `MODULE.FUNCTION` of this folder in a fresh process and returns what it returns.

    Args:
        function: which one.
        settings: its arguments.
        place: an existing directory for what it leaves behind.
        python: the interpreter of another package; "": ours.
        more: environment variables.

    Raises:
        Failed: it failed or took too long; of another package: `Missing`.
    """
    failed = Missing if python else Failed
    with (
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+") as complaints,
        tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as home,
    ):
        process = subprocess.Popen(
            command(function, settings, python),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complaints,
            cwd=home,
            env=variables(Path(home), ours=not python) | more,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise failed(f"{function} has not finished within {TIMEOUT_S:g} s") from None
        finally:
            # Workers that it left behind, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        complaints.seek(0)
        lines, why = said.read().splitlines(), complaints.read()
    if process.returncode or not lines:
        raise failed(f"{function}: {last_line(why)}" if python else f"{function}\n{why}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def last_line(text: str) -> str:
    """Returns the last nonempty line."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
