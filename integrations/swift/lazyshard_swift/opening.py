"""From arguments to the training data set: the stream is opened, agreed on by all ranks, planned, and registered."""

from __future__ import annotations

from typing import Any

import xxhash

from lazyshard import LazyShardError, StreamReader
from lazyshard.data.dealt_order import is_dealt
from lazyshard.data.rank import Rank
from lazyshard.storage import read_retired
from lazyshard.storage.urls import stream_path
from lazyshard_swift import encoded, parallel, rows, settings
from lazyshard_swift.checkpoints import Checkpoints
from lazyshard_swift.encoded import encoders
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.parallel import FOREIGN, Facts, attend, notice
from lazyshard_swift.planning import decide, resume_checkpoint
from lazyshard_swift.rows import RowEncoder
from lazyshard_swift.run_plan import how_it_goes_on
from lazyshard_swift.settings import groups_by_length
from lazyshard_swift.settings_checks import check_directory
from lazyshard_swift.stream import TrainStream


def open_train_stream(args: Any, template: Any) -> TrainStream:
    """Opens the stream that the arguments name, waiting for it if it is not there yet. A collective.

    Raises:
        SettingsRefused: the arguments do not fit the stream.
        ResumeRefused, PositionInvalid: the checkpoint's position cannot be used.
        StreamTooShort: the stream has ended with less than a micro batch a rank.
        WaitTimeout, LazyShardError: the stream cannot be read.
    """
    attend()
    rows.prepare_packing(args, template)
    rank = parallel.data_parallel_rank(args)
    if len(args.dataset) > 1:
        from lazyshard_swift.blend import open_blend

        return open_blend(args, rank, template, _encoder(args, template))
    directory = args.dataset[0]
    facts = facts_of(args, directory, rank)
    (encoder,) = encoders([directory], template, _encoder(args, template), rows.packing_length(args))
    options: dict[str, Any] = {
        "max_wait": args.sharded_lazy_max_wait,
        "on_bad_sample": args.sharded_lazy_on_bad_sample or ("raise" if args.strict else "substitute"),
        "samples_per_chunk": args.sharded_lazy_samples_per_chunk,
        "cache": encoded.cache_options(args, template),
    }
    if groups_by_length(args):
        from lazyshard_swift.grouped import GROUPING_TOLD, GroupedStream, read_lengths, sampler_of

        lengths = read_lengths(args, directory, facts, sampler_of(settings.is_megatron(args)))
        plan = decide(args, directory, facts, rank, lengths.digest)
        stream: TrainStream = GroupedStream(plan, encoder, lengths.tokens, **options)
        notice(GROUPING_TOLD)
    else:
        plan = decide(args, directory, facts, rank)
        stream = TrainStream(plan, encoder, **options)
    if plan.saved is None:
        check_whole(directory, plan.stream_id, plan.consumer)
    begin(stream, args)
    return stream


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
    check_directory(directory)
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


def _encoder(args: Any, template: Any) -> RowEncoder:
    return RowEncoder(
        template,
        columns=args.columns if isinstance(args.columns, dict) else None,
        auto_columns=not getattr(args, "disable_auto_column_mapping", False),
        keep_unused=not args.remove_unused_columns,
        packing_length=rows.packing_length(args),
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
