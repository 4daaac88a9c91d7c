"""Exchange between a run and the producer: what the stream still holds, the cursor, and the reading hint."""

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

_DRAWS_AT_ONCE = 1 << 20  # Draws computed at a time: 16 MB
_MOST_RANKS: Final = 1 << 20
REPEAT_S: Final = 1.0  # Interval at which a waiting reader checks that its hint was not lost: one small file read
# Minimum interval between hints, unless a reader waits: replacing the file takes about a millisecond, in which a reader
# of small chunks passes several windows.
PAUSE_S: Final = 0.2


def check_data(state: RunState, order: RunOrder, reader: StreamReader) -> None:
    """Raises StateMismatch for a state that has drawn more than the stream holds, or continues with deleted chunks.

    The current number of ranks does not matter: any ranks continue with the same samples. Not checked: what a later
    epoch needs.
    """
    where, total = str(reader.directory), order.known_total(reader.refresh())
    if (ranks := max(part.dp for part in state.parts)) > _MOST_RANKS:
        # The checks below take time and memory in proportion to the ranks.
        text = f"the state is of a run with {ranks} ranks, more than {_MOST_RANKS}: it is damaged, use another one"
        raise _mismatch(where, text, f"at most {_MOST_RANKS}", ranks, "dp")
    course = course_of(state)
    # However the stream continues: the length is bounded by the limit.
    known, ended = order.max_total_samples if total is None else total, total is not None
    number = max((n for n, part in enumerate(state.parts) if part.epoch is not None), default=0)
    drawn = sum(part.dp * part.draws for part in state.parts[number:])
    # If a maximum was set, a live stream may have ended below it, and the run continued with its next epoch.
    one_epoch = ended and order.by_epoch and order.max_total_samples in (None, total)
    try:
        course.resumed(course.current.draws, known)
        if one_epoch and drawn > (total or 0):
            raise ValueError(f"{drawn} samples were drawn of {total}")
    except ValueError as cause:
        text = f"{cause} at most (max_total_samples), fewer than a batch of all its ranks: the state is damaged"
        expected = "at least a batch of all ranks"
        if ended:
            text = f"the run has drawn {drawn} samples since its epoch began, but the stream has ended with {total}"
            text = f"{text}: is it another stream? To resume a run over several epochs, pass num_samples as before"
            expected = f"at least {drawn} samples"
        raise _mismatch(where, text, expected, known, None if ended else "max_total_samples") from cause
    # The newest chunk is never deleted, so in a directory that another program fills there is nothing to check.
    retired = 0 if reader.stream_id is None else read_retired(reader.directory, reader.stream_id)
    size, point = reader.samples_per_chunk, course.resumed(course.current.draws, total)
    if retired and (sample := first_lost(*point, total, retired * size)) is not None:
        chunk = sample // size
        text = f"the run continues with samples of chunk {chunk}, but the producer has deleted all chunks below"
        text = f"{text} {retired}: continue from a later checkpoint, skip() these samples, or produce with --retain all"
        raise _mismatch(where, text, f"chunk {chunk}", f"chunks from {retired} on")


def _mismatch(where: str, text: str, expected: str, actual: object, field: str | None = None) -> StateMismatch:
    return StateMismatch(f"{where}: {text}", directory=where, expected=expected, actual=str(actual), field=field)


def first_lost(course: Course, position: int, total: int | None, stop: int) -> int | None:
    """Returns a sample below `stop` drawn from a position on, in the epoch in which the course begins; or None."""
    if course.done_before(position, total) >= stop:
        return None
    end = position + 1 if total is None else course.begin(total).length
    while total is None and course.done_before(end, None) < stop:
        end += end - position
    # From `end` on nothing below `stop` is drawn.
    end = position + bisect_left(range(position, end), stop, key=lambda at: course.done_before(at, total))
    lanes, each = np.arange(course.dp)[:, None], max(1, _DRAWS_AT_ONCE // course.dp)
    for first in range(position, end, each):
        _, samples = course.draws(lanes, np.arange(first, min(first + each, end)), total)
        if samples.min() < stop:
            return int(samples.min())
    return None


class Commits:
    """Commits of one process, which owns the cursor from the first one on; `blend` and `sequences` go into it."""

    def __init__(self, directory: Path, consumer: str) -> None:
        self._directory, self._consumer = directory, check_consumer(consumer)
        self._owner: CursorOwner | None = None
        self.blend: tuple[BlendShare, ...] = ()
        self.sequences: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": None}

    def hints(self, course: Course, reader: StreamReader, since: float, ranks: int) -> ReadingHints:
        """Returns the writer of this consumer's reading hint."""
        return ReadingHints(self._consumer, course, reader, since, ranks)

    def commit(
        self, states: Sequence[RunState], order: RunOrder, reader: StreamReader, *, last_epoch: bool, take_over: bool
    ) -> None:
        """Durably writes the cursor for the state of a run and older states; see `LazyShardedDataset.commit`."""
        state = states[0]
        if self._owner is None or not self._owner.begun:
            # A run that cannot continue must not overwrite the cursor of a run that is further.
            check_data(state, order, reader)
        part, rules = state.parts[-1], {"unit": state.unit, "window": state.window, "seed": state.seed}
        plan = self.sequences or {"dp_size": part.dp, "batch_size": part.batch_size, **rules}
        done = chunks_done(states, order.known_total(reader.refresh())) if last_epoch else 0
        # With sequences, rows are drawn as by one rank, so these draws do not show what the ranks have trained.
        kept, made = None if self.sequences else state, (state.stream_id, state.consumed, done, plan)
        cursor = Cursor(self._consumer, *made, time.time(), kept, blend=self.blend)
        try:
            if self._owner is None:
                self._owner = CursorOwner(self._directory, self._consumer, take_over=take_over)
            self._owner.put(cursor)
        except LazyShardError as error:
            if isinstance(error, CursorTaken) and self._owner is None:
                error.args = (f"{error}: `commit(..., take_over=True)`",)
            raise
        except OSError as error:
            where, uid = str(self._directory), os.geteuid()
            refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            text = f"{where}: the cursor of {self._consumer!r} cannot be written ({error.strerror or error})"
            way = f"let uid {uid} write to {CURSORS}/" if refused else "fix that"
            text = f"{text}; the checkpoint is intact and the previous cursor still counts: {way}, then commit again"
            failure = WriterFailed(text, directory=where, consumer=self._consumer, uid=uid)
            # For callers that expect an OSError and check, for instance, whether the disk is full.
            failure.errno = error.errno
            raise failure from error


def chunks_done(states: Sequence[RunState], total: int | None) -> int:
    """Returns N such that none of these states needs a chunk of [0, N) again; 0 if they are of several epochs."""
    points = [course.resumed(course.current.draws, total) for course in map(course_of, states)]
    if len({course.epoch(total) for course, _ in points}) > 1:
        return 0
    return min(course.done_before(position, total) for course, position in points) // states[0].samples_per_chunk


@dataclass(eq=False)
class ReadingHints:
    """Writes the reading hint of one consumer. `stop` is the first position that needs more than the hint reports.

    Rank 0 reports for all: ranks train in lockstep, and a window counts as published only with all its lanes. The first
    of its processes to reach a window replaces the hint; none lowers a hint that another process has written since the
    data set was created. If two write at the same time a hint may be lost, so a waiting reader checks it periodically.
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
        """Reports what is needed at a position from `stop` on, before waiting for it. Never raises for the filesystem.

        Writes immediately if the reader has to wait, or if nothing from `limit` on is needed; otherwise with a later
        window, soon.
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
        """Writes the hint again if it was lost. Called while waiting; checks about once a second."""
        if self.timer() - self._looked_at >= REPEAT_S:
            self._write_if_due()

    def _write_if_due(self) -> None:
        self._looked_at = self.timer()
        directory, hint = self.reader.directory, self._hint
        if hint is not None and is_due(read_reading(directory, self.consumer), hint, self.since):
            write_reading(directory, hint)


def is_due(found: ReadingHint | None, hint: ReadingHint, since: float) -> bool:
    """Returns whether a hint is to replace `found`, which is None if no hint can be read.

    A hint older than the data set belongs to an earlier run, which may be far ahead of this run's checkpoint.
    """
    if found is None or found.updated_at < since:
        return True
    return found.stream_id != hint.stream_id or found.needs_chunks < hint.needs_chunks
