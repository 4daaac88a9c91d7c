"""Prints the failed tests of a pytest run that may be retried, one per line; see scripts/test.

    scripts/checks/second_try.py CACHE

CACHE is the run's cache_dir. Exit codes: 0 there are some; 1 there are none, too many, or one that must not be retried,
or the gate of tests/tiers.py reported something.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MOST: Final = 3
"""More failures in one run have a common cause other than the load of the machine."""

COUNTING: Final = ("tests/crash/", "tests/faults/")
"""Failures here mean a lost sample, or a harness that misses one."""


def may_be_repeated(failed: Iterable[str]) -> list[str]:
    """Returns the tests to retry, in order; none if any of them must not be retried.

    Args:
        failed: Names as in pytest, such as ``tests/plan/test_unit.py::test_one``.
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
