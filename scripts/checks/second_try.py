"""Prints the tests that failed in a run of pytest and may be run once more, a line each; see scripts/test.

    scripts/checks/second_try.py CACHE

CACHE is that run's cache_dir. Exit codes: 0 there are some; 1 there are none, too many, or one whose failure counts, or
the gate of tests/tiers.py has found something.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MOST: Final = 3
"""More than so many at once have one cause, and that is not the machine."""

COUNTING: Final = ("tests/crash/", "tests/faults/")
"""What fails there is a lost sample, or a harness that does not see one."""


def may_be_repeated(failed: Iterable[str]) -> list[str]:
    """Returns the tests to run again, in order; none if any of them is to count.

    Args:
        failed: names as pytest has them, like ``tests/plan/test_unit.py::test_one``.
    """
    names = sorted(failed)
    whole = all("::" in name and not name.startswith(COUNTING) for name in names)
    return names if whole and len(names) <= MOST else []


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: scripts/checks/second_try.py CACHE", file=sys.stderr)
        return 2
    values = Path(arguments[0]) / "v"
    try:
        failed = json.loads((values / "cache/lastfailed").read_bytes())
    except FileNotFoundError:
        return 1
    gate = values / "lazyshard/gate"
    if gate.exists() and json.loads(gate.read_bytes()):
        return 1
    names = may_be_repeated(failed)
    for name in names:
        print(name)
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
