"""Sequences of at most so many tokens, made of the documents of one window after the other; and their tokens.

The lengths of a window's rows alone decide which sequences are made of them, whatever the ranks. The sequences of all
windows are dealt to the ranks by micro batches; here with two ranks and a micro batch of two::

    window       0 0 0 0 0 | 1 1 1 1 | 2 2 2 2 2 2
    sequence     0 1 2 3 4   5 6 7 8   9 ...
    rank         0 0 1 1 0   0 1 1 0   0 ...

What a split leaves over of a window begins the first sequence of the next one. The tokens of a row are int64 arrays by
name: `input_ids`, and `labels` if the row has them.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.plan.splitting import (
    BEGINNING,
    Cut,
    Piece,
    SplitRule,
    SplitSequence,
    pack_samples,
    split_documents,
    split_rest,
)

INPUT_IDS: Final = "input_ids"
LABELS: Final = "labels"
POSITION_IDS: Final = "position_ids"
ATTENTION_MASK: Final = "attention_mask"

NO_LABEL: Final = -100
"""What losses of PyTorch and transformers leave out."""

MOST_ID: Final = 2**31 - 1
"""The greatest token id: that of 32 bits, in which ids are kept. No vocabulary has a hundredth of as many."""

_Tokens = npt.NDArray[np.int64]


def tokens_of(sample: Any) -> dict[str, _Tokens]:
    """Returns the token ids of an encoded row, a dict or the ids alone, and its labels if it has some.

    Raises:
        ValueError: it has no ids, one is not in [0, MOST_ID], or its labels are not as many, or not of 32 bits.
    """
    fields = sample if isinstance(sample, dict) else {INPUT_IDS: sample}
    if INPUT_IDS not in fields:
        raise ValueError(f"it has no input_ids, only {', '.join(map(repr, list(fields)[:8])) or 'nothing'}")
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

    Token ids are padded with `token`, labels with -100; `attention_mask` is 1 where a token of the row is.
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

    What is put in as BOS or EOS is its own label. Raises ValueError: some of its documents have labels, others do not.
    """
    rows = [tokens[piece.document] for piece in sequence.pieces]
    names = list(rows[0])
    if any(list(row) != names for row in rows):
        raise ValueError("of the rows of its sequence some have labels and others have none")
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in [*names, POSITION_IDS]}
    last = len(rows) - 1
    for number, (piece, row) in enumerate(zip(sequence.pieces, rows, strict=True)):
        front = np.array([every_bos] * (sequence.bos and number == 0) + [bos] * piece.bos, np.int64)
        behind = np.array([eos] * piece.eos + [every_eos] * (sequence.eos and number == last), np.int64)
        for name in names:
            found[name] += [front, row[name][piece.start : piece.stop], behind]
        found[POSITION_IDS].append(np.arange(len(front) + piece.stop - piece.start + len(behind)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _numbers(name: str, values: Any) -> _Tokens:
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ValueError(f"{name} are no numbers: {cause}") from cause
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        kind = "text" if found.dtype.kind == "U" else f"{found.dtype}"
        shape = "" if found.ndim == 1 else f" of shape {found.shape}"
        some = reprlib.repr(found.reshape(-1)[:1].tolist())[1:-1]
        raise ValueError(f"{name} are whole numbers in one dimension, found {kind}{shape}, such as {some}")
    if found.dtype == np.uint64 and found.size and found.max() > MOST_ID:
        place = int(found.argmax())
        raise ValueError(f"{name}[{place}] is {found[place]}, expected {MOST_ID} at the most")
    return found.astype(np.int64, copy=False)


def _check_range(name: str, values: _Tokens, least: int, what: str) -> None:
    wrong = np.flatnonzero((values < least) | (values > MOST_ID))
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(f"{name}[{place}] is {values[place]}, expected {what} from {least} to {MOST_ID}")


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
        _settle(self, size=_TOKENS)
        _check_size(self.size)


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
        _settle(self, size=_TOKENS, token=_ID)
        _check_size(self.size)


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
        ValueError: there is no room for a token of a row; or the overlap is neither 0 nor 1, or is asked for together
            with a BOS or EOS of every sequence.
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
        ids = (name for name in ("bos", "eos", "every_bos", "every_eos") if getattr(self, name) is not None)
        _settle(self, size=_TOKENS, **dict.fromkeys(ids, _ID), overlap=_TOKENS)
        _ = self.rule

    @property
    def rule(self) -> SplitRule:
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
Rule = Pack | Pad | SplitRule

_TOKENS: Final = "a number of tokens"
_ID: Final = "a token id"


def _settle(form: Form, **fields: str) -> None:
    """Has fields be ints. Raises TypeError: one is none."""
    for name, what in fields.items():
        value = getattr(form, name)
        try:
            object.__setattr__(form, name, operator.index(value))
        except TypeError:
            raise TypeError(f"{type(form).__name__}: {name} is {what}, an int, got {value!r:.100}") from None


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size is a number of tokens from 1, got {size!r}")


class Sequences(NamedTuple):
    """What is made of documents, which pieces name by index; and where what is left over begins."""

    sequences: list[SplitSequence]
    left: Cut


def make_sequences(
    lengths: Sequence[int], rule: Rule, start: Cut = BEGINNING, *, last: bool = False, begun: bool = False
) -> Sequences:
    """Returns the sequences made of documents, from the `start` that an earlier call has left where they are cut.

    If no document follows (`last`), what is left over becomes a sequence of its own; `begun` if there are some before.
    """
    end = Cut(len(lengths), 0)
    if isinstance(rule, SplitRule):
        sequences, left = split_documents(lengths, rule, start)
        if last:
            rest = split_rest(lengths, rule, left, begun=begun or bool(sequences))
            return Sequences(sequences + ([rest] if rest is not None else []), end)
        return Sequences(sequences, left)
    if start != BEGINNING:
        raise ValueError(f"whole documents are not begun within one, got {start}")
    if isinstance(rule, Pad):
        if any(not 1 <= length <= rule.size for length in lengths):
            raise ValueError(f"lengths are from 1 to {rule.size}")
        groups = [[document] for document in range(len(lengths))]
    else:
        groups = pack_samples(lengths, rule.size)
    return Sequences([_whole([Piece(one, 0, lengths[one], False, False) for one in group]) for group in groups], end)


def completed(left: Sequence[SplitSequence], places: int, rule: Rule) -> list[SplitSequence]:
    """Returns as many sequences as one more micro batch of every rank has places, made of those left over.

    Packs are taken apart, the longest first, where their halves are nearest to each other, until there are enough.
    Where rows do not suffice, and with the other forms, sequences then come once more in turn.
    """
    if not 0 < len(left) <= places:
        raise ValueError(f"from 1 to {places} sequences are completed, got {len(left)}")
    found = _taken_apart(left, places) if isinstance(rule, Pack) else list(left)
    return [found[place % len(found)] for place in range(places)]


def _taken_apart(packs: Sequence[SplitSequence], places: int) -> list[SplitSequence]:
    # By place among all, so that the parts of a pack stay where it was.
    longest: list[tuple[int, tuple[int, ...], SplitSequence]] = [
        (-_tokens(pack.pieces), (place,), pack) for place, pack in enumerate(packs)
    ]
    heapify(longest)
    single: list[tuple[tuple[int, ...], SplitSequence]] = []
    while longest and len(longest) + len(single) < places:
        _, place, pack = heappop(longest)
        if len(pack.pieces) == 1:
            single.append((place, pack))
            continue
        for half, pieces in enumerate(_halves(pack.pieces)):
            heappush(longest, (-_tokens(pieces), (*place, half), _whole(pieces)))
    return [pack for _, pack in sorted(single + [(place, pack) for _, place, pack in longest])]


def _halves(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], Sequence[Piece]]:
    whole = _tokens(pieces)
    cut = min(range(1, len(pieces)), key=lambda at: abs(whole - 2 * _tokens(pieces[:at])))
    return pieces[:cut], pieces[cut:]


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _whole(pieces: Sequence[Piece]) -> SplitSequence:
    return SplitSequence(tuple(pieces), False, False)
