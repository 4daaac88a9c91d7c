import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.loop import BURST_S, Pace


def test_rows_are_due_at_even_distances() -> None:
    pace = Pace(4, 100.0)
    due = []
    now = 100.0
    for _ in range(5):
        now += pace.delay(now)
        due.append(now)
        pace.take()
    assert due == [100.0, 100.25, 100.5, 100.75, 101.0]


def test_a_million_rows_do_not_drift() -> None:
    pace = Pace(3, 1e6)
    for _ in range(1_000_000):
        pace.take()
    assert pace.delay(1e6) == pytest.approx(1_000_000 / 3, abs=1e-6)


def test_after_a_long_pause_one_second_is_made_up_for() -> None:
    pace = Pace(10, 0.0)
    pace.take()
    at_once = 0
    while pace.delay(3600.0) == 0:
        pace.take()
        at_once += 1
    assert at_once == 11  # those of one second, and the one due now
    assert pace.delay(3600.0) == pytest.approx(0.1)


def test_a_short_pause_is_made_up_for_whole() -> None:
    pace = Pace(10, 0.0)
    taken = 0
    while pace.delay(0.5) == 0:
        pace.take()
        taken += 1
    assert taken == 6


@given(
    rate=st.floats(0.01, 1e6),
    pauses=st.lists(st.floats(0, 100), max_size=30),
)
def test_never_faster_than_the_rate_and_a_burst(rate: float, pauses: list[float]) -> None:
    pace = Pace(rate, 0.0)
    now = 0.0
    for taken, pause in enumerate(pauses, 1):
        now += pause
        now += pace.delay(now)
        pace.take()
        assert taken <= rate * (now + BURST_S) + 1 + 1e-6
