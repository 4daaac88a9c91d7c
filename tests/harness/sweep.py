"""Runs the sweeps and prints what they counted. As a program: see scripts/test_faults."""

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import orjson

from tests.harness.tally import Tally

SWEEPS: Final = {
    "points": "tests.harness.points.sweep",
    "pairs": "tests.harness.writers.races",
    "writers": "tests.harness.many.runs",
    "power": "tests.harness.power.sweep",
    "model": "tests.harness.model.sweep",
    "network": "tests.harness.network.sweep",
    "fuzz": "tests.harness.fuzz.sweep",
    "properties": "tests.harness.properties",
    "training": "tests.harness.runs.sweep",
    "soak": "tests.harness.soak.run",
}
"""Each module has `sweep(tally, place, seed, scale)`: it counts in a `Tally`, writes below `place`, and returns."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/test_faults", description=__doc__)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"{', '.join(SWEEPS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn by chance (default: 0)")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of it, in (0, 1] (default: 1)")
    parser.add_argument("--dir", type=Path, default=None, help="where to put everything (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=None, help="append the counts as one JSON line to this file")
    args = parser.parse_args(arguments)
    if unknown := set(args.sweeps) - set(SWEEPS):
        parser.error(f"there is no sweep {min(unknown)!r}; there are {', '.join(SWEEPS)}")
    if not 0 < args.scale <= 1:
        parser.error(f"--scale must be in (0, 1], got {args.scale}")
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    tallies = []
    for name in args.sweeps or SWEEPS:
        tally = Tally(name, say=lambda line: print(line, flush=True))
        with tempfile.TemporaryDirectory(dir=args.dir, prefix=f"faults-{name}-", ignore_cleanup_errors=True) as place:
            importlib.import_module(SWEEPS[name]).sweep(tally, Path(place), args.seed, args.scale)
        print(tally, *(f"  {note}" for note in tally.notes), sep="\n", flush=True)
        tallies.append(tally)
    print(f"\non {os.cpu_count()} CPUs, {sys.platform}")
    for tally in tallies:
        print(tally, *(f"  VIOLATION: {violation}" for violation in tally.violations), sep="\n")
    if args.json is not None:
        counts = {"seed": args.seed, "scale": args.scale, "sweeps": [tally.as_json() for tally in tallies]}
        with args.json.open("ab") as file:
            file.write(orjson.dumps(counts) + b"\n")
    return 1 if any(tally.violations for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
