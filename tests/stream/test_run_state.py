"""A run's state as a value: with more consumed, other ranks, and samples or steps left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lazyshard.errors import StateMismatch
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.deal import Rules
from lazyshard.stream import run_state
from lazyshard.stream.run_state import (
    check_fits,
    course_of,
    draws_of,
    ranges_of_steps,
    resumed,
    steps_of,
    with_consumed,
    without_samples,
    without_steps,
)


def state(*parts: Part, **settings: Any) -> RunState:
    consumed = sum(part.dp * part.draws for part in parts if part.trained)
    known: dict[str, Any] = {"stream_id": "f" * 32, "samples_per_chunk": 4, "unit": 4, "window": 0, "seed": 0}
    return RunState(**known | {"max_total_samples": None} | settings, parts=parts, consumed=consumed)


# 12 samples on two ranks, then 9 on three.
BEFORE = Part(2, 1, draws=6, draws_per_step=2)
NOW = Part(3, 1, draws=3, first_step=3, draws_per_step=1)


def test_course_has_the_rules_and_parts_of_the_state() -> None:
    skip = ((3, 5),)
    parts = (BEFORE, replace(NOW, skip=skip))
    course = course_of(state(*parts, window=8, seed=7))
    assert (course.rules, course.parts) == (Rules(4, 8, 7), parts)


@pytest.mark.parametrize(("consumed", "draws"), [(12, 0), (15, 1), (21, 3), (30, 6)])
def test_consumed_samples_are_draws_of_the_current_part(consumed: int, draws: int) -> None:
    run = state(BEFORE, NOW)
    assert draws_of(run, consumed) == draws
    assert with_consumed(run, consumed) == state(BEFORE, replace(NOW, draws=draws))


@pytest.mark.parametrize(
    ("consumed", "message"),
    [
        (9, "consumed is at least 12, what was trained when the run went on last, got 9"),
        (11, "consumed is at least 12, what was trained when the run went on last, got 11"),
        (16, "consumed counts whole steps of all 3 ranks: 12 and a multiple of 3, got 16"),
    ],
)
def test_consumed_that_no_step_ends_with_is_refused(consumed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_consumed(state(BEFORE, NOW), consumed)


def test_what_was_passed_over_is_not_consumed() -> None:
    run = state(BEFORE, replace(BEFORE, draws=4, trained=False), replace(BEFORE, draws=1))
    assert (run.consumed, draws_of(run, 12), draws_of(run, 20)) == (14, 0, 4)


@pytest.mark.parametrize(
    ("dp", "batch_size", "draws_per_step", "parts"),
    [
        (3, 1, 0, (BEFORE, NOW)),
        (3, 1, 1, (BEFORE, NOW)),
        # By steps of one draw, three of them behind step 3.
        (4, 1, 2, (BEFORE, NOW, Part(4, 1, first_step=6, draws_per_step=2))),
        (4, 1, 0, (BEFORE, NOW, Part(4, 1, first_step=6))),
        (3, 2, 0, (BEFORE, NOW, Part(3, 2, first_step=6))),
        (3, 1, 2, (BEFORE, NOW, Part(3, 1, first_step=6, draws_per_step=2))),
    ],
)
def test_run_goes_on_in_the_same_part_or_in_a_new_one(
    dp: int, batch_size: int, draws_per_step: int, parts: tuple[Part, ...]
) -> None:
    assert resumed(state(BEFORE, NOW), dp, batch_size, draws_per_step=draws_per_step) == state(*parts)


def test_part_that_has_drawn_nothing_is_not_kept_but_what_it_leaves_out_is() -> None:
    nothing = Part(3, 1, skip=((1, 2), (8, 9)), epoch=2, first_step=3)
    assert resumed(state(BEFORE, nothing), 4, 1).parts == (BEFORE, replace(nothing, dp=4))
    more = without_samples(state(BEFORE, nothing), [(2, 4)])
    assert more.parts == (BEFORE, replace(nothing, skip=((1, 4), (8, 9))))


def test_step_that_the_caller_knows_counts() -> None:
    assert resumed(state(replace(BEFORE, draws_per_step=0)), 3, 1, step=5).parts[-1].first_step == 5


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        (NOW, 6),
        (replace(BEFORE, draws=7), 3),
        (replace(NOW, draws_per_step=0), 3),
        (replace(NOW, trained=False), 3),
        (replace(NOW, draws=0), 3),
    ],
)
def test_steps_by_the_end_of_a_part(part: Part, steps: int) -> None:
    assert steps_of(part) == steps


def test_samples_are_left_out_from_here_on() -> None:
    run = state(BEFORE)
    assert without_samples(run, []) is run
    assert without_samples(run, [(8, 9), (2, 4), (4, 6)]).parts == (
        BEFORE,
        Part(2, 1, skip=((2, 6), (8, 9)), first_step=3, draws_per_step=2),
    )
    for wrong in ((3, 3), (-1, 2)):
        with pytest.raises(ValueError, match="of a range must be an int"):
            without_samples(run, [wrong])


# The two lanes draw 0 to 3, 8 to 11, 16 ... and 4 to 7, 12 to 15, 20 ...
@pytest.mark.parametrize(
    ("start", "stop", "total", "ranges"),
    [
        (4, 5, None, [(10, 12), (14, 16)]),
        (4, 6, None, [(10, 12), (14, 18), (20, 22)]),
        (6, 7, None, [(18, 20), (22, 24)]),
        # The stream has ended with 22: 16 to 21 are dealt one by one, and the next epoch begins one draw early.
        (6, 7, 22, [(0, 1), (4, 5), (20, 22)]),
    ],
)
def test_samples_of_steps_to_come(start: int, stop: int, total: int | None, ranges: list[tuple[int, int]]) -> None:
    assert ranges_of_steps(state(BEFORE), start, stop, total) == ranges


def test_next_steps_are_passed_over_as_a_part_of_their_own() -> None:
    following = Part(2, 1, first_step=3, draws_per_step=2)
    assert without_steps(state(BEFORE), 4, 6, None).parts == (
        BEFORE,
        replace(following, draws=4, trained=False),
        following,
    )


def test_samples_of_later_steps_are_left_out() -> None:
    assert without_steps(state(BEFORE), 5, 6, None).parts == (
        BEFORE,
        Part(2, 1, skip=((16, 18), (20, 22)), first_step=3, draws_per_step=2),
    )


@pytest.mark.parametrize(("start", "stop"), [(3, 5), (5, 5), (6, 5)])
def test_steps_that_are_not_to_come_are_refused(start: int, stop: int) -> None:
    for use in (without_steps, ranges_of_steps):
        with pytest.raises(
            ValueError, match=f"steps {start}:{stop}: expected FIRST:STOP with 4 <= FIRST < STOP, since 3 steps"
        ):
            use(state(BEFORE), start, stop, None)


def test_steps_of_a_state_that_does_not_know_them_are_refused() -> None:
    with pytest.raises(ValueError, match="steps cannot be named; name samples"):
        without_steps(state(replace(BEFORE, draws_per_step=0)), 4, 5, None)


def test_more_steps_than_can_be_looked_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "_MAX_SAMPLES_OF_STEPS", 8)
    assert len(ranges_of_steps(state(BEFORE), 5, 7, None)) > 0
    with pytest.raises(ValueError, match="steps 5:8 train 12 samples, more than 8: go on from a checkpoint right"):
        without_steps(state(BEFORE), 5, 8, None)
    # The next ones are only passed over.
    assert without_steps(state(BEFORE), 4, 101, None).parts[1].draws == 194


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stream_id", "e" * 32, "belongs to another stream"),
        ("stream_id", None, "belongs to another stream"),
        ("samples_per_chunk", 5, "give samples_per_chunk as it was"),
        ("unit", 2, "give unit as it was"),
        ("window", 4, "give shuffle_window as it was"),
        ("seed", 1, "give seed as it was"),
        ("max_total_samples", 9, "give max_total_samples as it was"),
    ],
)
def test_state_that_does_not_fit_is_refused_by_the_field_that_differs(field: str, value: Any, message: str) -> None:
    run = state(BEFORE, NOW)
    check_fits(run, state(Part(7, 5)), "/data/s")
    with pytest.raises(StateMismatch, match=message) as caught:
        check_fits(run, state(Part(2), **{field: value}), "/data/s")
    error = caught.value
    assert str(error).startswith(
        f"/data/s: the state was saved with {field} {getattr(run, field)}, here it is {value}: "
    )
    assert (error.directory, error.field, error.expected, error.actual) == (
        "/data/s",
        field,
        str(getattr(run, field)),
        str(value),
    )
