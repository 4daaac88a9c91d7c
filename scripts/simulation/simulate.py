"""Scale on paper: how a run would go with so many ranks, such chunks, such windows and such a producer.

Run by `scripts/simulate`. Nothing is read or written but what --check-real makes for its real runs: when chunks are
published and when each step can be trained is arithmetic, with the plan, the pacing and the limits of the product
itself. Thousands of ranks and a million chunks take seconds.

What a step needs is what `lazyshard.plan` says: a stripe, one chunk of every rank, or with windows so many of them,
must be published before any rank begins it. So the first step waits for ranks * samples_per_chunk * max(1, window)
rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lazyshard_producer.configuration.quantities import parse_amount
from scripts.simulation import simulate_report, simulate_sweep
from scripts.simulation.simulate_plot import PlotMissing, plot_run, plot_sweep
from scripts.simulation.simulate_setting import Setting

TOLERANCE: Final = 0.15
"""Of what was measured, besides what each figure may be off in any case."""

FAILED: Final = 1
WRONG: Final = 2


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run = parser.add_argument_group("the training")
    run.add_argument("--ranks", type=int, help="data-parallel ranks")
    run.add_argument("--batch", type=int, default=1, help="samples of one rank in a micro batch (1)")
    run.add_argument("--micro-batches", type=int, default=1, help="micro batches of one rank in a step (1)")
    speed = run.add_mutually_exclusive_group()
    speed.add_argument("--step-seconds", type=float, help="what a step takes where its data is there")
    speed.add_argument(
        "--rows-a-second", type=float, help="or: rows trained a second by all ranks, where they are there"
    )
    run.add_argument("--window", type=int, default=0, help="shuffle_window: chunks each rank shuffles among (0)")
    run.add_argument("--workers", type=int, default=2, help="workers of each rank's DataLoader (2)")
    run.add_argument("--checkpoint-steps", type=int, default=0, help="steps between checkpoints; 0: none (0)")
    run.add_argument("--keep-checkpoints", type=int, default=1, help="the cursor stays at the oldest of them (1)")
    stream = parser.add_argument_group("the stream")
    stream.add_argument("--samples-per-chunk", type=int, default=1000, help="rows in a chunk (1000)")
    stream.add_argument("--producer-rate", type=float, help="rows a second that can be published")
    length = stream.add_mutually_exclusive_group()
    length.add_argument("--rows", type=int, help="of the whole stream")
    length.add_argument("--chunks", type=int, help="or: its chunks")
    stream.add_argument("--row-bytes", type=int, default=2000, help="mean size of a row (2000)")
    stream.add_argument("--head-start", type=int, default=0, help="rows produced before the training begins (0)")
    stream.add_argument("--max-ahead", type=parse_amount, metavar="AMOUNT", help="the producer's: 64chunks, 20GB")
    stream.add_argument("--retain", choices=("all", "consumed"), default="all", help="the producer's (all)")
    place = parser.add_argument_group("the filesystem")
    place.add_argument("--latency", type=float, default=1.0, help="ms of one open, stat or read (1)")
    place.add_argument("--visibility", type=float, default=0.0, help="s until another machine sees a file (0)")
    place.add_argument("--ranks-a-node", type=int, default=8, help="ranks on one machine (8)")
    place.add_argument("--woken", action="store_true", help="a local filesystem, which wakes its readers; others poll")
    what = parser.add_argument_group("what comes of it")
    what.add_argument("--json", type=Path, metavar="FILE", help="append all figures, one JSON line for each run")
    what.add_argument("--plot", type=Path, metavar="DIR", help="draw run.png, or sweep.png, into this folder")
    what.add_argument(
        "--sweep",
        nargs="+",
        metavar="NAME=VALUES",
        help="one or two settings with several values each, as 1,2,4 or 100:10000; of "
        + ", ".join(simulate_sweep.NUMBERS),
    )
    real = parser.add_argument_group("real runs")
    real.add_argument("--check-real", action="store_true", help="compare predictions with real runs, about a minute")
    real.add_argument("--check-ranks", type=int, nargs="+", default=(2, 4, 8), help="only those with so many ranks")
    real.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"share by which they may be off ({TOLERANCE})"
    )
    real.add_argument("--dir", type=Path, help="where to put their streams (a temporary folder)")
    return parser


def make_setting(args: argparse.Namespace) -> Setting:
    """Returns what is to be simulated.

    Raises:
        ValueError: something is missing or cannot be; says what.
    """
    step_seconds = args.step_seconds
    if args.rows_a_second is not None and args.ranks is not None and args.rows_a_second > 0:
        step_seconds = args.ranks * args.batch * args.micro_batches / args.rows_a_second
    rows = args.rows if args.chunks is None else args.chunks * args.samples_per_chunk
    for name, value in (
        ("--ranks", args.ranks),
        ("--step-seconds or --rows-a-second, above 0,", step_seconds),
        ("--producer-rate", args.producer_rate),
        ("--rows or --chunks", rows),
    ):
        if value is None:
            raise ValueError(f"{name} is needed")
    return Setting(
        ranks=args.ranks,
        batch=args.batch,
        micro_batches=args.micro_batches,
        step_seconds=step_seconds,
        samples_per_chunk=args.samples_per_chunk,
        window=args.window,
        producer_rate=args.producer_rate,
        rows=rows,
        row_bytes=args.row_bytes,
        head_start=args.head_start,
        max_ahead=args.max_ahead,
        retain=args.retain,
        checkpoint_steps=args.checkpoint_steps,
        keep_checkpoints=args.keep_checkpoints,
        workers=args.workers,
        latency_s=args.latency / 1000,
        visibility_s=args.visibility,
        woken=args.woken,
        ranks_a_node=args.ranks_a_node,
    )


def simulate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulates a run or a sweep, prints it, draws it if asked, and returns the figures of each run.

    Raises:
        ValueError: the arguments cannot be.
        PlotMissing, OSError: it cannot be drawn.
    """
    setting = make_setting(args)
    if args.sweep is None:
        found = simulate_report.outcome(setting)
        print("\n".join(simulate_report.lines(found)))
        if args.plot is not None:
            print(f"drawn: {plot_run(found, args.plot)}")
        return [found.figures()]
    axes = simulate_sweep.parse_axes(args.sweep)
    outcomes = simulate_sweep.sweep(setting, axes)
    print("\n".join(simulate_sweep.lines(axes, outcomes)))
    if args.plot is not None:
        print(f"drawn: {plot_sweep(axes, outcomes, args.plot)}")
    return [one.figures() for one in outcomes]


def check_real(args: argparse.Namespace) -> tuple[int, list[dict[str, Any]]]:
    """Compares predictions with real runs; returns the exit code and the figures.

    Raises:
        ValueError: there are no such cases.
    """
    # Imported here: torch comes with it.
    from scripts.simulation.simulate_check import CASES, check, describe
    from scripts.simulation.simulate_real import RealRunFailed

    cases = [case for case in CASES if case.ranks in args.check_ranks]
    if not cases or not args.tolerance > 0:
        raise ValueError("--check-ranks is some of 2, 4 and 8, --tolerance above 0")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    try:
        found = check(cases, args.dir, args.tolerance, lambda line: print(line, flush=True))
    except RealRunFailed as error:
        print(f"scripts/simulate: a real run failed: {error}", file=sys.stderr)
        return FAILED, []
    off = [one for _, comparisons in found for one in comparisons if not one.fits]
    every = sum(len(comparisons) for _, comparisons in found)
    print(
        f"\n{every - len(off)} of {every} predictions are within {args.tolerance:.0%} and what each may be off besides"
    )
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    figures = [
        {"case": describe(setting), "comparisons": [one._asdict() | {"fits": one.fits} for one in comparisons]}
        for setting, comparisons in found
    ]
    return (FAILED if off else 0), figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything and returns the exit code."""
    args = make_parser().parse_args(arguments)
    code = 0
    try:
        if args.check_real:
            code, figures = check_real(args)
        else:
            figures = simulate(args)
        if args.json is not None:
            with args.json.open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in figures)
    except (ValueError, PlotMissing, OSError) as error:
        print(f"scripts/simulate: {error}", file=sys.stderr)
        return WRONG
    return code


if __name__ == "__main__":
    sys.exit(main())
