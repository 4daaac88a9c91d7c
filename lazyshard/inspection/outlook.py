"""What a look at a stream means: who is how far behind, at which rate, and when something runs out.

Decisions only: time goes in as numbers. What cannot be known is None; nothing is guessed. A rate of a consumer or of
deletion takes two looks at least, since the files say where each is, not how fast.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from lazyshard.format.cursor import Cursor
from lazyshard.format.records import Head, ProducerState
from lazyshard.inspection.band import Band, make_band
from lazyshard.inspection.survey import Survey
from lazyshard.stream.consumers import Consumer
from lazyshard.stream.pacing import STALE_HEARTBEAT_S, is_silent
from lazyshard.stream.run_state import course_of

_DEAD_HEARTBEAT_S: Final = 60.0
"""A producer that works gives a sign every few seconds; after a minute of silence nobody should rely on it."""

_FORESEEABLE_S: Final = 10 * 365 * 86400.0
"""What is further away at a rate that has faded (towards zero, where a division by it overflows) does not happen."""

State = Literal[ProducerState, "dead"]

Supply = Literal["dry", "shrinking", "steady", "complete", "unknown"]
"""What a reader has to expect: dry: it waits; shrinking: it reads faster than rows come; steady: it does not; complete:
the stream has ended, so all that it needs is there; unknown: it leaves no reading mark, or a rate is not known."""


_MEMORY_S: Final = 120.0
"""A rate is taken from the steps of so many seconds, from two at least: it rides over a slow window, and follows a
change within minutes."""


@dataclass(frozen=True, slots=True)
class ConsumerOutlook:
    """Where a consumer is, and what it has to expect.

    Attributes:
        consumer: what it has told.
        checkpoint_age_s: seconds since its cursor was written, None without one.
        reading_age_s: seconds since its reading mark was written, None without one.
        lag_chunks: published chunks that it is not done with; None where its cursor has a problem.
        lag_samples: published samples that are not in its durable checkpoints; None where unknown.
        lag_s: how many seconds ago the first of those chunks was published, 0 if there are none; None where unknown.
        ahead_chunks: published chunks beyond those that it needs to read on; negative: it waits for so many. None
            where it leaves no reading mark.
        chunk_rate: chunks per second that it takes, None where unknown.
        supply: what it has to expect.
        dry_in_s: in how many seconds it has to wait at these rates: 0 if it does, None if never or unknown.
        remainder: what is left of what is published, of which it has trained all whole steps; None otherwise.
    """

    consumer: Consumer
    checkpoint_age_s: float | None
    reading_age_s: float | None
    lag_chunks: int | None
    lag_samples: int | None
    lag_s: float | None
    ahead_chunks: int | None
    chunk_rate: float | None
    supply: Supply
    dry_in_s: float | None
    remainder: Remainder | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a look at a stream means.

    Attributes:
        survey: the look.
        state: what the producer does, None where it does not tell.
        heartbeat_age_s: seconds since it gave a sign, None where it gives none. Clocks may differ.
        clock_ahead_s: seconds by which its clock is ahead of this machine's, 0 where that is not seen.
        chunk_rate: chunks per second that come, None where unknown.
        byte_rate: bytes per second by which the stream grows, deletion taken off; None where unknown.
        full_in_s: in how many seconds the disk is full at this rate, None if never or unknown.
        consumers: by name.
        band: the stream as a band of chunks, and who reads which of them.
    """

    survey: Survey
    state: State | None
    heartbeat_age_s: float | None
    clock_ahead_s: float
    chunk_rate: float | None
    byte_rate: float | None
    full_in_s: float | None
    consumers: tuple[ConsumerOutlook, ...]
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
        age = None if census.head is None else max(0.0, now - census.head.updated_at)
        state = (
            None if census.head is None else producer_state(census.head, age or 0.0, survey.gone is True, survey.ended)
        )
        coming = self._coming(survey, state)
        growth = self._growth(survey, coming)
        return Outlook(
            survey=survey,
            state=state,
            heartbeat_age_s=age,
            clock_ahead_s=0.0 if census.head is None else max(0.0, census.head.updated_at - now),
            chunk_rate=coming,
            byte_rate=growth,
            # What is held back does not fill the disk at the rate that it had before.
            full_in_s=None
            if survey.free is None or growth is None or state == "waiting"
            else _time_to_use(survey.free, growth),
            consumers=tuple(self._consumer(survey, consumer, coming) for consumer in survey.consumers),
            band=make_band(census, survey.consumers),
        )

    def _coming(self, survey: Survey, state: State | None) -> float | None:
        census = survey.census
        if census.ended or state in ("idle", "failed", "finished", "dead"):
            return 0.0
        if census.head is not None and is_silent(census.head, survey.looked_at):
            return 0.0
        if census.head is not None and census.manifest is not None and census.head.rate > 0:
            return census.head.rate / census.manifest.samples_per_chunk
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
        return ConsumerOutlook(
            consumer=consumer,
            checkpoint_age_s=None if cursor is None else max(0.0, now - cursor.updated_at),
            reading_age_s=None if reading is None else max(0.0, now - reading.updated_at),
            lag_chunks=lag_chunks,
            lag_samples=lag_samples,
            lag_s=lag_s,
            ahead_chunks=ahead,
            chunk_rate=rate,
            supply=supply,
            dry_in_s=dry_in_s,
            remainder=_remainder(survey, consumer),
        )

    def _consumer_rate(self, survey: Survey, consumer: Consumer) -> float | None:
        """Returns chunks per second: by its reading marks, which come more often, else by its checkpoints."""
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


def _remainder(survey: Survey, consumer: Consumer) -> Remainder | None:
    census = survey.census
    if census.samples is None or consumer.cursor is None or consumer.problem is not None:
        return None
    return remainder(consumer.cursor, census.samples, census.chunks, census.ended)


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


class _ObservedGrowth:
    """The growth of a number of which only the changes tell when it had a value."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._growth = Growth()

    def look(self, now: float, value: int) -> None:
        """Takes what the number is at a time, in seconds."""
        # When it came to have the value that the first look finds is not known.
        if self._last is not None and value != self._last:
            self._growth.step(now, value)
        self._last = value

    def rate(self, now: float) -> float | None:
        """Returns the growth per second as `Growth.rate` does, None before the second change."""
        return self._growth.rate(now)


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left where no step is.

    Attributes:
        samples: how many samples its newest checkpoint has not trained: fewer than its next step takes.
        keeps: its newest checkpoint needs none of the chunks of the half-open range [chunks_before, keeps), which it
            is not done with: an older checkpoint does, or an epoch that is to follow. Not more than `chunks_before`
            where there is no such chunk, or that cannot be told.
        limited: it takes no more of the stream than it has had, by its `max_total_samples`.
    """

    samples: int
    keeps: int
    limited: bool = False


def remainder(cursor: Cursor, samples: int, chunks: int, ended: bool) -> Remainder | None:
    """Returns what is left for a consumer of so many published samples, None where there is a step still to train."""
    limit = None if cursor.state is None else cursor.state.max_total_samples
    limited = limit is not None and (limit < samples or (limit == samples and not ended))
    total = limit if limited else samples if ended else None
    left = max(0, (samples if total is None else total) - cursor.consumed)
    if left >= _step(cursor):
        return None
    through = total is not None and not left
    return Remainder(left, chunks if through else _needed_from(cursor, total), limited)


def _step(cursor: Cursor) -> int:
    """Returns how many samples a step takes, or a micro batch of all ranks where the number of those is not told."""
    if cursor.state is None:
        return cursor.plan.get("dp_size", 1) * cursor.plan.get("batch_size", 1)
    part = cursor.state.parts[-1]
    return part.dp * max(part.batch_size, part.draws_per_step)


def _needed_from(cursor: Cursor, total: int | None) -> int:
    if cursor.state is None:
        return cursor.chunks_before
    course = course_of(cursor.state)
    return course.done_before(course.current.draws, total) // cursor.state.samples_per_chunk
