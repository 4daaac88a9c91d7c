"""The table of `scripts/bench`: its rows, their selection, and the output."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_encode import ENCODE
from scripts.benchmarks.bench_harness import ROOT, Benchmark, Environments, Failed, Result, Row, Setting, measure
from scripts.benchmarks.bench_loaders import LOADERS
from scripts.benchmarks.bench_producer import PRODUCER
from scripts.benchmarks.bench_read import READ
from scripts.benchmarks.bench_resume import RESUME
from scripts.benchmarks.bench_settled import BALANCE, BLEND, PACK, STARTUP
from scripts.benchmarks.bench_training import TRAIN
from scripts.benchmarks.bench_wait import WAIT
from scripts.benchmarks.bench_writers import MANY_WRITERS

BENCHMARKS: Final = (READ, PRODUCER, MANY_WRITERS, RESUME, WAIT, ENCODE, LOADERS, BLEND, PACK, BALANCE, STARTUP, TRAIN)

Chosen = list[tuple[Benchmark, list[Row]]]


def choose(names: Sequence[str], benchmarks: Sequence[Benchmark]) -> Chosen:
    """Returns the rows with these names or prefixes; all rows without names.

    Raises:
        ValueError: There is no such row.
    """

    def named(row: str) -> list[str]:
        return [name for name in names if row == name or row.startswith(f"{name}.")]

    of = {f"{benchmark.name}.{row.name}": (benchmark, row) for benchmark in benchmarks for row in benchmark.rows}
    used = {name for row in of for name in named(row)}
    if unknown := [name for name in names if name not in used]:
        raise ValueError(f"no row is called {', '.join(unknown)}; --list shows all")
    chosen: Chosen = []
    for benchmark in benchmarks:
        rows = [row for row in benchmark.rows if not names or named(f"{benchmark.name}.{row.name}")]
        if rows:
            chosen.append((benchmark, rows))
    return chosen


def number(value: float) -> str:
    """Returns three significant digits, without an exponent.

    >>> number(1234.5), number(0.1234), number(0.00001234)
    ('1,234', '0.123', '0.0000123')
    """
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.7f}".rstrip("0")


def listed(chosen: Chosen) -> list[str]:
    """Returns the list of rows as a table."""
    lines = ["| row | subject | beside | figure | least ratio |", "|---|---|---|---|---|"]
    for benchmark, rows in chosen:
        lines.append(f"| **{benchmark.name}** | {benchmark.about} | | | |")
        for row in rows:
            beside = row.against if isinstance(row.against, str) else f"at most {number(row.against)}"
            goal = "" if row.goal is None else number(row.goal)
            lines.append(f"| {benchmark.name}.{row.name} | {row.subject} | {beside} | {row.unit} | {goal} |")
    return lines


def _side(name: str, values: Sequence[float], unit: str) -> str:
    return f"{name}: {number(statistics.median(values))} {unit}"


def told(name: str, result: Result) -> str:
    """Returns the line of a result: medians, and the median, lowest and highest ratio."""
    row = result.row
    goal = "" if row.goal is None else number(row.goal)
    if result.reason:
        return f"| {name} | {row.subject} | | | {goal} | left out |"
    ratios = result.ratios
    beside = (
        _side(row.against, result.against, row.unit)
        if isinstance(row.against, str)
        else f"at most {number(row.against)}"
    )
    spread = f"{number(statistics.median(ratios))} ({number(min(ratios))} to {number(max(ratios))})"
    verdict = "**missed**" if result.missed else "met" if goal else ""
    return f"| {name} | {_side(row.subject, result.subject, row.unit)} | {beside} | {spread} | {goal} | {verdict} |"


def run(chosen: Chosen, args: argparse.Namespace) -> tuple[dict[str, Result], list[str]]:
    """Runs the selected rows and prints each result; returns the results by name, and the failures."""
    environments = None if args.no_peers else Environments(args.peers.resolve())
    results: dict[str, Result] = {}
    failures: list[str] = []
    print("| row | subject | beside | ratio (lowest to highest) | least | |\n|---|---|---|---|---|---|", flush=True)
    for benchmark, rows in chosen:
        with tempfile.TemporaryDirectory(dir=args.dir, ignore_cleanup_errors=True) as place:
            setting = Setting(Path(place).resolve(), args.quick, environments, args.rounds)
            try:
                found = measure(benchmark, rows, setting)
            except Failed as cause:
                failures.append(f"{benchmark.name}: {cause}")
                continue
        for result in found:
            name = f"{benchmark.name}.{result.row.name}"
            results[name] = result
            print(told(name, result), flush=True)
    return results, failures


def versions(packages: Iterable[str] = ("orjson", "numpy", "torch", "ms-swift")) -> str:
    """Returns names and versions of the installed packages."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def facts(name: str, result: Result) -> dict[str, Any]:
    """Returns a result for JSON."""
    row = result.row
    told_of = {"row": name, "subject": row.subject, "against": row.against, "unit": row.unit, "goal": row.goal}
    if result.reason:
        return told_of | {"left_out": result.reason}
    figures = {"subject_figures": result.subject, "against_figures": result.against}
    return told_of | figures | {"ratios": result.ratios, "missed": result.missed}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the checked arguments."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures, side by side, what judges lazyshard.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows, or what their names begin with (all)")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round, to see that it works")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds that are counted (5; with --quick 1)")
    parser.add_argument("--dir", type=Path, help="an existing directory for all files (a temporary one)")
    peers = ROOT / ".venv-peers"
    parser.add_argument("--peers", type=Path, default=peers, metavar="DIR", help="environments of other packages")
    parser.add_argument("--no-peers", action="store_true", help="leave out what needs other packages")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append all figures as one JSON line")
    args = parser.parse_args(arguments)
    if args.rounds is None:
        args.rounds = 1 if args.quick else 5
    if args.rounds < 1:
        parser.error(f"--rounds is at least 1, got {args.rounds}")
    if args.dir and not args.dir.is_dir():
        parser.error(f"--dir {args.dir} is no directory; make it first")
    try:
        args.chosen = choose(args.names, BENCHMARKS)
    except ValueError as cause:
        parser.error(str(cause))
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if args.list:
        print("\n".join(listed(args.chosen)))
        return 0
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions()}"
    load = os.getloadavg()[0]
    print(f"{machine}; load {load:.1f} at the start; medians of {args.rounds} rounds\n")
    results, failures = run(args.chosen, args)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    for reason in dict.fromkeys(result.reason for result in results.values() if result.reason):
        print(f"left out: {reason}")
    for failure in failures:
        print(f"scripts/bench: {failure}", file=sys.stderr)
    if args.json:
        line = {"machine": machine, "load": load, "rows": [facts(name, one) for name, one in results.items()]}
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")
    missed = [name for name, result in results.items() if result.missed]
    if args.check and missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if failures or (args.check and missed) else 0


if __name__ == "__main__":
    # The number of ranks intentionally does not divide the samples.
    logging.getLogger("lazyshard").setLevel(logging.ERROR)
    sys.exit(main())
