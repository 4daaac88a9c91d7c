"""A row that is a pack: whole samples that are trained together, one behind the other.

    {"pack": [ROW, ROW, ...], "lengths": [TOKENS, TOKENS, ...]}

and no other key: as many lengths as rows, at least one, each 1 or more. A stream is known to be packed by its rows, all
of which have this form. The length of the pack itself, in tokens, is in the seal like that of any row.

Where rows hold arrays, the bytes of the rows of a pack lie one after the other in the side file, and the offsets in the
pack count from the first byte of all of them: a pack is a row with arrays like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import orjson

from lazyshard.format.arrays import move_arrays
from lazyshard.format.encoded_row import EncodedRow

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
