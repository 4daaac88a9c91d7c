"""The demo's final report, from the samples that each rank trained.

`check` only compares lists of ids, independently of lazyshard.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.demonstration.demo_settings import BATCH, Settings
from scripts.demonstration.demo_steps import StepFile


class RankFindings(NamedTuple):
    """What one rank has trained.

    Attributes:
        samples: how many.
        own: from how many chunks k with k % ranks == rank, of whole stripes (a chunk for each rank).
        foreign: from which other chunks of whole stripes.
        shared: from how many chunks after the last whole stripe, whose rows are dealt to the ranks one by one.
    """

    samples: int
    own: int
    foreign: list[int]
    shared: int


class Times(NamedTuple):
    """When production began and when the stream was seen to have ended, on the clock of the records."""

    begun: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The result of comparing the ids.

    Attributes:
        untrained: samples of the source that no rank trained, in order.
        missing: how many of them exceed the allowed leftover.
        repeated: samples trained more than once.
        unknown: trained, but not in the source.
        unlike_source: whether the stream's ids or their order differ from the source.
        uneven: whether the ranks trained different numbers of samples.
        ranks: by rank.
    """

    untrained: list[int]
    missing: int
    repeated: list[int]
    unknown: list[int]
    unlike_source: bool
    uneven: bool
    ranks: list[RankFindings]

    @property
    def exactly_once(self) -> bool:
        """Whether every sample but the leftover was trained once, and nothing else."""
        return not (self.missing or self.repeated or self.unknown or self.unlike_source or self.uneven)

    @property
    def own_chunks(self) -> bool:
        """Whether each rank read its own chunks only."""
        return not any(rank.foreign for rank in self.ranks)


def check(
    source: Sequence[int],
    chunks: Sequence[Sequence[int]],
    trained: Sequence[Sequence[int]],
    *,
    samples_per_chunk: int,
    step_samples: int,
) -> Findings:
    """Compares the ids of the source, of the stream's chunks, and of what each rank trained."""
    times = Counter(id_ for ids in trained for id_ in ids)
    untrained = [id_ for id_ in source if id_ not in times]
    known = set(source)
    chunk_of = {id_: number for number, ids in enumerate(chunks) for id_ in ids}
    whole = len(source) // (samples_per_chunk * len(trained)) * len(trained)
    ranks = []
    for rank, ids in enumerate(trained):
        read = {chunk_of[id_] for id_ in ids if id_ in chunk_of}
        own = {number for number in read if number < whole and number % len(trained) == rank}
        shared = {number for number in read if number >= whole}
        ranks.append(RankFindings(len(ids), len(own), sorted(read - own - shared), len(shared)))
    return Findings(
        untrained=untrained,
        missing=max(0, len(untrained) - len(source) % step_samples),
        repeated=sorted(id_ for id_, often in times.items() if often > 1),
        unknown=sorted(times.keys() - known),
        unlike_source=[id_ for ids in chunks for id_ in ids] != list(source),
        uneven=len({len(ids) for ids in trained}) > 1,
        ranks=ranks,
    )


def ends(losses: Sequence[float]) -> tuple[float, float, int]:
    """Returns the means of the first and the last losses, and their number: at most 20, never overlapping."""
    steps = max(1, min(20, len(losses) // 2))
    return statistics.fmean(losses[:steps]), statistics.fmean(losses[-steps:]), steps


def read_ids(path: Path) -> list[int]:
    """Returns the ids of the rows of a JSON-lines file."""
    with path.open("rb") as file:
        return [json.loads(line)["id"] for line in file]


def count(number: int, noun: str, plural: str = "s") -> str:
    """Returns a number with its noun.

    >>> count(1, "chunk"), count(2000, "process", "es")
    ('1 chunk', '2,000 processes')
    """
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def ranges(numbers: Sequence[int]) -> str:
    """Returns increasing numbers as ranges.

    >>> ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def report(console: Console, settings: Settings, ranks: Sequence[StepFile], times: Times) -> bool:
    """Prints the report and returns whether all checks passed.

    Args:
        console: where to print.
        settings: of the run.
        ranks: the records of all ranks, complete.
        times: of production.
    """
    source = read_ids(settings.source)
    chunks = [read_ids(path) for path in sorted(settings.stream.glob("chunk_*.jsonl"), key=lambda p: (len(p.name), p))]
    found = check(
        source,
        chunks,
        [[id_ for step in rank.steps for id_ in step.ids] for rank in ranks],
        samples_per_chunk=settings.samples_per_chunk,
        step_samples=settings.step_samples,
    )
    first, last, steps = ends([step.loss for step in ranks[0].steps])
    console.print()
    for name, text in _facts(settings, found, ranks, times, (len(source), len(chunks))):
        console.print(f"  {name:<12} {text}")
    console.print()
    console.print(_rank_table(found, ranks))
    console.print()
    told = {-1 if rank.finish is None or rank.finish.leftover is None else rank.finish.leftover for rank in ranks}
    wrong = f"{found.missing} missing, {len(found.repeated)} repeated, {len(found.unknown)} foreign"
    checks = [
        (found.exactly_once, "exactly once", f"ids trained against ids of the source: {wrong}"),
        (
            told == {len(found.untrained)},
            "left over",
            f"{len(found.untrained)} not trained, the ranks' data sets report {ranges(sorted(told))}",
        ),
        (found.own_chunks, "own chunks", f"chunk k of a whole stripe was read by rank k % {settings.ranks} alone"),
        (last < first, "loss fell", f"{first:.2f} to {last:.2f} (means of the first and last {steps} steps)"),
    ]
    for held, name, text in checks:
        mark = ("  ok    ", "bold green") if held else ("  FAILED", "bold red")
        console.print(Text.assemble(mark, f" {name:<16}{text}"))
    for text in _wrong(found):
        console.print(f"           {text}")
    return all(held for held, _, _ in checks)


def _facts(
    settings: Settings, found: Findings, ranks: Sequence[StepFile], times: Times, produced: tuple[int, int]
) -> Iterator[tuple[str, str]]:
    trained = sum(rank.samples for rank in found.ranks)
    samples, chunks = produced
    steps = len(ranks[0].steps)
    first = min((rank.steps[0] for rank in ranks), key=lambda step: step.at)
    last = max(rank.steps[-1].at for rank in ranks)
    yield "produced", f"{samples:,} samples in {count(chunks, 'chunk')}, in {times.ended - times.begun:.1f} s"
    yield "trained", f"{trained:,}, in {steps:,} steps of {settings.ranks} x {BATCH}"
    if found.untrained and not found.missing:
        yield "left over", f"{len(found.untrained)}, fewer than a step takes: {ranges(found.untrained)}"
    yield (
        "first step",
        f"after {first.at - times.begun:.1f} s, with {first.published:,} of {samples:,} samples published "
        f"({first.published / samples:.0%})",
    )
    yield "last step", f"{abs(last - times.ended):.1f} s {'after' if last > times.ended else 'before'} the stream ended"


def _rank_table(found: Findings, ranks: Sequence[StepFile]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 3), pad_edge=True)
    for heading in ("rank", "samples", "chunks: own", "others'", "shared", "waited for data", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (rank, record) in enumerate(zip(found.ranks, ranks, strict=True)):
        took = record.steps[-1].at - record.steps[0].at + record.steps[0].waited_s
        waited = sum(step.waited_s for step in record.steps)
        table.add_row(
            str(number),
            f"{rank.samples:,}",
            str(rank.own),
            str(len(rank.foreign)),
            str(rank.shared),
            f"{waited:.1f} of {took:.1f} s",
            f"{rank.samples / took:,.0f}",
        )
    return table


def _wrong(found: Findings) -> Iterator[str]:
    """Names what is wrong, a few of each kind."""
    kinds = {
        "not trained": found.untrained if found.missing else [],
        "repeated": found.repeated,
        "foreign": found.unknown,
        "chunks of other ranks": sorted(number for rank in found.ranks for number in rank.foreign),
    }
    for kind, numbers in kinds.items():
        if numbers:
            yield f"{kind}: {ranges(numbers[:20])}{', ...' if len(numbers) > 20 else ''}"
    if found.unlike_source:
        yield "the stream's ids are not those of the source, in its order"
    if found.uneven:
        yield "the ranks trained different numbers of samples"
