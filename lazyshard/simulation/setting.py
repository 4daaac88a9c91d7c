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
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from lazyshard.format.fields import parse_size
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.plan.shuffle import expected_neighbours
from lazyshard.stream.chunk import OPEN_CHUNKS, OPEN_ROWS

_SEAL_ROW_BYTES: Final = 27
"""Bytes of a seal for each row, see docs/retention.md."""

PREFETCH: Final = 2
"""Batches that each worker of a DataLoader has under way: torch's default."""

CHUNK_OPENS: Final = 2
"""Of a reader, to open a chunk: seal and data."""

CHUNK_STATS: Final = 1
"""Likewise: of `stream.json`, whether it is still the same stream."""

_CHUNK_OPERATIONS: Final = CHUNK_OPENS + CHUNK_STATS + 1
"""One after the other; the last one reads the seal."""

_AHEAD_BYTES: Final = 512 << 10
"""What is read at once in order."""

_AMOUNT: Final = re.compile(r"([0-9_]+) *(chunks?|samples?|)", re.IGNORECASE)

_AT_LEAST_ONE: Final = (
    *("ranks", "batch", "micro_batches", "samples_per_chunk", "rows", "keep_checkpoints", "ranks_a_node"),
)
_AT_LEAST_NONE: Final = (
    *("window", "row_bytes", "head_start", "checkpoint_steps", "workers", "latency_s", "visibility_s"),
)


def _option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run: the options of `lazyshard simulate`, whose help says what each is; times are in seconds.

    Raises:
        ValueError: an option is outside its range, or there are fewer rows than a step takes.
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

    def __post_init__(self) -> None:
        """Checks the fields."""
        for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_NONE, 0)):
            for name in names:
                if not least <= getattr(self, name) < math.inf:
                    raise ValueError(f"{_option(name)} is {least} or more, got {getattr(self, name)}")
        for name in ("step_seconds", "producer_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{_option(name)} is above 0, got {getattr(self, name)}")
        if not self.steps:
            raise ValueError(f"--rows is at least {self.step_rows}, what one step of all ranks takes, got {self.rows}")
        try:
            _ = self.ahead_chunks
        except ValueError as cause:
            raise ValueError(f"--max-ahead: {cause}") from cause

    @cached_property
    def draws(self) -> int:
        """Positions of each rank in a step."""
        return self.batch * self.micro_batches

    @cached_property
    def step_rows(self) -> int:
        """Rows that a step takes, over all ranks."""
        return self.draws * self.ranks

    @cached_property
    def course(self) -> Course:
        """What each rank draws."""
        rules = Rules(self.samples_per_chunk, self.window * self.samples_per_chunk)
        return Course(rules, [Part(self.ranks, self.batch)])

    @cached_property
    def span(self) -> int:
        """Positions of a rank that become certain together: its share of a stripe, or its window."""
        return self.samples_per_chunk * max(1, self.window)

    @cached_property
    def span_rows(self) -> int:
        """The same over all ranks."""
        return self.span * self.ranks

    @cached_property
    def steps(self) -> int:
        """Whole steps of the epoch."""
        return self.course.epoch_length(self.rows) // self.draws

    @cached_property
    def chunks(self) -> int:
        """Chunks of the stream."""
        return -(-self.rows // self.samples_per_chunk)

    @cached_property
    def chunk_seconds(self) -> float:
        """What the producer takes for a chunk."""
        return self.samples_per_chunk / self.producer_rate

    @cached_property
    def chunk_bytes(self) -> int:
        """What a chunk takes on disk, with its seal."""
        return self.samples_per_chunk * (self.row_bytes + _SEAL_ROW_BYTES)

    @cached_property
    def ahead_chunks(self) -> int | None:
        """The limit of the producer in chunks, of samples and bytes at least one; None for none."""
        if self.max_ahead is None:
            return None
        found = _AMOUNT.fullmatch(self.max_ahead.strip())
        if found is None:
            return max(1, parse_size(self.max_ahead) // self.chunk_bytes)
        number = int(found[1])
        return max(1, number // self.samples_per_chunk) if found[2].lower().startswith("s") else number

    def needed_chunks(self, step: int) -> int:
        """Returns how many chunks must be published before a step can be trained.

        `Course.needed` of the step's last position in closed form; what is left of an ended stream may be drawn too.
        """
        spans = -(-(step + 1) * self.draws // self.span)
        return min(spans * self.span_rows // self.samples_per_chunk, self.chunks)

    def first_step_after(self, chunks: int) -> int:
        """Returns the first step that needs more than so many chunks; `steps` where none does."""
        if chunks >= self.chunks:
            return self.steps
        spans = chunks * self.samples_per_chunk // self.span_rows
        return min(self.steps, spans * self.span // self.draws)

    @cached_property
    def openings(self) -> float:
        """How often a chunk is opened on average: once by each worker that a batch with its rows comes to.

        In a window a worker that cannot hold all its chunks open opens them again and again.
        """
        size, workers = self.samples_per_chunk, max(1, self.workers)
        if not self.window:
            return min(workers, (size + self.batch - math.gcd(size, self.batch)) / self.batch)
        held = min(OPEN_CHUNKS, max(1, OPEN_ROWS // size))
        once = workers * (1 - (1 - 1 / workers) ** size)
        if self.window <= held:
            return once
        return once + workers * max(0.0, size / workers - 1) * (1 - held / self.window)

    @cached_property
    def tail_chunks(self) -> int:
        """How many chunks at the end of the stream fill no stripe of all ranks."""
        return self.chunks - self.rows // (self.ranks * self.samples_per_chunk) * self.ranks

    @cached_property
    def tail_openings(self) -> int:
        """How often those are opened at the most: their rows are dealt one by one, so by as many ranks as have rows."""
        size = self.samples_per_chunk
        batches = -(-max(1, size // self.ranks) // self.batch)
        return self.tail_chunks * min(size, self.ranks * min(max(1, self.workers), batches))

    @cached_property
    def all_openings(self) -> int:
        """How often chunks are opened in a run, those of the tail included."""
        return round((self.chunks - self.tail_chunks) * self.openings) + self.tail_openings

    @cached_property
    def reading_s(self) -> float:
        """How long one process reads at a micro batch on average: in windows, at worst, each row by a read."""
        size, batch = self.samples_per_chunk, self.batch
        reads = batch if self.window else max(batch * self.row_bytes / _AHEAD_BYTES, batch / size)
        return (reads + self.openings * _CHUNK_OPERATIONS * batch / size) * self.latency_s

    @cached_property
    def loaded_step_s(self) -> float:
        """How long a step takes, reading included: beside it with workers, before it without."""
        reading = self.micro_batches * self.reading_s
        return max(self.step_seconds, reading / self.workers) if self.workers else self.step_seconds + reading

    @cached_property
    def neighbour_draws(self) -> float:
        """Mean draws of a rank between two samples that are neighbours in the stream: how well it is shuffled."""
        return expected_neighbours(
            self.ranks, self.samples_per_chunk, self.window * self.samples_per_chunk, self.rows // self.ranks
        )
