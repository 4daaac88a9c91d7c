"""How fast rows get to a training loop: ours beside other loaders, each in its own format and environment.

Run by `scripts/bench_loaders`. Two data sets: A, text as chat data has it, about 2 KB a row in the mean; B, images of
about 1 MB in base64. Five cases: one process in order, shuffled, and at random; two workers in order and shuffled, in
batches of 8 whose rows reach the main process as dicts. Whatever the loader, every row that came is counted, the ids
are added up, and one row is compared with the source; where that does not agree, the benchmark fails.

Each run is a process of its own, and the loaders take turns, so that a noisy machine disturbs all alike. The floor,
`orjson.loads` over the memory-mapped lines in one process, is taken anew in each round of each case, and a ratio is
within a round; medians are shown with the lowest and the highest. Time counts from the construction of the loader to
the last row, after the imports. Processor time is that of all processes, and so is the memory: proportional shares
(PSS), looked at every 50 ms, imports included; pages of mapped files count in it, whoever keeps them, and are told
apart.

Files are best in memory: --dir /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import orjson

from scripts.benchmarks.bench_loaders_cases import BATCH, CASES
from scripts.benchmarks.bench_loaders_data import CHUNKS_B, make_data
from scripts.benchmarks.bench_loaders_peers import FLOOR, LOADERS, OURS, Loader, LoaderFailed, WrongRows
from scripts.benchmarks.bench_loaders_report import case_table, loader_table, ratio_table, summary, worse
from scripts.benchmarks.bench_loaders_rounds import Rounds
from scripts.benchmarks.bench_read import SAMPLES_PER_CHUNK
from scripts.benchmarks.bench_report import folder


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments, checked."""
    names = [loader.name for loader in LOADERS if loader.name not in (FLOOR, OURS)]
    parser = argparse.ArgumentParser(
        prog="scripts/bench_loaders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows-a", type=int, default=200_000, help=f"of A; a multiple of {SAMPLES_PER_CHUNK:,}")
    parser.add_argument("--rows-b", type=int, default=800, help=f"of B; a multiple of {CHUNKS_B}")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each loader and case")
    parser.add_argument("--data", nargs="+", choices=("A", "B"), default=("A", "B"), help="which data")
    parser.add_argument("--case", nargs="+", choices=CASES, default=tuple(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=tuple(names),
        metavar="LOADER",
        help=f"beside ours and the floor: {', '.join(names)}",
    )
    parser.add_argument("--dir", type=folder, default=None, help="where to put everything (default: a temporary one)")
    parser.add_argument("--peers", type=Path, default=None, help="directory with the environments of other loaders")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a process is given up")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where we are behind, or below what is asked")
    parser.add_argument("--packages", action="store_true", help="print the packages that need environments, and end")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds is at least 1, got {args.rounds}")
    for option, value, unit in (("--rows-a", args.rows_a, SAMPLES_PER_CHUNK), ("--rows-b", args.rows_b, CHUNKS_B)):
        if value < unit or value % unit:
            parser.error(f"{option} is a multiple of {unit:,}, got {value:,}")
    return args


def available(wanted: Sequence[Loader], environments: Path | None) -> tuple[list[Loader], dict[str, str]]:
    """Returns those loaders that can run, and why the others cannot."""
    found: list[Loader] = []
    reasons: dict[str, str] = {}
    for loader in wanted:
        if not loader.package or (environments and (environments / loader.package / "loaders").exists()):
            found.append(loader)
        elif environments is None:
            reasons[loader.name] = "no environments of other loaders were asked for"
        else:
            log = environments / f"{loader.package}.log"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            complaints = [line.strip() for line in lines if "error" in line.lower()] or lines[-1:] or ["no environment"]
            reasons[loader.name] = f"{loader.package} is not installed: {complaints[-1]}"
    return found, reasons


def main() -> int:
    """Runs everything and returns the exit code."""
    args = parse(sys.argv[1:])
    wanted = [loader for loader in LOADERS if loader.name in (FLOOR, OURS, *args.only)]
    if args.packages:
        print("\n".join(dict.fromkeys(loader.package for loader in wanted if loader.package)))
        return 0
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    load = os.getloadavg()[0]
    print(f"{machine}, orjson {orjson.__version__}; load {load:.1f} at the start")
    loaders, reasons = available(wanted, args.peers)
    versions = {loader.name: loader.version(args.peers or Path()) for loader in loaders}
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        place = Path(name)
        data = [make_data(place, which, args.rows_a if which == "A" else args.rows_b) for which in args.data]
        for one in data:
            size = one.bytes / one.rows
            print(f"{one.which}: {one.rows:,} rows, {size:,.0f} bytes in the mean, in {one.chunks} chunks")
        rounds = Rounds(loaders, args.peers or Path(), place, args.case, args.timeout)
        try:
            found = rounds.run(data, args.rounds)
        except (LoaderFailed, WrongRows) as error:
            print(f"scripts/bench_loaders: {error}", file=sys.stderr)
            return 1
    found.left_out |= reasons
    names = [loader.name for loader in loaders]
    for which in args.data:
        print("\n" + "\n".join(ratio_table(found, which, args.case, names)))
        for case in args.case:
            print("\n" + "\n".join(case_table(found, which, case, names)))
    print("\n" + "\n".join(loader_table(loaders, versions, found)))
    print(f"\nbatches of {BATCH}; {args.rounds} rounds; load {os.getloadavg()[0]:.1f} at the end")
    for loader, reason in found.left_out.items():
        print(f"left out: {loader}: {reason}")
    behind = worse(found, loaders)
    for line in behind:
        print(f"worse than asked for: {line}")
    if args.json:
        conversions = [
            {"data": which, "loader": loader, "seconds": seconds, "mb": size}
            for (which, loader), (seconds, size) in found.conversions.items()
        ]
        results: dict[str, object] = {
            "machine": machine,
            "load": load,
            "rows": {one.which: one.rows for one in data},
            "rounds": args.rounds,
            "loaders": {
                one.name: {"version": versions[one.name], "settings": one.settings, "reference": one.reference}
                for one in loaders
            },
            "conversions": conversions,
            "results": [summary(found, key) for key in found.taken],
            "left_out": found.left_out,
            "worse": behind,
        }
        with args.json.open("a") as file:
            file.write(json.dumps(results) + "\n")
    return 1 if args.check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
