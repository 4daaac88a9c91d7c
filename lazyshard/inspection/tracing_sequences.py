"""Traces a run over sequences made during training: which sequence held a sample, and which rank trained it.

Sequences are made again, window by window, from the lengths in the seals, in some microseconds per row.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, takewhile
from typing import Any, Final

import numpy as np
import orjson

from lazyshard.errors import ChunkRetired, LazyShardError, LengthUnknown, WaitTimeout
from lazyshard.format.state import BlendState, RunState, SequenceState, WindowPlace
from lazyshard.inspection.tracing import MAX_STEP_DRAWS, Became, Fate, StreamFacts, Tracing, done_before
from lazyshard.inspection.tracing_states import PartSteps, SavedState, StepPlace, Steps
from lazyshard.part import BoolArray, Int64Array, Part
from lazyshard.plan.blend import BlendCourse
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps, Rules, split_table
from lazyshard.plan.sequences import Form, Pack, Pad, Split, SplitSequence, completed
from lazyshard.stream import StreamReader, read_retired
from lazyshard.stream.run_parts import course_of
from lazyshard.stream.sequences import ALONE, PlannedWindow, RowDraws, RowOrder, SequencePlanner, SequenceRows, skips_of

_Numbered = tuple[int, SplitSequence]  # a sequence, after its number in the epoch
ROWS_AT_ONCE: Final = 1 << 20  # rows before the first window processed at a time: some 60 MB


def traced(saved: SavedState, facts: StreamFacts, where: str) -> Tracing:
    """Returns a run, derived from one of its states. Raises as `Tracing` and `SequenceTracing`."""
    return Tracing(saved, facts, where) if saved.sequences is None else SequenceTracing(saved, facts, where)


class _StateRows(SequenceRows):
    """The rows of a run, derived from its state; never waits."""

    def __init__(self, state: SequenceState, directory: str, stream_id: str | None) -> None:
        samples, stopping, states, directories = None, "first_exhausted", list[RunState](), [directory]
        window, rows = int(state.rule.get("window") or 0), state.rows
        if "blend" in state.rule:
            if rows is None:
                raise ValueError("its state does not say what gives the rows: it is of an earlier release")
            _, stopping, samples, _ = orjson.loads(str(state.rule["blend"]))
            states = list(rows.members) if isinstance(rows, BlendState) else [rows]
            told = zip(states, state.directories, strict=True)
            directories = [directory if one.stream_id == stream_id else there for one, there in told]
        readers = [StreamReader(one, max_wait=0) for one in directories]
        for reader, name in zip(readers, state.stream.split(","), strict=True):
            if reader.stream_id != name:
                raise ValueError(f"{reader.directory} holds stream {reader.stream_id}, but the run had {name} there")
        window *= 1 if states else readers[0].samples_per_chunk
        limits = [one.max_total_samples for one in states] or [None]
        super().__init__(state.stream, readers, limits, window, samples, stopping)
        blend = BlendCourse(rows.parts[-1].pieces) if isinstance(rows, BlendState) else ALONE
        courses = [course_of(one) for one in states] or [Course(Rules(readers[0].samples_per_chunk), [Part(1)])]
        self._order = RowOrder(blend, [course.in_epoch(state.epoch) for course in courses])
        # The samples that the data sets themselves skip, for each stream.
        self.gaps = [Gaps(one for part in of.parts for one in part.skip) for of in states] or [Gaps(())]

    def order(self, epoch: int) -> RowOrder:
        return self._order

    def done_before(self, stream: int, row: int) -> int:
        """Returns N such that from `row` on no sample of [0, N) of a stream is drawn, in the epoch of that stream."""
        return done_before(self._order.courses[stream], self._order.blend.counts(row)[stream], self._total_seen(stream))


def _form(rule: dict[str, Any]) -> Form:
    if rule["form"] == "Split":
        ids = {name: 0 for name in ("bos", "eos", "every_bos", "every_eos") if rule[name]}
        return Split(rule["size"], **ids, overlap=rule["overlap"])
    made: Form = {"Pack": Pack, "Pad": Pad}[rule["form"]](rule["size"])
    return made


class SequenceTracing(Tracing):
    """A run over sequences: as `Tracing`, but positions and draws are sequences, and samples those in them.

    `first` is the place from which sequences can be made again: if chunks are deleted, the place in the state. `count`
    is their number in the epoch, None until its end is reached. Rows from `behind` on, in the order in which sequences
    are made of them, are in no sequence made so far. Raises StateMismatch: the state is not of this stream or lacks
    information, or another stream of its blend is missing.
    """

    def __init__(self, saved: SavedState, facts: StreamFacts, where: str) -> None:
        self.state, self.facts, self.where, self.left_out = saved.state, facts, where, False
        assert saved.sequences is not None
        self.of = of = saved.sequences
        try:
            self.rows, self.form = _StateRows(of, where, facts.stream_id), _form(of.rule)
            self.stream = [reader.stream_id for reader in self.rows.readers].index(facts.stream_id)
            self.planner = SequencePlanner(self.rows, self.form, of.rule["seed"], where)  # type: ignore[arg-type]
        except (ValueError, KeyError, TypeError, OSError, LazyShardError) as cause:
            raise self._impossible(saved, f"its sequences cannot be made again: {cause}") from cause
        self.split = self.rows.order(of.epoch).courses[self.stream].rules.split
        skips = skips_of(of.parts)
        self.planner.skips = lambda epoch: skips
        deleted = any(read_retired(one.directory, one.stream_id) for one in self.rows.readers)
        self.first = of.place if deleted else WindowPlace()
        self.count: int | None = None
        self.behind = self.first.position
        self._places = [self.first]  # beginnings of windows, in order
        self.end, parts = facts.samples, self.state.parts
        self.total = self.end if facts.ended else None
        self.epochs = range(of.epoch, of.epoch + 1)
        self.begins = list(accumulate((one.dp * one.draws for one in parts[:-1]), initial=0))
        self.steps = Steps([PartSteps(one.first_step, one.draws, one.draws_per_step, one.trained) for one in parts])
        # Deleted windows cannot be checked.
        with contextlib.suppress(ChunkRetired, LengthUnknown):
            try:
                self.planner.check(of)
            except WaitTimeout as cause:
                raise self._impossible(saved, f"it is ahead of the stream: {cause}") from cause

    def sequences(
        self, see: Callable[[PlannedWindow], None] = lambda window: None, start: int | None = None
    ) -> Iterator[_Numbered]:
        """Yields the sequences from `first`, or a micro batch's `start`, on; calls `see` before each window."""
        tail, places, place = list[_Numbered](), self._places, self.first
        if start is not None:
            place = places[max(bisect_right(places, start, key=lambda one: one.before) - 1, 0)]
        with contextlib.suppress(WaitTimeout):
            while True:
                if place.window == self.of.place.window and place != self.of.place:
                    expected = f"{place.before} sequences made before window {place.window}, by the lengths of its rows"
                    raise self._mismatch(f"{self.where}: the state is of other sequences: there are {expected}")
                window = self.planner.plan(place, self.of.epoch)
                ended = place.window * self.rows.rows + len(self.rows.lengths(place.window, self.of.epoch))
                self.behind = ended if window.after is None else window.after.position
                see(window)
                for number, sequence in enumerate(window.sequences, place.before):
                    if self.begins_batch(number):
                        yield from tail
                        tail.clear()
                    tail.append((number, sequence))
                if window.after is None:
                    self.count = window.stop
                    break
                place = window.after
                if place.window > places[-1].window:
                    places.append(place)
        if tail and self.count is not None:
            batch = self._batch_of(first := tail[0][0])[1]
            if self.fate_of(first, 0).became != "left over" and len(tail) < len(batch) and first == batch.start:
                tail = list(enumerate(completed([one for _, one in tail], len(batch), self.form), first))
        yield from tail

    def begins_batch(self, number: int) -> bool:
        """Returns whether a sequence is the first one of a micro batch of all ranks."""
        return number == self._batch_of(number)[1].start

    def _batch_of(self, number: int) -> tuple[int, range]:
        """Returns the part in which a sequence was drawn, or the last one if it is to come, and its micro batch."""
        # If several parts begin with the same sequence, all but the last have drawn nothing.
        part = bisect_right(self.begins, number) - 1
        micro = self.state.parts[part].dp * self.state.parts[part].batch_size
        start = number - (number - self.begins[part]) % micro
        return part, range(start, start + micro)

    def fate_of(self, number: int, sample: int) -> Fate:
        """Returns what became of a sample in a sequence."""
        part, batch = self._batch_of(number)
        own = self.state.parts[part]
        rank, at = divmod(number - batch.start, own.batch_size)
        position = (batch.start - self.begins[part]) // own.dp + at
        became: Became = "to come"
        if position < own.draws:
            became = "trained" if own.trained else "skipped"
        elif self.count is not None and batch.stop > self.count:
            return Fate(self.of.epoch, sample, "left over")
        return Fate(self.of.epoch, sample, became, part, self.steps.step_of(part, position), rank, position)

    def at_step(self, step: int, rank: int | None = None) -> Iterator[Fate]:
        """Yields the samples in the sequences of a step, rank by rank; only of `rank` if it is given."""
        place = self.place(step)
        own, begin = self.state.parts[place.part], self.begins[place.part]
        first, stop = (begin + position * own.dp for position in (place.start, place.stop))
        if stop - first > MAX_STEP_DRAWS:
            raise self._mismatch(f"{self.where}: by the state, step {step + 1} has {stop - first} sequences")
        if first < self.first.before:
            gone = f"step {step + 1} took sequences of rows whose chunks are deleted; sequences can be traced from"
            raise self._mismatch(f"{self.where}: {gone} number {self.first.before} on")
        known = takewhile(lambda one: one[0] < stop, self.sequences(start=first))
        found = [(self.fate_of(number, 0), sequence) for number, sequence in known if number >= first]
        own_samples = ((fate, self.samples_of(sequence)) for fate, sequence in found if rank in (None, fate.rank))
        for fate, samples in sorted(own_samples, key=lambda one: (one[0].rank or 0, one[0].position or 0)):
            yield from (fate._replace(sample=sample) for sample in samples)

    def samples_of(self, sequence: SplitSequence) -> list[int]:
        """Returns the samples of this stream that have tokens in a sequence, in order."""
        own = (piece.document for piece in sequence.pieces if piece.stop > piece.start)
        placed = (self.rows.place(row, self.of.epoch) for row in own)
        return [sample for stream, sample in placed if stream == self.stream]

    def fates(self, sample: int) -> Iterator[Fate]:
        """Yields what became of a sample: once for each sequence that has tokens of it."""
        epoch, rows, last = self.of.epoch, set[int](), -1

        def see(window: PlannedWindow) -> None:
            nonlocal last
            for first, names, fresh in self.rows_met(window):
                drawn = self.rows.window(first // self.rows.rows, epoch)[0]
                own = ((drawn.streams == self.stream) & (drawn.samples == sample))[names - first] & fresh
                rows.update(names[own].tolist())
                last = max((np.flatnonzero(own) + first).tolist(), default=last)

        numbers = []
        for number, sequence in self.sequences(see):
            if rows and any(piece.document in rows and piece.stop > piece.start for piece in sequence.pieces):
                numbers.append(number)
        own = next((number for number, one in enumerate(self.state.parts) if sample in Gaps(one.skip)), None)
        part, apart = 0 if sample in self.rows.gaps[self.stream] else own, False
        if numbers and isinstance(self.form, Pack) and self.count is not None:
            # It may have been split off with packs before `first`, to complete their micro batch.
            batch = self._batch_of(numbers[-1])[1]
            drawn = self.fate_of(numbers[-1], 0).rank is not None
            apart = batch.start < self.first.before and batch.stop > self.count and drawn
        before = (sample in one.samples[one.streams == self.stream] for one in map(self.drawn, self.before(cut=True)))
        if sample >= self.facts.samples:
            yield Fate(epoch, sample, "not published")
        elif numbers and not apart:
            yield from (self.fate_of(number, sample) for number in numbers)
        elif numbers or ((part is None or self.begins[part]) and any(before)):
            # Even if a later part skips it: it may have been trained.
            yield Fate(epoch, sample, "before")
        elif self.split is not None and sample not in split_table(self.split):
            yield Fate(epoch, sample, "other split")
        elif part is not None:
            yield Fate(epoch, sample, "skipped", part)
        elif rows and last < self.behind:
            yield Fate(epoch, sample, "in no sequence")
        else:
            # Rows may end before all samples are drawn.
            yield Fate(epoch, sample, "to come" if self.count is None else "left over")

    def fewer_than_step(self, fate: Fate) -> int | None:
        """Returns None: sequences left over in an epoch are known."""
        return None

    def needed_chunk(self, newest_epoch: int) -> int:
        """Returns the first chunk of this stream that a run continuing from the state may need."""
        if self.of.epoch < newest_epoch:
            return 0
        row = self.planner.first_window(self.of.place) * self.rows.rows
        return self.rows.done_before(self.stream, row) // self.facts.samples_per_chunk

    def gaps(self, epoch: int) -> list[tuple[int, int]]:
        """Returns the ranges of samples that are skipped."""
        return [*(one for part in self.of.parts for one in part.skip), *self.rows.gaps[self.stream].ranges]

    def before(self, *, cut: bool = False) -> Iterator[Int64Array]:
        """Yields rows before `first`, and if `cut` the row it cuts: only the state shows that they were trained."""
        window, within = divmod(self.first.position, self.rows.rows)
        within += (cut and self.first.offset > 0) or self.row_ended() is not None
        stop = window * self.rows.rows
        yield from (np.arange(row, min(row + ROWS_AT_ONCE, stop)) for row in range(0, stop, ROWS_AT_ONCE))
        if within:
            yield self.planner.in_order(window, self.of.epoch)[:within]

    def drawn(self, rows: Int64Array) -> RowDraws:
        """Returns the draws of rows that are close to each other."""
        first, stop = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
        return RowDraws(*(one[rows - first] for one in self.rows.draws(first, stop, self.of.epoch)))

    def row_ended(self) -> int | None:
        """Returns the row that `first` cuts, if its last token comes before and is repeated by an overlap."""
        first, form = self.first, self.form
        begun = first.before and (first.offset or not any(part.skip for part in self.of.parts))
        if not begun or not isinstance(form, Split) or not form.overlap:
            return None
        window, within = divmod(first.position, self.rows.rows)
        row = next(iter(self.planner.in_order(window, self.of.epoch)[within:].tolist()), None)
        whole = 0 if row is None else form.framed([self.planner.length_of(row, self.of.epoch)])[0]
        return row if first.offset == whole - 1 else None

    def rows_met(self, window: PlannedWindow) -> Iterator[tuple[int, Int64Array, BoolArray]]:
        """Yields the rows that a window adds: their first number, all in order, and whether each is after `first`."""
        own = window.place.window
        # The first window also adds the rows that were left over for it.
        for number in range(self.planner.first_window(self.first) if window.place == self.first else own, own + 1):
            names, begin = self.planner.in_order(number, self.of.epoch), number * self.rows.rows
            yield begin, names, np.arange(begin, begin + len(names)) >= self.first.position

    def ends_in(self, sequence: SplitSequence) -> list[int]:
        """Returns the rows whose last token is in a sequence; with an overlap, also of the sequence before."""
        form, rows = self.form, [piece.document for piece in sequence.pieces]
        if not isinstance(form, Split):
            return rows
        last = sequence.pieces[-1]
        whole = last.eos if form.eos is not None else last.stop == self.planner.length_of(rows[-1], self.of.epoch)
        return rows if whole else rows[:-1]

    def _check_certain(self, step: int, place: StepPlace) -> None:
        """Does nothing: the part of a step that is not published yet is not reported."""
