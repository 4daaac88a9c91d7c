"""What `scripts/bench_loaders` reads and how: the data, the cases, and what one process is told.

Imports nothing but the standard library, since it is used in the environments of other loaders too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

BATCH: Final = 8
"""Rows of a batch."""

WORKERS: Final = 2
"""Worker processes, in the cases that have any."""

WINDOW_CHUNKS: Final = 4
"""Chunks whose rows are shuffled together; what shuffles with a buffer has one of as many rows."""

RANDOM_ROWS: Final = {"A": 20_000, "B": 400}
"""At most so many rows are drawn at random: some loaders read a few hundred a second."""

CASES: Final = {
    "order": "one process, in order",
    "shuffled": "one process, shuffled",
    "random": "one process, ds[i] at random",
    "loader": f"{WORKERS} workers, in order",
    "loader-shuffled": f"{WORKERS} workers, shuffled",
}
"""The cases by their names on the command line."""

IN_WORKERS: Final = ("loader", "loader-shuffled")
"""Those of them in which worker processes read."""

COLUMNS: Final = {"A": ("id", "messages"), "B": ("id", "text", "image")}
"""The fields of the rows of each data set; `image` is base64 text."""

Row = dict[str, Any]

Opened = Callable[[], Iterable[Any]]
"""Constructs a loader and returns its rows, or its batches where `Settings.batched`; only this is measured."""


@dataclass(frozen=True)
class Settings:
    """What one process is told.

    Attributes:
        data: directory of the stream with the rows.
        native: directory of the rows in the format of this loader; for a conversion, one that is not there yet.
        offsets: file that says where each row begins, u64 of shape (chunks, rows of a chunk + 1).
        which: A or B.
        case: one of `CASES`.
        rows: how many there are; row i has the id i.
        samples_per_chunk: rows of each chunk file.
    """

    data: str
    native: str
    offsets: str
    which: str
    case: str
    rows: int
    samples_per_chunk: int

    @property
    def shuffled(self) -> bool:
        """Whether the rows are to come in another order than written."""
        return self.case in ("shuffled", "loader-shuffled")

    @property
    def in_workers(self) -> bool:
        """Whether worker processes read."""
        return self.case in IN_WORKERS

    @property
    def window_rows(self) -> int:
        """Rows that are shuffled together."""
        return min(self.rows, WINDOW_CHUNKS * self.samples_per_chunk)

    def drawn(self) -> list[int]:
        """Returns the ids that are read: all, or those that are drawn at random, in this order."""
        if self.case != "random":
            return list(range(self.rows))
        return random.Random(0).sample(range(self.rows), min(self.rows, RANDOM_ROWS[self.which]))

    @property
    def probe(self) -> int:
        """The id of the row that is compared with the source as a whole."""
        ids = self.drawn()
        return ids[len(ids) * 2 // 3]

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments, for JSON."""
        return asdict(self)
