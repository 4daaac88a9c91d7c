"""Counts every draw of a run by epochs: each sample must be trained once, still to come, left over, or skipped.

Nothing is taken for granted of what the arithmetic promises: each position of each lane is asked for its sample, and
what is drawn twice or by nobody shows. Memory: two bytes a sample, and blocks of a fixed size. Time: that of drawing.

A resume from an older checkpoint than the newest leaves a branch behind: what was trained there is not in the model
that goes on, and is told apart. Two states share what they drew in the same parts, up to the first difference::

    state A   4 ranks, 100 draws | 2 ranks, 30 draws
    state B   4 ranks, 100 draws | 2 ranks, 50 draws | 8 ranks, 7 draws      A is on B's course
    state C   4 ranks, 120 draws                                            C has left it after 100 draws of part 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from lazyshard.format.state import RunState
from lazyshard.inspection.tracing import Tracing, UnbrokenParts
from lazyshard.inspection.tracing_states import SavedState
from lazyshard.part import Part
from lazyshard.plan.course import Course

_BLOCK: Final = 1 << 19  # Draws that are computed at a time: about 60 MB with all that is made on the way
_LOOKED_AT: Final = 1 << 22  # Samples that are looked at at a time
_MAX_RANGES: Final = 1000  # Ranges that are kept of each kind; how many samples there are is counted in any case

TRAINED: Final = 0
SKIPPED: Final = 1
TO_COME: Final = 2
LEFT_OVER: Final = 3
LEFT_OUT: Final = 4
_ONE: Final = np.uint8(1)  # Of the array's own type: `np.add.at` is fifty times slower with any other

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
    """A state of the run's history, and what it is to the one that is audited.

    `tracing` is the run as it tells it, None where it does not fit the stream; `shared` are the draws of each of its
    parts that the audited one has too. Of an abandoned one it is counted how many samples it trained behind those, and
    by epoch those of them that the audited course trained too; None where a longer one on its branch tells it.
    """

    saved: SavedState
    tracing: Tracing | None
    relation: Relation
    shared: tuple[int, ...] = ()
    trained: int | None = None
    again: dict[int, Ranges] = field(default_factory=dict)


def count_epochs(
    tracing: Tracing,
    branches: Sequence[AuditedState] = (),
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> list[EpochAudit]:
    """Counts every draw of a run, and of the branches that have left its course.

    `report` is told a phase, how many chunks of it are done, and how many there are.
    """
    found, each = [], tracing.facts.samples_per_chunk
    chunks = -(-tracing.end // each)
    left = {epoch for branch in branches if branch.tracing is not None for epoch in branch.tracing.epochs}
    for epoch in sorted({*tracing.epochs, *left}):

        def show(drawn: int, phase: str = f"counting epoch {epoch}") -> None:
            report(phase, drawn // each, chunks)

        counts = Counts(tracing.end, epoch, show)
        _count_epoch(tracing, counts)
        if epoch in tracing.epochs:
            found.append(audit_of(counts))
        for branch in branches:
            _count_branch(branch, counts)
    return found


def _count_epoch(tracing: Tracing, counts: Counts) -> None:
    gaps: list[tuple[int, int]] = []
    for section in tracing.sections if counts.total else ():
        if counts.epoch > section.last_epoch:
            continue
        _count_section(tracing, section, counts)
        for number, part in enumerate(section.course.parts):
            if section.course.until(number).epoch(counts.total) <= counts.epoch:
                gaps += part.skip
    for start, stop in gaps:
        counts.leave_out(start, stop)


def _span_of(course: Course, epoch: int, total: int) -> tuple[int, int] | None:
    """Returns the positions of the current part in an epoch, drawn or not; None if it begins behind it."""
    begin = course.begin(total)
    later = epoch - begin.segment.epoch
    if later < 0:
        return None
    start = begin.length + (later - 1) * begin.full
    return (start, start + begin.full) if later else (0, begin.length)


def _count_section(tracing: Tracing, section: UnbrokenParts, counts: Counts) -> None:
    total, current = counts.total, tracing.is_current(section, counts.epoch)
    ends: tuple[Course, int, int] | None = None
    for number in range(len(section.course.parts)):
        course = section.course.until(number)
        span = _span_of(course, counts.epoch, total)
        if span is None:
            continue
        start, stop = span
        drawn = min(stop, course.current.draws)
        if start > drawn or (start == drawn and start):
            continue
        counts.mark(course, start, drawn, TRAINED if course.current.trained else SKIPPED)
        ends = course, drawn, stop
    if ends is None:
        return
    course, drawn, stop = ends
    if drawn < stop and not current:
        # Another epoch was begun before this one was over: what is left of it is nobody's.
        return
    if current and len(course.parts) == len(section.course.parts):
        counts.mark(course, drawn, stop, TO_COME)
    own = course if counts.epoch == course.epoch(total) else course.in_epoch(counts.epoch)
    if not own.leftover(total):
        return
    # A course of one lane draws what a part leaves over at the end of the epoch.
    now = own.current
    ended = Part(own.dp, own.batch_size, own.epoch_length(total), now.epoch, skip=now.skip)
    rest = Course(own.rules, [*own.parts[:-1], ended, Part(1)])
    if rest.epoch(total) == counts.epoch:
        # Of a stream that has not ended the end is still open, so nothing is left over yet.
        kind = TO_COME if current and tracing.total is None else LEFT_OVER
        counts.mark(rest, 0, rest.epoch_length(total), kind)


def audit_of(counts: Counts) -> EpochAudit:
    """Returns what was counted of an epoch."""

    def found(which: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], _Mask]) -> Ranges:
        return ranges_where(counts.total, lambda a, b: which(counts.trained[a:b], counts.kinds[a:b]))

    return EpochAudit(
        epoch=counts.epoch,
        samples=counts.total,
        trained=int(np.count_nonzero(counts.trained)),
        to_come=found(lambda trained, kinds: (kinds == TO_COME) & (trained == 0)),
        left_over=found(lambda trained, kinds: (kinds == LEFT_OVER) & (trained == 0)),
        skipped=found(lambda trained, kinds: ((kinds == SKIPPED) | (kinds == LEFT_OUT)) & (trained == 0)),
        twice=found(lambda trained, kinds: trained > 1),
        again=found(lambda trained, kinds: (trained > 0) & (kinds != 0) & (kinds != LEFT_OUT)),
        missing=found(lambda trained, kinds: (kinds == 0) & (trained == 0)),
        whole=counts.is_whole(),
    )


def _count_branch(branch: AuditedState, counts: Counts) -> None:
    marks: _Mask | None = None
    assert branch.tracing is not None
    for number, shared in enumerate(branch.shared):
        course = branch.tracing.course.until(number)
        if not course.current.trained or (span := _span_of(course, counts.epoch, counts.total)) is None:
            continue
        start, stop = max(shared, span[0]), min(course.current.draws, span[1])
        for samples, _ in _draws_of(course, start, stop, counts.total):
            marks = np.zeros(counts.total, dtype=np.bool_) if marks is None else marks
            marks[samples] = True
            branch.trained = (branch.trained or 0) + len(samples)
    if (found := marks) is not None:
        again = ranges_where(counts.total, lambda a, b: found[a:b] & (counts.trained[a:b] > 0))
        if again.samples:
            branch.again[counts.epoch] = again


class Counts:
    """Draws of one epoch over the samples [0, total); `report` is told how many are counted."""

    def __init__(self, total: int, epoch: int, report: Callable[[int], None] = lambda drawn: None) -> None:
        self.total, self.epoch = total, epoch
        self.trained = np.zeros(total, dtype=np.uint8)  # how often each sample was trained
        self.kinds = np.zeros(total, dtype=np.uint8)  # why it was not; 0 where nothing is known
        self.impossible = 0  # draws that the arithmetic puts into another epoch than it should, or past the end
        self._drawn = self._marked = 0
        self._report = report

    def mark(self, course: Course, start: int, stop: int, kind: int) -> None:
        """Counts what a course draws at positions [start, stop) of each lane: as trained, or why it is not."""
        for samples, epochs in _draws_of(course, start, stop, self.total):
            wrong = (epochs != self.epoch) | (samples < 0) | (samples >= self.total)
            bad = int(np.count_nonzero(wrong))
            self.impossible += bad
            self.add(samples[~wrong] if bad else samples, kind)

    def add(self, samples: npt.NDArray[np.int64], kind: int) -> None:
        """Counts samples that were trained, or why they were not."""
        if kind == TRAINED:
            np.add.at(self.trained, samples, _ONE)
            self._drawn += len(samples)
        else:
            self.kinds[samples] = kind
            self._marked += len(samples)
        self._report(self._drawn + self._marked)

    def leave_out(self, start: int, stop: int) -> None:
        """Marks those of a range as left out on purpose for which nothing else is known."""
        for first, last in _blocks(start, min(stop, self.total)):
            kinds = self.kinds[first:last]
            unknown = (kinds == 0) & (self.trained[first:last] == 0)
            kinds[unknown] = LEFT_OUT
            self._marked += int(np.count_nonzero(unknown))

    def is_whole(self) -> bool:
        """Whether the array holds every draw, and no draw was marked twice: then what it says is all."""
        counted, marked = int(self.trained.sum(dtype=np.int64)), int(np.count_nonzero(self.kinds))
        return (counted, marked, self.impossible) == (self._drawn, self._marked, 0)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of samples that are looked at together."""
    return ((first, min(first + _LOOKED_AT, stop)) for first in range(start, stop, _LOOKED_AT))


def _draws_of(
    course: Course, start: int, stop: int, total: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yields what a course draws at positions [start, stop) of each lane, in blocks: samples and their epochs."""
    if start >= stop:
        return
    # Whole windows where that is possible: the permutation of one that is cut would be made twice.
    long = min(stop - start, _BLOCK)
    lanes = max(1, _BLOCK // long)
    for lane in range(0, course.dp, lanes):
        numbers = np.arange(lane, min(lane + lanes, course.dp))[:, None]
        for first in range(start, stop, long):
            epochs, samples = course.draws(numbers, np.arange(first, min(first + long, stop)), total)
            yield samples.ravel(), epochs.ravel()


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
    """Returns what a state is to the audited one; of each the epochs are given of which it has drawn anything."""
    if state == head:
        return "audited"
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
        if _kind(own) != _kind(its):
            break
        shared[number] = min(own.draws, its.draws)
        if own.draws != its.draws:
            break
    return tuple(shared)


def _kind(part: Part) -> tuple[Any, ...]:
    """Returns what decides the order of a part; an epoch that it begins or not is another one."""
    return part.dp, part.batch_size, part.epoch, part.trained, part.skip
