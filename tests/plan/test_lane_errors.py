"""The plan: what it refuses, and that it says the bound and the value."""

from __future__ import annotations

from typing import Any

import pytest

from lazyshard.plan.deal import Deal
from lazyshard.plan.lane import Plan


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an int >= 1, got 0"),
        ({"batch_size": True}, "batch_size must be an int >= 1, got True"),
        ({"window": -4}, "window must be an int >= 0, got -4"),
        ({"window": 6}, "window must be a multiple of unit = 4, got 6"),
        ({"seed": -1}, r"seed must be an int in \[0, 9223372036854775808\), got -1"),
        ({"seed": 2**63}, r"seed must be an int in \[0, 9223372036854775808\), got 9223372036854775808"),
        ({"seed": 1.0}, r"seed must be an int in .*, got 1.0"),
    ],
)
def test_field_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(Deal(2, 4), **fields)


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("total", [None, 27])
@pytest.mark.parametrize(
    ("lane", "position", "message"),
    [
        (2, 0, r"lane must be in \[0, 2\), got 2"),
        (-1, 0, r"lane must be in \[0, 2\), got -1"),
        (0, -1, r"position must be >= 0, got -1"),
    ],
)
def test_place_out_of_range_is_refused(window: int, total: int | None, lane: int, position: int, message: str) -> None:
    plan = Plan(Deal(2, 4), window=window)
    with pytest.raises(IndexError, match=message):
        plan.draw(lane, position, total)
    with pytest.raises(IndexError, match=message):
        plan.draws([0, lane], [0, position], total)
    with pytest.raises(IndexError, match=message):
        plan.run(lane, position, total)


def test_stream_too_short_for_one_batch_a_lane_is_refused() -> None:
    plan = Plan(Deal(2, 4, start=10), batch_size=3)
    assert (plan.epoch_length(15), plan.leftover(15)) == (0, 5)
    message = r"samples \[10, 15\) are fewer than dp \* batch_size = 2 \* 3"
    with pytest.raises(IndexError, match=message):
        plan.draw(0, 0, 15)
    with pytest.raises(IndexError, match=message):
        plan.draws(0, [0], 15)
    with pytest.raises(IndexError, match=message):
        plan.run(0, 0, 15)


def test_total_before_the_start_is_refused() -> None:
    plan = Plan(Deal(2, 4, start=10))
    for call in (plan.epoch_length, plan.leftover, lambda total: plan.draw(0, 0, total)):
        with pytest.raises(ValueError, match="total must be >= start = 10, got 9"):
            call(9)


def test_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch must be >= 0, got -1"):
        Plan(Deal(2, 4)).draw(0, 0, None, epoch=-1)
    with pytest.raises(ValueError, match="epoch must be >= 0, got -1"):
        Plan(Deal(2, 4)).draws(0, [0], None, epoch=-1)


def test_needed_of_a_negative_position_is_refused() -> None:
    with pytest.raises(IndexError, match="position must be >= 0, got -1"):
        Plan(Deal(2, 4)).needed(-1)


def test_plan_cannot_be_changed_once_made() -> None:
    with pytest.raises(AttributeError):
        Plan(Deal(2, 4)).seed = 1  # type: ignore[misc]
