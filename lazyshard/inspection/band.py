"""A stream as a band of chunks: what has become of each, as few stretches, and a close-up of where it is read.

The cost grows with the consumers, never with the chunks. What a consumer reads now follows from its reading mark, which
says which window of which length is open, and its cursor, which says how the run deals; together they give the chunks
of the window, as in `lazyshard.plan`: of 2 ranks, 1 chunk a stripe and 2 chunks a window, window 3 is chunks 12 to 15,
for ranks 0, 1, 0, 1. The cursor is that of the last checkpoint. Where a run has since been resumed with other ranks,
the two contradict each other, and nothing is claimed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from lazyshard.errors import LazyShardError
from lazyshard.format.state import RunState
from lazyshard.inspection.survey import Census
from lazyshard.stream.consumers import Consumer
from lazyshard.stream.run_state import course_of

ChunkState = Literal["deleted", "done", "taken", "reading", "ready", "awaited"]
"""deleted: or being deleted; done: in durable checkpoints of every consumer; taken: every consumer has read on behind
it, but not all have it in a checkpoint; reading: in the open window of a consumer, all of which is published; ready:
published, and some consumer has not come to it, or waits for the rest of its window; awaited: not published, and a
consumer needs it to read on."""

CLOSE_UP: Final = 96  # Chunks of the close-up: three lines of a laptop's screen, and as many as a phone's holds
_BEHIND: Final = 16  # Chunks of the close-up before those that are read
_MAX_WINDOWS: Final = 64  # Of more consumers, those furthest behind are drawn
_MAX_PARTS: Final = 64
_MAX_RANKS: Final = 1 << 20  # Of a longer history or more ranks nothing is told: a look must not become costly by files


class ChunkStretch(NamedTuple):
    """Chunks of the half-open range [first, stop), all in the same state."""

    first: int
    stop: int
    state: ChunkState


class ChunkReader(NamedTuple):
    """Who reads a chunk now: which rank of which consumer; None where several share the chunk."""

    consumer: str
    rank: int | None


class Cell(NamedTuple):
    """A chunk of the close-up."""

    chunk: int
    state: ChunkState
    readers: tuple[ChunkReader, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """A stream as a band of the chunks of [0, stop): those published, and those that are awaited."""

    stop: int
    stretches: tuple[ChunkStretch, ...]  # of all of them, in order; neighbours differ
    cells: tuple[Cell, ...]  # the close-up: `CLOSE_UP` chunks around those the slowest reader reads, or the newest ones
    windows: dict[str, OpenWindow]  # what each consumer reads now, by name, as far as its files tell


def make_band(census: Census, consumers: Sequence[Consumer], close_up: int = CLOSE_UP) -> Band:
    """Returns a stream as a band, with at most `close_up` chunks in its close-up."""
    windows = {}
    for consumer in sorted(consumers, key=lambda one: (one.chunks_before, one.name))[:_MAX_WINDOWS]:
        window = open_window(consumer, census)
        if window is not None:
            windows[consumer.name] = window
    needs = max((one.reading.needs_chunks for one in consumers if one.reading is not None), default=0)
    stop = census.chunks if census.ended else max(census.chunks, needs)
    stretches = _stretches(census, consumers, windows, stop)
    return Band(stop, stretches, _cells(census, windows, stretches, stop, close_up), windows)


def _stretches(
    census: Census, consumers: Sequence[Consumer], windows: dict[str, OpenWindow], stop: int
) -> tuple[ChunkStretch, ...]:
    done = min((one.chunks_before for one in consumers), default=0)
    # What a consumer has not read on behind, as far as is known.
    firsts = {name: window.first for name, window in windows.items()}
    taken = min((max(one.chunks_before, firsts.get(one.name, 0)) for one in consumers), default=0)
    # One of which chunks are still to come is waited for, on all ranks: none reads in it.
    open_chunks = _joined(window for window in windows.values() if window.stop <= census.chunks)
    cuts = {0, census.retired, done, taken, census.chunks, stop, *(end for one in open_chunks for end in one)}
    found: list[ChunkStretch] = []
    for first, end in pairwise(sorted(cut for cut in cuts if 0 <= cut <= stop)):
        state: ChunkState
        if first < census.retired:
            state = "deleted"
        elif first >= census.chunks:
            state = "awaited"
        elif any(start <= first < over for start, over in open_chunks):
            state = "reading"
        else:
            state = "done" if first < done else "taken" if first < taken else "ready"
        if found and found[-1].state == state:
            found[-1] = ChunkStretch(found[-1].first, end, state)
        else:
            found.append(ChunkStretch(first, end, state))
    return tuple(found)


def _joined(windows: Iterable[OpenWindow]) -> list[tuple[int, int]]:
    """Returns the chunks of any of the windows, as half-open ranges that are sorted and disjoint."""
    joined: list[tuple[int, int]] = []
    for first, stop in sorted((window.first, window.stop) for window in windows):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((first, stop))
    return joined


def _cells(
    census: Census, windows: dict[str, OpenWindow], stretches: Sequence[ChunkStretch], stop: int, close_up: int
) -> tuple[Cell, ...]:
    read = min((window.first for window in windows.values()), default=None)
    newest = min(stop, census.chunks + _BEHIND) - close_up
    first = max(0, newest if read is None else min(read - _BEHIND, stop - close_up))
    cells, end = [], min(stop, first + close_up)
    for start, over, state in stretches:
        for chunk in range(max(first, start), min(end, over)):
            reading = ((name, one) for name, one in sorted(windows.items()) if one.first <= chunk < one.stop)
            readers = tuple(ChunkReader(name, one.rank(chunk)) for name, one in reading)
            cells.append(Cell(chunk, state, readers))
    return tuple(cells)


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """What a consumer reads, or waits for: chunks of [first, stop); those in [dealt_from, dealt_until) have a rank."""

    first: int
    stop: int
    dp: int
    unit_chunks: int = 0  # so many chunks in turn are dealt to a rank; 0 where chunks are shared by ranks
    dealt_from: int = 0
    dealt_until: int | None = None  # from here on is the tail, which is dealt row by row; None where the end is open

    def rank(self, chunk: int) -> int | None:
        """Returns the one rank that reads a chunk; None where several do."""
        behind = self.dealt_until is not None and chunk >= self.dealt_until
        if not self.unit_chunks or chunk < self.dealt_from or behind:
            return None
        return (chunk - self.dealt_from) // self.unit_chunks % self.dp


def open_window(consumer: Consumer, census: Census) -> OpenWindow | None:
    """Returns what a consumer reads now; None where its files do not tell, or where it reads a later epoch."""
    reading, cursor = consumer.reading, consumer.cursor
    if reading is None or cursor is None or cursor.state is None:
        return None
    state = cursor.state
    current = state.parts[-1]
    if (
        current.dp != reading.dp_size
        or current.dp > _MAX_RANKS
        or len(state.parts) > _MAX_PARTS
        # What is left out would have to be looked up sample by sample.
        or any(part.skip for part in state.parts)
    ):
        return None
    try:
        return _window(state, reading.window, reading.needs_chunks, cursor.chunks_before, census)
    except (LazyShardError, ValueError, IndexError, OverflowError):
        # Numbers that no run can have.
        return None


def _window(state: RunState, window: int, needs_chunks: int, done: int, census: Census) -> OpenWindow | None:
    size, limit = state.samples_per_chunk, state.max_total_samples
    total = census.samples if census.ended else None
    if total is not None and limit is not None:
        total = min(total, limit)
    course = course_of(state)
    begin = course.begin(total)
    span = course.rules.span
    positions = range(window * span, (window + 1) * span)
    least, most = course.needed(positions[0]), course.needed(positions[-1])
    if limit is not None:
        least, most = min(least, limit), min(most, limit)
    if total is not None:
        # A mark may have been left before that end was known.
        least = min(least, total)
    if not -(-least // size) <= needs_chunks <= -(-most // size):
        # The mark is of another part of the run than the cursor.
        return None
    if total is not None and state.parts[-1].draws >= begin.length:
        # Marks are of the epoch in which the part begins.
        return None
    # The first of these positions that needs so much: after a change of ranks windows begin in between.
    position = positions.start + bisect_left(positions, (needs_chunks - 1) * size + 1, key=course.needed)
    first, stop = max(done, course.done_before(position, total) // size), needs_chunks
    if census.ended:
        stop = min(stop, census.chunks)
    if first >= stop:
        return None
    unit, start = course.rules.unit, begin.segment.start
    if unit % size or start % size:
        return OpenWindow(first, stop, course.dp)
    stripe = course.dp * unit
    until = None if total is None else (start + max(0, total - start) // stripe * stripe) // size
    return OpenWindow(first, stop, course.dp, unit // size, start // size, until)
