"""How soon a resumed run has its first sample, and what the arithmetic behind it takes.

Run by `scripts/bench_resume`. Four parts:

- first: a fresh process constructs the data set, loads the state and reads one sample, at several positions of a stream
  of a million chunks. From the constructor on: the start of the interpreter and the imports are not counted. Memory is
  the peak above that of an interpreter which has imported torch and numpy and nothing of ours. Of the chunks only those
  are there that will be read; with --all-names every other one has its two names too, of empty files, so that the
  directory is as large as a real one.
- plan: which sample a position draws, one call for each and for arrays.
- rescale: the same right after a change of 1,024 ranks that had just opened windows of 4 chunks.
- peers: construction and resume to the first batch of 8, beside other loaders on the same rows.

Arithmetic is timed by the processor, all else by the clock. What is compared takes turns, so that a noisy machine
disturbs all alike; medians are shown with the lowest and the highest. On a busy machine, prepend
`nice -n -20 chrt -f 50`. Files are best in memory: --dir /dev/shm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy
import orjson
import torch

from scripts.benchmarks.bench_read import SAMPLES_PER_CHUNK
from scripts.benchmarks.bench_report import Report, folder, spread
from scripts.benchmarks.bench_resume_first import CASES, measure_first
from scripts.benchmarks.bench_resume_peers import CONSUMED, LOADERS, measure_peers
from scripts.benchmarks.bench_resume_plan import measure_arithmetic, measure_rescale
from scripts.benchmarks.bench_resume_stream import SparseStream

PARTS: Final = ("first", "plan", "rescale", "peers")

ASKED_MS: Final = 20.0
ASKED_MB: Final = 50.0
ASKED_SCALAR_US: Final = 2.0
ASKED_VECTOR_NS: Final = 50.0
ASKED_RESCALE_S: Final = 1.0


def report_first(report: Report, place: Path, args: argparse.Namespace) -> None:
    """The first sample of fresh processes."""
    streams = {ended: SparseStream(place / f"ended_{ended}", args.chunks, ended=ended) for ended in (True, False)}
    if args.all_names:
        streams[True].add_names()
    found = measure_first(streams, args.rounds)
    names = "every chunk has its names" if args.all_names else "only the chunks that are read are there"
    print(f"\nto the first sample, {args.chunks:,} chunks of {SAMPLES_PER_CHUNK:,} rows; {names}")
    print(
        f"{'ranks before and after, window':48}{'consumed':>13}{'ms':>22}{'of processor':>22}{'peak MB':>20}{'PSS':>6}"
    )
    report.results["first"] = lines = []
    for case in CASES:
        keys = "ms", "processor_ms", "peak_mb", "pss_mb"
        ms, processor, peak, pss = ([one[key] for one in found[case]] for key in keys)
        consumed = case.state(streams[not case.live]).consumed
        times = f"{spread(ms):>22}{spread(processor):>22}"
        print(f"{case.name:48}{consumed:>13,}{times}{spread(peak):>20}{statistics.median(pss):>6.1f}")
        report.judge(f"{case.name}, {consumed:,} consumed", statistics.median(ms), ASKED_MS, "ms")
        report.judge(f"{case.name}, {consumed:,} consumed", statistics.median(peak), ASKED_MB, "MB")
        lines.append(
            asdict(case) | {"consumed": consumed, "ms": ms, "processor_ms": processor, "peak_mb": peak, "pss_mb": pss}
        )


def report_plan(report: Report, args: argparse.Namespace) -> None:
    """The arithmetic."""
    print(f"\n{'a sample by arithmetic':62}{'end':>8}{'one call each, us':>22}{'arrays, ns':>24}   of processor")
    report.results["plan"] = lines = []
    for (variant, known), times in measure_arithmetic(args.chunks, args.rounds).items():
        end = "known" if known else "unknown"
        print(f"{variant.name:62}{end:>8}{spread(times.scalar, 1e6, 2):>22}{spread(times.vector, 1e9):>24}")
        name = f"{variant.name}, end {end}"
        report.judge(name, statistics.median(times.scalar) * 1e6, ASKED_SCALAR_US, "us a sample")
        report.judge(name, statistics.median(times.vector) * 1e9, ASKED_VECTOR_NS, "ns a sample in arrays")
        lines.append({"variant": variant.name, "end_known": known, "scalar_s": times.scalar, "vector_s": times.vector})


def report_rescale(report: Report, args: argparse.Namespace) -> None:
    """The change of 1,024 ranks."""
    print(f"\n{'a rescale, windows of 4 chunks':80}{'ms of processor':>26}")
    report.results["rescale"] = found = measure_rescale(args.chunks, args.rounds)
    for name, seconds in found.items():
        print(f"{name:80}{spread(seconds, 1e3):>26}")
        report.judge(name, statistics.median(seconds), ASKED_RESCALE_S, "s")


def report_peers(report: Report, place: Path, args: argparse.Namespace) -> None:
    """The side by side."""
    found = measure_peers(place, args.rows, args.rounds, args.peers)
    versions = {loader: loader.version(args.peers) for loader in LOADERS}
    print(f"\nto the first batch of 8 after a resume, {args.rows:,} rows of prose in files of {SAMPLES_PER_CHUNK:,}")
    consumed = "".join(f"{f'ms after {count:,}':>26}" for count in CONSUMED)
    print(f"{'':48}{consumed}{'MB':>8}  other ranks")
    report.results["peers"] = lines = []
    for loader in LOADERS:
        ones = [found[loader, count] for count in CONSUMED]
        ms = [[one["ms"] for one in some] for some in ones]
        peak = statistics.median([one["peak_mb"] for some in ones for one in some])
        times = "".join(f"{spread(one):>26}" for one in ms)
        print(f"{loader.name:48}{times}{peak:>8.1f}  {loader.ranks} ({versions[loader]})")
        lines.append({"loader": loader.name, "version": versions[loader], "ms": ms, "peak_mb": peak})


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="processes of each case, and rounds of each timing")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="of the long stream; 200,000 or more")
    parser.add_argument("--rows", type=int, default=200_000, help="of the side by side; 160,000 or more")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--all-names", action="store_true", help="make an empty file for every name of a chunk")
    parser.add_argument("--dir", type=folder, default=None, help="where to put everything (default: a temporary one)")
    parser.add_argument("--peers", type=Path, default=None, help="directory with the environments of other loaders")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a median is worse than asked for")
    args = parser.parse_args()
    if args.rounds < 1 or args.chunks < 200_000 or args.rows < 160_000:
        parser.error("--rounds is at least 1, --chunks at least 200000, --rows at least 160000")
    report = Report(f"orjson {orjson.__version__}, numpy {numpy.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        if "first" in args.only:
            report_first(report, Path(place), args)
        if "plan" in args.only:
            report_plan(report, args)
        if "rescale" in args.only:
            report_rescale(report, args)
        if "peers" in args.only and args.peers:
            report_peers(report, Path(place), args)
    return report.conclude(args)


if __name__ == "__main__":
    sys.exit(main())
