"""A run's state as a value: with more consumed, other ranks, and samples or steps left out."""

from dataclasses import replace
from typing import Any

import pytest

from lazyshard.errors import StateMismatch
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.deal import Rules
from lazyshard.stream import run_parts
from tests.stream.streams import raised, refusal_of


def state(*parts: Part, **settings: Any) -> RunState:
    consumed = sum(part.dp * part.draws for part in parts if part.trained)
    known: dict[str, Any] = {"stream_id": "f" * 32, "samples_per_chunk": 4, "unit": 4, "window": 0, "seed": 0}
    return RunState(**known | {"max_total_samples": None} | settings, parts=parts, consumed=consumed)


# 12 samples on two ranks, then 9 on three.
BEFORE = Part(2, 1, draws=6, draws_per_step=2)
NOW = Part(3, 1, draws=3, first_step=3, draws_per_step=1)


def test_consumed_samples_are_draws_of_the_current_part_and_what_was_passed_over_is_not() -> None:
    run = state(BEFORE, NOW)
    course = run_parts.course_of(state(BEFORE, NOW, window=8, seed=7))
    assert (course.rules, course.parts) == (Rules(4, 8, 7), (BEFORE, NOW))
    for consumed, draws in {12: 0, 15: 1, 21: 3, 30: 6}.items():
        assert run_parts.draws_of(run, consumed) == draws
        assert run_parts.with_consumed(run, consumed) == state(BEFORE, replace(NOW, draws=draws))
    for consumed, told in {9: "12, .* got 9", 11: "12, .* got 11", 16: "3, got 16"}.items():
        refusal_of(ValueError, told, run_parts.with_consumed, run, consumed)
    run = state(BEFORE, replace(BEFORE, draws=4, trained=False), replace(BEFORE, draws=1))
    assert (run.consumed, run_parts.draws_of(run, 12), run_parts.draws_of(run, 20)) == (14, 0, 4)


def test_run_goes_on_in_the_same_part_or_in_a_new_one() -> None:
    run = state(BEFORE, NOW)
    for draws_per_step in (0, 1):
        assert run_parts.resumed_parts(run.parts, 3, 1, draws_per_step=draws_per_step) is run.parts
    # By steps of one draw, three of them behind step 3.
    for dp, batch_size, draws_per_step in ((4, 1, 2), (4, 1, 0), (3, 2, 0), (3, 1, 2)):
        new = Part(dp, batch_size, first_step=6, draws_per_step=draws_per_step)
        assert run_parts.resumed_parts(run.parts, dp, batch_size, draws_per_step=draws_per_step) == (BEFORE, NOW, new)
    nothing = Part(3, 1, skip=((1, 2), (8, 9)), epoch=2, first_step=3)
    assert run_parts.resumed_parts((BEFORE, nothing), 4, 1) == (BEFORE, replace(nothing, dp=4))
    assert run_parts.parts_without((BEFORE, nothing), [(2, 4)]) == (BEFORE, replace(nothing, skip=((1, 4), (8, 9))))
    # A step that the caller knows counts.
    assert run_parts.resumed_parts((replace(BEFORE, draws_per_step=0),), 3, 1, step=5)[-1].first_step == 5
    # Steps by the end of a part.
    without = replace(NOW, draws_per_step=0), replace(NOW, trained=False), replace(NOW, draws=0)
    parts = (NOW, replace(BEFORE, draws=7), *without)
    assert [run_parts.steps_of(part) for part in parts] == [6, 3, 3, 3, 3]


def test_samples_are_left_out_from_here_on() -> None:
    parts = (BEFORE,)
    assert run_parts.parts_without(parts, []) is parts
    left = Part(2, 1, skip=((2, 6), (8, 9)), first_step=3, draws_per_step=2)
    assert run_parts.parts_without(parts, [(8, 9), (2, 4), (4, 6)]) == (BEFORE, left)
    for wrong in ((3, 3), (-1, 2)):
        refusal_of(ValueError, "range", run_parts.parts_without, parts, [wrong])
    following = Part(2, 1, first_step=3, draws_per_step=2)
    assert run_parts.parts_behind_steps(parts, 4, 6) == (BEFORE, replace(following, draws=4, trained=False), following)
    assert run_parts.ranges_of_steps(state(BEFORE), 5, 6, None) == [(16, 18), (20, 22)]
    asked = [(4, 5, None), (4, 6, None), (6, 7, None), (6, 7, 22)]
    assert [run_parts.ranges_of_steps(state(BEFORE), *one) for one in asked] == [
        [(10, 12), (14, 16)],
        [(10, 12), (14, 18), (20, 22)],
        [(18, 20), (22, 24)],
        # The stream has ended with 22: 16 to 21 are dealt one by one, and the next epoch begins one draw early.
        [(0, 1), (4, 5), (20, 22)],
    ]


def test_steps_that_are_not_to_come_or_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for start, stop in ((3, 5), (5, 5), (6, 5)):
        told = f"{start}:{stop}: .* 3 steps"
        refusal_of(ValueError, told, run_parts.ranges_of_steps, state(BEFORE), start, stop, None)
        refusal_of(ValueError, told, run_parts.parts_behind_steps, (BEFORE,), start, stop)
    refusal_of(ValueError, "5:6: .* 4", run_parts.parts_behind_steps, (BEFORE,), 5, 6)
    refusal_of(ValueError, "samples", run_parts.parts_behind_steps, (replace(BEFORE, draws_per_step=0),), 4, 5)
    monkeypatch.setattr(run_parts, "_MAX_SAMPLES_OF_STEPS", 8)
    assert len(run_parts.ranges_of_steps(state(BEFORE), 5, 7, None)) > 0
    refusal_of(ValueError, "5:8 train 12 samples, more than 8", run_parts.ranges_of_steps, state(BEFORE), 5, 8, None)
    # The next ones are only passed over.
    assert run_parts.parts_behind_steps((BEFORE,), 4, 101)[1].draws == 194


OTHERS = {"stream_id": "e" * 32, "samples_per_chunk": 5, "unit": 2, "window": 4, "seed": 1, "max_total_samples": 9}


def test_state_that_does_not_fit_is_refused_by_the_field_that_differs() -> None:
    run = state(BEFORE, NOW)
    run_parts.check_fits(run, state(Part(7, 5)), "/data/s")
    for field, value in (*OTHERS.items(), ("stream_id", None)):
        error = raised(StateMismatch, run_parts.check_fits, run, state(Part(2), **{field: value}), "/data/s")
        assert (error.directory, error.field) == ("/data/s", field)
        assert (error.expected, error.actual) == (str(getattr(run, field)), str(value))
