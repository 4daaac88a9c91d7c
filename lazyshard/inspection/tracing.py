"""Tracing: what each rank trained in a step, and what became of a sample, computed from the state of a run.

No log of samples is needed: the state, and how much of the stream is published, determine everything. Rows are not
read, so they may be deleted. Steps are counted from 0 here, as in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import numpy as np

from lazyshard.errors import StateMismatch
from lazyshard.inspection.tracing_states import MemberSteps, PartSteps, SavedState, StepPlace, Steps
from lazyshard.part import Int64Array, Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps, split_table
from lazyshard.stream.run_parts import check_fits, course_of
from lazyshard.stream.stream import Stream

Report = Callable[[str, int, int], None]  # called with a phase, the amount done, and the total

# What became of a sample in an epoch: "skipped": on purpose; "left out": with its stream, which is no longer blended;
# "left over": for want of a whole batch; "cut short": another epoch was begun before this one was over; "beyond the
# end": of `max_total_samples`. In a run over sequences, "in no sequence": it has no tokens or too many; "before": in a
# sequence that cannot be made again
Became = Literal[
    "trained", "skipped", "to come", "left out", "left over", "cut short", "not published", "beyond the end",
    "in no sequence", "before", "other split",
]  # fmt: skip

# The work grows with the square: a run that was resumed with other ranks this often takes some 5 s
MAX_PARTS: Final = 1000
# More than any run has. Limits on the numbers in a file, before they are looped over or allocated
MAX_EPOCHS: Final = 100_000
MAX_STEP_DRAWS: Final = 100_000_000
_BLOCK: Final = 1 << 19  # draws computed at a time: about 60 MB with all intermediate results


class Fate(NamedTuple):
    """What became of a sample in one epoch; `rank` and `position` are None unless its draw is certain."""

    epoch: int
    sample: int
    became: Became
    part: int | None = None  # without a draw, the part from which on the sample was skipped
    step: int | None = None  # None if unknown, or if it was skipped
    rank: int | None = None
    position: int | None = None  # from the beginning of the part


class Stretch(NamedTuple):
    """Positions [start, stop) of every lane of a course, all in one epoch, and what becomes of their draws."""

    part: int
    course: Course
    start: int
    stop: int
    became: Became

    def blocks(self, total: int) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yields the draws in blocks: samples and their epochs."""
        # In whole windows if possible: the permutation of a window that is cut would be computed twice.
        long = max(1, min(self.stop - self.start, _BLOCK))
        lanes = max(1, _BLOCK // long)
        for lane in range(0, self.course.dp, lanes):
            numbers = np.arange(lane, min(lane + lanes, self.course.dp))[:, None]
            for first in range(self.start, self.stop, long):
                epochs, samples = self.course.draws(numbers, np.arange(first, min(first + long, self.stop)), total)
                yield samples.ravel(), epochs.ravel()


class UnbrokenParts(NamedTuple):
    """Parts from number `first` on, alone in `course`; only the first of them restarts an epoch."""

    first: int
    course: Course
    first_epoch: int
    last_epoch: int


class Tracing:
    """A run, derived from one of its states; `where` names the stream's directory in messages.

    The samples to draw are [0, total), None while that is open. `end` is the same as if a stream that has not ended
    ended here: draws so far are the same in any case. `sections` are the parts, cut where an epoch was restarted;
    `epochs` are those with draws. Only samples of `split` are drawn; None for all. Raises StateMismatch: the state is
    of another stream, or ahead of what is published.
    """

    def __init__(self, saved: SavedState, facts: StreamFacts, where: str) -> None:
        self.state = state = saved.state
        self.facts, self.where = facts, where
        self.left_out = saved.member is not None and not saved.member.blended  # of the run's blend
        if len(state.parts) > MAX_PARTS:
            raise self._impossible(saved, f"it has {len(state.parts)} parts, but at most {MAX_PARTS} can be traced")
        check_fits(state, replace(state, stream_id=facts.stream_id, samples_per_chunk=facts.samples_per_chunk), where)
        limit = state.max_total_samples
        self.end = total = facts.samples if limit is None else min(facts.samples, limit)
        self.total = total if facts.ended or total == limit else None
        self.course = course_of(state)
        self.split = self.course.rules.split
        for number, part in enumerate(state.parts if self.total is None else ()):
            needed = self.course.until(number).needed(part.draws - 1) if part.draws else 0
            if needed > facts.samples:
                what = f"{saved.file}: the state's draws need {needed} samples, but {where} has {facts.samples}"
                raise self._mismatch(f"{what}: it is ahead of the stream, which may be an older copy")
        try:
            self.sections = tuple(_sections_of(self.course, self.total))
            first = min(section.first_epoch for section in self.sections)
            self.epochs = range(first, max(section.last_epoch for section in self.sections) + 1)
            self.steps = self._steps(saved)
        except (ValueError, IndexError) as cause:
            raise self._impossible(saved, str(cause)) from cause
        if (count := self.epochs.stop - first) > MAX_EPOCHS:
            raise self._impossible(saved, f"it has trained {count} epochs, but at most {MAX_EPOCHS} can be traced")

    def place(self, step: int) -> StepPlace:
        """Returns what a step took or will take. Raises StateMismatch: unknown, or not certain yet."""
        place, unknown = self.steps.place(step), self.steps.unknown
        if place is None:
            why = "it begins later" if unknown is None else f"part {unknown} does not say how many samples a step had"
            what = f"the state does not show what step {step + 1} took: {why}; use --sample, or a state of a run"
            raise self._mismatch(f"{what} with Order(micro_batches_per_step=...)", field="draws_per_step")
        self._check_certain(step, place)
        return place

    def _check_certain(self, step: int, place: StepPlace) -> None:
        # In a blend a step may take nothing from this stream.
        if self.total is None and place.start < place.stop:
            needed, published = self.course.until(place.part).needed(place.stop - 1), self.facts.samples
            if needed > published:
                what = f"{self.where}: step {step + 1} needs {needed:,} samples or an end, only {published:,} are there"
                raise self._mismatch(what, expected=str(needed), actual=str(published))

    def at_step(self, step: int, rank: int | None = None) -> Iterator[Fate]:
        """Yields the draws of a step, rank by rank, in the order of positions; only of `rank` if it is given."""
        place = self.place(step)
        course = self.course.until(place.part)
        ranks = range(course.dp) if rank is None else range(rank, rank + 1)
        if (draws := len(ranks) * (place.stop - place.start)) > MAX_STEP_DRAWS:
            raise self._mismatch(f"{self.where}: step {step + 1} has {draws} draws, more than {MAX_STEP_DRAWS}")
        positions = np.arange(place.start, place.stop)
        epochs, samples = course.draws(np.array(ranks)[:, None], positions, self.total)
        draws = self.state.parts[place.part].draws
        for at, number in enumerate(ranks):
            rows = zip(positions.tolist(), epochs[at].tolist(), samples[at].tolist(), strict=True)
            for position, epoch, sample in rows:
                became: Became = "trained" if position < draws else "to come"
                yield Fate(epoch, sample, became, place.part, step, number, position)

    def fates(self, sample: int) -> Iterator[Fate]:
        """Yields what became of a sample in each epoch that was begun; repeatedly if an epoch was restarted."""
        if self.total is not None and sample >= self.total:
            beyond: Became = "not published" if sample >= self.facts.samples else "beyond the end"
            yield Fate(self.epochs[-1], sample, beyond)
            return
        for section in self.sections:
            for epoch in range(section.first_epoch, section.last_epoch + 1):
                yield self._fate(sample, epoch, section)

    def draws(self, epoch: int) -> Iterator[Stretch]:
        """Yields the draws of [0, end) in an epoch, part by part, then what is to come and what is left over."""
        total = self.end
        for section in self.sections if total else ():
            # Whether the run is currently in this epoch.
            current, ends = section is self.sections[-1] and epoch == section.last_epoch, None
            for number in range(len(section.course.parts) if epoch <= section.last_epoch else 0):
                course = section.course.until(number)
                begin = course.begin(total)
                later = epoch - begin.segment.epoch
                start = begin.length + (later - 1) * begin.full if later else 0
                stop = start + (begin.full if later else begin.length)
                drawn, part = min(stop, course.current.draws), section.first + number
                if later >= 0 and not (start > drawn or (start == drawn and start)):
                    yield Stretch(part, course, start, drawn, "trained" if course.current.trained else "skipped")
                    ends = Stretch(part, course, drawn, stop, "to come")
            # If another epoch was begun before this one was over, the rest of this one is never drawn.
            if ends is None or (ends.start < ends.stop and not current):
                continue
            course = ends.course
            if current and len(course.parts) == len(section.course.parts):
                yield ends
            own = course if epoch == course.epoch(total) else course.in_epoch(epoch)
            if own.leftover(total):
                # A course of one lane draws what a part leaves over at the end of the epoch.
                now = own.current
                ended = Part(own.dp, own.batch_size, own.begin(total).length, now.epoch, skip=now.skip)
                rest = Course(own.rules, [*own.parts[:-1], ended, Part(1)])
                if rest.epoch(total) == epoch:
                    # If the stream has not ended, the end is still open, so nothing is left over yet.
                    became: Became = "to come" if current and self.total is None else "left over"
                    yield Stretch(ends.part, rest, 0, rest.begin(total).length, became)

    def gaps(self, epoch: int) -> list[tuple[int, int]]:
        """Returns the ranges of samples that are skipped in an epoch."""
        found: list[tuple[int, int]] = []
        for section in self.sections if self.end else ():
            for number, part in enumerate(section.course.parts if epoch <= section.last_epoch else ()):
                found += part.skip if section.course.until(number).epoch(self.end) <= epoch else ()
        return found

    def needed_chunk(self, newest_epoch: int) -> int:
        """Returns the first chunk that a run continuing here may need; 0 if its epoch is not the newest."""
        if self.sections[-1].last_epoch < newest_epoch:
            return 0
        done = done_before(self.course, self.course.current.draws, self.total)
        over = self.total is not None and done >= self.total
        return self.facts.chunks if over else done // self.facts.samples_per_chunk

    def fewer_than_step(self, fate: Fate) -> int | None:
        """Returns the samples of the step in which a sample is to come, if its epoch has too few left for that step."""
        step, number, steps = fate.step, fate.part, self.steps
        if fate.became != "to come" or step is None or number is None or fate.position is None or self.total is None:
            return None
        place = None if isinstance(steps, MemberSteps) else steps.place(step)
        if place is None or place.stop <= self.course.until(number).epoch_stop(fate.position + 1, self.total):
            return None
        return self.state.parts[number].dp * self.state.parts[number].draws_per_step

    def _fate(self, sample: int, epoch: int, section: UnbrokenParts) -> Fate:
        course, current = section.course, section is self.sections[-1] and epoch == section.last_epoch
        place = course.place(sample, self.total, epoch)
        became: Became
        if place is not None:
            part, at = section.first + place.part, place.position
            of = self.state.parts[part]
            if at < of.draws:
                became = "trained" if of.trained else "skipped"
            elif not current or sample >= self.facts.samples:
                return Fate(epoch, sample, "not published" if current else "cut short")
            else:
                became = "left out" if self.left_out else "to come"
                if self.left_out or (self.total is None and at >= course.drawable(self.facts.samples)):
                    return Fate(epoch, sample, became)
            return Fate(epoch, sample, became, part, self.steps.step_of(part, at), place.lane, at)
        if self.split is not None and sample not in split_table(self.split):
            return Fate(epoch, sample, "other split")
        for number, own in enumerate(course.parts):
            # Samples that a later part skips are skipped in its epochs.
            if sample in Gaps(own.skip) and course.until(number).epoch(self.total) <= epoch:
                left_out = next(n for n, one in enumerate(self.state.parts) if sample in Gaps(one.skip))
                return Fate(epoch, sample, "skipped", left_out)
        # Whether the section has drawn its last epoch to the end, if that is known
        draws = course.current.draws
        whole = self.total is not None and draws == course.epoch_stop(draws, self.total)
        over = current or epoch < section.last_epoch or whole
        return Fate(epoch, sample, "left over" if over else "cut short")

    def _steps(self, saved: SavedState) -> Steps:
        """Returns the steps; those of a trainer that ends steps with epochs if only these match the file."""
        if saved.member is not None:
            return MemberSteps(saved.member)
        every = [PartSteps(one.first_step, one.draws, one.draws_per_step, one.trained) for one in self.state.parts]
        even, total = Steps(every), self.total
        if total is None or _agrees(even, saved.step):
            return even
        begins = [self.course.until(number).begin(total) for number in range(len(every))]
        cut = Steps([one._replace(cut=(at.length, at.full)) for one, at in zip(every, begins, strict=True)])
        return cut if _agrees(cut, saved.step) else even

    def _impossible(self, saved: SavedState, why: str) -> StateMismatch:
        return self._mismatch(f"{saved.file}: the state cannot be of this stream: {why}")

    def _mismatch(self, message: str, **fields: str) -> StateMismatch:
        return StateMismatch(message, directory=self.where, **fields)


def done_before(course: Course, drawn: int, total: int | None) -> int:
    """Returns N such that no sample of [0, N) is drawn from a position on, in the epoch of the position before it."""
    course, position = course.resumed(drawn, total)
    return course.done_before(position, total)


def _agrees(steps: Steps, trained: int | None) -> bool:
    """Returns whether steps are consecutive from part to part, and lead to the number in the file."""
    counted = trained is None or steps.unknown is not None or steps.trained == trained
    return counted and not steps.breaks() and not steps.ragged()


def _sections_of(course: Course, total: int | None) -> Iterator[UnbrokenParts]:
    """Yields the sections of a course; samples skipped before a section are skipped in it too."""
    parts, gaps = course.parts, Gaps()
    starts = [number for number, part in enumerate(parts) if not number or part.epoch is not None]
    for start, stop in zip(starts, [*starts[1:], len(parts)], strict=True):
        own = parts[start:stop]
        alone = Course(course.rules, [replace(own[0], skip=gaps.joined(own[0].skip).ranges), *own[1:]])
        draws = alone.current.draws
        last = alone.epoch(total) if not draws or total is None else alone.draw(0, draws - 1, total).epoch
        yield UnbrokenParts(start, alone, alone.until(0).epoch(total), last)
        gaps = gaps.joined(one for part in own for one in part.skip)


class StreamFacts(NamedTuple):
    """The state of a stream's directory at one time; the chunks [0, retired) are deleted."""

    stream_id: str | None
    samples_per_chunk: int
    chunks: int
    samples: int
    ended: bool
    retired: int = 0

    @property
    def present(self) -> range:
        """The chunks that are not deleted."""
        return range(self.retired, self.chunks)


def facts_of(stream: Stream) -> StreamFacts:
    """Polls what is published now. Raises as `Stream.published` and `Stream.retired` do."""
    now = stream.published()
    return StreamFacts(stream.stream_id, stream.samples_per_chunk, now.chunks, now.samples, now.ended, stream.retired())
