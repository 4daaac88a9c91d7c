"""Builds the training data set from the arguments: opens the streams, agrees on them with all ranks, plans, registers.

With ``--group_by_length true`` ms-swift's own sampler sorts parts of an ended stream by length: index i draws sample i.
Such a run can only be resumed with the same lengths, seed and micro batch of all ranks, cannot be traced, and keeps all
chunks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from dataclasses import replace
from typing import Any, Final

import xxhash

from lazyshard import BadRows, EncodeCache, LazyShardError, StreamReader
from lazyshard.data.encode_cache import cache_place
from lazyshard.data.rank import Rank, resolve_rank
from lazyshard.data.run_state import is_dealt
from lazyshard.errors import StreamMismatch, redact
from lazyshard.format.records import Encoding
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.deal import auto_unit, named_unit, window_positions
from lazyshard.plan.shuffle import largest_distance, window_for_distance
from lazyshard.store.files import is_url, list_names, stream_path
from lazyshard.stream.listing import other_files
from lazyshard_swift import arguments, checkpoints, ms_swift, rlhf, rows, run_plan
from lazyshard_swift.arguments import batch_sizes, parse_skips, parse_unit, progress_of, shares_of, validation_streams
from lazyshard_swift.checkpoints import FOREIGN, GROUPED, Position, consumer_name, resume_checkpoint, stream_id_of
from lazyshard_swift.errors import ResumeRefused, each_of, not_resumed, refused, too_short
from lazyshard_swift.ms_swift import is_megatron, notice
from lazyshard_swift.ordinary import spooled
from lazyshard_swift.run_plan import BLENDED, PACKED, RunPlan, Stream, check_fits, order_of_split, resumed, state_of
from lazyshard_swift.stream import Options, TrainStream, open_data, open_packs, open_validation, read_lengths

# How ms-swift's templates read an environment variable; its `get_env_args` converts the name to capitals.
_READ: Final = re.compile(r"""(?:get_env_args|environ\.get|getenv)\(\s*['"](\w+)['"]""")
# Variables read by the packages that its templates use for images and videos (ms-swift 4.6:
# `swift/model/models/qwen.py`).
_READ_BY_QWEN: Final = (
    "IMAGE_FACTOR MIN_PIXELS MAX_PIXELS MAX_RATIO FRAME_FACTOR SPATIAL_MERGE_SIZE VIDEO_MIN_PIXELS VIDEO_MAX_PIXELS "
    "VIDEO_TOTAL_PIXELS FPS FPS_MIN_FRAMES FPS_MAX_FRAMES IMAGE_MIN_TOKEN_NUM IMAGE_MAX_TOKEN_NUM VIDEO_MIN_TOKEN_NUM "
    "VIDEO_MAX_TOKEN_NUM MODEL_SEQ_LEN FORCE_QWENVL_VIDEO_READER"
)
_CACHE: Final = "sharded_lazy_encode_cache"
_PACKED_ROWS: Final = 10_000  # Rows that are packed together: packs are 99.9 % full then


def open_train_stream(args: Any, template: Any) -> TrainStream:
    """Opens the streams of the arguments, waiting for missing ones. A collective."""
    show_logs()
    if getattr(args, "packing", False):
        # The template then accepts lists of encoded rows, as from `PackingDataset`.
        template.packing = template.padding_free = True
    rank, most = data_parallel_rank(args), rows.packing_length(args)
    own = {"samples_per_chunk": args.sharded_lazy_samples_per_chunk, "max_wait": args.sharded_lazy_max_wait}
    streams = tuple(_open_stream(args, directory, rank, own) for directory in args.dataset)
    apart = own | {"samples_per_chunk": None}
    held_out = tuple(_open_stream(args, directory, rank, apart) for directory in validation_streams(vars(args).get))
    streams, facts = _blended(args, streams, rank, own) if len(streams) > 1 else (streams, streams[0])
    every = (*streams, *held_out)
    if most is not None and not all(one.packed for one in every):
        most, facts = None, _packed(args, every, len(streams), facts)
    encode = rows.encoders([one.directory for one in every], template, rlhf.encoder_of(args, template, most), most)
    rlhf.check_encoders(args, encode)
    encode = tuple(
        replace(one, prepared=stream.prepared) if isinstance(one, rows.RowEncoder) else one
        for one, stream in zip(encode, every, strict=True)
    )
    lengths, digest = None, None
    if getattr(args, "group_by_length", False):
        if is_megatron(args):
            from swift.megatron.trainers.base import MegatronPretrainingRandomSampler as Sampler
        else:
            from swift.trainers.mixin import BatchSamplerShard as Sampler
        lengths, digest = read_lengths(streams[0], own, Sampler)
        lost = "`lazyshard trace` cannot show what was trained, all chunks are kept, ranks and batches cannot change"
        notice(f"--group_by_length true: ms-swift's sampler reads the whole stream in its own order: {lost}")
    plan = decide(args, streams, facts, rank, digest)
    bad_rows = BadRows(args.sharded_lazy_on_bad_sample or ("raise" if args.strict else "substitute"))
    both: Options = {"bad_rows": bad_rows, "cache": encode_cache(args, template)}
    stream = TrainStream(plan, encode[: len(streams)], own | both, lengths)
    plan = stream.plan
    check_retired(plan)
    if plan.saved is not None:
        # Check now instead of after minutes of loading a model; the weights are compared with it later.
        stream.check_resume(plan.consumed, plan.step)
        notice(f"{plan.checkpoint}: {plan.describe_resume(plan.saved)}")
    if plan.splits is not None:
        stream.validation = open_validation(streams, encode, own | both, plan.splits)
    elif held_out:
        stream.validation = open_validation(held_out, encode[len(streams) :], apart | both)
    # After all checks, since a cursor keeps chunks until it is removed, and long before the first sample is read.
    checkpoints.Checkpoints(plan, args.output_dir).register()
    return stream


def show_logs() -> None:
    """Makes the library's own log messages visible on every rank, unless the program has set up logging."""
    logger = logging.getLogger("lazyshard")
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)s:lazyshard] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def data_parallel_rank(args: Any) -> Rank:
    """Returns the rank for which this process reads, the same for all model-parallel peers (also DeepSpeed's)."""
    rank, deepspeed, size = resolve_rank(), getattr(args, "deepspeed", None), 1
    if not is_megatron(args) and isinstance(deepspeed, dict):
        size = (deepspeed.get("tensor_parallel") or {}).get("autotp_size") or 1
    return Rank(rank.dp_rank // size, rank.dp_size // size)


def encode_cache(args: Any, template: Any) -> EncodeCache:
    """Returns the cache for a data set of raw rows; one without a directory if none was requested."""
    directory = args.sharded_lazy_encode_cache
    if directory is None:
        return EncodeCache()
    if ms_swift.release(ms_swift.version()) is None:
        raise refused(_CACHE, "identifies samples by the version of ms-swift, which is unknown here: omit it")
    if getattr(template, "use_model", False):
        raise refused(_CACHE, "is not for a template that encodes with the model, which training changes: omit it")
    try:
        for name in (*args.dataset, *validation_streams(vars(args).get)):
            cache_place(directory, arguments.first_of(name)[0])
    except ValueError as cause:
        raise refused(_CACHE, f"{directory}: {cause}") from cause
    return EncodeCache(directory, args.sharded_lazy_encode_cache_size, cache_facts(args, template))


def cache_facts(args: Any, template: Any) -> Encoding:
    """Returns everything that decides how a row is encoded, as plain values."""
    kind, plugins = type(template), getattr(args, "external_plugins", None) or ()
    attributes = {name: one for name, one in vars(template).items() if name[0] != "_" and rows.is_plain(one)}
    return {
        **rows.of_producer(template, **rows.row_options(args)),
        "keep_unused": not args.remove_unused_columns,
        "packing_length": rows.packing_length(args),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        # Plain attributes, in which templates keep their settings.
        "attributes": rows.digest(attributes),
        "environment": rows.digest({name: os.environ[name] for name in sorted(_variables()) if name in os.environ}),
        # A changed plugin may encode differently.
        "plugins": rows.digest([rows.content(name) for name in ([plugins] if isinstance(plugins, str) else plugins)]),
    }


@functools.cache
def _variables() -> frozenset[str]:
    """Returns the environment variables that the templates of the installed ms-swift read."""
    place = ms_swift.folder()
    files = () if place is None else (place / "template").rglob("*.py")
    names = {name for file in files for name in _READ.findall(file.read_text(encoding="utf-8"))}
    return frozenset({*_READ_BY_QWEN.split(), *names, *map(str.upper, names)})


def _open_stream(args: Any, name: str, rank: Rank, own: Options) -> Stream:
    """Opens a stream, waiting for it if it is missing, and agrees on its facts with all ranks. A collective."""
    prepared = checkpoints.agree(arguments.is_ordinary(name))
    directory, limit = (spooled(args, name), None) if prepared else arguments.first_of(name)
    # An empty or missing directory may still become a stream.
    with contextlib.suppress(FileNotFoundError if is_url(directory) else OSError):
        if found := other_files(list_names(stream_path(directory))):
            raise refused("dataset", f"{directory} holds no stream but {found}: make one with `lazyshard-producer run`")
    try:
        reader = StreamReader(directory, **own)
    except ValueError as cause:
        if isinstance(cause, LazyShardError) or own["samples_per_chunk"] is not None:
            raise
        raise refused("sharded_lazy_samples_per_chunk", f"N is needed: {directory} has no stream.json") from cause
    reader.label = f"rank {rank.dp_rank} of {rank.dp_size}"
    published = reader.refresh()
    identity = reader.stream_id or f"{FOREIGN}{xxhash.xxh3_64_hexdigest(reader.line(0))}"
    what = identity, reader.samples_per_chunk
    stream = Stream(directory, *what, 0, False, is_dealt(reader), limit=limit, prepared=prepared)
    # Rank 0's view, so that a stream that ends right now has ended for all ranks or for none.
    agreed = checkpoints.agree(stream.at(published))
    if agreed[1:3] != what:
        there, this = (f"{name} of {size} samples per chunk" for name, size in (agreed[1:3], what))
        why = f"rank 0 sees {there}, this rank {this}: is the directory on a filesystem shared by all nodes?"
        raise StreamMismatch(f"{directory}: {why}", directory=directory, expected=agreed.identity, actual=identity)
    packing, checkpoint = bool(getattr(args, "packing", False)), resume_checkpoint(args)
    if checkpoint is None:
        packed = (packing or agreed.samples > 0) and rows.has_packs(packing, reader)
    else:
        # A resumed run need not open a chunk that it has trained; its rows are checked when they are read.
        saved = checkpoints.load_position(checkpoint)
        packed = packing and (saved is None or saved.stream != PACKED)
    return agreed._replace(directory=directory, packed=packed)


def check_retired(plan: RunPlan) -> None:
    """Refuses streams whose first chunks are deleted, if a new run, or one that shuffles all of them, needs them."""
    for one in plan.streams:
        retired, saved = one.retired(), plan.saved
        gone = f"{one.directory}: the producer has deleted all chunks below {retired}"
        if retired and saved is not None and plan.layout != "strided":
            why = "ms-swift's shuffle may draw any of them: start over from the weights, or produce with --retain all"
            raise not_resumed(plan.checkpoint, f"{gone}, and {why}", "all chunks", f"those from {retired} on")
        if retired and state_of(saved, one.name) is None:
            raise refused("dataset", f"{gone}: resume, or produce with --retain all or --consumers {plan.consumer}")


def _blended(args: Any, streams: tuple[Stream, ...], rank: Rank, own: Options) -> tuple[tuple[Stream, ...], Stream]:
    """Returns the streams of a blend, weighted as given or by their sizes, and its positions. A collective."""
    weights, name = args.interleave_prob, "interleave_prob"
    if not all(weight > 0 for weight in weights or ()):
        raise refused(name, f"{' '.join(map(str, weights))}: weights must be numbers above 0")
    kept = {one.identity: one.directory for one in streams}
    for one in streams:
        other = kept[one.identity]
        if other != one.directory and not one.identity.startswith(FOREIGN):
            raise refused("dataset", f"{one.directory} and {other} are copies of one stream: give one of them")
    if not weights:
        weights = [one.samples for one in streams]
        if unknown := [one.directory for one in streams if not one.total]:
            raise refused(name, f"is needed: {unknown[0]} is still being produced or empty")
        shares = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights[: run_plan.SHOWN])
        notice(f"the streams of --dataset are blended by their sizes, {shares}; --{name} sets other shares")
    streams = tuple(one._replace(weight=float(weight)) for one, weight in zip(streams, weights, strict=True))
    where, samples = ", ".join(one.directory for one in streams), sum(one.samples for one in streams)
    if not all(one.ended for one in streams) or progress_of(args, live=False)[0] is not None:
        # Steps set the length, and the gate finds the end.
        return streams, Stream(where, BLENDED, 1, samples, False)
    found, whole = 0, {"batch_size": batch_sizes(args, rank.dp_size)[0], "stopping": args.stopping_strategy}
    with contextlib.suppress(ValueError):
        order = order_of_split(shares_of(vars(args).get), "train")
        found = len(open_data(streams, rank, (), order, own, **whole)) if checkpoints.is_first() else 0
    if not (found := checkpoints.agree(found)):
        raise too_short(where, samples, f"a stream is too short for a micro batch of {each_of(rank.dp_size)}")
    return streams, Stream(where, BLENDED, 1, found, True)


def _packed(args: Any, streams: tuple[Stream, ...], count: int, rows_of: Stream) -> Stream:
    """Returns the packs that are made of the rows of streams, as a stream whose samples are still to be counted."""
    if packed := [one.directory for one in streams if one.packed]:
        raise refused("packing", f"true: the rows of {packed[0]} are packs already, those of the other streams are not")
    for name in ("sharded_lazy_shuffle_distance", "sharded_lazy_unit", "sharded_lazy_skip"):
        if getattr(args, name) is not None:
            raise refused(name, "counts rows, but packs made during training are dealt: omit it")
    steps, epochs = progress_of(args, live=not all(one.ended for one in streams[:count]))
    if count > 1 and (args.sharded_lazy_on_end == "repeat" or (epochs or 1) > 1):
        option = "num_train_epochs" if steps is None else "sharded_lazy_on_end"
        raise refused(option, "repeats a blend of rows that are packed during training: train one epoch, or one stream")
    return Stream(rows_of.directory, PACKED, 1, rows_of.samples, steps is None)


def decide(args: Any, streams: tuple[Stream, ...], facts: Stream, rank: Rank, grouping: str | None = None) -> RunPlan:
    """Decides how a stream or a blend is read. If steps set the length, removes epochs from Megatron's arguments."""
    checkpoint, megatron = resume_checkpoint(args), is_megatron(args)
    saved = None if checkpoint is None else checkpoints.load_position(checkpoint)
    steps, epochs = progress_of(args, live=not facts.ended)
    if steps is not None and megatron and args.num_train_epochs is not None:
        notice(f"--num_train_epochs is ignored while the stream is produced: --train_iters {steps} decides")
        args.num_train_epochs = None
    (batch_size, global_batch), rollout = batch_sizes(args, rank.dp_size), arguments.rollout_of(args)
    steps = None if steps is None else -(-steps // rollout.steps)
    # 0: the samples of a step are not all its own.
    part = Part(rank.dp_size, batch_size, draws_per_step=0 if rollout.steps > 1 else global_batch // rank.dp_size)
    trained = None if steps is None else steps * global_batch
    made = facts.identity == PACKED
    splits, several = shares_of(vars(args).get), made or len(streams) > 1
    gaps = order_of_split(splits, "train").gaps
    own = [one._replace(samples=gaps.kept(0, one.samples)) for one in streams]
    kept = facts.samples if several else own[0].samples
    usual = -(-_PACKED_ROWS // streams[0].samples_per_chunk) if made else 8 if facts.ended else 2
    layout, window = order_of(args, saved, facts._replace(samples=kept), rank.dp_size, trained, usual)
    units = [0 if made else _unit_of(args, one, part, trained, layout, window, saved) for one in own]
    streams = tuple(one._replace(unit=unit) for one, unit in zip(streams, units, strict=True))
    # The positions of a blend are dealt one by one; each stream has its own unit.
    size, unit = facts.samples_per_chunk, 1 if several else streams[0].unit
    span, seed = window_positions(window, size, unit), (args.data_seed or 0) % 2**63
    begun = (0, 0) if saved is None else (saved.consumed, saved.step)
    plan = RunPlan(
        *(facts.identity, redact(facts.directory), size, *begun, rank.dp_size, batch_size, layout, window, seed),
        epoch_samples=0,
        by_steps=steps is not None,
        consumer=args.sharded_lazy_consumer or (saved.consumer if saved else consumer_name(args.output_dir)),
        saved_at=0.0,
        state=RunState(
            *(stream_id_of(facts.identity), size, unit, span, seed, facts.limit, (part,), 0),
            split=None if several else gaps.split,
        ),
        grouping=grouping,
        streams=streams,
        stopping=args.stopping_strategy if len(streams) > 1 else "first_exhausted",
        total=facts.total,
        splits=splits,
        rank=rank,
        global_batch=global_batch,
        steps=steps,
        epochs=epochs,
        stop_at_end=steps is not None and args.sharded_lazy_on_end == "stop",
        take_over=args.sharded_lazy_take_over,
        checkpoint=checkpoint,
        saved=saved,
        pack_tokens=rows.packing_length(args) if made else None,
        rollout=rollout,
    )
    if made and facts.ended:
        waits = {"max_wait": args.sharded_lazy_max_wait}
        kept = checkpoints.agree(open_packs(plan, (), waits).total() if checkpoints.is_first() else 0)
        plan = replace(plan, total=kept)
    plan = replace(plan, epoch_samples=plan.epoch_length())
    if saved is not None:
        check_fits(saved, plan, str(checkpoint))
    plan = _without_skipped(plan, args.sharded_lazy_skip, facts.samples)
    if layout == "strided":
        plan = resumed(plan, part, megatron)
    elif saved is not None and not megatron and (counted := plan.counted(saved.step)) != saved.consumed:
        # From these the trainer counts the batches to skip, in ms-swift's own order.
        why = f"{saved.step} steps of --gradient_accumulation_steps {plan.accumulation} are {counted} samples, not"
        raise not_resumed(checkpoint, f"{why} {saved.consumed}: use the same number as before", saved.consumed, counted)
    if not plan.epoch_samples:
        why = f"the stream has ended with {kept} samples, fewer than {batch_size} for {each_of(rank.dp_size)}"
        raise too_short(facts.directory, kept, why)
    left_over = 0 if plan.total is None else kept - plan.epoch_samples
    if not plan.by_steps and not plan.one_pass and not plan.skipped and left_over > 0:
        notice(f"{kept} samples; {left_over} are left over in each epoch, too few for a micro batch of all ranks")
    return plan


def order_of(
    args: Any, saved: Position | None, facts: Stream, ranks: int, trained: int | None, usual: int
) -> tuple[str, int]:
    """Returns layout and window: the checkpoint's, else by the arguments, else `usual`, if samples are shuffled.

    Steps train at most `trained` samples.
    """
    grouped, live = bool(getattr(args, "group_by_length", False)), not facts.ended
    if saved is not None and (saved.layout == GROUPED) != grouped:
        was = "without --group_by_length true: omit it" if grouped else "with --group_by_length true: keep it"
        raise ResumeRefused(f"the checkpoint was trained {was}, or start over from its weights", expected=saved.layout)
    if grouped:
        return GROUPED, 0
    asked = args.sharded_lazy_shuffle_window
    if args.sharded_lazy_shuffle_distance is not None:
        asked = _window_of_distance(args.sharded_lazy_shuffle_distance, saved is None, facts, ranks, trained)
    shuffle = bool(getattr(args, "train_dataloader_shuffle", True))
    # A live training starts once ranks * 2 chunks are published; 8 are cheap to keep open.
    window = asked if asked is not None else 0 if facts.dealt or not shuffle else usual
    blocks = is_megatron(args) and bool(args.data_sharding) and shuffle and asked is None
    begun = saved is not None and bool(saved.window or saved.layout == "block")
    if facts.dealt and asked is None and shuffle and not begun:
        notice("the rows of the stream were dealt by cost, so they are read in order and not shuffled again")
        blocks = False
    if blocks and facts.identity in (BLENDED, PACKED):
        notice("--data_sharding true is ignored: blends, and packs made during training, are shuffled in windows")
        blocks = False
    if saved is not None:
        if saved.layout == "block" and not blocks:
            keep = "--data_sharding true --train_dataloader_shuffle true"
            raise ResumeRefused(f"the checkpoint was trained with {keep}: keep both, and omit windows", expected=keep)
        if blocks and saved.layout != "block":
            notice("--data_sharding true is ignored: the checkpoint was trained in the order of the stream")
        return saved.layout, saved.window if asked is None and shuffle == begun else window
    if blocks and live:
        notice(f"--data_sharding true is ignored on a live stream: windows of {window} chunks are shuffled")
    return ("block", 0) if blocks and not live else ("strided", window)


def _window_of_distance(distance: int, begins: bool, facts: Stream, ranks: int, trained: int | None) -> int:
    """Returns a window in chunks, the same for a resumed run; refuses a distance that a new run cannot reach."""
    name, window = "sharded_lazy_shuffle_distance", window_for_distance(distance, facts.samples_per_chunk)
    most = facts.samples if facts.ended else trained
    if not begins or most is None:
        return window
    if distance > (largest := largest_distance(most // ranks)):
        raise refused(name, f"{distance}: {most} samples on {each_of(ranks)} are at most {largest} apart: reduce it")
    first = "" if facts.ended else f"; training begins once {ranks * window} chunks are published"
    notice(f"--{name} {distance}: each rank shuffles windows of {window} chunks{first}")
    return window


def _unit_of(
    args: Any, stream: Stream, part: Part, most: int | None, layout: str, window: int, saved: Position | None
) -> int:
    """Returns the unit of a stream; if steps set the length, the run trains at most `most` samples."""
    asked, size = parse_unit(args.sharded_lazy_unit), stream.samples_per_chunk
    if layout != "strided":
        if asked not in (None, "auto", "chunk"):
            notice(f"--sharded_lazy_unit {asked} is ignored: ms-swift shuffles each rank's chunks as a whole")
        return size
    if asked in (None, "auto") and (begun := state_of(saved, stream.name)) is not None:
        return begun.unit
    if (unit := named_unit(asked or "chunk", size, part.batch_size)) is None:
        # For a live stream, the number of samples the run trains serves as its length, as for an epoch.
        known = stream.samples, stream.ended, None if stream.ended else most
        if (unit := auto_unit(part.dp, size, part.batch_size, *known) or size) != size:
            there = f"the stream has {stream.samples}" if stream.ended else f"the run trains {most}"
            first = f". {window * part.dp} chunks must be published first; not with --sharded_lazy_shuffle_window 0"
            more = f"so they are dealt in batches of {unit}{first if window and not stream.ended else ''}"
            notice(f"--sharded_lazy_unit auto: {there} samples, no chunk of {size} for {each_of(part.dp)}, {more}")
    return unit


def _without_skipped(plan: RunPlan, skip: str | None, published: int) -> RunPlan:
    """Returns the plan with the state to continue from, without the samples that this start excludes."""
    saved = plan.saved
    plan = plan if saved is None or saved.state is None else replace(plan, state=saved.state)
    try:
        plan.course.epoch(plan.total)
    except ValueError as cause:
        why = f"it is at sample {plan.consumed}, but the stream has ended with {plan.total}: was it truncated?"
        raise not_resumed(plan.checkpoint, why, f"at least {plan.consumed} samples", plan.total) from cause
    done = () if saved is None else saved.skipped
    new = {} if skip is None else {name: one for name, one in parse_skips(skip).items() if name not in done}
    try:
        if new and plan.layout != "strided":
            raise ValueError("ms-swift's own shuffle draws every sample: omit --data_sharding")
        if saved is None and any(kind == "steps" for kind, *_ in new.values()):
            raise ValueError("this run has no checkpoint to resume, so no steps yet: name samples or chunks")
        state = run_plan.without(plan.state, list(new.values()), plan.total, published)
    except ValueError as cause:
        raise refused("sharded_lazy_skip", f"{skip!r}: {cause}") from cause
    return replace(plan, state=state, skipped=(*done, *new))
