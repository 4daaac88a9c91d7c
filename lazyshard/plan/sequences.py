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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lazyshard.plan.packing import pack_samples
from lazyshard.plan.splitting import BEGINNING, Cut, Piece, SplitRule, SplitSequence, split_documents, split_rest

__all__ = ["PackRule", "PadRule", "Rule", "Sequences", "completed", "make_sequences"]


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
