"""From arguments to the training data set: the stream is opened, agreed on by all ranks, planned, and registered.

With ``--group_by_length true`` ms-swift's own sampler goes through a stream that has ended: it shuffles all samples,
cuts them into pieces of up to 50 micro batches of all ranks, and sorts each piece by length (transformers'
`get_length_grouped_indices`). That order follows from the lengths, the seed, the epoch and the micro batch of all
ranks, and from nothing that lazyshard plans. So with it

- each rank reads rows of all chunks, and indices are samples: index i draws sample i of the stream;
- a run goes on where the same lengths, ranks and micro batches give the same order again, and is refused elsewhere;
- there is no state of the run by which it could be traced;
- no chunk is given up, since any may be drawn again.

What would have to be known before it is there, of a live stream or of samples that nobody has measured, is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard import LazyShardError, Order, StreamReader
from lazyshard.data.index_space import lengths_by_sample
from lazyshard.data.rank import Rank
from lazyshard.data.settings import is_dealt
from lazyshard.errors import LengthsMissing, StreamMismatch
from lazyshard.store.files import list_names
from lazyshard.store.urls import is_url, stream_path
from lazyshard.stream import read_retired
from lazyshard.stream.listing import other_files
from lazyshard_swift import parallel, rows, settings
from lazyshard_swift.checkpoints import Checkpoints
from lazyshard_swift.encoding import encode_cache
from lazyshard_swift.errors import SettingsRefused, StreamTooShort, each_of, refused
from lazyshard_swift.gate import open_data
from lazyshard_swift.parallel import FOREIGN, Facts, Streams, attend, notice, stream_id_of
from lazyshard_swift.planning import batch_sizes, decide, resume_checkpoint
from lazyshard_swift.position import BLENDED
from lazyshard_swift.rows import RowEncoder, encoders
from lazyshard_swift.run_plan import SHOWN, how_it_goes_on, state_of
from lazyshard_swift.settings import grouping_refused, groups_by_length
from lazyshard_swift.stream import TrainStream

_FEW: Final = tuple(7 * number % 23 for number in range(400))
"""Lengths that are put in order to see whether what is installed does it as what a checkpoint was trained with."""

GROUPING_TOLD: Final = (
    "--group_by_length true: ms-swift's sampler goes through the whole stream in an order of its own. Every rank reads "
    "rows of all chunks, a checkpoint can be gone on from with the same ranks, micro batch and lengths alone, "
    "`lazyshard trace` and `audit` cannot tell what was trained, and the run keeps all chunks"
)
"""What is given up, for the log."""


def open_train_stream(args: Any, template: Any) -> TrainStream:
    """Opens the streams that the arguments name, waiting for those that are not there yet. A collective.

    Raises:
        SettingsRefused: the arguments do not fit the streams.
        ResumeRefused, PositionInvalid: the checkpoint's position cannot be used.
        StreamTooShort: a stream has ended with less than a micro batch a rank.
        WaitTimeout, LazyShardError: a stream cannot be read.
    """
    attend()
    rows.prepare_packing(args, template)
    rank = parallel.data_parallel_rank(args)
    directories = tuple(args.dataset)
    streams = Streams(directories, tuple(facts_of(args, directory, rank) for directory in directories))
    if streams.blended:
        streams = replace(streams, weights=weights_of(args, streams), stopping=args.stopping_strategy)
    encode = encoders(directories, template, _encoder(args, template), settings.packing_length(args))
    lengths = None
    if groups_by_length(args):
        lengths = read_lengths(args, directories[0], streams.facts[0], sampler_of(settings.is_megatron(args)))
    facts = positions_of(args, streams, rank)
    plan = decide(args, streams, facts, rank, None if lengths is None else lengths.digest)
    tokens = None if lengths is None else lengths.tokens
    stream = TrainStream(plan, encode, lengths=tokens, **_options(args, template))
    if lengths is not None:
        notice(GROUPING_TOLD)
    for directory, name, one in zip(directories, streams.names, streams.facts, strict=True):
        if plan.saved is None or (streams.blended and state_of(plan.saved, name) is None):
            check_whole(directory, stream_id_of(one.stream), plan.consumer)
    begin(stream, args)
    return stream


def _options(args: Any, template: Any) -> dict[str, Any]:
    """Returns the options of a `TrainStream` that follow from the arguments alone."""
    return {
        "max_wait": args.sharded_lazy_max_wait,
        "on_bad_sample": args.sharded_lazy_on_bad_sample or ("raise" if args.strict else "substitute"),
        "samples_per_chunk": args.sharded_lazy_samples_per_chunk,
        "cache": encode_cache(args, template),
    }


def begin(stream: TrainStream, args: Any) -> None:
    """Checks where a stream goes on, and tells its producer that this run is there."""
    plan = stream.plan
    if plan.saved is not None:
        # Now, and not after minutes of loading a model. Whether the weights say the same is seen then.
        stream.check_resume(plan.saved.consumed, plan.saved.step)
        notice(f"{plan.checkpoint}: {how_it_goes_on(plan)}")
    # Once nothing is refused any more, since a cursor keeps chunks for ever; and long before the first sample is read.
    Checkpoints(plan, args.output_dir).register()


def facts_of(args: Any, directory: str, rank: Rank) -> Facts:
    """Opens a stream, waiting for it if it is not there yet, and agrees on what all ranks see of it. A collective.

    Raises:
        SettingsRefused: it is a directory that another program fills, of which it is not known how many rows a chunk
            has; or its rows are packs and are to be none, or the other way round.
        StreamMismatch: the ranks see different streams.
        WaitTimeout, LazyShardError: the stream cannot be read.
    """
    _check_directory(directory)
    try:
        reader = StreamReader(directory, args.sharded_lazy_samples_per_chunk, max_wait=args.sharded_lazy_max_wait)
    except ValueError as cause:
        if isinstance(cause, LazyShardError) or args.sharded_lazy_samples_per_chunk is not None:
            raise
        raise SettingsRefused(
            f"{directory}: another program fills it, so there is no stream.json that says how many rows every chunk "
            f"but the last holds: give --sharded_lazy_samples_per_chunk N",
            argument="sharded_lazy_samples_per_chunk",
        ) from cause
    reader.label = f"rank {rank.dp_rank} of {rank.dp_size}"
    published = reader.refresh()
    identity = reader.stream_id or f"{FOREIGN}{xxhash.xxh3_64_hexdigest(reader.line(0))}"
    mine = Facts(identity, reader.samples_per_chunk, published.samples, published.ended, is_dealt(reader))
    facts = parallel.agree_on(mine, directory)
    if resume_checkpoint(args) is None:
        # One that goes on need not fetch a chunk that it has trained; its rows are looked at all the same.
        rows.check_packs(args, reader, facts.samples)
    return facts


def _check_directory(directory: str) -> None:
    """Refuses a directory that holds other things than a stream; one that is empty or not there may yet become one.

    Raises:
        SettingsRefused: naming some of what is there.
    """
    try:
        found = other_files(list_names(stream_path(directory)))
    except FileNotFoundError:
        return
    except OSError:
        if is_url(directory):
            raise
        return
    if found:
        raise refused(
            "dataset",
            f"--dataset {directory}: there is no stream in it, but other files ({found}). A stream has files named "
            f"chunk_00000.jsonl and so on; `lazyshard-producer run --source FILES --out STREAM --samples-per-chunk "
            f"1000` makes one",
        )


def _encoder(args: Any, template: Any) -> RowEncoder:
    return RowEncoder(
        template,
        columns=args.columns if isinstance(args.columns, dict) else None,
        auto_columns=not getattr(args, "disable_auto_column_mapping", False),
        keep_unused=not args.remove_unused_columns,
        packing_length=settings.packing_length(args),
    )


def check_whole(directory: str, stream_id: str | None, consumer: str) -> None:
    """Refuses to start at the beginning of a stream whose first chunks are gone.

    Raises:
        SettingsRefused: they are.
    """
    retired = 0 if stream_id is None else read_retired(stream_path(directory), stream_id)
    if retired:
        raise SettingsRefused(
            f"{directory}: its producer has deleted the chunks below {retired}, which a run that starts anew "
            f"would train first: go on from a checkpoint that was trained on this stream, or produce it anew with "
            f"--retain all, or with --consumers {consumer}, which deletes nothing before this run has started",
            argument="dataset",
        )


def weights_of(args: Any, streams: Streams) -> tuple[float, ...]:
    """Returns what was given, or the samples of each stream.

    Raises:
        SettingsRefused: nothing was given, and a stream is still being produced; or a weight is not above 0.
    """
    given = args.interleave_prob
    if given:
        if not all(weight > 0 for weight in given):
            raise refused(
                "interleave_prob",
                f"--interleave_prob {' '.join(map(str, given))}: weights are numbers above 0",
            )
        return tuple(map(float, given))
    pairs = zip(streams.directories, streams.facts, strict=True)
    live = [directory for directory, one in pairs if not one.ended or not one.samples]
    if live:
        raise refused(
            "interleave_prob",
            f"--dataset has {len(streams.directories)} streams, and {live[0]} is still being produced or empty, so "
            f"their sizes do not say how to blend them: give the share of each with --interleave_prob",
        )
    weights = tuple(float(one.samples) for one in streams.facts)
    shares = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights[:SHOWN])
    notice(f"the streams of --dataset are blended by their sizes, {shares}; --interleave_prob gives other shares")
    return weights


def positions_of(args: Any, streams: Streams, rank: Rank) -> Facts:
    """Returns what all ranks know of the stream, or of the positions of the blend. A collective.

    Raises:
        StreamTooShort: an epoch of the blend has less than a micro batch of every rank.
    """
    if not streams.blended:
        return streams.facts[0]
    if all(one.ended for one in streams.facts) and settings.progress(args, live=False).steps is None:
        return Facts(BLENDED, 1, _length_of_blend(args, streams, rank), True)
    # Steps decide, and the gate finds the end.
    return Facts(BLENDED, 1, sum(one.samples for one in streams.facts), False)


def _length_of_blend(args: Any, streams: Streams, rank: Rank) -> int:
    found = 0
    if parallel.is_first():
        batch_size, _ = batch_sizes(args, rank.dp_size)
        own = {"samples_per_chunk": args.sharded_lazy_samples_per_chunk, "max_wait": args.sharded_lazy_max_wait}
        with contextlib.suppress(ValueError):
            found = len(open_data(streams, rank, None, Order(), own, {"batch_size": batch_size}))
    found = parallel.agree(found)
    if not found:
        raise StreamTooShort(
            f"{streams.where}: an epoch of the blend has less than one micro batch for {each_of(rank.dp_size)}: "
            f"one of the streams is too short for its share",
            directory=streams.where,
            samples=sum(one.samples for one in streams.facts),
        )
    return found


class SampleLengths(NamedTuple):
    """How long the samples of a stream are.

    Attributes:
        tokens: u32 of shape (samples,): tokens of each sample, in the order of the stream.
        digest: of what the sampler's order follows from and no argument says: the lengths, and the order in which
            ms-swift, transformers and torch put a few.
    """

    tokens: npt.NDArray[np.uint32]
    digest: str


def sampler_of(megatron: bool) -> type[Any]:
    """Returns the sampler of ms-swift's trainer, which is imported already.

    Raises:
        SettingsRefused: it does not group by length.
    """
    try:
        if megatron:
            from swift.megatron.trainers.base import MegatronPretrainingRandomSampler as Sampler
        else:
            from swift.trainers.mixin import BatchSamplerShard as Sampler
    except ImportError:
        Sampler = None
    check_sampler(Sampler)
    found: type[Any] = Sampler
    return found


def check_sampler(sampler: type[Any] | None) -> None:
    """Refuses a sampler of ms-swift; see `sampler_of`."""
    if sampler is None or "group_by_length" not in inspect.signature(sampler).parameters:
        raise grouping_refused("not with the sampler of this ms-swift: leave it out, or upgrade to a later ms-swift 4")


def read_lengths(args: Any, directory: str, facts: Facts, sampler: type[Any]) -> SampleLengths:
    """Reads what the sampler sorts by, and makes sure that all ranks sort by the same. A collective.

    Args:
        args: ms-swift's arguments.
        directory: of the stream.
        facts: what all ranks know of it.
        sampler: ms-swift's.

    Raises:
        SettingsRefused: the stream is live, was dealt by cost, or its lengths are not known; with the way out.
        StreamMismatch: rank 0 sees other lengths.
        WaitTimeout, LazyShardError: the stream cannot be read.
    """
    check_groupable(directory, facts.ended, facts.dealt)
    reader = StreamReader(directory, args.sharded_lazy_samples_per_chunk, max_wait=args.sharded_lazy_max_wait)
    try:
        tokens = lengths_by_sample(reader, facts.samples)
    except LengthsMissing as cause:
        raise grouping_refused(str(cause)) from cause
    digest = xxhash.xxh3_128(np.ascontiguousarray(tokens, "<u4").tobytes())
    digest.update(np.array(_few_in_order(sampler), "<i8").tobytes())
    mine = digest.hexdigest()
    first = parallel.agree(mine)
    if first != mine:
        raise StreamMismatch(
            f"{directory}: rank 0 sees other lengths of its samples than this rank: do the nodes "
            f"have different versions of ms-swift, transformers or torch? Start again with one of each",
            directory=directory,
            expected=first,
            actual=mine,
        )
    return SampleLengths(tokens, mine)


def _few_in_order(sampler: type[Any]) -> list[list[int]]:
    """Returns the batches that ms-swift's sampler makes of a few samples in their second epoch."""
    total, parameters = len(_FEW), inspect.signature(sampler).parameters
    if "data_sharding" in parameters:
        # Megatron's, which has not always taken a seed.
        seed = {"seed": 42} if "seed" in parameters else {}
        made = sampler(
            dataset={"lengths": list(_FEW)},
            total_samples=total,
            consumed_samples=total,
            micro_batch_size=4,
            data_parallel_rank=0,
            data_parallel_size=2,
            data_sharding=False,
            shuffle=True,
            group_by_length=True,
            **seed,
        )
    else:
        # As if there were no other rank, so that it is the same on all of them.
        alone = type("Alone", (sampler,), {"rank": 0, "world_size": 1})
        made = alone(
            total_samples=total,
            batch_size=4,
            shuffle=True,
            drop_last=False,
            data_seed=42,
            group_by_length=True,
            lengths=list(_FEW),
        )
        made.set_epoch(1)
    return list(made)


def check_groupable(directory: str, ended: bool, dealt: bool) -> None:
    """Refuses a stream that cannot be grouped.

    Args:
        directory: of the stream.
        ended: whether it has ended.
        dealt: whether its rows were dealt by cost.

    Raises:
        SettingsRefused: with the way out.
    """
    if not ended:
        raise grouping_refused(
            f"{directory}: the stream is still being produced, and how long samples are that are not there yet is not "
            f"known. Start once it has ended; or leave it out, and have the "
            f"producer deal rows by cost, with `lazyshard-producer run --balance`"
        )
    if dealt:
        raise grouping_refused(
            f"{directory}: its rows were dealt by cost, so that all ranks have as much to do in a step, and this would "
            f"put them into other steps: leave it out"
        )
