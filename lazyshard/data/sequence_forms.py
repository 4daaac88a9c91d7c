"""The rows of which sequences are made, window by window; which sequences these are, and how one is made of rows."""

from __future__ import annotations

import copy
import json
import operator
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lazyshard.data.blend_state import BlendSpace
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.commits import ReadingMarks
from lazyshard.data.rank import Rank, Stats
from lazyshard.data.samples import MOST_BAD, BadRowCount, where_bad
from lazyshard.data.steps import RowSteps
from lazyshard.errors import (
    BadSample,
    ChunkCorrupt,
    ChunkRetired,
    LazyShardError,
    RowInvalid,
    SkipSample,
    StreamMismatch,
)
from lazyshard.format.batch import decode_pack
from lazyshard.format.cursor import ReadingMark
from lazyshard.format.row import parse_row
from lazyshard.format.seal import form_made
from lazyshard.memory import raise_if_short
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from lazyshard.plan.sequences import Form, Pack, Pad, Split, SplitSequence, cut_tokens, pad_tokens, tokens_of
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader
from lazyshard.stream.token_lengths import WindowLengths, lengths_not_ours

__all__ = ["AtEnd", "Form", "Pack", "Pad", "SequenceMaker", "SequenceSettings", "Split", "TooLong", "at_least"]

_Integers = npt.NDArray[np.int64]

TooLong = Literal["raise", "drop"]  # what becomes of a row that is longer than a sequence, where rows stay whole
AtEnd = Literal["drop", "complete"]  # of the sequences left over: not drawn, or in one more micro batch of every rank
_WINDOW_ROWS: Final = 10_000  # Rows of a window, if not said otherwise: so packs are 99.9 % full (docs/packing.md)


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
    def facts(self) -> dict[str, int | str | bool | None]:
        """What a state says of them: all that decides which sequences there are. Of settings for a stream."""
        facts: dict[str, int | str | bool | None] = {"form": type(self.form).__name__, "size": self.form.size}
        if isinstance(self.form, Split):
            ids = ("bos", "eos", "every_bos", "every_eos")
            facts |= {name: getattr(self.form, name) is not None for name in ids} | {"overlap": self.form.overlap}
        return facts | {"window": self.window, "seed": self.seed}


def at_least(name: str, value: int, least: int) -> int:
    """Returns a number as an `int`. Raises ValueError: it is too small; TypeError: it is no integer."""
    found = operator.index(value)
    if found < least:
        raise ValueError(f"{name} is {least} or more, got {found}")
    return found


class SourceRow(NamedTuple):
    """Where a row lies, and what is done with it."""

    reader: StreamReader
    sample: int
    steps: RowSteps


class StreamRows:
    """The rows of one stream, in windows of so many chunks; the number of a row is that of its sample.

    `name` is how a state calls the stream, `rows` how many a window has, but the last one. `marks` tell the producer
    which window is needed; None for nobody.
    """

    def __init__(self, reader: StreamReader, steps: RowSteps, chunks: int) -> None:
        self._lengths = WindowLengths(reader, chunks)
        self.name = str(reader.stream_id)
        self.rows = self._lengths.rows
        self.readers = [reader]
        self.marks: WindowMarks | None = None
        self._reader = reader
        self._steps = steps

    def lengths(self, window: int, epoch: int) -> npt.NDArray[np.uint32]:
        """Returns the lengths of a window's rows, fewer at the end of the stream. Waits, and raises, as a draw does."""
        if self.marks is not None:
            self.marks.enter_window(window)
        return self._lengths.of(window)

    def place(self, row: int, epoch: int) -> SourceRow:
        """Returns where a row lies, by its number in an epoch."""
        return SourceRow(self._reader, row, self._steps)

    def ended(self, epoch: int) -> int | None:
        """Returns how many rows there are if that is known."""
        return self._reader.seen.samples if self._reader.seen.ended else None


class WindowMarks(ReadingMarks):
    """Keeps the reading mark of a consumer whose rank 0 reads window by window."""

    def __init__(self, consumer: str, rank: Rank, reader: StreamReader, chunks: int, since: float) -> None:
        super().__init__(consumer, Course(Rules(1), [Part(rank.dp_size)]), reader, since)
        self._chunks = chunks

    def enter_window(self, window: int) -> None:
        """Tells that a window is needed, before it is waited for."""
        if self._mark is None or window > self._mark.window:
            stream, ranks, needs = self.reader.stream_id, self.course.dp, (window + 1) * self._chunks
            self._mark = ReadingMark(self.consumer, stream, ranks, window, needs, time.time())
            self._write_if_due()


_KEPT = 4  # Windows of a blend of which the rows are known


class BlendRows:
    """As `StreamRows` of a blend, in the order of its indices; the number of a row is its index. Nobody is told."""

    marks: WindowMarks | None = None

    def __init__(self, blend: BlendedDataset, rows: int, *, by_stopping: bool) -> None:
        self.name = ",".join(blend.names)
        self.rows = rows
        self.readers = [dataset.reader for dataset in blend.datasets]
        self._blend = blend
        self._by_stopping = by_stopping
        self._lengths = [WindowLengths(reader, 1) for reader in self.readers]
        # By epoch and window: of each row the stream, the sample there, and its length.
        self._known: dict[tuple[int, int], tuple[_Integers, _Integers, npt.NDArray[np.uint32]]] = {}

    def lengths(self, window: int, epoch: int) -> npt.NDArray[np.uint32]:
        return self._window(window, epoch)[2]

    def place(self, row: int, epoch: int) -> SourceRow:
        window, within = divmod(row, self.rows)
        streams, samples, _ = self._window(window, epoch)
        dataset = self._blend.datasets[streams[within]]
        return SourceRow(dataset.reader, int(samples[within]), dataset._samples._steps)

    def ended(self, epoch: int) -> int | None:
        return None if self._by_stopping else self._blend._space(epoch).layout.block

    def _window(self, window: int, epoch: int) -> tuple[_Integers, _Integers, npt.NDArray[np.uint32]]:
        if (found := self._known.get((epoch, window))) is not None:
            return found
        space, first = self._blend._space(epoch), window * self.rows
        located = np.array([space.locate(row) for row in range(first, self._stop(space, first, epoch))], np.int64)
        streams, indices = located.reshape(-1, 2).T
        samples, lengths = np.zeros(len(streams), np.int64), np.zeros(len(streams), np.uint32)
        for stream, dataset in enumerate(self._blend.datasets):
            own, reader = np.flatnonzero(streams == stream), dataset.reader
            drawn = dataset._space(epoch)
            samples[own] = [drawn.draw(index).sample for index in indices[own].tolist()]
            chunks, rows = np.divmod(samples[own], reader.samples_per_chunk)
            for chunk in np.unique(chunks).tolist():
                at = chunks == chunk
                lengths[own[at]] = self._lengths[stream].of(chunk)[rows[at]]
        if len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[epoch, window] = streams, samples, lengths
        return streams, samples, lengths

    def _stop(self, space: BlendSpace, first: int, epoch: int) -> int:
        """Returns the row behind a window, waiting until it is certain that the blend does not end before."""
        stop = max(first, min(first + self.rows, space.layout.block))
        if not self._by_stopping or stop == first or self._blend._goes_on(space, stop - 1, epoch):
            return stop
        rows = range(first, stop)
        return first + bisect_left(rows, True, key=lambda row: not self._blend._goes_on(space, row, epoch))


Rows = StreamRows | BlendRows


def enter_blend(blend: BlendedDataset) -> bool:
    """Has a blend give rows to sequences, and no samples any more; returns whether it ends by its `stopping`.

    Raises:
        ValueError: its data sets are of ranks, have a consumer, or it has micro batches or a schedule.
        RuntimeError: it is used already.
    """
    if blend._batch_size != 1 or not blend._schedule.constant:
        raise ValueError("sequences are made of the rows of a blend with batch_size=1 and without a schedule")
    for dataset in blend.datasets:
        if dataset._rank not in (None, Rank(0, 1)):
            raise ValueError(
                f"{dataset.directory}: sequences are dealt to the ranks, not rows: make the data sets of the blend "
                f"without dp_rank and dp_size, and give these to the sequences"
            )
        if dataset._commits is not None:
            raise ValueError(f"{dataset.directory}: a blend of which sequences are made commits nothing: no consumer")
    by_stopping = blend._num_samples is None
    blend._give_up_length()
    for dataset in blend.datasets:
        dataset._rank = Rank(0, 1)
    return by_stopping


def blend_facts(blend: BlendedDataset) -> str:
    """Returns what decides the rows of a blend, but for its streams, as a state keeps it."""
    orders = [
        [order.unit, order.shuffle_window, order.seed, order.max_total_samples]
        for order in (dataset._states.order for dataset in blend.datasets)
    ]
    samples = None if blend._length_given_up else blend._num_samples
    return json.dumps([blend._schedule.parts(0), blend._stopping, samples, orders])


def open_stream(directory: str | os.PathLike[str], max_wait: float) -> StreamReader:
    """Opens a stream. Raises LengthUnknown: another program fills the directory; or as `StreamReader`."""
    try:
        return StreamReader(directory, max_wait=max_wait)
    except ValueError as cause:
        if isinstance(cause, LazyShardError):
            raise
        # It asks for the size of chunks, which is all that it misses.
        raise lengths_not_ours(directory) from cause


class _Encoded(NamedTuple):
    """A row, encoded, its tokens as the form needs them, and how many these are."""

    sample: Any
    tokens: dict[str, npt.NDArray[np.int64]]
    total: int


def _encoded(sample: Any, form: Form) -> _Encoded:
    if not isinstance(form, Pack):
        tokens = tokens_of(sample)
        return _Encoded(sample, tokens, len(tokens["input_ids"]))
    # As `lengths` or `length` say, else by its token ids.
    fields = sample if isinstance(sample, dict) else {}
    told = next((fields[name] for name in ("lengths", "length") if name in fields), None)
    if told is None:
        return _Encoded(sample, {}, len(fields["input_ids"]) if fields.get("input_ids") is not None else 0)
    return _Encoded(sample, {}, int(sum(told)) if isinstance(told, Sequence) else int(told))


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

        Raises BadSample, ChunkCorrupt, RowInvalid: a row is bad, and not to be left out.
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
            one = self._read(row, epoch)
            if isinstance(one, _Encoded) and one.total > room:
                one = ValueError(f"{self._says(row, epoch, one)}, for which its sequence has no room")
            if isinstance(one, Exception):
                self._meet(row, epoch, one)
                continue
            room -= one.total
            found.append(one)
        if found and isinstance(form, Pad):
            return pad_tokens(found[0].tokens, form.size, form.token)
        return [one.sample for one in found] or None

    def _cut(self, form: Split, sequence: SplitSequence, epoch: int) -> Any:
        """What is left out here would move all tokens behind it: so nothing is."""
        rows = {}
        for row in dict.fromkeys(piece.document for piece in sequence.pieces):
            one = self._read(row, epoch)
            if isinstance(one, Exception):
                raise self._where(row, epoch, one) from one
            if one.total != self._length_of(row, epoch):
                raise self._where(row, epoch, ValueError(self._says(row, epoch, one)))
            rows[row] = one.tokens
        try:
            return cut_tokens(sequence, rows, form)
        except ValueError as cause:
            raise self._where(sequence.pieces[0].document, epoch, cause) from cause

    def _says(self, row: int, epoch: int, one: _Encoded) -> str:
        return (
            f"it has {one.total} tokens as encoded here, and {self._length_of(row, epoch)} as sealed (have them "
            f"measured with what encodes them, by `lazyshard-producer run --measure`)"
        )

    def _where(self, row: int, epoch: int, cause: Exception) -> BadSample:
        reader, sample, _ = self._rows.place(row, epoch)
        return where_bad(reader, sample, cause)

    def _meet(self, row: int, epoch: int, cause: Exception) -> None:
        if isinstance(cause, SkipSample):
            self._bad.skip(lambda: self._where(row, epoch, cause))
        elif isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        else:
            self._bad.meet(row, self._where(row, epoch, cause), cause)

    def _read(self, row: int, epoch: int) -> _Encoded | Exception:
        """Returns what is made of a row, or why nothing is. Raises ChunkRetired, OSError: it cannot be read."""
        if self._last is not None and self._last[:2] == (row, epoch):
            return self._last[2]
        reader, sample, steps = self._rows.place(row, epoch)
        try:
            read = reader.read_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return cause
        try:
            found = _encoded(steps(read, sample), self._form)
        except Exception as cause:
            raise_if_short(cause)
            return cause
        self._last = (row, epoch, found)
        return found


def row_too_long(reader: StreamReader, sample: int, tokens: int, size: int, to_do: str = "") -> BadSample:
    """Returns the error for a row that is longer than a sequence."""
    return where_bad(reader, sample, ValueError(f"it has {tokens} tokens, a sequence at most {size}{to_do}"))


RAISED: Final = ": take longer sequences, or leave such rows out with too_long='drop'"


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
    known = WindowLengths(look, 1)
    _check_rows(look, first, form_made(known.source(first // size)))
    lengths = known.of(first // size)
    if settings.too_long == "raise" and not isinstance(settings.form, Split):
        for row in np.flatnonzero(lengths > settings.form.size).tolist():
            raise row_too_long(look, first + row, int(lengths[row]), settings.form.size, RAISED)
    return True


def _check_rows(reader: StreamReader, sample: int, form: str | None) -> None:
    """Refuses packs, which a stream has in every row or in none; and rows that were cut or padded.

    What pads them would be taken for tokens, and borders would be lost.
    """
    directory, dataset = reader.directory, f"LazyShardedDataset({str(reader.directory)!r}"
    try:
        packed = decode_pack(parse_row(reader.line(sample))) is not None
    except (ChunkCorrupt, RowInvalid):
        packed = False  # Who draws it says so, or leaves it out.
    if packed:
        form, was, actual = "pack", "were made packs", "packs"
        instead = (
            f"train each pack as one sample, with `{dataset}, encode)`, whose `encode` gets {{'pack': ROWS, "
            f"'lengths': TOKENS}} (in ms-swift --packing true)"
        )
    elif form in ("split", "pad"):
        was, actual = f"were {'cut to sequences' if form == 'split' else 'padded'}", f"rows made with --{form}"
        instead = f"train each as one sample, with `{dataset}, ...)`"
    else:
        return
    raise StreamMismatch(
        f"{directory}: its rows {was} by their producer (lazyshard-producer run --{form}), so no sequences are made of "
        f"them: {instead}, or produce the rows without --{form}",
        directory=str(directory), expected="rows", actual=actual,
    )  # fmt: skip
