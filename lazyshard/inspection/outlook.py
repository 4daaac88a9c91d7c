"""What a survey of a stream means: how far each consumer lags, at which rates, when something runs out; and its chunks.

This module only decides: times are passed in as numbers. Unknown values are None; nothing is guessed. A rate of a
consumer or of deletion takes at least two surveys, since the files record positions, not rates.

What a consumer reads now follows from its reading hint, which names the open window, and its cursor, which holds the
deal of the run: with 2 ranks, 1 chunk per stripe and 2 chunks per window, window 3 is chunks 12 to 15, for ranks 0, 1,
0, 1. If a run has since been resumed with other ranks, the two contradict each other, and nothing is reported.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from lazyshard.errors import LazyShardError
from lazyshard.format.state import BlendShare
from lazyshard.inspection.survey import Census, LostChunks, State, Survey, producer_state
from lazyshard.stream.cursor import Consumer
from lazyshard.stream.head import is_silent
from lazyshard.stream.run_parts import course_of

Supply = Literal["dry", "shrinking", "steady", "complete", "unknown"]
"""What a reader can expect. dry: it waits; shrinking: it reads faster than rows arrive; steady: it does not; complete:
the stream has ended, so it has all it needs; unknown: it leaves no reading hint, or a rate is unknown."""

ChunkState = Literal["deleted", "done", "taken", "reading", "ready", "awaited"]
"""deleted: or being deleted; done: in durable checkpoints of every consumer; taken: every consumer has read past it,
but not all have it in a checkpoint; reading: in the open window of a consumer, which is fully published; ready:
published, and some consumer has not reached it or waits for the rest of its window; awaited: not published, and a
consumer needs it to read on."""

CLOSE_UP: Final = 96  # chunks of the close-up: three lines of a laptop's screen, and as many as fit on a phone's
_BEHIND: Final = 16  # chunks of the close-up before those being read


class ConsumerOutlook(NamedTuple):
    """Where a consumer is, and what it can expect; None if unknown. Field names match the JSON output."""

    consumer: Consumer
    checkpoint_age_s: float | None  # since its cursor was written
    reading_age_s: float | None  # since its reading hint was written
    lag_chunks: int | None  # published chunks that it has not finished; None if its cursor has a problem
    lag_samples: int | None  # published samples that are not in its durable checkpoints
    lag_s: float | None  # how long ago the first of those chunks was published, 0 if there are none
    ahead_chunks: int | None  # published chunks beyond those it needs to read on; negative: how many it waits for
    read_chunks_per_s: float | None
    supply: Supply
    starving_in_s: float | None  # when it has to wait at these rates: 0 if it does now, None also if never
    remainder: Remainder | None = None  # what is left of the published rows, if it has trained all whole steps

    @property
    def blend(self) -> list[tuple[BlendShare, float | None]]:
        """The streams of its blend, each with its share of all samples trained; None if none was trained."""
        shares = () if self.consumer.cursor is None else self.consumer.cursor.blend
        whole = sum(one.consumed for one in shares)
        return [(one, one.consumed / whole if whole else None) for one in shares]


class Outlook(NamedTuple):
    """What a survey of a stream means; None: unknown."""

    survey: Survey
    state: State | None  # what the producer does, None if it reports nothing
    heartbeat_age_s: float | None  # since its last heartbeat; clocks may differ
    clock_ahead_s: float  # how far the producer's clock is ahead of this machine's; 0 if that does not show
    chunk_rate: float | None  # chunks that arrive per second
    byte_rate: float | None  # bytes per second by which the stream grows, minus deletion
    full_in_s: float | None  # in how many seconds the disk is full at this rate, None also if never
    consumers: tuple[ConsumerOutlook, ...]  # by name
    band: Band

    @property
    def slowest(self) -> ConsumerOutlook | None:
        """The reader with the most chunks before it, None if none leaves a reading hint."""
        reading = [one for one in self.consumers if one.ahead_chunks is not None]
        return max(reading, key=lambda one: one.ahead_chunks or 0, default=None)

    @property
    def gone(self) -> list[str]:
        """The consumers with samples left to train whose run this machine no longer has."""
        ended = self.survey.census.ended
        left = (one for one in self.consumers if one.remainder is None or not (ended or one.remainder.limited))
        return [one.consumer.name for one in left if one.consumer.name in self.survey.runs_gone]


class Looks:
    """Consecutive surveys of one stream, from which it derives rates; `lost` is what these surveys share."""

    def __init__(self) -> None:
        self.lost = LostChunks()
        self._published, self._retired = Growth(), Growth()
        self._readings, self._cursors = defaultdict[str, Growth](Growth), defaultdict[str, Growth](Growth)

    def add(self, survey: Survey) -> Outlook:
        """Adds a survey and returns what it means."""
        now, census, head = survey.looked_at, survey.census, survey.census.head
        self._published.look(now, census.chunks)
        self._retired.look(now, census.retired)
        age, ahead, state = None, 0.0, None
        if head is not None:
            age, ahead = max(0.0, now - head.updated_at), max(0.0, head.updated_at - now)
            state = producer_state(head, age, survey.gone is True, survey.ended)
        coming, growth, full_in_s = self._published.rate(now), None, None
        silent = head is not None and is_silent(head, now)
        if census.ended or silent or state in ("idle", "failed", "finished", "dead"):
            coming = 0.0
        elif head is not None and census.manifest is not None and head.rate > 0:
            coming = head.rate / census.manifest.samples_per_chunk
        leaving = self._retired.rate(now) if census.retired else 0.0
        if coming == 0:
            growth = 0.0
        elif coming is not None and leaving is not None and survey.disk.chunk_size is not None:
            growth = (coming - leaving) * survey.disk.chunk_size
        # A producer that is held back does not fill the disk at its earlier rate.
        if survey.free is not None and growth is not None and state != "waiting":
            full_in_s = _time_to_use(survey.free, growth)
        consumers = tuple(self._consumer(survey, consumer, coming) for consumer in survey.consumers)
        band = make_band(census, survey.consumers)
        return Outlook(survey, state, age, ahead, coming, growth, full_in_s, consumers, band)

    def _consumer(self, survey: Survey, consumer: Consumer, coming: float | None) -> ConsumerOutlook:
        now, census = survey.looked_at, survey.census
        reading, cursor = consumer.reading, consumer.cursor
        read, trained = self._readings[consumer.name], self._cursors[consumer.name]
        if reading is not None:
            read.step(reading.updated_at, reading.needs_chunks)
        if cursor is not None and census.manifest is not None:
            trained.step(cursor.updated_at, cursor.consumed / census.manifest.samples_per_chunk)
        rate = read.rate(now)
        if rate is None:
            rate = trained.rate(now)
        lag_chunks = lag_samples = lag_s = None
        if consumer.problem is None:
            lag_chunks = census.chunks - consumer.chunks_before
            if census.samples is not None:
                state = None if cursor is None else cursor.state
                drawn = census.samples if state is None else course_of(state).rules.gaps.kept(0, census.samples)
                lag_samples = max(0, drawn - (0 if cursor is None else cursor.consumed))
            since = survey.unread_since.get(consumer.name)
            lag_s = 0.0 if lag_chunks <= 0 else None if since is None else max(0.0, now - since)
        # A hint below the consumer's own cursor is outdated.
        ahead = None if reading is None else census.chunks - max(reading.needs_chunks, consumer.chunks_before)
        supply, dry_in_s = outlook_of_reader(ahead, rate, coming, census.ended)
        aged, marked = (None if one is None else max(0.0, now - one.updated_at) for one in (cursor, reading))
        left, lags = remainder(consumer, census), (lag_chunks, lag_samples, lag_s)
        return ConsumerOutlook(consumer, aged, marked, *lags, ahead, rate, supply, dry_in_s, left)


def outlook_of_reader(
    ahead: int | None, taking: float | None, coming: float | None, ended: bool
) -> tuple[Supply, float | None]:
    """Returns what a reader can expect, and in how many seconds it waits; negative `ahead`: it waits now."""
    if ended:
        return "complete", None
    if ahead is not None and ahead < 0:
        return "dry", 0.0
    if ahead is None or taking is None or coming is None:
        return "unknown", None
    seconds = _time_to_use(ahead, taking - coming)
    return "steady" if seconds is None else "shrinking", seconds


def _time_to_use(amount: float, rate: float) -> float | None:
    """Returns in how many seconds an amount is used up, None if never."""
    # Anything ten years away, at a rate that has faded, counts as never.
    return amount / rate if rate > 0 and amount < rate * 10 * 365 * 86400.0 else None


class Growth:
    """The growth rate of a number, from the steps that were observed."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._last: float | None = None

    def look(self, now: float, value: float) -> None:
        """Records a value seen at `now`; only a change shows when the number took its value."""
        # It is unknown since when the first value was valid.
        if self._last is not None and value != self._last:
            self.step(now, value)
        self._last = value

    def step(self, at: float, value: float) -> None:
        """Records the value at a time, in seconds; a decrease discards everything before it."""
        if self._steps and (at < self._steps[-1][0] or value < self._steps[-1][1]):
            self._steps.clear()
        if not self._steps or at > self._steps[-1][0]:
            self._steps.append((at, value))
        # The rate covers two minutes, but at least two steps: it follows a change within minutes.
        while len(self._steps) > 2 and self._steps[0][0] < at - 120.0:
            self._steps.popleft()

    def rate(self, now: float) -> float | None:
        """Returns the growth per second, None before two steps; a silence of twice the longest pause counts, too."""
        if len(self._steps) < 2:
            return None
        longest = max(later - earlier for (earlier, _), (later, _) in itertools.pairwise(self._steps))
        (first, begun), (last, value) = self._steps[0], self._steps[-1]
        return (value - begun) / ((now if now - last > 2 * longest else last) - first)


class Remainder(NamedTuple):
    """What is left for a consumer when no whole step is left."""

    samples: int  # not trained by its newest checkpoint: fewer than its next step takes
    keeps: int  # an older checkpoint or a following epoch needs chunks of [chunks_before, keeps), the newest does not
    limited: bool = False  # it takes nothing more from the stream, because of its `max_total_samples`


def remainder(consumer: Consumer, census: Census) -> Remainder | None:
    """Returns what is left for a consumer, None if a whole step is left or it is unknown."""
    samples, cursor, ended = census.samples, consumer.cursor, census.ended
    if samples is None or cursor is None or consumer.problem is not None:
        return None
    state = cursor.state
    limit = None if state is None else state.max_total_samples
    limited = limit is not None and (limit < samples or (limit == samples and not ended))
    total = limit if limited else samples if ended else None
    left = max(0, (samples if total is None else total) - cursor.consumed)
    # The size of a step, or if the ranks are unknown of a micro batch of all ranks.
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


class ChunkStretch(NamedTuple):
    """The chunks [first, stop), all in the same state."""

    first: int
    stop: int
    state: ChunkState


class Cell(NamedTuple):
    """A chunk in the close-up."""

    chunk: int
    state: ChunkState
    readers: tuple[tuple[str, int | None], ...]  # consumers that read it now, and the rank, None if several share it


class Band(NamedTuple):
    """A stream as a band of the chunks [0, stop): the published and the awaited ones."""

    stop: int
    stretches: tuple[ChunkStretch, ...]  # all chunks, in order; neighbours differ
    cells: tuple[Cell, ...]  # the close-up: `CLOSE_UP` chunks around those of the slowest reader, or the newest ones
    windows: dict[str, OpenWindow]  # what each consumer reads now, by name, if its files show it


def make_band(census: Census, consumers: Sequence[Consumer], close_up: int = CLOSE_UP) -> Band:
    """Returns a stream as a band, with at most `close_up` chunks in its close-up."""
    # If there are more consumers, those furthest behind are drawn.
    drawn = sorted(consumers, key=lambda one: (one.chunks_before, one.name))[:64]
    found = {one.name: open_window(one, census) for one in drawn}
    windows = {name: window for name, window in sorted(found.items()) if window is not None}
    needs = max((one.reading.needs_chunks for one in consumers if one.reading is not None), default=0)
    stop = census.chunks if census.ended else max(census.chunks, needs)
    # Where each consumer reads, as far as is known.
    firsts = {name: window.first for name, window in windows.items()}
    done = min((one.chunks_before for one in consumers), default=0)
    taken = min((max(one.chunks_before, firsts.get(one.name, 0)) for one in consumers), default=0)
    # A window with unpublished chunks is waited for on all ranks, so none reads in it.
    read = [(window.first, window.stop) for window in windows.values() if window.stop <= census.chunks]
    cuts = {0, census.retired, done, taken, census.chunks, stop, *itertools.chain(*read)}
    first = min(firsts.values()) - _BEHIND if firsts else census.chunks + _BEHIND - close_up
    first = max(0, min(first, stop - close_up))
    stretches, cells = list[ChunkStretch](), list[Cell]()
    for begin, end in itertools.pairwise(sorted(cut for cut in cuts if 0 <= cut <= stop)):
        state: ChunkState = "done" if begin < done else "taken" if begin < taken else "ready"
        if begin < census.retired:
            state = "deleted"
        elif begin >= census.chunks:
            state = "awaited"
        elif any(start <= begin < over for start, over in read):
            state = "reading"
        for chunk in range(max(first, begin), min(first + close_up, end)):
            readers = ((name, one.rank(chunk)) for name, one in windows.items() if one.first <= chunk < one.stop)
            cells.append(Cell(chunk, state, tuple(readers)))
        same = stretches and stretches[-1].state == state
        stretches.append(ChunkStretch(stretches.pop().first if same else begin, end, state))
    return Band(stop, tuple(stretches), tuple(cells), windows)


class OpenWindow(NamedTuple):
    """The chunks [first, stop) that a consumer reads or waits for; those in [dealt_from, dealt_until) have one rank."""

    first: int
    stop: int
    dp: int
    unit_chunks: int = 0  # consecutive chunks that are dealt to one rank; 0 if ranks share chunks
    dealt_from: int = 0
    dealt_until: int | None = None  # start of the tail, which is dealt row by row; None if the end is open

    def rank(self, chunk: int) -> int | None:
        """Returns the one rank that reads a chunk; None if several do."""
        behind = self.dealt_until is not None and chunk >= self.dealt_until
        if not self.unit_chunks or chunk < self.dealt_from or behind:
            return None
        return (chunk - self.dealt_from) // self.unit_chunks % self.dp


def open_window(consumer: Consumer, census: Census) -> OpenWindow | None:
    """Returns what a consumer reads now; None if its files do not show it, or it reads a later epoch."""
    reading, cursor = consumer.reading, consumer.cursor
    state = None if cursor is None else cursor.state
    if reading is None or cursor is None or state is None:
        return None
    # None for a longer history, more ranks or skipped samples: files must not make a survey expensive, and skipped
    # samples would have to be looked up one by one.
    dp, left_out = state.parts[-1].dp, any(part.skip for part in state.parts)
    if dp != reading.dp_size or dp > 1 << 20 or len(state.parts) > 64 or left_out:
        return None
    size, limit, needs_chunks = state.samples_per_chunk, state.max_total_samples, reading.needs_chunks
    total = min(census.samples, limit or census.samples) if census.ended and census.samples is not None else None
    try:
        course = course_of(state)
        begin, span = course.begin(total), course.rules.span
        positions = range(reading.window * span, (reading.window + 1) * span)
        # A hint may have been written before the end was known.
        least, most = (min(one, limit or one) for one in map(course.needed, (positions[0], positions[-1])))
        least = least if total is None else min(least, total)
        # The first of these positions that needs so many samples: after a change of ranks, windows begin in between.
        position = positions.start + bisect_left(positions, (needs_chunks - 1) * size + 1, key=course.needed)
        first = max(cursor.chunks_before, course.done_before(position, total) // size)
    except (LazyShardError, ValueError, IndexError, OverflowError):
        # No run can have these numbers.
        return None
    # Otherwise the hint is from another part of the run than the cursor, or from a later epoch: hints refer to the
    # epoch in which the part begins.
    fits = -(-least // size) <= needs_chunks <= -(-most // size)
    over = total is not None and state.parts[-1].draws >= begin.length
    stop = min(needs_chunks, census.chunks) if census.ended else needs_chunks
    if not fits or over or first >= stop:
        return None
    unit, start, until = course.rules.unit, begin.segment.start, None
    if unit % size or start % size:
        return OpenWindow(first, stop, course.dp)
    if total is not None:
        stripe = course.dp * unit
        until = (start + max(0, total - start) // stripe * stripe) // size
    return OpenWindow(first, stop, course.dp, unit // size, start // size, until)
