"""What gives the rows of which sequences are made, the settings of these, and how one is made of rows."""

from __future__ import annotations

import copy
import json
import logging
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.rank import Rank, Stats
from lazyshard.data.samples import MOST_BAD, BadRowCount, where_bad
from lazyshard.errors import (
    BadSample,
    ChunkCorrupt,
    ChunkRetired,
    LazyShardError,
    RowInvalid,
    SkipSample,
    StreamMismatch,
    redact,
)
from lazyshard.format.batch import decode_pack
from lazyshard.format.row import parse_row
from lazyshard.format.seal import form_made
from lazyshard.format.state import BlendState, RunState
from lazyshard.memory import raise_if_short
from lazyshard.plan.sequences import Form, Pack, Pad, Split, SplitSequence, cut_tokens, pad_tokens, tokens_of
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader
from lazyshard.stream.sequences import ALONE, RowOrder, SequenceRows
from lazyshard.stream.token_lengths import ChunkLengths, lengths_not_ours

__all__ = ["AtEnd", "Form", "Pack", "Pad", "SequenceMaker", "SequenceSettings", "Split", "TooLong", "at_least"]

_log = logging.getLogger("lazyshard")

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
    micro_batches_per_step: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.form, (Pack, Pad, Split)):
            raise TypeError(f"form is Pack(SIZE), Split(SIZE) or Pad(SIZE), got {self.form!r:.100}")
        for name, known in (("at_end", get_args(AtEnd)), ("too_long", get_args(TooLong))):
            given = getattr(self, name)
            if given not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {given!r}")
        for name, least in (("batch_size", 1), ("seed", 0), ("window", 1), ("micro_batches_per_step", 1)):
            value = getattr(self, name)
            if value is not None or name == "batch_size":
                object.__setattr__(self, name, at_least(name, value, least))

    @property
    def draws_per_step(self) -> int:
        """Sequences of each rank in an optimiser step; 0 where it is not known."""
        return self.batch_size * (self.micro_batches_per_step or 0)

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


class DatasetRows(SequenceRows):
    """What one rank draws of a data set, or of a blend, whose samples are the rows of sequences."""

    def __init__(self, source: LazyShardedDataset | BlendedDataset, rows: int, samples: int | None) -> None:
        self.source, self.datasets = source, datasets_of(source)
        limits = [dataset._states.order.max_total_samples for dataset in self.datasets]
        name = ",".join(source.names) if isinstance(source, BlendedDataset) else str(source.stream_id)
        stopping = source._stopping if isinstance(source, BlendedDataset) else "first_exhausted"
        super().__init__(name, [dataset.reader for dataset in self.datasets], limits, rows, samples, stopping)

    def order(self, epoch: int) -> RowOrder:
        source = self.source
        blend = source._space(epoch).course if isinstance(source, BlendedDataset) else ALONE
        return RowOrder(blend, [dataset._space(epoch).course for dataset in self.datasets])

    def total(self, stream: int, position: int, epoch: int) -> int | None:
        # Which tells the producer, too.
        end = self.datasets[stream]._space(epoch).end_of(0, position)
        return None if end is None else end[1]

    def commit(self, row: int, epoch: int, least: int, plan: dict[str, int], **how: bool) -> bool:
        """Commits that all rows before one were trained, and none before the `least` one is needed again."""
        self.source.set_epoch(epoch)
        for commits in filter(None, (dataset._commits for dataset in self.datasets)):
            commits.sequences = plan
        return self.source.commit(row, keep=[self.source.state_dict(least)], **how)

    @property
    def where(self) -> str:
        """How messages call what gives the rows."""
        first, others = self.datasets[0].directory, len(self.datasets) > 1
        return f"the blend of {first} and others" if others else str(first)

    def told(self, epoch: int) -> dict[str, Any]:
        """Returns what a state says of what gives the rows of an epoch."""
        self.order(epoch)
        states, source = [dataset._states.of(epoch, 1) for dataset in self.datasets], self.source
        rows: RunState | BlendState = states[0]
        if isinstance(source, BlendedDataset):
            members = dict(zip(source.names, states, strict=True))
            rows = source._states.after(epoch, source._space(epoch).part, 0, members)
        return {"rows": rows, "directories": tuple(redact(str(dataset.directory)) for dataset in self.datasets)}


def datasets_of(source: LazyShardedDataset | BlendedDataset) -> tuple[LazyShardedDataset, ...]:
    """Returns the data sets of a blend, or the only one."""
    return source.datasets if isinstance(source, BlendedDataset) else (source,)


def enter_rows(source: LazyShardedDataset | BlendedDataset) -> None:
    """Has a data set, or a blend, give rows to sequences, and no samples any more.

    Raises:
        ValueError: it is of ranks, has micro batches, a schedule, or a state.
        RuntimeError: it is used already.
    """
    blend = source if isinstance(source, BlendedDataset) else None
    datasets, order = datasets_of(source), source._states.order
    if order.batch_size != 1 or not (blend is None or blend._schedule.constant):
        raise ValueError("sequences are made of the rows of a data set or blend with batch_size=1, without a schedule")
    for dataset in datasets:
        if dataset._late:
            raise ValueError("LateRow hands out rows unparsed, sequences are made of parsed ones: give encode_fn=None")
        if dataset._rank not in (None, Rank(0, 1)):
            raise ValueError(
                f"{dataset.directory}: sequences are dealt to the ranks, not rows: make the data sets without dp_rank "
                f"and dp_size, and give these to the sequences"
            )
    if source._states.loaded is not None and any(part.draws for part in source._states.loaded.parts):
        raise ValueError(f"{source._where}: it goes on from a state: load that of the sequences into these instead")
    if source._used or source._length_given_up or order.blended:
        raise RuntimeError(f"{source._where} is in use already: give the sequences one of their own")
    source._give_up_length()
    for dataset in datasets:
        dataset._rank = Rank(0, 1)


def row_facts(source: LazyShardedDataset | BlendedDataset, samples: int | None, window: int) -> dict[str, Any]:
    """Returns what decides the rows, but for their streams, as a state keeps it; nothing of a stream in its order."""
    orders: list[list[Any]] = []
    for dataset in datasets_of(source):
        order, loaded = dataset._states.order, dataset._states.loaded
        gaps = [] if loaded is None else [[*one] for part in loaded.parts for one in part.skip]
        orders.append(
            [order.unit, order.shuffle_window, order.seed, order.max_total_samples, *([gaps] if gaps else [])]
        )
    if isinstance(source, BlendedDataset):
        parts, stopping = source._schedule.parts(0), source._stopping
        return {"blend": json.dumps([parts, stopping, samples, orders]), "window": window}
    if samples is None and orders[0][1] == 0 and orders[0][3:] == [None]:
        return {}
    return {"blend": json.dumps([[1], "first_exhausted", samples, orders]), "window": window}


def open_dataset(directory: str | os.PathLike[str], *args: Any, **options: Any) -> LazyShardedDataset:
    """Opens a stream for its rows. Raises LengthUnknown: another program fills the directory; or as a data set."""
    if not options["max_wait"] >= 0:
        raise ValueError(f"max_wait is 0 or more seconds, got {options['max_wait']}")
    try:
        return LazyShardedDataset(directory, *args, dp_rank=0, dp_size=1, **options)
    except ValueError as cause:
        # It asks for the size of chunks, which is all that it misses.
        if isinstance(cause, LazyShardError) or "samples_per_chunk" not in str(cause):
            raise
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

    def __init__(self, rows: DatasetRows, form: Form, bad: BadRowCount, length_of: Callable[[int, int], int]) -> None:
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
        cached = (sum(column) for column in zip(*(one._samples.stats[5:] for one in self._rows.datasets), strict=True))
        return Stats(len(self._bad), opened, waited, self._bad.skipped, self._filled, *cached)

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
        stream, sample = self._rows.place(row, epoch)
        return where_bad(self._rows.readers[stream], sample, cause)

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
        stream, sample = self._rows.place(row, epoch)
        made, failed = self._rows.datasets[stream]._samples._tried(sample)
        if failed is not None:
            return failed
        try:
            found = _encoded(made, self._form)
        except Exception as cause:
            raise_if_short(cause)
            return cause
        self._last = (row, epoch, found)
        return found


def row_too_long(reader: StreamReader, sample: int, tokens: int, size: int, to_do: str = "") -> BadSample:
    """Returns the error for a row that is longer than a sequence."""
    return where_bad(reader, sample, ValueError(f"it has {tokens} tokens, a sequence at most {size}{to_do}"))


_RAISED: Final = ": take longer sequences, or leave such rows out with too_long='drop'"


def meet_too_long(reader: StreamReader, sample: int, tokens: int, settings: SequenceSettings, *, tells: bool) -> bool:
    """Raises BadSample for a row that is too long, or logs it if this process `tells`; returns whether to go on so."""
    if settings.too_long == "raise":
        raise row_too_long(reader, sample, tokens, settings.form.size, _RAISED)
    if tells:
        longer = row_too_long(reader, sample, tokens, settings.form.size)
        _log.warning("%s; it is left out, and so are all that are longer", longer)
    return False


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
    known = ChunkLengths(look)
    _check_rows(look, first, form_made(known.source(first // size)))
    lengths = known.of(first // size)
    if settings.too_long == "raise" and not isinstance(settings.form, Split):
        for row in np.flatnonzero(lengths > settings.form.size).tolist():
            raise row_too_long(look, first + row, int(lengths[row]), settings.form.size, _RAISED)
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
