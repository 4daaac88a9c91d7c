"""What share of a worker's time lazyshard's own loading takes, beside ms-swift's `template.encode`.

Run by `scripts/bench_template`. A DataLoader with one worker process reads batches of 8 rows of chat messages of about
2 KB, and encodes them with ms-swift's template and a small tokenizer. The worker times each call of `template.encode`,
and the whole of `LazyShardedDataset.__getitems__` around it; what is not in the encoder is loading: reading, digest,
parsing and index, and a timer. Between the two is ms-swift's preprocessing, which ``--sharded_lazy true`` runs row by
row before the template; in the other orders there is nothing but another timer, so that much of loading is one too.

The orders take turns; each pass has a new worker, a first round to warm up is not counted. Medians over the rounds are
shown with the lowest and the highest; what is asked for is judged by processor time. The encoded rows must be those
that the indices draw. Between two reads the encoder fills the processor's caches with its own, so that reading takes
several times as long here as in `scripts/bench_read`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_read import BATCH, make_stream
from scripts.benchmarks.bench_report import Report, folder, missing_packages, spread, versions_of

ASKED_PERCENT: Final = 5.0

PROCESS: Final = Path(__file__).with_name("bench_template_process.py")

STACK: Final = ("ms-swift", "transformers", "torch")


@dataclass(frozen=True)
class Shares:
    """Where a worker's time went in one pass, by the clock or by the processor.

    Attributes:
        loading_us: microseconds a row outside of the encoder.
        between_us: in the encoder, outside of `template.encode`.
        encode_us: in `template.encode`.
    """

    loading_us: float
    between_us: float
    encode_us: float

    @property
    def loading_percent(self) -> float:
        """The share of loading in all."""
        return 100 * self.loading_us / (self.loading_us + self.between_us + self.encode_us)


def shares(whole: float, encoder: float, template: float, rows: int) -> Shares:
    """Returns where the time went.

    Args:
        whole: seconds in the data set.
        encoder: of these, in its encoder.
        template: of these, in `template.encode`.
        rows: how many were made.

    Raises:
        ValueError: a part is larger than the whole, or nothing was encoded.
    """
    if not 0 < template <= encoder <= whole:
        raise ValueError(f"expected 0 < template <= encoder <= whole, got {template}, {encoder} and {whole} seconds")
    return Shares(
        loading_us=(whole - encoder) / rows * 1e6,
        between_us=(encoder - template) / rows * 1e6,
        encode_us=template / rows * 1e6,
    )


def failures(percents: dict[str, Sequence[float]]) -> list[str]:
    """Returns in words in which order the median of loading's share is not under what is asked for."""
    medians = {order: statistics.median(values) for order, values in percents.items()}
    return [
        f"{order}: loading takes {percent:.1f} % of a worker's processor time, asked for: under {ASKED_PERCENT:g} %"
        for order, percent in medians.items()
        if percent >= ASKED_PERCENT
    ]


def run(command: list[str], home: Path) -> str:
    """Runs a Python program offline and returns what it printed.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    settings = {
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # One thread, as in a worker beside others.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=os.environ | settings)
    if done.returncode:
        raise SystemExit(
            f"scripts/bench_template: {command[0]} failed with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def measure(place: Path, rows: int, samples: int, rounds: int) -> dict[str, Any]:
    """Returns what the passes found; see `bench_template_process`."""
    stream = place / "stream"
    make_stream(stream, rows, "prose")
    settings = {"model": str(place / "model"), "stream": str(stream), "samples": samples, "rounds": rounds}
    found: dict[str, Any] = json.loads(run([str(PROCESS), json.dumps(settings)], place).splitlines()[-1])
    return found


def report(passes: dict[str, list[dict[str, Any]]], samples: int) -> tuple[dict[str, Any], list[str]]:
    """Prints a table; returns its figures, and what is worse than asked for."""
    print(
        f"{'microseconds of processor a row':34}{'loading':>22}{'between':>22}{'template.encode':>26}"
        f"{'loading, %':>22}{'by the clock, %':>22}"
    )
    figures: dict[str, Any] = {}
    percents: dict[str, Sequence[float]] = {}
    for order, ones in passes.items():
        clock, processor = (
            [shares(one["whole"][i], one["encoder"][i], one["template"][i], samples) for one in ones] for i in (0, 1)
        )
        percents[order] = [one.loading_percent for one in processor]
        by_clock = [one.loading_percent for one in clock]
        print(
            f"{order:34}{spread([one.loading_us for one in processor]):>22}"
            f"{spread([one.between_us for one in processor]):>22}"
            f"{spread([one.encode_us for one in processor], digits=0):>26}"
            f"{spread(percents[order]):>22}{spread(by_clock):>22}"
        )
        figures[order] = {
            "processor_us": [vars(one) for one in processor],
            "clock_us": [vars(one) for one in clock],
            "loading_percent": percents[order],
            "loading_percent_by_the_clock": by_clock,
        }
    return figures, failures(percents)


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_template", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4000, help="encoded in each pass")
    parser.add_argument("--rows", type=int, default=20_000, help="of the stream; at least as many as are encoded")
    parser.add_argument("--rounds", type=int, default=5, help="passes in each order, one to warm up not counted")
    parser.add_argument("--dir", type=folder, default=None, help="where to put everything (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the share is 5 %% or more")
    args = parser.parse_args()
    if args.rounds < 1 or args.samples < BATCH or args.samples > args.rows or args.rows % BATCH:
        parser.error(f"--rounds is at least 1, --samples from {BATCH} to --rows, which are whole batches")
    if args.dir and not args.dir.is_dir():
        parser.error(f"--dir {args.dir} is no directory; make it first")
    missing = missing_packages(STACK)
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; scripts/environment full installs them")
    judged = Report(versions_of((*STACK, "tokenizers")))
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        found = measure(Path(place), args.rows, args.samples, args.rounds)
    rows = f"{args.samples:,} of {args.rows:,} rows of about 2 KB, {found['tokens']:.0f} tokens each in the mean"
    print(f"\n{rows}; batches of {BATCH}")
    judged.results["orders"], judged.worse = report(found["passes"], args.samples)
    return judged.conclude(args, "the rows encoded were those that were drawn, in each pass; ")


if __name__ == "__main__":
    sys.exit(main())
