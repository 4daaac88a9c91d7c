"""What tests give as --transform and --where, and as python: sources."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]


def same(row: Row) -> Row:
    return row


def none(row: Row) -> None:
    return None


def twice(row: Row) -> list[Row]:
    return [row, row]


def five(row: Row) -> list[Row]:
    return [row | {"copy": copy} for copy in range(5)]


def some(row: Row, index: int) -> Iterator[Row]:
    """Of three rows the first goes, the second stays, the third comes twice."""
    for copy in range(index % 3):
        yield row | {"copy": copy}


def even(row: Row, index: int) -> bool:
    return index % 2 == 0


def fails_on_three(row: Row) -> Row:
    if row["id"] == 3:
        raise ValueError("three is too many")
    return row


def a_number(row: Row) -> int:
    return 5


def large(row: Row) -> Row:
    """Far more than a pipe takes at a time."""
    return {**row, "text": "x" * 4_000_000}


def dies(row: Row) -> Row:
    os.kill(os.getpid(), signal.SIGKILL)
    return row


NOT_CALLABLE = 3


def seven(position: int | None) -> Iterator[tuple[Row, int]]:
    """A generator for a source: rows 0 to 6; then it waits for rows that never come."""
    for number in range(position or 0, 7):
        yield {"id": number}, number + 1
    time.sleep(3600)
