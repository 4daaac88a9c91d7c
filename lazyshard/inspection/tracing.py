"""Tracing: what each rank trained at a step, and what became of a sample, by arithmetic from the state of a run.

No log of samples is kept anywhere: the state, and how far the stream is published, decide it all. Rows are not read
here, so that it makes no difference whether they are still there. Steps are counted from 0 here, as in the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from lazyshard.errors import StateMismatch
from lazyshard.inspection.tracing_states import MemberSteps, SavedState
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps
from lazyshard.plan.steps import PartSteps, StepPlace, Steps
from lazyshard.stream.run_state import check_fits, course_of
from lazyshard.stream.stream import Stream

# What became of a sample in an epoch: skipped on purpose; left out with its stream, which is blended no more; left over
# for want of a whole batch; cut short where another epoch was begun before this one was over; beyond the end that
# `max_total_samples` sets
Became = Literal[
    "trained", "skipped", "to come", "left out", "left over", "cut short", "not published", "beyond the end"
]

# The work grows with their square: a run that was resumed with other ranks so often takes some 5 s
MAX_PARTS: Final = 1000

MAX_EPOCHS: Final = 100_000
# More than any run has. What a file says is not walked through, nor held in memory, without a look at how much.
MAX_STEP_DRAWS: Final = 100_000_000


class TracedDraw(NamedTuple):
    """One draw of a rank, at a position that is counted from the part's beginning.

    `step` is None where it is not known, or was skipped; `became` is "trained", "skipped" or "to come".
    """

    step: int | None
    part: int
    rank: int
    position: int
    epoch: int
    sample: int
    became: Became


class Fate(NamedTuple):
    """What became of a sample in one epoch.

    `drawn` is None also where it is not certain yet; `part` is the one from which on it was left out on purpose.
    """

    sample: int
    epoch: int
    became: Became
    drawn: TracedDraw | None = None
    part: int | None = None


class Tracing:
    """A run, as one of its states tells it; `where` names the stream's directory in messages.

    The samples to draw are [0, total), None as long as that is open; `end` is the same as if a stream that has not
    ended did so here: what is drawn stays so in any case. `sections` are the parts, cut where an epoch was begun anew,
    `epochs` those of which anything was drawn. Raises StateMismatch: of another stream, or ahead of what is published.
    """

    def __init__(self, saved: SavedState, facts: StreamFacts, where: str) -> None:
        self.state = state = saved.state
        self.facts = facts
        self._where = where
        self.left_out = saved.member is not None and not saved.member.blended  # of the blend that the run is over
        if len(state.parts) > MAX_PARTS:
            raise self._impossible(saved, f"it has {len(state.parts)} parts, and at most {MAX_PARTS} are traced")
        here = replace(state, stream_id=facts.stream_id, samples_per_chunk=facts.samples_per_chunk)
        check_fits(state, here, where)
        self.total = _total_of(facts, state.max_total_samples)
        # As long as it is open, fewer are published than `max_total_samples` allows.
        self.end = facts.samples if self.total is None else self.total
        self.course = course_of(state)
        self._check_published(saved)
        try:
            self.sections = tuple(_sections_of(self.course, self.total))
            first = min(section.first_epoch for section in self.sections)
            self.epochs = range(first, max(section.last_epoch for section in self.sections) + 1)
            self.steps = self._steps(saved)
        except (ValueError, IndexError) as cause:
            raise self._impossible(saved, str(cause)) from cause
        if (count := self.epochs.stop - first) > MAX_EPOCHS:
            raise self._impossible(saved, f"it has trained {count} epochs, and at most {MAX_EPOCHS} are traced")

    def place(self, step: int) -> StepPlace:
        """Returns what a step took, or will take if the run goes on as it is.

        Raises StateMismatch: the state does not know it, or it is not certain before more is published.
        """
        place = self.steps.place(step)
        if place is None:
            unknown = self.steps.unknown
            why = "it begins after that step"
            if unknown is not None:
                why = f"part {unknown} of {len(self.state.parts)} does not say how many samples a step had"
            raise StateMismatch(
                f"the state does not tell what step {step + 1} took: {why}. Ask by --sample, or take the state of a "
                f"checkpoint that knows its steps: Order(micro_batches_per_step=...) writes such ones",
                directory=self._where,
                field="draws_per_step",
            )
        # Of a blend a step may take nothing of this stream.
        if self.total is None and place.start < place.stop:
            needed = self.course.until(place.part).needed(place.stop - 1)
            if needed > self.facts.samples:
                raise StateMismatch(
                    f"{self._where}: what step {step + 1} takes is certain once {needed:,} samples are published, or "
                    f"the stream has ended; {self.facts.samples} are published",
                    directory=self._where,
                    expected=str(needed),
                    actual=str(self.facts.samples),
                )
        return place

    def at_step(self, step: int, rank: int | None = None) -> Iterator[TracedDraw]:
        """Yields what the ranks of a step draw, rank by rank, in the order of positions; of one rank if it is given."""
        place = self.place(step)
        course = self.course.until(place.part)
        ranks = range(course.dp) if rank is None else range(rank, rank + 1)
        if (draws := len(ranks) * (place.stop - place.start)) > MAX_STEP_DRAWS:
            raise self._mismatch(
                f"{self._where}: by the state step {step + 1} has {draws} draws; at most {MAX_STEP_DRAWS} are traced"
            )
        positions = np.arange(place.start, place.stop)
        epochs, samples = course.draws(np.array(ranks)[:, None], positions, self.total)
        draws = self.state.parts[place.part].draws
        for at, number in enumerate(ranks):
            rows = zip(positions.tolist(), epochs[at].tolist(), samples[at].tolist(), strict=True)
            for position, epoch, sample in rows:
                became: Became = "trained" if position < draws else "to come"
                yield TracedDraw(step, place.part, number, position, epoch, sample, became)

    def fates(self, sample: int) -> Iterator[Fate]:
        """Yields what became of a sample in each epoch that was begun; more than once where one was begun anew."""
        if self.total is not None and sample >= self.total:
            yield Fate(sample, self.epochs[-1], "not published" if sample >= self.facts.samples else "beyond the end")
            return
        for section in self.sections:
            for epoch in range(section.first_epoch, section.last_epoch + 1):
                yield self._fate(sample, epoch, section)

    def is_current(self, section: UnbrokenParts, epoch: int) -> bool:
        """Whether the run stands in this epoch."""
        return section is self.sections[-1] and epoch == section.last_epoch

    def fewer_than_step(self, fate: Fate) -> int | None:
        """Returns the samples of the step in which one is to come, where its epoch has too few left for it; else None.

        Such a step takes the first of the next epoch too, unless the run stops where the epoch ends.
        """
        drawn = fate.drawn
        if fate.became != "to come" or drawn is None or drawn.step is None or self.total is None:
            return None
        place = None if isinstance(self.steps, MemberSteps) else self.steps.place(drawn.step)
        if place is None or place.stop <= self.course.until(drawn.part).epoch_stop(drawn.position + 1, self.total):
            return None
        part = self.state.parts[drawn.part]
        return part.dp * part.draws_per_step

    def _fate(self, sample: int, epoch: int, section: UnbrokenParts) -> Fate:
        course, current = section.course, self.is_current(section, epoch)
        place = course.place(sample, self.total, epoch)
        if place is not None:
            part = section.first + place.part
            of = self.state.parts[part]
            drawn = TracedDraw(
                self.steps.step_of(part, place.position), part, place.lane, place.position, epoch, sample, "to come"
            )
            if place.position < of.draws:
                became: Became = "trained" if of.trained else "skipped"
                return Fate(sample, epoch, became, drawn._replace(became=became))
            if not current:
                return Fate(sample, epoch, "cut short")
            if sample >= self.facts.samples:
                return Fate(sample, epoch, "not published")
            if self.left_out:
                return Fate(sample, epoch, "left out")
            certain = self.total is not None or place.position < course.drawable(self.facts.samples)
            return Fate(sample, epoch, "to come", drawn if certain else None)
        for number, own in enumerate(course.parts):
            # What a later part leaves out, it leaves out of the epochs that it is in.
            if sample in Gaps(own.skip) and course.until(number).epoch(self.total) <= epoch:
                left_out = next(n for n, part in enumerate(self.state.parts) if sample in Gaps(part.skip))
                return Fate(sample, epoch, "skipped", part=left_out)
        over = current or epoch < section.last_epoch or _is_over(course, self.total)
        return Fate(sample, epoch, "left over" if over else "cut short")

    def _steps(self, saved: SavedState) -> Steps | MemberSteps:
        """Returns the steps; those of a trainer that ends them with epochs where only these fit what the file says."""
        if saved.member is not None:
            return MemberSteps(saved.member)
        even = Steps([self._part_steps(number, None) for number in range(len(self.state.parts))])
        if self.total is None or _agrees(even, saved.step):
            return even
        cut = Steps([self._part_steps(number, self.total) for number in range(len(self.state.parts))])
        return cut if _agrees(cut, saved.step) else even

    def _part_steps(self, number: int, cut: int | None) -> PartSteps:
        part, lengths = self.state.parts[number], None
        if cut is not None:
            course = self.course.until(number)
            lengths = course.epoch_length(cut), course.full_epoch_length(cut)
        return PartSteps(part.first_step, part.draws, part.draws_per_step, part.trained, lengths)

    def _check_published(self, saved: SavedState) -> None:
        if self.total is not None:
            return
        for number, part in enumerate(self.course.parts):
            needed = self.course.until(number).needed(part.draws - 1) if part.draws else 0
            if needed > self.facts.samples:
                raise self._mismatch(
                    f"{saved.file}: the state has drawn what needs {needed} samples, but {self.facts.samples} are "
                    f"published in {self._where}: it is ahead of the stream, which may be an older copy"
                )

    def _impossible(self, saved: SavedState, why: str) -> StateMismatch:
        return self._mismatch(f"{saved.file}: the state cannot be of this stream: {why}")

    def _mismatch(self, message: str) -> StateMismatch:
        return StateMismatch(message, directory=self._where)


def _agrees(steps: Steps, trained: int | None) -> bool:
    """Whether steps follow on each other from part to part, and lead to the number that the file says."""
    counted = trained is None or steps.unknown is not None or steps.trained == trained
    return counted and not steps.breaks() and not steps.ragged()


class UnbrokenParts(NamedTuple):
    """Parts of a run that go on from each other: from the number `first` on, alone in `course`, over these epochs.

    The first of them begins an epoch; `last_epoch` is that of what was drawn last.
    """

    first: int
    course: Course
    first_epoch: int
    last_epoch: int


def _sections_of(course: Course, total: int | None) -> Iterator[UnbrokenParts]:
    """Yields the sections of a course; what was left out before one is left out of it too."""
    parts = course.parts
    starts = [number for number, part in enumerate(parts) if not number or part.epoch is not None]
    gaps: Gaps = Gaps()
    for start, stop in zip(starts, [*starts[1:], len(parts)], strict=True):
        own = parts[start:stop]
        alone = Course(course.rules, [replace(own[0], skip=gaps.joined(own[0].skip).ranges), *own[1:]])
        draws = alone.current.draws
        last = alone.epoch(total) if not draws or total is None else alone.draw(0, draws - 1, total).epoch
        yield UnbrokenParts(start, alone, alone.until(0).epoch(total), last)
        gaps = gaps.joined(one for part in own for one in part.skip)


def _is_over(course: Course, total: int | None) -> bool:
    """Whether a section has drawn its last epoch to the end."""
    if total is None:
        return False
    length, full, draws = course.epoch_length(total), course.full_epoch_length(total), course.current.draws
    return draws == length or (draws > length and full > 0 and (draws - length) % full == 0)


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What a stream's directory says at one moment; the chunks of the half-open range [0, retired) are deleted."""

    stream_id: str | None
    samples_per_chunk: int
    chunks: int
    samples: int
    ended: bool
    retired: int = 0


def facts_of(stream: Stream) -> StreamFacts:
    """Looks what is published now. Raises as `Stream.published` and `Stream.retired` do."""
    now = stream.published()
    return StreamFacts(stream.stream_id, stream.samples_per_chunk, now.chunks, now.samples, now.ended, stream.retired())


def _total_of(facts: StreamFacts, max_total_samples: int | None) -> int | None:
    """Returns the end of the samples to draw, None as long as it is open."""
    if facts.ended:
        return facts.samples if max_total_samples is None else min(facts.samples, max_total_samples)
    if max_total_samples is not None and facts.samples >= max_total_samples:
        return max_total_samples
    return None
