"""Blends whose weights change: which hold when, and draws against lists that are drawn piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.blend import BlendCourse, BlendPiece, BlendSchedule, BlendTable


def listed(course: BlendCourse, count: int) -> list[tuple[int, int]]:
    """Draws position by position, with a counter for each stream."""
    drawn, order = [0] * len(course.pieces[0].parts), []
    for position in range(count):
        piece = [one for one in course.pieces if one.first <= position][-1]
        known = [stream for stream, part in enumerate(piece.parts) if part]
        table = BlendTable([piece.parts[stream] for stream in known])
        place, _ = table.draw(position - piece.first + piece.offset)
        order.append((known[place], drawn[known[place]]))
        drawn[known[place]] += 1
    return order


@st.composite
def courses(draw: st.DrawFn) -> BlendCourse:
    streams = draw(st.integers(1, 4))
    parts = st.lists(st.integers(0, 4), min_size=streams, max_size=streams).filter(any).map(tuple)
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 40), max_size=3)))]
    return BlendCourse([BlendPiece(first, draw(parts), draw(st.integers(0, 20))) for first in firsts])


def test_each_stream_goes_on_where_the_piece_before_has_left_it() -> None:
    course = BlendCourse([BlendPiece(0, (1, 1)), BlendPiece(4, (3, 1))])
    assert course.streams_of(0, 12) == [0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0]
    assert [course.draw(position)[1] for position in range(12)] == [0, 0, 1, 1, 2, 2, 3, 4, 5, 3, 6, 7]
    course = BlendCourse([BlendPiece(0, (1, 1)), BlendPiece(4, (1, 0))])
    assert [course.position(1, draw) for draw in range(3)] == [1, 3, None]
    assert course.position(0, 2) == 4


@given(courses(), st.integers(0, 60), st.integers(0, 40), st.data())
def test_draws_counts_and_positions_are_those_of_the_list(
    course: BlendCourse, first: int, count: int, data: st.DataObject
) -> None:
    order, stop = listed(course, 200), first + count
    assert [course.draw(position) for position in range(first, stop)] == order[first:stop]
    assert course.streams_of(first, stop) == [stream for stream, _ in order[first:stop]]
    had = [stream for stream, _ in order[:first]]
    assert course.counts(first) == tuple(had.count(stream) for stream in range(len(course.pieces[0].parts)))
    stream, draw = data.draw(st.integers(0, len(course.pieces[0].parts) - 1)), data.draw(st.integers(0, 20))
    position = course.position(stream, draw)
    if position is None or position >= 200:
        assert (stream, draw) not in order
    else:
        assert order[position] == (stream, draw)


def test_weights_hold_from_their_step_on() -> None:
    schedule = BlendSchedule([(0, (1, 0)), (10, (3, 1)), (40, (0, 2))])
    assert [schedule.parts(step) for step in (0, 9, 10, 39, 40, 10**6)] == [(1, 0)] * 2 + [(3, 1)] * 2 + [(0, 1)] * 2
    assert schedule.pieces(0, 4) == (BlendPiece(0, (1, 0)), BlendPiece(40, (3, 1), 4), BlendPiece(160, (0, 1), 1))
    assert schedule.pieces(20, 2) == (BlendPiece(0, (3, 1)), BlendPiece(40, (0, 1), 1))
    assert schedule.pieces(40, 2) == (BlendPiece(0, (0, 1)),)
    assert not schedule.constant


def test_the_same_weights_once_more_are_no_change() -> None:
    constant = BlendSchedule([(0, (0.8, 0.2)), (7, (4, 1)), (9, (8, 2))])
    assert constant.constant
    assert constant.pieces(8, 3) == (BlendPiece(0, (4, 1)),)


@pytest.mark.parametrize(
    ("points", "draws_per_step"),
    [
        ([(step, (200 - step, step)) for step in range(20)], 4),
        ([(step, (120 - step, step)) for step in range(60)], 1),
        ([(step, (120 - step, step)) for step in range(60)], 2),
        ([(step, (99 - step, step, max(0, step - 60))) for step in range(90)], 3),
        ([(step, (9 + step % 2, 1)) for step in range(90)], 4),
    ],
)
def test_short_pieces_add_up_to_their_shares(points: Any, draws_per_step: int) -> None:
    schedule = BlendSchedule(points)
    course = BlendCourse(schedule.pieces(0, draws_per_step))
    target = np.zeros(len(course.counts(0)))
    for step in range(120):
        parts = np.array(schedule.parts(step))
        target += draws_per_step * parts / parts.sum()
        counts = course.counts((step + 1) * draws_per_step)
        assert (np.abs(target - counts) <= len(counts)).all(), (step, target, counts)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(1, 3),
)
def test_to_go_on_after_a_step_is_to_have_gone_on(
    weights: list[tuple[int, int]], step: int, draws_per_step: int
) -> None:
    schedule = BlendSchedule([(13 * number, one) for number, one in enumerate(weights)])
    whole = BlendCourse(schedule.pieces(0, draws_per_step))
    rest = BlendCourse(schedule.pieces(step, draws_per_step))
    begin = step * draws_per_step
    # Tables begin anew where a course does, so their order may be another; which weights hold may not.
    for position in range(0, 70 * draws_per_step, draws_per_step):
        held = [piece.parts for piece in whole.pieces if piece.first <= begin + position][-1]
        assert [piece.parts for piece in rest.pieces if piece.first <= position][-1] == held


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: BlendSchedule([]), r"got \[\]"),
        (lambda: BlendSchedule([(1, (1,))]), r"got \[1\]"),
        (lambda: BlendSchedule([(0, (1,)), (5, (2,)), (5, (3,))]), r"got \[0, 5, 5\]"),
        (lambda: BlendSchedule([(0, (1,)), (2.5, (2,))]), "got 2.5"),  # type: ignore[list-item]
        (lambda: BlendSchedule([(0, (1, 1)), (5, (2,))]), "each of 2 streams"),
        (lambda: BlendSchedule([(0, (0, 0))]), "weights need a finite sum"),
        (lambda: BlendSchedule([(0, (1, -1))]), "got -1"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()
