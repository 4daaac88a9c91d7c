"""The features of `scripts/bench_encode`: rows with 1 MiB of float32, read by us, by other loaders, and as bytes.

Each in a fresh process of its own environment, one after the other, round by round, so that a noisy machine disturbs
all alike; the ratios are taken round by round. The floor reads the same bytes with one `preadv` a row into new memory
and holds a batch of 8, as a loader does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.benchmarks.bench_encode_readers import ROWS

ROOT: Final = Path(__file__).resolve().parents[2]

LEAST_OF_FLOOR: Final = 0.8
"""Of the speed at which the bytes are read, that rows have at least."""

OURS: Final = "lazyshard"
FLOOR: Final = "bytes"


@dataclass(frozen=True)
class Reader:
    """One of them.

    Attributes:
        name: as in `bench_encode_readers.READERS`.
        package: the one whose environment it needs; "" for ours.
        files: whose files it reads, as in `bench_encode_readers.WRITERS`.
        what: what it does, for the report.
        asked: whether we have to be ahead of it.
    """

    name: str
    package: str
    files: str
    what: str
    asked: bool = False


READERS: Final = (
    Reader(FLOOR, "", "bytes", "one preadv a row, into new memory"),
    Reader("bytes-again", "", "bytes", "the same, into memory that was touched before"),
    Reader(OURS, "", "lazyshard", "digests checked, arrays writable"),
    Reader("litdata", "litdata", "litdata", "numpy arrays, one by one", asked=True),
    Reader("mosaicml-streaming", "mosaicml-streaming", "mosaicml-streaming", "MDS, ndarray column", asked=True),
    Reader("datasets", "datasets", "datasets", "Arrow, mapped; 8 rows at once as numpy", asked=True),
    Reader("arrow", "datasets", "arrow", "pyarrow alone, record batches of 8 read whole"),
    Reader("arrow-mapped", "datasets", "arrow", "pyarrow alone, mapped: read-only pages of the file"),
)
"""In the order of the rounds."""


def present(environments: Path | None) -> list[Reader]:
    """Returns those that can be run; None: without environments of others."""
    return [
        reader
        for reader in READERS
        if not reader.package or (environments and (environments / reader.package / "bin" / "python").exists())
    ]


def _run(what: str, reader: Reader, name: str, place: Path, environments: Path | None) -> str:
    python = sys.executable
    if reader.package and environments:
        python = str(environments / reader.package / "bin" / "python")
    home = place / "home"
    home.mkdir(exist_ok=True)
    more = dict.fromkeys(("HF_HOME", "HOME", "TMPDIR", "XDG_CACHE_HOME"), str(home))
    more |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts' / 'benchmarks'}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-m", "scripts.benchmarks.bench_encode_reading", what, name, str(place / reader.files)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | more, cwd=place, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise SystemExit(f"scripts/bench_encode: {name} failed with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def measure(place: Path, rounds: int, environments: Path | None) -> dict[str, list[float]]:
    """Writes the arrays in each form, and has each reader read them once a round.

    Returns:
        Seconds of processor for all rows, a number a round, by reader.
    """
    readers = present(environments)
    place.mkdir()
    for files in dict.fromkeys(reader.files for reader in readers):
        writer = next(reader for reader in readers if reader.files == files)
        _run("write", writer, files, place, environments)
    found: dict[str, list[float]] = {reader.name: [] for reader in readers}
    digests: dict[str, str] = {}
    for _ in range(rounds):
        for reader in readers:
            said = json.loads(_run("read", reader, reader.name, place, environments).splitlines()[-1])
            found[reader.name].append(said["seconds"])
            digests[reader.name] = said["digest"]
            if said["digest"] != digests[FLOOR]:
                raise SystemExit(f"scripts/bench_encode: {reader.name} has read other arrays than were written")
    return found


def speeds(seconds: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Returns a reader's speed in that of the floor, round by round.

    >>> speeds({"bytes": [1.0, 2.0], "litdata": [2.0, 8.0]}, "litdata")
    [0.5, 0.25]
    """
    return [floor / took for floor, took in zip(seconds[FLOOR], seconds[name], strict=True)]


def failures(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns what is worse than asked for, a line each."""
    found = []
    ours = statistics.median(speeds(seconds, OURS))
    if ours < LEAST_OF_FLOOR:
        found.append(f"features come at {ours:.2f} of the speed of their bytes, less than {LEAST_OF_FLOOR}")
    for reader in READERS:
        if reader.asked and reader.name in seconds:
            ahead = statistics.median(speeds(seconds, reader.name))
            if ahead >= ours:
                found.append(f"features come at {ours:.2f} of the speed of their bytes, {reader.name} at {ahead:.2f}")
    return found


def table(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns the lines of the report."""
    lines = [f"rows of 1 MiB of float32, {ROWS} of them in batches of 8; microseconds of processor a row"]
    for reader in READERS:
        if reader.name in seconds:
            micros = statistics.median(seconds[reader.name]) / ROWS * 1e6
            of_floor = speeds(seconds, reader.name)
            share = f"{statistics.median(of_floor):.2f} ({min(of_floor):.2f}-{max(of_floor):.2f})"
            lines.append(f"{reader.name:20}{micros:>8,.0f}{share:>20} of the floor   {reader.what}")
    lines.append(f"asked for: {OURS} at least {LEAST_OF_FLOOR} of the floor, and ahead of litdata, MDS and datasets")
    return lines
