"""Amounts for people: bytes, durations, rates."""

from __future__ import annotations

from typing import Final

from lazyshard.stream.pacing import format_seconds

_SIZES: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))

_DAY_S: Final = 86400.0


def size(number: float) -> str:
    """Returns a number of bytes, in powers of 1,000.

    >>> size(999), size(1000), size(12_345_678), size(5e15)
    ('999 bytes', '1.0 kB', '12.3 MB', '5,000.0 TB')
    """
    for unit, one in _SIZES:
        if number >= one:
            return f"{number / one:,.1f} {unit}"
    return "1 byte" if round(number) == 1 else f"{round(number)} bytes"


def duration(seconds: float) -> str:
    """Returns a duration.

    >>> duration(3), duration(125), duration(2 * 86400 + 7200), duration(1e9)
    ('3 s', '2 min 5 s', '2 days 2 h', 'over a year')
    """
    if seconds < 2 * _DAY_S:
        return format_seconds(seconds)
    if seconds > 365 * _DAY_S:
        return "over a year"
    hours = round(seconds / 3600)
    return f"{hours // 24} days {hours % 24} h"


def per_second(number: float, noun: str) -> str:
    """Returns a rate; a slow one with more digits, a very slow one by the hour.

    >>> per_second(1234.56, "samples"), per_second(0.25, "chunks"), per_second(0.001, "chunks"), per_second(0, "rows")
    ('1,234.6 samples/s', '0.25 chunks/s', '3.6 chunks/h', '0 rows/s')
    """
    if number == 0:
        return f"0 {noun}/s"
    if number < 0.01:
        return f"{number * 3600:,.1f} {noun}/h"
    return f"{number:,.1f} {noun}/s" if number >= 1 else f"{number:.2f} {noun}/s"
