"""Rows that hold tokens: their token ids and labels taken out of them, to be cut, or padded where they are.

A row has `input_ids`, whole numbers in a list or an array of its encoder's, and perhaps `labels`, as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.errors import RowInvalid
from lazyshard.format import EncodedRow, encode_row
from lazyshard.format.arrays import fill_row, pack_row
from lazyshard.memory import loads
from lazyshard.plan.sequence_tokens import ATTENTION_MASK, INPUT_IDS, LABELS, POSITION_IDS, pad_tokens, tokens_of
from lazyshard_producer.configuration.settings import PadSettings

LENGTH: Final = "length"

_BESIDE: Final = ("loss_mask", "loss_scale", "token_type_ids")
"""Keys under which rows hold something else for each token."""

_REPLACED: Final = (INPUT_IDS, LABELS, POSITION_IDS, ATTENTION_MASK)
"""Keys of which sequences have their own."""

Tokens = Mapping[str, npt.NDArray[np.int64]]


def read_document(row: dict[str, Any], line: bytes | EncodedRow) -> tuple[EncodedRow, int]:
    """Returns the tokens of a row, and nothing else of it, in the form in which they travel; and how many these are.

    The same tokens have the same form, however they were written.

    Args:
        row: as it was made, where it is not encoded.
        line: the row as it would be published by itself.

    Raises:
        RowInvalid: it holds no tokens, or something that goes with them and would be lost.
    """
    fields = _fields(row, line)
    tokens = _tokens("--split", fields, _BESIDE)
    if isinstance(line, EncodedRow):
        # Of images, for instance: the tokens that stand for them would be trained without.
        others = [name for name, value in fields.items() if name not in _REPLACED and _holds_array(value)]
        if others:
            raise _refuse(f"--split: there is an array under {others[0]!r:.80}, which would be lost")
    packed = pack_row({name: narrow(values) for name, values in tokens.items()})
    count = len(tokens[INPUT_IDS])
    return EncodedRow(packed.line, packed.arrays, count), count


def document_of(row: EncodedRow) -> dict[str, npt.NDArray[Any]]:
    """Returns the tokens that `read_document` has taken out of a row, by name; views of its bytes."""
    found: dict[str, Any] = loads(row.line)
    fill_row(found, np.frombuffer(row.arrays, np.uint8))
    return found


class Padded:
    """Pads rows.

    Args:
        settings: how.
    """

    def __init__(self, settings: PadSettings) -> None:
        self._size = settings.size
        self._token = settings.token

    def make(self, row: dict[str, Any], line: bytes | EncodedRow) -> tuple[bytes | EncodedRow, int]:
        """Returns a row with its tokens padded, an attention mask and its length, and how many tokens it has itself.

        What else it holds stays. Arguments as of `read_document`.

        Raises:
            RowInvalid: it holds no tokens, more than there is room for, or something that goes with each of them.
        """
        fields = _fields(row, line)
        tokens = _tokens("--pad", fields, (*_BESIDE, POSITION_IDS))
        count = len(tokens[INPUT_IDS])
        if count > self._size:
            raise _refuse(f"--pad: {count} tokens, more than the {self._size} to which rows are padded")
        return write_tokens(
            pad_tokens(tokens, self._size, self._token), count, arrays=isinstance(line, EncodedRow), of=fields
        ), count


def write_tokens(
    tokens: Tokens, length: int, *, arrays: bool, of: Mapping[str, Any] | None = None
) -> bytes | EncodedRow:
    """Returns a row that holds tokens, as it is published.

    Args:
        tokens: by name.
        length: what it says that it has, under `length`, and in the seal.
        arrays: whether as arrays beside the line, or as lists in it.
        of: what else it holds.

    Raises:
        RowInvalid: that cannot be written.
    """
    if not arrays:
        return encode_row({**(of or {}), **{name: values.tolist() for name, values in tokens.items()}, LENGTH: length})
    packed = pack_row({**(of or {}), **{name: narrow(values) for name, values in tokens.items()}, LENGTH: length})
    return EncodedRow(packed.line, packed.arrays, length)


def narrow(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Returns the same numbers as int32, which they fit, as `tokens_of` has seen to."""
    return values.astype(np.int32)


def _fields(row: dict[str, Any], line: bytes | EncodedRow) -> dict[str, Any]:
    if not isinstance(line, EncodedRow):
        return row
    found: dict[str, Any] = loads(line.line)
    fill_row(found, np.frombuffer(line.arrays, np.uint8))
    return found


def _tokens(option: str, fields: dict[str, Any], beside: tuple[str, ...]) -> dict[str, npt.NDArray[np.int64]]:
    for name in beside:
        if fields.get(name) is not None:
            raise _refuse(f"{option}: {name!r} holds something for each token, which would no longer fit; leave it out")
    mask = fields.get(ATTENTION_MASK)
    if mask is not None and not _is_full(mask):
        raise _refuse(
            f"{option}: {ATTENTION_MASK!r} leaves out some tokens of the row, all of which would be attended to; leave "
            f"out these tokens and the mask"
        )
    try:
        tokens = tokens_of(fields)
    except ValueError as cause:
        raise _refuse(f"{option}: {cause}") from cause
    if not len(tokens[INPUT_IDS]):
        raise _refuse(f"{option}: input_ids are empty, expected a token at least")
    return tokens


def _is_full(mask: Any) -> bool:
    try:
        return bool(np.all(np.asarray(mask) == 1))
    except (TypeError, ValueError):
        return False


def _holds_array(value: Any) -> bool:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, np.ndarray):
            return True
        if isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
    return False


def _refuse(reason: str) -> RowInvalid:
    return RowInvalid(f"not a row: {reason}", reason=reason)
