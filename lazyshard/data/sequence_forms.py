"""`Pack`, `Split` and `Pad`: how sequences are made of rows, and what is handed out for one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshard.plan.sequence_tokens import cut_tokens, pad_tokens, tokens_of
from lazyshard.plan.sequences import PackRule, PadRule, Rule
from lazyshard.plan.splitting import SplitRule, SplitSequence

__all__ = ["Form", "Pack", "Pad", "Split", "count_of", "cut", "facts_of", "padded", "tokens_of"]

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


def padded(form: Pad, tokens: dict[str, _Tokens]) -> dict[str, _Tokens]:
    """Returns what is handed out for a row, of no more tokens than the form has. See `Pad`."""
    return pad_tokens(tokens, form.size, form.token)


def cut(form: Split, sequence: SplitSequence, tokens: Mapping[int, dict[str, _Tokens]]) -> dict[str, _Tokens]:
    """Returns what is handed out for a sequence. See `Split`.

    Args:
        form: the settings.
        sequence: by samples.
        tokens: of each of its samples.

    Raises:
        ValueError: some of its rows have labels, others do not.
    """
    return cut_tokens(sequence, tokens, bos=form.bos, eos=form.eos, every_bos=form.every_bos, every_eos=form.every_eos)


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
