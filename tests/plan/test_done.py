"""What every lane is done with: no sample below that number comes again, by lists of all that is still to come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from tests.plan.cases import PROPERTY, Case, cases


def length(case: Case) -> int:
    """How many positions each lane draws in an epoch, by the oracle."""
    return len(case.drawn(0)[0])


def still_drawn(case: Case, position: int) -> list[int]:
    """What the lanes draw from a position on."""
    return [sample for lane in case.drawn(0) for sample in lane[position:]]


def still_kept(case: Case, position: int) -> list[int]:
    """The same, with open windows and stripes that are dealt out in part whole, and what is left over with them."""
    if position > length(case):
        return []
    dp, unit, window = case.part.dp, case.rules.unit, case.rules.window
    in_stripes = case.total // (dp * unit) * unit
    row_by_row = not window and position >= in_stripes
    first = position if row_by_row else position - position % (window or unit)
    left_over = position < length(case) or any(lane[position:] for lane in case.lanes())
    return [sample for lane in case.lanes() for sample in lane[first:]] if left_over else []


@PROPERTY
@given(cases())
def test_it_is_the_first_sample_that_is_still_kept_and_never_falls(case: Case) -> None:
    course = case.course()
    found = [course.done_before(position, case.total) for position in range(length(case) + 3)]
    for position, done in enumerate(found):
        assert done == min(still_kept(case, position), default=case.total)
        assert min(still_drawn(case, position), default=done) >= done
    assert found == sorted(found)
    assert found[-1] == case.total


@PROPERTY
@given(cases(), st.integers(0, 30), st.integers(0, 40))
def test_what_is_said_live_holds_after_the_end(case: Case, position: int, more: int) -> None:
    course = case.course()
    # Everything up to the position was certain when it was drawn.
    certain = course.needed(position - 1) if position else 0
    live = course.done_before(position, None)
    assert 0 <= live <= certain
    total = certain + more
    assert live <= course.done_before(position, total)
    if total >= course.needed(position):
        assert live == course.done_before(position, total)
    assert min(still_drawn(Case(case.rules, case.part, total), position), default=live) >= live


@pytest.mark.parametrize(
    ("rules", "part", "total", "expected"),
    [
        (Rules(3), Part(2), None, [0, 0, 0, 6, 6, 6, 12, 12, 12, 18]),
        (Rules(3), Part(2), 16, [0, 0, 0, 6, 6, 6, 12, 14, 16, 16]),
        (Rules(3), Part(2), 17, [0, 0, 0, 6, 6, 6, 12, 14, 16, 17]),
        (Rules(3), Part(2, 2), 19, [0, 0, 0, 6, 6, 6, 12, 12, 12, 19]),
        (Rules(3, 6), Part(2), 16, [0, 0, 0, 0, 0, 0, 12, 12, 16, 16]),
        (Rules(3, 6), Part(2), None, [0, 0, 0, 0, 0, 0, 12, 12, 12, 12]),
        (Rules(5), Part(4), 3, [0, 3]),
    ],
)
def test_done_golden(rules: Rules, part: Part, total: int | None, expected: list[int]) -> None:
    course = Course(rules, [part])
    assert [course.done_before(position, total) for position in range(len(expected))] == expected


def test_far_position_is_no_more_work() -> None:
    assert Course(Rules(1000, 4000), [Part(8)]).done_before(2**59, None) == 2**59 // 4000 * 4000 * 8


def test_position_outside_is_refused() -> None:
    with pytest.raises(IndexError, match=r"position must be >= 0, got -1"):
        Course(Rules(3), [Part(2)]).done_before(-1, None)
