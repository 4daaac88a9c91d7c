import pytest

from lazyshard.cli.output import duration, per_second, size


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
