"""What is simulated: a run's numbers, what the plan makes of them, what reading costs. No I/O.

Rows are counted from the beginning of the stream. All ranks draw `draws` positions in a step, in lockstep, so a step
can be trained once the last of its positions may be drawn: `lazyshard.plan.course.Course.needed` says how many rows
that takes. It grows by whole stripes (with windows: by all ranks' windows), here called spans::

    ranks=2, samples_per_chunk=4, batch=2      step    0  1  2  3  4
                                               needed  8  8 16 16 24   rows
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final, Literal

from lazyshard.format.fields import parse_size
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.plan.shuffle import expected_neighbours
from lazyshard.stream.reader import OPEN_CHUNKS, OPEN_ROWS

_SEAL_ROW_BYTES: Final = 27  # Bytes of a seal for each row, see docs/retention.md
PREFETCH: Final = 2  # Batches that each worker of a DataLoader has under way: torch's default
CHUNK_OPENS: Final = 2  # Of a reader, to open a chunk: seal and data
CHUNK_STATS: Final = 1  # Likewise: of `stream.json`, whether it is still the same stream
_CHUNK_OPERATIONS: Final = CHUNK_OPENS + CHUNK_STATS + 1  # One after the other; the last one reads the seal
_AHEAD_BYTES: Final = 512 << 10  # What is read at once in order
_AMOUNT: Final = re.compile(r"([0-9_]+) *(chunks?|samples?|)", re.IGNORECASE)

_LEAST: Final = {
    **dict.fromkeys(("ranks", "batch", "micro_batches", "samples_per_chunk", "rows", "keep_checkpoints"), 1),
    **dict.fromkeys(("window", "row_bytes", "head_start", "checkpoint_steps", "workers", "latency_s"), 0),
    "ranks_a_node": 1,
    "visibility_s": 0,
}


def _option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


@dataclass(kw_only=True)
class Setting:
    """A run: the options of `lazyshard simulate`, whose help says what each is, and what follows; times are in seconds.

    Raises ValueError where an option is outside its range, or there are fewer rows than a step takes.
    """

    ranks: int
    step_seconds: float
    samples_per_chunk: int
    producer_rate: float
    rows: int
    batch: int = 1
    micro_batches: int = 1
    window: int = 0
    row_bytes: int = 2000
    head_start: int = 0
    max_ahead: str | None = None
    retain: Literal["all", "consumed"] = "all"
    checkpoint_steps: int = 0
    keep_checkpoints: int = 1
    workers: int = 2
    latency_s: float = 0.001
    visibility_s: float = 0.0
    woken: bool = False
    ranks_a_node: int = 8

    draws: int = field(init=False)  # positions of each rank in a step
    step_rows: int = field(init=False)  # rows that a step takes, over all ranks
    course: Course = field(init=False)  # what each rank draws
    span: int = field(init=False)  # positions of a rank that become certain together: of a stripe, or its window
    span_rows: int = field(init=False)  # the same over all ranks
    steps: int = field(init=False)  # whole steps of the epoch
    chunks: int = field(init=False)
    chunk_bytes: int = field(init=False)  # what a chunk takes on disk, with its seal
    ahead_chunks: int | None = field(init=False)  # the limit of the producer, at least one; None for none
    openings: float = field(init=False)  # how often a chunk is opened on average
    tail_chunks: int = field(init=False)  # at the end of the stream, which fill no stripe of all ranks
    tail_openings: int = field(init=False)  # how often those are opened at the most: their rows are dealt one by one
    all_openings: int = field(init=False)  # how often chunks are opened in a run, those of the tail included
    reading_s: float = field(init=False)  # of one process at a micro batch on average: in windows each row by a read
    loaded_step_s: float = field(init=False)  # of a step, reading included: beside it with workers, before it without
    neighbour_draws: float = field(init=False)  # mean draws of a rank between two neighbours in the stream

    def __post_init__(self) -> None:
        """Checks the options, and works out what follows."""
        for name, least in _LEAST.items():
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{_option(name)} is {least} or more, got {getattr(self, name)}")
        for name in ("step_seconds", "producer_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{_option(name)} is above 0, got {getattr(self, name)}")
        size, batch, window = self.samples_per_chunk, self.batch, self.window * self.samples_per_chunk
        self.draws = batch * self.micro_batches
        self.step_rows = self.draws * self.ranks
        self.course = Course(Rules(size, window), [Part(self.ranks, batch)])
        self.span = size * max(1, self.window)
        self.span_rows = self.span * self.ranks
        self.steps = self.course.epoch_length(self.rows) // self.draws
        if not self.steps:
            raise ValueError(f"--rows is at least {self.step_rows}, what one step of all ranks takes, got {self.rows}")
        self.chunks = -(-self.rows // size)
        self.chunk_bytes = size * (self.row_bytes + _SEAL_ROW_BYTES)
        try:
            self.ahead_chunks = None if self.max_ahead is None else self._in_chunks(self.max_ahead.strip())
        except ValueError as cause:
            raise ValueError(f"--max-ahead: {cause}") from cause
        self.openings = self._openings()
        self.tail_chunks = self.chunks - self.rows // (self.ranks * size) * self.ranks
        batches = -(-max(1, size // self.ranks) // batch)
        self.tail_openings = self.tail_chunks * min(size, self.ranks * min(max(1, self.workers), batches))
        self.all_openings = round((self.chunks - self.tail_chunks) * self.openings) + self.tail_openings
        reads = batch if self.window else max(batch * self.row_bytes / _AHEAD_BYTES, batch / size)
        self.reading_s = (reads + self.openings * _CHUNK_OPERATIONS * batch / size) * self.latency_s
        reading, step_s = self.micro_batches * self.reading_s, self.step_seconds
        self.loaded_step_s = max(step_s, reading / self.workers) if self.workers else step_s + reading
        self.neighbour_draws = expected_neighbours(self.ranks, size, window, self.rows // self.ranks)

    def _in_chunks(self, amount: str) -> int:
        found = _AMOUNT.fullmatch(amount)
        if found is None:
            return max(1, parse_size(amount) // self.chunk_bytes)
        number = int(found[1])
        return max(1, number // self.samples_per_chunk) if found[2].lower().startswith("s") else number

    def _openings(self) -> float:
        """By each worker with its rows; in windows again where a worker cannot hold all its chunks open."""
        size, workers = self.samples_per_chunk, max(1, self.workers)
        if not self.window:
            return min(workers, (size + self.batch - math.gcd(size, self.batch)) / self.batch)
        held = min(OPEN_CHUNKS, max(1, OPEN_ROWS // size))
        once = workers * (1 - (1 - 1 / workers) ** size)
        return once + workers * max(0.0, size / workers - 1) * (1 - min(1.0, held / self.window))

    def needed_chunks(self, step: int) -> int:
        """Returns how many chunks must be published before a step: `Course.needed` of its end in closed form."""
        spans = -(-(step + 1) * self.draws // self.span)
        return min(spans * self.span_rows // self.samples_per_chunk, self.chunks)

    def first_step_after(self, chunks: int) -> int:
        """Returns the first step that needs more than so many chunks; `steps` where none does."""
        if chunks >= self.chunks:
            return self.steps
        spans = chunks * self.samples_per_chunk // self.span_rows
        return min(self.steps, spans * self.span // self.draws)
