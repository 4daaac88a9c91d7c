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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lazyshard import BadRows, BlendedDataset, EncodeCache, LazyShardedDataset, LazyShardError, Order
from lazyshard.data.rank import Rank
from lazyshard.errors import ChunkMissing, ChunkRetired, StateMismatch, StoreUnavailable, WaitTimeout, redact
from lazyshard.format.state import BlendState
from lazyshard.stream import Published
from lazyshard_swift import errors, parallel
from lazyshard_swift.arguments import OnBadSample
from lazyshard_swift.checkpoints import GROUPED
from lazyshard_swift.encoding import tell_cache
from lazyshard_swift.errors import ResumeRefused, StreamTooShort, not_resumed, too_short
from lazyshard_swift.ms_swift import notice
from lazyshard_swift.rows import Encode, EncodedRows
from lazyshard_swift.run_plan import SHOWN, RunPlan, Streams

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

    `shift` is how many positions a blend's own part has behind it where the run's current part begins. `stopped` says
    that no step follows: the stream has ended, or all ranks `gave_up` waiting.
    """

    def __init__(self, data: Data, stop_at_end: bool, *, begun: bool = False, shift: int = 0) -> None:
        self.data, self.stopped = data, False
        self.gave_up: WaitTimeout | StoreUnavailable | None = None
        self._shift, self._stop_at_end, self._begun = shift, stop_at_end, begun
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
        self._told_at = time.monotonic()
        self._cache = cache.directory
        self._lengths = None if lengths is None else lengths[: plan.epoch_samples]
        streams, rank, strided = plan.streams, plan.rank, plan.layout == "strided"
        steps = plan.state.parts[-1].draws_per_step // plan.batch_size if streams.blended else 0
        order = Order("chunk", "strided", plan.window, plan.seed, steps or None)
        own: dict[str, Any] = {"samples_per_chunk": samples_per_chunk, "max_wait": max_wait}
        asked = open_data(streams, rank, None, order, own, num_samples=ENDLESS, batch_size=plan.batch_size)
        # Workers read ahead of the training, for as long as it takes: the gate is what gives up.
        own |= {"max_wait": float("inf"), "bad_rows": BadRows(on_bad_sample), "cache": cache}
        if plan.layout != GROUPED:
            own["consumer"] = plan.consumer
        # A sampler that groups hands out samples, of which it takes some for each rank: there are no lanes.
        read_by = Rank(0, 1) if plan.layout == GROUPED else rank
        order, indices = (order, ENDLESS) if strided else (replace(order, layout="block"), plan.epoch_samples)
        self._dataset = open_data(streams, read_by, encode, order, own, num_samples=indices, batch_size=plan.batch_size)
        for dataset in members(self._dataset):
            dataset.reader.quiet = True
        _load_state(plan, self._dataset, asked)
        shift = 0
        if isinstance(asked, BlendedDataset):
            # Positions count from where the plan's current part begins; the blend's own part may have begun elsewhere.
            shift = (plan.consumed_before - asked.consumed_before) // rank.dp_size
            blend = asked
            plan = replace(plan, blend=lambda consumed: BlendState.from_dict(blend.state_dict(consumed), "the blend"))
        self.plan = plan
        self._offset = plan.index_offset + shift * rank.dp_size
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
        return self._dataset.__getitems__([index + self._offset for index in indices])

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

    def tell_stop(self, consumed: int, step: int, planned: int, checkpoint: str | None) -> None:
        """Tells why the run stops after a step before those that were planned, and what is saved of it, if it is."""
        gave_up = self.gate.gave_up is not None
        why, left = ("no data came in time", "") if gave_up else self.plan.end(consumed, self.gate.published())
        stops = f"training stops after step {step} of {planned}, on all ranks alike, with {consumed} samples trained"
        saved = "" if checkpoint is None else f". Checkpoint: {checkpoint}"
        notice(f"{why}: {stops}{left}{saved}")

    def tell_progress(self, consumed: int, *, at_once: bool = False) -> None:
        """Tells how much of what is published was trained: now and then, or at once."""
        now = time.monotonic()
        if not parallel.is_first() or not (at_once or now - self._told_at >= TOLD_EVERY_S):
            return
        self._told_at = now
        # The gate asks again, and knows what to do about an error.
        with contextlib.suppress(LazyShardError, OSError):
            published = self.gate.published_samples()
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
        # Trained to the end no sample follows, and the first one was deleted.
        with contextlib.suppress(ChunkRetired):
            return self[index - plan.index_offset] if self.gate.has(index) else None
        return None

    def check_resume(self, consumed: int, step: int) -> None:
        """Refuses to go on after what the trainer has restored where the next sample would not be exactly the next."""
        plan, saved, total = self.plan, self.plan.saved, self.plan.total
        if consumed == 0:
            return
        if plan.checkpoint is None or saved is None:
            anew = "megatron: --finetune true; swift: --resume_only_model true --ignore_data_skip true"
            why = f"{consumed} samples were trained, but there is no lazyshard.json beside the weights that says which"
            raise not_resumed(plan.checkpoint or "the checkpoint", f"{why}: start anew from the weights ({anew})")
        if consumed != saved.consumed:
            then = f"the trainer would go on after {consumed}, in step {step + 1}: is its lazyshard.json another one's?"
            why = f"{saved.consumed} samples were trained in {saved.step} steps, and {then}"
            raise not_resumed(plan.checkpoint, why, saved.consumed, consumed)
        draws, course = plan.draws if plan.layout == "strided" else consumed // plan.rank.dp_size, plan.course
        if plan.stop_at_end and total is not None and (course.epoch(total) or draws > course.epoch_length(total)):
            why = f"it stands at sample {consumed}, behind the end of the stream at {total}: was it cut, or repeated?"
            raise not_resumed(plan.checkpoint, why, f"at least {consumed} samples", total)
        if plan.layout == "strided":
            for dataset in members(self.gate.data):
                _check_present(dataset, plan.stop_at_end)


def _check_present(dataset: LazyShardedDataset, stop_at_end: bool) -> None:
    """Refuses to go on with a chunk that was published and is gone: the workers would wait for it for ever."""
    reader, space = dataset.reader, dataset._space()
    published = reader.refresh().samples
    # To the end of the window that is open.
    course, stands = space.course, space.stands
    left = min(course.rules.span, max(1, course.drawable(course.needed(stands)) - stands))
    indices = space.lane_indices()[:left]
    drawn = [dataset.draw(index) for index in indices if space.ready(index)]
    chunks = {one.sample // reader.samples_per_chunk for one in drawn if not (stop_at_end and one.epoch)}
    # They were published long ago, so the grace period for those that are just appearing is not due.
    reader.max_wait, patience = min(_LOOK_S, reader.max_wait), reader.max_wait
    try:
        for number in sorted(chunks):
            if number * reader.samples_per_chunk < published:
                reader.chunk(number)
    except (ChunkRetired, ChunkMissing) as cause:
        text = f"{cause} The checkpoint goes on with chunk {cause.chunk}: take a later one, or restore the chunk"
        raise ResumeRefused(text, expected=f"chunk {cause.chunk}", actual="deleted") from cause
    finally:
        reader.max_wait = patience


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
