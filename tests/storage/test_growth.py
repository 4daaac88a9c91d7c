import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.storage.growth import ChangePace, Pace


def test_pace_takes_two_steps() -> None:
    pace = Pace()
    assert pace.rate(0) is None
    pace.step(10, 5)
    assert pace.rate(20) is None
    pace.step(20, 25)
    assert pace.rate(20) == 2.0


def test_step_that_was_taken_already_says_nothing_new() -> None:
    pace = Pace()
    pace.step(10, 5)
    pace.step(10, 5)
    assert pace.rate(30) is None


def test_pace_of_what_stands_still_fades() -> None:
    pace = Pace()
    pace.step(0, 0)
    pace.step(10, 20)
    assert pace.rate(30) == 2.0
    assert pace.rate(31) == 20 / 31
    assert pace.rate(2000) == 0.01
    pace.step(2000, 20)
    assert pace.rate(2000) == 0.0


@pytest.mark.parametrize(("at", "value"), [(21, 4), (19, 40)])
def test_pace_begins_anew_after_a_step_back(at: float, value: float) -> None:
    pace = Pace()
    pace.step(10, 5)
    pace.step(20, 25)
    pace.step(at, value)
    assert pace.rate(at) is None
    pace.step(at + 2, value + 2)
    assert pace.rate(at + 2) == 1.0


def test_pace_follows_a_change() -> None:
    pace = Pace()
    for second in range(1000):
        pace.step(second, second)
    for second in range(1000, 1121):
        pace.step(second, 10 * second)
    assert pace.rate(1120) == 10.0


def test_pace_of_rare_steps_is_that_of_the_last_two() -> None:
    pace = Pace()
    pace.step(0, 0)
    pace.step(3600, 1)
    pace.step(3610, 11)
    assert pace.rate(3610) == 1.0


@given(st.lists(st.tuples(st.floats(0, 1e10), st.floats(0, 1e15)), max_size=50), st.floats(0, 1e10))
def test_pace_is_never_negative(steps: list[tuple[float, float]], now: float) -> None:
    pace = Pace()
    for at, value in steps:
        pace.step(at, value)
    rate = pace.rate(now)
    assert rate is None or rate >= 0


def test_change_takes_two_changes() -> None:
    pace = ChangePace()
    rates = []
    for now, value in ((0, 5), (2, 5), (4, 6), (6, 6), (8, 8)):
        pace.look(now, value)
        rates.append(pace.rate(now))
    assert rates == [None, None, None, None, 0.5]
