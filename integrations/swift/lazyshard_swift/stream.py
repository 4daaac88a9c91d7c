"""`TrainStream`: what ms-swift gets as its training data set; and the gate before each of a run's steps.

To ms-swift a blend of several is one stream, whose samples are the positions of the blend. The data set has the length
that ms-swift plans with: that of an epoch once the stream has ended, that of the run while it is live. Its indices go
on past that length, strided over the ranks, into the epochs that follow: samplers hand out ``epoch * len + i``.

Every rank asks the gate in its main process, from the same published numbers, so all of them go on, stop or give up at
the same step without a word between them. The DataLoader's workers, which read ahead, have no deadline of their own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lazyshard import BadRows, BlendedDataset, EncodeCache, LazyShardedDataset, LazyShardError, Order, StreamReader
from lazyshard.data.rank import Rank
from lazyshard.data.settings import check_group
from lazyshard.errors import ChunkMissing, ChunkRetired, StateMismatch, StoreUnavailable, WaitTimeout, redact
from lazyshard.format.state import BlendState
from lazyshard.plan.course import Course
from lazyshard.store.urls import stream_path
from lazyshard.stream import Published, read_retired
from lazyshard_swift import errors, parallel
from lazyshard_swift.arguments import OnBadSample
from lazyshard_swift.checkpoints import GROUPED
from lazyshard_swift.encoding import tell_cache
from lazyshard_swift.errors import ResumeRefused, StreamTooShort, not_resumed, too_short
from lazyshard_swift.parallel import Streams, notice
from lazyshard_swift.rows import Encode, EncodedRows
from lazyshard_swift.run_plan import SHOWN, RunPlan

Data: TypeAlias = LazyShardedDataset | BlendedDataset

ENDLESS: Final = 2**50
"""Indices of a data set that goes on from epoch to epoch."""
TOLD_EVERY_S: Final = 60.0
"""How often the log tells how much of what is published was trained."""

_LOOK_S: Final = 5.0
"""How long a chunk that a checkpoint goes on with may stay invisible."""
_SAVE_S: Final = 1800.0
"""How long a rank that has given up may take to save what was trained, with all others."""


def open_data(
    streams: Streams, rank: Rank, encode: Sequence[Encode] | None, order: Order, own: dict[str, Any], **whole: Any
) -> Data:
    """Opens one stream, or a blend, with options `own` of each and `whole` of all; without `encode` it gives rows."""
    blended = streams.blended
    # Layout and steps are the blend's, all else is that of each stream.
    inner = replace(order, layout="block", micro_batches_per_step=None) if blended else order
    parts = []
    for number, directory in enumerate(streams.directories):
        one = encode[number] if encode else None
        dealt = replace(inner, unit=streams.units[number]) if streams.units else inner
        options = own | {"dp_rank": rank.dp_rank, "dp_size": rank.dp_size} | ({} if blended else whole)
        if one is None or isinstance(one, EncodedRows):
            options["cache"] = EncodeCache()
        parts.append(LazyShardedDataset(directory, one, order=dealt, **options))
    if not blended:
        return parts[0]
    shared = Order(layout=order.layout, micro_batches_per_step=order.micro_batches_per_step)
    return BlendedDataset(zip(parts, streams.weights, strict=True), order=shared, stopping=streams.stopping, **whole)


def members(data: Data) -> tuple[LazyShardedDataset, ...]:
    """Returns the data set of each stream."""
    return data.datasets if isinstance(data, BlendedDataset) else (data,)


class StepGate:
    """Decides step by step, by this rank's samples in order, strided, without an end, with the deadline that counts.

    `shift` is how many positions a blend's own part has behind it where the run's current part begins.
    """

    def __init__(self, data: Data, stop_at_end: bool, *, begun: bool = False, shift: int = 0) -> None:
        self.data = data
        self._shift = shift
        self._stop_at_end = stop_at_end
        self._begun = begun
        self.stopped = False
        # Where all ranks gave up waiting; None where the stream has ended.
        self.gave_up: WaitTimeout | StoreUnavailable | None = None
        self._timer: threading.Timer | None = None

    def allows(self, first: int, stop: int, *, saves: bool = False) -> bool:
        """Returns whether a step, positions [first, stop) of this rank's lane, is trained; waits until that is certain.

        Where all ranks give up and a checkpoint `saves` what was trained, it is refused, and `end` raises the error.
        """
        if self.stopped:
            return False
        try:
            past = self._past(stop - 1)
        except IndexError as cause:
            # Not even one micro batch for each rank.
            if not self._begun or not self._stop_at_end:
                raise self._too_short() from cause
            past = True
        except (StoreUnavailable, WaitTimeout) as error:
            if not saves or not self._all_give_up(error, stop):
                raise
            return False
        if self._stop_at_end and past:
            if not first and not self._begun:
                raise self._too_short()
            self.stopped = True
        return not self.stopped

    def _all_give_up(self, error: WaitTimeout | StoreUnavailable, stop: int) -> bool:
        """Returns whether all ranks have given up before the same step, so that they can save a checkpoint together."""
        timer = errors.end_within(_SAVE_S, error)
        if not parallel.all_come(f"gave up before {stop}"):
            # One that has seen the data in the last moment trains, and waits for the others in its first collective.
            timer.cancel()
            return False
        self.stopped, self.gave_up, self._timer = True, error, timer
        return True

    def end(self) -> None:
        """Raises what made all ranks give up, once what they have trained is saved; does nothing at a stream's end."""
        if self._timer is not None:
            self._timer.cancel()
        if self.gave_up is not None:
            raise self.gave_up

    def _past(self, position: int) -> bool:
        """Returns whether a position of this rank's lane is behind the end; waits for it."""
        data, rank = self.data, self.data.rank
        index = (position + self._shift) * rank.dp_size + rank.dp_rank
        return not data.in_epoch(index) if isinstance(data, BlendedDataset) else data.draw(index).epoch > 0

    def has(self, index: int) -> bool:
        """Returns whether an index of the run's current part can be read without waiting."""
        data = self.data
        self.published()
        if isinstance(data, BlendedDataset):
            return data.ready(index + self._shift * data.rank.dp_size)
        return data._space().ready(index)

    def published(self) -> list[Published]:
        """Returns what is published now of each stream."""
        return [dataset.published() for dataset in members(self.data)]

    def published_samples(self) -> int:
        """Returns how many samples are published now, of all streams."""
        return sum(one.samples for one in self.published())

    def _too_short(self) -> StreamTooShort:
        samples, where = self.published_samples(), ", ".join(str(one.directory) for one in members(self.data))
        why = f"the stream has ended with {samples} samples, fewer than one step takes: nothing can be trained"
        return too_short(where, samples, f"{why}. Use a smaller global batch, or --sharded_lazy_on_end repeat")


class TrainStream(Dataset[Any]):
    """A stream, or a blend of several, as ms-swift's training data set.

    A step waits `max_wait` seconds at the most. Samplers that group by length ask for `lengths`, of shape (samples,).
    """

    def __init__(
        self,
        plan: RunPlan,
        encode: Sequence[Encode],
        *,
        max_wait: float,
        on_bad_sample: OnBadSample,
        samples_per_chunk: int | None,
        cache: EncodeCache = EncodeCache(),
        lengths: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        check_group("cache", cache, EncodeCache)
        self._told_at = time.monotonic()
        self._cache = cache.directory
        self._lengths = None if lengths is None else lengths[: plan.epoch_samples]
        streams, rank, ranks, size = plan.streams, plan.rank, plan.rank.dp_size, plan.batch_size
        steps = plan.state.parts[-1].draws_per_step // size if streams.blended else 0
        order = Order("chunk", "strided", plan.window, plan.seed, steps or None)
        own: dict[str, Any] = {"samples_per_chunk": samples_per_chunk, "max_wait": max_wait}
        asked = open_data(streams, rank, None, order, own, num_samples=ENDLESS, batch_size=size)
        # Workers read ahead of the training, for as long as it takes: the gate is what gives up.
        own |= {"max_wait": float("inf"), "bad_rows": BadRows(on_bad_sample), "cache": cache}
        if plan.layout == GROUPED:
            # The sampler's indices are samples, of which it takes some for each rank: there are no lanes.
            rank = Rank(0, 1)
        else:
            own["consumer"] = plan.consumer
        order = order if plan.layout == "strided" else replace(order, layout="block")
        indices = ENDLESS if plan.layout == "strided" else plan.epoch_samples
        self._dataset = open_data(streams, rank, encode, order, own, num_samples=indices, batch_size=size)
        for dataset in members(self._dataset):
            dataset.reader.quiet = True
        _load_state(plan, self._dataset, asked)
        shift = 0
        if isinstance(asked, BlendedDataset):
            # Positions count from where the plan's current part begins; the blend's own part may have begun elsewhere.
            shift = (plan.consumed_before - asked.consumed_before) // ranks
            blend = asked
            plan = replace(plan, blend=lambda consumed: BlendState.from_dict(blend.state_dict(consumed), "the blend"))
        self.plan = plan
        self._offset = plan.index_offset + shift * ranks
        self.gate = StepGate(asked, plan.stop_at_end, begun=plan.state.consumed > 0, shift=shift)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what is the main process's: the gate, and the lengths, for which samplers ask."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("gate", "_lengths")}
        return state | {"plan": replace(self.plan, blend=None)}

    def __len__(self) -> int:
        """What ms-swift takes for the length of an epoch, over all ranks."""
        return self.plan.epoch_samples

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns an encoded sample, or by "lengths" a list of the tokens of all where samples are grouped by them."""
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
        plan, streams, data = self.plan, self.plan.streams, self._dataset
        shares = [f"{share:.4g} of " for share in data.shares] if isinstance(data, BlendedDataset) else [""]
        shown = [
            f"{share}{redact(directory)} ({facts.samples} samples published, {facts.samples_per_chunk} per chunk, "
            f"{'ended' if facts.ended else 'still being produced'})"
            for share, directory, facts in zip(shares, streams.directories, streams.facts, strict=True)
        ]
        some = ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
        order = f"shuffled in windows of {plan.window} chunks a rank" if plan.window else "in the order of the stream"
        if plan.layout != "strided":
            order = f"{'grouped by length' if plan.layout == GROUPED else 'shuffled'} by ms-swift's sampler"
        elif plan.state.unit != plan.facts.samples_per_chunk:
            order = f"dealt in units of {plan.state.unit} samples, {order}"
        return f"TrainStream({some}; rank {plan.rank.dp_rank} of {plan.rank.dp_size}, {order})"

    def why_it_stops(self, consumed: int, step_samples: int) -> tuple[str, str]:
        """Returns why the gate allows no further step, and what was not trained, for `stopped`."""
        if self.gate.gave_up is not None:
            return "no data came in time", ""
        return self.plan.end(consumed, self.gate.published(), step_samples)

    def tell_stop(self, consumed: int, step_samples: int, step: int, planned: int, checkpoint: str | None) -> None:
        """Tells that the run stops after a step before those that were planned; what is saved of it, if it is."""
        notice(stopped(*self.why_it_stops(consumed, step_samples), step, planned, consumed, checkpoint))

    def tell_progress(self, consumed: int, *, at_once: bool = False) -> None:
        """Tells how much of what is published was trained: now and then, or at once."""
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
            tell_cache(self._cache, [dataset.stats() for dataset in members(self._dataset)])

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
        """Refuses to go on after what the trainer has restored where the next sample would not be exactly the next."""
        plan, saved = self.plan, self.plan.saved
        if consumed == 0:
            return
        if plan.checkpoint is None or saved is None:
            anew = "megatron: --finetune true; swift: --resume_only_model true --ignore_data_skip true"
            why = f"{consumed} samples were trained, but there is no lazyshard.json beside the weights that says which"
            way_out = (
                f"was it trained without the flag, or copied in part? To start anew take the weights alone ({anew})"
            )
            raise not_resumed(plan.checkpoint or "the checkpoint", f"{why}: {way_out}")
        if consumed != saved.consumed:
            then = f"the trainer would go on after {consumed}, in step {step + 1}: is its lazyshard.json another one's?"
            why = f"{saved.consumed} samples were trained in {saved.step} steps, and {then}"
            raise not_resumed(plan.checkpoint, why, saved.consumed, consumed)
        draws = plan.draws if plan.layout == "strided" else consumed // plan.rank.dp_size
        if plan.stop_at_end and plan.total is not None and not _in_first_epoch(plan.course, draws, plan.total):
            cut = "was it cut, or was --sharded_lazy_on_end repeat given before?"
            why = f"it stands at sample {consumed}, the stream has ended with {plan.total}: {cut}"
            raise not_resumed(plan.checkpoint, why, f"at least {consumed} samples", plan.total)
        self._check_present(draws)

    def _check_present(self, draws: int) -> None:
        """Refuses to go on at a position whose chunks are gone."""
        plan, asked = self.plan, members(self.gate.data)
        if plan.layout == GROUPED:
            # From any of which ms-swift's sampler may draw.
            retired = read_retired(stream_path(plan.streams.where), plan.facts.stream)
            if retired:
                gone = f"the producer of {plan.streams.where} has deleted the chunks below {retired}"
                anew = "start anew from the weights alone, without it, or produce the stream anew with --retain all"
                why = f"{gone}, and a run with --group_by_length true may need all of them: {anew}"
                raise not_resumed(plan.checkpoint, why, "all chunks", f"those from {retired} on")
            return
        spots = [(plan.course, draws)]
        if plan.streams.blended:
            courses = [dataset._space().course for dataset in asked]
            spots = [(course, course.current.draws) for course in courses]
        for (course, at), dataset, facts in zip(spots, asked, plan.streams.facts, strict=True):
            samples = _open_samples(course, plan.rank.dp_rank, at, facts.total, plan.stop_at_end)
            check_present(dataset.reader, samples)


def stopped(why: str, left: str, step: int, planned: int, trained: int, checkpoint: str | None) -> str:
    """Returns the line of a run that stops before the steps that were asked for, as `why_it_stops` says."""
    saved = "" if checkpoint is None else f". Checkpoint: {checkpoint}"
    return (
        f"{why}: training stops after step {step} of {planned}, on all ranks alike, with {trained} samples trained"
        f"{left}{saved}"
    )


def _load_state(plan: RunPlan, *datasets: Data) -> None:
    """Has the data sets go on where the plan's state stands; it may be that they begin."""
    state, begun = plan.state, None
    if plan.streams.blended:
        begun = None if plan.saved is None or plan.saved.blend is None else plan.saved.blend.to_dict()
    elif plan.layout == "strided":
        part = replace(state.parts[-1], draws=0, epoch=None, skip=(), first_step=0)
        begun = None if state == replace(state, parts=(part,), consumed=0) else state.to_dict()
    if begun is None:
        return
    try:
        for data in datasets:
            data.load_state_dict(begun)
    except StateMismatch as cause:
        raise not_resumed(plan.checkpoint or plan.streams.where, str(cause), cause.expected, cause.actual) from cause


def _open_samples(course: Course, lane: int, position: int, total: int | None, stop_at_end: bool) -> list[int]:
    """Returns the samples of the window that is open at a position of a lane, from there on; none at the run's end."""
    stop = max(position + 1, course.drawable(course.needed(position)))
    if total is not None:
        length, full, span = course.epoch_length(total), course.full_epoch_length(total), course.rules.span
        if position < length:
            stop = min(stop, length)
        elif stop_at_end:
            # Behind it chunks may be deleted.
            return []
        else:
            within = (position - length) % full
            stop = position - within + min((within // span + 1) * span, full)
    samples: list[int] = course.draws(lane, np.arange(position, stop), total)[1].tolist()
    return samples


def _in_first_epoch(course: Course, draws: int, total: int) -> bool:
    """Returns whether what was drawn lies in the run's first epoch."""
    with contextlib.suppress(ValueError):
        return course.epoch(total) == 0 and draws <= course.epoch_length(total)
    return False


def check_present(reader: StreamReader, samples: Iterable[int]) -> None:
    """Refuses to start where the chunk of one of these samples, that was published, is gone."""
    published = reader.refresh().samples
    chunks = {sample // reader.samples_per_chunk for sample in samples if sample < published}
    # They were published long ago, so the grace period for those that are just appearing is not due.
    reader.max_wait, patience = min(_LOOK_S, reader.max_wait), reader.max_wait
    try:
        for number in sorted(chunks):
            reader.chunk(number)
    except (ChunkRetired, ChunkMissing) as cause:
        text = f"{cause} The checkpoint goes on with chunk {cause.chunk}: take a later one, or restore the chunk"
        raise ResumeRefused(text, expected=f"chunk {cause.chunk}", actual="deleted") from cause
    finally:
        reader.max_wait = patience
