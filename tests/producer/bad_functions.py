"""Functions for --transform, --where and python: sources that do what they should not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def cancelled(row: Row) -> Row:
    raise asyncio.CancelledError


def exits(row: Row) -> Row:
    if row["id"] == 3:
        sys.exit(0)
    return row


def breaks_off(row: Row) -> Iterator[Row]:
    yield row
    if row["id"] == 3:
        raise ValueError("after the first")


def a_set(row: Row) -> Any:
    return {"id": {1, 2}} if row["id"] == 3 else row


def not_a_number(row: Row) -> Row:
    return {"id": float("nan")} if row["id"] == 3 else row


def numbers(row: Row) -> Any:
    return [row, 5] if row["id"] == 3 else row


def text(row: Row) -> Any:
    return "row" if row["id"] == 3 else row


def a_surrogate(row: Row) -> Row:
    return {"id": "\ud800"} if row["id"] == 3 else row


def number_keys(row: Row) -> Any:
    return {3: "id"} if row["id"] == 3 else row


def huge_number(row: Row) -> Row:
    return {"id": 2**64} if row["id"] == 3 else row


def endless(row: Row) -> Row:
    if row["id"] == 3:
        row["row"] = row
    return row


def large(row: Row) -> Row:
    return {"id": "x" * 2000} if row["id"] == 3 else row


def deep(row: Row) -> Any:
    """Objects in objects, 100,000 of them."""
    if row["id"] == 3:
        for _ in range(100_000):
            row = {"row": row}
    return row


def many_digits(row: Row) -> Row:
    return {"id": 10**5000} if row["id"] == 3 else row


def infinite(row: Row) -> Row:
    return {"id": float("inf")} if row["id"] == 3 else row


def some_bytes(row: Row) -> Row:
    return {"id": b"3"} if row["id"] == 3 else row


def recursion(row: Row) -> Row:
    return recursion(row) if row["id"] == 3 else row


def raises_digits(row: Row) -> Row:
    """An error whose text cannot be written: of an integer of more than 4,300 digits."""
    if row["id"] == 3:
        raise KeyError(10**5000)
    return row


def raises_a_surrogate(row: Row) -> Row:
    """As an error that names a file whose name is no UTF-8."""
    if row["id"] == 3:
        raise ValueError("no file \udcff")
    return row


def raises_a_long_text(row: Row) -> Row:
    if row["id"] == 3:
        raise ValueError("x" * 1_000_000)
    return row


def raises_nothing_to_say(row: Row) -> Row:
    if row["id"] == 3:
        raise LookupError
    return row


def has_no_memory(row: Row) -> Row:
    if row["id"] == 3:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("the image cannot be decoded") from None
    return row


class Broken(Exception):
    """Has no text: asking for it raises."""

    def __str__(self) -> str:
        raise RuntimeError("broken too")


def raises_what_is_broken(row: Row) -> Row:
    if row["id"] == 3:
        raise Broken
    return row


def prints(row: Row) -> Row:
    print("printed", row["id"])
    return row


def hangs(row: Row) -> Row:
    """At the third row; says so with a file in the current directory."""
    if row["id"] == 3:
        Path("hangs").touch()
        while True:
            time.sleep(600)
    return row


def dies(row: Row) -> Row:
    """At the third row, while a file is there, as by the kernel's hand where memory is short."""
    if row["id"] == 3 and Path("memory-is-short").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def never_gives(position: Any) -> Iterator[tuple[Row, int]]:
    """A generator for a source: three rows, then none, and no end."""
    for number in range(position or 0, 3):
        yield {"id": number}, number + 1
    while True:
        time.sleep(600)
