"""What was decided for a run, the same on every rank but for the rank itself, and its course over its starts.

Megatron counts samples, so it goes on with any ranks and batches by itself. The Hugging Face trainer counts steps, and
takes all steps of all epochs to be alike: where that is no longer true, it is given the rest of the run as one long
epoch, of which it skips as many batches as it has trained steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from lazyshard.data.rank import Rank
from lazyshard.errors import redact
from lazyshard.format.cursor import BlendShare, Cursor, blend_shares
from lazyshard.format.state import BlendState, RunState
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps
from lazyshard.stream import Published, run_state
from lazyshard_swift.arguments import Skip
from lazyshard_swift.checkpoints import GROUPED, Position
from lazyshard_swift.errors import ResumeRefused, not_resumed
from lazyshard_swift.parallel import FOREIGN, Facts, Streams, stream_id_of

SHOWN: Final = 20
"""Streams of which the log tells the share."""

BLENDED: Final = f"{FOREIGN}blend"
"""Stands for the identity of a blend, whose streams and weights may change."""

_KEPT: Final = ("batch_size", "layout", "window", "seed", "epoch_samples", "consumer", "skipped", "grouping")
"""Fields of a plan that a position has too."""


class Progress(NamedTuple):
    """By what a run is measured: how many steps or epochs were asked for; None for the other."""

    steps: int | None
    epochs: float | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What was decided for a run; the same on every rank but for `rank`. More fields as in `Position`.

    Attributes:
        state: the course of the run as it goes on here.
        index_offset: the trainer's indices and this are those of the current part; a multiple of the ranks.
        one_pass: whether the trainer is given the rest of the run as one epoch.
        blend: gives the state of a blend after so many samples of the run; None for one stream.
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
    def total(self) -> int | None:
        """Samples of the stream, None if it was still being produced when the run started."""
        return self.facts.total

    @property
    def course(self) -> Course:
        """The course that the data set draws by."""
        return run_state.course_of(self.state)

    @property
    def micro_samples(self) -> int:
        """Samples of a micro batch, over all ranks."""
        return self.batch_size * self.rank.dp_size

    @property
    def consumed_before(self) -> int:
        """Samples trained before the current part, over all ranks."""
        part = self.state.parts[-1]
        return self.state.consumed - part.dp * part.draws

    @property
    def draws(self) -> int:
        """Position in the current part with which each rank goes on."""
        return self.state.parts[-1].draws

    def end(self, consumed: int, published: Sequence[Published], step_samples: int) -> tuple[str, str]:
        """Returns for the log what has ended, and what was not trained, after so many samples of the run."""
        if self.blend is not None:
            return self._end_of_blend(consumed, published, step_samples)
        total, course = published[0].samples, self.course
        drawn = min(run_state.draws_of(self.state, consumed), course.epoch_length(total))
        left_over = course.leftover(total) + course.dp * (course.epoch_length(total) - drawn)
        untrained = f" and {left_over} left over, fewer than the {step_samples} of a step"
        return f"the stream has ended with {total} samples", untrained

    def _end_of_blend(self, consumed: int, published: Sequence[Published], step_samples: int) -> tuple[str, str]:
        directories, now = self.streams.directories, self._trained(consumed)
        left = [max(0, seen.samples - count) for seen, count in zip(published, now, strict=True)]
        shown = list(zip(directories, published, left, strict=True))[:SHOWN]
        parts = ", ".join(f"{number} of the {seen.samples} of {name}" for name, seen, number in shown if number)
        untrained = f"; not trained: {parts}" if parts else ""
        if self.streams.stopping != "first_exhausted":
            return "every stream of the blend has ended", untrained
        # The first that the next step would draw past its end; samples that are no whole micro batch are no help.
        then = self._trained(consumed + step_samples)
        spare = [
            number - (after - before) if seen.ended else math.inf
            for seen, number, before, after in zip(published, left, now, then, strict=True)
        ]
        first = spare.index(min(spare))
        return f"{directories[first]} has ended with {published[first].samples} samples", untrained

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

    def counted(self, step: int, accumulation: int) -> int:
        """Returns how many samples the Hugging Face trainer takes to have been trained after so many steps."""
        batches = self.epoch_samples // self.micro_samples
        epoch, within = divmod(step, -(-batches // accumulation))
        return epoch * self.epoch_samples + min(within * accumulation, batches) * self.micro_samples

    def ends_epoch(self, consumed: int, step_samples: int) -> bool:
        """Returns whether an epoch of the stream ends with the last step of so many samples of the run."""
        if self.total is None:
            return False
        stop, course = run_state.draws_of(self.state, consumed), self.course
        first = max(stop - step_samples // self.rank.dp_size, 0)
        length, full = course.epoch_length(self.total), course.full_epoch_length(self.total)
        if stop < length or not full:
            return first < length <= stop
        return first < length or (stop - length) // full > (first - length) // full

    def position(self, consumed: int, step: int) -> Position:
        """Returns where the run stands after so many samples and steps."""
        kept: dict[str, Any] = {name: getattr(self, name) for name in _KEPT}
        return Position(
            stream=self.facts.stream,
            directory=redact(self.streams.where),
            samples_per_chunk=self.facts.samples_per_chunk,
            consumed=consumed,
            step=step,
            dp_size=self.rank.dp_size,
            by_steps=self.progress.steps is not None,
            saved_at=time.time(),
            state=run_state.with_consumed(self.state, consumed) if self.layout == "strided" else None,
            blend=None if self.blend is None else self.blend(consumed),
            **kept,
        )

    def cursors(self, newest: Position, others: Sequence[Position]) -> list[tuple[str, Cursor]]:
        """Returns the cursor of each directory once a position is safe; the others may be gone on from too."""
        streams, found = self.streams, []
        blend: tuple[BlendShare, ...] = ()
        if newest.blend is not None:
            blend = blend_shares(newest.blend, dict(zip(streams.names, streams.directories, strict=True)))
        # Otherwise another epoch may follow.
        ends = self.stop_at_end and streams.stopping == "first_exhausted"
        for directory, name, facts in zip(streams.directories, streams.names, streams.facts, strict=True):
            states = [state_of(position, name) for position in (newest, *others)]
            state, size = states[0], facts.samples_per_chunk
            order = (size, self.window * size) if state is None else (state.unit, state.window)
            plan = {"dp_size": self.rank.dp_size, "unit": order[0], "window": order[1]}
            cursor = Cursor(
                consumer=self.consumer,
                stream_id=stream_id_of(facts.stream),
                consumed=newest.consumed if state is None else state.consumed,
                chunks_before=min(_chunks_before(one, facts.total) for one in states) if ends else 0,
                plan=plan | {"seed": self.seed, "batch_size": self.batch_size},
                updated_at=time.time(),
                state=state,
                blend=blend,
            )
            found.append((directory, cursor))
        return found

    def how_it_goes_on(self) -> str:
        """Returns for the log where a resumed run goes on, and what is other than it was."""
        saved = self.saved
        assert saved is not None
        text = f"goes on after {saved.consumed} samples, in step {saved.step + 1}"
        if (saved.dp_size, saved.batch_size) != (self.rank.dp_size, self.batch_size):
            before = f"before with {saved.dp_size} and {saved.batch_size}"
            text += f"; with {self.rank.dp_size} data-parallel ranks and micro batches of {self.batch_size}, {before}"
            text += ": what is left of the epoch is dealt anew, each sample once"
        if self.one_pass:
            text += "; the trainer takes the rest of the run for one epoch"
        return text + (f"; not trained: {', '.join(self.skipped)}" if self.skipped else "")


def state_of(position: Position | None, name: str) -> RunState | None:
    """Returns where a stream, by its name in a blend, stood at a position; None where it was not trained."""
    if position is None or position.blend is None:
        return None if position is None else position.state
    blend = position.blend
    return blend.members[blend.names.index(name)] if name in blend.names else None


def _chunks_before(state: RunState | None, total: int | None) -> int:
    """Returns how many chunks a run that goes on from a state, and ends with its stream, cannot need again."""
    # Without a state, in the sampler's own shuffle, it needs all; an error is that of a stream that was cut.
    with contextlib.suppress(IndexError, ValueError):
        if state is not None:
            return run_state.course_of(state).done_before(state.parts[-1].draws, total) // state.samples_per_chunk
    return 0


def check_fits(position: Position, now: Position, checkpoint: str) -> None:
    """Refuses to go on where the next sample could not be exactly the next one.

    Ranks, micro batch and steps may differ, but in an order of the stock sampler's own. `now` is of a run that begins.
    """

    def refuse(text: str, what: str) -> ResumeRefused:
        return not_resumed(checkpoint, text, getattr(position, what), getattr(now, what))

    if (position.blend is None) != (now.stream != BLENDED):
        was = f"the stream in {position.directory}" if position.blend is None else f"a blend of {position.directory}"
        this = f"this run is on {now.directory}: give --dataset as it was, at least two streams for a blend"
        raise refuse(f"it was trained on {was}, {this}", "directory")
    if position.stream != now.stream:
        there = f"the stream {position.stream} (then in {position.directory})"
        way_out = "give the directory of that one as --dataset, or start on this one anew from the weights alone"
        raise refuse(f"it was trained on {there}, and {now.directory} holds {now.stream}: {way_out}", "stream")
    shuffle = f"--train_dataloader_shuffle {'true' if position.window else 'false'}"
    option = "--group_by_length true" if position.layout == GROUPED else "--data_sharding true"
    own = f"ms-swift's own shuffle over the whole data set ({option}) would be another; start"
    later = f"Runs that are to be resumed with other ranks are started without {option.partition(' ')[0]}"
    ways_out = {
        "samples_per_chunk": "the same sample would be in another chunk",
        "seed": f"give --data_seed {position.seed}, or the order would be another",
        "window": f"leave out --sharded_lazy_shuffle_window and --sharded_lazy_shuffle_distance, and keep {shuffle}",
        "unit": "leave out --sharded_lazy_unit, or the order would be another",
        "layout": "the order would be another; keep --data_sharding as it was",
        "dp_size": f"{own} with the number it had. {later}",
        "batch_size": f"{own} with the micro batch that it had. {later}",
        "epoch_samples": f"{own} on the stream of then. {later}",
    }
    for what, way_out in ways_out.items():
        was, there = getattr(position, what), getattr(now, what)
        if was != there:
            name = what.replace("_", " ")
            raise refuse(f"saved with {name} {was}, this run has {name} {there}: {way_out}", what)
        if what == "layout" and was == "strided":
            return
    if position.grouping != now.grouping:
        way_out = "take the stream and the versions of then, or start on it anew from the weights alone"
        why = "or by another version of ms-swift, transformers or torch, so the order would be another"
        raise refuse(f"its samples were grouped by other lengths than they have now, {why}: {way_out}", "grouping")


def without(state: RunState, skips: Sequence[Skip], total: int | None, published: int) -> RunState:
    """Returns the state of a run that leaves these out from where it stands; steps are those of its course so far."""
    size, part, after = state.samples_per_chunk, state.parts[-1], state
    samples = [(one.start, one.stop) for one in skips if one.kind == "samples"]
    samples += [(one.start * size, one.stop * size) for one in skips if one.kind == "chunks"]
    # Joined, so that at most one range comes next.
    for start, stop in Gaps((one.start, one.stop) for one in skips if one.kind == "steps").ranges:
        if start == run_state.steps_of(part) + 1:
            after = run_state.without_steps(state, start, stop, total)
            continue
        last = part.draws + (stop - 1 - run_state.steps_of(part)) * part.draws_per_step - 1
        if total is None and run_state.course_of(state).needed(last) > published:
            way_out = "go on from a checkpoint right before the steps to leave out, or name samples"
            raise ValueError(f"what the steps before {stop} would train is not published yet: {way_out}")
        # Of the run as it goes now, before anything is left out of it.
        samples += run_state.ranges_of_steps(state, start, stop, total)
    return run_state.without_samples(after, samples)


def end_of_epochs(state: RunState, total: int, epochs: float) -> int:
    """Returns at which position of the current part so many epochs, counted from the run's beginning, end."""
    course = run_state.course_of(state)
    size = course.batch_size
    first, whole = course.epoch_length(total) // size, course.full_epoch_length(total) // size
    return max(0, first + math.ceil((epochs - course.epoch(total) - 1) * whole)) * size


def goes_on(plan: RunPlan, part: Part, global_batch: int, megatron: bool) -> RunPlan:
    """Returns the plan, whose state is the checkpoint's, with its course in this start, as the trainer is told it."""
    saved, state, accumulation = plan.saved, plan.state, global_batch // plan.micro_samples
    if saved is None:
        plan = replace(plan, epoch_samples=epoch_length(plan, global_batch))
        return plan if megatron else _counted_unevenly(plan, accumulation)
    epoch_samples = epoch_length(replace(plan, state=_gone_on(state, saved, part, False)), global_batch)
    if not megatron and saved.by_steps and plan.progress.steps is not None:
        # The trainer counts the batches to skip from the start of an epoch of this length.
        epoch_samples = saved.epoch_samples
    plan = replace(plan, epoch_samples=epoch_samples)
    counted = saved.step * global_batch
    if not megatron:
        counted = plan.counted(saved.step, accumulation) if epoch_samples >= plan.micro_samples else -1
    # The trainer's own counts fit where ranks and batches have been the same since the run began.
    only = state.parts[0]
    same = (only.dp, only.batch_size, only.first_step, only.epoch) == (part.dp, part.batch_size, 0, None)
    straight = len(state.parts) == 1 and same and counted == saved.consumed
    plan = replace(plan, state=_gone_on(state, saved, part, straight))
    if megatron:
        return plan
    return _counted_unevenly(plan, accumulation) if straight else _in_one_pass(plan, saved, accumulation)


def _gone_on(state: RunState, saved: Position, part: Part, straight: bool) -> RunState:
    if straight:
        # What format 1 did not say is known now.
        return replace(state, parts=(replace(state.parts[0], draws_per_step=part.draws_per_step),))
    last = state.parts[-1]
    if run_state.steps_of(last) != saved.step:
        # Its steps were not all alike, so it does not say when it trained what; the next part does.
        state = replace(state, parts=(*state.parts[:-1], replace(last, draws_per_step=0)))
    return run_state.resumed(state, part.dp, part.batch_size, draws_per_step=part.draws_per_step, step=saved.step)


def _in_one_pass(plan: RunPlan, saved: Position, accumulation: int) -> RunPlan:
    """Returns the plan of a run whose trainer is given all that is left as one epoch, behind the steps it trained."""
    trained, progress = saved.step * accumulation, plan.progress
    if progress.steps is not None:
        batches = max(progress.steps * accumulation, trained)
    else:
        assert plan.total is not None and progress.epochs is not None
        left = end_of_epochs(plan.state, plan.total, progress.epochs) - plan.draws
        batches = trained + max(0, left) // plan.batch_size
    offset = plan.rank.dp_size * plan.draws - trained * plan.micro_samples
    return replace(plan, epoch_samples=batches * plan.micro_samples, index_offset=offset, one_pass=True)


def _counted_unevenly(plan: RunPlan, accumulation: int) -> RunPlan:
    """Returns the plan; where the last step of each epoch is a smaller one, its state does not say how large one is."""
    batches = plan.epoch_samples // plan.micro_samples
    if plan.stop_at_end or (plan.progress.epochs or 2) <= 1 or not batches % accumulation:
        return plan
    part = replace(plan.state.parts[-1], draws_per_step=0)
    return replace(plan, state=replace(plan.state, parts=(*plan.state.parts[:-1], part)))


def epoch_length(plan: RunPlan, global_batch: int) -> int:
    """Returns the length of an epoch, over all ranks: of the stream if it has ended, else of the run."""
    if plan.total is not None:
        return plan.course.full_epoch_length(plan.total) * plan.rank.dp_size
    assert plan.progress.steps is not None
    return plan.progress.steps * global_batch
