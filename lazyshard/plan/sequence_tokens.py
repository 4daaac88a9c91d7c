"""The tokens of sequences: what is cut out of rows, and what pads one. See `splitting` for where they are cut.

The tokens of a row are int64 arrays of shape (tokens,) by name: `input_ids`, and `labels` if the row has them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.plan.splitting import SplitSequence

__all__ = [
    "ATTENTION_MASK",
    "INPUT_IDS",
    "LABELS",
    "MOST_ID",
    "NO_LABEL",
    "POSITION_IDS",
    "cut_tokens",
    "pad_tokens",
    "tokens_of",
]

INPUT_IDS: Final = "input_ids"
LABELS: Final = "labels"
POSITION_IDS: Final = "position_ids"
ATTENTION_MASK: Final = "attention_mask"

NO_LABEL: Final = -100
"""What losses of PyTorch and transformers leave out."""

MOST_ID: Final = 2**31 - 1
"""The greatest token id: that of 32 bits, in which ids are kept. No vocabulary has a hundredth of as many."""

_WORDS: Final = {"U": "text", "S": "bytes", "b": "true and false", "f": "numbers with a fraction", "O": "mixed values"}
"""What numpy calls by a letter."""

_SHOWN: Final = 8
"""Keys that are told."""

_Tokens = npt.NDArray[np.int64]


def tokens_of(sample: Any) -> dict[str, _Tokens]:
    """Returns the token ids of an encoded row, and its labels if it has some: int64 arrays of one dimension, as long.

    Args:
        sample: a dict with `input_ids`, and perhaps `labels`; or token ids alone.

    Raises:
        ValueError: it has no token ids, one that is below 0 or above `MOST_ID`, or its labels are not as many, or not
            of 32 bits.
    """
    fields = sample if isinstance(sample, dict) else {INPUT_IDS: sample}
    if INPUT_IDS not in fields:
        raise ValueError(f"it has no input_ids, only {', '.join(map(repr, list(fields)[:_SHOWN])) or 'nothing'}")
    found = {name: _numbers(name, fields[name]) for name in (INPUT_IDS, LABELS) if fields.get(name) is not None}
    if INPUT_IDS not in found:
        raise ValueError("input_ids are whole numbers in one dimension, found null")
    _check_range(INPUT_IDS, found[INPUT_IDS], 0, "a token id")
    if LABELS in found:
        _check_range(LABELS, found[LABELS], -MOST_ID - 1, "a label")
    if LABELS in found and len(found[LABELS]) != len(found[INPUT_IDS]):
        raise ValueError(f"{len(found[INPUT_IDS])} input_ids and {len(found[LABELS])} labels, expected as many")
    return found


def pad_tokens(tokens: Mapping[str, _Tokens], size: int, token: int) -> dict[str, _Tokens]:
    """Returns the tokens of a row, of no more than `size`, padded to that: arrays of shape (size,).

    Args:
        tokens: of the row.
        size: see above.
        token: with which token ids are padded; labels are with -100. `attention_mask` is 1 where a token of the row is.
    """
    free = size - len(tokens[INPUT_IDS])
    ends = {INPUT_IDS: token, LABELS: NO_LABEL}
    found = {name: np.pad(values, (0, free), constant_values=ends[name]) for name, values in tokens.items()}
    mask = np.zeros(size, np.int64)
    mask[: size - free] = 1
    return found | {ATTENTION_MASK: mask}


def cut_tokens(
    sequence: SplitSequence,
    tokens: Mapping[int, Mapping[str, npt.NDArray[Any]]],
    *,
    bos: int | None,
    eos: int | None,
    every_bos: int | None,
    every_eos: int | None,
) -> dict[str, _Tokens]:
    """Returns the tokens of a sequence, with `position_ids` from 0 for each document in it.

    What is put in as BOS or EOS is its own label.

    Args:
        sequence: by documents.
        tokens: of each of its documents.
        bos: which token that is; may be None where the rule of the sequence has none.
        eos: likewise.
        every_bos: likewise, of those that are no document's.
        every_eos: likewise.

    Raises:
        ValueError: some of its documents have labels, others do not.
    """
    rows = [tokens[piece.document] for piece in sequence.pieces]
    names = list(rows[0])
    if any(list(row) != names for row in rows):
        raise ValueError("of the rows of its sequence some have labels and others have none")
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in [*names, POSITION_IDS]}
    last = len(rows) - 1
    for number, (piece, row) in enumerate(zip(sequence.pieces, rows, strict=True)):
        front = [every_bos] * (sequence.bos and number == 0) + [bos] * piece.bos
        behind = [eos] * piece.eos + [every_eos] * (sequence.eos and number == last)
        for name in names:
            found[name] += [_given(front), row[name][piece.start : piece.stop], _given(behind)]
        found[POSITION_IDS].append(np.arange(len(front) + piece.stop - piece.start + len(behind)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _numbers(name: str, values: Any) -> _Tokens:
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ValueError(f"{name} are no numbers: {cause}") from cause
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"{name} are whole numbers in one dimension, found {_described(found)}")
    if found.dtype == np.uint64 and found.size and found.max() > MOST_ID:
        place = int(found.argmax())
        raise ValueError(f"{name}[{place}] is {found[place]}, expected {MOST_ID} at the most")
    return found.astype(np.int64, copy=False)


def _described(found: npt.NDArray[Any]) -> str:
    """Returns what an array is in words: how many dimensions, or else of what kind, with the first value."""
    words = _WORDS.get(found.dtype.kind, "numbers" if found.dtype.kind in "iu" else str(found.dtype))
    if found.ndim > 1:
        return f"{words} of shape {found.shape}"
    if not found.size:
        return words
    values = found.reshape(-1)
    if found.dtype.kind == "f" and len(odd := values[values != np.floor(values)]):
        values = odd
    return f"{words}, {'such as ' if found.ndim else ''}{reprlib.repr(values[0:1].tolist()[0])}"


def _check_range(name: str, values: _Tokens, least: int, what: str) -> None:
    """Raises ValueError: a value is outside of [least, MOST_ID]."""
    wrong = np.flatnonzero((values < least) | (values > MOST_ID))
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(f"{name}[{place}] is {values[place]}, expected {what} from {least} to {MOST_ID}")


def _given(tokens: list[int | None]) -> _Tokens:
    return np.array(tokens, np.int64)
