"""From arguments to the training data set: the stream is opened, agreed on by all ranks, planned, and registered.

With ``--group_by_length true`` ms-swift's own sampler shuffles all samples of an ended stream, cuts them into pieces of
up to 50 micro batches of all ranks, and sorts each piece by length (transformers' `get_length_grouped_indices`). That
order follows from the lengths, the seed, the epoch and the micro batch of all ranks alone. So with it each rank reads
rows of all chunks, and index i draws sample i of the stream; a run goes on where the same lengths, ranks and micro
batches give the same order again; there is no state by which it could be traced; and no chunk is given up.
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
from lazyshard.errors import LengthUnknown, StreamMismatch
from lazyshard.store.files import list_names
from lazyshard.store.urls import is_url, stream_path
from lazyshard.stream import read_retired
from lazyshard.stream.listing import other_files
from lazyshard_swift import parallel, rows
from lazyshard_swift.checkpoints import Checkpoints
from lazyshard_swift.encoding import encode_cache, packing_length
from lazyshard_swift.errors import SettingsRefused, each_of, refused, too_short
from lazyshard_swift.ms_swift import is_megatron
from lazyshard_swift.parallel import FOREIGN, Facts, Streams, notice, stream_id_of
from lazyshard_swift.planning import batch_sizes, decide, progress_of, resume_checkpoint
from lazyshard_swift.rows import encoder_of, encoders
from lazyshard_swift.run_plan import BLENDED, SHOWN, state_of
from lazyshard_swift.stream import TrainStream, open_data

_FEW: Final = tuple(7 * number % 23 for number in range(400))
"""Lengths that are put in order to see whether what is installed does it as what a checkpoint was trained with."""


def open_train_stream(args: Any, template: Any) -> TrainStream:
    """Opens the streams that the arguments name, waiting for those that are not there yet. A collective."""
    parallel.attend()
    if getattr(args, "packing", False):
        # It then takes lists of encoded rows, as of `PackingDataset`.
        template.packing = template.padding_free = True
    rank, directories = parallel.data_parallel_rank(args), tuple(args.dataset)
    streams = Streams(directories, tuple(_facts_of(args, directory, rank) for directory in directories))
    if streams.blended:
        streams = replace(streams, weights=_weights_of(args, streams), stopping=args.stopping_strategy)
    most = packing_length(args)
    encode = encoders(directories, template, encoder_of(args, template, most), most)
    lengths = None
    if getattr(args, "group_by_length", False):
        lengths = read_lengths(args, directories[0], streams.facts[0], _sampler_of(is_megatron(args)))
    facts = _positions_of(args, streams, rank) if streams.blended else streams.facts[0]
    plan = decide(args, streams, facts, rank, None if lengths is None else lengths.digest)
    stream = TrainStream(
        plan,
        encode,
        max_wait=args.sharded_lazy_max_wait,
        on_bad_sample=args.sharded_lazy_on_bad_sample or ("raise" if args.strict else "substitute"),
        samples_per_chunk=args.sharded_lazy_samples_per_chunk,
        cache=encode_cache(args, template),
        lengths=None if lengths is None else lengths.tokens,
    )
    plan = stream.plan
    if lengths is not None:
        notice(
            "--group_by_length true: ms-swift's sampler goes through the whole stream in its own order: checkpoints "
            "are for the same ranks, micro batch and lengths, `lazyshard trace` cannot tell what was trained, and the "
            "run keeps all chunks"
        )
    for directory, name, one in zip(directories, streams.names, streams.facts, strict=True):
        if plan.saved is None or (streams.blended and state_of(plan.saved, name) is None):
            _check_nothing_retired(directory, stream_id_of(one.stream), plan.consumer)
    if plan.saved is not None:
        # Now, and not after minutes of loading a model. Whether the weights say the same is seen then.
        stream.check_resume(plan.saved.consumed, plan.saved.step)
        notice(f"{plan.checkpoint}: {plan.how_it_goes_on()}")
    # Once nothing is refused any more, since a cursor keeps chunks for ever; and long before the first sample is read.
    Checkpoints(plan, args.output_dir).register()
    return stream


def _reader(args: Any, directory: str) -> StreamReader:
    return StreamReader(directory, args.sharded_lazy_samples_per_chunk, max_wait=args.sharded_lazy_max_wait)


def _facts_of(args: Any, directory: str, rank: Rank) -> Facts:
    """Opens a stream, waiting for it if it is not there yet, and agrees on what all ranks see of it. A collective."""
    _check_directory(directory)
    try:
        reader = _reader(args, directory)
    except ValueError as cause:
        if isinstance(cause, LazyShardError) or args.sharded_lazy_samples_per_chunk is not None:
            raise
        name, why = "sharded_lazy_samples_per_chunk", "without a stream.json that says how many rows each chunk holds"
        raise refused(name, f"{directory}: another program fills it, {why}: give --{name} N") from cause
    reader.label = f"rank {rank.dp_rank} of {rank.dp_size}"
    published = reader.refresh()
    identity = reader.stream_id or f"{FOREIGN}{xxhash.xxh3_64_hexdigest(reader.line(0))}"
    mine = Facts(identity, reader.samples_per_chunk, published.samples, published.ended, is_dealt(reader))
    # Of rank 0, so that a stream which ends just now has ended for all or for none.
    facts = parallel.agree(mine)
    if facts[:2] != mine[:2]:
        there = f"rank 0 sees the stream {facts.stream} of {facts.samples_per_chunk} samples per chunk there"
        this = f"this rank {mine.stream} of {mine.samples_per_chunk}"
        text = f"{directory}: {there}, {this}: is the directory on a filesystem that all nodes share?"
        raise StreamMismatch(text, directory=directory, expected=facts.stream, actual=mine.stream)
    if resume_checkpoint(args) is None:
        # One that goes on need not fetch a chunk that it has trained; its rows are looked at all the same.
        rows.check_packs(bool(getattr(args, "packing", False)), reader, facts.samples)
    return facts


def _check_directory(directory: str) -> None:
    """Refuses a directory that holds other things than a stream; one that is empty or not there may yet become one."""
    try:
        found = other_files(list_names(stream_path(directory)))
    except FileNotFoundError:
        return
    except OSError:
        if is_url(directory):
            raise
        return
    if found:
        command = "lazyshard-producer run --source FILES --out STREAM --samples-per-chunk 1000"
        why = f"there is no stream in it (chunk_00000.jsonl and so on), but other files ({found})"
        raise refused("dataset", f"--dataset {directory}: {why}; `{command}` makes one")


def _check_nothing_retired(directory: str, stream_id: str | None, consumer: str) -> None:
    """Refuses to start at the beginning of a stream whose first chunks are gone."""
    retired = 0 if stream_id is None else read_retired(stream_path(directory), stream_id)
    if retired:
        why = f"its producer has deleted the chunks below {retired}, which a run that starts anew would train first"
        anew = f"with --retain all, or with --consumers {consumer}, which deletes nothing before this run has started"
        raise refused("dataset", f"{directory}: {why}: go on from a checkpoint of it, or produce it anew {anew}")


def _weights_of(args: Any, streams: Streams) -> tuple[float, ...]:
    """Returns what was given, or the samples of each stream."""
    given = args.interleave_prob
    if given:
        if not all(weight > 0 for weight in given):
            shown = " ".join(map(str, given))
            raise refused("interleave_prob", f"--interleave_prob {shown}: weights are numbers above 0")
        return tuple(map(float, given))
    pairs = zip(streams.directories, streams.facts, strict=True)
    live = [directory for directory, one in pairs if not one.ended or not one.samples]
    if live:
        why = f"{live[0]} is still being produced or empty, so sizes do not say how to blend the streams of --dataset"
        raise refused("interleave_prob", f"{why}: give the share of each with --interleave_prob")
    weights = tuple(float(one.samples) for one in streams.facts)
    shares = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights[:SHOWN])
    notice(f"the streams of --dataset are blended by their sizes, {shares}; --interleave_prob gives other shares")
    return weights


def _positions_of(args: Any, streams: Streams, rank: Rank) -> Facts:
    """Returns what all ranks know of the positions of the blend. A collective."""
    samples = sum(one.samples for one in streams.facts)
    if not all(one.ended for one in streams.facts) or progress_of(args, live=False).steps is not None:
        # Steps decide, and the gate finds the end.
        return Facts(BLENDED, 1, samples, False)
    found = 0
    if parallel.is_first():
        batch_size, _ = batch_sizes(args, rank.dp_size)
        own = {"samples_per_chunk": args.sharded_lazy_samples_per_chunk, "max_wait": args.sharded_lazy_max_wait}
        with contextlib.suppress(ValueError):
            found = len(open_data(streams, rank, None, Order(), own, batch_size=batch_size))
    found = parallel.agree(found)
    if not found:
        why = f"an epoch of the blend has less than one micro batch for {each_of(rank.dp_size)}"
        raise too_short(streams.where, samples, f"{why}: one of the streams is too short for its share")
    return Facts(BLENDED, 1, found, True)


class SampleLengths(NamedTuple):
    """How long the samples are, of shape (samples,), and a digest of it and of the order in which a few are put."""

    tokens: npt.NDArray[np.uint32]
    digest: str


def _grouping_refused(why: str) -> SettingsRefused:
    return refused("group_by_length", f"--group_by_length true: {why}")


def _sampler_of(megatron: bool) -> type[Any]:
    """Returns the sampler of ms-swift's trainer, which is imported already."""
    try:
        if megatron:
            from swift.megatron.trainers.base import MegatronPretrainingRandomSampler as Sampler
        else:
            from swift.trainers.mixin import BatchSamplerShard as Sampler
    except ImportError:
        Sampler = None
    return check_sampler(Sampler)


def check_sampler(sampler: type[Any] | None) -> type[Any]:
    """Returns a sampler of ms-swift; refuses one that does not group by length."""
    if sampler is None or "group_by_length" not in inspect.signature(sampler).parameters:
        raise _grouping_refused("not with the sampler of this ms-swift: leave it out, or upgrade to a later ms-swift 4")
    return sampler


def read_lengths(args: Any, directory: str, facts: Facts, sampler: type[Any]) -> SampleLengths:
    """Reads what the sampler sorts by, and makes sure that all ranks sort by the same. A collective."""
    if not facts.ended:
        instead = "or leave it out, and have rows dealt by cost, with `lazyshard-producer run --balance`"
        raise _grouping_refused(f"{directory} is still being produced: start once it has ended; {instead}")
    if facts.dealt:
        raise _grouping_refused(f"{directory}: its rows were dealt by cost, and this would undo it: leave it out")
    try:
        tokens = lengths_by_sample(_reader(args, directory), facts.samples)
    except LengthUnknown as cause:
        raise _grouping_refused(str(cause)) from cause
    digest = xxhash.xxh3_128(np.ascontiguousarray(tokens, "<u4").tobytes())
    digest.update(np.array(_few_in_order(sampler), "<i8").tobytes())
    mine = digest.hexdigest()
    first = parallel.agree(mine)
    if first != mine:
        why = "do the nodes have different versions of ms-swift, transformers or torch? Start again with one of each"
        text = f"{directory}: rank 0 sees other lengths of its samples than this rank: {why}"
        raise StreamMismatch(text, directory=directory, expected=first, actual=mine)
    return SampleLengths(tokens, mine)


def _few_in_order(sampler: type[Any]) -> list[list[int]]:
    """Returns the batches that ms-swift's sampler makes of a few samples in their second epoch."""
    total, parameters = len(_FEW), inspect.signature(sampler).parameters
    both: dict[str, Any] = {"total_samples": total, "shuffle": True, "group_by_length": True}
    if "data_sharding" in parameters:
        # Megatron's, which has not always taken a seed.
        both |= {"dataset": {"lengths": list(_FEW)}, "consumed_samples": total, "micro_batch_size": 4}
        both |= {"data_parallel_rank": 0, "data_parallel_size": 2, "data_sharding": False}
        made = sampler(**both, **({"seed": 42} if "seed" in parameters else {}))
    else:
        # As if there were no other rank, so that it is the same on all of them.
        alone = type("Alone", (sampler,), {"rank": 0, "world_size": 1})
        made = alone(batch_size=4, drop_last=False, data_seed=42, lengths=list(_FEW), **both)
        made.set_epoch(1)
    return list(made)
