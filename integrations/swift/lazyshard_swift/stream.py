"""`TrainStream`: what ms-swift gets as its training data set.

It holds one stream, or several that are blended (`--dataset A B --interleave_prob 0.8 0.2`). To ms-swift and its
trainers both are one stream, whose samples are the positions of the blend.

The data set has the length that ms-swift plans with: that of an epoch once the stream has ended, that of the run while
it is live. Its indices go on past that length, strided over the ranks, into the epochs that follow: samplers hand out
``epoch * len + i``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lazyshard import BadRows, BlendedDataset, EncodeCache, LazyShardError, Order, StreamReader
from lazyshard.data.rank import Rank
from lazyshard.data.shared import Stats
from lazyshard.errors import ChunkMissing, ChunkRetired, redact
from lazyshard.format.blend_state import BlendState
from lazyshard.plan.course import Course
from lazyshard.store.urls import stream_path
from lazyshard.stream import read_retired
from lazyshard_swift import parallel, settings
from lazyshard_swift.encoding import tell_cache
from lazyshard_swift.errors import ResumeRefused
from lazyshard_swift.gate import StepGate, load_state, members, open_data
from lazyshard_swift.parallel import notice
from lazyshard_swift.position import GROUPED
from lazyshard_swift.rows import Encode
from lazyshard_swift.run_plan import SHOWN, RunPlan

ENDLESS: Final = 2**50
"""Indices of a data set that goes on from epoch to epoch."""

TOLD_EVERY_S: Final = 60.0
"""How often the log tells how much of what is published was trained."""

_LOOK_S: Final = 5.0
"""How long a chunk that a checkpoint goes on with may stay invisible."""


class TrainStream(Dataset[Any]):
    """A stream, or a blend of several, as ms-swift's training data set.

    Args:
        plan: what was decided.
        encode: makes samples of rows, raw or encoded ones; one for each stream.
        max_wait: how many seconds a step may wait for its data.
        on_bad_sample: "substitute" or "raise".
        samples_per_chunk: for foreign directories.
        cache: of encoded samples.
        lengths: u32 of shape (samples,): tokens of each sample, for samplers that group by length; else None.

    Raises:
        ResumeRefused: the checkpoint's state does not fit one of the streams.
    """

    def __init__(
        self,
        plan: RunPlan,
        encode: Sequence[Encode],
        *,
        max_wait: float,
        on_bad_sample: settings.OnBadSample,
        samples_per_chunk: int | None,
        cache: EncodeCache = EncodeCache(),
        lengths: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self._told_at = time.monotonic()
        self._cache = cache.directory
        self._lengths = None if lengths is None else lengths[: plan.epoch_samples]
        # Workers read ahead of the training, for as long as it takes: the gate is what gives up.
        waiting = {"max_wait": float("inf"), "bad_rows": BadRows(on_bad_sample), "cache": cache}
        rank = plan.rank
        if plan.layout == GROUPED:
            # The sampler's indices are samples, of which it takes some for each rank: there are no lanes.
            rank = Rank(0, 1)
        else:
            waiting["consumer"] = plan.consumer
        steps = plan.state.parts[-1].draws_per_step // plan.batch_size if plan.streams.blended else 0
        order = Order(
            layout="strided", shuffle_window=plan.window, seed=plan.seed, micro_batches_per_step=steps or None
        )
        own: dict[str, Any] = {"samples_per_chunk": samples_per_chunk}
        whole: dict[str, Any] = {"num_samples": ENDLESS, "batch_size": plan.batch_size}
        asked = open_data(plan.streams, plan.rank, None, order, own | {"max_wait": max_wait}, whole)
        if plan.layout != "strided":
            order, whole["num_samples"] = replace(order, layout="block"), plan.epoch_samples
        self._dataset = open_data(plan.streams, rank, encode, order, own | waiting, whole)
        for dataset in members(self._dataset):
            dataset.reader.quiet = True
        begun = _state_to_load(plan)
        if begun is not None:
            for data in (self._dataset, asked):
                load_state(data, begun, plan.checkpoint or plan.directory)
        shift = 0
        if isinstance(asked, BlendedDataset):
            # Positions count from where the plan's current part begins; the blend's own part may have begun elsewhere.
            shift = (plan.consumed_before - asked.consumed_before) // plan.rank.dp_size
            blend = asked
            plan = replace(plan, blend=lambda consumed: BlendState.from_dict(blend.state_dict(consumed), "the blend"))
        self.plan = plan
        self._offset = plan.index_offset + shift * plan.rank.dp_size
        self.gate = StepGate(asked, plan.stop_at_end, begun=plan.state.consumed > 0, shift=shift)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what is the main process's: the gate, and the lengths, for which samplers ask."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("gate", "_lengths")}
        return state | {"plan": replace(self.plan, blend=None)}

    def __len__(self) -> int:
        """What ms-swift takes for the length of an epoch, over all ranks."""
        return self.plan.epoch_samples

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns an encoded sample, or by "lengths" a list of the tokens of all where samples are grouped by them.

        Raises as `LazyShardedDataset` does.
        """
        if isinstance(index, str):
            if index != "lengths" or self._lengths is None:
                raise KeyError(index)
            return self._lengths.tolist()
        return self._dataset[index + self._offset]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the encoded samples of a batch."""
        offset = self._offset
        return self._dataset.__getitems__([index + offset for index in indices] if offset else indices)

    def __repr__(self) -> str:
        """Says what is read, for the log."""
        plan, streams = self.plan, self.plan.streams
        data = self._dataset
        shares = [f"{share:.4g} of " for share in data.shares] if isinstance(data, BlendedDataset) else [""]
        shown = [
            f"{share}{redact(directory)} ({facts.samples} samples published, {facts.samples_per_chunk} per chunk, "
            f"{'ended' if facts.ended else 'still being produced'})"
            for share, directory, facts in zip(shares, streams.directories, streams.facts, strict=True)
        ]
        some = ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
        order = f"shuffled in windows of {plan.window} chunks a rank" if plan.window else "in the order of the stream"
        if plan.state.unit != plan.facts.samples_per_chunk:
            order = f"dealt in units of {plan.state.unit} samples, {order}"
        if plan.layout != "strided":
            order = f"{'grouped by length' if plan.layout == GROUPED else 'shuffled'} by ms-swift's sampler"
        return f"TrainStream({some}; rank {plan.rank.dp_rank} of {plan.rank.dp_size}, {order})"

    def stats(self) -> Sequence[Stats]:
        """Returns what this rank and its workers have met so far, of each stream."""
        return [dataset.stats() for dataset in members(self._dataset)]

    def why_it_stops(self, consumed: int, step_samples: int) -> tuple[str, str]:
        """Returns why the gate allows no further step, and what was not trained, for `parallel.stopped`.

        Args:
            consumed: samples that were trained since the run began.
            step_samples: samples of a step, over all ranks.
        """
        if self.gate.gave_up is not None:
            return "no data came in time", ""
        return self.plan.end(consumed, self.gate.published(), step_samples)

    def tell_progress(self, consumed: int, *, at_once: bool = False) -> None:
        """Tells how much of what is published was trained: now and then, or at once.

        Args:
            consumed: samples that were trained since the run began.
            at_once: whether it is told however short ago it was told before.
        """
        now = time.monotonic()
        if not parallel.is_first() or not (at_once or now - self._told_at >= TOLD_EVERY_S):
            return
        self._told_at = now
        try:
            published = self.gate.published_samples()
        except (LazyShardError, OSError):
            # The gate asks again, and knows what to do.
            return
        more = ", in several epochs" if consumed > published else ""
        notice(f"trained {consumed} of {published} published samples{more}")

    def tell_cache(self) -> None:
        """Tells, at the end of a training, how much of what this rank drew was in the cache, if there is one."""
        if self._cache is not None:
            tell_cache(self._cache, self.stats())

    def first_sample(self) -> Any | None:
        """Returns the first sample that the first rank trains if it is there already, without waiting."""
        plan = self.plan
        # A sampler in an order of its own decides by itself with which it goes on.
        index = plan.draws * plan.rank.dp_size if plan.layout == "strided" else 0
        try:
            return self[index - plan.index_offset] if self.gate.has(index) else None
        except ChunkRetired:
            # Trained to the end: no sample follows, and the first one was deleted.
            return None

    def check_resume(self, consumed: int, step: int) -> None:
        """Refuses to go on where the next sample would not be exactly the next one.

        Args:
            consumed: samples trained, as the trainer has restored it.
            step: steps trained, likewise.

        Raises:
            ResumeRefused: with the reason and the way out.
        """
        plan, saved = self.plan, self.plan.saved
        if consumed == 0:
            return
        if plan.checkpoint is None or saved is None:
            where = plan.checkpoint or "the checkpoint"
            raise ResumeRefused(
                f"{where}: {consumed} samples were trained, but there is no lazyshard.json beside the weights that "
                f"says which: was it trained without --sharded_lazy, or copied in part? To start on the stream from "
                f"its beginning take the weights alone (megatron: --finetune true; swift: --resume_only_model true "
                f"--ignore_data_skip true)",
                checkpoint=where,
            )
        if consumed != saved.consumed:
            raise ResumeRefused(
                f"{plan.checkpoint}: {saved.consumed} samples were trained in {saved.step} steps, and the trainer "
                f"would go on after {consumed}, in step {step + 1}: is the lazyshard.json there another checkpoint's?",
                checkpoint=plan.checkpoint,
                expected=str(saved.consumed),
                actual=str(consumed),
            )
        draws = plan.draws if plan.layout == "strided" else consumed // plan.rank.dp_size
        if plan.stop_at_end and plan.total is not None and not _in_first_epoch(plan.course, draws, plan.total):
            raise ResumeRefused(
                f"{plan.checkpoint}: it stands at sample {consumed}, the stream has ended with {plan.total}: "
                f"was it cut, or was --sharded_lazy_on_end repeat given before?",
                checkpoint=plan.checkpoint,
                expected=f"at least {consumed} samples",
                actual=str(plan.total),
            )
        self._check_present(draws)

    def _check_present(self, draws: int) -> None:
        """Refuses to go on at a position whose chunks are gone."""
        plan = self.plan
        if plan.layout == GROUPED:
            _check_nothing_retired(plan)
            return
        asked = members(self.gate.data)
        spots = [(plan.course, draws)]
        if plan.streams.blended:
            courses = [dataset._draws.indices().course for dataset in asked]
            spots = [(course, course.current.draws) for course in courses]
        for (course, at), dataset, facts in zip(spots, asked, plan.streams.facts, strict=True):
            samples = open_samples(course, plan.rank.dp_rank, at, facts.total, plan.stop_at_end)
            check_present(dataset.reader, samples)


def open_samples(course: Course, lane: int, position: int, total: int | None, stop_at_end: bool) -> list[int]:
    """Returns the samples of the window that is open at a position of a lane, from there on."""
    stop = max(position + 1, course.drawable(course.needed(position)))
    if total is not None:
        length = course.epoch_length(total)
        if position < length:
            stop = min(stop, length)
        elif stop_at_end:
            # Trained to the end, behind which chunks may be deleted.
            return []
        else:
            full, span = course.full_epoch_length(total), course.rules.span
            within = (position - length) % full
            stop = position - within + min((within // span + 1) * span, full)
    samples: list[int] = course.draws(lane, np.arange(position, stop), total)[1].tolist()
    return samples


def _state_to_load(plan: RunPlan) -> dict[str, Any] | None:
    """Returns the state with which the data sets go on; None where they begin."""
    if plan.streams.blended:
        return None if plan.saved is None or plan.saved.blend is None else plan.saved.blend.to_dict()
    state = plan.state
    part = replace(state.parts[-1], draws=0, epoch=None, skip=(), first_step=0)
    if plan.layout != "strided" or state == replace(state, parts=(part,), consumed=0):
        return None
    return state.to_dict()


def _in_first_epoch(course: Course, draws: int, total: int) -> bool:
    """Returns whether the last of the positions drawn, or the first one if none is, lies in the run's first epoch."""
    try:
        return course.epoch(total) == 0 and draws <= course.epoch_length(total)
    except ValueError:
        return False


def check_present(reader: StreamReader, samples: Iterable[int]) -> None:
    """Refuses to start where a chunk that was published is gone.

    Args:
        reader: of the stream.
        samples: numbers of samples that the run needs from here on, of which those published are looked for.

    Raises:
        ResumeRefused: naming the chunk.
    """
    published = reader.refresh().samples
    chunks = {sample // reader.samples_per_chunk for sample in samples if sample < published}
    # They were published long ago, so the grace period for those that are just appearing is not due.
    reader.max_wait, patience = min(_LOOK_S, reader.max_wait), reader.max_wait
    try:
        for number in sorted(chunks):
            reader.chunk(number)
    except (ChunkRetired, ChunkMissing) as cause:
        text = (
            f"{cause}. The checkpoint goes on with chunk {cause.chunk}"
            if isinstance(cause, ChunkRetired)
            else f"{cause} The checkpoint goes on with it; take a later checkpoint, or restore the chunk"
        )
        raise ResumeRefused(text, expected=f"chunk {cause.chunk}", actual="deleted") from cause
    finally:
        reader.max_wait = patience


def _check_nothing_retired(plan: RunPlan) -> None:
    """Refuses to go on with any chunk gone, where ms-swift's sampler by length may draw from all."""
    assert plan.stream_id is not None
    retired = read_retired(stream_path(plan.directory), plan.stream_id)
    if retired:
        raise ResumeRefused(
            f"{plan.directory}: its producer has deleted the chunks below {retired}, and a run with "
            f"--group_by_length true may need all of them: start on the stream anew from the weights alone, "
            f"without it, or produce the stream anew with --retain all",
            checkpoint=plan.checkpoint,
            expected="all chunks",
            actual=f"those from {retired} on",
        )
