"""Properties for `test_properties`: one that holds, and one that does not, of which a few examples show nothing."""

from hypothesis import given, settings
from hypothesis import strategies as st

WRONG = 137


@settings(max_examples=10, derandomize=True, database=None)
@given(st.binary())
def test_holds(data: bytes) -> None:
    assert len(data) >= 0


@settings(max_examples=10, derandomize=True, database=None)
@given(st.integers(0, 200))
def test_does_not_hold(number: int) -> None:
    assert number != WRONG
