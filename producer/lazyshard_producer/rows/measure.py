"""The lengths of rows that are to be packed or dealt by cost, as the rows themselves or their encoder tell them."""

from __future__ import annotations

import reprlib
from typing import Any, Final

import orjson

from lazyshard.errors import RowInvalid
from lazyshard.format import EncodedRow
from lazyshard.format.arrays import ARRAY_KEY
from lazyshard.format.packed_row import ADDED_LEVELS
from lazyshard.memory import loads

_MAX_LEVELS: Final = 1024
"""How deep readers nest."""

MAX_TOKENS: Final = 2**32 - 1
"""The longest row that a seal can tell of."""

_KEY_CHARACTERS: Final = 60
"""So much of a key is told."""

_SHOWN: Final = 60
"""Characters of a value that are told."""


class Measure:
    """Tells how many tokens a row has.

    Args:
        field: the key under which they stand, in rows that are not encoded.
        pack: tokens of a pack; 0 where rows are not packed.
    """

    def __init__(self, field: str, pack: int) -> None:
        self.field = field
        self._pack = pack

    def tokens(self, row: dict[str, Any], line: bytes) -> int:
        """Returns the tokens of a row.

        Args:
            row: the row.
            line: the same as a line.

        Raises:
            RowInvalid: it does not tell them, has more than go into a pack, or is nested too deep to lie in one.
        """
        tokens = row.get(self.field)
        if not self._pack:
            if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
                found = reprlib.repr(tokens) if self.field in row else f"none among its keys ({key_names(row)})"
                expected = f"expected a whole number of tokens from 1 to {MAX_TOKENS}"
                raise _refuse(f"--length-field {self.field}: {expected}, found {found}")
            _check_ids("--balance", row, tokens, f"under {self.field!r}")
            return tokens
        if type(tokens) is not int or tokens < 1:
            found = repr(tokens)[:_SHOWN] if self.field in row else "none"
            raise _refuse(f"--pack: the tokens of a row are a whole number from 1 under {self.field!r}, found {found}")
        self._check_pack(tokens, f"under {self.field!r}", line)
        _check_ids("--pack", row, tokens, f"under {self.field!r}")
        return tokens

    def encoded_tokens(self, row: EncodedRow) -> int:
        """Returns the tokens of an encoded row, which its encoder tells. Raises as `tokens` does."""
        tokens, option = row.tokens, "--pack" if self._pack else "--balance"
        if tokens is None:
            raise _refuse(f"{option}: --encode returned {_found_length(row)}")
        if not tokens:
            raise _refuse(f"{option}: --encode returned a length of 0, expected one from 1")
        if not self._pack:
            return tokens
        self._check_pack(tokens, "as --encode returned it", row.line)
        return tokens

    def _check_pack(self, tokens: int, where: str, line: bytes) -> None:
        """Looks whether a row can lie in a pack."""
        if tokens > self._pack:
            raise _refuse(f"--pack: {tokens} tokens {where}, more than the {self._pack} of a pack")
        # Every level takes an opening bracket, so few rows are parsed a second time.
        if line.count(b"{") + line.count(b"[") > _MAX_LEVELS - ADDED_LEVELS:
            try:
                loads(b"[" * ADDED_LEVELS + line + b"]" * ADDED_LEVELS)
            except orjson.JSONDecodeError:
                raise _refuse(f"--pack: nested more than {_MAX_LEVELS - ADDED_LEVELS} levels deep") from None


def _check_ids(option: str, row: dict[str, Any], tokens: int, where: str) -> None:
    """Refuses a row with more token ids than it says; fewer are right, where images stand for some."""
    ids = row.get("input_ids")
    if isinstance(ids, list) and len(ids) > tokens:
        raise _refuse(f"{option}: {tokens} tokens {where}, but {len(ids)} input_ids")


def _found_length(row: EncodedRow) -> str:
    """Returns what stands where the length of an encoded row is looked for, which is no whole number."""
    expected = "expected a whole number of tokens under 'length'"
    made = loads(row.line)
    if "length" not in made:
        return f"no length among its keys ({key_names(made)}): {expected}"
    found = made["length"]
    if isinstance(found, dict) and ARRAY_KEY in found:
        dtype, shape, _ = found[ARRAY_KEY]
        return f"a length that is an array of {dtype} of shape {tuple(shape)}: {expected}, such as .item() makes of it"
    return f"a length of {reprlib.repr(found)} ({type(found).__name__}): {expected}"


def key_names(row: dict[str, Any]) -> str:
    """Returns the first keys of a row, for messages."""
    return ", ".join(key[:_KEY_CHARACTERS] for key in list(row)[:8]) or "none"


def _refuse(reason: str) -> RowInvalid:
    return RowInvalid(f"not a row: {reason}", reason=reason)
