"""What a run and the producer know of each other: what the stream still holds, the cursor, and the reading mark.

A cursor is durable: the producer deletes nothing which the run may need again. A reading mark is a hint, so that a
producer which holds back goes far enough to read on.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard.data.order import RunOrder
from lazyshard.errors import CursorTaken, CursorUnwritable, LazyShardError, StateMismatch
from lazyshard.format.blend_state import BlendShare
from lazyshard.format.cursor import Cursor, ReadingMark, check_consumer
from lazyshard.format.names import CURSORS
from lazyshard.format.state import RunState
from lazyshard.plan.course import Course
from lazyshard.stream import CursorOwner, StreamReader, read_reading, read_retired, write_reading
from lazyshard.stream.run_state import course_of

_DRAWS_AT_ONCE = 1 << 20
"""Draws that are looked at together: 16 MB."""

_MOST_RANKS: Final = 1 << 20


def check_data(state: RunState, order: RunOrder, reader: StreamReader) -> None:
    """Refuses a state that has drawn more than the stream holds, or goes on with chunks that are deleted.

    Whether the ranks at hand are others makes no difference: they go on with the same samples. Not looked at: what an
    epoch that is still to begin needs.

    Raises:
        StateMismatch: naming the chunk, or the numbers, and the way out.
    """
    where, total = str(reader.directory), order.known_total(reader.refresh())
    _check_ranks(state, where)
    course = course_of(state)
    if total is not None:
        _check_length(state, course, order, total, where)
    elif order.max_total_samples is not None:
        _check_limit(course, order.max_total_samples, where)
    # The newest chunk is never deleted, so a directory that another program fills has none to look for.
    retired = 0 if reader.stream_id is None else read_retired(reader.directory, reader.stream_id)
    if not retired:
        return
    size = reader.samples_per_chunk
    sample = first_lost(*standing(course, total), total, retired * size)
    if sample is not None:
        chunk = sample // size
        raise StateMismatch(
            f"{where}: the run goes on with samples of chunk {chunk}, but the stream's producer has deleted all chunks "
            f"below {retired}: go on from a later checkpoint; or produce the stream anew, with --retain all or with "
            f"--consumers NAME, and commit no further than the oldest checkpoint that you may go back to",
            directory=where,
            expected=f"chunk {chunk}",
            actual=f"chunks from {retired} on",
        )


def standing(course: Course, total: int | None) -> tuple[Course, int]:
    """Returns a course that begins, or goes on, in the epoch in which a course stands, and the position there.

    A course that stands exactly at the end of an epoch stands in that one.

    Raises:
        ValueError: more was drawn than there is.
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
    """Returns a sample below `stop` that is drawn from a position on, in the epoch in which the course begins.

    Of the first million draws that have one, the smallest; None if there is none.
    """
    if course.done_before(position, total) >= stop:
        return None
    if total is None:
        end = position + 1
        while course.done_before(end, None) < stop:
            end += end - position
    else:
        end = course.epoch_length(total)
    # From here on nothing below `stop` is drawn.
    end = position + bisect_left(range(position, end), stop, key=lambda at: course.done_before(at, total))
    lanes = np.arange(course.dp)[:, None]
    each = max(1, _DRAWS_AT_ONCE // course.dp)
    for first in range(position, end, each):
        _, samples = course.draws(lanes, np.arange(first, min(first + each, end)), total)
        if samples.min() < stop:
            return int(samples.min())
    return None


def _check_length(state: RunState, course: Course, order: RunOrder, total: int, where: str) -> None:
    number = next((n for n in reversed(range(len(state.parts))) if state.parts[n].epoch is not None), 0)
    drawn = sum(part.dp * part.draws for part in state.parts[number:])
    limit = order.max_total_samples
    # A live stream of which a maximum was asked for may have ended before it, and the run gone on with another epoch.
    one_epoch = order.num_samples is None and limit in (None, total)
    try:
        standing(course, total)
    except ValueError as cause:
        raise _too_short(drawn, total, where) from cause
    if one_epoch and drawn > total:
        raise _too_short(drawn, total, where)


def _check_ranks(state: RunState, where: str) -> None:
    """Refuses more ranks than there are: what is looked at below takes time and memory by their number."""
    most = max(part.dp for part in state.parts)
    if most > _MOST_RANKS:
        raise StateMismatch(
            f"{where}: the state is of a run with {most} ranks, more than any job has ({_MOST_RANKS}): it is damaged, "
            f"go on from another checkpoint",
            directory=where,
            field="dp",
            expected=f"at most {_MOST_RANKS}",
            actual=str(most),
        )


def _check_limit(course: Course, limit: int, where: str) -> None:
    """Refuses a course that no stream of so many samples has, however it goes on: the length counts with the limit."""
    try:
        standing(course, limit)
    except ValueError as cause:
        raise StateMismatch(
            f"{where}: {cause} at the most (max_total_samples), fewer than a batch of all its ranks: the state is "
            f"damaged, or of another run",
            directory=where,
            field="max_total_samples",
            expected="at least a batch of all ranks",
            actual=str(limit),
        ) from cause


def _too_short(drawn: int, total: int, where: str) -> StateMismatch:
    return StateMismatch(
        f"{where}: the run has drawn {drawn} samples since its epoch began, but the stream has ended with {total}: was "
        f"it cut, or is it another one? If the run went on over several epochs, give num_samples as it was",
        directory=where,
        expected=f"at least {drawn} samples",
        actual=str(total),
    )


class Commits:
    """The commits of one process. It owns the consumer's cursor from the first one on, until it ends.

    Attributes:
        blend: how the stream is blended with others at the next commit; empty where it is not.
    """

    def __init__(self, directory: Path, consumer: str) -> None:
        self._directory = directory
        self._consumer = check_consumer(consumer)
        self._owner: CursorOwner | None = None
        self.blend: tuple[BlendShare, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the cursor to the process that owns it."""
        return self.__dict__ | {"_owner": None}

    def commit(
        self, states: Sequence[RunState], order: RunOrder, reader: StreamReader, *, last_epoch: bool, take_over: bool
    ) -> None:
        """Writes the cursor durably.

        Args:
            states: where the run stands, and then older ones from which it may still be resumed.
            order: the settings.
            reader: the stream.
            last_epoch: whether no other epoch follows. Otherwise every chunk is kept.
            take_over: go on although another run on this machine writes the cursor.

        Raises:
            StateMismatch: the first time: chunks are deleted that come next.
            CursorTaken: another run of the same name writes it.
            CursorUnwritable: the filesystem refused.
            FileRefused, StoreRefused, StoreUnavailable: as they say.
            VersionUnsupported: the cursor that is there is of a later format.
            RuntimeError: this is a fork of the process that owns the cursor.
        """
        state = states[0]
        if self._owner is None or not self._owner.begun:
            # Before the cursor of a run that is further is overwritten by one that cannot go on.
            check_data(state, order, reader)
        current = state.parts[-1]
        cursor = Cursor(
            consumer=self._consumer,
            stream_id=state.stream_id,
            consumed=state.consumed,
            chunks_before=chunks_done(states, order.known_total(reader.refresh())) if last_epoch else 0,
            plan={
                "dp_size": current.dp,
                "batch_size": current.batch_size,
                "unit": state.unit,
                "window": state.window,
                "seed": state.seed,
            },
            updated_at=time.time(),
            state=state,
            blend=self.blend,
        )
        try:
            if self._owner is None:
                self._owner = self._begin(take_over)
            self._owner.put(cursor)
        except LazyShardError:
            raise
        except OSError as error:
            raise self._unwritable(error) from error

    def _begin(self, take_over: bool) -> CursorOwner:
        try:
            return CursorOwner(self._directory, self._consumer, take_over=take_over)
        except CursorTaken as error:
            error.args = (f"{error}: `commit(..., take_over=True)`",)
            raise

    def _unwritable(self, error: OSError) -> CursorUnwritable:
        uid = os.geteuid()
        allowed = error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS)
        remedy = "Mend that" if allowed else f"Let uid {uid} write to {self._directory / CURSORS}"
        told = CursorUnwritable(
            f"{self._directory}: the cursor of {self._consumer!r} cannot be written ({error.strerror or error}). "
            f"The checkpoint is not touched; the producer goes by the cursor before this one, and without any it does "
            f"not know of this run. {remedy}, and commit again",
            directory=str(self._directory),
            consumer=self._consumer,
            uid=uid,
        )
        # As whoever expects an OSError asks for it: whether the disk is full, for instance.
        told.errno = error.errno
        return told


def chunks_done(states: Iterable[RunState], total: int | None) -> int:
    """Returns N such that none of these states needs a chunk of the half-open range [0, N) again, in its epoch.

    Args:
        states: at least one. Where they stand in several epochs, one of them has another epoch before it, and N is 0.
        total: the end of the stream, None while it is not known.
    """
    epochs, done, size = set(), [], 1
    for state in states:
        course, position = standing(course_of(state), total)
        epochs.add(course.epoch(total))
        done.append(course.done_before(position, total))
        size = state.samples_per_chunk
    return min(done) // size if len(epochs) == 1 else 0


REPEAT_S: Final = 1.0
"""How often who waits looks whether its need is still told: one small file read, while nothing else is to be done."""

PAUSE_S: Final = 0.2
"""How long a mark stands at the least, unless it is waited upon: replacing a file takes about a millisecond, in which a
reader of small chunks comes past several windows."""

_NO_MORE: Final = sys.maxsize
"""Past any position: nothing more will be needed."""


class ReadingMarks:
    """Keeps the reading mark of one consumer.

    Rank 0 speaks for all: ranks train in lockstep, and a window counts as published only with all its lanes. Whichever
    of its processes comes to a window first replaces the mark; none takes back what another one has told since the data
    set was made. A mark may still get lost, where two write at the same time, so who waits looks again and again.

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
