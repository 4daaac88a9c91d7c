"""Rows that were encoded before they are published, and packs of rows.

An encoded row is its line, the bytes of its arrays, and its length in tokens. A pack is whole samples that are trained
together, one behind the other::

    {"pack": [ROW, ROW, ...], "lengths": [TOKENS, TOKENS, ...]}

and no other key: as many lengths as rows, at least one, each 1 or more. A stream is known to be packed by its rows, all
of which have this form. The length of the pack itself, in tokens, is in the seal like that of any row. The bytes of the
arrays of its rows lie one after the other in the side file, and the offsets in the pack count from the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import xxhash

from lazyshard.format.arrays import move_arrays
from lazyshard.format.batch import CheckedArrays, CheckedLines, check_lines


class EncodedRow(NamedTuple):
    """A row as it is published. All of it is bytes and a number, so that it travels between processes as it is.

    Attributes:
        line: its line, the newline included; see `lazyshard.format.arrays.pack_row`.
        arrays: its bytes in the side file.
        tokens: its length in tokens, None where nobody knows.
    """

    line: bytes
    arrays: bytes
    tokens: int | None = None

    @property
    def data(self) -> bytes:
        """All bytes of the row, for a digest of it."""
        return self.line + self.arrays


def check_encoded(rows: Sequence[EncodedRow]) -> CheckedLines:
    """Checks lines as `check_lines` does, and puts arrays and lengths to them; lengths only if all have one."""
    checked = check_lines([row.line for row in rows])
    rows = rows[: len(checked)]
    tokens = [row.tokens for row in rows if row.tokens is not None]
    return replace(
        checked,
        tokens=np.array(tokens, np.uint32) if len(tokens) == len(rows) else None,
        arrays=CheckedArrays(
            b"".join(row.arrays for row in rows),
            np.fromiter(accumulate(len(row.arrays) for row in rows), np.uint64, len(rows)),
            np.fromiter((xxhash.xxh3_64_intdigest(row.arrays) for row in rows), np.uint64, len(rows)),
        ),
    )


PACK: Final = "pack"
LENGTHS: Final = "lengths"

ADDED_LEVELS: Final = 2
"""How much deeper a row lies in a pack: readers nest no deeper than 1,024."""


class PackedRow(NamedTuple):
    """A pack.

    Attributes:
        rows: its samples, in order.
        lengths: tokens of each, as the producer was told.
    """

    rows: list[dict[str, Any]]
    lengths: list[int]


def encode_pack(lines: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Returns the line of a pack, with its newline. The rows stay as they are, to the byte.

    Args:
        lines: the rows, each a line that was checked, with its newline; at least one.
        lengths: tokens of each.
    """
    rows = b",".join(line.rstrip(b"\r\n") for line in lines)
    return b'{"pack":[' + rows + b'],"lengths":' + orjson.dumps(list(lengths)) + b"}\n"


def encode_encoded_pack(rows: Sequence[EncodedRow], lengths: Sequence[int]) -> EncodedRow:
    """Returns the pack of rows that hold arrays. The rows stay as they are, but for where their arrays lie.

    Args:
        rows: each as it would be published by itself; at least one.
        lengths: tokens of each.
    """
    before = [0, *accumulate(len(row.arrays) for row in rows)]
    lines = [move_arrays(row.line, by) for row, by in zip(rows, before, strict=False)]
    return EncodedRow(encode_pack(lines, lengths), b"".join(row.arrays for row in rows), sum(lengths))


def decode_pack(row: dict[str, Any]) -> PackedRow | None:
    """Returns the pack that a row is, None if it is a row like any other."""
    if len(row) != 2 or PACK not in row or LENGTHS not in row:
        return None
    rows, lengths = row[PACK], row[LENGTHS]
    if type(rows) is not list or type(lengths) is not list or not rows or len(rows) != len(lengths):
        return None
    if any(type(one) is not dict for one in rows) or any(type(length) is not int or length < 1 for length in lengths):
        return None
    return PackedRow(rows, lengths)
