"""Makes sequences of limited length from documents, by their lengths alone: split, packed or padded; and their tokens.

Documents, with optional BOS and EOS tokens, are concatenated and cut every S tokens::

    documents   aaaa bb ccccc      size 6, each document ended by an EOS (.)
    sequences   aaaa.b | b.cccc    and "c." is left over

With `overlap=1` this is Megatron Core's `GPTDataset` (`build_sample_idx` in `megatron/core/datasets/helpers.cpp`). With
`every_bos` or `every_eos` it is fms-fsdp's `BufferDataset` (`fms_fsdp/utils/dataset_utils.py`, with `pack_hard`): the
token replaced by an EOS begins the next sequence. Packs are best-fit decreasing (Johnson, Demers, Ullman, Garey and
Graham, "Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM Journal on Computing 3,
1974), proposed for training by Ding et al., "Fewer truncations improve language modeling", 2024.

The tokens of a row are int64 arrays by name: `input_ids`, and `labels` if the row has them.
"""

from __future__ import annotations

import operator
import reprlib
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.part import Array, Int64Array

INPUT_IDS: Final = "input_ids"
LABELS: Final = "labels"
POSITION_IDS: Final = "position_ids"
ATTENTION_MASK: Final = "attention_mask"
NO_LABEL: Final = -100  # Ignored by the losses of PyTorch and transformers
MOST_ID: Final = 2**31 - 1  # The greatest token id: ids are stored in 32 bits


@dataclass(frozen=True, slots=True)
class Pack:
    """Packs of whole rows, at most `size` tokens in total: best fit, longest first (docs/packing.md).

    A pack is returned as the list of its encoded rows, as ms-swift's `PackingDataset` passes it to the collator.

    Attributes:
        size: maximum tokens of a pack.

    Raises:
        ValueError, TypeError: the size is below 1, or not an integer.
    """

    size: int

    def __post_init__(self) -> None:
        _to_ints(self, 1, "size")


@dataclass(frozen=True, slots=True)
class Pad:
    """One row, padded to `size` tokens.

    Each result has int64 arrays of shape (size,): `input_ids`, `attention_mask` (1 for tokens of the row), and
    `labels` if the row has them.

    Attributes:
        size: tokens of each sequence.
        token: the padding token; labels are padded with -100.

    Raises:
        ValueError, TypeError: the size is below 1, or the size or the token is not an integer.
    """

    size: int
    token: int = 0

    def __post_init__(self) -> None:
        _to_ints(self, 1, "size", "token")


@dataclass(frozen=True, slots=True)
class Split:
    """All rows concatenated and cut into exactly `size` tokens; only the last sequence of a stream may be shorter.

    Each result has int64 arrays of shape (size + overlap,): `input_ids`, `position_ids`, which start at 0 for each row,
    and `labels` if the rows have them. An inserted BOS or EOS is its own label.

    Attributes:
        size: tokens of each sequence, including BOS and EOS, without `overlap`.
        bos: token before each row; None for none.
        eos: token after each row, or between rows like a separator.
        every_bos: token before each sequence that does not begin with the BOS of a row.
        every_eos: token after each sequence that does not end with the EOS of a row.
        overlap: 1 if the last token of a sequence is also the first token of the next, as in Megatron's `GPTDataset`.

    Raises:
        ValueError: there is no room for a token of a row; or the overlap is neither 0 nor 1, or is combined with a BOS
            or EOS of every sequence.
        TypeError: a number is not an integer.
    """

    size: int
    _: KW_ONLY
    bos: int | None = None
    eos: int | None = None
    every_bos: int | None = None
    every_eos: int | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        ids = [name for name in ("bos", "eos", "every_bos", "every_eos") if getattr(self, name) is not None]
        every = sum(name.startswith("every") for name in ids)
        _to_ints(self, 1 + every, "size", *ids, "overlap")
        if self.overlap not in (0, 1):
            raise ValueError(f"overlap must be 0 or 1, got {self.overlap}")
        if self.overlap and every:
            raise ValueError("overlap=1 cannot be combined with every_bos or every_eos")

    def framed(self, lengths: Sequence[int]) -> list[int]:
        """Returns the lengths of documents with their BOS and EOS."""
        more = (self.bos is not None) + (self.eos is not None)
        return [operator.index(length) + more for length in lengths]


Form = Pack | Pad | Split


def _to_ints(form: Form, least: int, *names: str) -> None:
    """Converts fields to ints. Raises TypeError: one is not an integer; ValueError: the size is below `least`."""
    for name in names:
        value = getattr(form, name)
        try:
            object.__setattr__(form, name, operator.index(value))
        except TypeError:
            what = "a number of tokens" if name in ("size", "overlap") else "a token id"
            raise TypeError(f"{type(form).__name__}: {name} must be {what}, an int, got {value!r:.100}") from None
    if form.size < least:
        raise ValueError(f"size must be a number of tokens of at least {least}, got {form.size}")


class Cut(NamedTuple):
    """A position between two tokens: the document of the next token, and its tokens before this one, BOS included."""

    document: int
    offset: int


BEGINNING: Final = Cut(0, 0)  # Before the first document


class Piece(NamedTuple):
    """The part of one document in a sequence: optional BOS, the document's own tokens [start, stop), optional EOS."""

    document: int
    start: int
    stop: int
    bos: bool
    eos: bool


class SplitSequence(NamedTuple):
    """The pieces of documents in a sequence, in order; `bos` and `eos` are tokens that belong to no document."""

    pieces: tuple[Piece, ...]
    bos: bool = False
    eos: bool = False


def make_sequences(
    lengths: Sequence[int], form: Form, start: Cut = BEGINNING, *, last: bool = False, begun: bool = False
) -> tuple[list[SplitSequence], Cut]:
    """Returns the sequences made of documents from `start` on, and the position at which the next call continues.

    If no document follows (`last`), the rest becomes a sequence of its own; `begun`: sequences were made before.
    """
    if isinstance(form, Split):
        return _split(lengths, form, start, last, begun)
    if start != BEGINNING:
        raise ValueError(f"whole documents cannot start within a document, got {start}")
    if isinstance(form, Pack):
        groups = pack_samples(lengths, form.size)
    elif all(1 <= length <= form.size for length in lengths):
        groups = [[document] for document in range(len(lengths))]
    else:
        raise ValueError(f"lengths must be from 1 to {form.size}")
    whole = [Piece(one, 0, length, False, False) for one, length in enumerate(lengths)]
    return [SplitSequence(tuple([whole[one] for one in group])) for group in groups], Cut(len(lengths), 0)


def _split(lengths: Sequence[int], form: Split, start: Cut, last: bool, begun: bool) -> tuple[list[SplitSequence], Cut]:
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must be 0 or more, got {min(lengths)}")
    tokens = _Tokenised(lengths, form)
    at = tokens.position(start)
    sequences: list[SplitSequence] = []
    while (stop := at + form.size + form.overlap - (bos := tokens.begins(at))) <= tokens.total:
        ends = form.eos is not None and tokens.starts[bisect_left(tokens.starts, stop)] == stop
        eos = form.every_eos is not None and not ends
        sequences.append(SplitSequence(tokens.pieces(at, stop - eos), bos, eos))
        # The EOS replaced a token, which begins the next sequence.
        at = stop - 1 if eos or form.overlap else stop
    if not last:
        return sequences, tokens.cut(at)
    # With an overlap, the previous sequence, if there is one, already has the first of these tokens.
    if tokens.total - at > (form.overlap if begun or sequences else 0):
        eos = form.every_eos is not None and form.eos is None
        sequences.append(SplitSequence(tokens.pieces(at, tokens.total), tokens.begins(at), eos))
    return sequences, Cut(len(lengths), 0)


def cut_after(sequence: SplitSequence, form: Split) -> Cut:
    """Returns where the sequence after a full one begins, possibly at the end of its document."""
    document, _, stop, _, eos = sequence.pieces[-1]
    return Cut(document, (form.bos is not None) + stop + eos - form.overlap)


class _Tokenised:
    """All tokens of the concatenated documents, including BOS and EOS, numbered from 0."""

    def __init__(self, lengths: Sequence[int], form: Split) -> None:
        self._form = form
        self.starts = [0, *accumulate(form.framed(lengths))]
        self.total = self.starts[-1]

    def position(self, cut: Cut) -> int:
        """Returns the token number of a cut. Raises ValueError: the document does not exist, or is shorter."""
        document, offset = cut
        within = self.starts[document : document + 2] if document >= 0 else []
        if not within or not within[0] <= within[0] + offset <= within[-1]:
            raise ValueError(f"start must be a position in one of {len(self.starts) - 1} documents, got {cut}")
        return within[0] + offset

    def cut(self, at: int) -> Cut:
        """Returns the cut before a token, or at the end."""
        document = bisect_right(self.starts, at) - 1
        return Cut(document, at - self.starts[document])

    def begins(self, at: int) -> bool:
        """Returns whether the sequence that begins there gets a BOS that belongs to no document."""
        return self._form.every_bos is not None and not (self._form.bos is not None and self.cut(at).offset == 0)

    def pieces(self, first: int, stop: int) -> tuple[Piece, ...]:
        """Returns the pieces of documents in the tokens [first, stop)."""
        bos, eos = self._form.bos is not None, self._form.eos is not None
        found = []
        for document in range(self.cut(first).document, bisect_left(self.starts, stop)):
            start, end = self.starts[document : document + 2]
            begin, last = max(first, start), min(stop, end)
            if begin < last:
                begins, ends = (min(max(place - start - bos, 0), end - start - bos - eos) for place in (begin, last))
                found.append(Piece(document, begins, ends, bos and begin == start, eos and last == end))
        return tuple(found)


def pack_samples(
    lengths: Sequence[int] | Array, capacity: int, patches: Sequence[int] = (), most_patches: int = 0
) -> list[list[int]]:
    """Returns packs of whole samples, determined by their lengths and patches alone.

    Packs are in the order of their longest sample; samples within a pack are in their original order. At most one pack
    is at most half full. If there are more than `most_patches` patches in all, that bounds the patches of a pack too,
    and a sample is as long as the larger of its two shares. Raises ValueError: a length is not from 1 to the capacity,
    or a sample has more patches.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be a number of tokens of at least 1, got {capacity}")
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        return []
    wrong = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if len(wrong):
        raise ValueError(f"lengths must be from 1 to {capacity}, got {sizes[wrong[0]]} for sample {wrong[0]}")
    if sum(patches) > most_patches:
        return _pack_bounded(np.stack((sizes, np.asarray(patches, np.int64))), np.array([[capacity], [most_patches]]))
    order = np.argsort(-sizes, kind="stable")
    shortest = int(sizes[order[-1]])
    packs: list[list[int]] = []
    rooms: list[int] = []  # distinct free sizes of open packs, ascending: the tightest fit is found by bisection
    with_room: defaultdict[int, list[list[int]]] = defaultdict(list)
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room = capacity
            packs.append(pack := [])
        else:
            room = rooms[at]
            pack = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        pack.append(sample)
        room -= size
        if room >= shortest:
            if not with_room[room]:
                insort(rooms, room)
            with_room[room].append(pack)
    return _in_order(packs)


def _pack_bounded(sizes: Int64Array, bounds: Int64Array) -> list[list[int]]:
    """As `pack_samples`, with several sizes of each sample, shape (sizes, samples), and bounds of shape (sizes, 1)."""
    if (sizes > bounds).any():
        raise ValueError(f"sizes must be at most {bounds[:, 0].tolist()}, got {sizes.max(axis=1).tolist()}")
    rooms = np.empty_like(sizes)
    packs: list[list[int]] = []
    for sample in np.argsort(-(sizes / bounds).max(axis=0), kind="stable").tolist():
        size = sizes[:, sample]
        fits = np.flatnonzero((rooms[:, : len(packs)] >= size[:, None]).all(axis=0))
        if len(fits):
            # The least room left: the sum of its shares of the bounds.
            pack = int(fits[(rooms[:, fits] / bounds).sum(axis=0).argmin()])
        else:
            pack = len(packs)
            packs.append([])
            rooms[:, pack] = bounds[:, 0]
        packs[pack].append(sample)
        rooms[:, pack] -= size
    return _in_order(packs)


def _in_order(packs: list[list[int]]) -> list[list[int]]:
    # The longest sample of a pack is its first.
    return [sorted(pack) for pack in sorted(packs, key=lambda pack: pack[0])]


def completed(left: Sequence[SplitSequence], places: int, form: Form) -> list[SplitSequence]:
    """Returns `places` sequences, one more micro batch of every rank, made of the sequences left over.

    Packs are split into halves of similar length, the longest first, until there are enough. If they cannot be split
    further, and with other forms, sequences are repeated in turn.
    """
    if not 0 < len(left) <= places:
        raise ValueError(f"from 1 to {places} sequences can be completed, got {len(left)}")
    found = [(_tokens(one.pieces), one) for one in left]
    while isinstance(form, Pack) and len(found) < places:
        apart = [place for place, (_, one) in enumerate(found) if len(one.pieces) > 1]
        if not apart:
            break
        longest = max(apart, key=lambda place: found[place][0])
        whole, (pieces, *_) = found[longest]
        cut = min(range(1, len(pieces)), key=lambda at: abs(whole - 2 * _tokens(pieces[:at])))
        found[longest : longest + 1] = [(_tokens(half), SplitSequence(half)) for half in (pieces[:cut], pieces[cut:])]
    return [found[place % len(found)][1] for place in range(places)]


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def tokens_of(sample: Any) -> dict[str, Int64Array]:
    """Returns the token ids of an encoded row (a dict, or the ids alone), and its labels if it has some.

    Raises:
        ValueError: ids are missing or not in [0, MOST_ID], or labels differ in number or exceed 32 bits.
    """
    fields = sample if isinstance(sample, dict) else {INPUT_IDS: sample}
    if INPUT_IDS not in fields:
        raise ValueError(f"it has no input_ids, only {', '.join(map(repr, list(fields)[:8])) or 'nothing'}")
    found = {INPUT_IDS: _numbers(INPUT_IDS, fields[INPUT_IDS], 0, "a token id")}
    if fields.get(LABELS) is not None:
        found[LABELS] = _numbers(LABELS, fields[LABELS], -MOST_ID - 1, "a label")
        if len(found[LABELS]) != len(found[INPUT_IDS]):
            counts = f"{len(found[INPUT_IDS])} input_ids and {len(found[LABELS])} labels"
            raise ValueError(f"{counts}, expected equal numbers")
    return found


def pad_tokens(tokens: Mapping[str, Int64Array], size: int, token: int) -> dict[str, Int64Array]:
    """Returns the tokens of a row with at most `size` tokens, padded to arrays of shape (size,).

    Token ids are padded with `token`, labels with -100; `attention_mask` is 1 for tokens of the row.
    """
    count, ends = len(tokens[INPUT_IDS]), {INPUT_IDS: token, LABELS: NO_LABEL, ATTENTION_MASK: 0}
    whole = {**tokens, ATTENTION_MASK: np.ones(count, np.int64)}
    return {name: np.pad(values, (0, size - count), constant_values=ends[name]) for name, values in whole.items()}


def cut_tokens(
    sequence: SplitSequence, tokens: Mapping[int, Mapping[str, Array]], form: Split
) -> dict[str, Int64Array]:
    """Returns the tokens of a sequence, with `position_ids` that start at 0 for each document.

    An inserted BOS or EOS is its own label. Raises ValueError: some of its documents have labels and others do not.
    """
    rows = [tokens[piece.document] for piece in sequence.pieces]
    names = list(rows[0])
    if any(list(row) != names for row in rows):
        raise ValueError("some rows of the sequence have labels and others do not")
    found: dict[str, list[Array]] = {name: [] for name in [*names, POSITION_IDS]}
    last = len(rows) - 1
    for number, (piece, row) in enumerate(zip(sequence.pieces, rows, strict=True)):
        front = np.array([form.every_bos] * (sequence.bos and number == 0) + [form.bos] * piece.bos, np.int64)
        behind = np.array([form.eos] * piece.eos + [form.every_eos] * (sequence.eos and number == last), np.int64)
        for name in names:
            found[name] += [front, row[name][piece.start : piece.stop], behind]
        found[POSITION_IDS].append(np.arange(len(front) + piece.stop - piece.start + len(behind)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _numbers(name: str, values: Any, least: int, what: str) -> Int64Array:
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ValueError(f"{name} are not numbers: {cause}") from cause
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        kind = "text" if found.dtype.kind == "U" else f"{found.dtype}"
        shape = "" if found.ndim == 1 else f" of shape {found.shape}"
        some = reprlib.repr(found.reshape(-1)[:1].tolist())[1:-1]
        raise ValueError(f"{name} must be integers in one dimension, found {kind}{shape}, such as {some}")
    wrong = np.flatnonzero((found < least) | (found > MOST_ID))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] is {found[wrong[0]]}, expected {what} from {least} to {MOST_ID}")
    return found.astype(np.int64, copy=False)
