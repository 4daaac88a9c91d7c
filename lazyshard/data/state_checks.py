"""Whether a stream still holds what a run needs to go on from its state."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import numpy as np

from lazyshard.data.order import Order
from lazyshard.errors import StateMismatch
from lazyshard.format.state import RunState
from lazyshard.plan import Course
from lazyshard.stream import StreamReader, read_retired
from lazyshard.stream.run_state import course_of

__all__ = ["check_data", "first_lost", "standing"]

_DRAWS_AT_ONCE = 1 << 20
"""Draws that are looked at together: 16 MB."""

_MOST_RANKS: Final = 1 << 20


def check_data(state: RunState, order: Order, reader: StreamReader) -> None:
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


def _check_length(state: RunState, course: Course, order: Order, total: int, where: str) -> None:
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
