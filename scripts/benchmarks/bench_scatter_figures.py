"""What the ranks of `scripts/bench_scatter` found, and what it comes to: each sample once, milliseconds a step."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DISPATCHER: Final = "DataLoaderDispatcher"
OURS: Final = "LazyShardedDataset"
VARIANTS: Final = (DISPATCHER, OURS)


@dataclass(frozen=True)
class Data:
    """What is read.

    Attributes:
        name: A or B.
        directory: of the stream.
        batch: samples of a rank in a step.
        steps: of one pass, those to warm up included. R ranks draw the first R * batch * steps samples of the stream.
    """

    name: str
    directory: Path
    batch: int
    steps: int


@dataclass(frozen=True)
class Pass:
    """What one rank found while it took all of its batches once.

    Attributes:
        begun: when each step began, in milliseconds of the machine's steady clock.
        ms: to get each step's batch, by the clock.
        processor_ms: of all threads of the process meanwhile.
        loading_ms: of `ms`, until the batches were read, parsed and collated in this process.
        ids: of the samples it got, in order.
    """

    begun: list[float]
    ms: list[float]
    processor_ms: list[float]
    loading_ms: list[float]
    ids: list[int]


Found = dict[tuple[int, str, int, str], list[Pass]]
"""The passes of all ranks by round, name of the data, number of ranks, and variant."""


@dataclass(frozen=True)
class Figures:
    """Of one round: milliseconds a step.

    Attributes:
        rank: until a rank has its batch; median over ranks and steps.
        slowest: until the last rank has its batch; median over steps.
        whole: from when the first rank begins until the last has its batch; median over steps.
        all_processor: of all processes; median over steps.
        busiest_processor: of the process that works most; median over steps.
        busiest_processor_mean: the same, mean over steps: with the reading of blocks ahead, and what disturbs.
        loading: of `rank`, on rank 0: until its loader has the batches that it hands out.
    """

    rank: float
    slowest: float
    whole: float
    all_processor: float
    busiest_processor: float
    busiest_processor_mean: float
    loading: float


AllFigures = dict[tuple[str, int, str], list[Figures]]
"""Those of every round, by name of the data, number of ranks, and variant."""


def check_every_sample_once(case: str, data: Data, ranks: int, passes: list[Pass]) -> None:
    """Makes sure that the ranks have got each sample of the pass once, and as many as each other.

    Raises:
        SystemExit: they have not.
    """
    total = ranks * data.batch * data.steps
    uneven = {len(one.ids) for one in passes} != {total // ranks} or len(passes) != ranks
    ids = sorted(number for one in passes for number in one.ids)
    if uneven or ids != list(range(total)):
        missing, repeated = total - len(set(ids) & set(range(total))), len(ids) - len(set(ids))
        raise SystemExit(
            f"scripts/bench_scatter: {case}: expected each of {total} samples once over {ranks} ranks; "
            f"{missing} are missing, {repeated} repeated, the ranks got {[len(one.ids) for one in passes]}"
        )


def figures(passes: list[Pass], steps: int) -> Figures:
    """Returns what the last `steps` steps of the ranks' passes come to; rank 0 is the first."""
    ms = list(zip(*(one.ms[-steps:] for one in passes), strict=True))
    begun = list(zip(*(one.begun[-steps:] for one in passes), strict=True))
    processor = [one.processor_ms[-steps:] for one in passes]
    return Figures(
        rank=statistics.median([value for step in ms for value in step]),
        slowest=statistics.median([max(step) for step in ms]),
        whole=statistics.median(
            [max(b + a for b, a in zip(*one, strict=True)) - min(one[0]) for one in zip(begun, ms, strict=True)]
        ),
        all_processor=statistics.median([sum(step) for step in zip(*processor, strict=True)]),
        busiest_processor=max(map(statistics.median, processor)),
        busiest_processor_mean=max(map(statistics.fmean, processor)),
        loading=statistics.median(passes[0].loading_ms[-steps:]),
    )


def results(found: Found, data: list[Data], ranks: list[int], steps: int) -> AllFigures:
    """Returns the figures of all rounds by name of the data, number of ranks, and variant.

    Raises:
        SystemExit: some ranks have not got each sample once.
    """
    by_name = {one.name: one for one in data}
    rounds: AllFigures = {(name, some, variant): [] for name in by_name for some in ranks for variant in VARIANTS}
    for (number, name, some, variant), passes in found.items():
        case = f"round {number}, data {name}, {some} ranks, {variant}"
        check_every_sample_once(case, by_name[name], some, passes)
        rounds[name, some, variant].append(figures(passes, steps))
    return rounds


def by_ranks(rounds: AllFigures, name: str, variant: str, figure: str) -> dict[int, list[float]]:
    """Returns one of the figures of every round by number of ranks."""
    return {
        ranks: [getattr(one, figure) for one in some]
        for (data, ranks, what), some in rounds.items()
        if (data, what) == (name, variant)
    }
