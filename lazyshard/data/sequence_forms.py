"""`Pack`, `Split` and `Pad`: how sequences are made of rows, and what is handed out for one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lazyshard.data.shared import Stats
from lazyshard.data.steps import Encoder
from lazyshard.data.substitutes import MOST_BAD, BadRowCount, where_bad
from lazyshard.errors import ChunkCorrupt, RowInvalid, SkipSample
from lazyshard.memory import raise_if_short
from lazyshard.plan.sequences import PackRule, PadRule, Rule, cut_tokens, pad_tokens, tokens_of
from lazyshard.plan.shuffle import mix64
from lazyshard.plan.splitting import SplitRule, SplitSequence
from lazyshard.stream import StreamReader

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


def padded(form: Pad, tokens: dict[str, _Tokens]) -> dict[str, _Tokens]:
    """Returns what is handed out for a row, of no more tokens than the form has. See `Pad`."""
    return pad_tokens(tokens, form.size, form.token)


def cut(form: Split, sequence: SplitSequence, tokens: Mapping[int, dict[str, _Tokens]]) -> dict[str, _Tokens]:
    """Returns what is handed out for a sequence. See `Split`.

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


Facts = dict[str, int | str | bool | None]
"""What a state says of the settings."""

TooLong = Literal["raise", "drop"]
"""What becomes of a row that is longer than a sequence, where rows stay whole."""

AtEnd = Literal["drop", "complete"]
"""What becomes of the sequences left over: not drawn, or drawn in one more micro batch of every rank."""

_WINDOW_ROWS: Final = 10_000
"""Rows of a window, if not said otherwise: with so many, packs are 99.9 % full (docs/packing.md)."""


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Which sequences are made, and what becomes of those left over. See `LazyShardedSequences` for the arguments.

    Attributes:
        form: what is made of the rows.
        batch_size: sequences of one rank in a micro batch.
        window: chunks that are looked at together; None for as many as have 10,000 rows.
        seed: of the order of the rows within a window; None keeps it.
        at_end: what becomes of the sequences left over.
        too_long: what becomes of a row with more tokens than a sequence, where rows stay whole.

    Raises:
        TypeError: the form is none, or a number no integer.
        ValueError: a number is too small, or a choice none.
    """

    form: Form
    batch_size: int
    window: int | None
    seed: int | None
    at_end: AtEnd
    too_long: TooLong

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not isinstance(self.form, (Pack, Pad, Split)):
            raise TypeError(f"form is Pack(SIZE), Split(SIZE) or Pad(SIZE), got {self.form!r:.100}")
        for name, known in (("at_end", get_args(AtEnd)), ("too_long", get_args(TooLong))):
            given = getattr(self, name)
            if given not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {given!r}")
        for name, least in (("batch_size", 1), ("seed", 0), ("window", 1)):
            value = getattr(self, name)
            if value is not None or name == "batch_size":
                object.__setattr__(self, name, at_least(name, value, least))

    def in_stream(self, samples_per_chunk: int) -> SequenceSettings:
        """Returns the same settings for a stream, with the chunks of a window."""
        return self if self.window else replace(self, window=-(-_WINDOW_ROWS // samples_per_chunk))

    @property
    def facts(self) -> Facts:
        """What a state says of them: all that decides which sequences there are. Of settings for a stream."""
        return {"form": type(self.form).__name__, **asdict(self.form.rule), "window": self.window, "seed": self.seed}


def at_least(name: str, value: int, least: int) -> int:
    """Returns a number as an `int`.

    Raises:
        ValueError: it is too small.
        TypeError: it is no integer.
    """
    found = operator.index(value)
    if found < least:
        raise ValueError(f"{name} is {least} or more, got {found}")
    return found


class _Encoded(NamedTuple):
    """A row, encoded, and its tokens as the form needs them."""

    sample: Any
    tokens: dict[str, npt.NDArray[np.int64]]


class _Failed(Exception):
    """A row of which nothing can be made; by this cause."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SequenceMaker:
    """Makes what is handed out of one process's sequences.

    Args:
        reader: the stream.
        encoder: makes a sample of a row; None where rows are samples.
        form: what is made.
        bad: decides what happens to rows that cannot be read or encoded.
        length_of: returns how many tokens a sample was measured to have.
    """

    def __init__(
        self,
        reader: StreamReader,
        encoder: Encoder | None,
        form: Form,
        bad: BadRowCount,
        length_of: Callable[[int], int],
    ) -> None:
        self._reader = reader
        self._encoder = encoder
        self._form = form
        self._bad = bad
        self._length_of = length_of
        self._filled = 0
        # A row that is cut is asked for by sequences that follow each other.
        self._last: tuple[int, _Encoded] | None = None

    @property
    def stats(self) -> Stats:
        """What this process has met: bad rows, dropped ones, and sequences in whose place another one stands."""
        reader = self._reader
        return Stats(len(self._bad), reader.chunks_opened, reader.waited_s, self._bad.skipped, self._filled)

    def make(self, sequence: SplitSequence, others: Sequence[SplitSequence]) -> Any:
        """Returns what is handed out for a sequence.

        Args:
            sequence: by samples.
            others: of its window, among which another one is taken where nothing is left of this one.

        Raises:
            BadSample, TooManyBadSamples, ChunkCorrupt, RowInvalid: a row is bad, and not to be left out.
            ChunkRetired, OSError: it cannot be read.
        """
        if isinstance(self._form, Split):
            return self._cut(self._form, sequence)
        made = self._whole(self._form, sequence)
        if made is not None:
            return made
        sample = sequence.pieces[0].document
        # By its first row alone, so that it is the same one on any rank.
        start = mix64(sample) % len(others)
        for attempt in range(min(MOST_BAD, len(others))):
            other = others[(start + attempt) % len(others)]
            if other.pieces[0].document != sample and (made := self._whole(self._form, other)) is not None:
                self._filled += 1
                return made
        cause = ValueError("nothing is left of its sequence, nor of those that could take its place: all rows are bad")
        raise where_bad(self._reader, sample, cause)

    def _whole(self, form: Pack | Pad, sequence: SplitSequence) -> Any:
        """Returns None where no row is left."""
        room, found = form.size, []
        for piece in sequence.pieces:
            sample = piece.document
            try:
                one = self._encoded(sample)
            except _Failed as failed:
                self._meet(sample, failed.cause)
                continue
            count = len(one.tokens["input_ids"]) if one.tokens else count_of(one.sample) or 0
            if count > room:
                self._meet(sample, ValueError(f"{self._says(sample, count)}, for which its sequence has no room"))
                continue
            room -= count
            found.append(one)
        if not found:
            return None
        return padded(form, found[0].tokens) if isinstance(form, Pad) else [one.sample for one in found]

    def _cut(self, form: Split, sequence: SplitSequence) -> Any:
        """What is left out here would move all tokens behind it: so nothing is."""
        rows = {}
        for sample in dict.fromkeys(piece.document for piece in sequence.pieces):
            try:
                rows[sample] = self._encoded(sample).tokens
            except _Failed as failed:
                raise where_bad(self._reader, sample, failed.cause) from failed.cause
            count = len(rows[sample]["input_ids"])
            if count != self._length_of(sample):
                raise where_bad(self._reader, sample, ValueError(self._says(sample, count)))
        try:
            return cut(form, sequence, rows)
        except ValueError as cause:
            raise where_bad(self._reader, sequence.pieces[0].document, cause) from cause

    def _says(self, sample: int, count: int) -> str:
        return (
            f"it has {count} tokens as encoded here, and {self._length_of(sample)} as sealed (have them measured with "
            f"what encodes them, by `lazyshard-producer run --measure`)"
        )

    def _meet(self, sample: int, cause: Exception) -> None:
        if isinstance(cause, SkipSample):
            self._bad.skip(lambda: where_bad(self._reader, sample, cause))
            return
        if isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        self._bad.meet(sample, where_bad(self._reader, sample, cause), cause)

    def _encoded(self, sample: int) -> _Encoded:
        """Reads and encodes a row.

        Raises:
            _Failed: it is bad, or dropped.
            ChunkRetired, OSError: it cannot be read.
        """
        if self._last is not None and self._last[0] == sample:
            return self._last[1]
        try:
            row = self._reader.read_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            raise _Failed(cause) from cause
        try:
            made = row if self._encoder is None else self._encoder(row)
            found = _Encoded(made, {} if isinstance(self._form, Pack) else tokens_of(made))
        except Exception as cause:
            raise_if_short(cause)
            raise _Failed(cause) from cause
        self._last = (sample, found)
        return found
