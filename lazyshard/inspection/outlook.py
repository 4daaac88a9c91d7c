"""What a look at a stream means: who is how far behind, at which rate, and when something runs out.

Decisions only: time goes in as numbers. What cannot be known is None; nothing is guessed. A rate of a consumer or of
deletion takes two looks at least, since the files say where each is, not how fast.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from lazyshard.format.records import Head, ProducerState
from lazyshard.inspection.band import Band, make_band
from lazyshard.inspection.survey import Census, Survey
from lazyshard.stream.consumers import Consumer
from lazyshard.stream.pacing import STALE_HEARTBEAT_S, is_silent
from lazyshard.stream.run_state import course_of

_DEAD_HEARTBEAT_S: Final = 60.0  # A producer gives a sign every few seconds; after a minute nobody should rely on it
_FORESEEABLE_S: Final = 10 * 365 * 86400.0  # What is further away at a rate that has faded does not happen

State = Literal[ProducerState, "dead"]

Supply = Literal["dry", "shrinking", "steady", "complete", "unknown"]
"""What a reader has to expect: dry: it waits; shrinking: it reads faster than rows come; steady: it does not; complete:
the stream has ended, so all that it needs is there; unknown: it leaves no reading mark, or a rate is not known."""

_MEMORY_S: Final = 120.0  # A rate is that of so many seconds, of two steps at least: it follows a change within minutes


@dataclass(frozen=True, slots=True)
class ConsumerOutlook:
    """Where a consumer is, and what it has to expect; None where that is not known."""

    consumer: Consumer
    checkpoint_age_s: float | None  # since its cursor was written
    reading_age_s: float | None  # since its reading mark was written
    lag_chunks: int | None  # published chunks that it is not done with; None where its cursor has a problem
    lag_samples: int | None  # published samples that are not in its durable checkpoints
    lag_s: float | None  # how long ago the first of those chunks was published, 0 if there are none
    ahead_chunks: int | None  # published chunks beyond those that it needs to read on; negative: it waits for so many
    chunk_rate: float | None  # chunks per second that it takes
    supply: Supply
    dry_in_s: float | None  # in how many seconds it has to wait at these rates: 0 if it does, None if never too
    remainder: Remainder | None = None  # of what is published, where it has trained all whole steps


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a look at a stream means; None is not known."""

    survey: Survey
    state: State | None  # what the producer does, None where it does not tell
    heartbeat_age_s: float | None  # since it gave a sign; clocks may differ
    clock_ahead_s: float  # of this machine's, the producer's is by so much; 0 where that is not seen
    chunk_rate: float | None  # chunks per second that come
    byte_rate: float | None  # bytes per second by which the stream grows, deletion taken off
    full_in_s: float | None  # in how many seconds the disk is full at this rate, None if never too
    consumers: tuple[ConsumerOutlook, ...]  # by name
    band: Band

    @property
    def slowest(self) -> ConsumerOutlook | None:
        """The reader that has the most chunks before it, None where none leaves a reading mark."""
        reading = [one for one in self.consumers if one.ahead_chunks is not None]
        return max(reading, key=lambda one: one.ahead_chunks or 0, default=None)


class Looks:
    """Looks at one stream, one after another: the later ones can tell how fast things go."""

    def __init__(self) -> None:
        self._published = _ObservedGrowth()
        self._retired = _ObservedGrowth()
        self._readings: dict[str, Growth] = {}
        self._cursors: dict[str, Growth] = {}

    def add(self, survey: Survey) -> Outlook:
        """Takes a look and returns what it means."""
        now, census = survey.looked_at, survey.census
        self._published.look(now, census.chunks)
        self._retired.look(now, census.retired)
        head, age, ahead, state = census.head, None, 0.0, None
        if head is not None:
            age, ahead = max(0.0, now - head.updated_at), max(0.0, head.updated_at - now)
            state = producer_state(head, age, survey.gone is True, survey.ended)
        coming = self._coming(survey, state)
        growth = self._growth(survey, coming)
        full_in_s = None
        # What is held back does not fill the disk at the rate that it had before.
        if survey.free is not None and growth is not None and state != "waiting":
            full_in_s = _time_to_use(survey.free, growth)
        consumers = tuple(self._consumer(survey, consumer, coming) for consumer in survey.consumers)
        band = make_band(census, survey.consumers)
        return Outlook(survey, state, age, ahead, coming, growth, full_in_s, consumers, band)

    def _coming(self, survey: Survey, state: State | None) -> float | None:
        census, head = survey.census, survey.census.head
        if census.ended or state in ("idle", "failed", "finished", "dead"):
            return 0.0
        if head is not None and is_silent(head, survey.looked_at):
            return 0.0
        if head is not None and census.manifest is not None and head.rate > 0:
            return head.rate / census.manifest.samples_per_chunk
        return self._published.rate(survey.looked_at)

    def _growth(self, survey: Survey, coming: float | None) -> float | None:
        if coming == 0:
            return 0.0
        leaving = self._retired.rate(survey.looked_at) if survey.census.retired else 0.0
        if coming is None or leaving is None or survey.disk.chunk_size is None:
            return None
        return (coming - leaving) * survey.disk.chunk_size

    def _consumer(self, survey: Survey, consumer: Consumer, coming: float | None) -> ConsumerOutlook:
        now, census = survey.looked_at, survey.census
        reading, cursor = consumer.reading, consumer.cursor
        rate = self._consumer_rate(survey, consumer)
        lag_chunks = lag_samples = lag_s = None
        if consumer.problem is None:
            lag_chunks = census.chunks - consumer.chunks_before
            if census.samples is not None:
                lag_samples = max(0, census.samples - (0 if cursor is None else cursor.consumed))
            since = survey.unread_since.get(consumer.name)
            lag_s = 0.0 if lag_chunks <= 0 else None if since is None else max(0.0, now - since)
        # A mark below the consumer's own cursor is an old one.
        ahead = None if reading is None else census.chunks - max(reading.needs_chunks, consumer.chunks_before)
        supply, dry_in_s = outlook_of_reader(ahead, rate, coming, census.ended)
        aged, marked = (None if one is None else max(0.0, now - one.updated_at) for one in (cursor, reading))
        left, lags = remainder(consumer, census), (lag_chunks, lag_samples, lag_s)
        return ConsumerOutlook(consumer, aged, marked, *lags, ahead, rate, supply, dry_in_s, left)

    def _consumer_rate(self, survey: Survey, consumer: Consumer) -> float | None:
        now, manifest = survey.looked_at, survey.census.manifest
        read, trained = (growths.setdefault(consumer.name, Growth()) for growths in (self._readings, self._cursors))
        if consumer.reading is not None:
            read.step(consumer.reading.updated_at, consumer.reading.needs_chunks)
        if consumer.cursor is not None and manifest is not None:
            trained.step(consumer.cursor.updated_at, consumer.cursor.consumed / manifest.samples_per_chunk)
        rate = read.rate(now)
        return trained.rate(now) if rate is None else rate


def producer_state(head: Head, age: float, gone: bool, ended: bool = False) -> State:
    """Returns what a producer does that said so `age` seconds ago.

    That its process is `gone`, not to be seen, counts only once heartbeats are missed too: it may be in a container.
    That it has `ended` counts at once.
    """
    silent = ended or age > _DEAD_HEARTBEAT_S or (gone and age > STALE_HEARTBEAT_S)
    return "dead" if silent and head.state in ("running", "waiting") else head.state


def outlook_of_reader(
    ahead: int | None, taking: float | None, coming: float | None, ended: bool
) -> tuple[Supply, float | None]:
    """Returns what a reader has to expect, and in how many seconds it has to wait: None if never or unknown.

    `ahead` are published chunks beyond those that it needs, negative where it waits; it takes `taking` chunks a second,
    and `coming` are published. Each is None where it is not known.
    """
    if ended:
        return "complete", None
    if ahead is None:
        return "unknown", None
    if ahead < 0:
        return "dry", 0.0
    if taking is None or coming is None:
        return "unknown", None
    seconds = _time_to_use(ahead, taking - coming)
    return "steady" if seconds is None else "shrinking", seconds


def _time_to_use(amount: float, rate: float) -> float | None:
    """Returns in how many seconds an amount is used up, None if never."""
    return amount / rate if rate > 0 and amount < rate * _FORESEEABLE_S else None


class Growth:
    """How fast a number grows, by the steps that were seen of it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()

    def step(self, at: float, value: float) -> None:
        """Takes what the number was at a time, in seconds; one that goes back makes everything before it void."""
        if self._steps and (at < self._steps[-1][0] or value < self._steps[-1][1]):
            self._steps.clear()
        if not self._steps or at > self._steps[-1][0]:
            self._steps.append((at, value))
        while len(self._steps) > 2 and self._steps[0][0] < at - _MEMORY_S:
            self._steps.popleft()

    def rate(self, now: float) -> float | None:
        """Returns the growth per second, None before the second step.

        Once no step has come for longer than twice the longest pause between two, that silence counts too, so that what
        stands still does not keep its rate.
        """
        if len(self._steps) < 2:
            return None
        times = [at for at, _ in self._steps]
        longest = max(later - earlier for earlier, later in itertools.pairwise(times))
        until = now if now - times[-1] > 2 * longest else times[-1]
        return (self._steps[-1][1] - self._steps[0][1]) / (until - times[0])


class _ObservedGrowth(Growth):
    """The growth of a number of which only the changes tell when it had a value."""

    def __init__(self) -> None:
        super().__init__()
        self._last: int | None = None

    def look(self, now: float, value: int) -> None:
        """Takes what the number is at a time, in seconds."""
        # When it came to have the value that the first look finds is not known.
        if self._last is not None and value != self._last:
            self.step(now, value)
        self._last = value


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left where no step is.

    Of [chunks_before, keeps), which it is not done with, its newest checkpoint needs no chunk: an older one does, or an
    epoch that is to follow. `keeps` is not more where there is no such chunk, or that cannot be told.
    """

    samples: int  # that its newest checkpoint has not trained: fewer than its next step takes
    keeps: int
    limited: bool = False  # it takes no more of the stream than it has had, by its `max_total_samples`


def remainder(consumer: Consumer, census: Census) -> Remainder | None:
    """Returns what is left for a consumer, None where a step is still to train, or nothing tells."""
    samples, cursor, ended = census.samples, consumer.cursor, census.ended
    if samples is None or cursor is None or consumer.problem is not None:
        return None
    state = cursor.state
    limit = None if state is None else state.max_total_samples
    limited = limit is not None and (limit < samples or (limit == samples and not ended))
    total = limit if limited else samples if ended else None
    left = max(0, (samples if total is None else total) - cursor.consumed)
    # Of a step, or of a micro batch of all ranks where the number of those is not told.
    step = cursor.plan.get("dp_size", 1) * cursor.plan.get("batch_size", 1)
    if state is not None:
        step = state.parts[-1].dp * max(state.parts[-1].batch_size, state.parts[-1].draws_per_step)
    if left >= step:
        return None
    keeps = cursor.chunks_before
    if total is not None and not left:
        keeps = census.chunks
    elif state is not None:
        course = course_of(state)
        keeps = course.done_before(course.current.draws, total) // state.samples_per_chunk
    return Remainder(left, keeps, limited)
