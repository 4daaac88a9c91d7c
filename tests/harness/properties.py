"""The properties of plan and producer on 100 times as many examples, other ones with each seed; hours on one core."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.conftest import EXAMPLES_FACTOR
from tests.harness.processes.environment import ROOT
from tests.harness.tally import Tally

_EXAMPLES: Final = re.compile(r"  +- (\d+) passing\D*(\d+) failing")
_TESTS: Final = ("tests/plan", "tests/producer")


def sweep(tally: Tally, place: Path, seed: int, scale: float, tests: Sequence[str] = _TESTS) -> None:
    """Runs the tests with Hypothesis; what fails is printed as it is to be put into its test: as an `@example`."""
    command = [sys.executable, "-m", "pytest", *tests, "-m", "hypothesis", "-n", "auto", "-q", "--color=no"]
    command += ["--hypothesis-show-statistics", f"--hypothesis-seed={seed}", "--timeout=0", "-p", "no:cacheprovider"]
    command += [f"--basetemp={place / 'pytest'}"]
    factor = max(1, round(100 * scale))
    variables = os.environ | {EXAMPLES_FACTOR: str(factor)}
    run = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout, flush=True)
    for line in run.stdout.splitlines():
        if found := _EXAMPLES.match(line):
            tally.trial(faults=0, trials=sum(map(int, found.groups())))
        elif line.startswith(("FAILED ", "ERROR ")):
            tally.violation(f"{line.strip()} ({factor} times the examples, seed {seed}); pin it as an @example")
    tally.points = len(set(re.findall(r"^tests/\S+::.*:$", run.stdout, re.MULTILINE)))
    if run.returncode not in (0, 1) or (run.returncode == 1 and not tally.violations) or not tally.points:
        tally.violation(f"pytest ended with exit code {run.returncode} after {tally.points} properties")
