"""Blends whose weights change: against lists that are drawn piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.blend import BlendTable
from lazyshard.plan.blend_schedule import BlendCourse, BlendPiece


def listed(course: BlendCourse, count: int) -> list[tuple[int, int]]:
    """Draws position by position, with a counter for each stream."""
    drawn, order = [0] * course.streams, []
    for position in range(count):
        piece = [one for one in course.pieces if one.first <= position][-1]
        known = [stream for stream, part in enumerate(piece.parts) if part]
        table = BlendTable([piece.parts[stream] for stream in known])
        (place,) = table.draws(np.array([position - piece.first + piece.offset]))[0].tolist()
        order.append((known[place], drawn[known[place]]))
        drawn[known[place]] += 1
    return order


def pairs(course: BlendCourse, first: int, stop: int) -> list[tuple[int, int]]:
    streams, draws = course.draws(first, stop)
    return list(zip(streams.tolist(), draws.tolist(), strict=True))


@st.composite
def courses(draw: st.DrawFn) -> BlendCourse:
    streams = draw(st.integers(1, 4))
    parts = st.lists(st.integers(0, 4), min_size=streams, max_size=streams).filter(any).map(tuple)
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 40), max_size=3)))]
    return BlendCourse([BlendPiece(first, draw(parts), draw(st.integers(0, 20))) for first in firsts])


def test_each_stream_goes_on_where_the_piece_before_has_left_it() -> None:
    course = BlendCourse([BlendPiece(0, (1, 1)), BlendPiece(4, (3, 1))])
    assert pairs(course, 0, 12) == [
        *[(0, 0), (1, 0), (0, 1), (1, 1)],
        *[(0, 2), (1, 2), (0, 3), (0, 4)],
        *[(0, 5), (1, 3), (0, 6), (0, 7)],
    ]
    assert course.counts(6) == (3, 3)


def test_a_piece_may_begin_within_its_table() -> None:
    whole = BlendCourse([BlendPiece(0, (2, 5))])
    later = BlendCourse([BlendPiece(0, (2, 5), 4)])
    before = whole.counts(4)
    assert [(stream, draw + before[stream]) for stream, draw in pairs(later, 0, 30)] == pairs(whole, 4, 34)


@given(courses(), st.integers(0, 60), st.integers(0, 40))
def test_draws_and_counts_are_those_of_the_list(course: BlendCourse, first: int, count: int) -> None:
    order = listed(course, first + count)
    assert pairs(course, first, first + count) == order[first:]
    assert [course.draw(position) for position in range(first, first + count)] == order[first:]
    assert course.streams_of(first, first + count) == [stream for stream, _ in order[first:]]
    had = [stream for stream, _ in order[:first]]
    assert course.counts(first) == tuple(had.count(stream) for stream in range(course.streams))


@given(courses(), st.data())
def test_where_a_draw_is_made(course: BlendCourse, data: st.DataObject) -> None:
    order = listed(course, 200)
    stream, draw = data.draw(st.integers(0, course.streams - 1)), data.draw(st.integers(0, 20))
    position = course.position(stream, draw)
    if position is None or position >= 200:
        assert (stream, draw) not in order
    else:
        assert order[position] == (stream, draw)


def test_a_stream_that_is_drawn_no_more_has_no_further_position() -> None:
    course = BlendCourse([BlendPiece(0, (1, 1)), BlendPiece(4, (1, 0))])
    assert [course.position(1, draw) for draw in range(3)] == [1, 3, None]
    assert course.position(0, 2) == 4


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "begin at 0 and follow each other, got \\[\\]"),
        ([BlendPiece(1, (1,))], "begin at 0 and follow each other, got \\[1\\]"),
        ([BlendPiece(0, (1,)), BlendPiece(0, (1,))], "begin at 0 and follow each other, got \\[0, 0\\]"),
        ([BlendPiece(0, (1, 1)), BlendPiece(3, (1,))], "are of the same 2 streams"),
    ],
)
def test_pieces_that_cannot_be_are_refused(pieces: list[BlendPiece], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlendCourse(pieces)
