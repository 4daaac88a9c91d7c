"""How a run would go: when chunks are published and each step begins, for all ranks at once; what it takes on disk.

Rows are counted from the beginning of the stream. All ranks draw `draws` positions in a step, in lockstep, so a step
can be trained once the last of its positions may be drawn: `lazyshard.plan.course.Course.needed` says how many rows
that takes. It grows by whole stripes (with windows: by all ranks' windows), here called spans::

    ranks=2, samples_per_chunk=4, batch=2      step    0  1  2  3  4
                                               needed  8  8 16 16 24   rows

Chunks come by the rules of `lazyshard-producer run`. Waiting readers look at `head.json`, paced by the product's own
rule (`lazyshard.stream.head`): all ranks begin to wait at the same moment, so one is simulated for all, and one
process of each node looks for all. Only steps are looked at that need more than was seen before.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.format.records import Head, parse_size
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.plan.shuffle import expected_neighbours
from lazyshard.stream import Published
from lazyshard.stream.chunk import OPEN_CHUNKS, OPEN_ROWS
from lazyshard.stream.head import expected_wait, next_poll
from lazyshard.stream.waiting import LATER_S
from lazyshard.stream.writer import HEARTBEAT_S

_CHUNK_OPENS: Final = 2  # Of a reader, to open a chunk: seal and data
_CHUNK_LOOKS: Final = _CHUNK_OPENS + 1  # And a stat of `stream.json`: whether it is still the same stream
BURST_S: Final = 1.0  # Seconds of rows that a producer makes up for after it was held (`lazyshard_producer.loop`)
_NOTHING_S: Final = 1e-9
_ASIDE_S: Final = 1.0  # How long a reader that has chunks open lets pass between looks which of them were deleted
_STEPS: Final = 1000  # A chunk's time is divided into so many: waits that differ by less are taken as alike
HINT_S: Final = 0.2  # The least time between two reading hints (`lazyshard.data.commits`)
PUBLISH_OPENS: Final = 7  # For a chunk: data, seal and head made, the owner looked at twice, the directory synced twice


@dataclass(kw_only=True)
class Setting:
    """A run: the options of `lazyshard simulate`, and what follows. Raises ValueError: no amount, or no step."""

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
        """Works out what follows."""
        size, batch, step_s, workers = self.samples_per_chunk, self.batch, self.step_seconds, self.workers
        window = self.window * size
        self.draws = batch * self.micro_batches  # positions of each rank in a step
        self.step_rows = self.draws * self.ranks  # over all ranks
        self.course = Course(Rules(size, window), [Part(self.ranks, batch)])  # what each rank draws
        self.span = size * max(1, self.window)  # positions of a rank that become certain together
        self.span_rows = self.span * self.ranks
        self.steps = self.course.epoch_length(self.rows) // self.draws  # whole ones, of the epoch
        if not self.steps:
            raise ValueError(f"--rows is at least {self.step_rows}, what one step of all ranks takes, got {self.rows}")
        self.chunks = -(-self.rows // size)
        self.chunk_bytes = size * (self.row_bytes + 27)  # on disk, with its seal: 27 bytes a row
        # The limit of the producer, at least one; None for none.
        try:
            self.ahead_chunks = None if self.max_ahead is None else self._in_chunks(self.max_ahead.strip())
        except ValueError as cause:
            raise ValueError(f"--max-ahead: {cause}") from cause
        self.openings = self._openings(max(1, workers))  # how often a chunk is opened on average
        # Those at the end, which fill no stripe of all ranks, and how often they are opened at the most: their rows are
        # dealt one by one.
        self.tail_chunks = self.chunks - self.rows // (self.ranks * size) * self.ranks
        batches = -(-max(1, size // self.ranks) // batch)
        self.tail_openings = self.tail_chunks * min(size, self.ranks * min(max(1, workers), batches))
        self.all_openings = round((self.chunks - self.tail_chunks) * self.openings) + self.tail_openings
        # Of one process at a micro batch on average: in windows each row by a read, in order 512 KiB at once. A chunk
        # that is opened is looked for by one call after the other, and its seal read.
        reads = batch if self.window else max(batch * self.row_bytes / (512 << 10), batch / size)
        self.reading_s = (reads + self.openings * (_CHUNK_LOOKS + 1) * batch / size) * self.latency_s
        # Of a step, reading included: beside it with workers, before it without.
        reading = self.micro_batches * self.reading_s
        self.loaded_step_s = max(step_s, reading / workers) if workers else step_s + reading
        # Mean draws of a rank between two neighbours in the stream.
        self.neighbour_draws = expected_neighbours(self.ranks, size, window, self.rows // self.ranks)

    def _in_chunks(self, amount: str) -> int:
        if (found := re.fullmatch(r"([0-9_]+) *(chunks?|samples?|)", amount, re.IGNORECASE)) is None:
            return max(1, parse_size(amount) // self.chunk_bytes)
        number = int(found[1])
        return max(1, number // self.samples_per_chunk) if found[2].lower().startswith("s") else number

    def _openings(self, workers: int) -> float:
        """By each worker with its rows; in windows again where a worker cannot hold all its chunks open."""
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
        """Returns the first step that needs more than so many chunks; `steps` where none does."""
        drawn = self.course.drawable(chunks * self.samples_per_chunk) // self.draws
        return self.steps if chunks >= self.chunks else min(self.steps, drawn)


def retry_s(held_s: float) -> float:
    """Returns in how many seconds a producer asks again that was held for so many (`lazyshard_producer.limits`)."""
    return min(2.0, max(0.2, held_s / 10))


class Producer:
    """The chunks of a stream: when each is `published` and was allowed to be `begun`; 0 is when the training begins."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._ahead = setting.chunks if setting.ahead_chunks is None else setting.ahead_chunks
        allowed = min(setting.chunks, self._ahead)
        rows = np.minimum(np.arange(allowed + 1) * setting.samples_per_chunk, setting.rows)
        due = (rows - setting.head_start) / setting.producer_rate
        self.published = array("d", np.maximum(0.0, due[1:]))
        self.begun = array("d", np.maximum(0.0, due[:-1]))
        # When the last row was due, and since when the producer is held.
        self._due = self._held_since = float(due[-1])

    def tell(self, needed: int, at: float) -> None:
        """Takes notice of a reading hint: a reader told at a moment that it needs so many chunks."""
        setting, allowed = self._setting, min(self._setting.chunks, needed + self._ahead)
        if allowed <= len(self.published):
            return
        at += setting.visibility_s
        begin = self._held_since + (first_look(at - self._held_since) if at > self._held_since else 0.0)
        self._due = max(self._due, begin - BURST_S)
        for chunk in range(len(self.published), allowed):
            self.begun.append(max(0.0, begin))
            rows = min(setting.samples_per_chunk, setting.rows - chunk * setting.samples_per_chunk)
            self._due += rows / setting.producer_rate
            begin = max(begin, self._due)
            self.published.append(max(0.0, begin))
        self._held_since = begin


def first_look(held_s: float) -> float:
    """Returns when a producer looks that is held: its first look after so many seconds or just then."""
    at, longest = 0.0, retry_s(math.inf)
    while at < held_s and (pause := retry_s(at)) < longest:
        at += pause
    return at + math.ceil(max(0.0, held_s - at) / longest) * longest


class WaitEnd(NamedTuple):
    """How late waits ended; looks by each process, by one of each node, and by one for chunks that were deleted."""

    late_s: float = 0.0
    own: int = 0
    shared: int = 0
    asides: int = 0


class Polls:
    """The waits of a setting."""

    def __init__(self, setting: Setting) -> None:
        self.look_s = 2 * setting.latency_s  # An open and a read of the head, one after the other
        self._setting = setting
        self._period = setting.samples_per_chunk / setting.producer_rate
        self._shares = min(setting.ranks, setting.ranks_a_node) * max(1, setting.workers) > 1
        self._known = lru_cache(maxsize=None)(self._find)

    def wait(self, missing: int, next_s: float, blind_s: float = 0.0) -> WaitEnd:
        """Returns how a wait for chunks ends, the first seen in `next_s` > 0; for `blind_s` seconds no rate is told."""
        return self._known(missing, max(1, round(next_s / self._period * _STEPS)), round(blind_s, 3))

    def _find(self, missing: int, phase: int, blind_s: float) -> WaitEnd:
        setting, period, size = self._setting, self._period, self._setting.samples_per_chunk
        first = phase * period / _STEPS
        arrival, watched, aside_at = first + (missing - 1) * period, not setting.woken, -_ASIDE_S
        own, shared, asides, time, age = 0, 0, 0, 0.0, 0.0
        while True:
            there = 0 if time < first else min(missing, int((time - first) / period + 1 + 1e-9))
            own, shared = (own, shared + 1) if age else (own + 1, shared)
            done = there >= missing or time >= arrival
            time += self.look_s
            if done:
                later = min(LATER_S, age / 4) if self._shares else 0.0
                return WaitEnd(max(0.0, time - arrival) + later, own, shared, asides)
            if time - aside_at >= _ASIDE_S:
                asides, aside_at = asides + 1, time
            rate = 0.0 if time < blind_s else setting.producer_rate
            head = Head(there, there * size, False, "running", rate, "-", 1, 0.0)
            age = next_poll(time, expected_wait(missing * size, Published(there, there * size, False, head)))
            event = max(time, first + there * period)
            if not watched and time >= 0.02:
                # Shorter waits are slept through, see `lazyshard.stream.reader`. Who begins to watch looks once more.
                watched, age = True, 0.0
            elif watched and setting.woken and event <= time + age + 1e-6:
                # Woken by the seal, and by the head, which then tells of it.
                own, time, age = own + 1, event, 0.0
            else:
                time += age


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What came out, in seconds since the training began."""

    setting: Setting
    published: npt.NDArray[np.float64]  # when each chunk was
    begun: npt.NDArray[np.float64]  # when each chunk was allowed
    after_wait: npt.NDArray[np.int64]  # steps that began after a wait, the first one included
    began: npt.NDArray[np.float64]  # when each of these began
    waits: npt.NDArray[np.float64]  # how long each of them was waited for
    asked: int  # how often a reading process came to rows that it had not seen published
    looks: int  # looks at the head that each such process made
    shared: int  # looks at the head that one process of each node made
    asides: int  # its looks which chunks were deleted
    looking_s: float  # seconds in which it waited, ahead of the training or not

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
        """Seconds in which no step was computed: before the first one, waiting, or reading too slowly."""
        return max(0.0, self.end_s - self.setting.steps * self.setting.step_seconds)

    def ends(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Returns when steps ended."""
        after = np.searchsorted(self.after_wait, steps, side="right") - 1
        return self.began[after] + (steps - self.after_wait[after] + 1) * self.setting.loaded_step_s


def simulate(setting: Setting) -> Timeline:
    """Simulates a run from the beginning of the training to its last step."""
    producer, polls = Producer(setting), Polls(setting)
    step_s, lag = setting.loaded_step_s, setting.visibility_s
    # Workers ask for a step while earlier ones are trained, by two batches each, and need a moment to read it.
    early = 2 * setting.workers // setting.micro_batches
    fill_s = setting.reading_s if setting.workers else 0.0
    after_wait, began, waits = [0], [0.0], [0.0]
    step = seen = asked = looks = shared = asides = 0
    found = looking = 0.0

    def begins(step: int) -> float:
        """Returns when a step begins if nothing more is waited for."""
        at = max(0, bisect_right(after_wait, step) - 1)
        return began[at] + max(0, step - after_wait[at]) * step_s

    while step < setting.steps:
        needed = setting.needed_chunks(step)
        ask = max(found, begins(step - early)) if step > early else found
        producer.tell(needed, ask)
        found = ask
        if seen < needed:
            asked += 1
            visible = producer.published[needed - 1] + lag
            there = bisect_right(producer.published, ask - lag + _NOTHING_S)
            if there >= needed:
                found = ask + polls.look_s
                looks += 1
            else:
                first = producer.published[there] + lag - ask
                # Before the first chunk, only a heartbeat tells how fast rows come.
                blind = max(0.0, min(HEARTBEAT_S, first + ask) - ask) if not there else 0.0
                wait = polls.wait(needed - there, max(first, _NOTHING_S), blind)
                found = visible + wait.late_s
                looks += wait.own
                shared += wait.shared
                # Before the first step no chunk is open.
                asides += wait.asides if step else 0
                looking += found - ask
            seen = max(needed, bisect_right(producer.published, found - polls.look_s - lag))
        ready, due = found + fill_s, begins(step)
        if not step:
            began[0] = waits[0] = ready
        elif ready - due > _NOTHING_S:
            after_wait.append(step)
            began.append(ready)
            waits.append(ready - due)
        # With a limit the producer is told of each window; without, nothing happens until more is needed.
        step = setting.first_step_after(needed if setting.max_ahead is not None else seen)
    after, begun, waited = np.array(after_wait, dtype=np.int64), np.array(began), np.array(waits)
    chunks = np.array(producer.published), np.array(producer.begun)
    return Timeline(setting, *chunks, after, begun, waited, asked, looks, shared, asides, looking)


class Disk(NamedTuple):
    """What was on disk: the most chunks at a time, with their bytes and when; commits of the cursor; chunks deleted."""

    peak_chunks: int
    peak_bytes: int
    peak_at_s: float
    cursor_writes: int
    deleted: int


def disk_use(timeline: Timeline) -> Disk:
    """Returns what a run took on disk."""
    setting, published, every = timeline.setting, timeline.published, timeline.setting.checkpoint_steps
    count, deleted = np.arange(1, len(published) + 1), np.zeros(len(published), dtype=np.int64)
    commits = setting.steps // every if every else 0
    if setting.retain == "consumed" and commits >= setting.keep_checkpoints:
        # The checkpoint that moves the cursor, and the one that it is moved to.
        newest = np.arange(setting.keep_checkpoints, commits + 1) * every
        oldest = newest - (setting.keep_checkpoints - 1) * every
        committed = timeline.ends(newest - 1) + setting.visibility_s
        # How many chunks every rank is done with: `Course.done_before`.
        spans = oldest * setting.draws // setting.span
        done = np.concatenate(([0], spans * setting.span_rows // setting.samples_per_chunk))
        # At its last look before each chunk the producer deletes what is committed, but never the newest chunk.
        deleted = np.minimum(done[np.searchsorted(committed, timeline.begun, side="right")], np.maximum(0, count - 2))
    kept = count - deleted
    at = int(np.argmax(kept))
    return Disk(int(kept[at]), int(kept[at]) * setting.chunk_bytes, float(published[at]), commits, int(deleted[-1]))


def count_files(timeline: Timeline, disk: Disk) -> dict[str, float]:
    """Counts operations: a main process looks when it begins and at commits, with workers at each new stripe too."""
    setting, seconds, opened = timeline.setting, timeline.end_s, timeline.setting.all_openings
    loaders, nodes = setting.ranks * max(1, setting.workers), -(-setting.ranks // setting.ranks_a_node)
    polls, asides = timeline.looks * loaders + timeline.shared * nodes, timeline.asides * nodes
    looks = polls + setting.ranks * (1 + (timeline.asked if setting.workers else 0)) + disk.cursor_writes
    reading = looks + opened * _CHUNK_LOOKS + asides
    spans = -(-setting.steps * setting.draws // setting.span)
    hints = min(spans, int(seconds / HINT_S) + timeline.asked) + disk.cursor_writes
    # To replace a small file durably one is made, with a stat, a rename, and the directory synced; to publish a chunk
    # takes three renames with a stat each, too, and a look whether the seal is there.
    total = reading + 4 * hints + setting.chunks * (PUBLISH_OPENS + 7) + 2 * disk.deleted
    return {
        "processes": loaders,
        "nodes": nodes,
        "head_opens": looks,
        "chunk_opens": opened * _CHUNK_OPENS,
        "metadata_operations": total,
        "metadata_a_second": total / seconds,
        "metadata_a_second_and_node": reading / seconds / nodes,
        "polls_a_second": (polls + asides) / timeline.looking_s if timeline.looking_s else 0.0,
        "stripe_operations": nodes + loaders * _CHUNK_LOOKS,
    }


def outcome(setting: Setting) -> dict[str, Any]:
    """Simulates a run and returns all figures by name, plain values."""
    timeline, shown = simulate(setting), ("steps", "chunks", "tail_chunks", "tail_openings", "neighbour_draws")
    disk, dealt = disk_use(timeline), {name: getattr(setting, name) for name in shown}
    # What is slowest in the long run, whatever the head start.
    slow = "reading" if setting.loaded_step_s > 1.01 * setting.step_seconds else "training"
    found = {
        "limited_by": "producer" if setting.producer_rate * setting.loaded_step_s < setting.step_rows else slow,
        **{name: getattr(timeline, name) for name in ("first_step_s", "end_s", "stalled_s")},
        "stall_share": timeline.stalled_s / timeline.end_s,
        "waits": len(timeline.waits) - 1,
        "longest_wait_s": float(timeline.waits[1:].max(initial=0.0)),  # that for the first step left out
    }
    return asdict(setting) | found | disk._asdict() | count_files(timeline, disk) | dealt
