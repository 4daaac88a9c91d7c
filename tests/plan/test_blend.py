"""Blends: the rule draw by draw and its periodic table, against Megatron Core's own; weights that change."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.blend import BlendCourse, BlendPiece, BlendSchedule, BlendTable, next_stream, shares, whole_parts
from tests.plan.cases import megatron
from tests.plan.oracle import turns
from tests.stream.streams import refusal_of

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)
STEPS = st.integers(0, 60)
PARTS = st.lists(st.integers(1, 12), min_size=1, max_size=20)

DRAWS = 200_000


def draw(weights: list[float], count: int) -> list[int]:
    of, drawn, order = shares(weights), [0] * len(weights), []
    for _ in range(count):
        stream = next_stream(of, drawn)
        drawn[stream] += 1
        order.append(stream)
    return order


def order_of(table: BlendTable, count: int) -> list[int]:
    return [table.draw(position)[0] for position in range(count)]


def test_orders_are_pinned() -> None:
    assert draw([2, 1, 1], 8) == [0, 1, 2, 0, 0, 1, 2, 0]
    assert draw([0.9, 0.1], 12) == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert order_of(BlendTable([1, 3]), 12) == [1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert order_of(BlendTable([4, 1]), 10) == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0]


@given(WEIGHTS, st.integers(1, 300), st.data())
def test_no_stream_is_a_sample_away_from_its_share(weights: list[float], count: int, data: st.DataObject) -> None:
    order = draw(weights, count)
    for stream, share in enumerate(shares(weights)):
        assert abs(order.count(stream) - share * count) <= len(weights)
    among = sorted(data.draw(st.sets(st.integers(0, len(weights) - 1), min_size=1)))
    assert next_stream(shares(weights), [0] * len(weights), among) in among


@given(PARTS)
def test_the_table_is_the_rule_over_several_periods(parts: list[int]) -> None:
    table = BlendTable(parts)
    count = 3 * table.period + 1
    order = order_of(table, count)
    assert order == turns(parts, count)
    assert table.streams(0, count) == order
    assert [table.streams(at, at + 3) for at in range(count - 2)] == [order[at : at + 3] for at in range(count - 2)]
    draws = [table.draw(position)[1] for position in range(count)]
    assert draws == [order[:i].count(stream) for i, stream in enumerate(order)]


@given(PARTS, st.integers(0, 10**12), st.data())
def test_counts_and_positions_agree_however_far(parts: list[int], position: int, data: st.DataObject) -> None:
    table = BlendTable(parts)
    stream, nth = table.draw(position)
    before = table.counts(position)
    assert sum(before) == position
    assert before[stream] == nth
    assert table.position(stream, nth) == position
    assert [n + (i == stream) for i, n in enumerate(before)] == list(table.counts(position + 1))
    other = data.draw(st.integers(0, len(parts) - 1))
    next_of_other = table.position(other, before[other])
    assert next_of_other >= position
    assert table.counts(next_of_other)[other] == before[other]


def test_weights_that_people_write_are_met_exactly() -> None:
    met: list[tuple[list[float], tuple[int, ...]]] = [
        ([0.8, 0.2], (4, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        ([1e-3, 1.0], (1, 1000)),
        ([7.0], (1,)),
        ([1.0, 1e-9], (16_383, 1)),
        ([1.0] * 20_000, (1,) * 20_000),
    ]
    for weights, parts in met:
        assert whole_parts(weights) == parts


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_any_weights_are_met_as_nearly_as_the_period_allows(weights: list[float]) -> None:
    parts = whole_parts(weights)
    assert min(parts) >= 1
    assert sum(parts) <= 1 << 14
    wanted = [weight / math.fsum(weights) * sum(parts) for weight in weights]
    raised = sum(one < 1 for one in wanted)
    for one, part in zip(wanted, parts, strict=True):
        assert abs(part - one) < 1 + raised, (wanted, parts)


def test_what_cannot_be_is_refused() -> None:
    nan, inf = float("nan"), float("inf")
    wrong: list[list[float]] = [[], [0.0], [1.0, -1.0], [nan], [inf], [1e308, 1e308]]
    for weights in wrong:
        refusal_of(ValueError, "weight", shares, weights)
    refusal_of(ValueError, r"weight .* got 0", whole_parts, [1, 0])


def blended(weights: Any, count: int) -> tuple[Any, Any]:
    """Streams and draws by Megatron's rule."""
    streams, draws = np.zeros(count, np.int16), np.zeros(count, np.int64)
    megatron().build_blending_indices(streams, draws, np.array(weights), len(weights), count, False)
    return streams, draws


@pytest.mark.full
def test_the_rule_is_megatrons() -> None:
    for weights in ([1.0], [0.5, 0.5], [0.3, 0.5, 0.2, 1e-3], [1.0, 2, 3, 4, 5, 6, 7]):
        assert blended(shares(weights), 20_000)[0].tolist() == draw(weights, 20_000)


EXACT = [(1, 1), (1, 3), (3, 5), (5, 2, 1), (1, 2, 4, 9), (47, 10, 23, 28, 20), (1, 1022, 1)]
EXACT += [whole_parts([(7 * i * i + seed) % 101 + 1 for i in range(size)]) for size, seed in [(30, 1), (100, 2)]]
PEOPLES = [[0.8, 0.2], [0.2, 0.8], [0.5, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1], [0.9, 0.1], [1.0] * 3, [2.0, 5.0, 3.0]]


@pytest.mark.parametrize("parts", [*filter(lambda one: sum(one).bit_count() == 1, EXACT), *map(whole_parts, PEOPLES)])
def test_equal_to_megatron_where_its_floats_are_exact_and_for_weights_as_people_write_them(parts: Any) -> None:
    table = BlendTable(parts)
    theirs = blended(np.array(parts) / sum(parts), DRAWS)
    assert (np.array(table.streams(0, DRAWS)) == theirs[0]).all()
    assert [table.draw(position)[1] for position in range(0, DRAWS, 97)] == theirs[1][::97].tolist()


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.45, 0.25, 0.2, 0.05, 0.05], [18, 1, 29, 13, 22, 7, 14]])
def test_elsewhere_megatron_takes_another_of_equals_and_comes_back(weights: list[float]) -> None:
    parts = whole_parts(weights)
    period, count = sum(parts), DRAWS // sum(parts) * sum(parts)
    ours, theirs = np.array(BlendTable(parts).streams(0, count)), blended(np.array(parts) / period, DRAWS)[0][:count]
    assert (ours != theirs).any(), "floats do not round here: this belongs to the test above"
    errors, each = np.array(parts), np.array(parts)
    for at, stream in enumerate(theirs[: 20 * period].tolist()):
        assert errors[stream] == errors.max(), f"draw {at} is not of the greatest error, counted exactly"
        errors[stream] -= period
        errors += each if at else 0
    for streams in (ours, theirs):
        by_period = np.array([np.bincount(one, minlength=len(parts)) for one in streams.reshape(-1, period)])
        assert (by_period == each).all(), "every period has its parts"


def listed(course: BlendCourse, count: int) -> list[tuple[int, int]]:
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


@given(courses(), st.integers(0, 60), st.integers(0, 40), st.data())
def test_draws_and_positions_are_of_the_list(course: BlendCourse, first: int, count: int, data: st.DataObject) -> None:
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


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4), STEPS, st.integers(1, 3))
def test_to_go_on_after_a_step_is_to_go_on(weights: list[tuple[int, int]], step: int, draws_per_step: int) -> None:
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
def test_schedule_that_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    refusal_of(ValueError, what, make)
