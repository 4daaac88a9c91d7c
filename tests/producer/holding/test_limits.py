"""Decisions on what may be published and deleted, from numbers alone."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard.format.cursor import Cursor, ReadingHint
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.stream.cursor import Consumer
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding import (
    SILENT_S,
    KeptChunks,
    age_of_oldest,
    ahead_in_chunks,
    deletable,
    hint,
    is_deadlock,
    may_be_dead,
    needs,
    publishable,
    seen_at,
    why_kept,
)

STREAM = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=200)


def claim(name: str = "a", done: int | None = None, needs: int | None = None, at: float = 5.0) -> Consumer:
    cursor = None if done is None else Cursor(name, STREAM, 0, done, {}, at)
    return Consumer(name, cursor, None if needs is None else ReadingHint(name, STREAM, 1, 0, needs, at), None)


def consumed(*names: str) -> Limits:
    return Limits(retain="consumed", consumers=names)


@st.composite
def claim_lists(draw: st.DrawFn) -> list[Consumer]:
    names = draw(st.lists(st.sampled_from("abcd"), unique=True))
    count = st.none() | st.integers(0, 30)
    return [claim(name, draw(count), draw(count)) for name in names]


def test_a_consumer_with_and_without_each_file() -> None:
    cursor = Cursor("a", STREAM, 70, 7, {}, 100.0)
    reading = ReadingHint("a", STREAM, 2, 3, 12, 140.0)
    files = ((cursor, reading), (cursor, None), (None, reading), (None, None))
    found = [Consumer("a", one, other, None) for one, other in files]
    assert [(needs(one), hint(one), seen_at(one)) for one in found] == [
        (12, 12, 140.0),
        (0, 7, 100.0),
        (12, 12, 140.0),
        (0, 0, None),
    ]


@pytest.mark.parametrize(
    ("number", "unit", "chunk_bytes", "chunks"),
    [
        (1999, "samples", None, 1),
        (2500, "samples", None, 2),
        (4096, "bytes", 2048, 2),
        (4096, "bytes", 0, 1),
    ],
)
def test_an_amount_in_chunks_is_rounded_down_but_not_to_nothing(
    number: int, unit: Any, chunk_bytes: int | None, chunks: int
) -> None:
    assert ahead_in_chunks(Amount(number=number, unit=unit), 1000, chunk_bytes) == chunks


@PROPERTY
@given(claims=claim_lists(), ahead=st.integers(0, 50))
def test_publishable_is_what_the_slowest_allows_and_covers_every_need(claims: list[Consumer], ahead: int) -> None:
    """A reading hint below its own cursor is an old one; a cursor alone says nothing of what is needed."""
    most = max(map(needs, claims), default=0)
    assert publishable(claims, ahead) == max(most, min(map(hint, claims), default=0) + ahead)


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
    assert deletable(claims, limits, published) == may
    assert why_kept(claims, limits, published) == KeptChunks(by=by, names=tuple(names))


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
def test_deadlock_at_a_hard_limit_with_ten_chunks_published(
    claims: list[Consumer], limits: Limits, deadlock: bool
) -> None:
    assert is_deadlock(claims, why_kept(claims, limits, 10), 10) is deadlock


def test_ages_of_consumers() -> None:
    assert age_of_oldest([50.0, None, 40.0], 100.0) == 60.0
    assert age_of_oldest([None], 100.0) is age_of_oldest([], 1.0) is None
    # Its clock is ahead of ours.
    assert age_of_oldest([50.0, 40.0], 30.0) == 0.0


def test_a_consumer_may_be_dead_that_is_silent_or_cannot_be_read() -> None:
    seen = claim(done=1)
    assert not may_be_dead(seen, 5.0 + SILENT_S - 1)
    assert may_be_dead(seen, 5.0 + SILENT_S)
    assert not may_be_dead(seen, 0.0)
    assert may_be_dead(Consumer("a", None, claim(needs=1).reading, "torn"), 5.0)
    assert may_be_dead(claim(), 5.0)


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
