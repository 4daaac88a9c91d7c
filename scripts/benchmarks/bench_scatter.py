"""How long a rank waits for a step's batch where rank 0 scatters, and where each rank reads its own chunks.

Run by `scripts/bench_scatter`. ms-swift's --streaming reads everything on rank 0 and scatters it (its
`DataLoaderDispatcher`, used as it is); its base loader goes here through the lines of the chunk files, with
`orjson.loads` and nothing else. Against it, `LazyShardedDataset` in a plain DataLoader on each rank, over the same
files. Neither has workers or an encoder, both collate to the list of the rows.

The ranks are processes that begin each step together. By the clock: how long it takes each rank to get its batch, over
all ranks or of the slowest rank; and from the moment when the first of them begins until the last one has its batch,
with what it takes them to come out of the barrier where they share cores. By the processor: of all processes, and of
the busiest one. All are medians over steps; of data A, both read a block ahead every 8 to 32 steps, which is in
the means alone (--json). Both take turns in the same processes, a ratio is taken within a round, and medians over the
rounds are shown with the lowest and the highest. Every rank's samples must make up each sample once.

The ranks share this machine's cores. With a core for each, a step takes as long as its busiest process works, and that
is what the extrapolation goes by. It leaves out the network, which rank 0's batches have to cross in a real cluster.
"""

from __future__ import annotations

import argparse
import base64
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lazyshard import ChunkWriter
from scripts.benchmarks.bench_read import make_stream
from scripts.benchmarks.bench_report import Report, folder, missing_packages, spread, versions_of
from scripts.benchmarks.bench_scatter_figures import DISPATCHER, OURS, VARIANTS, AllFigures, Data, by_ranks, results
from scripts.benchmarks.bench_scatter_model import each_round, failures, fit_constant, fit_line, misfit

CHUNKS_A_RANK: Final = 4
"""Whole chunks that each rank reads in a pass, so that no stripe is dealt row by row."""

WARM_UP: Final = 4
"""Steps at the beginning of a pass that are not counted, at the least."""

BATCHES: Final = {"A": 8, "B": 1}
"""Samples of a rank in a step."""

LARGE_BYTES: Final = 750_000
"""Of a row of data B, before base64 makes a third more of it."""

LARGER: Final = (64, 1024)
"""Numbers of ranks to extrapolate to."""

MODEL: Final = """
the model: with a core for each rank, a step takes as long as its busiest process works.
  rank 0 scatters: it reads, parses, pickles and sends what each of R ranks gets, one after the other:
                   t(R) = fixed + each * R
  each reads own:  t(R) = own, whatever R is
Fitted by least squares to the processor time of the busiest process; no network is in it. Ranks that share a core leave
each other cold caches, which is in both; the last line is what ours would come to if that grew on."""


def make_data(name: str, place: Path, ranks: int, steps: int) -> Data:
    """Writes the stream that so many ranks read in one pass, and fewer read the beginning of.

    Args:
        name: A, chat rows of about 2 KB, or B, rows of about 1 MB.
        place: where to put it.
        ranks: the most.
        steps: to be counted.
    """
    batch = BATCHES[name]
    chunks = -(-(steps + WARM_UP) // CHUNKS_A_RANK)
    data = Data(name, place / name, batch, chunks * CHUNKS_A_RANK)
    rows = ranks * batch * data.steps
    with ChunkWriter(data.directory, batch * chunks) as writer:
        if name == "A":
            make_stream(place / "prose", rows, "prose")
            for path in sorted((place / "prose").glob("chunk_*.jsonl")):
                with path.open("rb") as file:
                    for line in file:
                        writer.write(line)
        else:
            choose = random.Random(0)
            for number in range(rows):
                audio = base64.b64encode(choose.randbytes(LARGE_BYTES))
                writer.write({"id": number, "audio": audio.decode("ascii")})
    return data


def mean_bytes(data: Data, ranks: int) -> float:
    """Returns the mean size of the rows that so many ranks read in a pass."""
    size = sum(path.stat().st_size for path in data.directory.glob("chunk_*.jsonl"))
    return size / (ranks * data.batch * data.steps)


def report_measured(rounds: AllFigures, data: Data) -> None:
    """Prints what was measured on one kind of data."""
    clocks = "a rank", "the slowest rank", "first start to last end"
    print(
        f"{'ranks':>5}  {'ms a step':22}" + "".join(f"{name:>25}" for name in (*clocks, "slowest, ratio to ours")),
        end="",
    )
    print(f"{'processor, all':>16}{'busiest':>10}")
    for (name, ranks, variant), some in rounds.items():
        if name != data.name:
            continue
        ours = rounds[name, ranks, OURS]
        ratio = "" if variant == OURS else spread([a.slowest / b.slowest for a, b in zip(some, ours, strict=True)])
        clock = "".join(
            f"{spread([getattr(one, key) for one in some], digits=2):>25}" for key in ("rank", "slowest", "whole")
        )
        all_processor, busiest = (
            statistics.median([getattr(one, key) for one in some]) for key in ("all_processor", "busiest_processor")
        )
        print(f"{ranks:>5}  {variant:22}{clock}{ratio:>25}{all_processor:>16.2f}{busiest:>10.2f}")
    loading = by_ranks(rounds, data.name, DISPATCHER, "loading")
    shares = [f"{spread(ms, digits=2)} with {ranks}" for ranks, ms in loading.items()]
    print(f"of the dispatcher's step rank 0 loads for {', '.join(shares)}; the rest is pickling, sending and waiting")


def report_model(rounds: AllFigures, name: str) -> dict[str, Any]:
    """Prints what the model makes of the busiest process, round by round, and returns it."""
    print(f"data {name}, ms a step")
    fitted: dict[str, Any] = {}
    for label, variant, fit in (
        (DISPATCHER, DISPATCHER, fit_line),
        (OURS, OURS, fit_constant),
        ("the same, if it grew", OURS, fit_line),
    ):
        measured = each_round(by_ranks(rounds, name, variant, "busiest_processor"))
        lines = [fit(ms) for ms in measured]
        formula = spread([line.fixed for line in lines], digits=3)
        if fit is fit_line:
            formula += f" + {spread([line.each for line in lines], digits=3)} * R"
        off = spread([100 * misfit(line, ms) for line, ms in zip(lines, measured, strict=True)], digits=0)
        print(f"  {label:22}t(R) = {formula}; up to {off} % off")
        larger = {ranks: [line.at(ranks) for line in lines] for ranks in LARGER}
        print(f"  {'':22}" + ", ".join(f"{spread(ms, digits=2)} with {ranks:,}" for ranks, ms in larger.items()))
        fitted[label] = {"lines": [asdict(line) for line in lines], "extrapolated_ms": larger}
    return fitted


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_scatter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks, two or more of them")
    parser.add_argument("--steps", type=int, default=96, help="of a pass, those to warm up not counted")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each variant, one to warm up not counted")
    parser.add_argument("--dir", type=folder, default=None, help="where to put the streams (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where ours is not faster, or grows faster")
    args = parser.parse_args()
    ranks = sorted(set(args.ranks))
    if len(ranks) < 2 or ranks[0] < 2 or args.steps < 1 or args.rounds < 1:
        parser.error("--ranks are two different numbers or more, each at least 2; --steps and --rounds at least 1")
    if args.dir and not args.dir.is_dir():
        parser.error(f"--dir {args.dir} is no directory; make it first")
    missing = missing_packages(("ms-swift", "transformers", "torch"))
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; scripts/environment full installs them")
    from scripts.benchmarks.bench_scatter_ranks import run_ranks

    report = Report(versions_of(("ms-swift", "torch", "orjson")))
    cores = len(os.sched_getaffinity(0))
    line = report.results
    line["cores"] = cores
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        data = [make_data(name, Path(place), ranks[-1], args.steps) for name in BATCHES]
        sizes = {one.name: mean_bytes(one, ranks[-1]) for one in data}
        try:
            found = run_ranks(Path(place), data, ranks, args.rounds)
        except (ProcessExitedException, ProcessRaisedException) as error:
            print(f"scripts/bench_scatter: rank {error.error_index} failed: {error}", file=sys.stderr)
            return 1
    rounds = results(found, data, ranks, args.steps)
    for one in data:
        name = one.name
        counted = f"{args.steps} steps counted of {one.steps}, {args.rounds} rounds, on {cores} cores"
        print(f"\ndata {name}: rows of {sizes[name]:,.0f} bytes in the mean, {one.batch} a rank and step; {counted}")
        report_measured(rounds, one)
        line[name] = {"measured": []}
        for (of, some, variant), all_rounds in rounds.items():
            if of == name:
                facts = {"ranks": some, "variant": variant, "rounds": [asdict(figures) for figures in all_rounds]}
                line[name]["measured"].append(facts)
        report.worse += failures(name, *(by_ranks(rounds, name, variant, "slowest") for variant in VARIANTS))
    print(MODEL)
    for one in data:
        line[one.name]["model"] = report_model(rounds, one.name)
    return report.conclude(args, "every sample once over the ranks, in each pass; ")


if __name__ == "__main__":
    sys.exit(main())
