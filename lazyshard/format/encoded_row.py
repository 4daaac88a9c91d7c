"""A row that was encoded before it is published: its line, the bytes of its arrays, its length in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import xxhash

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
