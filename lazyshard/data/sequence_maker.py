"""From planned sequences to what is handed out: their rows are read, encoded, and put together, cut or padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.data.bad_samples import BadSamples, where_bad
from lazyshard.data.encode import Encoder
from lazyshard.data.samples import Met
from lazyshard.data.sequence_forms import Form, Pack, Pad, Split, count_of, cut, padded, tokens_of
from lazyshard.data.sequence_planner import PlannedWindow
from lazyshard.data.substitutes import MOST_BAD
from lazyshard.errors import ChunkCorrupt, RowInvalid, SkipSample
from lazyshard.memory import raise_if_short
from lazyshard.plan import mix64
from lazyshard.plan.splitting import SplitSequence
from lazyshard.stream import StreamReader

__all__ = ["SequenceMaker"]


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
        bad: BadSamples,
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
    def met(self) -> Met:
        """What this process has met: bad rows, dropped ones, and sequences in whose place another one stands."""
        return Met(len(self._bad), self._bad.skipped, self._filled)

    def make(self, sequence: SplitSequence, window: PlannedWindow) -> Any:
        """Returns what is handed out for a sequence.

        Args:
            sequence: by samples.
            window: among whose sequences another one is taken where nothing is left of this one.

        Raises:
            BadSample, TooManyBadSamples, ChunkCorrupt, RowInvalid: a row is bad, and not to be left out.
            ChunkRetired, OSError: it cannot be read.
        """
        if isinstance(self._form, Split):
            return self._cut(self._form, sequence)
        made = self._whole(self._form, sequence)
        if made is not None:
            return made
        sample, others = sequence.pieces[0].document, window.sequences
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
            f"it has {count} tokens as encoded here, and {self._length_of(sample)} as measured (measure the rows with "
            f"what encodes them)"
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
