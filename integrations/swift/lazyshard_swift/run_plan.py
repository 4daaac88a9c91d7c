"""What was decided for a run, the same on every rank but for the rank itself, and its course over its starts.

What does a start make of its checkpoint, and how do the trainer's own counts fit it? Megatron counts samples, so it
goes on with any ranks and batches by itself. The Hugging Face trainer counts steps, and takes all steps of all epochs
to be alike: where that is no longer true, it is given the rest of the run as one long epoch, of which it skips as many
batches as it has trained steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lazyshard.data.rank import Rank
from lazyshard.errors import redact
from lazyshard.format.blend_state import BlendShare, BlendState, blend_shares
from lazyshard.format.cursor import Cursor
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps
from lazyshard.stream import Published
from lazyshard.stream.run_state import (
    course_of,
    draws_of,
    ranges_of_steps,
    resumed,
    steps_of,
    with_consumed,
    without_samples,
    without_steps,
)
from lazyshard_swift.errors import ranks
from lazyshard_swift.parallel import Facts, Streams, stream_id_of
from lazyshard_swift.position import Position, stamp
from lazyshard_swift.settings import Progress, Skip

SHOWN: Final = 20
"""Streams of which the log tells the share."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What was decided for a run; the same on every rank but for `rank`.

    Attributes:
        streams: what it trains.
        facts: what all ranks know of the stream, or of the positions of the blend.
        rank: whose samples this process reads.
        batch_size: samples of a rank in a micro batch.
        layout: "strided", or "block" or "grouped" in an order of the stock sampler's own.
        window: chunks of a rank that are shuffled together.
        seed: of the shuffle.
        epoch_samples: the length of an epoch as ms-swift is told it.
        progress: whether steps or epochs decide how long the run is.
        stop_at_end: whether the run stops where the stream ends.
        consumer: name of the cursor.
        take_over: whether the cursor is taken over from a run that still holds it.
        checkpoint: the checkpoint to go on from, None for none.
        saved: the position in that checkpoint, None for none.
        state: the course of the run as it goes on here.
        skipped: what the run was told not to train, by this start and those before.
        index_offset: the trainer's indices and this are those of the current part; a multiple of the ranks.
        one_pass: whether the trainer is given the rest of the run as one epoch: see `lazyshard_swift.run_plan`.
        blend: gives the state of a blend after so many samples of the run; None for one stream.
        grouping: digest of what the order of a grouped run follows from; None for others.
    """

    streams: Streams
    facts: Facts
    rank: Rank
    batch_size: int
    layout: str
    window: int
    seed: int
    epoch_samples: int
    progress: Progress
    stop_at_end: bool
    consumer: str
    take_over: bool
    checkpoint: str | None
    saved: Position | None
    state: RunState
    skipped: tuple[str, ...] = ()
    index_offset: int = 0
    one_pass: bool = False
    blend: Callable[[int], BlendState] | None = None
    grouping: str | None = None

    @property
    def directory(self) -> str:
        """Of the stream, or of all that are blended, for messages."""
        return self.streams.where

    @property
    def stream_id(self) -> str | None:
        """The id in the stream's manifest, None where it has none."""
        return stream_id_of(self.facts.stream)

    @property
    def total(self) -> int | None:
        """Samples of the stream, None if it was still being produced when the run started."""
        return self.facts.total

    @property
    def course(self) -> Course:
        """The course that the data set draws by."""
        return course_of(self.state)

    @property
    def consumed_before(self) -> int:
        """Samples trained before the current part, over all ranks."""
        part = self.state.parts[-1]
        return self.state.consumed - part.dp * part.draws

    @property
    def draws(self) -> int:
        """Position in the current part with which each rank goes on."""
        return self.state.parts[-1].draws

    def draws_after(self, consumed: int) -> int:
        """Returns how many positions of the current part each rank has drawn after so many samples of the run.

        Raises:
            ValueError: it is not between two steps of this part.
        """
        return draws_of(self.state, consumed)

    def end(self, consumed: int, published: Sequence[Published], step_samples: int) -> tuple[str, str]:
        """Returns for the log what has ended, and what was not trained, after so many samples of the run.

        Args:
            consumed: samples trained.
            published: what is published of each stream.
            step_samples: samples of a step, over all ranks.
        """
        if self.blend is not None:
            return self._end_of_blend(consumed, published, step_samples)
        total = published[0].samples
        course = self.course
        drawn = min(self.draws_after(consumed), course.epoch_length(total))
        left_over = course.leftover(total) + course.dp * (course.epoch_length(total) - drawn)
        return (
            f"the stream has ended with {total} samples",
            f" and {left_over} left over, fewer than the {step_samples} of a step",
        )

    def _end_of_blend(self, consumed: int, published: Sequence[Published], step_samples: int) -> tuple[str, str]:
        streams, now = self.streams, self._trained(consumed)
        left = [max(0, seen.samples - count) for seen, count in zip(published, now, strict=True)]
        shown = list(zip(streams.directories, published, left, strict=True))[:SHOWN]
        parts = [f"{number} of the {seen.samples} of {directory}" for directory, seen, number in shown if number]
        untrained = f"; not trained: {', '.join(parts)}" if parts else ""
        if streams.stopping != "first_exhausted":
            return "every stream of the blend has ended", untrained
        # The first that the next step would draw past its end; samples that are no whole micro batch are no help.
        then = self._trained(consumed + step_samples)
        spare = [
            number - (after - before) if seen.ended else float("inf")
            for seen, number, before, after in zip(published, left, now, then, strict=True)
        ]
        first = min(range(len(spare)), key=spare.__getitem__)
        return f"{streams.directories[first]} has ended with {published[first].samples} samples", untrained

    def _trained(self, consumed: int) -> list[int]:
        """Returns how many samples of each stream were trained after so many of the run."""
        assert self.blend is not None
        state = self.blend(consumed)
        counts = dict(zip(state.names, (member.consumed for member in state.members), strict=True))
        return [counts[name] for name in self.streams.names]

    def steps_left(self, global_batch: int) -> int | None:
        """Returns how many whole steps are left of the epochs that were asked for; None where steps decide."""
        if self.total is None or self.progress.epochs is None:
            return None
        left = end_of_epochs(self.state, self.total, self.progress.epochs) - self.draws
        return max(0, left) * self.rank.dp_size // global_batch

    def position(self, consumed: int, step: int) -> Position:
        """Returns where the run stands after so many samples and steps."""
        return Position(
            stream=self.facts.stream,
            directory=redact(self.directory),
            samples_per_chunk=self.facts.samples_per_chunk,
            consumed=consumed,
            step=step,
            dp_size=self.rank.dp_size,
            batch_size=self.batch_size,
            layout=self.layout,
            window=self.window,
            seed=self.seed,
            epoch_samples=self.epoch_samples,
            by_steps=self.progress.steps is not None,
            consumer=self.consumer,
            saved_at=stamp(),
            skipped=self.skipped,
            # The stock sampler's own shuffle is no course of ours.
            state=with_consumed(self.state, consumed) if self.layout == "strided" else None,
            blend=None if self.blend is None else self.blend(consumed),
            grouping=self.grouping,
        )

    def cursors(self, newest: Position, others: Sequence[Position]) -> list[tuple[str, Cursor]]:
        """Returns what the cursors say once a position is safe: directories of streams, and the cursor in each.

        Args:
            newest: the position.
            others: those of older checkpoints from which the run may be gone on with.
        """
        streams = self.streams
        blend: tuple[BlendShare, ...] = ()
        if newest.blend is not None:
            blend = blend_shares(newest.blend, dict(zip(streams.names, streams.directories, strict=True)))
        # Otherwise another epoch may follow.
        ends = self.stop_at_end and streams.stopping == "first_exhausted"
        found = []
        for directory, name, facts in zip(streams.directories, streams.names, streams.facts, strict=True):
            states = [state_of(position, name) for position in (newest, *others)]
            # The sampler's own shuffle, which has no state, needs all chunks.
            done = [chunks_before(state, facts.total) if state is not None and ends else 0 for state in states]
            found.append((directory, self._cursor(facts, newest, states[0], min(done), blend)))
        return found

    def _cursor(
        self, facts: Facts, position: Position, state: RunState | None, before: int, blend: tuple[BlendShare, ...]
    ) -> Cursor:
        size = facts.samples_per_chunk
        return Cursor(
            consumer=self.consumer,
            stream_id=stream_id_of(facts.stream),
            consumed=position.consumed if state is None else state.consumed,
            chunks_before=before,
            plan={
                "dp_size": self.rank.dp_size,
                "unit": size if state is None else state.unit,
                "window": self.window * size if state is None else state.window,
                "seed": self.seed,
                "batch_size": self.batch_size,
            },
            updated_at=time.time(),
            state=state,
            blend=blend,
        )


def state_of(position: Position | None, name: str) -> RunState | None:
    """Returns where a stream stood at a position; None where it was not trained yet, or has no state.

    Args:
        position: of a run over this stream alone, or over a blend.
        name: how the state of a blend calls the stream.
    """
    if position is None or position.blend is None:
        return None if position is None else position.state
    blend = position.blend
    return blend.members[blend.names.index(name)] if name in blend.names else None


def chunks_before(state: RunState, total: int | None) -> int:
    """Returns how many chunks a run that goes on from a state, and ends with its stream, cannot need again."""
    try:
        done = course_of(state).done_before(state.parts[-1].draws, total)
    except (IndexError, ValueError):
        # It has drawn more than there is: of a stream that was cut.
        return 0
    return done // state.samples_per_chunk


def how_it_goes_on(plan: RunPlan) -> str:
    """Returns for the log where a resumed run goes on, and what is other than it was."""
    saved = plan.saved
    assert saved is not None
    text = f"goes on after {saved.consumed} samples, in step {saved.step + 1}"
    before = (saved.dp_size, saved.batch_size)
    if before != (plan.rank.dp_size, plan.batch_size):
        text += (
            f"; with {ranks(plan.rank.dp_size)} and micro batches of {plan.batch_size}, before with "
            f"{before[0]} and {before[1]}: what is left of the epoch is dealt anew, each sample once"
        )
    if plan.one_pass:
        text += "; the trainer takes the rest of the run for one epoch"
    if plan.skipped:
        text += f"; not trained: {', '.join(plan.skipped)}"
    return text


def without(state: RunState, skips: Sequence[Skip], total: int | None, published: int) -> RunState:
    """Returns the state of a run that leaves these out from where it stands.

    Steps are counted as the run has gone so far, with the ranks and batches that it had.

    Args:
        state: where the run stands.
        skips: what to leave out.
        total: the end of the stream, None while it is not known.
        published: samples published.

    Raises:
        ValueError: steps that cannot be left out: they are trained, the state does not know its steps, or it is not
            known yet what they would train.
    """
    size = state.samples_per_chunk
    samples = [(one.start, one.stop) for one in skips if one.kind == "samples"]
    samples += [(one.start * size, one.stop * size) for one in skips if one.kind == "chunks"]
    # Joined, so that at most one range comes next.
    steps = Gaps((one.start, one.stop) for one in skips if one.kind == "steps").ranges
    now = steps_of(state.parts[-1]) + 1
    after = state
    for start, stop in steps:
        if start == now:
            after = without_steps(state, start, stop, total)
            continue
        if not _is_known(state, stop, total, published):
            raise ValueError(
                f"what the steps before {stop} would train is not published yet: go on from a checkpoint right before "
                f"the steps to leave out, or name samples"
            )
        # Of the run as it goes now, before anything is left out of it.
        samples += ranges_of_steps(state, start, stop, total)
    return without_samples(after, samples)


def _is_known(state: RunState, stop: int, total: int | None, published: int) -> bool:
    """Returns whether it is known what all steps before `stop` train."""
    part = state.parts[-1]
    last = part.draws + (stop - 1 - steps_of(part)) * part.draws_per_step - 1
    return total is not None or course_of(state).needed(last) <= published


def consumed_after(step: int, epoch_samples: int, micro_samples: int, accumulation_steps: int) -> int:
    """Returns how many samples the Hugging Face trainer takes to have been trained after so many steps.

    Args:
        step: steps trained.
        epoch_samples: samples of an epoch, over all ranks.
        micro_samples: samples of a micro batch, over all ranks.
        accumulation_steps: micro batches of a step; the last step of an epoch has what is left.
    """
    batches = epoch_samples // micro_samples
    epoch, within = divmod(step, -(-batches // accumulation_steps))
    return epoch * epoch_samples + min(within * accumulation_steps, batches) * micro_samples


def goes_straight_on(state: RunState, saved: Position, part: Part, counted: int) -> bool:
    """Returns whether the trainer's own counts fit: the ranks and batches have been the same since the run began.

    Args:
        state: where the run stands.
        saved: the checkpoint's position.
        part: of a run that would begin now.
        counted: samples trained after the checkpoint's steps, as the trainer would count them.
    """
    only = state.parts[0]
    return (
        len(state.parts) == 1
        and (only.dp, only.batch_size, only.first_step, only.epoch) == (part.dp, part.batch_size, 0, None)
        and counted == saved.consumed
    )


def gone_on(state: RunState, saved: Position, part: Part, straight: bool) -> RunState:
    """Returns the state with which a run goes on.

    Args:
        state: where it stands.
        saved: the checkpoint's position.
        part: of a run that would begin now: its ranks, its micro batch, its positions a step.
        straight: see `goes_straight_on`.
    """
    if straight:
        # What format 1 did not say is known now.
        return replace(state, parts=(replace(state.parts[0], draws_per_step=part.draws_per_step),))
    last = state.parts[-1]
    if steps_of(last) != saved.step:
        # Its steps were not all alike, so it does not say when it trained what; the next part does.
        state = replace(state, parts=(*state.parts[:-1], replace(last, draws_per_step=0)))
    return resumed(state, part.dp, part.batch_size, draws_per_step=part.draws_per_step, step=saved.step)


def end_of_epochs(state: RunState, total: int, epochs: float) -> int:
    """Returns at which position of the current part so many epochs, counted from the run's beginning, are trained.

    Args:
        state: the run's.
        total: samples of the stream.
        epochs: also a fraction.
    """
    course = course_of(state)
    size = course.batch_size
    first, whole = course.epoch_length(total) // size, course.full_epoch_length(total) // size
    return max(0, first + math.ceil((epochs - course.epoch(total) - 1) * whole)) * size


def ends_epoch(state: RunState, total: int, first: int, stop: int) -> bool:
    """Returns whether an epoch ends with one of the positions [first, stop) of the current part."""
    course = course_of(state)
    length, full = course.epoch_length(total), course.full_epoch_length(total)
    if stop < length or not full:
        return first < length <= stop
    return first < length or (stop - length) // full > (first - length) // full
