"""The lengths of rows that are to be packed, as the rows themselves tell them."""

from __future__ import annotations

from typing import Any, Final

import orjson

from lazyshard.errors import RowInvalid
from lazyshard.format.packed_row import ADDED_LEVELS

_MAX_LEVELS: Final = 1024
"""How deep readers nest."""

_SHOWN: Final = 60
"""Characters of a value that are told."""


class Measure:
    """Tells how many tokens a row has.

    Args:
        field: the key under which they stand.
        most: tokens of a pack.
    """

    def __init__(self, field: str, most: int) -> None:
        self._field = field
        self._most = most

    def tokens(self, row: dict[str, Any], line: bytes) -> int:
        """Returns the tokens of a row.

        Args:
            row: the row.
            line: the same as a line.

        Raises:
            RowInvalid: it does not tell them, has more than go into a pack, or is nested too deep to lie in one.
        """
        tokens = row.get(self._field)
        if type(tokens) is not int or tokens < 1:
            found = repr(tokens)[:_SHOWN] if self._field in row else "none"
            raise _refuse(f"the tokens of a row are a whole number from 1 under {self._field!r}, found {found}")
        if tokens > self._most:
            raise _refuse(f"{tokens} tokens under {self._field!r}, more than the {self._most} of a pack")
        # Every level takes an opening bracket, so few rows are parsed a second time.
        if line.count(b"{") + line.count(b"[") > _MAX_LEVELS - ADDED_LEVELS:
            try:
                orjson.loads(b"[" * ADDED_LEVELS + line + b"]" * ADDED_LEVELS)
            except orjson.JSONDecodeError:
                raise _refuse(f"nested more than {_MAX_LEVELS - ADDED_LEVELS} levels deep") from None
        return tokens


def _refuse(reason: str) -> RowInvalid:
    return RowInvalid(f"not a row: --pack: {reason}", reason=f"--pack: {reason}")
