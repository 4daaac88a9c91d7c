"""Decisions on what may be published and deleted, from numbers alone."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.stream.cursor import Consumer
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.limits import is_deadlock, why_kept

STREAM = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=200)


def claim(name: str = "a", done: int | None = None, needs: int | None = None, at: float = 5.0) -> Consumer:
    cursor = None if done is None else Cursor(name, STREAM, 0, done, {}, at)
    return Consumer(name, cursor, None if needs is None else ReadingHint(name, STREAM, 1, 0, needs, at), None)


def consumed(*names: str) -> Limits:
    return Limits(retain="consumed", consumers=names)


A5, B3, B5, B_NEEDS = claim("a", done=5), claim("b", done=3), claim("b", done=5), claim("b", needs=9)


@pytest.mark.parametrize(
    ("claims", "limits", "published", "may", "by", "names"),
    [
        ([A5], Limits(), 10, 0, "all", ""),
        ([], consumed(), 10, 0, "nobody", ""),
        ([A5], consumed(), 10, 5, "consumer", "a"),
        ([A5, B3], consumed(), 10, 3, "consumer", "b"),
        # Who has left no cursor that counts is done with nothing.
        ([A5, B_NEEDS], consumed(), 10, 0, "consumer", "b"),
        ([A5, Consumer("b", None, None, "torn")], consumed(), 10, 0, "consumer", "b"),
        # Names that must have a cursor.
        ([A5], consumed("a", "c", "b"), 10, 0, "unregistered", "bc"),
        ([B_NEEDS, A5], consumed("b"), 10, 0, "unregistered", "b"),
        # The newest chunk stays, whatever was committed; so do the last ones that were asked for.
        ([claim(done=10)], consumed(), 10, 9, "last", ""),
        ([claim(done=8)], consumed(), 10, 8, "consumer", "a"),
        ([A5], Limits(retain=4), 10, 5, "consumer", "a"),
        ([claim(done=0)], consumed(), 0, 0, "last", ""),
    ],
)
def test_deletable_and_why_no_more(
    claims: list[Consumer], limits: Limits, published: int, may: int, by: Any, names: str
) -> None:
    kept = why_kept(claims, limits, published)
    assert (kept.by, kept.names, kept.before) == (by, tuple(names), may)


A5_WAITS, B5_GOES = claim("a", done=5, needs=12), claim("b", done=5, needs=10)


@pytest.mark.parametrize(
    ("claims", "limits", "deadlock"),
    [
        # The one that waits keeps the oldest chunk: it gets no data, so it makes no checkpoint.
        ([A5_WAITS], consumed(), True),
        # It waits, but another one keeps that chunk, and has data to get to its next checkpoint.
        ([claim("a", done=8, needs=12), B5_GOES], consumed(), False),
        # Both keep it, and one of them waits: the other one alone changes nothing.
        ([A5_WAITS, B5_GOES], consumed(), True),
        # Nobody waits.
        ([B5_GOES], consumed(), False),
        # Nothing that a consumer does makes room.
        ([A5_WAITS], Limits(), True),
        ([claim(done=10, needs=12)], consumed(), True),
        ([claim(done=10, needs=12)], Limits(retain=8), True),
        # A consumer that must register first: it has not come at all, it waits itself, or it is on its way.
        ([A5_WAITS], consumed("b"), True),
        ([A5_WAITS, claim("b", needs=10)], consumed("b"), False),
    ],
)
def test_deadlock_at_a_hard_limit_with_ten_chunks(claims: list[Consumer], limits: Limits, deadlock: bool) -> None:
    assert is_deadlock(claims, why_kept(claims, limits, 10), 10) is deadlock


@PROPERTY
@given(
    dp=st.integers(1, 5),
    samples_per_chunk=st.integers(1, 7),
    shuffle_window=st.integers(0, 3),
    batch_size=st.integers(1, 9),
    steps=st.integers(1, 12),
    checkpoint=st.integers(0, 40),
)
def test_the_documented_room_covers_what_a_plan_needs_from_one_checkpoint_to_the_next(
    dp: int, samples_per_chunk: int, shuffle_window: int, batch_size: int, steps: int, checkpoint: int
) -> None:
    window = shuffle_window * samples_per_chunk
    course = Course(Rules(samples_per_chunk, window, 1), [Part(dp, batch_size)])
    interval = -(-steps * batch_size * dp // samples_per_chunk)
    room = interval + 2 * dp * max(1, shuffle_window)
    at = checkpoint * batch_size
    first = course.done_before(at, None) // samples_per_chunk
    # The last position before the next checkpoint needs most.
    needs = -(-course.needed(at + steps * batch_size - 1) // samples_per_chunk)
    assert needs - first <= room
