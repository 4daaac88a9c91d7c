"""`Pack`, `Split` and `Pad`: how sequences are made of rows, and what is handed out for one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.plan.sequences import PackRule, PadRule, Rule
from lazyshard.plan.splitting import SplitRule, SplitSequence

__all__ = ["Form", "Pack", "Pad", "Split", "count_of", "cut", "facts_of", "padded", "tokens_of"]

_NO_LABEL: Final = -100
"""What losses of PyTorch and transformers leave out."""

_Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pack:
    """Whole rows, of together at most so many tokens: best fit, longest first (docs/packing.md).

    What is handed out is the list of the encoded rows, as ms-swift's `PackingDataset` gives it to the collator.

    Attributes:
        size: most tokens of a pack.

    Raises:
        ValueError: the size is none.
        TypeError: it is no integer.
    """

    size: int

    def __post_init__(self) -> None:
        """Checks the size."""
        _settle(self, "size", "a number of tokens")
        PackRule(self.size)

    @property
    def rule(self) -> Rule:
        """What it comes to, by lengths."""
        return PackRule(self.size)


@dataclass(frozen=True, slots=True)
class Pad:
    """One row, padded to so many tokens.

    What is handed out has int64 arrays of shape (size,): `input_ids`, `attention_mask` (1 where there is a token of the
    row), and `labels`, if the row has them.

    Attributes:
        size: tokens of each.
        token: with which it is padded; labels are padded with -100.

    Raises:
        ValueError: the size is none.
        TypeError: it or the token is no integer.
    """

    size: int
    token: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _settle(self, "size", "a number of tokens")
        _settle(self, "token", "a token id")
        PadRule(self.size)

    @property
    def rule(self) -> Rule:
        """What it comes to, by lengths."""
        return PadRule(self.size)


@dataclass(frozen=True, slots=True)
class Split:
    """All rows one behind the other, cut into exactly so many tokens; only the last one of a stream may have fewer.

    What is handed out has int64 arrays of shape (size + overlap,): `input_ids`, `position_ids`, from 0 for each row in
    it, and `labels`, if the rows have them. What is put in as BOS or EOS is its own label.

    Attributes:
        size: tokens of each, BOS and EOS included, `overlap` not.
        bos: token in front of each row; None for none.
        eos: token behind each row, or between rows, as a separator is.
        every_bos: token in front of each sequence that does not begin with a row's BOS.
        every_eos: token behind each sequence that does not end in a row's EOS.
        overlap: 1 for sequences of which the last token is the first of the next one, as Megatron's `GPTDataset` has.

    Raises:
        ValueError: as `lazyshard.plan.splitting.SplitRule`.
        TypeError: a number is no integer.
    """

    size: int
    _: KW_ONLY
    bos: int | None = None
    eos: int | None = None
    every_bos: int | None = None
    every_eos: int | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _settle(self, "size", "a number of tokens")
        for name in ("bos", "eos", "every_bos", "every_eos"):
            if getattr(self, name) is not None:
                _settle(self, name, "a token id")
        _settle(self, "overlap", "a number of tokens")
        _ = self.rule

    @property
    def rule(self) -> Rule:
        """What it comes to, by lengths."""
        return SplitRule(
            size=self.size,
            bos=self.bos is not None,
            eos=self.eos is not None,
            every_bos=self.every_bos is not None,
            every_eos=self.every_eos is not None,
            overlap=self.overlap,
        )


Form = Pack | Pad | Split


def _settle(form: Form, name: str, what: str) -> None:
    """Has a field be an int.

    Raises:
        TypeError: it is none.
    """
    value = getattr(form, name)
    try:
        object.__setattr__(form, name, operator.index(value))
    except TypeError:
        raise TypeError(f"{type(form).__name__}: {name} is {what}, an int, got {value!r:.100}") from None


def facts_of(form: Form) -> dict[str, int | str | bool | None]:
    """Returns the settings by name on which it depends which sequence comes when."""
    return {"form": type(form).__name__, **asdict(form.rule)}


def tokens_of(sample: Any) -> dict[str, _Tokens]:
    """Returns the token ids of an encoded row, and its labels if it has some: int64 arrays of one dimension, as long.

    Args:
        sample: a dict with `input_ids`, and perhaps `labels`; or token ids alone.

    Raises:
        ValueError: it has no token ids, or its labels are not as many.
    """
    fields = sample if isinstance(sample, dict) else {"input_ids": sample}
    if "input_ids" not in fields:
        raise ValueError(f"an encoded row has no input_ids, only {', '.join(map(repr, fields)) or 'nothing'}")
    found = {name: _numbers(name, fields[name]) for name in ("input_ids", "labels") if fields.get(name) is not None}
    if "labels" in found and len(found["labels"]) != len(found["input_ids"]):
        raise ValueError(f"an encoded row has {len(found['input_ids'])} input_ids and {len(found['labels'])} labels")
    return found


def padded(form: Pad, tokens: dict[str, _Tokens]) -> dict[str, _Tokens]:
    """Returns what is handed out for a row, of no more tokens than the form has. See `Pad`."""
    free = form.size - len(tokens["input_ids"])
    ends = {"input_ids": form.token, "labels": _NO_LABEL}
    found = {name: np.pad(values, (0, free), constant_values=ends[name]) for name, values in tokens.items()}
    mask = np.zeros(form.size, np.int64)
    mask[: form.size - free] = 1
    return found | {"attention_mask": mask}


def cut(form: Split, sequence: SplitSequence, tokens: Mapping[int, dict[str, _Tokens]]) -> dict[str, _Tokens]:
    """Returns what is handed out for a sequence. See `Split`.

    Args:
        form: the settings.
        sequence: by samples.
        tokens: of each of its samples.

    Raises:
        ValueError: some of its rows have labels, others do not.
    """
    rows = [tokens[piece.document] for piece in sequence.pieces]
    names = list(rows[0])
    if any(list(row) != names for row in rows):
        raise ValueError("of the rows of its sequence some have labels and others have none")
    found: dict[str, list[_Tokens]] = {name: [] for name in [*names, "position_ids"]}
    last = len(rows) - 1
    for number, (piece, row) in enumerate(zip(sequence.pieces, rows, strict=True)):
        front = [form.every_bos] * (sequence.bos and number == 0) + [form.bos] * piece.bos
        behind = [form.eos] * piece.eos + [form.every_eos] * (sequence.eos and number == last)
        for name in names:
            found[name] += [_given(front), row[name][piece.start : piece.stop], _given(behind)]
        found["position_ids"].append(np.arange(len(front) + piece.stop - piece.start + len(behind)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def count_of(sample: Any) -> int | None:
    """Returns how many tokens an encoded row says it has: by `lengths` or `length`, else its token ids; None if not."""
    if not isinstance(sample, dict):
        return None
    for name in ("lengths", "length"):
        if name in sample:
            given = sample[name]
            return int(sum(given)) if isinstance(given, Sequence) else int(given)
    tokens = sample.get("input_ids")
    return None if tokens is None else len(tokens)


def _numbers(name: str, values: Any) -> _Tokens:
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ValueError(f"{name} of an encoded row are no numbers: {cause}") from cause
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} of an encoded row are whole numbers in one dimension, found {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.int64, copy=False)


def _given(tokens: list[int | None]) -> _Tokens:
    return np.array(tokens, np.int64)
