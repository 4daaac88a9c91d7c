"""Encoders for tests: what a user's `--encode MODULE:FUNCTION` may do."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

Row = dict[str, Any]


def tokens(row: Row) -> Row:
    """As many tokens as the text has letters, each its number; ids that end in 7 are refused."""
    if row["id"] % 10 == 7:
        raise ValueError("seven")
    ids = np.frombuffer(row.get("text", "").encode(), np.uint8).astype(np.int32)
    return {"id": row["id"], "copy": row.get("copy"), "length": len(ids), "input_ids": ids, "mask": ids > 100}


tokens.fingerprint = {"vocabulary": "bytes", "size": 256}  # type: ignore[attr-defined]


def otherwise(row: Row) -> Row:
    """The same with another fingerprint."""
    return tokens(row)


otherwise.fingerprint = {"vocabulary": "bytes", "size": 512}  # type: ignore[attr-defined]


def without_length(row: Row) -> Row:
    """Tells no length."""
    return {"id": row["id"], "input_ids": np.arange(row["id"], dtype=np.int64)}


def pid(row: Row) -> Row:
    """Tells which process has encoded."""
    return {"id": row["id"], "pid": os.getpid()}


def number(row: Row) -> Any:
    """Returns no dict."""
    return 3


def text_array(row: Row) -> Any:
    """Returns an array that cannot be published."""
    return {"a": np.array(["a"])}


def endless(row: Row) -> Any:
    """Returns a length that is none."""
    return {"length": -1}


def too_short(row: Row) -> Any:
    """Returns a length that is less than there are tokens."""
    return {"length": 2, "input_ids": [1, 2, 3]}


def too_short_array(row: Row) -> Any:
    """Returns the same as arrays."""
    return {"length": 2, "input_ids": np.array([1, 2, 3])}


def takes_our_name(row: Row) -> Any:
    return row


takes_our_name.fingerprint = {"v": 1, "kind": "mine"}  # type: ignore[attr-defined]


def nested(row: Row) -> Any:
    """Returns as much as was given, with an array that a transform has made."""
    return {"length": 2, "features": row["features"]}


def features(row: Row) -> Row:
    """A transform, whose rows are no JSON yet."""
    return {"features": {"mel": np.full((2, 3), row["id"], np.float16)}}


def broken(row: Row) -> Row:
    """Has a fingerprint that is none."""
    return row


broken.fingerprint = {"of": [1, 2]}  # type: ignore[attr-defined]


def undescribed(row: Row) -> Row:
    """Has a fingerprint that is a text."""
    return row


undescribed.fingerprint = "v1"  # type: ignore[attr-defined]


def broken_off(row: Row) -> Row:
    """Encodes nothing yet."""
    raise NotImplementedError


def of_numpy(row: Row) -> Row:
    """Tells its length as numpy counts."""
    return {"id": row["id"], "length": np.uint16(row["length"]), "ids": np.zeros(2, np.int32)}


def left_over(row: Row) -> Row:
    """Returns a number of numpy's that is no length."""
    return {"id": row["id"], "length": 1, "scores": {"best": [1.0, np.float32(0.5)]}}


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
