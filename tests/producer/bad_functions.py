"""Functions for --transform, --where and python: sources that do what they should not, all of them at the third row."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def at_three(function: Callable[[Row], Any]) -> Callable[[Row], Any]:
    """Leaves all other rows as they are."""

    @wraps(function)
    def made(row: Row) -> Any:
        return function(row) if row["id"] == 3 else row

    return made


def returns(value: Any) -> Callable[[Row], Any]:
    return at_three(lambda row: value)


a_set = returns({"id": {1, 2}})
not_a_number = returns({"id": float("nan")})
numbers = returns([{"id": 3}, 5])
text = returns("row")
a_surrogate = returns({"id": "\ud800"})
huge_number = returns({"id": 2**64})
large = returns({"id": "x" * 2000})


def raises(error: BaseException) -> Callable[[Row], Any]:
    @at_three
    def made(row: Row) -> Any:
        raise error

    return made


class Broken(Exception):
    """Has no text: asking for it raises."""

    def __str__(self) -> str:
        raise RuntimeError("broken too")


cancelled = raises(asyncio.CancelledError())
raises_digits = raises(KeyError(10**5000))  # its text cannot be written: an integer of more than 4,300 digits
raises_a_surrogate = raises(ValueError("no file \udcff"))
raises_a_long_text = raises(ValueError("x" * 1_000_000))
raises_what_is_broken = raises(Broken())


@at_three
def exits(row: Row) -> Row:
    sys.exit(0)


def breaks_off(row: Row) -> Iterator[Row]:
    yield row
    if row["id"] == 3:
        raise ValueError("after the first")


@at_three
def endless(row: Row) -> Row:
    row["row"] = row
    return row


@at_three
def deep(row: Row) -> Any:
    """Objects in objects, 100,000 of them."""
    for _ in range(100_000):
        row = {"row": row}
    return row


@at_three
def recursion(row: Row) -> Row:
    made: Row = recursion(row)
    return made


@at_three
def has_no_memory(row: Row) -> Row:
    try:
        raise MemoryError
    except MemoryError:
        raise ValueError("the image cannot be decoded") from None


def prints(row: Row) -> Row:
    print("printed", row["id"])
    return row


@at_three
def hangs(row: Row) -> Row:
    """Says so with a file in the current directory."""
    Path("hangs").touch()
    while True:
        time.sleep(600)
