"""How long was waited, asked at any moment."""

from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.display.metrics import WaitClock

REASONS = ("source", "limit")


@given(
    st.lists(
        st.tuples(st.sampled_from((None, *REASONS)), st.integers(0, 100), st.booleans()),
        max_size=20,
    )
)
def test_looks_change_nothing_and_sums_never_fall(steps: list[tuple[str | None, int, bool]]) -> None:
    now = 0.0
    waits = WaitClock(REASONS, lambda: now)
    expected = dict.fromkeys(REASONS, 0.0)
    for reason, seconds, look in steps:
        waits.wait(reason)
        before = waits.seconds()
        assert before == expected
        now += seconds
        if reason is not None:
            expected[reason] += seconds
        if look:
            assert waits.seconds() == expected
    assert waits.seconds() == expected
