"""Schedules of weights: which hold when, and that what changes does not move what was drawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.blend_schedule import BlendCourse, BlendPiece, BlendSchedule


def test_weights_hold_from_their_step_on() -> None:
    schedule = BlendSchedule([(0, (1, 0)), (10, (3, 1)), (40, (0, 2))])
    assert [schedule.parts(step) for step in (0, 9, 10, 39, 40, 10**6)] == [(1, 0)] * 2 + [(3, 1)] * 2 + [(0, 1)] * 2
    assert schedule.pieces(0, 4) == (BlendPiece(0, (1, 0)), BlendPiece(40, (3, 1), 4), BlendPiece(160, (0, 1), 1))
    assert schedule.pieces(20, 2) == (BlendPiece(0, (3, 1)), BlendPiece(40, (0, 1), 1))
    assert schedule.pieces(40, 2) == (BlendPiece(0, (0, 1)),)
    assert not schedule.constant


def test_a_line_goes_from_each_point_to_the_next() -> None:
    schedule = BlendSchedule([(0, (1, 1)), (4, (1, 3)), (6, (1, 3))], "linear")
    assert [schedule.parts(step) for step in range(6)] == [(4, 5), (4, 7), (4, 9), (4, 11), (1, 3), (1, 3)]
    assert [piece[:2] for piece in schedule.pieces(3, 2)] == [(0, (4, 11)), (2, (1, 3))]


def test_a_long_line_has_a_bounded_number_of_pieces_that_end_where_it_does() -> None:
    schedule = BlendSchedule([(0, (1, 0)), (100_000, (0, 1))], "linear")
    pieces = schedule.pieces(0, 1)
    assert len(pieces) == 65
    assert pieces[-1][:2] == (100_000, (0, 1))
    shares = [piece.parts[1] / sum(piece.parts) for piece in pieces]
    assert shares == sorted(shares)
    assert abs(shares[32] - 0.5) < 0.02


def test_points_that_change_nothing_are_one_piece() -> None:
    schedule = BlendSchedule([(0, (0.8, 0.2)), (7, (4, 1)), (9, (8, 2))], "linear")
    assert schedule.constant
    assert schedule.pieces(8, 3) == (BlendPiece(0, (4, 1)),)


@pytest.mark.parametrize(
    ("points", "ramp", "draws_per_step"),
    [
        ([(0, (1, 0)), (20, (0.9, 0.1))], "linear", 4),
        ([(0, (1, 0)), (60, (0.5, 0.5))], "linear", 1),
        ([(0, (1, 0)), (60, (0.5, 0.5))], "linear", 2),
        ([(0, (1, 0, 1)), (60, (0.5, 0.5, 0)), (90, (0.1, 0.1, 3))], "linear", 3),
        ([(step, (9 + step % 2, 1)) for step in range(90)], "steps", 4),
    ],
)
def test_short_pieces_add_up_to_their_shares(points: Any, ramp: Any, draws_per_step: int) -> None:
    schedule = BlendSchedule(points, ramp)
    course = BlendCourse(schedule.pieces(0, draws_per_step))
    target = [0.0] * course.streams
    for step in range(120):
        parts = schedule.parts(step)
        target = [one + draws_per_step * part / sum(parts) for one, part in zip(target, parts, strict=True)]
        counts = course.counts((step + 1) * draws_per_step)
        assert all(abs(one - count) <= course.streams for one, count in zip(target, counts, strict=True)), (
            step,
            target,
            counts,
        )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4),
    st.sampled_from(["steps", "linear"]),
    st.integers(0, 60),
    st.integers(1, 3),
)
def test_to_go_on_after_a_step_is_to_have_gone_on(
    weights: list[tuple[int, int]], ramp: Any, step: int, draws_per_step: int
) -> None:
    schedule = BlendSchedule([(13 * number, one) for number, one in enumerate(weights)], ramp)
    whole = BlendCourse(schedule.pieces(0, draws_per_step))
    rest = BlendCourse(schedule.pieces(step, draws_per_step))
    begin = step * draws_per_step
    # Tables begin anew where a course does, so their order may be another; which weights hold may not.
    for position in range(0, 70 * draws_per_step, draws_per_step):
        held = [piece.parts for piece in whole.pieces if piece.first <= begin + position][-1]
        assert [piece.parts for piece in rest.pieces if piece.first <= position][-1] == held


@pytest.mark.parametrize(
    ("points", "ramp", "message"),
    [
        ([], "steps", "begin at step 0 and follow each other, got \\[\\]"),
        ([(1, (1,))], "steps", "begin at step 0 and follow each other, got \\[1\\]"),
        ([(0, (1,)), (5, (2,)), (5, (3,))], "steps", "follow each other, got \\[0, 5, 5\\]"),
        ([(0, (1,)), (2.5, (2,))], "steps", "the steps of a schedule are integers, got 2.5"),
        ([(0, (1, 1)), (5, (2,))], "steps", "has a weight for each of 2 streams"),
        ([(0, (0, 0))], "steps", "weights need a finite sum above 0"),
        ([(0, (1, -1))], "steps", "a weight is a finite number above 0, got -1"),
        ([(0, (1, 1))], "curve", "ramp is one of steps, linear, got 'curve'"),
    ],
)
def test_schedules_that_cannot_be_are_refused(points: Any, ramp: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlendSchedule(points, ramp)
