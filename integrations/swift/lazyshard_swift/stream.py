"""`TrainStream`: the training data set for ms-swift; and the gate before each step of a run.

To ms-swift a blend is one stream, whose samples are its positions. The length of the data set is that of an epoch once
the stream has ended, and that of the run while it is live. Indices may continue past it, strided over the ranks, into
later epochs. Every rank calls the gate in its main process, with the same published numbers, so all ranks continue,
stop or give up at the same step without communication. Workers, which read ahead, have no deadline.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
import xxhash
from torch.utils.data import ConcatDataset, Dataset

from lazyshard import BadRows, BlendedDataset, EncodeCache, LazyShardedDataset, LazyShardError, Order, StreamReader
from lazyshard import errors as library
from lazyshard.data.index_space import lengths_by_sample
from lazyshard.data.rank import Rank
from lazyshard.format.state import RunState
from lazyshard.stream import Published
from lazyshard_swift import checkpoints, errors
from lazyshard_swift.errors import ResumeRefused, SettingsRefused, StreamTooShort, not_resumed, refused, too_short
from lazyshard_swift.ms_swift import changed, notice
from lazyshard_swift.packs import Packs
from lazyshard_swift.rows import Encode, EncodedRows
from lazyshard_swift.run_plan import SHOWN, RunPlan, Stream, order_of_split

Rows: TypeAlias = LazyShardedDataset | BlendedDataset
Data: TypeAlias = Rows | Packs
Lengths: TypeAlias = npt.NDArray[np.uint32]
Options: TypeAlias = dict[str, Any]  # keyword arguments of the data set of one stream

ENDLESS: Final = 2**50  # Number of indices of a data set that repeats from epoch to epoch
LOG_EVERY_S: Final = 60.0  # Interval at which the progress is logged
_VISIBLE_S: Final = 5.0  # How long a chunk that a checkpoint continues with may stay invisible
_ARRIVAL_S: Final = 30.0  # Ranks that wait for the same samples give up within seconds of each other
_POLL_S: Final = 0.5
_SAVE_S: Final = 1800.0  # Time for a rank that has given up to save a checkpoint together with all others


def open_data(
    streams: Sequence[Stream], rank: Rank, encode: Sequence[Encode], order: Order, own: Options, **whole: Any
) -> Rows:
    """Opens a stream or a blend, with options `own` for each stream and `whole` for all; without encoders, raw rows."""
    pairs, blended = [], len(streams) > 1
    # Layout and steps are set on the blend, all else on each stream.
    shared = Order(layout=order.layout, micro_batches_per_step=order.micro_batches_per_step)
    inner = replace(order, layout="block", micro_batches_per_step=None) if blended else order
    own = own | rank._asdict() | ({} if blended else whole)
    for stream, one in itertools.zip_longest(streams, encode):
        cache = {"cache": EncodeCache()} if one is None or isinstance(one, EncodedRows) else {}
        dealt = replace(inner, unit=stream.unit or inner.unit)
        limited = own | cache | {"max_total_samples": stream.limit}
        pairs.append((LazyShardedDataset(stream.directory, one, order=dealt, **limited), stream.weight))
    return BlendedDataset(pairs, order=shared, **whole) if blended else pairs[0][0]


def open_packs(plan: RunPlan, encode: Sequence[Encode], own: Options) -> Packs:
    """Opens the packs that are made of the rows of the plan's streams."""
    whole = {"stopping": plan.stopping} if plan.blended else {}
    source = open_data(plan.streams, Rank(0, 1), encode, order_of_split(plan.splits, "train"), own, **whole)
    return Packs(source, plan, own.get("bad_rows", BadRows()))


def members(data: Data) -> tuple[LazyShardedDataset, ...]:
    """Returns the data sets of the streams."""
    return (data,) if isinstance(data, LazyShardedDataset) else data.datasets


class Validation(ConcatDataset[Any]):
    """The samples of ended streams, or of their validation splits, for evaluation: the same on every rank."""

    datasets: list[LazyShardedDataset]  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Describes the streams: ms-swift logs this at the start, after `val_dataset:`."""
        return ", ".join(f"{len(one)} samples of {library.redact(str(one.directory))}" for one in self.datasets)


def open_validation(
    streams: Sequence[Stream], encode: Sequence[Encode], own: Options, splits: tuple[int, int] | None = None
) -> Validation:
    """Opens the data for evaluation: ended streams, or with `splits` the validation samples that are published."""
    argument = "val_dataset" if splits is None else "split_dataset_ratio"
    order = order_of_split(splits, "validation", unit="sample")
    gaps, opened = order.gaps, []
    for one, encoder in zip(streams, encode, strict=True):
        count, needed = gaps.kept(0, one.samples), gaps.nth(0, 0) + 1
        if retired := one.retired():
            gone = f"{one.directory}: the producer has deleted all chunks below {retired}"
            raise refused(argument, f"{gone}, which evaluation needs: produce with --retain all")
        if splits is None and not one.ended:
            raise refused(argument, f"{one.directory} is still being produced: start once it has ended")
        if not count:
            few = f"{one.directory} has {one.samples} samples, at least {needed} are needed"
            raise refused(argument, f"{few}: start once they are published, or give other data by --val_dataset")
        opened.append(open_data((one,), Rank(0, 1), (encoder,), order, own, num_samples=count))
    return Validation(opened)


class StepGate:
    """Decides step by step whether to continue, by this rank's samples in order, and enforces the deadline.

    `shift` is the number of positions by which the run's current part begins after the blend's own part. If `stopped`,
    no step follows: the stream has ended, or all ranks `gave_up` waiting.
    """

    def __init__(self, data: Data, stop_at_end: bool, *, begun: bool = False, shift: int = 0) -> None:
        self.data, self.stopped = data, False
        self.gave_up: library.WaitTimeout | library.StoreUnavailable | None = None
        self._shift, self._stop_at_end, self._begun = shift, stop_at_end, begun
        self._timer: threading.Timer | None = None

    def allows(self, first: int, stop: int, *, saves: bool = False) -> bool:
        """Returns whether to train a step, positions [first, stop) of this rank's lane, waiting until it is decided.

        If all ranks give up and a checkpoint `saves` what was trained, returns False, and `end` raises the error.
        """
        if self.stopped:
            return False
        rank = self.data.rank
        try:
            past = not self.data.in_epoch((stop - 1 + self._shift) * rank.dp_size + rank.dp_rank)
        except IndexError as cause:
            # There is not even one micro batch for each rank.
            if not self._begun or not self._stop_at_end:
                raise self._too_short() from cause
            past = True
        except (library.StoreUnavailable, library.WaitTimeout) as error:
            if not saves or not self._all_give_up(error, stop):
                raise
            return False
        if self._stop_at_end and past:
            if not first and not self._begun:
                raise self._too_short()
            self.stopped = True
        return not self.stopped

    def _all_give_up(self, error: library.WaitTimeout | library.StoreUnavailable, stop: int) -> bool:
        """Returns whether all ranks have given up before the same step, so that they can save a checkpoint together."""
        timer = errors.end_within(_SAVE_S, error)
        if not all_arrive(f"gave up before {stop}"):
            # A rank that received the data at the last moment trains, and waits for the others in its first collective.
            timer.cancel()
            return False
        self.stopped, self.gave_up, self._timer = True, error, timer
        return True

    def end(self) -> None:
        """Raises the error for which all ranks gave up, once the checkpoint is saved; no effect at a stream's end."""
        if self.gave_up is not None and self._timer is not None:
            self._timer.cancel()
            raise self.gave_up

    def published(self) -> list[Published]:
        """Reads how much of each stream is published now."""
        return [dataset.published() for dataset in members(self.data)]

    def _too_short(self) -> StreamTooShort:
        samples = sum(one.samples for one in self.published())
        where = ", ".join(str(one.directory) for one in members(self.data))
        why = f"the stream has ended with {samples} samples, fewer than one step needs: nothing can be trained"
        return too_short(where, samples, f"{why}. Use a smaller global batch, or --sharded_lazy_on_end repeat")


def all_arrive(key: str) -> bool:
    """Returns whether every rank calls this with this key within some seconds; no collective, which might hang."""
    if not checkpoints.several():
        return True
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        return _all_arrive(store, f"lazyshard/{key}", dist.get_world_size(), _ARRIVAL_S)
    # The process that holds the store has ended, or there is none.
    return False


def _all_arrive(store: Any, key: str, ranks: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    arrived = store.add(f"{key}/arrived", 1)
    while arrived < ranks and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        arrived = store.add(f"{key}/arrived", 0)
    # The first rank decides, also for ranks that arrive at the same moment.
    return bool(store.compare_set(f"{key}/decision", "", "all" if arrived >= ranks else "not all") == b"all")


class TrainStream(Dataset[Any]):
    """A stream, or a blend of several, as ms-swift's training data set, with options `own` for each stream.

    A step waits at most `max_wait` seconds. Samplers that group by length read `lengths`, of shape (samples,).
    `validation` is the data set for evaluation if it is of streams.
    """

    validation: Validation | None = None

    def __init__(self, plan: RunPlan, encode: Sequence[Encode], own: Options, lengths: Lengths | None = None) -> None:
        self._logged_at, self._cache = time.monotonic(), own["cache"].directory
        self._lengths = None if lengths is None else lengths[: plan.epoch_samples]
        whole: dict[str, Any] = {"batch_size": plan.batch_size, "num_samples": ENDLESS}
        order = order_of_split(plan.splits, "train", layout="strided", shuffle_window=plan.window, seed=plan.seed)
        if plan.blended:
            whole["stopping"] = plan.stopping
            steps = plan.state.parts[-1].draws_per_step // plan.batch_size
            order = replace(order, micro_batches_per_step=steps or None)
        made = plan.pack_tokens is not None
        asked: Data = open_packs(plan, (), own) if made else open_data(plan.streams, plan.rank, (), order, own, **whole)
        # Workers read ahead of the training without a deadline: the gate enforces it.
        own, read_by = own | {"max_wait": float("inf"), "consumer": plan.consumer}, plan.rank
        if plan.layout == checkpoints.GROUPED:
            # The sampler deals samples to all ranks itself: there are no lanes.
            own["consumer"], read_by = None, Rank(0, 1)
        if plan.layout != "strided":
            order, whole["num_samples"] = replace(order, layout="block"), plan.epoch_samples
        read = open_packs(plan, encode, own) if made else open_data(plan.streams, read_by, encode, order, own, **whole)
        self._dataset: Data = read
        for dataset in members(self._dataset):
            dataset.reader.quiet = True
        _load_state(plan, self._dataset, asked)
        shift = 0
        if isinstance(asked, BlendedDataset):
            # Positions count from the start of the plan's current part; the blend's own part may start elsewhere.
            shift = (plan.course.consumed_before - asked.consumed_before) // plan.dp_size
            plan = replace(plan, blend_at=asked._state_after)
        elif isinstance(asked, Packs):
            asked._warns, plan = checkpoints.is_first(), replace(plan, blend_at=asked.state_after, packs=asked)
        self.plan = plan
        self._offset = plan.index_offset + shift * plan.dp_size
        self.gate = StepGate(asked, plan.stop_at_end, begun=plan.state.consumed > 0, shift=shift)

    def __getstate__(self) -> dict[str, Any]:
        """Excludes what only the main process uses: the gate, the validation data, and the lengths, for samplers."""
        own = ("gate", "validation", "_lengths")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return state | {"plan": replace(self.plan, blend_at=None, packs=None)}

    def __len__(self) -> int:
        """The length of an epoch for ms-swift, over all ranks."""
        return self.plan.epoch_samples

    def __getitem__(self, index: int | Literal["lengths"]) -> Any:
        """Returns an encoded sample; or for "lengths", if samples are grouped, a list of the tokens of all samples."""
        if not isinstance(index, str):
            return self._dataset[index + self._offset]
        if index != "lengths" or self._lengths is None:
            raise KeyError(index)
        return self._lengths.tolist()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the encoded samples of a batch."""
        return self._dataset.__getitems__([index + self._offset for index in indices])

    def __repr__(self) -> str:
        """Describes the streams and the order: ms-swift logs this at the start, after `train_dataset:`."""
        plan, data = self.plan, self._dataset
        shares, shown = data.shares if isinstance(data, BlendedDataset) else (1.0,), []
        for share, one in zip(shares[:SHOWN], plan.streams, strict=False):
            state = f"{one.samples_per_chunk} per chunk, {'ended' if one.ended else 'still being produced'}"
            which = f"{share:.4g} of {library.redact(one.shown)}" if plan.blended else library.redact(one.shown)
            shown.append(f"{which} ({one.samples} samples published, {state})")
        shown += [f"and {len(shares) - SHOWN} more"] if len(shares) > SHOWN else []
        order = f"shuffled in windows of {plan.window} chunks a rank" if plan.window else "in the order of the stream"
        if isinstance(data, Packs):
            order = f"packs of at most {plan.pack_tokens} tokens of the rows of {data.window} chunks"
        elif plan.layout != "strided":
            order = f"{'grouped by length' if plan.layout == checkpoints.GROUPED else 'shuffled'} by ms-swift's sampler"
        elif plan.unit != plan.samples_per_chunk:
            order = f"dealt in units of {plan.unit} samples, {order}"
        if plan.splits is not None:
            order += f", {plan.splits[0]} of every {sum(plan.splits)} samples"
        rank = f"data-parallel rank {plan.rank.dp_rank} of {plan.dp_size}"
        return f"lazyshard with --sharded_lazy true: {', '.join(shown)}; {rank}, {order}"

    def log_progress(self, consumed: int, *, at_once: bool = False) -> None:
        """Logs how many of the published samples were trained, at most once per interval unless `at_once`."""
        now = time.monotonic()
        if not checkpoints.is_first() or not (at_once or now - self._logged_at >= LOG_EVERY_S):
            return
        self._logged_at = now
        # The gate reads it again, and handles errors.
        with contextlib.suppress(LazyShardError, OSError):
            seen = zip(self.plan.streams, self.gate.published(), strict=True)
            published = sum(self.plan.kept(one.at(there).samples) for one, there in seen)
            if self.plan.packs is not None:
                notice(f"trained {consumed} packs; {published} samples are published")
                return
            more = ", in several epochs" if consumed > published else ""
            notice(f"trained {consumed} of {published} published samples{more}")

    def log_cache(self) -> None:
        """Logs, at the end of a training, how many samples of this rank were cached, if there is a cache."""
        if self._cache is not None:
            data = self._dataset
            stats = [one.stats() for one in ((data,) if isinstance(data, Packs) else members(data))]
            encoded, found = sum(one.encoded for one in stats), sum(one.from_cache for one in stats)
            left = sum(one.not_cached for one in stats)
            more = f"; {left} of the encoded ones could not be cached" if left else ""
            counts = f"this rank encoded {encoded} rows and found {found} in the cache{more}"
            notice(f"--sharded_lazy_encode_cache {self._cache}: {counts}")

    def first_sample(self) -> Any | None:
        """Returns the first sample that the first rank trains, if it is already published; never waits."""
        plan, data = self.plan, self.gate.data
        # With its own order, the sampler decides itself where it continues.
        index = (plan.course.current.draws * plan.dp_size if plan.layout == "strided" else 0) - plan.index_offset
        # If the run is complete, no sample follows, and the first one may be deleted.
        with contextlib.suppress(library.ChunkRetired):
            self.gate.published()
            ready = data._space().ready if isinstance(data, LazyShardedDataset) else data.ready
            return self[index] if ready(index + self._offset) else None
        return None

    def check_resume(self, consumed: int, step: int) -> None:
        """Refuses a position restored by the trainer after which the run would not continue exactly."""
        plan, saved, total = self.plan, self.plan.saved, self.plan.total
        if consumed == 0:
            return
        if plan.checkpoint is None or saved is None:
            anew = "megatron: --finetune true; swift: --resume_only_model true --ignore_data_skip true"
            why = f"{consumed} samples were trained, but there is no lazyshard.json next to the weights"
            raise not_resumed(plan.checkpoint or "the checkpoint", f"{why}: start over from the weights ({anew})")
        if consumed != saved.consumed:
            why = f"its lazyshard.json has {saved.consumed} samples in {saved.step} steps, the trainer {consumed} in"
            raise not_resumed(plan.checkpoint, f"{why} {step}: is it from another run?", saved.consumed, consumed)
        draws, course = plan.course.current.draws if plan.layout == "strided" else consumed // plan.dp_size, plan.course
        if plan.stop_at_end and total is not None and (course.epoch(total) or draws > course.begin(total).length):
            why = f"it is at sample {consumed}, but the stream ends at {total}: was it truncated, or repeated?"
            raise not_resumed(plan.checkpoint, why, f"at least {consumed} samples", total)
        for dataset in members(self.gate.data) if plan.layout == "strided" and plan.packs is None else ():
            _check_present(dataset, plan.stop_at_end)


def _check_present(dataset: LazyShardedDataset, stop_at_end: bool) -> None:
    """Refuses to continue with a published chunk that is gone: the workers would wait for it forever."""
    reader, space = dataset.reader, dataset._space()
    size, published = reader.samples_per_chunk, reader.refresh().samples
    # Up to the end of the current window.
    course, start = space.course, space.start
    left = min(course.rules.span, max(1, course.drawable(course.needed(start)) - start))
    drawn = [dataset.draw(index) for index in space.lane_indices()[:left] if space.ready(index)]
    chunks = {one.sample // size for one in drawn if not (stop_at_end and one.epoch)}
    # They were published long ago, so the grace period for new chunks does not apply.
    with changed(reader, max_wait=min(_VISIBLE_S, reader.max_wait)):
        for number in sorted(chunk for chunk in chunks if chunk * size < published):
            try:
                reader.chunk(number)
            except (library.ChunkRetired, library.ChunkMissing) as cause:
                text = f"{cause} The checkpoint continues with chunk {number}: use a later one, or restore the chunk"
                raise ResumeRefused(text, expected=f"chunk {number}", actual="deleted") from cause


def _load_state(plan: RunPlan, *datasets: Data) -> None:
    """Loads the plan's state into the data sets, unless the run is new."""
    goes_on = plan.layout == "strided" and (plan.saved is not None or plan.skipped)
    begun: RunState | checkpoints.Inner | None = plan.state if goes_on else None
    if plan.blended or plan.pack_tokens is not None:
        begun = None if plan.saved is None else plan.saved.blend
    try:
        for data in datasets:
            if begun is not None:
                data.load_state_dict(begun.to_dict())
    except library.StateMismatch as cause:
        why = str(cause)
        if cause.field == "split":
            # The library's message names its own arguments.
            why = f"it draws {cause.expected}, here it is {cause.actual}: keep --split_dataset_ratio as it was"
        if cause.field == "max_total_samples":
            why = f"N of STREAM#N was {cause.expected}, here it is {cause.actual}: keep it as it was"
        raise not_resumed(plan.checkpoint or plan.directory, why, cause.expected, cause.actual) from cause


def _grouping_refused(why: str) -> SettingsRefused:
    return refused("group_by_length", f"true: {why}")


def read_lengths(stream: Stream, own: Options, sampler: type[Any]) -> tuple[Lengths, str]:
    """Returns the lengths of all samples by which the sampler sorts, of shape (samples,), and a digest.

    The digest covers the lengths and the sampler's order of a few, and is the same on all ranks. A collective.
    """
    directory, parameters = stream.directory, inspect.signature(sampler).parameters
    if "group_by_length" not in parameters:
        raise _grouping_refused("not with the sampler of this ms-swift: omit it, or upgrade to a later ms-swift 4")
    if not stream.ended:
        raise _grouping_refused(f"{directory} is still being produced: wait for its end, or produce it with --balance")
    if stream.dealt:
        raise _grouping_refused(f"{directory}: its rows were dealt by cost, and this would undo it: omit it")
    try:
        tokens = lengths_by_sample(StreamReader(directory, **own), stream.samples)
    except library.LengthUnknown as cause:
        raise _grouping_refused(str(cause)) from cause
    # The batches of a few samples in their second epoch show whether the installed sampler sorts as before.
    few = [7 * number % 23 for number in range(400)]
    both: dict[str, Any] = {"total_samples": len(few), "shuffle": True, "group_by_length": True}
    if "data_sharding" in parameters:
        # Megatron's; older ones take no seed.
        both |= {"dataset": {"lengths": few}, "consumed_samples": len(few), "micro_batch_size": 4}
        both |= {"data_parallel_rank": 0, "data_parallel_size": 2, "data_sharding": False}
        made = sampler(**both, **({"seed": 42} if "seed" in parameters else {}))
    else:
        # As rank 0 of 1, so that the order is the same on all ranks.
        alone = type("Alone", (sampler,), {"rank": 0, "world_size": 1})
        made = alone(batch_size=4, drop_last=False, data_seed=42, lengths=few, **both)
        made.set_epoch(1)
    found = xxhash.xxh3_128(np.ascontiguousarray(tokens, "<u4").tobytes())
    found.update(np.array(list(made), "<i8").tobytes())
    if (first := checkpoints.agree(mine := found.hexdigest())) != mine:
        why = "rank 0 has different lengths: do the nodes have different versions of ms-swift, transformers or torch?"
        raise library.StreamMismatch(f"{directory}: {why}", directory=directory, expected=first, actual=mine)
    return tokens, mine
