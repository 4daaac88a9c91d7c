"""The soak as a sweep: an hour of it with scale 1, see `tests.harness.soak.run`; and the stream of a million chunks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import orjson

from tests.harness.tally import Tally
from tests.producer.commands import environment

SECONDS: Final = 3600.0
CHUNKS: Final = 1_000_000
LEAST_CHUNKS: Final = 2_000


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Soaks for an hour, or the share of it that is asked for, and makes the stream of a million chunks."""
    found = soak(place, "--minutes", str(SECONDS * scale / 60), "--seed", str(seed))
    if found is not None:
        tally.trial(faults=found["kills"], points=found["done"].get("steps", 0))
        tally.violations += found["violations"]
        tally.notes += found["notes"]
        for name in ("lives", "resumes", "resumes with another number of ranks"):
            tally.count(name, found["done"].get(name, 0))
        tally.count("samples trained", int(found["counts"].get("samples trained", 0)))
    else:
        tally.violation(f"scripts/soak --seed {seed} did not come to its end")
    million = soak(place, "--million", "--chunks", str(max(LEAST_CHUNKS, round(CHUNKS * scale))))
    if million is None:
        tally.notes.append("scripts/soak --million did not come to its end: what it said is above")
        return
    tally.trial(faults=1)
    tally.violations += million["violations"]
    tally.count("chunks of the long stream", million["chunks"])


def soak(place: Path, *arguments: str) -> dict[str, Any] | None:
    """Runs the program, in a process of its own; returns its report, None if it made none."""
    report = place / f"report-{len(list(place.glob('report-*')))}"
    command = [sys.executable, "-m", "tests.harness.soak", "--dir", str(place), "--json", str(report), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="", flush=True)
    if not report.exists():
        return None
    found: dict[str, Any] = orjson.loads(report.read_bytes())
    return found
