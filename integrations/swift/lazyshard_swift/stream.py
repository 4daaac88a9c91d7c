"""`TrainStream`: what ms-swift gets as its training data set; and the gate before each of a run's steps.

To ms-swift a blend is one stream, whose samples are its positions. The data set has the length that ms-swift plans
with: that of an epoch once the stream has ended, that of the run while it is live. Its indices continue past that,
strided over the ranks, into later epochs. Every rank asks the gate in its main process, from the same published
numbers, so all continue, stop or give up at the same step without a word. Workers, which read ahead, have no deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Dataset

from lazyshard import BlendedDataset, EncodeCache, LazyShardedDataset, LazyShardError, Order
from lazyshard.data.rank import Rank
from lazyshard.errors import ChunkMissing, ChunkRetired, StateMismatch, StoreUnavailable, WaitTimeout, redact
from lazyshard.format.state import BlendState, RunState
from lazyshard.stream import Published
from lazyshard_swift import checkpoints, errors
from lazyshard_swift.errors import ResumeRefused, StreamTooShort, not_resumed, too_short
from lazyshard_swift.ms_swift import changed, notice
from lazyshard_swift.rows import Encode, EncodedRows
from lazyshard_swift.run_plan import SHOWN, RunPlan, Stream

Data: TypeAlias = LazyShardedDataset | BlendedDataset
Lengths: TypeAlias = npt.NDArray[np.uint32]
Options: TypeAlias = dict[str, Any]  # of the data set of one stream, by name

ENDLESS: Final = 2**50  # Indices of a data set that continues from epoch to epoch
TOLD_EVERY_S: Final = 60.0  # How often the log tells how much of what is published was trained
_LOOK_S: Final = 5.0  # How long a chunk that a checkpoint continues with may stay invisible
_COMING_S: Final = 30.0  # Ranks that wait for the same samples give up within seconds of each other
_POLL_S: Final = 0.5
_SAVE_S: Final = 1800.0  # How long a rank that has given up may take to save what was trained, with all others


def open_data(
    streams: Sequence[Stream], rank: Rank, encode: Sequence[Encode], order: Order, own: Options, **whole: Any
) -> Data:
    """Opens one stream, or a blend, with options `own` of each and `whole` of all; where none encodes it gives rows."""
    pairs, blended = [], len(streams) > 1
    # Layout and steps are the blend's, all else is that of each stream.
    shared = Order(layout=order.layout, micro_batches_per_step=order.micro_batches_per_step)
    inner = replace(order, layout="block", micro_batches_per_step=None) if blended else order
    own = own | rank._asdict() | ({} if blended else whole)
    for stream, one in itertools.zip_longest(streams, encode):
        cache = {"cache": EncodeCache()} if one is None or isinstance(one, EncodedRows) else {}
        dealt = replace(inner, unit=stream.unit or inner.unit)
        pairs.append((LazyShardedDataset(stream.directory, one, order=dealt, **own | cache), stream.weight))
    return BlendedDataset(pairs, order=shared, **whole) if blended else pairs[0][0]


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
        rank = self.data.rank
        try:
            past = not self.data.in_epoch((stop - 1 + self._shift) * rank.dp_size + rank.dp_rank)
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
        if not all_come(f"gave up before {stop}"):
            # One that has seen the data in the last moment trains, and waits for the others in its first collective.
            timer.cancel()
            return False
        self.stopped, self.gave_up, self._timer = True, error, timer
        return True

    def end(self) -> None:
        """Raises what made all ranks give up, once what they have trained is saved; does nothing at a stream's end."""
        if self.gave_up is not None and self._timer is not None:
            self._timer.cancel()
            raise self.gave_up

    def published(self) -> list[Published]:
        """Returns what is published now of each stream."""
        return [dataset.published() for dataset in members(self.data)]

    def _too_short(self) -> StreamTooShort:
        samples = sum(one.samples for one in self.published())
        where = ", ".join(str(one.directory) for one in members(self.data))
        why = f"the stream has ended with {samples} samples, fewer than one step takes: nothing can be trained"
        return too_short(where, samples, f"{why}. Use a smaller global batch, or --sharded_lazy_on_end repeat")


def all_come(key: str) -> bool:
    """Returns whether every rank calls this with the same key within some seconds; no collective that could hang."""
    if not checkpoints.several():
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return _all_come(store, f"lazyshard/{key}", dist.get_world_size(), _COMING_S)
    except (AttributeError, RuntimeError, ValueError):
        # The process that holds the store has ended, or there is none.
        return False


def _all_come(store: Any, key: str, ranks: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    came = store.add(f"{key}/came", 1)
    while came < ranks and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        came = store.add(f"{key}/came", 0)
    # Whoever is first decides, for those too that come in the same moment.
    return bool(store.compare_set(f"{key}/decision", "", "all" if came >= ranks else "not all") == b"all")


class TrainStream(Dataset[Any]):
    """A stream, or a blend of several, opened with options `own` of each, as ms-swift's training data set.

    A step waits `max_wait` seconds at the most. Samplers that group by length ask for `lengths`, of shape (samples,).
    """

    def __init__(self, plan: RunPlan, encode: Sequence[Encode], own: Options, lengths: Lengths | None = None) -> None:
        self._told_at, self._cache = time.monotonic(), own["cache"].directory
        self._lengths = None if lengths is None else lengths[: plan.epoch_samples]
        whole: dict[str, Any] = {"batch_size": plan.batch_size, "num_samples": ENDLESS}
        order = Order("chunk", "strided", plan.window, plan.seed)
        if plan.blended:
            whole["stopping"] = plan.stopping
            steps = plan.state.parts[-1].draws_per_step // plan.batch_size
            order = replace(order, micro_batches_per_step=steps or None)
        asked = open_data(plan.streams, plan.rank, (), order, own, **whole)
        # Workers read ahead of the training, for as long as it takes: the gate is what gives up.
        own, read_by = own | {"max_wait": float("inf"), "consumer": plan.consumer}, plan.rank
        if plan.layout == checkpoints.GROUPED:
            # The sampler hands out samples, of which it takes some for each rank: there are no lanes.
            own["consumer"], read_by = None, Rank(0, 1)
        if plan.layout != "strided":
            order, whole["num_samples"] = replace(order, layout="block"), plan.epoch_samples
        self._dataset = open_data(plan.streams, read_by, encode, order, own, **whole)
        for dataset in members(self._dataset):
            dataset.reader.quiet = True
        _load_state(plan, self._dataset, asked)
        shift = 0
        if isinstance(asked, BlendedDataset):
            # Positions count from where the plan's current part begins; the blend's own part may have begun elsewhere.
            shift = (plan.course.consumed_before - asked.consumed_before) // plan.dp_size
            plan = replace(plan, blend_at=asked._state_after)
        self.plan = plan
        self._offset = plan.index_offset + shift * plan.dp_size
        self.gate = StepGate(asked, plan.stop_at_end, begun=plan.state.consumed > 0, shift=shift)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what is the main process's: the gate, and the lengths, for which samplers ask."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("gate", "_lengths")}
        return state | {"plan": replace(self.plan, blend_at=None)}

    def __len__(self) -> int:
        """What ms-swift takes for the length of an epoch, over all ranks."""
        return self.plan.epoch_samples

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns an encoded sample, or by "lengths" a list of the tokens of all where samples are grouped by them."""
        if not isinstance(index, str):
            return self._dataset[index + self._offset]
        if index != "lengths" or self._lengths is None:
            raise KeyError(index)
        return self._lengths.tolist()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the encoded samples of a batch."""
        return self._dataset.__getitems__([index + self._offset for index in indices])

    def __repr__(self) -> str:
        """Says what is read, for the log."""
        plan, data = self.plan, self._dataset
        shares, shown = data.shares if isinstance(data, BlendedDataset) else (1.0,), []
        for share, one in zip(shares[:SHOWN], plan.streams, strict=False):
            state = f"{one.samples_per_chunk} per chunk, {'ended' if one.ended else 'still being produced'}"
            which = f"{share:.4g} of {redact(one.directory)}" if plan.blended else redact(one.directory)
            shown.append(f"{which} ({one.samples} samples published, {state})")
        shown += [f"and {len(shares) - SHOWN} more"] if len(shares) > SHOWN else []
        order = f"shuffled in windows of {plan.window} chunks a rank" if plan.window else "in the order of the stream"
        if plan.layout != "strided":
            order = f"{'grouped by length' if plan.layout == checkpoints.GROUPED else 'shuffled'} by ms-swift's sampler"
        elif plan.unit != plan.samples_per_chunk:
            order = f"dealt in units of {plan.unit} samples, {order}"
        return f"TrainStream({', '.join(shown)}; rank {plan.rank.dp_rank} of {plan.dp_size}, {order})"

    def tell_progress(self, consumed: int, *, at_once: bool = False) -> None:
        """Tells how much of what is published was trained: now and then, or at once."""
        now = time.monotonic()
        if not checkpoints.is_first() or not (at_once or now - self._told_at >= TOLD_EVERY_S):
            return
        self._told_at = now
        # The gate asks again, and knows what to do about an error.
        with contextlib.suppress(LazyShardError, OSError):
            published = sum(one.samples for one in self.gate.published())
            more = ", in several epochs" if consumed > published else ""
            notice(f"trained {consumed} of {published} published samples{more}")

    def tell_cache(self) -> None:
        """Tells, at the end of a training, how much of what this rank drew was in the cache, if there is one."""
        if self._cache is not None:
            stats = [dataset.stats() for dataset in members(self._dataset)]
            encoded, found = sum(one.encoded for one in stats), sum(one.from_cache for one in stats)
            left = sum(one.not_cached for one in stats)
            more = f"; {left} of what it encoded could not be cached" if left else ""
            told = f"this rank encoded {encoded} rows and found {found} encoded{more}"
            notice(f"--sharded_lazy_encode_cache {self._cache}: {told}")

    def first_sample(self) -> Any | None:
        """Returns the first sample that the first rank trains if it is there already, without waiting."""
        plan, data = self.plan, self.gate.data
        # A sampler in an order of its own decides by itself with which it continues.
        index = (plan.course.current.draws * plan.dp_size if plan.layout == "strided" else 0) - plan.index_offset
        # Trained to the end no sample follows, and the first one was deleted.
        with contextlib.suppress(ChunkRetired):
            self.gate.published()
            ready = data.ready if isinstance(data, BlendedDataset) else data._space().ready
            return self[index] if ready(index + self._offset) else None
        return None

    def check_resume(self, consumed: int, step: int) -> None:
        """Refuses to continue after what the trainer restored where the next sample would not be exactly the next."""
        plan, saved, total = self.plan, self.plan.saved, self.plan.total
        if consumed == 0:
            return
        if plan.checkpoint is None or saved is None:
            anew = "megatron: --finetune true; swift: --resume_only_model true --ignore_data_skip true"
            why = f"{consumed} samples were trained, but there is no lazyshard.json beside the weights"
            raise not_resumed(plan.checkpoint or "the checkpoint", f"{why}: start anew from the weights ({anew})")
        if consumed != saved.consumed:
            why = f"its lazyshard.json says {saved.consumed} samples in {saved.step} steps, the trainer {consumed} in"
            raise not_resumed(plan.checkpoint, f"{why} {step}: is it another one's?", saved.consumed, consumed)
        draws, course = plan.course.current.draws if plan.layout == "strided" else consumed // plan.dp_size, plan.course
        if plan.stop_at_end and total is not None and (course.epoch(total) or draws > course.epoch_length(total)):
            why = f"it stands at sample {consumed}, behind the end of the stream at {total}: was it cut, or repeated?"
            raise not_resumed(plan.checkpoint, why, f"at least {consumed} samples", total)
        for dataset in members(self.gate.data) if plan.layout == "strided" else ():
            _check_present(dataset, plan.stop_at_end)


def _check_present(dataset: LazyShardedDataset, stop_at_end: bool) -> None:
    """Refuses to continue with a chunk that was published and is gone: the workers would wait for it for ever."""
    reader, space = dataset.reader, dataset._space()
    size, published = reader.samples_per_chunk, reader.refresh().samples
    # To the end of the window that is open.
    course, stands = space.course, space.stands
    left = min(course.rules.span, max(1, course.drawable(course.needed(stands)) - stands))
    drawn = [dataset.draw(index) for index in space.lane_indices()[:left] if space.ready(index)]
    chunks = {one.sample // size for one in drawn if not (stop_at_end and one.epoch)}
    # They were published long ago, so the grace period for those that are just appearing is not due.
    with changed(reader, max_wait=min(_LOOK_S, reader.max_wait)):
        for number in sorted(chunk for chunk in chunks if chunk * size < published):
            try:
                reader.chunk(number)
            except (ChunkRetired, ChunkMissing) as cause:
                text = f"{cause} The checkpoint continues with chunk {number}: take a later one, or restore the chunk"
                raise ResumeRefused(text, expected=f"chunk {number}", actual="deleted") from cause


def _load_state(plan: RunPlan, *datasets: Data) -> None:
    """Has the data sets continue where the plan's state stands; it may be that they begin."""
    goes_on = plan.layout == "strided" and (plan.saved is not None or plan.skipped)
    begun: RunState | BlendState | None = plan.state if goes_on else None
    if plan.blended:
        begun = None if plan.saved is None else plan.saved.blend
    try:
        for data in datasets:
            if begun is not None:
                data.load_state_dict(begun.to_dict())
    except StateMismatch as cause:
        raise not_resumed(plan.checkpoint or plan.directory, str(cause), cause.expected, cause.actual) from cause
