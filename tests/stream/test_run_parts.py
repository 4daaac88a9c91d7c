"""A run's state as a value: steps that are left out, and states that do not fit; the rest is in data/test_state.py."""

from dataclasses import replace
from typing import Any

import pytest

from lazyshard.errors import StateMismatch
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.stream import run_parts
from tests.stream.streams import raised, refusal_of


def state(*parts: Part, **settings: Any) -> RunState:
    consumed = sum(part.dp * part.draws for part in parts if part.trained)
    known: dict[str, Any] = {"stream_id": "f" * 32, "samples_per_chunk": 4, "unit": 4, "window": 0, "seed": 0}
    return RunState(**known | {"max_total_samples": None} | settings, parts=parts, consumed=consumed)


# 12 samples on two ranks, then 9 on three.
BEFORE = Part(2, 1, draws=6, draws_per_step=2)
NOW = Part(3, 1, draws=3, first_step=3, draws_per_step=1)


def test_samples_of_steps_to_come() -> None:
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
    for consumed in (9, 16):
        raised(ValueError, run_parts.with_consumed, state(BEFORE, NOW), consumed)
    raised(ValueError, run_parts.parts_without, (BEFORE,), [(3, 3)])
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
