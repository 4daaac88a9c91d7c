"""Makes each sequence from its rows, and parses states of runs over them. Forms: `lazyshard.plan.sequences`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.rank import Rank, Stats
from lazyshard.data.run_state import read_state
from lazyshard.data.samples import MOST_BAD, BadRowCount, where_bad
from lazyshard.errors import BadSample, ChunkCorrupt, RowInvalid, SkipSample, StreamMismatch, redact
from lazyshard.format.batch import decode_pack
from lazyshard.format.row import parse_row
from lazyshard.format.seal import Made
from lazyshard.format.state import BlendState, RunState, SequenceState
from lazyshard.memory import raise_if_short
from lazyshard.part import Int64Array
from lazyshard.plan.sequences import Form, Pack, Pad, Split, SplitSequence, cut_tokens, pad_tokens, tokens_of
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader, read_retired
from lazyshard.stream.sequences import ALONE, RowOrder, SequenceRows, state_mismatch
from lazyshard.stream.stream import ChunkLengths

__all__ = ["Pack", "Pad", "Split"]

TooLong = Literal["raise", "drop"]  # for a row longer than a sequence, if rows stay whole


class DatasetRows(SequenceRows):
    """The rows that one rank draws from a data set or a blend, from which sequences are made."""

    def __init__(
        self, source: LazyShardedDataset | BlendedDataset, form: Form, window: int, seed: int | None, most: int | None
    ) -> None:
        self.source, self.datasets = source, datasets_of(source)
        self._form, self._chunks, self._seed = form, window, seed
        limits = [dataset._states.order.max_total_samples for dataset in self.datasets]
        # The name of the source in messages.
        first = str(self.datasets[0].directory)
        self.where = f"the blend of {first} and others" if len(self.datasets) > 1 else first
        name, stopping, self._blending = str(self.datasets[0].stream_id), "first_exhausted", [1]
        if isinstance(source, BlendedDataset):
            states = source._states
            name, stopping, self._blending = ",".join(states.names), states.stopping, [*states.schedule.parts(0)]
        readers, rows = [dataset.reader for dataset in self.datasets], window * self.datasets[0].samples_per_chunk
        super().__init__(name, readers, limits, rows, most, stopping)

    def order(self, epoch: int) -> RowOrder:
        source = self.source
        blend = source._space(epoch).course if isinstance(source, BlendedDataset) else ALONE
        return RowOrder(blend, [dataset._space(epoch).course for dataset in self.datasets])

    def total(self, stream: int, position: int, epoch: int) -> int | None:
        # Also writes the reading hint.
        end = self.datasets[stream]._space(epoch).end_of(0, position)
        return None if end is None else end[1]

    def recorded(self, epoch: int) -> dict[str, Any]:
        """Returns what a state records about the source of an epoch's rows."""
        self.order(epoch)
        states, source = [dataset._states.of(epoch, 1) for dataset in self.datasets], self.source
        rows: RunState | BlendState = states[0]
        if isinstance(source, BlendedDataset):
            rows = source._states.after(source._space(epoch).parts, 0, dict(zip(source.names, states, strict=True)))
        return {"rows": rows, "directories": tuple(redact(str(dataset.directory)) for dataset in self.datasets)}

    def facts(self) -> dict[str, Any]:
        """Returns the settings that decide the sequences, for a state; without those of rows that are in order."""
        form, orders = self._form, list[list[Any]]()
        facts: dict[str, Any] = {"form": type(form).__name__, "size": form.size}
        if isinstance(form, Split):
            ids = ("bos", "eos", "every_bos", "every_eos")
            facts |= {name: getattr(form, name) is not None for name in ids} | {"overlap": form.overlap}
        for order, loaded in ((dataset._states.order, dataset._states.loaded) for dataset in self.datasets):
            gaps = [] if loaded is None else [[*one] for part in loaded.parts for one in part.skip]
            own = [order.unit, order.shuffle_window, order.seed, order.max_total_samples]
            split = [str(order.gaps.split)] if order.split else []
            orders.append([*own, *([gaps] if gaps else []), *split])
        facts |= {"window": self._chunks, "seed": self._seed}
        alone = isinstance(self.source, LazyShardedDataset) and self._samples is None
        if alone and orders[0][1] == 0 and orders[0][3:] == [None]:
            return facts
        blend = json.dumps([self._blending, self._stopping, self._samples, orders])
        return facts | {"blend": blend, "window": self.rows}

    def read_state(self, value: Any) -> SequenceState:
        """Parses a state of sequences of these rows. Raises as `LazyShardedSequences.load_state_dict`."""
        state: SequenceState = read_state(value, f"{self.where}: the state to continue from", "sequences")
        ours, theirs = {"stream": self.name, **self.facts()}, {"stream": state.stream, **state.rule}
        # Compare the form before fields that only some forms have.
        for name in sorted(ours.keys() | theirs, key=lambda name: (name != "stream", name != "form", name)):
            mine, other = ours.get(name), theirs.get(name)
            if (mine, type(mine)) != (other, type(other)):
                why = f"was saved with {name} = {other!s:.100}, here it is {mine!s:.100}: other sequences would be made"
                way = "Use the saved setting, or begin a new epoch"
                raise state_mismatch(self.where, f"{why}. {way}", name, mine, other)
        return state


def datasets_of(source: LazyShardedDataset | BlendedDataset) -> tuple[LazyShardedDataset, ...]:
    """Returns the data sets of a blend, or the single data set."""
    return source.datasets if isinstance(source, BlendedDataset) else (source,)


def enter_rows(source: LazyShardedDataset | BlendedDataset) -> tuple[LazyShardedDataset, ...]:
    """Makes a data set or a blend a source of rows only, for sequences. Returns the data sets.

    Raises ValueError: it has a rank, micro batches, a schedule, or a state; RuntimeError: it was already used.
    """
    datasets, order, loaded = datasets_of(source), source._states.order, source._states.loaded
    if order.batch_size != 1 or (isinstance(source, BlendedDataset) and not source._states.schedule.constant):
        raise ValueError("sequences need a data set or blend with batch_size=1 and without a schedule")
    for dataset in datasets:
        if dataset._late:
            raise ValueError("LateRow returns rows unparsed, but sequences need parsed rows: pass encode_fn=None")
        if dataset._rank not in (None, Rank(0, 1)):
            raise ValueError(f"{dataset.directory}: create it without dp_rank and dp_size, pass these to the sequences")
    if loaded is not None and any(part.draws for part in loaded.parts):
        raise ValueError(f"{source._where}: it continues from a state: load the state of the sequences instead")
    if source._newest is not None or source._length_given_up or order.blended:
        raise RuntimeError(f"{source._where} is already in use: create a new one for the sequences")
    source._give_up_length()
    for dataset in datasets:
        dataset._rank = Rank(0, 1)
    return datasets


class _Encoded(NamedTuple):
    """An encoded row, its tokens as the form needs them, and their number."""

    sample: Any
    tokens: dict[str, Int64Array]
    total: int


def _encoded(sample: Any, form: Form) -> _Encoded:
    if not isinstance(form, Pack):
        tokens = tokens_of(sample)
        return _Encoded(sample, tokens, len(tokens["input_ids"]))
    # The length is `lengths` or `length`, else the number of token ids.
    fields = sample if isinstance(sample, dict) else {}
    length = next((fields[name] for name in ("lengths", "length") if name in fields), None)
    if length is None:
        length = len(fields["input_ids"]) if fields.get("input_ids") is not None else 0
    return _Encoded(sample, {}, int(sum(length)) if isinstance(length, Sequence) else int(length))


class SequenceMaker:
    """Makes the values returned for sequences in one process; `length_of` returns the sealed length of a row."""

    def __init__(self, rows: DatasetRows, form: Form, bad: BadRowCount, length_of: Callable[[int, int], int]) -> None:
        self._rows, self._form, self._bad, self._length_of = rows, form, bad, length_of
        self._filled = 0
        # A split row is needed by consecutive sequences: row, epoch, and its encoded form.
        self._last: tuple[int, int, _Encoded] | None = None

    @property
    def stats(self) -> Stats:
        """Statistics of this process: bad rows, dropped rows, and sequences replaced by another one."""
        readers, bad = self._rows.readers, self._bad
        opened, waited = sum(one.chunks_opened for one in readers), sum(one.waited_s for one in readers)
        cached = (sum(column) for column in zip(*(one._samples.stats[5:] for one in self._rows.datasets), strict=True))
        return Stats(len(bad.seen), opened, waited, bad.skipped, self._filled, *cached)

    def make(self, sequence: SplitSequence, others: Sequence[SplitSequence], epoch: int) -> Any:
        """Returns the value of a sequence, or of another sequence of its window if no row of it can be used.

        Raises BadSample, ChunkCorrupt, RowInvalid: a row is bad and must not be left out.
        """
        if isinstance(self._form, Split):
            return self._cut(self._form, sequence, epoch)
        if (made := self._whole(self._form, sequence, epoch)) is not None:
            return made
        row = sequence.pieces[0].document
        # Depends only on its first row, so that every rank chooses the same one.
        start = mix64(row) % len(others)
        for other in (others[(start + attempt) % len(others)] for attempt in range(min(MOST_BAD, len(others)))):
            if other.pieces[0].document != row and (made := self._whole(self._form, other, epoch)) is not None:
                self._filled += 1
                return made
        cause = ValueError("no row of its sequence, nor of the possible substitutes, can be used: all are bad")
        raise self._where(row, epoch, cause)

    def _whole(self, form: Pack | Pad, sequence: SplitSequence, epoch: int) -> Any:
        """Returns the value of a sequence of whole rows; None if no row is left."""
        room, found = form.size, []
        for row in (piece.document for piece in sequence.pieces):
            one = self._read(row, epoch)
            if isinstance(one, _Encoded) and one.total > room:
                one = ValueError(f"{self._lengths_text(row, epoch, one)}, which exceeds the room in its sequence")
            if isinstance(one, _Encoded):
                room -= one.total
                found.append(one)
            elif isinstance(one, SkipSample):
                self._bad.skip(partial(self._where, row, epoch, one))
            else:
                self._bad.count_bad(row, partial(self._where, row, epoch, one), one)
        if found and isinstance(form, Pad):
            return pad_tokens(found[0].tokens, form.size, form.token)
        return [one.sample for one in found] or None

    def _cut(self, form: Split, sequence: SplitSequence, epoch: int) -> Any:
        """Returns the value of a sequence of cut rows. Leaves no row out, as that would shift all tokens after it."""
        rows = {}
        for row in dict.fromkeys(piece.document for piece in sequence.pieces):
            one = self._read(row, epoch)
            if isinstance(one, Exception):
                raise self._where(row, epoch, one) from one
            if one.total != self._length_of(row, epoch):
                raise self._where(row, epoch, ValueError(self._lengths_text(row, epoch, one)))
            rows[row] = one.tokens
        try:
            return cut_tokens(sequence, rows, form)
        except ValueError as cause:
            raise self._where(sequence.pieces[0].document, epoch, cause) from cause

    def _lengths_text(self, row: int, epoch: int, one: _Encoded) -> str:
        measured = "measure them with the same encoder, by `lazyshard-producer run --measure`"
        return f"it has {one.total} tokens as encoded here, but {self._length_of(row, epoch)} as sealed ({measured})"

    def _where(self, row: int, epoch: int, cause: Exception) -> BadSample:
        stream, sample = self._rows.place(row, epoch)
        return where_bad(self._rows.readers[stream], sample, cause)

    def _read(self, row: int, epoch: int) -> _Encoded | Exception:
        """Returns the encoded row, or the error if there is none. Raises ChunkRetired, OSError: it cannot be read."""
        if self._last is not None and self._last[:2] == (row, epoch):
            return self._last[2]
        stream, sample = self._rows.place(row, epoch)
        made, failed = self._rows.datasets[stream]._samples.tried(sample)
        if failed is not None:
            return failed
        try:
            found = _encoded(made, self._form)
        except Exception as cause:
            raise_if_short(cause)
            return cause
        self._last = (row, epoch, found)
        return found


def row_too_long(reader: StreamReader, sample: int, tokens: int, form: Form, too_long: TooLong) -> BadSample:
    """Returns the error for a row that is longer than a sequence."""
    to_do = ": use longer sequences, or leave such rows out with too_long='drop'" if too_long == "raise" else ""
    text = f"it has {tokens} tokens, but a sequence has at most {form.size}{to_do}"
    return where_bad(reader, sample, ValueError(text))


def check_beginning(reader: StreamReader, form: Form, too_long: TooLong) -> bool:
    """Refuses a stream from which no sequences can be made, judging by its first remaining chunk.

    Returns whether there was a chunk to check. The reader opens nothing.
    """
    size, samples = reader.samples_per_chunk, reader.seen.samples
    # A copy, whose files are closed with it: this process may never read that chunk again.
    look = copy.copy(reader)
    look.parent = reader.parent
    first = read_retired(reader.directory, reader.stream_id) * size
    if first >= samples:
        return False
    known, where = ChunkLengths(look), str(reader.directory)
    form_of_rows = Made.read_source(known.source(first // size)).form
    try:
        # A stream has packs in every row or in none.
        packed = decode_pack(parse_row(look.line(first))) is not None
    except (ChunkCorrupt, RowInvalid):
        packed = False  # Reported, or left out, by the pass that draws it.
    if packed or form_of_rows in ("split", "pad"):
        made, actual = ("pack", "packs") if packed else (form_of_rows, f"rows made with --{form_of_rows}")
        gets = ", whose `encode` gets {'pack': ROWS, 'lengths': TOKENS} (in ms-swift --packing true)" if packed else ""
        text = f"its rows were made with `lazyshard-producer run --{made}`, so no sequences can be made of them: train"
        way = f"each as one sample, with `LazyShardedDataset({where!r}, ...)`{gets}, or produce them without --{made}"
        raise StreamMismatch(f"{where}: {text} {way}", directory=where, expected="rows", actual=actual)
    lengths = known.of(first // size)
    if too_long == "raise" and not isinstance(form, Split):
        for row in np.flatnonzero(lengths > form.size).tolist():
            raise row_too_long(look, first + row, int(lengths[row]), form, too_long)
    return True
