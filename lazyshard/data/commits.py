"""What a run and the producer know of each other: what the stream still holds, the cursor, and the reading hint."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard.data.settings import RunOrder
from lazyshard.errors import CursorTaken, LazyShardError, StateMismatch, WriterFailed
from lazyshard.format.records import CURSORS
from lazyshard.format.state import BlendShare, Cursor, ReadingHint, RunState, check_consumer
from lazyshard.plan.course import Course
from lazyshard.stream import CursorOwner, StreamReader, read_reading, read_retired, write_reading
from lazyshard.stream.run_parts import course_of

_DRAWS_AT_ONCE = 1 << 20  # Draws that are looked at together: 16 MB
_MOST_RANKS: Final = 1 << 20
REPEAT_S: Final = 1.0  # How often who waits looks whether its need is still told: one small file read
# How long a hint stands at the least, unless it is waited upon: replacing a file takes about a millisecond, in which a
# reader of small chunks comes past several windows.
PAUSE_S: Final = 0.2


def check_data(state: RunState, order: RunOrder, reader: StreamReader) -> None:
    """Raises StateMismatch for a state that has drawn more than the stream holds, or continues with deleted chunks.

    Whether the ranks at hand are others makes no difference: they continue with the same samples. Not looked at: what
    an epoch that is still to begin needs.
    """
    where, total = str(reader.directory), order.known_total(reader.refresh())
    if (ranks := max(part.dp for part in state.parts)) > _MOST_RANKS:
        # What is looked at below takes time and memory by their number.
        text = f"the state is of a run with {ranks} ranks, more than {_MOST_RANKS}: it is damaged, take another"
        raise _mismatch(where, text, f"at most {_MOST_RANKS}", ranks, "dp")
    course = course_of(state)
    # However the stream continues: the length counts with the limit.
    known, ended = order.max_total_samples if total is None else total, total is not None
    number = max((n for n, part in enumerate(state.parts) if part.epoch is not None), default=0)
    drawn = sum(part.dp * part.draws for part in state.parts[number:])
    # A live stream of which a maximum was asked for may have ended before it, and the run continued with another.
    one_epoch = ended and order.by_epoch and order.max_total_samples in (None, total)
    try:
        standing(course, known)
        if one_epoch and drawn > (total or 0):
            raise ValueError(f"{drawn} samples were drawn of {total}")
    except ValueError as cause:
        text = f"{cause} at the most (max_total_samples), fewer than a batch of all its ranks: the state is damaged"
        expected = "at least a batch of all ranks"
        if ended:
            text = f"the run has drawn {drawn} samples since its epoch began, but the stream has ended with {total}"
            text = f"{text}: is it another one? Of a run over several epochs give num_samples as it was"
            expected = f"at least {drawn} samples"
        raise _mismatch(where, text, expected, known, None if ended else "max_total_samples") from cause
    # The newest chunk is never deleted, so a directory that another program fills has none to look for.
    retired = 0 if reader.stream_id is None else read_retired(reader.directory, reader.stream_id)
    size = reader.samples_per_chunk
    if retired and (sample := first_lost(*standing(course, total), total, retired * size)) is not None:
        text = (
            f"the run continues with samples of chunk {sample // size}, but the producer has deleted all chunks below"
        )
        text = f"{text} {retired}: continue from a later checkpoint, or produce with --retain all or --consumers NAME"
        raise _mismatch(where, text, f"chunk {sample // size}", f"chunks from {retired} on")


def _mismatch(where: str, text: str, expected: str, actual: object, field: str | None = None) -> StateMismatch:
    return StateMismatch(f"{where}: {text}", directory=where, expected=expected, actual=str(actual), field=field)


def standing(course: Course, total: int | None) -> tuple[Course, int]:
    """Returns a course that begins, or continues, in the epoch in which a course stands, and the position there.

    At the end of an epoch that is still this one. Raises ValueError: more was drawn than there is.
    """
    drawn = course.current.draws
    if total is None or drawn <= (length := course.epoch_length(total)):
        return course, drawn
    full = course.full_epoch_length(total)
    if not full:
        raise ValueError(f"{drawn} positions of {course.dp} lanes were drawn, but there are {total} samples")
    turns = (drawn - length - 1) // full
    return course.in_epoch(course.epoch(total) + 1 + turns), drawn - length - turns * full


def first_lost(course: Course, position: int, total: int | None, stop: int) -> int | None:
    """Returns a sample below `stop` that is drawn from a position on, in the epoch in which the course begins."""
    if course.done_before(position, total) >= stop:
        return None
    end = position + 1 if total is None else course.epoch_length(total)
    while total is None and course.done_before(end, None) < stop:
        end += end - position
    # From here on nothing below `stop` is drawn.
    end = position + bisect_left(range(position, end), stop, key=lambda at: course.done_before(at, total))
    lanes, each = np.arange(course.dp)[:, None], max(1, _DRAWS_AT_ONCE // course.dp)
    for first in range(position, end, each):
        _, samples = course.draws(lanes, np.arange(first, min(first + each, end)), total)
        if samples.min() < stop:
            return int(samples.min())
    return None


class Commits:
    """The commits of one process, which owns the cursor from the first on, and says `blend` and `sequences` in it."""

    def __init__(self, directory: Path, consumer: str) -> None:
        self._directory, self._consumer = directory, check_consumer(consumer)
        self._owner: CursorOwner | None = None
        self.blend: tuple[BlendShare, ...] = ()
        self.sequences: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": None}

    def hints(self, course: Course, reader: StreamReader, since: float, ranks: int) -> ReadingHints:
        """Returns what keeps the reading hint of the same consumer."""
        return ReadingHints(self._consumer, course, reader, since, ranks)

    def commit(
        self, states: Sequence[RunState], order: RunOrder, reader: StreamReader, *, last_epoch: bool, take_over: bool
    ) -> None:
        """Writes the cursor durably, for the state of a run and older ones, as `LazyShardedDataset.commit`."""
        state = states[0]
        if self._owner is None or not self._owner.begun:
            # Before the cursor of a run that is further is overwritten by one that cannot continue.
            check_data(state, order, reader)
        part, rules = state.parts[-1], {"unit": state.unit, "window": state.window, "seed": state.seed}
        plan = self.sequences or {"dp_size": part.dp, "batch_size": part.batch_size, **rules}
        done = chunks_done(states, order.known_total(reader.refresh())) if last_epoch else 0
        # What one rank has drawn of rows does not tell what the ranks have trained of the sequences.
        kept, made = None if self.sequences else state, (state.stream_id, state.consumed, done, plan)
        cursor = Cursor(self._consumer, *made, time.time(), kept, blend=self.blend)
        try:
            if self._owner is None:
                self._owner = CursorOwner(self._directory, self._consumer, take_over=take_over)
            self._owner.put(cursor)
        except (LazyShardError, OSError) as error:
            if isinstance(error, CursorTaken) and self._owner is None:
                error.args = (f"{error}: `commit(..., take_over=True)`",)
            if isinstance(error, LazyShardError):
                raise
            where, uid = str(self._directory), os.geteuid()
            refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            text = f"{where}: the cursor of {self._consumer!r} cannot be written ({error.strerror or error})"
            way = f"let uid {uid} write to {CURSORS}/" if refused else "fix that"
            text = f"{text}; the checkpoint is not touched, the cursor before it still counts: {way}, and commit again"
            told = WriterFailed(text, directory=where, consumer=self._consumer, uid=uid)
            # As whoever expects an OSError asks for it: whether the disk is full, for instance.
            told.errno = error.errno
            raise told from error


def chunks_done(states: Sequence[RunState], total: int | None) -> int:
    """Returns N such that none of these states needs a chunk of [0, N) again; 0 where they are of several epochs."""
    stand = [standing(course_of(state), total) for state in states]
    if len({course.epoch(total) for course, _ in stand}) > 1:
        return 0
    return min(course.done_before(position, total) for course, position in stand) // states[0].samples_per_chunk


@dataclass(eq=False)
class ReadingHints:
    """Keeps the reading hint of one consumer. `stop` is the first position for which more is needed than was told.

    Rank 0 speaks for all: ranks train in lockstep, and a window counts as published only with all its lanes. Whichever
    of its processes comes to a window first replaces the hint; none takes back what another one has told since the data
    set was made. A hint may still get lost, where two write at the same time, so who waits looks again and again.
    """

    consumer: str
    course: Course
    reader: StreamReader
    since: float = 0.0
    ranks: int = 1
    timer: Callable[[], float] = time.monotonic
    stop: int = 0
    _looked_at: float = -math.inf
    _hint: ReadingHint | None = None

    def enter(self, position: int, limit: int | None, published: int) -> None:
        """Tells what is needed at a position from `stop` on, before it is waited for. Never raises for the filesystem.

        At once where it has to be waited for, or nothing from `limit` on is needed; else soon, with a later window.
        """
        size, course = self.reader.samples_per_chunk, self.course
        needed = course.needed(position)
        samples = needed if limit is None else min(needed, limit)
        chunks = -(-samples // size)
        capped = limit is not None and chunks * size >= limit
        self.stop = sys.maxsize if capped else course.drawable(chunks * size)
        window, stream_id = position // course.rules.span, self.reader.stream_id
        self._hint = ReadingHint(self.consumer, stream_id, self.ranks, window, chunks, time.time())
        if capped or samples > published or self.timer() - self._looked_at >= PAUSE_S:
            self._write_if_due()

    def repeat(self) -> None:
        """Tells again what is needed if it is not told any more. For who waits; looks about once a second."""
        if self.timer() - self._looked_at >= REPEAT_S:
            self._write_if_due()

    def _write_if_due(self) -> None:
        self._looked_at = self.timer()
        directory, hint = self.reader.directory, self._hint
        if hint is not None and is_due(read_reading(directory, self.consumer), hint, self.since):
            write_reading(directory, hint)


def is_due(found: ReadingHint | None, hint: ReadingHint, since: float) -> bool:
    """Returns whether a hint is to replace the one that is found, None if none can be read.

    One older than the data set is that of a run before, which may be far ahead of this one's checkpoint.
    """
    if found is None or found.updated_at < since:
        return True
    return found.stream_id != hint.stream_id or found.needs_chunks < hint.needs_chunks
