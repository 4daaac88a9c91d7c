"""Functions for tests: what users give as --transform, --where, --encode MODULE:FUNCTION, and as python: sources."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
NOT_CALLABLE = 3


def same(row: Row) -> Row:
    return row


def returns(value: Any) -> Callable[[Row], Any]:
    return lambda row: value


none = returns(None)


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


def large(row: Row) -> Row:
    """Far more than a pipe takes at a time."""
    return {**row, "text": "x" * 4_000_000}


def dies(row: Row) -> Row:
    os.kill(os.getpid(), signal.SIGKILL)
    return row


def seven(position: int | None) -> Iterator[tuple[Row, int]]:
    """A generator for a source: rows 0 to 6; then it waits for rows that never come."""
    for number in range(position or 0, 7):
        yield {"id": number}, number + 1
    time.sleep(3600)


def with_fingerprint(function: Callable[[Row], Row], fingerprint: object) -> Callable[[Row], Row]:
    """The same encoder, which tells something of itself."""

    def encode(row: Row) -> Row:
        return function(row)

    encode.fingerprint = fingerprint  # type: ignore[attr-defined]
    return encode


def letters(row: Row) -> Row:
    """As many tokens as the text has letters, each its number; ids that end in 7 are refused."""
    if row["id"] % 10 == 7:
        raise ValueError("seven")
    ids = np.frombuffer(row.get("text", "").encode(), np.uint8).astype(np.int32)
    return {"id": row["id"], "copy": row.get("copy"), "length": len(ids), "input_ids": ids, "mask": ids > 100}


tokens = with_fingerprint(letters, {"vocabulary": "bytes", "size": 256})
otherwise = with_fingerprint(letters, {"vocabulary": "bytes", "size": 512})
# Fingerprints that cannot be.
takes_our_name = with_fingerprint(letters, {"v": 1, "kind": "mine"})
broken = with_fingerprint(letters, {"of": [1, 2]})
undescribed = with_fingerprint(letters, "v1")

# What cannot be published.
number = returns(3)
endless = returns({"length": -1})
too_short = returns({"length": 2, "input_ids": [1, 2, 3]})
left_over = returns({"length": 1, "scores": {"best": [1.0, np.float32(0.5)]}})


def broken_off(row: Row) -> Row:
    raise NotImplementedError


def without_length(row: Row) -> Row:
    return {"id": row["id"], "input_ids": np.arange(row["id"], dtype=np.int64)}


def pid(row: Row) -> Row:
    return {"id": row["id"], "pid": os.getpid()}


def features(row: Row) -> Row:
    """A transform, whose rows are no JSON yet."""
    return {"features": {"mel": np.full((2, 3), row["id"], np.float16)}}


def nested(row: Row) -> Any:
    """Returns as much as was given, with an array that a transform has made."""
    return {"length": 2, "features": row["features"]}


def of_numpy(row: Row) -> Row:
    return {"id": row["id"], "length": np.uint16(row["length"]), "ids": np.zeros(2, np.int32)}


def counted(row: Row) -> Row:
    """As many tokens as the row says, in two arrays, of which the second is seldom a multiple of eight bytes."""
    length = row["length"]
    ids = np.arange(length, dtype=np.int32)
    return {"id": row["id"], "copy": row.get("copy"), "length": length, "input_ids": ids, "more": {"mask": ids > 1}}


def as_told(row: Row) -> Row:
    """Tells the length that stands in the row, if there is one; of a list the number in it, as an array."""
    length = row["length"]
    told = {} if length is None else {"length": np.array(length[0]) if isinstance(length, list) else length}
    return {"id": row["id"], "ids": np.zeros(2, np.int32), **told}


def tokenized(row: Row) -> Row:
    """The token ids of a row in an array, and its labels if it has some; what else it holds is no array."""
    names = [name for name in ("input_ids", "labels") if name in row]
    arrays: Row = {name: np.array(row[name], np.int64) for name in names}
    return {"id": row.get("id"), "copy": row.get("copy"), "length": len(row["input_ids"]), **arrays}


# What does not do what it should, all of it at the third row.


def at_three(function: Callable[[Row], Any]) -> Callable[[Row], Any]:
    """Leaves all other rows as they are."""

    @wraps(function)
    def made(row: Row) -> Any:
        return function(row) if row["id"] == 3 else row

    return made


a_set = at_three(returns({"id": {1, 2}}))
not_a_number = at_three(returns({"id": float("nan")}))
numbers = at_three(returns([{"id": 3}, 5]))
text = at_three(returns("row"))
a_surrogate = at_three(returns({"id": "\ud800"}))
huge_number = at_three(returns({"id": 2**64}))
too_large = at_three(returns({"id": "x" * 2000}))


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
def circular(row: Row) -> Row:
    row["row"] = row
    return row


@at_three
def deep(row: Row) -> Any:
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
