"""What the commands share: amounts for people, and values made short enough to be looked at."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.cli.output import MAX_CHARACTERS, duration, moment, per_second, shorten, size

PAYLOAD = base64.b64encode(bytes(range(256)) * 4).decode()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (12_345_678, "12.3 MB"),
        (2e9, "2.0 GB"),
        (5e15, "5,000.0 TB"),
    ],
)
def test_size(number: float, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (125, "2 min 5 s"),
        (47 * 3600, "47 h 0 min"),
        (2 * 86400, "2 days 0 h"),
        (2 * 86400 + 7200, "2 days 2 h"),
        (3e9, "over a year"),
        (float("inf"), "over a year"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1234.56, "1,234.6 rows/s"), (1, "1.0 rows/s"), (0.25, "0.25 rows/s"), (0.001, "3.6 rows/h"), (0, "0 rows/s")],
)
def test_per_second(number: float, text: str) -> None:
    assert per_second(number, "rows") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1970-01-01 00:00:00 UTC"), (1e18, "1e+18 s after 1970"), (-1e18, "-1e+18 s after 1970")],
)
def test_moment(seconds: float, text: str) -> None:
    assert moment(seconds) == text


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@given(value=values)
def test_what_is_short_stays_and_the_rest_gets_short(value: Any) -> None:
    found = shorten(value)
    assert found == value or len(json.dumps(found)) <= len(json.dumps(value)) + 30


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("x" * MAX_CHARACTERS, "x" * MAX_CHARACTERS),
        ("x" * 201, "x" * 200 + "... (201 characters)"),
        ("ab " * 500, ("ab " * 67)[:200] + "... (1,500 characters)"),
        (PAYLOAD, "AAECAwQFBgcICQoL... (1,368 characters, base64 of 1,024 bytes)"),
        (
            f"data:image/png;base64,{PAYLOAD}",
            "data:image/png;base64,AAECAwQFBgcICQoL... (1,390 characters, base64 of 1,024 bytes)",
        ),
        # One that is cut, or broken into lines, is shown like any other text.
        (PAYLOAD + " .", PAYLOAD[:200] + "... (1,370 characters)"),
        (list(range(20)), list(range(20))),
        ([[0] * 21], [[*([0] * 20), "... (21 items)"]]),
        ({"a": {"b": "y" * 300}}, {"a": {"b": "y" * 200 + "... (300 characters)"}}),
        ({"k" * 300: 1}, {"k" * 200 + "... (300 characters)": 1}),
        ({str(n): n for n in range(100)}, {str(n): n for n in range(100)}),
        ({str(n): n for n in range(1234)}, {**{str(n): n for n in range(100)}, "...": "(1,234 keys)"}),
        (1234567890123456789, 1234567890123456789),
        ([], []),
    ],
)
def test_long_values(value: Any, short: Any) -> None:
    assert shorten(value) == short


def test_nesting_deeper_than_python_may_recurse() -> None:
    value: Any = [1, 2]
    for _ in range(5000):
        value = {"a": value, "b": 1}
    text = json.dumps(shorten(value))
    assert text.count("{") == 40
    assert '"... (2 keys)"' in text
