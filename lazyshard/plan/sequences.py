"""Sequences of at most so many tokens, made of the documents of one window after the other.

A stream is looked at in windows of a fixed number of rows. The lengths of a window's rows alone decide which sequences
are made of them: whole rows put together (`PackRule`), all rows one behind the other and cut (`SplitRule`), or each row
by itself (`PadRule`). Ranks play no part in it. The sequences of all windows, one behind the other, are one row, which
is dealt to the ranks by micro batches; here with two ranks and a micro batch of two::

    window       0 0 0 0 0 | 1 1 1 1 | 2 2 2 2 2 2
    sequence     0 1 2 3 4   5 6 7 8   9 ...
    rank         0 0 1 1 0   0 1 1 0   0 ...

So ranks have as many sequences as each other, but for what is left over at the end of the stream, fewer than
dp * batch_size: once the lengths of the windows up to a micro batch are known, every rank knows all of them without a
word. And another number of ranks goes on with the next sequence, whichever that is.

What a split leaves over of a window, fewer tokens than a sequence, begins the first sequence of the next one, so how
wide windows are makes no difference there.

The tokens of sequences: what is cut out of rows, and what pads one. See `splitting` for where they are cut.

The tokens of a row are int64 arrays of shape (tokens,) by name: `input_ids`, and `labels` if the row has them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PackRule:
    """Whole documents, of together at most `size` tokens: best fit, longest first. See `pack_samples`.

    Raises:
        ValueError: the size is below 1.
    """

    size: int

    def __post_init__(self) -> None:
        """Checks the size."""
        _check_size(self.size)


@dataclass(frozen=True, slots=True)
class PadRule:
    """One document, of at most `size` tokens.

    Raises:
        ValueError: the size is below 1.
    """

    size: int

    def __post_init__(self) -> None:
        """Checks the size."""
        _check_size(self.size)


Rule = PackRule | PadRule | SplitRule


class Sequences(NamedTuple):
    """What is made of the documents of a window.

    Attributes:
        sequences: in order; their pieces name documents by index.
        left: where what is left over begins; behind the last document if nothing is.
    """

    sequences: list[SplitSequence]
    left: Cut


def make_sequences(
    lengths: Sequence[int], rule: Rule, start: Cut = BEGINNING, *, last: bool = False, begun: bool = False
) -> Sequences:
    """Returns the sequences that are made of documents.

    Args:
        lengths: tokens of each document, 1 or more; at most `rule.size` where they stay whole.
        rule: how they are made.
        start: where the first sequence begins, as an earlier call has left it; only where documents are cut.
        last: whether no document follows, so that what is left over becomes a sequence of its own, if a shorter one.
        begun: whether there are sequences before.

    Raises:
        ValueError: a length is impossible, or the start.
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
    if isinstance(rule, PadRule):
        if any(not 1 <= length <= rule.size for length in lengths):
            raise ValueError(f"lengths are from 1 to {rule.size}")
        groups = [[document] for document in range(len(lengths))]
    else:
        groups = pack_samples(lengths, rule.size)
    return Sequences([_whole([Piece(one, 0, lengths[one], False, False) for one in group]) for group in groups], end)


def completed(left: Sequence[SplitSequence], places: int, rule: Rule) -> list[SplitSequence]:
    """Returns as many sequences as there are places in one more micro batch of every rank, of those left over.

    Packs are taken apart, the longest first, each where its halves are nearest to each other, until there are enough:
    every document is in one of them. Where there are fewer documents than places, and where rows are cut or padded,
    the sequences then come once more in turn.

    Args:
        left: the sequences left over; at least one, no more than places.
        places: how many there are to be.
        rule: how they were made.

    Raises:
        ValueError: there are none, or too many.
    """
    if not 0 < len(left) <= places:
        raise ValueError(f"from 1 to {places} sequences are completed, got {len(left)}")
    found = _taken_apart(left, places) if isinstance(rule, PackRule) else list(left)
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


def _check_size(size: int) -> None:
    if type(size) is not int or size < 1:
        raise ValueError(f"size is a number of tokens from 1, got {size!r}")
