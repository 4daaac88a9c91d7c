"""Documents cut into sequences of exactly so many tokens, and whole samples put together into packs of at most so many.

Documents, each with a BOS in front and an EOS behind if asked for, are concatenated, and cut every S tokens::

    documents   aaaa bb ccccc      size 6, each document ended by an EOS (.)
    sequences   aaaa.b | b.cccc    and "c." is left over

As Megatron Core's `GPTDataset` (`build_sample_idx` in `megatron/core/datasets/helpers.cpp`) with `overlap=1`, and as
fms-fsdp's `BufferDataset` (`fms_fsdp/utils/dataset_utils.py`, with `pack_hard`) with `every_bos`, `every_eos`: the
token whose place an EOS takes begins the next sequence. Nothing here knows a token: all are intervals of documents.

Packs are best-fit decreasing (Johnson, Demers, Ullman, Garey and Graham, "Worst-case performance bounds for simple
one-dimensional packing algorithms", SIAM Journal on Computing 3, 1974), for training proposed by Ding et al., "Fewer
truncations improve language modeling", 2024. Packs are kept by the room left in them, so the tightest is found by
bisection.
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
        size: tokens of a sequence, all BOS and EOS included, `overlap` not. bos, eos: whether each document has a BOS
        in front; an EOS or a separator behind. every_bos, every_eos: whether a sequence that does not begin with a
        document's BOS, or end in its EOS, is given one. overlap: tokens, 0 or 1, that a sequence has beyond its size
        and the next one begins with.

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
        least = 1 + self.every_bos + self.every_eos
        if self.size < least:
            raise ValueError(f"size is a number of tokens from {least}, got {self.size}")
        if self.overlap not in (0, 1):
            raise ValueError(f"overlap is 0 or 1, got {self.overlap}")
        if self.overlap and (self.every_bos or self.every_eos):
            raise ValueError("overlap=1 goes with neither every_bos nor every_eos")


class Cut(NamedTuple):
    """A place between two tokens: the document of the one behind it, and its tokens before, BOS included."""

    document: int
    offset: int


BEGINNING: Final = Cut(0, 0)
"""Before the first document."""


class Piece(NamedTuple):
    """What a sequence has of one document: its BOS, its own tokens of the half-open interval [start, stop), its EOS.

    `bos` and `eos` say whether these are among them, which `start` and `stop` do not count.
    """

    document: int
    start: int
    stop: int
    bos: bool
    eos: bool


class SplitSequence(NamedTuple):
    """What a sequence has of documents, in order; `bos` and `eos` are those that are no document's."""

    pieces: tuple[Piece, ...]
    bos: bool
    eos: bool


def split_documents(lengths: Sequence[int], rule: SplitRule, start: Cut = BEGINNING) -> tuple[list[SplitSequence], Cut]:
    """Returns the sequences that documents fill, and where what is left over begins. O(documents + sequences).

    With more documents behind that place it goes on from it, as `start`, as if all had been there at once.
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

    With an overlap, and a sequence before (`begun`), that one has the first of these tokens too.
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
    """Returns where the sequence after one of `split_documents` begins, perhaps at the end of its document."""
    document, _, stop, _, eos = sequence.pieces[-1]
    return Cut(document, rule.bos + stop + eos - rule.overlap)


def _first_token(framed: Sequence[int], cut: Cut) -> Cut:
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
    """Returns packs of samples, each sample whole in one of them, which lengths alone decide.

    Packs come in the order in which the longest sample of each stands (of equally long ones the first), samples of a
    pack in the order in which they stand. At most one pack is half empty or emptier. Raises ValueError: a length is not
    from 1 to the capacity.
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
            if room not in with_room:
                rooms.insert(bisect_left(rooms, room), room)
            with_room.setdefault(room, []).append(pack)
    # The longest of a pack is the one that has opened it.
    packs.sort(key=lambda pack: pack[0])
    for pack in packs:
        pack.sort()
    return packs
