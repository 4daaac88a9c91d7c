"""Which sequences are made of rows, and how one is made and handed out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from lazyshard.data.shared import Stats
from lazyshard.data.steps import Encoder
from lazyshard.data.substitutes import MOST_BAD, BadRowCount, where_bad
from lazyshard.errors import ChunkCorrupt, RowInvalid, SkipSample
from lazyshard.memory import raise_if_short
from lazyshard.plan.sequences import Form, Pack, Pad, Rule, Split, cut_tokens, pad_tokens, tokens_of
from lazyshard.plan.shuffle import mix64
from lazyshard.plan.splitting import SplitSequence
from lazyshard.stream import StreamReader

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
    def count(self) -> int:
        """How many tokens it has: of a pack's, as `lengths` or `length` say, else its token ids."""
        if self.tokens:
            return len(self.tokens["input_ids"])
        sample = self.sample if isinstance(self.sample, dict) else {}
        for name in ("lengths", "length"):
            if name in sample:
                return int(sum(sample[name])) if isinstance(sample[name], Sequence) else int(sample[name])
        return len(sample["input_ids"]) if sample.get("input_ids") is not None else 0


class _Failed(Exception):
    """A row of which nothing can be made; by this cause."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SequenceMaker:
    """Makes what is handed out of one process's sequences; `length_of` tells how many tokens a sample has as sealed."""

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
        """Returns what is handed out for a sequence, or for one of the others of its window if nothing is left of it.

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
            if one.count > room:
                self._meet(sample, ValueError(f"{self._says(sample, one.count)}, for which its sequence has no room"))
                continue
            room -= one.count
            found.append(one)
        if not found:
            return None
        if isinstance(form, Pad):
            return pad_tokens(found[0].tokens, form.size, form.token)
        return [one.sample for one in found]

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
        ids = {name: getattr(form, name) for name in ("bos", "eos", "every_bos", "every_eos")}
        try:
            return cut_tokens(sequence, rows, **ids)
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
        """Reads and encodes a row. Raises _Failed: it is bad, or dropped; ChunkRetired, OSError: it cannot be read."""
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
