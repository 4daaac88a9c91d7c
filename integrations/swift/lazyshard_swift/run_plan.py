"""The decisions for a run, the same on every rank except for the rank itself, and its course over several starts.

Megatron counts samples, so it continues with any ranks and batches. The Hugging Face trainer counts steps, and assumes
that all steps of all epochs are alike. If that no longer holds, it is given the rest of the run as one long epoch, of
which it skips as many batches as it has trained steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, NamedTuple

from lazyshard import Order
from lazyshard.data.commits import chunks_done
from lazyshard.data.rank import Rank
from lazyshard.format.state import BlendState, Cursor, RunState, blend_shares
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.store.files import stream_name, stream_path
from lazyshard.stream import Published, read_retired, run_parts
from lazyshard_swift.arguments import ONCE, Rollout
from lazyshard_swift.checkpoints import FOREIGN, GROUPED, Inner, Position, stream_id_of
from lazyshard_swift.errors import not_resumed
from lazyshard_swift.packs import Packs

SHOWN: Final = 20  # Maximum number of streams whose share is logged
BLENDED: Final = f"{FOREIGN}blend"
PACKED: Final = f"{FOREIGN}packs"
"""The identities of every blend, as its streams and weights may change, and of all packs made during training."""


class Stream(NamedTuple):
    """A stream, or all positions of a blend, as seen when the ranks start; only the directory may differ between ranks.

    `identity` is the id in its manifest, or a digest of its first row; rows that were `dealt` by cost are read in
    order. `unit` is the number of consecutive samples that a rank is dealt, 0 until it is decided. With ``--packing``,
    `packed` rows are packs already. With a `limit` the stream ends after so many samples. Rows of an ordinary data set
    are `prepared`.
    """

    directory: str
    identity: str
    samples_per_chunk: int
    samples: int
    ended: bool
    dealt: bool = False
    weight: float = 1.0
    unit: int = 0
    packed: bool = False
    limit: int | None = None
    prepared: bool = False

    def at(self, published: Published) -> Stream:
        """Returns the stream with what is published, up to its limit."""
        if self.limit is None or published.samples < self.limit:
            return self._replace(samples=published.samples, ended=published.ended)
        return self._replace(samples=self.limit, ended=True)

    @property
    def total(self) -> int | None:
        """Samples of the stream, None if it was live."""
        return self.samples if self.ended else None

    def retired(self) -> int:
        """Returns how many chunks of the stream its producer has deleted."""
        stream_id = stream_id_of(self.identity)
        return 0 if stream_id is None else read_retired(stream_path(self.directory), stream_id)

    @property
    def name(self) -> str:
        """The stream's name in the state of a blend."""
        return stream_id_of(self.identity) or stream_name(self.directory)

    @property
    def shown(self) -> str:
        """The stream in messages."""
        return self.directory if self.limit is None else f"{self.directory}#{self.limit}"


def order_of_split(splits: tuple[int, int] | None, split: Literal["train", "validation"], **order: Any) -> Order:
    """Returns the order that draws one split; all samples without `splits`."""
    return Order(**order, split=split if splits else None, splits=splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Position):
    """The decisions for a run, as the position at which this start begins; the same on every rank except for `rank`.

    Attributes:
        state: the course of the run from here on.
        total: samples of the stream, or positions of the blend; None if it was live at the start.
        splits: the shares of training and validation in each stream; None if all samples are trained.
        global_batch: samples of a step, over all ranks.
        index_offset: added to the trainer's indices to get those of the current part; a multiple of the ranks.
        one_pass: whether the trainer is given the rest of the run as one epoch.
        blend_at: returns the state of a blend, or of `packs`, after a number of samples of the run; else None.
        pack_tokens: the maximum number of tokens of the packs that are made during training: the samples of the run.
        rollout: how the trainer uses a micro batch; `steps` and `global_batch` are of `rollout.steps` steps of it.
    """

    state: RunState
    streams: tuple[Stream, ...]
    stopping: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    total: int | None
    splits: tuple[int, int] | None = None
    rank: Rank
    global_batch: int
    steps: int | None
    epochs: float | None
    stop_at_end: bool
    take_over: bool
    checkpoint: str | None
    saved: Position | None
    index_offset: int = 0
    one_pass: bool = False
    blend_at: Callable[[int], Inner] | None = None
    pack_tokens: int | None = None
    packs: Packs | None = None
    rollout: Rollout = ONCE

    @property
    def blended(self) -> bool:
        """Whether there are several streams."""
        return len(self.streams) > 1

    @property
    def course(self) -> Course:
        """The course by which the data set draws."""
        return run_parts.course_of(self.state)

    @property
    def micro_samples(self) -> int:
        """Samples of a micro batch, over all ranks."""
        return self.batch_size * self.dp_size

    @property
    def accumulation(self) -> int:
        """Micro batches per step."""
        return self.global_batch // self.micro_samples

    def kept(self, samples: int) -> int:
        """Returns how many of the first samples of a stream are for training."""
        return order_of_split(self.splits, "train").gaps.kept(0, samples)

    def end(self, consumed: int, published: Sequence[Published]) -> tuple[str, str]:
        """Returns what has ended and what was not trained, for the log, after `consumed` samples of the run."""
        if self.packs is not None:
            left, samples = max(0, self.packs.last - consumed), sum(seen.samples for seen in published)
            return f"{self.directory} has ended with {samples} samples", f"; not trained: {left} packs" if left else ""
        # A run ends if its next step would draw past the end of a stream.
        now, then = self._trained(consumed), self._trained(consumed + self.global_batch)
        given = zip([one.at(seen) for one, seen in zip(self.streams, published, strict=True)], now, then, strict=True)
        rows = [(one.shown, one, max(0, self.kept(one.samples) - at), after - at) for one, at, after in given]
        left_of = [(name, left, self.kept(seen.samples)) for name, seen, left, _ in rows[:SHOWN] if left]
        parts = ", ".join(f"{left} of the {samples} of {name}" for name, left, samples in left_of)
        untrained = f"; not trained: {parts}" if parts else ""
        if self.stopping != "first_exhausted":
            return "every stream of the blend has ended", untrained
        # Samples that fill no whole micro batch cannot be trained.
        name, seen, *_ = min(rows, key=lambda row: row[2] - row[3] if row[1].ended else math.inf)
        return f"{name} has ended with {seen.samples} samples", untrained

    def _trained(self, consumed: int) -> list[int]:
        state = None if self.blend_at is None else self.blend_at(consumed)
        if not isinstance(state, BlendState):
            return [consumed]
        return [state.members[state.names.index(one.name)].consumed for one in self.streams]

    def draws_left(self) -> int | None:
        """Returns the remaining positions of each rank in the requested epochs; None if steps set the length."""
        if self.total is None or self.epochs is None:
            return None
        course, size = self.course, self.batch_size
        first, whole = course.begin(self.total).length // size, course.begin(self.total).full // size
        batches = first + math.ceil((self.epochs - course.epoch(self.total) - 1) * whole)
        return max(0, batches * size - course.current.draws)

    def counted(self, step: int) -> int:
        """Returns how many samples the Hugging Face trainer assumes to be trained after a number of steps."""
        step //= self.rollout.steps  # Samples count once all their steps are trained
        batches = self.epoch_samples // self.micro_samples
        epoch, within = divmod(step, -(-batches // self.accumulation))
        return epoch * self.epoch_samples + min(within * self.accumulation, batches) * self.micro_samples

    def ends_epoch(self, consumed: int) -> bool:
        """Returns whether an epoch of the stream ends within the last step before `consumed` samples of the run."""
        stop = run_parts.draws_of(self.state, consumed)
        first = max(stop - self.global_batch // self.dp_size, 0)
        return self.total is not None and self.course.epoch_stop(first + 1, self.total) <= stop

    def position(self, consumed: int, step: int) -> Position:
        """Returns the position of the run after a number of samples and steps."""
        kept: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(Position)}
        kept["state"] = run_parts.with_consumed(self.state, consumed) if self.layout == "strided" else None
        kept["blend"] = None if self.blend_at is None else self.blend_at(consumed)
        return Position(**kept | {"consumed": consumed, "step": step, "saved_at": time.time()})

    def cursors(self, newest: Position, others: Sequence[Position]) -> Iterator[tuple[str, Cursor]]:
        """Yields the cursor of each directory once a position is durable; `others` may also be resumed from."""
        if self.packs is not None:
            newest, *others = map(self.packs.rows_at, (newest, *others))
        places = {one.name: one.directory for one in self.streams}
        blend = blend_shares(newest.blend, places) if isinstance(newest.blend, BlendState) else ()
        # In all other cases another epoch, or another evaluation, may follow.
        ends = self.stop_at_end and self.stopping == "first_exhausted" and self.splits is None
        for one in self.streams:
            states = [state_of(position, one.name) for position in (newest, *others)]
            known, state, done = [each for each in states if each is not None], states[0], 0
            # Without a state (ms-swift's own shuffle) all chunks are needed. A truncated stream causes the errors.
            with contextlib.suppress(IndexError, ValueError):
                done = chunks_done(known, one.total) if ends and len(known) == len(states) else 0
            rules, consumed = (self.state, newest.consumed) if state is None else (state, state.consumed)
            plan = {"dp_size": self.dp_size, "unit": rules.unit, "window": rules.window, "seed": self.seed}
            if self.packs is not None:
                # Their rows are drawn as by one rank, which does not show what the ranks have trained.
                plan, state = {"dp_size": self.dp_size}, None
            made = stream_id_of(one.identity), consumed, done, plan | {"batch_size": self.batch_size}
            yield one.directory, Cursor(self.consumer, *made, time.time(), state, blend=blend)

    def describe_resume(self, before: Position) -> str:
        """Returns where a resumed run continues and what has changed, for the log."""
        text = f"continues after {self.consumed} samples, in step {self.step + 1}"
        was, now = (f"ranks: {one.dp_size}, micro batch: {one.batch_size}" for one in (before, self))
        if was != now:
            text += f"; {now} (before the restart {was}): the rest of the epoch is dealt again, each sample once"
        text += "; the trainer treats the rest of the run as one epoch" if self.one_pass else ""
        return text + (f"; not trained: {', '.join(self.skipped)}" if self.skipped else "")

    def epoch_length(self) -> int:
        """Returns the length of an epoch, over all ranks: of an ended stream, else of the run."""
        if self.total is not None:
            return self.course.begin(self.total).full * self.dp_size
        return (self.steps or 0) * self.global_batch

    def with_steps_of(self, draws_per_step: int) -> RunPlan:
        """Returns the plan with `draws_per_step` positions per step in its current part, 0 if steps differ."""
        *before, last = self.state.parts
        return replace(self, state=replace(self.state, parts=(*before, replace(last, draws_per_step=draws_per_step))))


def state_of(position: Position | None, name: str) -> RunState | None:
    """Returns the state of a stream, by its name in a blend, at a position; None if it was not trained."""
    if position is None or not isinstance(position.blend, BlendState):
        return None if position is None else position.state
    blend = position.blend
    return blend.members[blend.names.index(name)] if name in blend.names else None


def check_fits(position: Position, now: Position, checkpoint: str) -> None:
    """Refuses a checkpoint after which the run would not continue exactly; `now` is where this run begins.

    Ranks, micro batch and steps may differ, unless ms-swift's sampler sets the order.
    """
    there, this, anew = position.directory, now.directory, "start over on this one from the weights alone"
    if (position.stream == PACKED) != (now.stream == PACKED):
        kind = "packs made" if position.stream == PACKED else "no packs that are made"
        raise not_resumed(checkpoint, f"it was trained on {kind} during training: keep --packing", there, this)
    if (position.stream == BLENDED) != (now.stream == BLENDED):
        kind = "the stream in" if position.blend is None else "a blend of"
        raise not_resumed(checkpoint, f"it was trained on {kind} {there}: use the same --dataset", there, this)
    option = "--group_by_length" if position.layout == GROUPED else "--data_sharding"
    own = f"ms-swift's own shuffle ({option} true) would differ; to resume with other ranks, start without {option}"
    was_on = f"it was trained on the stream {position.stream} (then in {there})"
    ways_out = {
        "stream": f"{was_on}, {this} holds {now.stream}: use that one as --dataset, or {anew}",
        "samples_per_chunk": "the same sample would be in another chunk",
        "seed": f"use --data_seed {position.seed}, or the order would differ",
        "window": "omit --sharded_lazy_shuffle_window and --sharded_lazy_shuffle_distance, and keep "
        f"--train_dataloader_shuffle {'true' if position.window else 'false'}",
        "unit": "omit --sharded_lazy_unit, or the order would differ",
        "layout": "the order would differ; keep --data_sharding as it was",
        **({} if position.layout == "strided" else dict.fromkeys(("dp_size", "batch_size", "epoch_samples"), own)),
        "grouping": f"its samples had different lengths, or ms-swift, transformers or torch changed: {anew}",
    }
    for what, way_out in ways_out.items():
        was, here = getattr(position, what), getattr(now, what)
        if was != here:
            name = what.replace("_", " ")
            saved = "" if what in ("stream", "grouping") else f"saved with {name} {was}, this run has {name} {here}: "
            raise not_resumed(checkpoint, f"{saved}{way_out}", was, here)


def without(state: RunState, skips: Sequence[tuple[str, int, int]], total: int | None, published: int) -> RunState:
    """Returns the state of a run that excludes `skips` from its position on; steps are those of its course so far."""
    factors = {"samples": 1, "chunks": state.samples_per_chunk}
    samples = [(factors[kind] * start, factors[kind] * stop) for kind, start, stop in skips if kind != "steps"]
    steps = [(start, stop) for kind, start, stop in skips if kind == "steps"]
    return run_parts.without(state, samples, steps, total, published)


def resumed(plan: RunPlan, part: Part, megatron: bool) -> RunPlan:
    """Returns the plan with its course in this start, for the trainer; the given plan has the checkpoint's state."""
    saved, state, after = plan.saved, plan.state, plan
    if saved is not None:
        # If its steps were not all alike, the state does not record which step trained what; the next part does.
        known = plan if run_parts.steps_of(state.parts[-1]) == saved.step else plan.with_steps_of(0)
        if saved.step % plan.rollout.steps and (saved.dp_size, saved.batch_size) != (part.dp, part.batch_size):
            why = "it was saved within a rollout: keep ranks and batch sizes, or resume from a step between rollouts"
            raise not_resumed(plan.checkpoint, why, f"a multiple of {plan.rollout.steps}", saved.step)
        shape = {"draws_per_step": part.draws_per_step, "step": saved.step}
        parts = run_parts.resumed_parts(known.state.parts, part.dp, part.batch_size, **shape)
        after = replace(plan, state=replace(known.state, parts=parts))
    epoch_samples = after.epoch_length()
    if not megatron and saved is not None and saved.by_steps and plan.by_steps:
        # The trainer counts the batches to skip from the start of an epoch of this length.
        epoch_samples = saved.epoch_samples
    plan = replace(plan, epoch_samples=epoch_samples)
    if saved is not None:
        counted = saved.step * plan.global_batch
        if not megatron:
            counted = plan.counted(saved.step) if epoch_samples >= plan.micro_samples else -1
        # The trainer's own counts fit if ranks and batches have not changed since the run began.
        only = state.parts[0]
        same = (only.dp, only.batch_size, only.first_step, only.epoch) == (part.dp, part.batch_size, 0, None)
        if len(state.parts) > 1 or not same or counted != saved.consumed:
            return replace(after, epoch_samples=epoch_samples) if megatron else _in_one_pass(after)
        # Format 1 does not record the steps, but here they are known.
        plan = plan.with_steps_of(part.draws_per_step)
    batches = plan.epoch_samples // plan.micro_samples
    # The last step of each epoch may be smaller.
    alike = megatron or plan.stop_at_end or (plan.epochs or 2) <= 1 or not batches % plan.accumulation
    return plan if alike else plan.with_steps_of(0)


def _in_one_pass(plan: RunPlan) -> RunPlan:
    """Returns the plan of a run whose trainer is given the whole rest as one epoch, after the steps it has trained."""
    trained = plan.step // plan.rollout.steps * plan.accumulation
    batches = trained + (plan.draws_left() or 0) // plan.batch_size
    if plan.steps is not None:
        batches = max(plan.steps * plan.accumulation, trained)
    offset = plan.dp_size * plan.course.current.draws - trained * plan.micro_samples
    return replace(plan, epoch_samples=batches * plan.micro_samples, index_offset=offset, one_pass=True)
