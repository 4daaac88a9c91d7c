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
# `max_total_samples` sets. Of a run over sequences: in none of them, for want of tokens or as it has too many; in one
# before those that can be told
Became = Literal[
    "trained", "skipped", "to come", "left out", "left over", "cut short", "not published", "beyond the end",
    "in no sequence", "before",
]  # fmt: skip

# The work grows with their square: a run that was resumed with other ranks so often takes some 5 s
MAX_PARTS: Final = 1000
# More than any run has. What a file says is not walked through, nor held in memory, without a look at how much.
MAX_EPOCHS: Final = 100_000
MAX_STEP_DRAWS: Final = 100_000_000


class Fate(NamedTuple):
    """What became of a sample in one epoch: drawn by a rank, at a position that is counted from the part's beginning.

    `step` is None where it is not known, or was skipped. Where there is no draw, or it is not certain yet, so are
    `rank` and `position`, and `part` is the one from which on the sample was left out on purpose.
    """

    step: int | None
    part: int | None
    rank: int | None
    position: int | None
    epoch: int
    sample: int
    became: Became

    @classmethod
    def undrawn(cls, epoch: int, sample: int, became: Became, part: int | None = None) -> Fate:
        """Returns that of a sample without a draw."""
        return cls(None, part, None, None, epoch, sample, became)


class Tracing:
    """A run, as one of its states tells it; `where` names the stream's directory in messages.

    The samples to draw are [0, total), None as long as that is open; `end` is the same as if a stream that has not
    ended did so here: what is drawn stays so in any case. `sections` are the parts, cut where an epoch was begun anew,
    `epochs` those of which anything was drawn. Raises StateMismatch: of another stream, or ahead of what is published.
    """

    def __init__(self, saved: SavedState, facts: StreamFacts, where: str) -> None:
        self.state = state = saved.state
        self.facts, self._where = facts, where
        self.left_out = saved.member is not None and not saved.member.blended  # of the blend that the run is over
        if len(state.parts) > MAX_PARTS:
            raise self._impossible(saved, f"it has {len(state.parts)} parts, and at most {MAX_PARTS} are traced")
        here = replace(state, stream_id=facts.stream_id, samples_per_chunk=facts.samples_per_chunk)
        check_fits(state, here, where)
        limit = state.max_total_samples
        total = facts.samples if limit is None else min(facts.samples, limit)
        self.total = total if facts.ended or total == limit else None
        self.end = total
        self.course = course_of(state)
        for number, part in enumerate(state.parts if self.total is None else ()):
            needed = self.course.until(number).needed(part.draws - 1) if part.draws else 0
            if needed > facts.samples:
                raise self._mismatch(
                    f"{saved.file}: the state has drawn what needs {needed} samples, but {facts.samples} are "
                    f"published in {where}: it is ahead of the stream, which may be an older copy"
                )
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
        place, unknown = self.steps.place(step), self.steps.unknown
        if place is None:
            why = "it begins after that step"
            if unknown is not None:
                why = f"part {unknown} of {len(self.state.parts)} does not say how many samples a step had"
            raise self._mismatch(
                f"the state does not tell what step {step + 1} took: {why}. Ask by --sample, or take the state of a "
                f"checkpoint that knows its steps: Order(micro_batches_per_step=...) writes such ones",
                field="draws_per_step",
            )
        self._check_certain(step, place)
        return place

    def _check_certain(self, step: int, place: StepPlace) -> None:
        # Of a blend a step may take nothing of this stream.
        if self.total is None and place.start < place.stop:
            needed = self.course.until(place.part).needed(place.stop - 1)
            if needed > self.facts.samples:
                raise self._mismatch(
                    f"{self._where}: what step {step + 1} takes is certain once {needed:,} samples are published, or "
                    f"the stream has ended; {self.facts.samples} are published",
                    expected=str(needed),
                    actual=str(self.facts.samples),
                )

    def at_step(self, step: int, rank: int | None = None) -> Iterator[Fate]:
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
                yield Fate(step, place.part, number, position, epoch, sample, became)

    def fates(self, sample: int) -> Iterator[Fate]:
        """Yields what became of a sample in each epoch that was begun; more than once where one was begun anew."""
        if self.total is not None and sample >= self.total:
            beyond: Became = "not published" if sample >= self.facts.samples else "beyond the end"
            yield Fate.undrawn(self.epochs[-1], sample, beyond)
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
        step, number, steps = fate.step, fate.part, self.steps
        if fate.became != "to come" or step is None or number is None or fate.position is None or self.total is None:
            return None
        place = None if isinstance(steps, MemberSteps) else steps.place(step)
        if place is None or place.stop <= self.course.until(number).epoch_stop(fate.position + 1, self.total):
            return None
        return self.state.parts[number].dp * self.state.parts[number].draws_per_step

    def _fate(self, sample: int, epoch: int, section: UnbrokenParts) -> Fate:
        course, current = section.course, self.is_current(section, epoch)
        place = course.place(sample, self.total, epoch)
        became: Became
        if place is not None:
            part, at = section.first + place.part, place.position
            of = self.state.parts[part]
            if at < of.draws:
                became = "trained" if of.trained else "skipped"
            elif not current:
                return Fate.undrawn(epoch, sample, "cut short")
            elif sample >= self.facts.samples:
                return Fate.undrawn(epoch, sample, "not published")
            elif self.left_out:
                return Fate.undrawn(epoch, sample, "left out")
            elif self.total is not None or at < course.drawable(self.facts.samples):
                became = "to come"
            else:
                return Fate.undrawn(epoch, sample, "to come")
            return Fate(self.steps.step_of(part, at), part, place.lane, at, epoch, sample, became)
        for number, own in enumerate(course.parts):
            # What a later part leaves out, it leaves out of the epochs that it is in.
            if sample in Gaps(own.skip) and course.until(number).epoch(self.total) <= epoch:
                left_out = next(n for n, one in enumerate(self.state.parts) if sample in Gaps(one.skip))
                return Fate.undrawn(epoch, sample, "skipped", left_out)
        # Whether the section has drawn its last epoch to the end, where that is known
        draws = course.current.draws
        whole = self.total is not None and draws == course.epoch_stop(draws, self.total)
        over = current or epoch < section.last_epoch or whole
        return Fate.undrawn(epoch, sample, "left over" if over else "cut short")

    def _steps(self, saved: SavedState) -> Steps | MemberSteps:
        """Returns the steps; those of a trainer that ends them with epochs where only these fit what the file says."""
        if saved.member is not None:
            return MemberSteps(saved.member)
        every = [PartSteps(one.first_step, one.draws, one.draws_per_step, one.trained) for one in self.state.parts]
        even, total = Steps(every), self.total
        if total is None or _agrees(even, saved.step):
            return even
        begins = [self.course.until(number).begin(total) for number in range(len(every))]
        cut = Steps([replace(one, cut=(at.length, at.full)) for one, at in zip(every, begins, strict=True)])
        return cut if _agrees(cut, saved.step) else even

    def _impossible(self, saved: SavedState, why: str) -> StateMismatch:
        return self._mismatch(f"{saved.file}: the state cannot be of this stream: {why}")

    def _mismatch(self, message: str, **fields: str) -> StateMismatch:
        return StateMismatch(message, directory=self._where, **fields)


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
    parts, gaps = course.parts, Gaps()
    starts = [number for number, part in enumerate(parts) if not number or part.epoch is not None]
    for start, stop in zip(starts, [*starts[1:], len(parts)], strict=True):
        own = parts[start:stop]
        alone = Course(course.rules, [replace(own[0], skip=gaps.joined(own[0].skip).ranges), *own[1:]])
        draws = alone.current.draws
        last = alone.epoch(total) if not draws or total is None else alone.draw(0, draws - 1, total).epoch
        yield UnbrokenParts(start, alone, alone.until(0).epoch(total), last)
        gaps = gaps.joined(one for part in own for one in part.skip)


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
