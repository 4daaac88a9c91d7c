"""Which chunks a consumer reads now, and which of its ranks reads each, as far as its files tell.

Its reading mark says which window of which length is open, its cursor how the run deals. Both together give the chunks
of the window, as in `lazyshard.plan`::

    2 ranks, 1 chunk a stripe, 2 chunks a window: window 3 is chunks 12 to 15

    chunk   12  13  14  15
    rank     0   1   0   1

The cursor is that of the last checkpoint. Where a run has since been resumed with other ranks, the two contradict each
other, and nothing is claimed. Arithmetic only.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.format import RunState
from lazyshard.inspection.census import Census
from lazyshard.stream.consumers import Consumer
from lazyshard.stream.run_state import course_of

_MAX_PARTS: Final = 64
_MAX_RANKS: Final = 1 << 20
"""Of runs with a longer history or more ranks nothing is told: a look must not become costly by what a file says."""


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """What a consumer reads now, or waits for.

    Attributes:
        first, stop: the window needs the chunks of the half-open range [first, stop), and maybe not all of each.
        dp: ranks.
        unit_chunks: so many chunks in turn are dealt to a rank; 0 where chunks are shared by ranks.
        dealt_from: from this chunk on they are dealt by `rank`; before it, and behind `dealt_until`, they are shared.
        dealt_until: chunks from here on are the tail, which is dealt row by row; None where the end is open.
    """

    first: int
    stop: int
    dp: int
    unit_chunks: int = 0
    dealt_from: int = 0
    dealt_until: int | None = None

    def rank(self, chunk: int) -> int | None:
        """Returns the one rank that reads a chunk; None where several do."""
        if not self.unit_chunks or chunk < self.dealt_from:
            return None
        if self.dealt_until is not None and chunk >= self.dealt_until:
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
