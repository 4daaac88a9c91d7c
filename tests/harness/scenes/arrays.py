"""What an encoder makes of rows for runs that are killed, and the bytes of its arrays, told without lazyshard."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tests.harness.scenes.rows import Row


def encoded(row: Row) -> Any:
    """A row with two arrays, either of which may be empty, or one without any; some are refused."""
    number = row["id"]
    if number % 11 == 7:
        raise ValueError("seven")
    if _is_plain(number):
        return {"id": number}
    ids = np.full(number % 4, number, np.int32)
    mel = np.full((3, number % 3), number, np.float16)
    return {"id": number, "length": len(ids), "input_ids": ids, "audio": [{"mel": mel}]}


def side_bytes(number: int) -> bytes:
    """What the side file holds of the row with this id."""
    if _is_plain(number):
        return b""
    ids = struct.pack("<i", number) * (number % 4)
    mel = struct.pack("<e", number) * (3 * (number % 3))
    return b"".join(part + bytes(-len(part) % 8) for part in (ids, mel))


def _is_plain(number: int) -> bool:
    # Pairs of rows: so there are chunks all of whose rows are plain, and whose side file is empty.
    return number // 2 % 4 == 1
