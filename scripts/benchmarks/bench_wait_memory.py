"""Memory of a rank and its DataLoader workers after streams of few and many chunks, of short and long rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazyshard import ChunkWriter
from scripts.benchmarks.bench_wait_ranks import Rank, close_all

ROWS: Final = 2
"""Of a chunk, so that the largest stream is 2 GB."""

BATCH: Final = 2
WORKERS: Final = 2


@dataclass(frozen=True)
class Case:
    """A stream.

    Attributes:
        chunks: how many it has.
        text: bytes of the text of a row.
    """

    chunks: int
    text: int

    def make(self, place: Path) -> Path:
        """Writes it, if it is not there yet, and returns its directory."""
        directory = place / f"memory_{self.chunks}_{self.text}"
        if not directory.exists():
            row = {"text": "x" * self.text}
            with ChunkWriter(directory, ROWS) as writer:
                for number in range(self.chunks * ROWS):
                    writer.write(row | {"id": number})
        return directory


CASES: Final = tuple(Case(chunks, text) for text in (2_000, 100_000, 1_000_000) for chunks in (10, 100, 1000))


def measure_memory(place: Path, case: Case) -> dict[str, Any]:
    """Reads the stream in a fresh process; returns MB: (share, anonymous) of the rank and of the largest worker.

    Raises:
        SystemExit: it failed, or other samples came than should.
    """
    settings = {"directory": str(case.make(place)), "batch": BATCH, "workers": WORKERS, "text": case.text}
    rank = Rank("memory", settings)
    with close_all([rank]):
        found = rank.line()
    if found["workers"] < 1:
        raise SystemExit(f"{case}: no worker was there to be looked at")
    return found


def growth(medians: dict[Case, float]) -> dict[int, float]:
    """Returns, for each length of rows, by how many MB the stream of most chunks is above that of fewest."""
    found = {}
    for text in sorted({case.text for case in medians}):
        of_text = {case.chunks: value for case, value in medians.items() if case.text == text}
        found[text] = of_text[max(of_text)] - of_text[min(of_text)]
    return found


def growth_by_rows(medians: dict[Case, float]) -> float:
    """Returns by how many MB the streams of the longest rows are above those of the shortest; the largest of all."""
    texts = [case.text for case in medians]
    longest = {case.chunks: value for case, value in medians.items() if case.text == max(texts)}
    shortest = {case.chunks: value for case, value in medians.items() if case.text == min(texts)}
    return max(longest[chunks] - shortest[chunks] for chunks in longest.keys() & shortest.keys())
