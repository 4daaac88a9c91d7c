"""Simulates a run: when chunks are published and each step begins, for all ranks together, and the disk space used.

Rows are counted from the beginning of the stream. All ranks draw `draws` positions per step, in lockstep, so a step can
be trained once its last position can be drawn: `lazyshard.plan.course.Course.needed` returns how many rows that takes.
This number grows by whole stripes (with windows: by the windows of all ranks), called spans here::

    ranks=2, samples_per_chunk=4, batch=2      step    0  1  2  3  4
                                               needed  8  8 16 16 24   rows

Chunks are published by the rules of `lazyshard-producer run`. Waiting readers poll `head.json` at the intervals of
`lazyshard.stream.waiting`. All ranks begin to wait at the same moment, so one wait is simulated for all, and one
process per node polls for the others. Only steps that need more chunks than were seen before are simulated.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from lazyshard.format.records import Head
from lazyshard.part import FloatArray, Int64Array, Part, parse_size
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.plan.shuffle import expected_neighbours
from lazyshard.stream import Published
from lazyshard.stream.chunk import OPEN_CHUNKS, OPEN_ROWS
from lazyshard.stream.head import HEARTBEAT_S, expected_wait, retry_s
from lazyshard.stream.waiting import LATER_S, next_poll

_CHUNK_OPENS: Final = 2  # To open a chunk, a reader opens two files: seal and data
_CHUNK_METADATA: Final = _CHUNK_OPENS + 1  # Plus a stat of `stream.json`, to check that the stream is still the same
BURST_S: Final = 1.0  # Seconds of rows that a producer catches up after it was paused (`lazyshard_producer.loop`)
_NOTHING_S: Final = 1e-9
_DELETION_POLL_S: Final = 1.0  # Interval at which a reader with open chunks checks which of them were deleted
_STEPS: Final = 1000  # Resolution of waits, in parts of the time between two chunks: shorter differences are ignored
HINT_S: Final = 0.2  # Minimum interval between two reading hints (`lazyshard.data.commits`)
PUBLISH_OPENS: Final = 7  # Per chunk: data, seal and head created, the owner read twice, the directory synced twice


@dataclass(kw_only=True)
class Setting:
    """A run: the options of `lazyshard simulate` and derived values. Raises ValueError: `max_ahead` or `rows`."""

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
        """Computes the derived values."""
        size, batch, step_s, workers = self.samples_per_chunk, self.batch, self.step_seconds, self.workers
        window = self.window * size
        self.draws = batch * self.micro_batches  # positions of each rank per step
        self.step_rows = self.draws * self.ranks  # over all ranks
        self.course = Course(Rules(size, window), [Part(self.ranks, batch)])  # what each rank draws
        self.span = size * max(1, self.window)  # positions of a rank that become drawable together
        self.span_rows = self.span * self.ranks
        self.steps = self.course.begin(self.rows).length // self.draws  # whole steps of the epoch
        if not self.steps:
            raise ValueError(f"--rows must be at least {self.step_rows}, one step of all ranks, got {self.rows}")
        self.chunks = -(-self.rows // size)
        self.chunk_s = size / self.producer_rate  # between two chunks
        self.poll_s = 2 * self.latency_s  # an open of the head, then a read
        self.chunk_bytes = size * (self.row_bytes + 27)  # on disk, with the seal: 27 bytes per row
        # How far the producer may be ahead, at least one chunk; None for no limit.
        try:
            self.ahead_chunks = None if self.max_ahead is None else self._in_chunks(self.max_ahead.strip())
        except ValueError as cause:
            raise ValueError(f"--max-ahead: {cause}") from cause
        self.openings = self._openings(max(1, workers))  # mean number of times a chunk is opened
        # The last chunks, which fill no stripe of all ranks, and how often they are opened at most: their rows are
        # dealt one by one.
        self.tail_chunks = self.chunks - self.rows // (self.ranks * size) * self.ranks
        batches = -(-max(1, size // self.ranks) // batch)
        self.tail_openings = self.tail_chunks * min(size, self.ranks * min(max(1, workers), batches))
        self.all_openings = round((self.chunks - self.tail_chunks) * self.openings) + self.tail_openings
        # Mean time that one process reads per micro batch: with windows one read per row, in order 512 KiB per read.
        # Opening a chunk takes its metadata calls, one after the other, and a read of its seal.
        reads = batch if self.window else max(batch * self.row_bytes / (512 << 10), batch / size)
        self.reading_s = (reads + self.openings * (_CHUNK_METADATA + 1) * batch / size) * self.latency_s
        # Duration of a step including reading: workers read during the step, otherwise reading precedes it.
        reading = self.micro_batches * self.reading_s
        self.loaded_step_s = max(step_s, reading / workers) if workers else step_s + reading
        # Mean number of draws of a rank between two neighbours in the stream.
        self.neighbour_draws = expected_neighbours(self.ranks, size, window, self.rows // self.ranks)

    def _in_chunks(self, amount: str) -> int:
        if (found := re.fullmatch(r"([0-9_]+) *(chunks?|samples?|)", amount, re.IGNORECASE)) is None:
            return max(1, parse_size(amount) // self.chunk_bytes)
        number = int(found[1])
        return max(1, number // self.samples_per_chunk) if found[2].lower().startswith("s") else number

    def _openings(self, workers: int) -> float:
        """Once per worker with rows of the chunk; with windows more if a worker cannot keep all its chunks open."""
        size = self.samples_per_chunk
        if not self.window:
            return min(workers, (size + self.batch - math.gcd(size, self.batch)) / self.batch)
        held = min(OPEN_CHUNKS, max(1, OPEN_ROWS // size))
        once = workers * (1 - (1 - 1 / workers) ** size)
        return once + workers * max(0.0, size / workers - 1) * (1 - min(1.0, held / self.window))

    def needed_chunks(self, step: int) -> int:
        """Returns how many chunks must be published before a step."""
        return min(self.course.needed((step + 1) * self.draws - 1) // self.samples_per_chunk, self.chunks)

    def first_step_after(self, chunks: int) -> int:
        """Returns the first step that needs more than `chunks` chunks; `steps` if none does."""
        drawn = self.course.drawable(chunks * self.samples_per_chunk) // self.draws
        return self.steps if chunks >= self.chunks else min(self.steps, drawn)


class Producer:
    """When each chunk is `published`, and when it was allowed to be `begun`, in seconds since the training began."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._ahead = setting.chunks if setting.ahead_chunks is None else setting.ahead_chunks
        allowed = min(setting.chunks, self._ahead)
        rows = np.minimum(np.arange(allowed + 1) * setting.samples_per_chunk, setting.rows)
        due = (rows - setting.head_start) / setting.producer_rate
        self.published = array("d", np.maximum(0.0, due[1:]))
        self.begun = array("d", np.maximum(0.0, due[:-1]))
        # When the last row was due, and since when the producer is paused.
        self._due = self._held_since = float(due[-1])

    def receive_hint(self, needed: int, at: float) -> None:
        """Receives the reading hint of a reader that needs `needed` chunks, sent at the time `at`."""
        setting, allowed = self._setting, min(self._setting.chunks, needed + self._ahead)
        if allowed <= len(self.published):
            return
        at += setting.visibility_s
        begin = self._held_since + (first_check(at - self._held_since) if at > self._held_since else 0.0)
        self._due = max(self._due, begin - BURST_S)
        for chunk in range(len(self.published), allowed):
            self.begun.append(max(0.0, begin))
            rows = min(setting.samples_per_chunk, setting.rows - chunk * setting.samples_per_chunk)
            self._due += rows / setting.producer_rate
            begin = max(begin, self._due)
            self.published.append(max(0.0, begin))
        self._held_since = begin


def first_check(held_s: float) -> float:
    """Returns when a paused producer checks its limit: at its first check at or after `held_s` seconds."""
    at, longest = 0.0, retry_s(math.inf)
    while at < held_s and (pause := retry_s(at)) < longest:
        at += pause
    return at + math.ceil(max(0.0, held_s - at) / longest) * longest


class WaitEnd(NamedTuple):
    """How late a wait ended, and polls: by each process, by one per node, and by one per node for deleted chunks.

    Also the sums over all waits.
    """

    late_s: float = 0.0
    own: int = 0
    shared: int = 0
    deletion_polls: int = 0


def find_wait(setting: Setting, missing: int, phase: int, blind_s: float) -> WaitEnd:
    """Returns how a wait for chunks ends; the rate is unknown for `blind_s`.

    The first chunk is seen after `phase` parts, of `_STEPS`, of the time between two chunks.
    """
    size, period = setting.samples_per_chunk, setting.chunk_s
    first = phase * period / _STEPS
    arrival, watched, deletion_poll_at = first + (missing - 1) * period, not setting.woken, -_DELETION_POLL_S
    own, shared, deletion_polls, time, age = 0, 0, 0, 0.0, 0.0
    while True:
        there = 0 if time < first else min(missing, int((time - first) / period + 1 + 1e-9))
        own, shared = (own, shared + 1) if age else (own + 1, shared)
        done = there >= missing or time >= arrival
        time += setting.poll_s
        if done:
            several = min(setting.ranks, setting.ranks_a_node) * max(1, setting.workers) > 1
            later = min(LATER_S, age / 4) if several else 0.0
            return WaitEnd(max(0.0, time - arrival) + later, own, shared, deletion_polls)
        if time - deletion_poll_at >= _DELETION_POLL_S:
            deletion_polls, deletion_poll_at = deletion_polls + 1, time
        rate = 0.0 if time < blind_s else setting.producer_rate
        head = Head(there, there * size, False, "running", rate, "-", 1, 0.0)
        age = next_poll(time, expected_wait(missing * size, Published(there, there * size, False, head)))
        event = max(time, first + there * period)
        if not watched and time >= 0.02:
            # Shorter waits sleep, see `lazyshard.stream.reader`. A reader that starts to watch polls once more.
            watched, age = True, 0.0
        elif watched and setting.woken and event <= time + age + 1e-6:
            # Woken by the seal, then by the head that lists the chunk.
            own, time, age = own + 1, event, 0.0
        else:
            time += age


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The result of a simulation, in seconds since the training began."""

    setting: Setting
    published: FloatArray  # when each chunk was published
    begun: FloatArray  # when each chunk was allowed to begin
    after_wait: Int64Array  # steps that began after a wait, including the first step
    began: FloatArray  # when each of these steps began
    waits: FloatArray  # how long each of them was waited for
    needs: int  # how often a reading process needed rows that it had not seen published
    polls: WaitEnd  # the sums over these

    @property
    def first_step_s(self) -> float:
        """When the first step began."""
        return float(self.began[0])

    @property
    def end_s(self) -> float:
        """When the last step ended."""
        return float(self.ends(np.array([self.setting.steps - 1], dtype=np.int64))[0])

    @property
    def stalled_s(self) -> float:
        """Seconds in which no step was computed: before the first step, while waiting, or because reading is slow."""
        return max(0.0, self.end_s - self.setting.steps * self.setting.step_seconds)

    def ends(self, steps: Int64Array) -> FloatArray:
        """Returns when steps ended."""
        after = np.searchsorted(self.after_wait, steps, side="right") - 1
        return self.began[after] + (steps - self.after_wait[after] + 1) * self.setting.loaded_step_s


def simulate(setting: Setting) -> Timeline:
    """Simulates a run from the beginning of the training to its last step."""
    producer, wait = Producer(setting), lru_cache(maxsize=None)(partial(find_wait, setting))
    step_s, lag = setting.loaded_step_s, setting.visibility_s
    # Workers prefetch two batches each while earlier steps are trained; reading a batch takes a moment.
    early = 2 * setting.workers // setting.micro_batches
    fill_s = setting.reading_s if setting.workers else 0.0
    after_wait, began, waits = [0], [0.0], [0.0]
    ends = list[WaitEnd]()
    step = seen = 0
    found = 0.0

    def begins(step: int) -> float:
        """Returns when a step begins without further waits."""
        at = max(0, bisect_right(after_wait, step) - 1)
        return began[at] + max(0, step - after_wait[at]) * step_s

    while step < setting.steps:
        needed = setting.needed_chunks(step)
        needed_at = max(found, begins(step - early)) if step > early else found
        producer.receive_hint(needed, needed_at)
        found = needed_at
        if seen < needed:
            visible = producer.published[needed - 1] + lag
            there = bisect_right(producer.published, needed_at - lag + _NOTHING_S)
            if there >= needed:
                found = needed_at + setting.poll_s
                ends.append(WaitEnd(own=1))
            else:
                first = producer.published[there] + lag - needed_at
                # Before the first chunk, only a heartbeat reports the rate.
                blind = max(0.0, min(HEARTBEAT_S, first + needed_at) - needed_at) if not there else 0.0
                end = wait(needed - there, max(1, round(first / setting.chunk_s * _STEPS)), round(blind, 3))
                found = visible + end.late_s
                # Before the first step no chunk is open.
                ends.append(end if step else end._replace(deletion_polls=0))
            seen = max(needed, bisect_right(producer.published, found - setting.poll_s - lag))
        ready, due = found + fill_s, begins(step)
        if not step:
            began[0] = waits[0] = ready
        elif ready - due > _NOTHING_S:
            after_wait.append(step)
            began.append(ready)
            waits.append(ready - due)
        # With a limit, every window sends a hint to the producer; without, nothing changes until more is needed.
        step = setting.first_step_after(needed if setting.max_ahead is not None else seen)
    after, begun, waited = np.array(after_wait, dtype=np.int64), np.array(began), np.array(waits)
    chunks = np.array(producer.published), np.array(producer.begun)
    counted = WaitEnd(*map(sum, zip(*ends, strict=True)))
    return Timeline(setting, *chunks, after, begun, waited, len(ends), counted)


def disk_use(timeline: Timeline) -> dict[str, float]:
    """Returns the disk use of a run: the most chunks, their bytes and when; cursor commits; chunks deleted."""
    setting, published, every = timeline.setting, timeline.published, timeline.setting.checkpoint_steps
    count, deleted = np.arange(1, len(published) + 1), np.zeros(len(published), dtype=np.int64)
    commits = setting.steps // every if every else 0
    if setting.retain == "consumed" and commits >= setting.keep_checkpoints:
        # The checkpoint that advances the cursor, and the checkpoint that the cursor advances to.
        newest = np.arange(setting.keep_checkpoints, commits + 1) * every
        oldest = newest - (setting.keep_checkpoints - 1) * every
        committed = timeline.ends(newest - 1) + setting.visibility_s
        # Number of chunks that every rank has finished: `Course.done_before`.
        spans = oldest * setting.draws // setting.span
        done = np.concatenate(([0], spans * setting.span_rows // setting.samples_per_chunk))
        # At its last check before each chunk the producer deletes committed chunks, but never the newest one.
        deleted = np.minimum(done[np.searchsorted(committed, timeline.begun, side="right")], np.maximum(0, count - 2))
    kept = count - deleted
    at = int(np.argmax(kept))
    peak = {"peak_chunks": int(kept[at]), "peak_bytes": int(kept[at]) * setting.chunk_bytes}
    return peak | {"peak_at_s": float(published[at]), "cursor_writes": commits, "deleted": int(deleted[-1])}


def count_files(timeline: Timeline, disk: dict[str, float]) -> dict[str, float]:
    """Counts operations. A main process polls at start and at commits, and with workers also at each new stripe."""
    setting, seconds, opened = timeline.setting, timeline.end_s, timeline.setting.all_openings
    loaders, nodes = setting.ranks * max(1, setting.workers), -(-setting.ranks // setting.ranks_a_node)
    _, own, shared, for_deleted = timeline.polls
    polls, deletion_polls = own * loaders + shared * nodes, for_deleted * nodes
    head_opens = polls + setting.ranks * (1 + (timeline.needs if setting.workers else 0)) + disk["cursor_writes"]
    reading = head_opens + opened * _CHUNK_METADATA + deletion_polls
    spans = -(-setting.steps * setting.draws // setting.span)
    hints = min(spans, int(seconds / HINT_S) + timeline.needs) + disk["cursor_writes"]
    # Replacing a small file durably: create, stat, rename, sync of the directory. Publishing a chunk also takes
    # three renames with a stat each, and a check for the seal.
    total = reading + 4 * hints + setting.chunks * (PUBLISH_OPENS + 7) + 2 * disk["deleted"]
    return {
        "processes": loaders,
        "nodes": nodes,
        "head_opens": head_opens,
        "chunk_opens": opened * _CHUNK_OPENS,
        "metadata_operations": total,
        "metadata_a_second": total / seconds,
        "metadata_a_second_and_node": reading / seconds / nodes,
    }


def outcome(setting: Setting) -> dict[str, Any]:
    """Simulates a run and returns all figures by name, plain values."""
    timeline, shown = simulate(setting), ("steps", "chunks", "tail_chunks", "tail_openings", "neighbour_draws")
    disk, dealt = disk_use(timeline), {name: getattr(setting, name) for name in shown}
    # What is slowest in the long run, regardless of the head start.
    slow = "reading" if setting.loaded_step_s > 1.01 * setting.step_seconds else "training"
    found = {
        "limited_by": "producer" if setting.producer_rate * setting.loaded_step_s < setting.step_rows else slow,
        **{name: getattr(timeline, name) for name in ("first_step_s", "end_s", "stalled_s")},
        "stall_share": timeline.stalled_s / timeline.end_s,
        "waits": len(timeline.waits) - 1,
        "longest_wait_s": float(timeline.waits[1:].max(initial=0.0)),  # without the wait for the first step
    }
    return asdict(setting) | found | disk | count_files(timeline, disk) | dealt
