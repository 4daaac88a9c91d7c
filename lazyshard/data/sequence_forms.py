"""Which sequences are made of rows, and how one is made and handed out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from lazyshard.data.rank import Stats
from lazyshard.data.samples import MOST_BAD, BadRowCount, where_bad
from lazyshard.data.sequence_rows import Rows
from lazyshard.errors import BadSample, ChunkCorrupt, ChunkRetired, RowInvalid, SkipSample, StreamMismatch
from lazyshard.format.batch import decode_pack
from lazyshard.format.row import parse_row
from lazyshard.format.seal import form_made
from lazyshard.memory import raise_if_short
from lazyshard.plan.sequences import Form, Pack, Pad, Rule, Split, cut_tokens, pad_tokens, tokens_of
from lazyshard.plan.shuffle import mix64
from lazyshard.plan.splitting import SplitSequence
from lazyshard.stream import StreamReader
from lazyshard.stream.token_lengths import WindowLengths

__all__ = ["AtEnd", "Form", "Pack", "Pad", "SequenceMaker", "SequenceSettings", "Split", "TooLong", "at_least"]

TooLong = Literal["raise", "drop"]
"""What becomes of a row that is longer than a sequence, where rows stay whole."""

AtEnd = Literal["drop", "complete"]
"""What becomes of the sequences left over: not drawn, or drawn in one more micro batch of every rank."""

_WINDOW_ROWS: Final = 10_000
"""Rows of a window, if not said otherwise: with so many, packs are 99.9 % full (docs/packing.md)."""


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Which sequences are made, and what becomes of those left over. See `LazyShardedSequences` for the arguments."""

    form: Form
    batch_size: int
    window: int | None
    seed: int | None
    at_end: AtEnd
    too_long: TooLong

    def __post_init__(self) -> None:
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
    def rule(self) -> Rule:
        """What the form comes to, by lengths."""
        return self.form.rule if isinstance(self.form, Split) else self.form

    @property
    def facts(self) -> dict[str, int | str | bool | None]:
        """What a state says of them: all that decides which sequences there are. Of settings for a stream."""
        rule = asdict(self.form.rule) if isinstance(self.form, Split) else {"size": self.form.size}
        return {"form": type(self.form).__name__, **rule, "window": self.window, "seed": self.seed}


def at_least(name: str, value: int, least: int) -> int:
    """Returns a number as an `int`. Raises ValueError: it is too small; TypeError: it is no integer."""
    found = operator.index(value)
    if found < least:
        raise ValueError(f"{name} is {least} or more, got {found}")
    return found


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A row, encoded, and its tokens as the form needs them."""

    sample: Any
    tokens: dict[str, npt.NDArray[np.int64]]

    @property
    def tokens_count(self) -> int:
        """How many tokens it has: of a pack's, as `lengths` or `length` say, else its token ids."""
        if self.tokens:
            return len(self.tokens["input_ids"])
        sample = self.sample if isinstance(self.sample, dict) else {}
        for name in ("lengths", "length"):
            if name in sample:
                return int(sum(sample[name])) if isinstance(sample[name], Sequence) else int(sample[name])
        return len(sample["input_ids"]) if sample.get("input_ids") is not None else 0


class SequenceMaker:
    """Makes what is handed out of one process's sequences; `length_of` tells how many tokens a row has as sealed."""

    def __init__(self, rows: Rows, form: Form, bad: BadRowCount, length_of: Callable[[int, int], int]) -> None:
        self._rows = rows
        self._form = form
        self._bad = bad
        self._length_of = length_of
        self._filled = 0
        # A row that is cut is asked for by sequences that follow each other: row, epoch, and what was made of it.
        self._last: tuple[int, int, _Encoded] | None = None

    @property
    def stats(self) -> Stats:
        """What this process has met: bad rows, dropped ones, and sequences in whose place another one stands."""
        readers = self._rows.readers
        opened, waited = sum(one.chunks_opened for one in readers), sum(one.waited_s for one in readers)
        return Stats(len(self._bad), opened, waited, self._bad.skipped, self._filled)

    def make(self, sequence: SplitSequence, others: Sequence[SplitSequence], epoch: int) -> Any:
        """Returns what is handed out for a sequence, or for one of the others of its window if nothing is left of it.

        Raises BadSample, TooManyBadSamples, ChunkCorrupt, RowInvalid: a row is bad, and not to be left out.
        """
        if isinstance(self._form, Split):
            return self._cut(self._form, sequence, epoch)
        made = self._whole(self._form, sequence, epoch)
        if made is not None:
            return made
        row = sequence.pieces[0].document
        # By its first row alone, so that it is the same one on any rank.
        start = mix64(row) % len(others)
        for attempt in range(min(MOST_BAD, len(others))):
            other = others[(start + attempt) % len(others)]
            if other.pieces[0].document != row and (made := self._whole(self._form, other, epoch)) is not None:
                self._filled += 1
                return made
        cause = ValueError("nothing is left of its sequence, nor of those that could take its place: all rows are bad")
        raise self._where(row, epoch, cause)

    def _whole(self, form: Pack | Pad, sequence: SplitSequence, epoch: int) -> Any:
        """Returns None where no row is left."""
        room, found = form.size, []
        for piece in sequence.pieces:
            row = piece.document
            one, cause = self._encoded(row, epoch)
            if one is not None and one.tokens_count > room:
                cause = ValueError(f"{self._says(row, epoch, one)}, for which its sequence has no room")
            if one is None or cause is not None:
                assert cause is not None
                self._meet(row, epoch, cause)
                continue
            room -= one.tokens_count
            found.append(one)
        if not found:
            return None
        if isinstance(form, Pad):
            return pad_tokens(found[0].tokens, form.size, form.token)
        return [one.sample for one in found]

    def _cut(self, form: Split, sequence: SplitSequence, epoch: int) -> Any:
        """What is left out here would move all tokens behind it: so nothing is."""
        rows = {}
        for row in dict.fromkeys(piece.document for piece in sequence.pieces):
            one, cause = self._encoded(row, epoch)
            if one is None:
                raise self._where(row, epoch, cause) from cause
            if one.tokens_count != self._length_of(row, epoch):
                raise self._where(row, epoch, ValueError(self._says(row, epoch, one)))
            rows[row] = one.tokens
        ids = {name: getattr(form, name) for name in ("bos", "eos", "every_bos", "every_eos")}
        try:
            return cut_tokens(sequence, rows, **ids)
        except ValueError as cause:
            raise self._where(sequence.pieces[0].document, epoch, cause) from cause

    def _says(self, row: int, epoch: int, one: _Encoded) -> str:
        return (
            f"it has {one.tokens_count} tokens as encoded here, and {self._length_of(row, epoch)} as sealed (have them "
            f"measured with what encodes them, by `lazyshard-producer run --measure`)"
        )

    def _where(self, row: int, epoch: int, cause: Exception | None) -> BadSample:
        reader, sample, _ = self._rows.place(row, epoch)
        assert cause is not None
        return where_bad(reader, sample, cause)

    def _meet(self, row: int, epoch: int, cause: Exception) -> None:
        if isinstance(cause, SkipSample):
            self._bad.skip(lambda: self._where(row, epoch, cause))
            return
        if isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        self._bad.meet(row, self._where(row, epoch, cause), cause)

    def _encoded(self, row: int, epoch: int) -> tuple[_Encoded | None, Exception | None]:
        """Returns what is made of a row, or why nothing is. Raises ChunkRetired, OSError: it cannot be read."""
        if self._last is not None and self._last[:2] == (row, epoch):
            return self._last[2], None
        reader, sample, steps = self._rows.place(row, epoch)
        try:
            read = reader.read_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        try:
            made = steps(read, sample)
            found = _Encoded(made, {} if isinstance(self._form, Pack) else tokens_of(made))
        except Exception as cause:
            raise_if_short(cause)
            return None, cause
        self._last = (row, epoch, found)
        return found, None


def longer_row(reader: StreamReader, sample: int, tokens: int, size: int) -> BadSample:
    return where_bad(reader, sample, ValueError(f"it has {tokens} tokens, a sequence at most {size}"))


def row_too_long(reader: StreamReader, sample: int, tokens: int, size: int) -> BadSample:
    error = longer_row(reader, sample, tokens, size)
    error.args = (f"{error}: take longer sequences, or leave such rows out with too_long='drop'",)
    return error


def check_beginning(reader: StreamReader, settings: SequenceSettings) -> bool:
    """Refuses a stream of which no sequences can be made, as far as its first chunk, or the first that is left, tells.

    Returns whether there was a chunk to look at. The reader opens nothing.
    """
    size, samples = reader.samples_per_chunk, reader.seen.samples
    # Its open files are let go of with it: this process may never read that chunk again.
    look = copy.copy(reader)
    look.parent = reader.parent
    first = 0
    try:
        if samples:
            look.chunk(0)
    except ChunkRetired as error:
        first = (error.chunks_before or 0) * size
    if first >= samples:
        return False
    _check_rows(look, first)
    known = WindowLengths(look, 1)
    _check_form(look, form_made(known.source(first // size)))
    lengths = known.of(first // size)
    size = settings.form.size
    if settings.too_long == "raise" and not isinstance(settings.form, Split):
        for row in np.flatnonzero(lengths > size).tolist():
            raise row_too_long(look, first + row, int(lengths[row]), size)
    return True


def _check_form(reader: StreamReader, form: str | None) -> None:
    # What pads them would be taken for tokens, and borders would be lost.
    if form in ("split", "pad"):
        raise _made(
            reader,
            f"were {'cut to sequences' if form == 'split' else 'padded'}",
            form,
            f"train each as one sample, with `LazyShardedDataset({str(reader.directory)!r}, ...)`",
            f"rows made with --{form}",
        )


def _check_rows(reader: StreamReader, sample: int) -> None:
    # A stream has packs in every row or in none.
    try:
        packed = decode_pack(parse_row(reader.line(sample))) is not None
    except (ChunkCorrupt, RowInvalid):
        # Who draws it says so, or leaves it out.
        return
    if packed:
        how = (
            f"train each pack as one sample, with `LazyShardedDataset({str(reader.directory)!r}, encode)`, whose "
            f"`encode` gets {{'pack': ROWS, 'lengths': TOKENS}} (in ms-swift --packing true)"
        )
        raise _made(reader, "were made packs", "pack", how, "packs")


def _made(reader: StreamReader, was: str, option: str, instead: str, actual: str) -> StreamMismatch:
    return StreamMismatch(
        f"{reader.directory}: its rows {was} by their producer (lazyshard-producer run --{option}), so no sequences "
        f"are made of them: {instead}, or produce the rows without --{option}",
        directory=str(reader.directory),
        expected="rows",
        actual=actual,
    )
