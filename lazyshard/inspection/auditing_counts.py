"""Counts every draw of a run by epoch: each sample must be trained once, still to come, left over, or skipped.

The arithmetic is verified, not trusted: the sample of each position of each lane is computed, which reveals samples
drawn twice or not at all. Memory: two bytes per sample, and blocks of a fixed size. Time: as long as drawing.

A resume from a checkpoint older than the newest one leaves a branch: what was trained there is not in the model that
continues, and is reported separately. Two states share their draws in the same parts, up to the first difference::

    state A   4 ranks, 100 draws | 2 ranks, 30 draws
    state B   4 ranks, 100 draws | 2 ranks, 50 draws | 8 ranks, 7 draws      A is on B's course
    state C   4 ranks, 120 draws                                            C has left it after 100 draws of part 0

In a run over sequences each sample must be in one. A row that is cut counts by its last token. Intended repetitions do
not count twice: tokens of an overlap, and sequences that complete an epoch's last micro batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from lazyshard.format.state import RunState
from lazyshard.inspection.tracing import Report, Tracing
from lazyshard.inspection.tracing_sequences import ROWS_AT_ONCE, SequenceTracing
from lazyshard.inspection.tracing_states import SavedState
from lazyshard.part import BoolArray, Int64Array, SplitOf
from lazyshard.plan.deal import split_table
from lazyshard.plan.sequences import Split, SplitSequence
from lazyshard.stream.sequences import PlannedWindow

_LOOKED_AT: Final = 1 << 22  # samples processed at a time
_MAX_RANGES: Final = 1000  # ranges kept of each kind; the number of samples is exact in any case

TRAINED, TO_COME, LEFT_OVER, SKIPPED, LEFT_OUT, OTHER_SPLIT = range(6)
_KINDS: Final[dict[str, int]] = {"trained": TRAINED, "to come": TO_COME, "left over": LEFT_OVER, "skipped": SKIPPED}


SETTINGS: Final = ("samples_per_chunk", "unit", "window", "seed", "max_total_samples", "split")


@dataclass(frozen=True, slots=True)
class Ranges:
    """The number of samples of one kind, and their first half-open ranges, at most `_MAX_RANGES`."""

    samples: int = 0
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """What became of the samples of an epoch. Each is in exactly one of these, unless something is wrong."""

    epoch: int  # from 0
    samples: int  # their number; if the stream has not ended, those published so far
    trained: int  # trained at least once
    to_come: Ranges  # not drawn yet
    left_over: Ranges  # left over at the epoch's end
    skipped: Ranges  # skipped on purpose
    twice: Ranges  # trained more than once
    again: Ranges  # trained, and drawn again: to come again, skipped or left over
    missing: Ranges  # in none of these: passed over by mistake, or cut short because another epoch was begun
    other_splits: Ranges  # in another split of the stream
    whole: bool  # whether the count is sound: it holds every draw, and none is past the end or in another epoch

    @property
    def proven(self) -> bool:
        """Whether no sample was trained twice or passed over."""
        return self.whole and not (self.twice.samples or self.again.samples or self.missing.samples)


# Relation of a state to the audited one: the same; earlier on its course; later on the same course; on an abandoned
# branch; of epochs that the audited one does not cover; or of another run
Relation = Literal["audited", "on the course", "beyond", "abandoned", "another epoch", "other settings", "other stream"]


@dataclass(slots=True)
class AuditedState:
    """A state of the run's history, and its relation to the audited one."""

    saved: SavedState
    tracing: Tracing | None  # the run by this state, None if it does not fit the stream
    relation: Relation
    shared: tuple[int, ...] = ()  # draws of each of its parts that the audited state has too
    trained: int | None = None  # if abandoned: samples after the shared ones; None if a longer state counts them
    again: dict[int, Ranges] = field(default_factory=dict)  # by epoch, those that the course trained too

    def count_again(self, counts: Counts, marks: BoolArray) -> None:
        """Counts the marked samples, trained on this branch, that the course trained too."""
        again = ranges_where(counts.total, lambda a, b: marks[a:b] & (counts.trained[a:b] > 0))
        if again.samples:
            self.again[counts.epoch] = again


def count_epochs(
    tracing: Tracing, branches: Sequence[AuditedState] = (), report: Report = lambda *_: None
) -> list[EpochAudit]:
    """Counts every draw of a run and of its branches; calls `report` with a phase, chunks done, and their total."""
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
        counts.leave_out(tracing.gaps(epoch), tracing.split)
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
    """Draws of one epoch over the samples [0, total): `drawn` as trained, or `marked` as not trained."""

    def __init__(self, total: int, epoch: int) -> None:
        self.total, self.epoch = total, epoch
        self.trained = np.zeros(total, dtype=np.uint8)  # how often each sample was trained
        self.kinds = np.zeros(total, dtype=np.uint8)  # why it was not trained; 0 if unknown
        self.impossible = 0  # draws that belong to another epoch or are past the end
        self.drawn = self.marked = 0

    def grow(self, total: int) -> None:
        """Extends the samples to [0, total)."""
        if (more := total - len(self.trained)) > 0:
            more = max(more, len(self.trained))
            self.trained, self.kinds = np.pad(self.trained, (0, more)), np.pad(self.kinds, (0, more))
        self.total = max(self.total, total)

    def mark(self, samples: Int64Array, epochs: Int64Array, kind: int) -> None:
        """Counts draws in these epochs: as trained, or why they are not."""
        wrong = (epochs != self.epoch) | (samples < 0) | (samples >= self.total)
        self.impossible += int(np.count_nonzero(wrong))
        self.add(samples[~wrong], kind)

    def add(self, samples: Int64Array, kind: int) -> None:
        """Counts samples as trained, or why they were not."""
        if kind == TRAINED:
            # A scalar of the array's own type: with any other, `np.add.at` is fifty times slower.
            np.add.at(self.trained, samples, np.uint8(1))
            self.drawn += len(samples)
        else:
            self.kinds[samples] = kind
            self.marked += len(samples)

    def leave_out(self, gaps: Iterable[tuple[int, int]], split: SplitOf | None) -> None:
        """Marks samples of ranges, and of other splits, as left out on purpose unless something else is known."""
        for start, stop in gaps:
            self._mark_unknown(start, stop, LEFT_OUT, lambda first, last: np.True_)
        if split is not None:
            self._mark_unknown(0, self.total, OTHER_SPLIT, split_table(split).others)

    def _mark_unknown(self, start: int, stop: int, kind: int, of: Callable[[int, int], Any]) -> None:
        for first, last in _blocks(start, min(stop, self.total)):
            kinds = self.kinds[first:last]
            unknown = (kinds == 0) & (self.trained[first:last] == 0) & of(first, last)
            kinds[unknown] = kind
            self.marked += int(np.count_nonzero(unknown))

    def is_whole(self) -> bool:
        """Returns whether the array holds every draw and no draw was marked twice, so that its counts are complete."""
        counted, marked = int(self.trained.sum(dtype=np.int64)), int(np.count_nonzero(self.kinds))
        return (counted, marked, self.impossible) == (self.drawn, self.marked, 0)

    def audit(self) -> EpochAudit:
        """Returns the counts."""
        trained, kinds = self.trained, self.kinds

        def untrained(low: int, top: int) -> Ranges:
            return ranges_where(
                self.total, lambda a, b: (trained[a:b] == 0) & (kinds[a:b] >= low) & (kinds[a:b] <= top)
            )

        twice = ranges_where(self.total, lambda a, b: trained[a:b] > 1)
        again = ranges_where(self.total, lambda a, b: (trained[a:b] > 0) & (kinds[a:b] > 0) & (kinds[a:b] < LEFT_OUT))
        come, over, missing, other = (untrained(kind, kind) for kind in (TO_COME, LEFT_OVER, TRAINED, OTHER_SPLIT))
        skipped, once, whole = untrained(SKIPPED, LEFT_OUT), int(np.count_nonzero(trained)), self.is_whole()
        return EpochAudit(self.epoch, self.total, once, come, over, skipped, twice, again, missing, other, whole)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of samples that are processed together."""
    return ((first, min(first + _LOOKED_AT, stop)) for first in range(start, stop, _LOOKED_AT))


def ranges_where(total: int, picked: Callable[[int, int], BoolArray]) -> Ranges:
    """Returns the samples of [0, total) selected by `picked`, which returns a mask for a half-open range of samples."""
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
    """Returns the relation of a state to the audited one; the ranges are the epochs in which each has drawn."""
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
    """Returns how many positions of each part of a state another state has drawn identically."""
    shared = [0] * len(state.parts)
    for number, (own, its) in enumerate(zip(state.parts, other.parts, strict=False)):
        # These decide the order of a part; restarting an epoch or not changes the order.
        if any(getattr(own, n) != getattr(its, n) for n in ("dp", "batch_size", "epoch", "trained", "skip")):
            break
        shared[number] = min(own.draws, its.draws)
        if own.draws != its.draws:
            break
    return tuple(shared)


def _count_sequences(tracing: SequenceTracing, branches: Sequence[AuditedState], report: Report) -> list[EpochAudit]:
    """Counts the samples in the sequences of a run, by epoch of the stream, and of the branches that left it."""
    found = _by_epoch(tracing, _count_rows(tracing, report))
    for branch in branches:
        own = branch.tracing
        assert isinstance(own, SequenceTracing)
        draws = [one for one in zip(own.state.parts, branch.shared, own.begins, strict=True) if one[0].trained]
        beyond = [range(begin + part.dp * shared, begin + part.dp * part.draws) for part, shared, begin in draws]
        made = (sequence for number, sequence in own.sequences() if any(number in numbers for numbers in beyond))
        samples = [sample for sequence in made for sample in own.samples_of(sequence)]
        branch.trained = sum(map(len, beyond))
        for counts in found.values():
            marks = np.zeros(counts.total, np.bool_)
            marks[samples] = True
            branch.count_again(counts, marks)
    return [counts.audit() for _, counts in sorted(found.items())]


def _count_rows(tracing: SequenceTracing, report: Report) -> Counts:
    """Counts rows in place of samples, by the sequences in which they end."""
    epoch, size, form, known = tracing.of.epoch, tracing.rows.rows, tracing.form, set[SplitSequence]()
    counts, last = Counts(0, epoch), tracing.row_ended()

    def see(window: PlannedWindow) -> None:
        for first, names, fresh in tracing.rows_met(window):
            counts.grow(first + len(names))
            lengths = tracing.rows.lengths(first // size, epoch)[names - first]
            none = lengths == 0 if isinstance(form, Split) else (lengths == 0) | (lengths > form.size)
            counts.add(names[fresh & none], LEFT_OUT)
        report("counting samples", min(first, tracing.facts.samples), tracing.facts.samples)

    for rows in tracing.before():
        counts.grow(int(rows.max(initial=-1)) + 1)
        counts.add(rows, TRAINED)
    for number, sequence in tracing.sequences(see):
        # Sequences repeat in a micro batch that is completed.
        if tracing.begins_batch(number):
            known.clear()
        if sequence not in known:
            known.add(sequence)
            ended = [row for row in tracing.ends_in(sequence) if row != last]
            counts.add(np.array(ended, np.int64), _KINDS[tracing.fate_of(number, 0).became])
            last = ended[-1] if ended else last
    return counts


def _by_epoch(tracing: SequenceTracing, rows: Counts) -> dict[int, Counts]:
    """Returns the samples of counted rows by epoch of the stream: one epoch of the run may cover several of these."""
    epoch, size, rest = tracing.of.epoch, tracing.rows.rows, TO_COME if tracing.count is None else LEFT_OVER
    # The first epoch exists even before the rows of a window are known.
    found, seen = {epoch: Counts(tracing.end, epoch)}, {epoch: np.zeros(tracing.end, np.bool_)}
    # In whole windows: if the state cuts a window, more of its rows may be known than were counted.
    windows, behind = -(-rows.total // size), tracing.behind
    passed = np.ones(windows * size, np.bool_)
    for window in range(behind // size, windows):
        passed[tracing.planner.in_order(window, epoch)[max(behind - window * size, 0) :]] = False
    for start in range(0, rows.total, ROWS_AT_ONCE):
        drawn = tracing.drawn(np.arange(start, min(start + ROWS_AT_ONCE, rows.total)))
        own = drawn.streams == tracing.stream
        for of in np.unique(drawn.epochs[own]).tolist():
            if of not in found:
                found[of], seen[of] = Counts(tracing.end, of), np.zeros(tracing.end, np.bool_)
            places = np.flatnonzero(own & (drawn.epochs == of))
            samples, places = drawn.samples[places], places + start
            found[of].add(np.repeat(samples, rows.trained[places]), TRAINED)
            for kind in (SKIPPED, TO_COME, LEFT_OVER, LEFT_OUT):
                found[of].add(samples[rows.kinds[places] == kind], kind)
            seen[of][samples[passed[places]]] = True
    for of, counts in found.items():
        counts.impossible += not rows.is_whole()
        counts.leave_out(tracing.gaps(epoch), tracing.split)
        counts.add(np.flatnonzero(~seen[of] & (counts.kinds == 0) & (counts.trained == 0)), rest)
    return found
