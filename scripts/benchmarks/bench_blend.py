"""What blending costs: batches of a `BlendedDataset` against those of one stream with as many rows of the same kind.

Run by `scripts/bench_blend`. The two take turns in one process, each a new data set over files in the page cache, and
take turns in who is first, as what comes second finds other memory free; a ratio is taken within a round, and the first
round is not counted. Rows are chat text of about 2 KB, not encoded: with
an encoder there is next to nothing to see. All is processor time; a blend's table is built before, and timed by itself.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from lazyshard import BlendedDataset, LazyShardedDataset
from lazyshard.plan.blend_table import BlendTable, whole_parts
from scripts.benchmarks.bench_read import BATCH, make_stream
from scripts.benchmarks.bench_report import Report, folder, spread

ASKED = 1.05
"""Times a plain batch, at the most."""

ASKED_MS = 50.0
"""For the table of 100 streams."""

SHARES = (0.8, 0.2)
STREAMS = (2, 10, 100, 1000)

Opened = LazyShardedDataset | BlendedDataset


def opened(directory: Path, window: int) -> LazyShardedDataset:
    """Opens a stream for a rank that is alone."""
    return LazyShardedDataset(directory, dp_rank=0, dp_size=1, batch_size=BATCH, shuffle_window=window)


def plain(place: Path, window: int) -> LazyShardedDataset:
    """One stream."""
    return opened(place / "all", window)


def blended(place: Path, window: int) -> BlendedDataset:
    """Two streams that have as many rows together."""
    parts = [(opened(place / str(number), window), share) for number, share in enumerate(SHARES)]
    return BlendedDataset(parts, batch_size=BATCH)


def read(dataset: Opened, rows: int) -> float:
    """Reads in batches, as a DataLoader worker does; returns processor time in microseconds a row."""
    start = time.process_time()
    for first in range(0, rows, BATCH):
        dataset.__getitems__(list(range(first, first + BATCH)))
    return (time.process_time() - start) / rows * 1e6


def measure_reading(place: Path, rows: int, rounds: int, report: Report) -> None:
    """Prints a table of what rows cost."""
    kinds: dict[str, Callable[[Path, int], LazyShardedDataset | BlendedDataset]] = {
        "one stream": plain,
        "blend": blended,
    }
    print(f"\n{'us a row, batches of ' + str(BATCH):28}{'one stream':>24}{'blend of two':>24}{'ratio':>28}")
    for window in (0, 4):
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            for name in list(kinds)[:: -1 if number % 2 else 1]:
                gc.collect()
                dataset = kinds[name](place, window)
                dataset[0]
                taken = read(dataset, rows)
                del dataset
                if number:
                    found[name].append(taken)
        ratios = [ours / theirs for theirs, ours in zip(found["one stream"], found["blend"], strict=True)]
        where = f"windows of {window} chunks" if window else "in order"
        print(
            f"{where:28}{spread(found['one stream'], digits=2):>24}{spread(found['blend'], digits=2):>24}"
            f"{spread(ratios, digits=3):>28}"
        )
        report.results[where] = found
        report.judge(f"{where}, of one stream", statistics.median(ratios), ASKED, "times")


def measure_tables(rounds: int, report: Report) -> None:
    """Prints how long the tables of blends take that are computed for weights at random."""
    print(f"\n{'ms to build a table':28}{'period':>10}{'':4}{'ms':>24}")
    for streams in STREAMS:
        rng = random.Random(streams)
        taken = []
        for _ in range(rounds):
            weights = [rng.uniform(0.1, 10) for _ in range(streams)]
            start = time.process_time()
            table = BlendTable(whole_parts(weights))
            taken.append((time.process_time() - start) * 1e3)
        print(f"{f'{streams:,} streams':28}{table.period:>10,}{'':4}{spread(taken, digits=1):>24}")
        report.results[f"table of {streams}"] = taken
        if streams == 100:
            report.judge(f"the table of {streams} streams", statistics.median(taken), ASKED_MS, "ms")


def main() -> int:
    """Measures and reports; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000, help="of all streams together; a multiple of 10,000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dir", type=folder, default=None, help="where to put the streams (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a median is worse than asked for")
    args = parser.parse_args()
    if args.rows < 10_000 or args.rows % 10_000 or args.rounds < 1:
        parser.error("--rows is a multiple of 10,000, --rounds at least 1")
    report = Report(f"orjson {orjson.__version__}")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        place = Path(name)
        make_stream(place / "all", args.rows, "prose")
        for number, share in enumerate(SHARES):
            make_stream(place / str(number), round(args.rows * share), "prose")
        measure_reading(place, args.rows, args.rounds, report)
    measure_tables(args.rounds, report)
    return report.conclude(args)


if __name__ == "__main__":
    sys.exit(main())
