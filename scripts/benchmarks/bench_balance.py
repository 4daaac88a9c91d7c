"""How even the steps of ranks are: rows as they come, dealt by cost, and as Megatron's schedulers give them out.

Run by `scripts/bench_balance`. The first table is of single micro batches: ranks wait for each other in each of them
where parameters or experts are spread over them; beside rows that are dealt by cost there are rows that are grouped by
length, as ms-swift's samplers do it (transformers' `get_length_grouped_indices`). The second is what the same steps
take where each micro batch is padded to its longest row, over what they would take with even ranks and nothing padded.
The third is of packs of the same rows, one a micro batch, which all have nearly as many tokens and still cost more the
longer their samples are. The last ones are of global batches of so many rows, in which a rank's micro batches add up;
there Megatron's schedulers work, and there they are compared.

The first figure is what all steps take where the slowest rank sets the pace, over what they would take with even ranks:
the sum of the largest costs over that of the means. The others are the largest cost over the mean in a single step: the
mean of the steps, their 99th percentile, and the worst. All times are processor time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshard.plan import pack_samples
from lazyshard.plan.balance import Balance, Cost, Evenness, evenness, step_costs
from scripts.benchmarks.bench_balance_megatron import cp_balanced, cp_balanced_costs, dp_balanced_costs
from scripts.benchmarks.bench_report import Report, missing_packages, spread, versions_of

ASKED = 1.02
"""The largest cost of a rank over the mean, over all steps and in the mean of the steps."""

MEAN, SIGMA, MOST = 700, 1.0, 8192
"""Of the lengths, in tokens."""

MICRO_BATCHES = (1, 2, 4, 8)
PACK_BUFFER = 10_000
"""Rows that are packed together."""

SQUARES = Cost(0.0, 1.0)
"""Megatron's own estimate."""

Lengths = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]


def make_lengths(rows: int) -> Lengths:
    """Draws lengths."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, rows)
    return np.minimum(drawn.astype(np.int64) + 1, MOST)


def deal(balance: Balance, cost: Cost, lengths: Lengths) -> Lengths:
    """Returns the lengths in the order in which a producer would publish them."""
    pieces = (lengths[first : first + balance.stripe] for first in range(0, len(lengths), balance.stripe))
    dealt: Lengths = np.concatenate([piece[balance.order(cost.of(piece), 0)] for piece in pieces])
    return dealt


def group(lengths: Lengths, ranks: int, rows: int) -> Lengths:
    """Returns the lengths of steps as `--group_by_length` makes them, shape (steps, ranks, rows).

    The rule of transformers' `get_length_grouped_indices`: all rows are put into an order by chance, and pieces of 50
    steps sorted from the longest to the shortest. Rows that follow each other go to the ranks in turn.
    """
    step = ranks * rows
    piece = min(max(1, len(lengths) // (4 * step)), 50) * step
    drawn = np.random.default_rng(0).permutation(lengths)
    grouped = np.concatenate([np.sort(drawn[first : first + piece])[::-1] for first in range(0, len(drawn), piece)])
    found: Lengths = grouped[: len(grouped) // step * step].reshape(-1, rows, ranks).transpose(0, 2, 1)
    return found


def read(lengths: Lengths, ranks: int, samples_per_chunk: int, rows: int) -> Lengths:
    """Returns the lengths of steps as ranks read chunks in order, shape (steps, ranks, rows)."""
    numbers = step_costs(np.arange(len(lengths)), ranks, samples_per_chunk).astype(np.int64)
    whole = len(numbers) // rows * rows
    found: Lengths = lengths[numbers[:whole].reshape(-1, rows, ranks).transpose(0, 2, 1)]
    return found


def padded(steps: Lengths, cost: Cost) -> tuple[float, float]:
    """Returns what share of the tokens is padding, and what steps take over even ranks without any."""
    longest = steps.max(axis=2)
    taken = (cost.of(longest.ravel()).reshape(longest.shape) * steps.shape[2]).max(axis=1).sum()
    even = cost.of(steps.ravel()).sum() / steps.shape[1]
    return 1 - float(steps.sum() / (longest.sum() * steps.shape[2])), float(taken / even)


def row_of(name: str, even: Evenness | None, more: str = "") -> str:
    """Returns a line of a table."""
    assert even is not None
    cells = "".join(f"{value:>9.3f}" for value in (even.overall, even.mean, even.p99, even.worst))
    return f"{name:<64}{even.steps:>7,}{cells}{more:>26}"


def heading(title: str, last: str) -> str:
    """Returns the first line of a table."""
    return f"\n{title:<64}{'steps':>7}{'overall':>9}{'mean':>9}{'p99':>9}{'worst':>9}{last:>26}"


def measure_micro_batches(args: argparse.Namespace, lengths: Lengths, report: Report) -> None:
    """Prints how even micro batches are, and how long it takes to deal a stripe."""
    print(heading(f"micro batches of {args.ranks} ranks", "ms to deal a stripe"))
    cost, ranks, size = Cost(), args.ranks, args.samples_per_chunk
    paddings: dict[int, dict[str, tuple[float, float]]] = {}
    for rows in MICRO_BATCHES:
        even = evenness(step_costs(cost.of(lengths), ranks, size, rows))
        print(row_of(f"{rows} a micro batch, as they come", even))
        balance = Balance(ranks, size, rows)
        taken = []
        for number in range(args.rounds):
            # The permutations of another seed are not kept from the round before.
            balance = Balance(ranks, size, rows, number)
            costs = cost.of(lengths[: balance.stripe])
            start = time.process_time()
            balance.order(costs, 0)
            taken.append((time.process_time() - start) * 1e3)
        order = deal(balance, cost, lengths)
        dealt = evenness(step_costs(cost.of(order), ranks, size, rows))
        print(row_of(f"{rows} a micro batch, dealt by cost", dealt, spread(taken)))
        steps = group(lengths, ranks, rows)
        grouped = evenness(cost.of(steps.ravel()).reshape(steps.shape).sum(axis=2))
        print(row_of(f"{rows} a micro batch, grouped by length", grouped))
        paddings[rows] = {
            "as they come": padded(read(lengths, ranks, size, rows), cost),
            "dealt by cost": padded(read(order, ranks, size, rows), cost),
            "grouped by length": padded(steps, cost),
        }
        assert even is not None
        assert dealt is not None
        assert grouped is not None
        report.results[f"micro batches of {rows}"] = {
            "before": even.values(),
            "dealt": dealt.values(),
            "grouped": grouped.values(),
            "padded": paddings[rows],
            "ms": taken,
        }
        report.judge(f"micro batches of {rows}, overall", dealt.overall, ASKED, "times")
        report.judge(f"micro batches of {rows}, in the mean", dealt.mean, ASKED, "times")
    print(f"\n{'each micro batch padded to its longest row':<64}{'padding':>9}{'takes':>9}")
    for rows, orders in paddings.items():
        for name, (share, takes) in orders.items():
            print(f"{f'{rows} a micro batch, {name}':<64}{share:>9.1%}{takes:>9.3f}")


def measure_packs(args: argparse.Namespace, lengths: Lengths, report: Report) -> None:
    """Prints how even micro batches of one pack are, where packs come as they do and dealt by their cost."""
    ranks, size = args.ranks, max(1, args.samples_per_chunk // 10)
    buffers = (lengths[first : first + PACK_BUFFER] for first in range(0, len(lengths), PACK_BUFFER))
    packs = [buffer[pack] for buffer in buffers for pack in pack_samples(buffer, MOST)]
    tokens = np.array([pack.sum() for pack in packs])
    squares = np.array([(pack * pack).sum() for pack in packs], np.float64)
    balance = Balance(ranks, size)
    for cost in (Cost(), SQUARES):
        name = f"{cost.per_token:g} * tokens + {cost.per_token_squared:g} * tokens^2"
        print(heading(f"{len(packs):,} packs of {MOST:,}, cost {name}", ""))
        costs, results = cost.of_packs(tokens, squares), {}
        for title, by in (
            ("as they come", None),
            ("by all their tokens", cost.of(tokens)),
            ("by their samples", costs),
        ):
            order = np.arange(len(packs)) if by is None else order_of(balance, by)
            even = evenness(step_costs(costs[order], ranks, size, ended=True))
            assert even is not None
            print(row_of(title if by is None else f"dealt {title}", even))
            results[title] = even.values()
        report.results[f"packs, {name}"] = results


def order_of(balance: Balance, costs: Costs) -> Lengths:
    """Returns the order in which a producer would publish rows of these costs."""
    firsts = range(0, len(costs), balance.stripe)
    found: Lengths = np.concatenate(
        [first + balance.order(costs[first : first + balance.stripe], 0) for first in firsts]
    )
    return found


def measure_global_batches(args: argparse.Namespace, rows: int, lengths: Lengths, cost: Cost, report: Report) -> None:
    """Prints how even global batches of so many rows are, by lazyshard and by Megatron, and what that takes."""
    ranks, size = args.ranks, args.samples_per_chunk
    turns = rows // ranks
    name = f"{cost.per_token:g} * tokens + {cost.per_token_squared:g} * tokens^2"
    print(heading(f"global batches of {rows} rows, cost {name}", "us a row"))
    results: dict[str, Any] = {}

    def show(title: str, costs: Costs, taken: list[float]) -> None:
        even = evenness(costs)
        assert even is not None
        results[title] = {"even": even.values(), "us": taken}
        print(row_of(title, even, spread(taken, digits=2) if taken else ""))

    def added(costs: Costs) -> Costs:
        whole = len(costs) // turns * turns
        sums: Costs = costs[:whole].reshape(-1, turns, ranks).sum(axis=1)
        return sums

    show("as they come", added(step_costs(cost.of(lengths), ranks, size)), [])
    count = min(args.global_batches, len(lengths) // rows)
    batches = lengths[: count * rows].reshape(-1, rows).tolist()
    for room in (MOST, MOST // 4):
        scheduler = cp_balanced(ranks, room)
        if scheduler is not None:
            shared = "" if room == MOST else f", rows above {room:,} shared"
            costs, taken = timed(functools.partial(cp_balanced_costs, scheduler, cost=cost.of), batches)
            # Ranks meet at the end of each group.
            show(f"Megatron's BalancedCPScheduler{shared}", np.concatenate(costs), taken)
    costs, taken = timed(lambda one: dp_balanced_costs(ranks, one, MOST, cost.of), batches)
    show(f"DpBalancedScheduler's rule, packs of {MOST:,}", np.stack([one.sum(axis=0) for one in costs]), taken)
    for micro in MICRO_BATCHES:
        if turns % micro:
            continue
        balance = Balance(ranks, size, micro)
        start = time.process_time()
        dealt = deal(balance, cost, lengths)
        taken = [(time.process_time() - start) / len(lengths) * 1e6]
        show(f"dealt by cost, micro batches of {micro}", added(step_costs(cost.of(dealt), ranks, size)), taken)
    report.results[f"global batches of {rows}, {name}"] = results


def timed(work: Callable[[list[int]], Costs], batches: list[list[int]]) -> tuple[list[Costs], list[float]]:
    """Returns what is made of each global batch, and the processor time in microseconds a row."""
    found, taken = [], []
    for batch in batches:
        start = time.process_time()
        found.append(work(batch))
        taken.append((time.process_time() - start) / len(batch) * 1e6)
    return found, taken


def main() -> int:
    """Measures and reports; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--samples-per-chunk", type=int, default=1000, help="a multiple of 8")
    parser.add_argument("--stripes", type=int, default=4, help="of so many chunks as there are ranks")
    parser.add_argument("--global-batch", type=int, nargs="+", help="rows of one (8 and 64 for each rank)")
    parser.add_argument(
        "--global-batches", type=int, default=20, help="how many Megatron's schedulers get, at the most"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=Path, default=None, help="a file with one a line, in the place of drawn ones")
    parser.add_argument("--json", type=Path, default=None, help="append the results as one JSON line to this file")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 where dealt steps are not under {ASKED}")
    args = parser.parse_args()
    sizes = args.global_batch or [8 * args.ranks, 64 * args.ranks]
    if min(args.ranks, args.stripes, args.global_batches, args.rounds) < 1 or args.samples_per_chunk < 1:
        parser.error("all numbers are at least 1")
    rows = args.ranks * args.samples_per_chunk * args.stripes
    if args.samples_per_chunk % max(MICRO_BATCHES) or any(size % args.ranks or not 0 < size <= rows for size in sizes):
        parser.error("--samples-per-chunk is a multiple of 8, --global-batch one of --ranks, and no more than all rows")
    if args.lengths is None:
        lengths = make_lengths(rows)
    else:
        lengths = np.array([int(line) for line in args.lengths.read_text().split()], np.int64)
        if len(lengths) < rows:
            parser.error(f"--lengths: {len(lengths):,} are not the {rows:,} of --stripes {args.stripes}")
        lengths = lengths[:rows]
    names = [name for name in ("numpy", "megatron-core") if not missing_packages([name])]
    report = Report(versions_of(names))
    median = statistics.median(lengths.tolist())
    print(f"{len(lengths):,} lengths, mean {lengths.mean():.0f}, median {median:.0f}, largest {lengths.max():,}")
    measure_micro_batches(args, lengths, report)
    measure_packs(args, lengths, report)
    for cost in (Cost(), SQUARES):
        for size in sizes:
            measure_global_batches(args, size, lengths, cost, report)
    return report.conclude(args)


if __name__ == "__main__":
    sys.exit(main())
