"""The sweep over damaged files: formats, rows, states of runs, whole directories; about ten minutes at scale 1.

Each case is drawn from its seed, target and number alone, so a violation is seen again with these (`fuzz.cases`), and
with `scripts/test_faults fuzz --seed N`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.harness.fuzz.cases import Cases, hypothesis_case
from tests.harness.tally import Tally

__all__ = ["CASES", "sweep"]

CASES: Final = {
    "streams": 9_000,
    "arrays": 2_000,
    "descriptions": 40_000,
    "cursors": 6_000,
    "states": 40_000,
    "blends": 20_000,
    "rows": 40_000,
    "batches": 15_000,
    "foreign": 15_000,
    "formats": 300_000,
    "hypothesis": 10_000,
}
"""How many at scale 1, by target: some ten minutes on one core."""

_MOST_VIOLATIONS: Final = 20
"""Of a target: one fault shows in very many cases."""


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Runs the cases of every target; see `CASES`."""
    cases = Cases(place)
    with _quiet():
        for target, most in CASES.items():
            count = max(10, round(most * scale))
            if target == "hypothesis":
                _run_hypothesis(tally, seed, count)
                continue
            broken = 0
            for number in range(count):
                found = cases.run(target, seed, number)
                # A point is a case: no two are alike but by chance.
                tally.trial(faults=1, points=1)
                tally.count(f"cases of {target}")
                if found.taken:
                    tally.count(f"of {target} taken as valid")
                if found.broken is not None:
                    tally.violation(f"{target} {number} of seed {seed}: {found.broken}")
                    broken += 1
                    if broken == _MOST_VIOLATIONS:
                        tally.notes.append(f"{target}: given up after {broken} violations in {number + 1} cases")
                        break


def _run_hypothesis(tally: Tally, number: int, count: int) -> None:
    """Looks for values and bytes with Hypothesis, which makes what fails as small as it can."""

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def run(random: Random) -> None:
        tally.trial(faults=1, points=1)
        tally.count("cases of hypothesis")
        hypothesis_case(random)

    try:
        run()
    except Exception as error:
        tally.violation(f"hypothesis of seed {number}: {type(error).__name__}: {str(error)[:500]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of readers: there is one for each of thousands of faults."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
