"""Tells the producer how much of the stream is needed to read on, so that one which holds back goes far enough.

Rank 0 speaks for all: ranks train in lockstep, and a window counts as published only with all its lanes. Whichever of
its processes comes to a window first, the main one or a DataLoader worker, replaces the consumer's reading mark; none
takes back what another one has told since the data set was made. A mark may still get lost, where two write at the same
time, so who waits for data looks at it again and again.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Final

from lazyshard.format import ReadingMark
from lazyshard.plan import Course
from lazyshard.stream import StreamReader, read_reading, write_reading

REPEAT_S: Final = 1.0
"""How often who waits looks whether its need is still told: one small file read, while nothing else is to be done."""

PAUSE_S: Final = 0.2
"""How long a mark stands at the least, unless it is waited upon: replacing a file takes about a millisecond, in which a
reader of small chunks comes past several windows."""

_NO_MORE: Final = sys.maxsize
"""Past any position: nothing more will be needed."""


class ReadingMarks:
    """Keeps the reading mark of one consumer.

    Args:
        consumer: its name.
        course: what is drawn when.
        reader: the stream.
        since: when the data set was made, in seconds since 1970; None for now.
        clock: returns seconds since 1970.
        timer: returns seconds, for the pauses between two looks.

    Attributes:
        stop: the first position for which more is needed than was told.
    """

    def __init__(
        self,
        consumer: str,
        course: Course,
        reader: StreamReader,
        *,
        since: float | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stop = 0
        self._consumer = consumer
        self._course = course
        self._directory = reader.directory
        self._stream_id = reader.stream_id
        self._samples_per_chunk = reader.samples_per_chunk
        self._clock = clock
        self._timer = timer
        self._since = clock() if since is None else since
        self._looked_at = -math.inf
        self._mark: ReadingMark | None = None

    def enter(self, position: int, limit: int | None, published: int) -> None:
        """Tells what is needed at a position, before it is waited for. Never raises for the filesystem.

        At once where it has to be waited for, and where nothing more will be needed; otherwise soon, with a window that
        follows.

        Args:
            position: of any lane; at least `stop`, or there is nothing new to tell.
            limit: no sample from this one on will be drawn; None where the end is open.
            published: samples known to be published.
        """
        size = self._samples_per_chunk
        needed = self._course.needed(position)
        samples = needed if limit is None else min(needed, limit)
        chunks = -(-samples // size)
        capped = limit is not None and chunks * size >= limit
        self.stop = _NO_MORE if capped else self._course.drawable(chunks * size)
        self._mark = ReadingMark(
            consumer=self._consumer,
            stream_id=self._stream_id,
            dp_size=self._course.dp,
            window=position // self._course.rules.span,
            needs_chunks=chunks,
            updated_at=self._clock(),
        )
        if capped or samples > published or self._timer() - self._looked_at >= PAUSE_S:
            self._write_if_due()

    def repeat(self) -> None:
        """Tells again what is needed if it is not told any more. For who waits; looks about once a second."""
        if self._mark is not None and self._timer() - self._looked_at >= REPEAT_S:
            self._write_if_due()

    def _write_if_due(self) -> None:
        mark = self._mark
        assert mark is not None
        self._looked_at = self._timer()
        if is_due(read_reading(self._directory, self._consumer), mark, self._since):
            write_reading(self._directory, mark)


def is_due(found: ReadingMark | None, mark: ReadingMark, since: float) -> bool:
    """Returns whether a mark is to replace the one that is found.

    Args:
        found: the consumer's mark now, None if there is none that can be read.
        mark: the one to write.
        since: when the data set was made, in seconds since 1970. An older mark is that of a run before: it may be far
            ahead, if this one has started from an older checkpoint.
    """
    if found is None or found.updated_at < since:
        return True
    return found.stream_id != mark.stream_id or found.needs_chunks < mark.needs_chunks
