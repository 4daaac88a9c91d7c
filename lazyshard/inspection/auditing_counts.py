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
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lazyshard.format.state import RunState
from lazyshard.inspection.tracing import Tracing, UnbrokenParts
from lazyshard.part import Part
from lazyshard.plan.course import Course

_BLOCK: Final = 1 << 19  # Draws that are computed at a time: about 60 MB with all that is made on the way
_LOOKED_AT: Final = 1 << 22  # Samples that are looked at at a time

# Ranges of samples that are kept of each kind; how many samples there are is counted in any case
_MAX_RANGES: Final = 1000

SKIPPED: Final = 1
TO_COME: Final = 2
_LEFT_OVER: Final = 3
LEFT_OUT: Final = 4
_ONE: Final = np.uint8(1)  # Of the array's own type: `np.add.at` is fifty times slower with any other

_Array = npt.NDArray[np.uint8]
_Mask = npt.NDArray[np.bool_]

# What a state is to the one that is audited: itself; earlier on its course; later on the same course; on a branch that
# was given up; of epochs that this one does not tell of; or of no run that this one can be of
_Relation = Literal["head", "on the course", "beyond", "abandoned", "another epoch", "other settings", "other stream"]

_SETTINGS = ("samples_per_chunk", "unit", "window", "seed", "max_total_samples")


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


class Branch(NamedTuple):
    """A branch that was given up: the run as its state tells it, and the positions that it drew behind the fork."""

    tracing: Tracing
    beyond: tuple[Span, ...]


@dataclass(slots=True)
class BranchAudit:
    """How many samples a branch trained behind the fork; by epoch, those that the audited course trained there too."""

    trained: int = 0
    again: dict[int, Ranges] = field(default_factory=dict)


def count_epochs(
    tracing: Tracing,
    branches: Sequence[Branch] = (),
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> tuple[list[EpochAudit], list[BranchAudit]]:
    """Counts every draw of a run and of the branches that have left its course.

    `report` is told a phase, how many chunks of it are done, and how many there are.
    """
    found: list[EpochAudit] = []
    left = [BranchAudit() for _ in branches]
    others = {epoch for branch in branches if branch.beyond for epoch in branch.tracing.epochs}
    each = tracing.facts.samples_per_chunk
    chunks = -(-tracing.end // each)
    for epoch in sorted({*tracing.epochs} | others):

        def show(drawn: int, phase: str = f"counting epoch {epoch}") -> None:
            report(phase, drawn // each, chunks)

        counts = _count_epoch(tracing, epoch, show)
        if epoch in tracing.epochs:
            found.append(_audit(counts))
        for branch, audit in zip(branches, left, strict=True):
            _count_branch(branch, epoch, counts, audit)
    return found, left


def _count_epoch(tracing: Tracing, epoch: int, report: Callable[[int], None]) -> Counts:
    total = tracing.end
    counts = Counts(total, epoch, report)
    gaps: list[tuple[int, int]] = []
    for section in tracing.sections if total else ():
        if epoch > section.last_epoch:
            continue
        _count_section(tracing, section, counts)
        for number, part in enumerate(section.course.parts):
            if section.course.until(number).epoch(total) <= epoch:
                gaps += part.skip
    for start, stop in gaps:
        counts.leave_out(start, stop)
    return counts


def _span_of(course: Course, epoch: int, total: int) -> tuple[int, int] | None:
    """Returns the positions of the current part in an epoch, drawn or not; None if it begins behind it."""
    first = course.epoch(total)
    if epoch < first:
        return None
    length, full = course.epoch_length(total), course.full_epoch_length(total)
    if epoch == first:
        return 0, length
    start = length + (epoch - first - 1) * full
    return start, start + full


def _count_section(tracing: Tracing, section: UnbrokenParts, counts: Counts) -> None:
    total, current = counts.total, tracing.is_current(section, counts.epoch)
    ends: tuple[Course, int] | None = None
    for number in range(len(section.course.parts)):
        course = section.course.until(number)
        span = _span_of(course, counts.epoch, total)
        if span is None:
            continue
        start, stop = span
        drawn = min(stop, course.current.draws)
        if start > drawn or (start == drawn and start):
            continue
        if course.current.trained:
            counts.train(course, start, drawn)
        else:
            counts.mark(course, start, drawn, SKIPPED)
        ends = course, stop
    if ends is None:
        return
    course, stop = ends
    drawn = min(stop, course.current.draws)
    if drawn < stop and not current:
        # Another epoch was begun before this one was over: what is left of it is nobody's.
        return
    if current and len(course.parts) == len(section.course.parts):
        counts.mark(course, drawn, stop, TO_COME)
    rest = _rest(course, counts.epoch, total)
    if rest is not None:
        # Of a stream that has not ended the end is still open, so nothing is left over yet.
        kind = TO_COME if current and tracing.total is None else _LEFT_OVER
        counts.mark(rest, 0, rest.epoch_length(total), kind)


def _rest(course: Course, epoch: int, total: int) -> Course | None:
    """Returns a course of one lane that draws what a part leaves over at the end of an epoch; None if it is nothing."""
    own = course if epoch == course.epoch(total) else course.in_epoch(epoch)
    if not own.leftover(total):
        return None
    now = own.current
    ended = Part(own.dp, own.batch_size, own.epoch_length(total), now.epoch, skip=now.skip)
    rest = Course(own.rules, [*own.parts[:-1], ended, Part(1)])
    return rest if rest.epoch(total) == epoch else None


def _audit(counts: Counts) -> EpochAudit:
    def untrained(kind: int) -> Ranges:
        return counts.ranges(lambda trained, kinds: (kinds == kind) & (trained == 0))

    return EpochAudit(
        epoch=counts.epoch,
        samples=counts.total,
        trained=counts.ranges(lambda trained, kinds: trained > 0).samples,
        to_come=untrained(TO_COME),
        left_over=untrained(_LEFT_OVER),
        skipped=counts.ranges(lambda trained, kinds: ((kinds == SKIPPED) | (kinds == LEFT_OUT)) & (trained == 0)),
        twice=counts.ranges(lambda trained, kinds: trained > 1),
        again=counts.ranges(lambda trained, kinds: (trained > 0) & (kinds != 0) & (kinds != LEFT_OUT)),
        missing=untrained(0),
        whole=counts.is_whole(),
    )


def _count_branch(branch: Branch, epoch: int, counts: Counts, audit: BranchAudit) -> None:
    total = counts.total
    marks: _Mask | None = None
    for part, start, stop in branch.beyond:
        course = branch.tracing.course.until(part)
        if not course.current.trained or (span := _span_of(course, epoch, total)) is None:
            continue
        for samples, _ in _draws_of(course, max(start, span[0]), min(stop, span[1]), total):
            marks = np.zeros(total, dtype=np.bool_) if marks is None else marks
            marks[samples] = True
            audit.trained += len(samples)
    if marks is None:
        return
    found = marks
    again = ranges_where(total, lambda a, b: found[a:b] & (counts.trained[a:b] > 0))
    if again.samples:
        audit.again[epoch] = again


class Counts:
    """Draws of one epoch over the samples [0, total); `report` is told how many are counted."""

    def __init__(self, total: int, epoch: int, report: Callable[[int], None] = lambda drawn: None) -> None:
        self.total = total
        self.epoch = epoch
        self.trained: _Array = np.zeros(total, dtype=np.uint8)  # how often each sample was trained
        self.kinds: _Array = np.zeros(total, dtype=np.uint8)  # why it was not; 0 where nothing is known
        self.impossible = 0  # draws that the arithmetic puts into another epoch than it should, or past the end
        self._drawn = self._marked = 0
        self._report = report

    def train(self, course: Course, start: int, stop: int) -> None:
        """Counts positions [start, stop) of each lane of a course as trained."""
        for samples in self._draws(course, start, stop):
            np.add.at(self.trained, samples, _ONE)
            self._drawn += len(samples)

    def mark(self, course: Course, start: int, stop: int, kind: int) -> None:
        """Marks what a course draws at positions [start, stop) of each lane as not trained, and why."""
        for samples in self._draws(course, start, stop):
            self.kinds[samples] = kind
            self._marked += len(samples)

    def leave_out(self, start: int, stop: int) -> None:
        """Marks those of a range as left out on purpose for which nothing else is known."""
        for first, last in _blocks(min(start, self.total), min(stop, self.total)):
            kinds = self.kinds[first:last]
            kinds[(kinds == 0) & (self.trained[first:last] == 0)] = LEFT_OUT

    def is_whole(self) -> bool:
        """Whether the array holds every draw, and no draw was marked twice: then what it says is all."""
        counted = marked = 0
        for first, last in _blocks(0, self.total):
            kinds = self.kinds[first:last]
            marked += int(np.count_nonzero(kinds)) - int(np.count_nonzero(kinds == LEFT_OUT))
            counted += int(self.trained[first:last].sum(dtype=np.int64))
        return counted == self._drawn and marked == self._marked and not self.impossible

    def ranges(self, which: Callable[[_Array, _Array], _Mask]) -> Ranges:
        """Returns the samples that a function of `trained` and `kinds` picks."""
        return ranges_where(self.total, lambda a, b: which(self.trained[a:b], self.kinds[a:b]))

    def _draws(self, course: Course, start: int, stop: int) -> Iterator[npt.NDArray[np.int64]]:
        for samples, epochs in _draws_of(course, start, stop, self.total):
            wrong = (epochs != self.epoch) | (samples < 0) | (samples >= self.total)
            bad = int(np.count_nonzero(wrong))
            self.impossible += bad
            yield samples[~wrong] if bad else samples
            self._report(self._drawn + self._marked)


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
    samples = 0
    found: list[tuple[int, int]] = []
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


class Fork(NamedTuple):
    """Where two courses part: after `draws` positions of each lane of a part."""

    part: int
    draws: int


class Span(NamedTuple):
    """Positions of the half-open range [start, stop) of each lane of a part."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Related:
    """What a state is to the one that is audited."""

    relation: _Relation  # see `_Relation`
    fork: Fork | None = None  # where it has left the course; None where it has nothing to do with it
    beyond: tuple[Span, ...] = ()  # what it drew behind the fork
    differs: tuple[str, ...] = ()  # the settings in which it differs


def relate(state: RunState, head: RunState, epochs: range, head_epochs: range) -> Related:
    """Returns what a state is to the audited one; of each the epochs are given of which it has drawn anything."""
    if state == head:
        return Related("head")
    if state.stream_id != head.stream_id:
        return Related("other stream")
    differs = tuple(name for name in _SETTINGS if getattr(state, name) != getattr(head, name))
    if differs:
        return Related("other settings", differs=differs)
    fork = fork_of(state, head)
    beyond = spans_behind(state, fork)
    if not beyond:
        return Related("on the course", fork)
    if not spans_behind(head, fork):
        return Related("beyond", fork, beyond)
    if fork == Fork(0, 0) and (epochs.stop <= head_epochs.start or head_epochs.stop <= epochs.start):
        return Related("another epoch", fork, beyond)
    return Related("abandoned", fork, beyond)


def fork_of(one: RunState, other: RunState) -> Fork:
    """Returns up to where two states have drawn the same: the end of the shorter one if they never part."""
    a, b = _drawn(one), _drawn(other)
    for number, (left, right) in enumerate(zip(a, b, strict=False)):
        if _kind(left) != _kind(right):
            return Fork(number, 0)
        if left.draws != right.draws:
            return Fork(number, min(left.draws, right.draws))
    shorter = min(a, b, key=len)
    return Fork(len(shorter) - 1, shorter[-1].draws) if shorter else Fork(0, 0)


def spans_behind(state: RunState, fork: Fork) -> tuple[Span, ...]:
    """Returns what a state has drawn behind a fork."""
    spans = []
    for number, part in enumerate(state.parts):
        start = part.draws if number < fork.part else fork.draws if number == fork.part else 0
        if start < part.draws:
            spans.append(Span(number, start, part.draws))
    return tuple(spans)


def _drawn(state: RunState) -> list[Part]:
    """Returns the parts up to the last one that has drawn anything: one that has not decides nothing yet."""
    stop = max((number + 1 for number, part in enumerate(state.parts) if part.draws), default=0)
    return list(state.parts[:stop])


def _kind(part: Part) -> tuple[Any, ...]:
    """Returns what decides the order of a part; an epoch that it begins or not is another one."""
    return part.dp, part.batch_size, part.epoch, part.trained, part.skip
