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
from typing import Any, Final, Literal, NamedTuple

from lazyshard.data.commits import chunks_done
from lazyshard.data.rank import Rank
from lazyshard.errors import redact
from lazyshard.format.cursor import BlendShare, Cursor, blend_shares
from lazyshard.format.state import BlendState, RunState
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Gaps
from lazyshard.store.urls import stream_name
from lazyshard.stream import Published, run_state
from lazyshard_swift.arguments import Progress, Skip
from lazyshard_swift.checkpoints import FOREIGN, GROUPED, Position, stream_id_of
from lazyshard_swift.errors import ResumeRefused, not_resumed

SHOWN: Final = 20
"""Streams of which the log tells the share."""

BLENDED: Final = f"{FOREIGN}blend"
"""Stands for the identity of a blend, whose streams and weights may change."""

_KEPT: Final = ("batch_size", "layout", "window", "seed", "epoch_samples", "consumer", "skipped", "grouping")
"""Fields of a plan that a position has too."""


class Facts(NamedTuple):
    """What is known of a stream, or of the positions of a blend, when the ranks start; the same on all of them.

    `stream` is the id of its manifest, or a digest of its first row; rows that were `dealt` by cost are read in order.
    """

    stream: str
    samples_per_chunk: int
    samples: int
    ended: bool
    dealt: bool = False

    @property
    def total(self) -> int | None:
        """Samples of the stream, None if it was still being produced when the run started."""
        return self.samples if self.ended else None


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams that a run trains, one or several in a blend; the same on every rank.

    `units` are how many samples of each a rank is dealt in a row; empty before that is decided.
    """

    directories: tuple[str, ...]
    facts: tuple[Facts, ...]
    weights: tuple[float, ...] = (1.0,)
    stopping: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    units: tuple[int, ...] = ()

    @property
    def blended(self) -> bool:
        """Whether there are several."""
        return len(self.directories) > 1

    @property
    def where(self) -> str:
        """The directories, for messages."""
        return ", ".join(self.directories)

    @property
    def names(self) -> tuple[str, ...]:
        """How the state of a blend calls them."""
        pairs = zip(self.directories, self.facts, strict=True)
        return tuple(stream_id_of(facts.stream) or stream_name(directory) for directory, facts in pairs)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What was decided for a run; the same on every rank but for `rank`. More fields as in `Position`.

    Attributes:
        facts: of the stream, or of the positions of a blend.
        global_batch: samples of a step, over all ranks.
        state: the course of the run as it goes on here.
        index_offset: the trainer's indices and this are those of the current part; a multiple of the ranks.
        one_pass: whether the trainer is given the rest of the run as one epoch.
        blend: gives the state of a blend after so many samples of the run; None for one stream.
    """

    streams: Streams
    facts: Facts
    rank: Rank
    batch_size: int
    global_batch: int
    layout: str
    window: int
    seed: int
    progress: Progress
    stop_at_end: bool
    consumer: str
    take_over: bool
    checkpoint: str | None
    saved: Position | None
    state: RunState
    epoch_samples: int = 0
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
    def accumulation(self) -> int:
        """Micro batches of a step."""
        return self.global_batch // self.micro_samples

    @property
    def consumed_before(self) -> int:
        """Samples trained before the current part, over all ranks."""
        return self.state.consumed - self.state.parts[-1].dp * self.draws

    @property
    def draws(self) -> int:
        """Position in the current part with which each rank goes on."""
        return self.state.parts[-1].draws

    def end(self, consumed: int, published: Sequence[Published]) -> tuple[str, str]:
        """Returns for the log what has ended, and what was not trained, after so many samples of the run."""
        if self.blend is not None:
            return self._end_of_blend(consumed, published)
        total, course = published[0].samples, self.course
        length = course.epoch_length(total)
        left_over = course.leftover(total) + course.dp * max(0, length - run_state.draws_of(self.state, consumed))
        untrained = f" and {left_over} left over, fewer than the {self.global_batch} of a step"
        return f"the stream has ended with {total} samples", untrained

    def _end_of_blend(self, consumed: int, published: Sequence[Published]) -> tuple[str, str]:
        # What the next step would draw past the end of a stream is what ends the run.
        now, then = self._trained(consumed), self._trained(consumed + self.global_batch)
        left = [max(0, seen.samples - count) for seen, count in zip(published, now, strict=True)]
        shown = list(zip(self.streams.directories, published, left, strict=True))[:SHOWN]
        parts = ", ".join(f"{number} of the {seen.samples} of {name}" for name, seen, number in shown if number)
        untrained = f"; not trained: {parts}" if parts else ""
        if self.streams.stopping != "first_exhausted":
            return "every stream of the blend has ended", untrained
        # Samples that are no whole micro batch are no help.
        spare = [
            number - (after - before) if seen.ended else math.inf
            for seen, number, before, after in zip(published, left, now, then, strict=True)
        ]
        first = spare.index(min(spare))
        return f"{self.streams.directories[first]} has ended with {published[first].samples} samples", untrained

    def _trained(self, consumed: int) -> list[int]:
        """Returns how many samples of each stream were trained after so many of the run."""
        assert self.blend is not None
        state = self.blend(consumed)
        return [state.members[state.names.index(name)].consumed for name in self.streams.names]

    def steps_left(self) -> int | None:
        """Returns how many whole steps are left of the epochs that were asked for; None where steps decide."""
        draws = self.draws_left()
        return None if draws is None else draws * self.rank.dp_size // self.global_batch

    def draws_left(self) -> int | None:
        """Returns how many positions of each rank are left of these epochs, counted from the run's beginning."""
        if self.total is None or self.progress.epochs is None:
            return None
        course, size = self.course, self.batch_size
        first, whole = course.epoch_length(self.total) // size, course.full_epoch_length(self.total) // size
        end = max(0, first + math.ceil((self.progress.epochs - course.epoch(self.total) - 1) * whole)) * size
        return max(0, end - self.draws)

    def counted(self, step: int) -> int:
        """Returns how many samples the Hugging Face trainer takes to have been trained after so many steps."""
        batches = self.epoch_samples // self.micro_samples
        epoch, within = divmod(step, -(-batches // self.accumulation))
        return epoch * self.epoch_samples + min(within * self.accumulation, batches) * self.micro_samples

    def ends_epoch(self, consumed: int) -> bool:
        """Returns whether an epoch of the stream ends with the last step of so many samples of the run."""
        if self.total is None:
            return False
        stop = run_state.draws_of(self.state, consumed)
        first = max(stop - self.global_batch // self.rank.dp_size, 0)
        return self.course.epoch_stop(first + 1, self.total) <= stop

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
            state, size, done = states[0], facts.samples_per_chunk, 0
            # Without a state, in the sampler's own shuffle, it needs all; an error is that of a stream that was cut.
            with contextlib.suppress(IndexError, ValueError):
                done = chunks_done([one for one in states if one is not None], facts.total)
            unit, window = (size, self.window * size) if state is None else (state.unit, state.window)
            plan = {"dp_size": self.rank.dp_size, "unit": unit, "window": window}
            cursor = Cursor(
                consumer=self.consumer,
                stream_id=stream_id_of(facts.stream),
                consumed=newest.consumed if state is None else state.consumed,
                chunks_before=done if ends and None not in states else 0,
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

    def epoch_length(self) -> int:
        """Returns the length of an epoch, over all ranks: of the stream if it has ended, else of the run."""
        if self.total is not None:
            return self.course.full_epoch_length(self.total) * self.rank.dp_size
        assert self.progress.steps is not None
        return self.progress.steps * self.global_batch

    def with_part(self, **changes: Any) -> RunPlan:
        """Returns the plan with changes to the current part of its state."""
        *before, last = self.state.parts
        return replace(self, state=replace(self.state, parts=(*before, replace(last, **changes))))


def state_of(position: Position | None, name: str) -> RunState | None:
    """Returns where a stream, by its name in a blend, stood at a position; None where it was not trained."""
    if position is None or position.blend is None:
        return None if position is None else position.state
    blend = position.blend
    return blend.members[blend.names.index(name)] if name in blend.names else None


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
    option = "--group_by_length" if position.layout == GROUPED else "--data_sharding"
    own = f"ms-swift's own shuffle over the whole data set ({option} true) would be another; start with what it had. "
    own += f"Runs that are to be resumed with other ranks are started without {option}"
    ways_out = {
        "samples_per_chunk": "the same sample would be in another chunk",
        "seed": f"give --data_seed {position.seed}, or the order would be another",
        "window": f"leave out --sharded_lazy_shuffle_window and --sharded_lazy_shuffle_distance, and keep {shuffle}",
        "unit": "leave out --sharded_lazy_unit, or the order would be another",
        "layout": "the order would be another; keep --data_sharding as it was",
        **({} if position.layout == "strided" else dict.fromkeys(("dp_size", "batch_size", "epoch_samples"), own)),
    }
    for what, way_out in ways_out.items():
        was, there = getattr(position, what), getattr(now, what)
        if was != there:
            name = what.replace("_", " ")
            raise refuse(f"saved with {name} {was}, this run has {name} {there}: {way_out}", what)
    if position.grouping != now.grouping:
        way_out = "take the stream and the versions of then, or start on it anew from the weights alone"
        why = "or by another version of ms-swift, transformers or torch, so the order would be another"
        raise refuse(f"its samples were grouped by other lengths than they have now, {why}: {way_out}", "grouping")


def without(state: RunState, skips: Sequence[Skip], total: int | None, published: int) -> RunState:
    """Returns the state of a run that leaves these out from where it stands; steps are those of its course so far."""
    size, part, after = state.samples_per_chunk, state.parts[-1], state
    factors = {"samples": 1, "chunks": size}
    samples = [(one.start * factors[one.kind], one.stop * factors[one.kind]) for one in skips if one.kind != "steps"]
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


def goes_on(plan: RunPlan, part: Part, megatron: bool) -> RunPlan:
    """Returns the plan, whose state is the checkpoint's, with its course in this start, as the trainer is told it."""
    saved, state = plan.saved, plan.state
    if saved is None:
        plan = replace(plan, epoch_samples=plan.epoch_length())
        return plan if megatron else _counted_unevenly(plan)
    epoch_samples = replace(plan, state=_gone_on(state, saved, part)).epoch_length()
    if not megatron and saved.by_steps and plan.progress.steps is not None:
        # The trainer counts the batches to skip from the start of an epoch of this length.
        epoch_samples = saved.epoch_samples
    plan = replace(plan, epoch_samples=epoch_samples)
    counted = saved.step * plan.global_batch
    if not megatron:
        counted = plan.counted(saved.step) if epoch_samples >= plan.micro_samples else -1
    # The trainer's own counts fit where ranks and batches have been the same since the run began.
    only = state.parts[0]
    same = (only.dp, only.batch_size, only.first_step, only.epoch) == (part.dp, part.batch_size, 0, None)
    if len(state.parts) == 1 and same and counted == saved.consumed:
        # What format 1 did not say is known now.
        plan = plan.with_part(draws_per_step=part.draws_per_step)
        return plan if megatron else _counted_unevenly(plan)
    plan = replace(plan, state=_gone_on(state, saved, part))
    return plan if megatron else _in_one_pass(plan, saved.step * plan.accumulation)


def _gone_on(state: RunState, saved: Position, part: Part) -> RunState:
    last = state.parts[-1]
    if run_state.steps_of(last) != saved.step:
        # Its steps were not all alike, so it does not say when it trained what; the next part does.
        state = replace(state, parts=(*state.parts[:-1], replace(last, draws_per_step=0)))
    return run_state.resumed(state, part.dp, part.batch_size, draws_per_step=part.draws_per_step, step=saved.step)


def _in_one_pass(plan: RunPlan, trained: int) -> RunPlan:
    """Returns the plan of a run whose trainer is given all that is left as one epoch, behind the batches it trained."""
    left = plan.draws_left()
    batches = trained + (left or 0) // plan.batch_size
    if plan.progress.steps is not None:
        batches = max(plan.progress.steps * plan.accumulation, trained)
    offset = plan.rank.dp_size * plan.draws - trained * plan.micro_samples
    return replace(plan, epoch_samples=batches * plan.micro_samples, index_offset=offset, one_pass=True)


def _counted_unevenly(plan: RunPlan) -> RunPlan:
    """Returns the plan; where the last step of each epoch is a smaller one, its state does not say how large one is."""
    batches = plan.epoch_samples // plan.micro_samples
    if plan.stop_at_end or (plan.progress.epochs or 2) <= 1 or not batches % plan.accumulation:
        return plan
    return plan.with_part(draws_per_step=0)
