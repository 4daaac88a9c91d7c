"""Waiting for a live stream: how soon a chunk is there, what idle waiting costs, how often it asks; memory.

Run by `scripts/bench_wait`. Four parts:

- latency: from the last row of a chunk, given to the writer, to the first sample out of a `LazyShardedDataset` in
  another process that waits for it; one rank, and 8 of them. Once with the wake-up call of the local filesystem, and
  once without, as where another machine writes: then the pause between two looks is a tenth of the wait.
- idle: the share of a core that a rank takes which waits for what does not come, and each of 8.
- asking: how often 1, 2, 4 and 8 such ranks together ask the stream's filesystem for something by its name, seen by
  strace.
- memory: the proportional share (PSS) of a rank and of its DataLoader workers while they read a stream, the highest
  of five looks, and of that what is anonymous.

Each process is a fresh one, and the cases take turns. Medians are shown with the lowest and the highest, latencies of
all rounds together with the 95th of a hundred and the highest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch

from scripts.benchmarks.bench_report import Report, folder, spread
from scripts.benchmarks.bench_wait_idle import make_stream, measure_asking, measure_idle
from scripts.benchmarks.bench_wait_latency import CASES as LATENCIES
from scripts.benchmarks.bench_wait_latency import POLLING_PAUSE_S, line_of, measure_latency
from scripts.benchmarks.bench_wait_latency import Case as Latency
from scripts.benchmarks.bench_wait_memory import CASES as STREAMS
from scripts.benchmarks.bench_wait_memory import Case as Stream
from scripts.benchmarks.bench_wait_memory import growth, growth_by_rows, measure_memory

PARTS: Final = ("latency", "idle", "asking", "memory")

ASKED_MS: Final = 10.0
ASKED_SHARE: Final = 0.001
ASKED_GROWTH_MB: Final = 5.0
ASKED_MORE: Final = 1.5
"""Calls of 8 ranks may be so many times those of one: a rank that comes a moment late asks once more."""


def report_latency(report: Report, place: Path, args: argparse.Namespace) -> None:
    """How soon."""
    stripes = -(-args.latencies // args.rounds)
    found: dict[Latency, list[float]] = {case: [] for case in LATENCIES}
    for _ in range(args.rounds):
        for case in LATENCIES:
            found[case] += measure_latency(place, case, stripes)
    print(f"\nfrom the last row to the first sample, {stripes * args.rounds} times")
    print(f"{'':52}{'median ms':>10}{'95th':>10}{'highest':>10}")
    for case, values in found.items():
        print(f"{case.name:52}{line_of(values)}")
        # One poll: a tenth of the wait.
        asked = ASKED_MS if case.woken else ASKED_MS + POLLING_PAUSE_S * 1000 / 10
        report.judge(f"latency, {case.name}", statistics.median(values), asked, "ms")
    report.results["latency"] = [{"case": case.name, "ms": values} for case, values in found.items()]


def report_idle(report: Report, place: Path, args: argparse.Namespace) -> None:
    """What it costs."""
    directory = place / "idle"
    make_stream(directory)
    found: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(args.rounds):
        for ranks, shares in found.items():
            shares += measure_idle(directory, ranks, args.settle, args.seconds)
    print(f"\nof a core, for each rank, in {args.seconds:g} s of a wait that has lasted {args.settle:g} s")
    for ranks, shares in found.items():
        print(f"{f'{ranks} waiting':48}{spread(shares, 100, 3):>28} %")
        report.judge(f"idle, {ranks} waiting", statistics.median(shares) * 100, ASKED_SHARE * 100, "% of a core")
    report.results["idle"] = found


def report_asking(report: Report, place: Path, args: argparse.Namespace) -> None:
    """How often they ask."""
    directory = place / "asking"
    make_stream(directory)
    found: dict[int, list[Counter[str]]] = {1: [], 2: [], 4: [], 8: []}
    for _ in range(args.rounds):
        for ranks, counts in found.items():
            counts.append(measure_asking(directory, ranks, args.settle, args.seconds, place))
    names = sorted({name for counts in found.values() for count in counts for name in count})
    print(f"\ncalls for names of the stream, all ranks together, in {args.seconds:g} s of a wait of {args.settle:g} s")
    print(f"{'':16}{'all':>22}" + "".join(f"{name:>22}" for name in names) + f"{'all, per second':>18}")
    totals = {ranks: [sum(count.values()) for count in counts] for ranks, counts in found.items()}
    for ranks, counts in found.items():
        by_name = "".join(f"{spread([count[name] for count in counts], 1, 0):>22}" for name in names)
        rate = statistics.median(totals[ranks]) / args.seconds
        print(f"{f'{ranks} waiting':16}{spread(totals[ranks], 1, 0):>22}{by_name}{rate:>18.2f}")
    alone = statistics.median(totals[1])
    for ranks in (2, 4, 8):
        report.judge(f"calls of {ranks} ranks", statistics.median(totals[ranks]), ASKED_MORE * alone + 2, "calls")
    report.results["asking"] = found


def report_memory(report: Report, place: Path, args: argparse.Namespace) -> None:
    """Memory."""
    found: dict[Stream, list[dict[str, Any]]] = {case: [] for case in STREAMS}
    for _ in range(args.rounds):
        for case in STREAMS:
            found[case].append(measure_memory(place, case))
    print("\nMB while a stream is read, a rank and the larger of its 2 workers: PSS, and of that what is anonymous")
    print(f"{'':36}" + "".join(f"{name:>24}" for name in ("rank", "anonymous", "worker", "anonymous")))
    for case, ones in found.items():
        columns = [[one[who][kind] for one in ones] for who in ("rank", "worker") for kind in (0, 1)]
        name = f"{case.chunks:,} chunks of rows of {case.text:,} bytes"
        print(f"{name:36}" + "".join(f"{spread(column):>24}" for column in columns))
    for who in ("rank", "worker"):
        medians = {case: statistics.median(one[who][1] for one in ones) for case, ones in found.items()}
        for text, more in growth(medians).items():
            report.judge(
                f"anonymous memory of a {who}, by chunks of rows of {text:,}", more, ASKED_GROWTH_MB, "MB more"
            )
        if who == "rank":
            # A worker holds the rows that it reads.
            report.judge("anonymous memory of a rank, by rows", growth_by_rows(medians), ASKED_GROWTH_MB, "MB more")
    report.results["memory"] = [{"chunks": case.chunks, "text": case.text, "mb": ones} for case, ones in found.items()]


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each case")
    parser.add_argument("--latencies", type=int, default=200, help="of each case, over all rounds")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds of a wait that are not measured")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of a wait that are measured")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--dir", type=folder, default=None, help="where to put everything (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a median is worse than asked for")
    args = parser.parse_args()
    if args.rounds < 1 or args.latencies < 1 or not 0 < args.settle < 3600 or not 0 < args.seconds < 3600:
        parser.error("--rounds and --latencies are at least 1, --settle and --seconds above 0 and below 3600")
    report = Report(f"torch {torch.__version__}")
    measures = {"latency": report_latency, "idle": report_idle, "asking": report_asking, "memory": report_memory}
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        for name in PARTS:
            if name in args.only:
                measures[name](report, Path(place).resolve(), args)
    return report.conclude(args)


if __name__ == "__main__":
    sys.exit(main())
