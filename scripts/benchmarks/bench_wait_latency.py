"""From the last row of a chunk to the first sample of a rank that waits for it; every rank is a process.

Writer and ranks read CLOCK_MONOTONIC, which is one clock for the whole machine. Where a stripe has a chunk for each of
several ranks, all of them may go on once its last chunk is there, so time counts from the last row of the stripe.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazyshard import ChunkWriter
from scripts.benchmarks.bench_producer_latency import PAUSE_S, WARM_UP
from scripts.benchmarks.bench_wait_ranks import Rank, close_all

PER_CHUNK: Final = 8
POLLING_PAUSE_S: Final = 0.5
"""Pause before the last row where ranks poll: long enough for a poll to be more than the shortest one."""


@dataclass(frozen=True)
class Case:
    """Ranks that wait, and what for.

    Attributes:
        ranks: how many.
        woken: by the local filesystem; otherwise they poll, as where another machine writes.
    """

    ranks: int
    woken: bool

    @property
    def name(self) -> str:
        """What it is called in the table."""
        how = "woken by the local filesystem" if self.woken else "polling, as where another machine writes"
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {how}"

    @property
    def pause_s(self) -> float:
        """Seconds before the last row of a stripe, so that the ranks have come to wait."""
        return PAUSE_S if self.woken else POLLING_PAUSE_S


CASES: Final = tuple(Case(ranks, woken) for woken in (True, False) for ranks in (1, 8))


def measure_latency(place: Path, case: Case, stripes: int, warm_up: int = WARM_UP) -> list[float]:
    """Returns milliseconds, one for each stripe and rank, of stripes behind those that warm up.

    Raises:
        SystemExit: a rank failed, or read another sample than it should.
    """
    directory = place / f"latency_{case.ranks}_{case.woken}_{time.monotonic_ns()}"
    row = {"text": "x" * 2000}
    found = []
    number = 0
    with ChunkWriter(directory, PER_CHUNK) as writer:
        settings = {
            "directory": str(directory),
            "ranks": case.ranks,
            "per_chunk": PER_CHUNK,
            "stripes": warm_up + stripes,
            "woken": case.woken,
        }
        ranks = [Rank("latency", settings | {"rank": rank}) for rank in range(case.ranks)]
        with close_all(ranks):
            for process in ranks:
                process.line()
            for stripe in range(warm_up + stripes):
                for _ in range(case.ranks * PER_CHUNK - 1):
                    writer.write(row | {"id": number})
                    number += 1
                time.sleep(case.pause_s)
                given = time.monotonic()
                writer.write(row | {"id": number})
                number += 1
                for rank, process in enumerate(ranks):
                    answer = process.line()
                    expected = (stripe * case.ranks + rank) * PER_CHUNK
                    if answer["id"] != expected:
                        raise SystemExit(f"{case.name}: rank {rank} read sample {answer['id']} instead of {expected}")
                    if answer["at"] < given:
                        raise SystemExit(f"{case.name}: rank {rank} had sample {expected} before it was there")
                    if stripe >= warm_up:
                        found.append((answer["at"] - given) * 1000)
    return found


def line_of(values: list[float]) -> str:
    """Returns median, 95th of a hundred, and highest.

    >>> line_of([4.0, 1.0, 2.0, 3.0, 5.0])
    '       3.0       5.0       5.0'
    """
    ordered = sorted(values)
    shown = statistics.median(ordered), ordered[len(ordered) * 95 // 100], ordered[-1]
    return "".join(f"{value:>10.1f}" for value in shown)
