"""Runs the benchmarks, and makes one table and pictures of what they found.

Run by `scripts/bench`. Each benchmark appends a JSON line to NAME.json in the folder that is given, and says what it
has to say to NAME.txt; the last line of each counts. With --draw nothing is run: table and pictures are made anew of
what is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.benchmarks.bench_figures import BENCHMARKS, Figure, figures_of, markdown
from scripts.benchmarks.bench_plots import PlotMissing, draw

SCRIPTS: Final = Path(__file__).resolve().parents[1]

QUICK: Final = {
    "read": ["--rows", "10000", "--rounds", "2", "--chunk-files", "200"],
    "resume": ["--chunks", "200000", "--rows", "160000", "--rounds", "2"],
    "producer": ["--rows", "10000", "--rounds", "2"],
    "startup": ["--pairs", "10"],
    "loaders": ["--rows-a", "10000", "--rows-b", "40", "--rounds", "2"],
    "scatter": ["--ranks", "2", "4", "--steps", "16", "--rounds", "2"],
    "template": ["--samples", "400", "--rows", "2000", "--rounds", "2"],
    "wait": ["--rounds", "1", "--latencies", "20", "--settle", "1", "--seconds", "2"],
    "blend": ["--rows", "10000", "--rounds", "2"],
    "pack": ["--samples", "1000", "--rounds", "2"],
    "balance": ["--stripes", "1", "--global-batches", "1", "--rounds", "1"],
}
"""To see that all of it works, in minutes; the figures are not worth anything."""

WITH_PEERS: Final = ("resume", "producer", "loaders", "pack")
WITHOUT_DIR: Final = ("startup", "pack", "balance")
"""Have no --dir."""


def command_of(name: str, args: argparse.Namespace) -> list[str]:
    """Returns the command line of a benchmark."""
    command = [str(SCRIPTS / f"bench_{name}"), "--json", str(args.out / f"{name}.json")]
    if args.quick:
        command += QUICK[name]
    if args.dir and name not in WITHOUT_DIR:
        command += ["--dir", str(args.dir)]
    if name in WITH_PEERS:
        command += ["--no-peers"] if args.no_peers else []
        command += ["--peers", str(args.peers)] if args.peers and not args.no_peers else []
    return command


def run(name: str, args: argparse.Namespace) -> str:
    """Runs a benchmark; returns "" or what went wrong."""
    said = args.out / f"{name}.txt"
    start = time.monotonic()
    print(f"scripts/bench_{name} ...", flush=True)
    with said.open("w") as file:
        code = subprocess.run(command_of(name, args), stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    print(f"scripts/bench_{name}: {time.monotonic() - start:,.0f} s, see {said}", flush=True)
    return f"scripts/bench_{name} ended with exit code {code}; see {said}" if code else ""


def last_line(path: Path) -> dict[str, object]:
    """Returns the last of the JSON lines of a file.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path}: no line")
    found = json.loads(lines[-1])
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object in the last line, found {lines[-1][:40]!r}")
    return found


def collect(names: Sequence[str], folder: Path) -> tuple[list[Figure], list[str], list[str]]:
    """Returns the figures of the benchmarks, what is said of where they ran, and what could not be read."""
    figures: list[Figure] = []
    about: list[str] = []
    problems: list[str] = []
    for name in names:
        path = folder / f"{name}.json"
        if not path.exists():
            problems.append(f"{path}: not there; run scripts/bench --only {name}")
            continue
        try:
            line = last_line(path)
            figures += figures_of(name, line)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            continue
        load = f", load {line['load']:.1f} at the start" if isinstance(line.get("load"), float) else ""
        about.append(f"- {name}: {line.get('machine', 'machine not named')}{load}")
    return figures, about, problems


def main() -> int:
    """Runs what is asked for and returns the exit code."""
    present = [name for name in BENCHMARKS if (SCRIPTS / f"bench_{name}").exists()]
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=present, default=present, metavar="NAME", help=f"of {', '.join(present)}"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results: runs/bench")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--draw", action="store_true", help="run nothing; make table and pictures of what is there")
    parser.add_argument("--dir", type=Path, default=None, help="where the benchmarks put their files")
    parser.add_argument("--peers", type=Path, default=None, help="directory with the environments of other loaders")
    parser.add_argument("--no-peers", action="store_true", help="without other loaders and writers")
    args = parser.parse_args()
    # The benchmarks change to the root of the repository.
    args.out = args.out.resolve()
    args.dir, args.peers = (path and path.resolve() for path in (args.dir, args.peers))
    args.out.mkdir(parents=True, exist_ok=True)
    problems = [] if args.draw else [problem for name in args.only if (problem := run(name, args))]
    figures, about, unread = collect(args.only, args.out)
    problems += unread
    table = args.out / "results.md"
    table.write_text("\n".join(["# Benchmarks", "", *about, "", markdown(figures)]))
    print(markdown(figures))
    print(f"table: {table}")
    try:
        print("pictures: " + ", ".join(str(path) for path in draw(figures, args.out)))
    except PlotMissing as error:
        print(f"no pictures: {error}", file=sys.stderr)
    for problem in problems:
        print(f"scripts/bench: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
