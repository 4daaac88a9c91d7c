"""What `lazyshard_swift.pth` costs each start of the interpreter, of which a training job has dozens.

Run by `scripts/bench_startup`. `python -c pass` runs in two places in turn that hold the same files, compiled, but for
the `.pth` file, which one of them has; which comes first changes from pair to pair. So a noisy machine disturbs both
alike. The median of the differences is reported with its quartiles, by the clock and in processor time, which other
processes disturb less; beside it that of pairs whose sides are both without the file, which says how far to trust it.

There are two kinds of places: a virtual environment, where Python's `site` reads each `.pth` file twice, and a folder
of packages outside of one, where it does so once. On a busy machine, prepend `nice -n -20 chrt -f 50`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "integrations" / "swift"
LIMIT_MS = 0.3
WARM_UP = 4
"""Pairs that are not counted."""


@dataclass(frozen=True)
class Place:
    """An interpreter, and the environment variables that give it its packages."""

    interpreter: Path
    variables: dict[str, str]

    def fill(self, packages: Path, *, active: bool) -> None:
        """Puts the package into a folder, and the `.pth` file if it is to be active, as pip would do."""
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE / "lazyshard_swift", packages / "lazyshard_swift", ignore=ignore)
        if active:
            shutil.copy(SOURCE / "lazyshard_swift.pth", packages)
        subprocess.run([self.interpreter, "-m", "compileall", "-q", packages], check=True)
        code = "import sys; print(any(hasattr(finder, 'lazyshard_swift') for finder in sys.meta_path))"
        found = subprocess.check_output([self.interpreter, "-c", code], env=self.variables, text=True).strip()
        if found != str(active):
            raise SystemExit(f"{packages}: whether it is active should be {active}, is {found}")

    def start_ms(self) -> tuple[float, float]:
        """Returns how long one start and end of the interpreter takes: by the clock, and in processor time."""
        command = [str(self.interpreter), "-c", "pass"]
        start = time.perf_counter()
        # Not subprocess.run: its own work would be in the figure.
        pid = os.posix_spawn(command[0], command, self.variables)
        _, status, used = os.wait4(pid, 0)
        taken = time.perf_counter() - start
        if status != 0:
            raise SystemExit(f"{self.interpreter}: ended with status {status}")
        return taken * 1000, (used.ru_utime + used.ru_stime) * 1000


def variables(**more: str) -> dict[str, str]:
    """Returns the environment variables without those that change what Python imports, and with some more."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more


def make_environment(folder: Path, *, active: bool) -> Place:
    """Makes a virtual environment."""
    venv.create(folder, symlinks=True)
    place = Place(folder / "bin" / "python", variables())
    (packages,) = folder.glob("lib/python*/site-packages")
    place.fill(packages, active=active)
    return place


def make_user_site(folder: Path, *, active: bool) -> Place:
    """Makes a user's folder of packages for the interpreter that the virtual environments come from."""
    place = Place(Path(getattr(sys, "_base_executable", sys.executable)), variables(PYTHONUSERBASE=str(folder)))
    code = "import site; print(site.getusersitepackages())"
    packages = Path(subprocess.check_output([place.interpreter, "-c", code], env=place.variables, text=True).strip())
    packages.mkdir(parents=True)
    place.fill(packages, active=active)
    return place


class Pairs:
    """So many starts in two places, in turn; all in ms, one figure for each pair.

    Attributes:
        clock: how much longer `one` took than `other`.
        processor: the same in processor time.
        base: how long `other` took.
    """

    def __init__(self, one: Place, other: Place, pairs: int) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []
        self.base: list[float] = []
        for number in range(-WARM_UP, pairs):
            order = (one, other) if number % 2 else (other, one)
            taken = [place.start_ms() for place in order]
            ours, others = taken if number % 2 else reversed(taken)
            if number >= 0:
                self.clock.append(ours[0] - others[0])
                self.processor.append(ours[1] - others[1])
                self.base.append(others[0])


def spread(values: list[float]) -> str:
    """Returns the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:>9.3f} ({low:.3f}, {high:.3f})"


def main() -> int:
    """Runs the pairs and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error(f"--pairs is at least 2, got {args.pairs}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; {args.pairs} pairs of `python -c pass`; ms: median (quartiles)")
    results: dict[str, object] = {"machine": machine, "pairs": args.pairs}
    medians = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (("virtual environment", make_environment), ("outside of one", make_user_site)):
            plain, same, active = (
                make(Path(folder) / f"{name} {part}", active=part == "active") for part in ("plain", "same", "active")
            )
            noise, cost = Pairs(same, plain, args.pairs), Pairs(active, plain, args.pairs)
            print(f"\n{name:24}{'clock':>9}{'':18}{'processor':>9}")
            print(f"  {'without the .pth':22}{spread(cost.base)}")
            print(f"  {'the same twice':22}{spread(noise.clock):27}{spread(noise.processor)}")
            print(f"  {'what the .pth adds':22}{spread(cost.clock):27}{spread(cost.processor)}")
            medians.append((name, statistics.median(cost.clock)))
            results[name] = {"cost": vars(cost), "noise": vars(noise)}
    print(f"\nlazyshard_swift.pth adds to a start of the interpreter (limit {LIMIT_MS} ms)")
    for name, median in medians:
        print(f"  {name:22}{median:>9.3f} ms  {'within the limit' if median <= LIMIT_MS else 'ABOVE THE LIMIT'}")
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
