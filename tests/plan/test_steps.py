"""Steps: which positions a step takes, whichever way the trainer counts, and back again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.plan.steps import PartSteps, StepPlace, Steps
from tests.plan.cases import PROPERTY


def test_steps_of_the_documented_example() -> None:
    even, cut = PartSteps(0, 24, 4), PartSteps(0, 20, 4, cut=(10, 10))
    assert [even.positions(step) for step in range(6)] == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24)]
    assert [cut.positions(step) for step in range(6)] == [(0, 4), (4, 8), (8, 10), (10, 14), (14, 18), (18, 20)]
    assert even.stop_step == cut.stop_step == 6


def test_a_run_of_four_parts_one_of_them_skipped() -> None:
    steps = Steps([PartSteps(0, 6, 2), PartSteps(3, 4, 2, trained=False), PartSteps(3, 3, 1), PartSteps(6, 4, 4)])
    assert [steps.place(step) for step in range(8)] == [
        StepPlace(0, 0, 2),
        StepPlace(0, 2, 4),
        StepPlace(0, 4, 6),
        StepPlace(2, 0, 1),
        StepPlace(2, 1, 2),
        StepPlace(2, 2, 3),
        StepPlace(3, 0, 4),
        # Not trained yet: if the run goes on as it is.
        StepPlace(3, 4, 8),
    ]
    assert steps.trained == 7
    assert steps.breaks() == []
    assert steps.unknown is None
    assert [steps.step_of(1, 0), steps.step_of(3, 3), steps.step_of(3, 4)] == [None, 6, 7]


def test_parts_that_do_not_know_their_steps_say_so() -> None:
    steps = Steps([PartSteps(0, 6, 0), PartSteps(3, 4, 2)])
    assert [steps.place(step) for step in (0, 2, 3, 4)] == [None, None, StepPlace(1, 0, 2), StepPlace(1, 2, 4)]
    assert steps.unknown == 0
    assert steps.step_of(0, 5) is None
    assert steps.breaks() == []
    assert Steps([PartSteps(0, 6, 0)]).place(0) is None


def test_steps_that_do_not_follow_on_each_other_are_named() -> None:
    assert Steps([PartSteps(2, 6, 2), PartSteps(5, 4, 2), PartSteps(8, 0, 2)]).breaks() == [(0, 0, 2), (2, 7, 8)]
    # Steps 5 and 6 are nobody's.
    assert Steps([PartSteps(0, 10, 2), PartSteps(7, 0, 2)]).place(5) is None


def test_draws_that_end_within_a_step_are_named() -> None:
    assert Steps([PartSteps(0, 6, 4), PartSteps(2, 8, 4), PartSteps(4, 3, 4)]).ragged() == [0, 2]
    # Where steps end with epochs, the last one of an epoch is whole however short it is.
    assert Steps([PartSteps(0, 6, 4, cut=(6, 6)), PartSteps(2, 8, 4, trained=False), PartSteps(2, 0, 4)]).ragged() == []


@PROPERTY
@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_every_position_is_taken_by_one_step_and_steps_end_with_epochs(
    each: int, length: int, full: int, first: int, cut: bool
) -> None:
    part = PartSteps(first, length + 2 * full, each, cut=(length, full) if cut else None)
    taken: list[int] = []
    step = first
    while len(taken) < part.draws:
        start, stop = part.positions(step)
        assert start == len(taken) < stop <= start + each
        assert {part.step_of(position) for position in range(start, stop)} == {step}
        if cut:
            assert not any(start < end < stop for end in (length, length + full, length + 2 * full))
        taken += range(start, stop)
        step += 1
    assert part.stop_step == step


@pytest.mark.parametrize(
    ("part", "step", "expected"),
    [
        (PartSteps(3, 4, 2), 2, "step 2 is none of the part that begins with step 3"),
        (PartSteps(3, 4, 0), 3, "step 3 is none of the part"),
        (PartSteps(0, 4, 2, cut=(4, 0)), 2, "step 2 is past the end"),
    ],
)
def test_steps_that_cannot_be_are_refused(part: PartSteps, step: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        part.positions(step)


def test_fields_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="draws_per_step must be an int >= 0, got -1"):
        PartSteps(0, 0, -1)
    with pytest.raises(ValueError, match="at least one part"):
        Steps([])
