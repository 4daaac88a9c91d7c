"""What every lane is done with: no sample below that number comes again, by lists of all that is still to come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.deal import Deal
from lazyshard.plan.lane import Plan
from tests.plan.cases import PROPERTY, Case, cases, plans


def length(case: Case) -> int:
    """How many positions each lane draws in an epoch, by the oracle."""
    return len(case.drawn(0)[0])


def still_drawn(case: Case, position: int) -> list[int]:
    """What the lanes draw from a position on."""
    return [sample for lane in case.drawn(0) for sample in lane[position:]]


def still_kept(case: Case, position: int) -> list[int]:
    """The same, with open windows and stripes that are dealt out in part whole, and what is left over with them."""
    plan, deal = case.plan, case.plan.deal
    if position >= length(case):
        return []
    span = plan.window or deal.unit
    lanes = case.lanes()
    in_stripes = (case.total - deal.start) // (deal.dp * deal.unit) * deal.unit
    row_by_row = not plan.window and position >= in_stripes
    first = position if row_by_row else position - position % span
    return [sample for lane in lanes for sample in lane[first:]]


def positions(case: Case) -> range:
    return range(length(case) + 3)


@PROPERTY
@given(cases())
def test_no_sample_below_it_is_drawn_later(case: Case) -> None:
    for position in positions(case):
        done = case.plan.done_before(position, case.total)
        assert min(still_drawn(case, position), default=done) >= done


@PROPERTY
@given(cases())
def test_it_is_the_first_sample_that_is_still_kept(case: Case) -> None:
    for position in positions(case):
        assert case.plan.done_before(position, case.total) == min(still_kept(case, position), default=case.total)


@PROPERTY
@given(cases())
def test_it_never_falls_and_ends_at_the_total(case: Case) -> None:
    found = [case.plan.done_before(position, case.total) for position in positions(case)]
    assert found == sorted(found)
    assert found[-1] == case.total
    assert found[0] == (case.plan.deal.start if length(case) else case.total)


@PROPERTY
@given(plans(), st.integers(0, 30), st.integers(0, 40))
def test_what_is_said_live_holds_after_the_end(plan: Plan, position: int, more: int) -> None:
    # Everything up to the position was certain when it was drawn.
    certain = plan.needed(position - 1) if position else plan.deal.start
    live = plan.done_before(position, None)
    assert plan.deal.start <= live <= certain
    total = certain + more
    assert live <= plan.done_before(position, total)
    if total >= plan.needed(position):
        assert live == plan.done_before(position, total)
    assert min(still_drawn(Case(plan, total), position), default=live) >= live


@pytest.mark.parametrize(
    ("plan", "total", "expected"),
    [
        (Plan(Deal(2, 3)), None, [0, 0, 0, 6, 6, 6, 12, 12, 12, 18]),
        (Plan(Deal(2, 3)), 16, [0, 0, 0, 6, 6, 6, 12, 14, 16, 16]),
        (Plan(Deal(2, 3)), 17, [0, 0, 0, 6, 6, 6, 12, 14, 17, 17]),
        (Plan(Deal(2, 3, start=10)), 26, [10, 10, 10, 16, 16, 16, 22, 24, 26, 26]),
        (Plan(Deal(2, 3), batch_size=2), 19, [0, 0, 0, 6, 6, 6, 12, 12, 19, 19]),
        (Plan(Deal(2, 3), window=6), 16, [0, 0, 0, 0, 0, 0, 12, 12, 16, 16]),
        (Plan(Deal(2, 3), window=6), None, [0, 0, 0, 0, 0, 0, 12, 12, 12, 12]),
        (Plan(Deal(4, 5)), 3, [3, 3]),
    ],
)
def test_done_golden(plan: Plan, total: int | None, expected: list[int]) -> None:
    assert [plan.done_before(position, total) for position in range(len(expected))] == expected


def test_far_position_is_no_more_work() -> None:
    assert Plan(Deal(8, 1000), window=4000).done_before(2**60, None) == 2**60 // 4000 * 4000 * 8


def test_position_outside_is_refused() -> None:
    with pytest.raises(IndexError, match=r"position must be >= 0, got -1"):
        Plan(Deal(2, 3)).done_before(-1, None)


def test_total_before_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"total must be >= start = 10, got 9"):
        Plan(Deal(2, 3, start=10)).done_before(0, 9)
