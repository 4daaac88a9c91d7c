"""Counts every draw of a run by epochs: each sample must be trained once, still to come, left over, or skipped.

Nothing is taken for granted of what the arithmetic promises: each position of each lane is asked for its sample, and
what is drawn twice or by nobody shows. Memory: two bytes a sample, and blocks of a fixed size. Time: that of drawing.

A resume from an older checkpoint than the newest leaves a branch behind: what was trained there is not in the model
that continues, and is told apart. Two states share what they drew in the same parts, up to the first difference::

    state A   4 ranks, 100 draws | 2 ranks, 30 draws
    state B   4 ranks, 100 draws | 2 ranks, 50 draws | 8 ranks, 7 draws      A is on B's course
    state C   4 ranks, 120 draws                                            C has left it after 100 draws of part 0

Of a run over sequences each sample must be in one. A row that is cut counts by its last token. What comes once more by
design does not count twice: tokens of an overlap, and what completes an epoch's last micro batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from lazyshard.format.state import RunState
from lazyshard.inspection.tracing import Tracing
from lazyshard.inspection.tracing_sequences import SequenceTracing, rows_at
from lazyshard.inspection.tracing_states import SavedState
from lazyshard.plan.sequences import Split, SplitSequence
from lazyshard.stream.sequences import PlannedWindow, RowDraws

_LOOKED_AT: Final = 1 << 22  # Samples that are looked at at a time
_MAX_RANGES: Final = 1000  # Ranges that are kept of each kind; how many samples there are is counted in any case

TRAINED, SKIPPED, TO_COME, LEFT_OVER, LEFT_OUT = range(5)
_KINDS: Final[dict[str, int]] = {"trained": 0, "skipped": 1, "to come": 2, "left over": 3}

_Mask = npt.NDArray[np.bool_]

SETTINGS: Final = ("samples_per_chunk", "unit", "window", "seed", "max_total_samples")


@dataclass(frozen=True, slots=True)
class Ranges:
    """How many samples are of one kind, and the first half-open ranges of them, at most `_MAX_RANGES`."""

    samples: int = 0
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """What became of the samples of an epoch. Each is in one of these, unless something is wrong."""

    epoch: int  # from 0
    samples: int  # how many there are: of a stream that has not ended, those published so far
    trained: int  # trained at least once
    to_come: Ranges  # drawn by nobody yet
    left_over: Ranges  # left over at the epoch's end
    skipped: Ranges  # skipped on purpose
    twice: Ranges  # trained more than once
    again: Ranges  # trained, and drawn once more: to come again, skipped or left over
    missing: Ranges  # in none of these: passed over although they should not be, or cut short by another epoch's begin
    whole: bool  # whether the count is sound: it holds every draw, none is past the end or in another epoch

    @property
    def proven(self) -> bool:
        """Whether no sample was trained twice or passed over."""
        return self.whole and not (self.twice.samples or self.again.samples or self.missing.samples)


# What a state is to the audited one: itself; earlier on its course; later on the same course; on a branch that was
# given up; of epochs that this one does not tell of; or of no run that this one can be of
Relation = Literal["audited", "on the course", "beyond", "abandoned", "another epoch", "other settings", "other stream"]


@dataclass(slots=True)
class AuditedState:
    """A state of the run's history, and what it is to the one that is audited."""

    saved: SavedState
    tracing: Tracing | None  # the run as it tells it, None where it does not fit the stream
    relation: Relation
    shared: tuple[int, ...] = ()  # draws of each of its parts that the audited one has too
    trained: int | None = None  # of an abandoned one: samples behind those; None where a longer one on its branch tells
    again: dict[int, Ranges] = field(default_factory=dict)  # by epoch, those of them that the course trained too

    def count_again(self, counts: Counts, marks: _Mask) -> None:
        """Counts which of the marked samples, trained on this branch, the course trained too."""
        again = ranges_where(counts.total, lambda a, b: marks[a:b] & (counts.trained[a:b] > 0))
        if again.samples:
            self.again[counts.epoch] = again


def count_epochs(
    tracing: Tracing,
    branches: Sequence[AuditedState] = (),
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> list[EpochAudit]:
    """Counts every draw of a run, and of branches that left it; `report` is told a phase, chunks done, and all."""
    if isinstance(tracing, SequenceTracing):
        return _count_sequences(tracing, branches, report)
    found, each = [], tracing.facts.samples_per_chunk
    chunks = -(-tracing.end // each)
    left = {epoch for branch in branches if branch.tracing is not None for epoch in branch.tracing.epochs}
    for epoch in sorted({*tracing.epochs, *left}):
        counts = Counts(tracing.end, epoch)
        for stretch in tracing.draws(epoch):
            for samples, epochs in stretch.blocks(tracing.end):
                counts.mark(samples, epochs, _KINDS[stretch.became])
                report(f"counting epoch {epoch}", (counts.drawn + counts.marked) // each, chunks)
        for start, stop in tracing.gaps(epoch):
            counts.leave_out(start, stop)
        if epoch in tracing.epochs:
            found.append(counts.audit())
        for branch in branches:
            assert branch.tracing is not None
            marks = np.zeros(counts.total, np.bool_)
            for own in branch.tracing.draws(epoch):
                apart = own._replace(start=max(own.start, branch.shared[own.part]))
                for samples, _ in apart.blocks(counts.total) if own.became == "trained" else ():
                    marks[samples] = True
                    branch.trained = (branch.trained or 0) + len(samples)
            branch.count_again(counts, marks)
    return found


class Counts:
    """Draws of one epoch over the samples [0, total): of samples that were `drawn` as trained, or `marked`."""

    def __init__(self, total: int, epoch: int) -> None:
        self.total, self.epoch = total, epoch
        self.trained = np.zeros(total, dtype=np.uint8)  # how often each sample was trained
        self.kinds = np.zeros(total, dtype=np.uint8)  # why it was not; 0 where nothing is known
        self.impossible = 0  # draws that the arithmetic puts into another epoch than it should, or past the end
        self.drawn = self.marked = 0

    def mark(self, samples: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64], kind: int) -> None:
        """Counts what is drawn in these epochs: as trained, or why it is not."""
        wrong = (epochs != self.epoch) | (samples < 0) | (samples >= self.total)
        bad = int(np.count_nonzero(wrong))
        self.impossible += bad
        self.add(samples[~wrong] if bad else samples, kind)

    def add(self, samples: npt.NDArray[np.int64], kind: int) -> None:
        """Counts samples that were trained, or why they were not."""
        if kind == TRAINED:
            # One of the array's own type: `np.add.at` is fifty times slower with any other.
            np.add.at(self.trained, samples, np.uint8(1))
            self.drawn += len(samples)
        else:
            self.kinds[samples] = kind
            self.marked += len(samples)

    def leave_out(self, start: int, stop: int) -> None:
        """Marks those of a range as left out on purpose for which nothing else is known."""
        for first, last in _blocks(start, min(stop, self.total)):
            kinds = self.kinds[first:last]
            unknown = (kinds == 0) & (self.trained[first:last] == 0)
            kinds[unknown] = LEFT_OUT
            self.marked += int(np.count_nonzero(unknown))

    def is_whole(self) -> bool:
        """Whether the array holds every draw, and no draw was marked twice: then what it says is all."""
        counted, marked = int(self.trained.sum(dtype=np.int64)), int(np.count_nonzero(self.kinds))
        return (counted, marked, self.impossible) == (self.drawn, self.marked, 0)

    def audit(self) -> EpochAudit:
        """Returns what was counted."""

        def found(which: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], _Mask]) -> Ranges:
            return ranges_where(self.total, lambda a, b: which(self.trained[a:b], self.kinds[a:b]))

        return EpochAudit(
            self.epoch,
            self.total,
            int(np.count_nonzero(self.trained)),
            to_come=found(lambda trained, kinds: (kinds == TO_COME) & (trained == 0)),
            left_over=found(lambda trained, kinds: (kinds == LEFT_OVER) & (trained == 0)),
            skipped=found(lambda trained, kinds: ((kinds == SKIPPED) | (kinds == LEFT_OUT)) & (trained == 0)),
            twice=found(lambda trained, kinds: trained > 1),
            again=found(lambda trained, kinds: (trained > 0) & (kinds != 0) & (kinds != LEFT_OUT)),
            missing=found(lambda trained, kinds: (kinds == 0) & (trained == 0)),
            whole=self.is_whole(),
        )


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of samples that are looked at together."""
    return ((first, min(first + _LOOKED_AT, stop)) for first in range(start, stop, _LOOKED_AT))


def ranges_where(total: int, picked: Callable[[int, int], _Mask]) -> Ranges:
    """Returns the samples of [0, total) that are picked; `picked` tells which of a half-open range of samples are."""
    samples, found = 0, list[tuple[int, int]]()
    for first, last in _blocks(0, total):
        mask = picked(first, last)
        number = int(np.count_nonzero(mask))
        samples += number
        if not number or len(found) > _MAX_RANGES:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).view(np.int8)))
        pairs = (edges.reshape(-1, 2)[: _MAX_RANGES + 1] + first).tolist()
        if found and found[-1][1] == pairs[0][0]:
            pairs[0][0] = found.pop()[0]
        found.extend((start, stop) for start, stop in pairs)
    return Ranges(samples, tuple(found[:_MAX_RANGES]))


def relate(state: RunState, head: RunState, epochs: range = range(0), head_epochs: range = range(0)) -> Relation:
    """Returns what a state is to another one, the audited one; of each the epochs of which it has drawn anything."""
    if state.stream_id != head.stream_id:
        return "other stream"
    if any(getattr(state, name) != getattr(head, name) for name in SETTINGS):
        return "other settings"
    shared = shared_draws(state, head)
    if shared == tuple(part.draws for part in state.parts):
        return "on the course"
    if shared_draws(head, state) == tuple(part.draws for part in head.parts):
        return "beyond"
    apart = epochs.stop <= head_epochs.start or head_epochs.stop <= epochs.start
    return "another epoch" if apart and not any(shared) else "abandoned"


def shared_draws(state: RunState, other: RunState) -> tuple[int, ...]:
    """Returns how many of the positions that each part of a state has drawn another state has drawn the same."""
    shared = [0] * len(state.parts)
    for number, (own, its) in enumerate(zip(state.parts, other.parts, strict=False)):
        # What decides the order of a part; an epoch that it begins or not is another one.
        if any(getattr(own, n) != getattr(its, n) for n in ("dp", "batch_size", "epoch", "trained", "skip")):
            break
        shared[number] = min(own.draws, its.draws)
        if own.draws != its.draws:
            break
    return tuple(shared)


def _count_sequences(
    tracing: SequenceTracing, branches: Sequence[AuditedState], report: Callable[[str, int, int], None]
) -> list[EpochAudit]:
    """Counts the samples of the sequences of a run, by the epochs of the stream; and those of branches that left it."""
    counting = _Counting(tracing, report)
    for number, sequence in tracing.sequences(counting.see):
        counting.count(number, sequence)
    counting.finish()
    for branch in branches:
        own = branch.tracing
        assert isinstance(own, SequenceTracing)
        draws = [one for one in zip(own.state.parts, branch.shared, own.begins, strict=True) if one[0].trained]
        beyond = [range(begin + part.dp * shared, begin + part.dp * part.draws) for part, shared, begin in draws]
        made = (sequence for number, sequence in own.sequences() if any(number in numbers for numbers in beyond))
        samples = [sample for sequence in made for sample in own.samples_of(sequence)]
        branch.trained = sum(map(len, beyond))
        for counts in counting.counts.values():
            marks = np.zeros(counts.total, np.bool_)
            marks[samples] = True
            branch.count_again(counts, marks)
    return [counts.audit() for _, counts in sorted(counting.counts.items())]


class _Counting:
    """Counts by epoch of the stream: a run over sequences may pass over several in one of its own."""

    def __init__(self, tracing: SequenceTracing, report: Callable[[str, int, int], None]) -> None:
        self._tracing, self._report, self._epoch = tracing, report, tracing.of.epoch
        # The first one also before the rows of a window are known.
        self.counts = {self._epoch: Counts(tracing.end, self._epoch)}
        self._seen = {self._epoch: np.zeros(tracing.end, np.bool_)}
        # Rows that are to be counted, by kind; the sequences of the micro batch at hand, and the row that ended last.
        self._rows: dict[int, list[int]] = {}
        self._known: set[SplitSequence] = set()
        self._last = -1 if (row := tracing.row_ended()) is None else row
        # Where what is left over begins, and the windows from there on.
        self._behind = tracing.first.position
        self._windows: list[tuple[int, RowDraws]] = []
        for drawn in tracing.before():
            self._add(drawn, TRAINED)

    def see(self, window: PlannedWindow) -> None:
        """Takes note of the rows of a window."""
        self._flush()
        tracing, size = self._tracing, self._tracing.rows.rows
        for first, names, drawn, fresh in tracing.rows_met(window):
            lengths = tracing.rows.lengths(first // size, self._epoch)[names - first]
            none = lengths == 0 if isinstance(tracing.form, Split) else (lengths == 0) | (lengths > tracing.form.size)
            self._add(rows_at(drawn, fresh & none), LEFT_OUT)
            self._add(rows_at(drawn, fresh), None)
            self._windows.append((first, drawn))
        self._behind = first + len(names) if window.after is None else window.after.position
        self._windows = [one for one in self._windows if one[0] + size > self._behind]
        self._report("counting samples", min(first, tracing.facts.samples), tracing.facts.samples)

    def count(self, number: int, sequence: SplitSequence) -> None:
        """Counts the rows that end in a sequence."""
        tracing = self._tracing
        if tracing.begins_batch(number):
            self._known.clear()
        if sequence not in self._known:
            self._known.add(sequence)
            ended = [row for row in tracing.ends_in(sequence) if row != self._last]
            self._rows.setdefault(_KINDS[tracing.fate_of(number, 0).became], []).extend(ended)
            self._last = ended[-1] if ended else self._last

    def finish(self) -> None:
        """Counts what is in no sequence so far."""
        self._flush()
        tracing, rest = self._tracing, TO_COME if self._tracing.count is None else LEFT_OVER
        for counts in self.counts.values():
            for start, stop in tracing.gaps(self._epoch):
                counts.leave_out(start, stop)
        for first, drawn in self._windows:
            self._add(rows_at(drawn, np.arange(len(drawn.samples)) + first >= self._behind), rest, unknown=True)
        for epoch, counts in self.counts.items():
            counts.add(np.flatnonzero(~self._seen[epoch] & (counts.kinds == 0)), rest)

    def _flush(self) -> None:
        size = self._tracing.rows.rows
        for kind, rows in self._rows.items():
            numbers = np.array(rows, np.int64)
            for window in np.unique(numbers // size).tolist():
                drawn = self._tracing.rows.of_window(window, self._epoch)
                self._add(rows_at(drawn, numbers[numbers // size == window] - window * size), kind)
        self._rows.clear()

    def _add(self, drawn: RowDraws, kind: int | None, *, unknown: bool = False) -> None:
        """Counts those of this stream as of a kind, None for having been seen; if `unknown` those of no kind so far."""
        own = drawn.streams == self._tracing.stream
        for epoch in np.unique(drawn.epochs[own]).tolist():
            if epoch not in self.counts:
                self.counts[epoch] = Counts(self._tracing.end, epoch)
                self._seen[epoch] = np.zeros(self._tracing.end, np.bool_)
            samples, counts = drawn.samples[own & (drawn.epochs == epoch)], self.counts[epoch]
            self._seen[epoch][samples] = True
            if unknown:
                samples = samples[(counts.kinds[samples] == 0) & (counts.trained[samples] == 0)]
            if kind is not None:
                counts.add(samples, kind)
