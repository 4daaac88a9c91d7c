"""Documents put one behind the other and cut into sequences of exactly so many tokens, as pre-training has them.

A document of n tokens may be given a BOS in front and an EOS behind (or a separator: which token it is makes no
difference here). The documents are concatenated, and cut every S tokens wherever that falls::

    documents   aaaa bb ccccc      size 6, each document ended by an EOS (.)
    sequences   aaaa.b | b.cccc    and "c." is left over

Two loaders are followed. Megatron Core's `GPTDataset` (`build_sample_idx` in `megatron/core/datasets/helpers.cpp`)
gives sequences of S + 1 tokens, of which the last is the first of the next one, so that inputs and labels have S each:
`overlap=1`. fms-fsdp's `BufferDataset` (`fms_fsdp/utils/dataset_utils.py`, with `pack_hard`) has every sequence begin
with a BOS, or end in an EOS, if it does not so anyway: `every_bos`, `every_eos`. The token whose place an EOS takes
begins the next sequence.

Nothing here knows a token: what makes a sequence is told as intervals of documents.

Whole samples put together into packs of at most so many tokens: best fit, longest first.

Samples are taken by length, the longest first, and each goes into the pack in which the least room is left behind it;
where it fits into none, a pack is opened. That is best-fit decreasing (Johnson, Demers, Ullman, Garey and Graham,
"Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM Journal on Computing 3, 1974), at
most 11/9 of the fewest packs there can be and a few. For training it was proposed by Ding et al., "Fewer truncations
improve language modeling", 2024 (https://arxiv.org/abs/2404.10830), which finds the pack in a tree over the capacity.

Here packs are kept by the room that is left in them, so that all with the same room are one entry of a sorted list, and
the tightest is found by bisection: O(log d) a sample, and d entries of 8 bytes to be moved, d being how many different
rooms there are, never more than packs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """How documents are framed and cut.

    Attributes:
        size: tokens of a sequence, all BOS and EOS included, `overlap` not.
        bos: whether each document has a BOS in front.
        eos: whether each document has an EOS or a separator behind.
        every_bos: whether a sequence that does not begin with a document's BOS is given one.
        every_eos: whether a sequence that does not end in a document's EOS is given one.
        overlap: tokens, 0 or 1, that a sequence has beyond its size and the next one begins with.

    Raises:
        ValueError: the size has no room for a token of a document; the overlap is neither, or is asked for together
            with a BOS or EOS for every sequence, which would be no token of the text that follows.
    """

    size: int
    bos: bool = False
    eos: bool = False
    every_bos: bool = False
    every_eos: bool = False
    overlap: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        least = 1 + self.every_bos + self.every_eos
        if self.size < least:
            raise ValueError(f"size is a number of tokens from {least}, got {self.size}")
        if self.overlap not in (0, 1):
            raise ValueError(f"overlap is 0 or 1, got {self.overlap}")
        if self.overlap and (self.every_bos or self.every_eos):
            raise ValueError("overlap=1 goes with neither every_bos nor every_eos")


class Cut(NamedTuple):
    """A place between two tokens.

    Attributes:
        document: index of the document of the token behind it; their number where there is none.
        offset: tokens of that document before it, its BOS included.
    """

    document: int
    offset: int


BEGINNING: Final = Cut(0, 0)
"""Before the first document."""


class Piece(NamedTuple):
    """What a sequence has of one document: its BOS, the tokens of the half-open interval [start, stop), its EOS.

    Attributes:
        document: index of the document.
        start, stop: its own tokens, without BOS and EOS; equal where there are none.
        bos: whether its BOS is among them.
        eos: whether its EOS is.
    """

    document: int
    start: int
    stop: int
    bos: bool
    eos: bool


class SplitSequence(NamedTuple):
    """A sequence.

    Attributes:
        pieces: what it has of documents, in order; at least one.
        bos: whether a BOS goes in front that is no document's.
        eos: whether an EOS goes behind that is no document's.
    """

    pieces: tuple[Piece, ...]
    bos: bool
    eos: bool


def split_documents(lengths: Sequence[int], rule: SplitRule, start: Cut = BEGINNING) -> tuple[list[SplitSequence], Cut]:
    """Returns the sequences that documents fill, and where what is left over begins.

    Documents before that place are done with. So with more documents behind the same ones, or behind those from that
    place on, it goes on as if all had been there at once. O(documents + sequences).

    Args:
        lengths: own tokens of each document, 0 or more.
        rule: how they are framed and cut.
        start: where to begin, as an earlier call has returned it.

    Raises:
        ValueError: a length is negative, or the start lies in none of the documents.
    """
    framed = [index(length) + rule.bos + rule.eos for length in lengths]
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths are 0 or more, got {min(lengths)}")
    inside = 0 <= start.document < len(framed) and 0 <= start.offset <= framed[start.document]
    if not inside and start != (len(framed), 0):
        raise ValueError(f"start is a place in one of {len(framed)} documents, got {start}")
    sequences: list[SplitSequence] = []
    at = _first_token(framed, start)
    while True:
        bos = rule.every_bos and not (rule.bos and at.offset == 0)
        spans, after = _take(framed, at, rule.size + rule.overlap - bos)
        if spans is None:
            return sequences, at
        document, first, last = spans[-1]
        eos = rule.every_eos and not (rule.eos and last == framed[document])
        if eos or rule.overlap:
            after = Cut(document, last - 1)
        if eos:
            # Its place was that of a token which the next sequence begins with.
            spans[-1] = (document, first, last - 1)
        pieces = tuple(_piece(framed, rule, *span) for span in spans if span[1] < span[2])
        sequences.append(SplitSequence(pieces, bos, eos))
        at = after


def split_rest(lengths: Sequence[int], rule: SplitRule, left: Cut, *, begun: bool) -> SplitSequence | None:
    """Returns what is left over as a sequence of its own, shorter than the others; None if no token is left.

    It is framed as every sequence is, and has no more tokens than the others even so.

    Args:
        lengths: own tokens of each document, as given to `split_documents`.
        rule: how they are framed and cut.
        left: where what is left over begins, as that has returned it.
        begun: whether there is a sequence before; with an overlap, that one has the first of these tokens too.
    """
    framed = [index(length) + rule.bos + rule.eos for length in lengths]
    at = _first_token(framed, left)
    tokens = sum(framed[at.document :]) - at.offset
    if tokens <= (rule.overlap if begun else 0):
        return None
    spans, _ = _take(framed, at, tokens)
    assert spans is not None
    pieces = tuple(_piece(framed, rule, *span) for span in spans)
    bos = rule.every_bos and not (rule.bos and at.offset == 0)
    return SplitSequence(pieces, bos, rule.every_eos and not rule.eos)


def cut_after(sequence: SplitSequence, rule: SplitRule) -> Cut:
    """Returns where the sequence after one of `split_documents` begins; the offset may be that of its document's end.

    Args:
        sequence: of the documents that are counted here.
        rule: by which it was made.
    """
    document, _, stop, _, eos = sequence.pieces[-1]
    return Cut(document, rule.bos + stop + eos - rule.overlap)


def _first_token(framed: Sequence[int], cut: Cut) -> Cut:
    """Returns the same place as that before a token, if any follows."""
    document, offset = cut
    while document < len(framed) and offset == framed[document]:
        document, offset = document + 1, 0
    return Cut(document, offset)


def _take(framed: Sequence[int], at: Cut, tokens: int) -> tuple[list[tuple[int, int, int]] | None, Cut]:
    """Returns so many tokens as (document, first, behind the last), None if there are not as many; and what follows."""
    spans = []
    while tokens:
        if at.document == len(framed):
            return None, at
        document, offset = at
        last = min(framed[document], offset + tokens)
        spans.append((document, offset, last))
        tokens -= last - offset
        at = _first_token(framed, Cut(document, last))
    return spans, at


def _piece(framed: Sequence[int], rule: SplitRule, document: int, first: int, last: int) -> Piece:
    own = framed[document] - rule.bos - rule.eos
    start, stop = (min(max(place - rule.bos, 0), own) for place in (first, last))
    eos = rule.eos and last == framed[document]
    return Piece(document, start, stop, rule.bos and first == 0, eos)


def pack_samples(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Returns packs of samples; each sample is in one of them, whole.

    The same lengths give the same packs, everywhere. Packs come in the order in which the longest sample of each stands
    (of equally long ones the first), so neither long nor short samples come first; samples of a pack come in the order
    in which they stand. At most one pack is half empty or emptier.

    Args:
        lengths: of shape (samples,): tokens of each sample, from 1 to the capacity.
        capacity: most tokens of a pack.

    Returns:
        For each pack the indices of its samples, rising.

    Raises:
        ValueError: the capacity is below 1, or a length not from 1 to the capacity.
    """
    if capacity < 1:
        raise ValueError(f"capacity is a number of tokens from 1, got {capacity}")
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        return []
    wrong = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if len(wrong):
        raise ValueError(f"lengths are from 1 to {capacity}, got {sizes[wrong[0]]} for sample {wrong[0]}")
    order = np.argsort(-sizes, kind="stable")
    shortest = int(sizes[order[-1]])
    packs: list[list[int]] = []
    rooms: list[int] = []  # in packs that are open, each once, rising
    with_room: dict[int, list[list[int]]] = {}
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            pack = [sample]
            packs.append(pack)
            room = capacity - size
        else:
            room = rooms[at]
            there = with_room[room]
            pack = there.pop()
            if not there:
                del rooms[at], with_room[room]
            pack.append(sample)
            room -= size
        if room >= shortest:
            others = with_room.get(room)
            if others is None:
                rooms.insert(bisect_left(rooms, room), room)
                with_room[room] = [pack]
            else:
                others.append(pack)
    # The longest of a pack is the one that has opened it.
    packs.sort(key=lambda pack: pack[0])
    for pack in packs:
        pack.sort()
    return packs
