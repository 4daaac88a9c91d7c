"""Audit: proves by counting that a run has trained each sample once an epoch, or names those for which that is not so.

The course of the newest state is counted, an epoch at a time. Each sample must turn out to be trained once, or to be
still to come, left over at the epoch's end, or skipped on purpose. What branches that were given up have trained is
told apart: it is not in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lazyshard.inspection.auditing_counts import (
    LEFT_OUT,
    LEFT_OVER,
    SKIPPED,
    TO_COME,
    Counts,
    Ranges,
    draws_of,
    ranges_where,
)
from lazyshard.inspection.auditing_lineage import Span
from lazyshard.inspection.tracing import Tracing
from lazyshard.inspection.tracing_stretches import Stretch
from lazyshard.plan import Course, Part


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """What became of the samples of an epoch. Each is in one of these, unless something is wrong.

    Attributes:
        epoch: from 0.
        samples: how many there are: of a stream that has not ended, those published so far.
        trained: trained at least once.
        to_come: drawn by nobody yet.
        left_over: left over at the epoch's end.
        skipped: skipped on purpose.
        twice: trained more than once.
        again: trained, and drawn once more: to come again, skipped or left over.
        missing: in none of these: passed over although they should not be, or cut short by another epoch's begin.
        whole: whether the count is sound: it holds every draw, none is past the end or in another epoch.
    """

    epoch: int
    samples: int
    trained: int
    to_come: Ranges
    left_over: Ranges
    skipped: Ranges
    twice: Ranges
    again: Ranges
    missing: Ranges
    whole: bool

    @property
    def proven(self) -> bool:
        """Whether no sample was trained twice or passed over."""
        return self.whole and not (self.twice.samples or self.again.samples or self.missing.samples)


class Branch(NamedTuple):
    """A branch that was given up: what it has drawn behind the fork.

    Attributes:
        tracing: the run as its state tells it.
        beyond: the positions.
    """

    tracing: Tracing
    beyond: tuple[Span, ...]


@dataclass(slots=True)
class BranchAudit:
    """What a branch trained behind the fork, which is not in the model that goes on.

    Attributes:
        trained: how many samples, over all epochs.
        again: by epoch, those among them that the course that is audited has trained too, in the same epoch.
    """

    trained: int = 0
    again: dict[int, Ranges] = field(default_factory=dict)


def count_epochs(
    tracing: Tracing,
    branches: Sequence[Branch] = (),
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> tuple[list[EpochAudit], list[BranchAudit]]:
    """Counts every draw of a run.

    Args:
        tracing: the run.
        branches: those that have left its course.
        report: is told a phase, how many chunks of it are done, and how many there are.
    """
    found: list[EpochAudit] = []
    left = [BranchAudit() for _ in branches]
    epochs = sorted(
        {*tracing.epochs} | {epoch for branch in branches for epoch in branch.tracing.epochs if branch.beyond}
    )
    each = tracing.facts.samples_per_chunk
    chunks = -(-end_of(tracing) // each)
    for epoch in epochs:

        def show(drawn: int, phase: str = f"counting epoch {epoch}") -> None:
            report(phase, drawn // each, chunks)

        counts = count_epoch(tracing, epoch, show)
        if epoch in tracing.epochs:
            found.append(_audit(counts))
        for branch, audit in zip(branches, left, strict=True):
            _count_branch(branch, epoch, counts, audit)
    return found, left


def count_epoch(tracing: Tracing, epoch: int, report: Callable[[int], None] = lambda drawn: None) -> Counts:
    """Counts the draws of one epoch; `report` is told how many are counted."""
    total = end_of(tracing)
    counts = Counts(total, epoch, report)
    gaps: list[tuple[int, int]] = []
    if not total:
        return counts
    for number, stretch in enumerate(tracing.stretches):
        last = number == len(tracing.stretches) - 1
        _count_stretch(tracing, stretch, counts, current=last and epoch == stretch.last_epoch)
        for part in range(len(stretch.course.parts)):
            course = stretch.course.until(part)
            if course.epoch(total) <= epoch <= stretch.last_epoch:
                gaps += course.parts[part].skip
    for start, stop in gaps:
        counts.leave_out(start, stop)
    return counts


def end_of(tracing: Tracing) -> int:
    """Returns the end of the samples that are counted: of a stream that has not ended, what is published.

    As if it ended there: what is drawn already is the same whatever follows.
    """
    if tracing.total is not None:
        return tracing.total
    limit = tracing.state.max_total_samples
    return tracing.facts.samples if limit is None else min(tracing.facts.samples, limit)


def span_of(course: Course, epoch: int, total: int) -> tuple[int, int] | None:
    """Returns the positions of the current part that lie in an epoch, drawn or not; None if it begins behind it."""
    first = course.epoch(total)
    if epoch < first:
        return None
    length, full = course.epoch_length(total), course.full_epoch_length(total)
    if epoch == first:
        return 0, length
    start = length + (epoch - first - 1) * full
    return start, start + full


def _count_stretch(tracing: Tracing, stretch: Stretch, counts: Counts, current: bool) -> None:
    total = counts.total
    if counts.epoch > stretch.last_epoch:
        return
    ends: tuple[Course, int] | None = None
    for number in range(len(stretch.course.parts)):
        course = stretch.course.until(number)
        span = span_of(course, counts.epoch, total)
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
    is_last = len(course.parts) == len(stretch.course.parts)
    if drawn < stop and not current:
        # Another epoch was begun before this one was over: what is left of it is nobody's.
        return
    if current and is_last:
        counts.mark(course, drawn, stop, TO_COME)
    rest = _rest(course, counts.epoch, total)
    if rest is not None:
        # Of a stream that has not ended the end is still open, so nothing is left over yet.
        kind = TO_COME if current and tracing.total is None else LEFT_OVER
        counts.mark(rest, 0, rest.epoch_length(total), kind)


def _rest(course: Course, epoch: int, total: int) -> Course | None:
    """Returns a course of one lane that draws what a part leaves over at the end of an epoch; None if it is nothing."""
    own = course if epoch == course.epoch(total) else course.in_epoch(epoch)
    length = own.epoch_length(total)
    if not own.leftover(total):
        return None
    ended = [*own.parts[:-1], Part(own.dp, own.batch_size, length, own.current.epoch, skip=own.current.skip)]
    rest = Course(own.rules, [*ended, Part(1)])
    return rest if rest.epoch(total) == epoch else None


def _audit(counts: Counts) -> EpochAudit:
    def of(kind: int) -> Ranges:
        return counts.ranges(lambda trained, kinds: (kinds == kind) & (trained == 0))

    again = counts.ranges(lambda trained, kinds: (trained > 0) & (kinds != 0) & (kinds != LEFT_OUT))
    skipped = counts.ranges(lambda trained, kinds: ((kinds == SKIPPED) | (kinds == LEFT_OUT)) & (trained == 0))
    return EpochAudit(
        counts.epoch,
        counts.total,
        counts.ranges(lambda trained, kinds: trained > 0).samples,
        of(TO_COME),
        of(LEFT_OVER),
        skipped,
        counts.ranges(lambda trained, kinds: trained > 1),
        again,
        counts.ranges(lambda trained, kinds: (trained == 0) & (kinds == 0)),
        counts.is_whole(),
    )


def _count_branch(branch: Branch, epoch: int, counts: Counts, audit: BranchAudit) -> None:
    tracing, total = branch.tracing, counts.total
    marks = None
    for part, start, stop in branch.beyond:
        course = tracing.course.until(part)
        if not course.current.trained or (span := span_of(course, epoch, total)) is None:
            continue
        first, last = max(start, span[0]), min(stop, span[1])
        for samples, _ in draws_of(course, first, last, total):
            marks = np.zeros(total, dtype=np.bool_) if marks is None else marks
            marks[samples] = True
            audit.trained += len(samples)
    if marks is None:
        return
    found = marks
    again = ranges_where(total, lambda a, b: found[a:b] & (counts.trained[a:b] > 0))
    if again.samples:
        audit.again[epoch] = again
