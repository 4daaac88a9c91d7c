"""From arguments to the training data set: streams are opened, agreed on by all ranks, planned, and registered.

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
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.deal import auto_unit, named_unit, window_positions
from lazyshard.plan.shuffle import largest_distance, window_for_distance
from lazyshard.store.files import list_names
from lazyshard.store.urls import is_url, stream_path
from lazyshard.stream import read_retired
from lazyshard.stream.listing import other_files
from lazyshard.stream.run_state import course_of
from lazyshard_swift import parallel, rows
from lazyshard_swift.arguments import batch_sizes, parse_skips, parse_unit, progress_of
from lazyshard_swift.checkpoints import (
    FOREIGN,
    GROUPED,
    Checkpoints,
    Position,
    consumer_name,
    load_position,
    resume_checkpoint,
    stream_id_of,
)
from lazyshard_swift.encoding import encode_cache, packing_length
from lazyshard_swift.errors import ResumeRefused, SettingsRefused, each_of, not_resumed, refused, too_short
from lazyshard_swift.ms_swift import is_megatron, notice
from lazyshard_swift.run_plan import BLENDED, SHOWN, Facts, RunPlan, Streams, check_fits, goes_on, state_of, without
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
    encode = rows.encoders(directories, template, rows.encoder_of(args, template, most), most)
    lengths = None
    if getattr(args, "group_by_length", False):
        lengths = read_lengths(args, directories[0], streams.facts[0], _sampler_of(is_megatron(args)))
        notice(
            "--group_by_length true: ms-swift's sampler goes through the whole stream in its own order: checkpoints "
            "are for the same ranks, micro batch and lengths, `lazyshard trace` cannot tell what was trained, and the "
            "run keeps all chunks"
        )
    facts = _positions_of(args, streams, rank) if streams.blended else streams.facts[0]
    stream = TrainStream(
        decide(args, streams, facts, rank, None if lengths is None else lengths.digest),
        encode,
        max_wait=args.sharded_lazy_max_wait,
        on_bad_sample=args.sharded_lazy_on_bad_sample or ("raise" if args.strict else "substitute"),
        samples_per_chunk=args.sharded_lazy_samples_per_chunk,
        cache=encode_cache(args, template),
        lengths=None if lengths is None else lengths.tokens,
    )
    plan = stream.plan
    check_retired(plan)
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
    try:
        # One that is empty or not there may yet become a stream.
        found = other_files(list_names(stream_path(directory)))
    except OSError as cause:
        if is_url(directory) and not isinstance(cause, FileNotFoundError):
            raise
        found = ""
    if found:
        make = "`lazyshard-producer run --source FILES ...` makes one"
        raise refused("dataset", f"--dataset {directory}: there is no stream in it, but other files ({found}); {make}")
    try:
        reader = _reader(args, directory)
    except ValueError as cause:
        if isinstance(cause, LazyShardError) or args.sharded_lazy_samples_per_chunk is not None:
            raise
        name = "sharded_lazy_samples_per_chunk"
        raise refused(name, f"{directory}: another program fills it, without stream.json: give --{name} N") from cause
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


def check_retired(plan: RunPlan) -> None:
    """Refuses streams whose first chunks are gone, of which a run that starts or shuffles all of them needs each."""
    streams, saved = plan.streams, plan.saved
    for directory, name, facts in zip(streams.directories, streams.names, streams.facts, strict=True):
        stream_id = stream_id_of(facts.stream)
        retired = 0 if stream_id is None else read_retired(stream_path(directory), stream_id)
        gone = f"its producer has deleted the chunks below {retired}"
        if not retired:
            continue
        if saved is None or (streams.blended and state_of(saved, name) is None):
            why = f"{gone}, which a run that starts anew would train first: go on from a checkpoint of it"
            anew = f"with --retain all, or with --consumers {plan.consumer}, which waits for this run"
            raise refused("dataset", f"{directory}: {why}, or produce it anew {anew}")
        if plan.layout != "strided":
            anew = "start anew from the weights alone in the order of the stream, or produce it anew with --retain all"
            why = f"{directory}: {gone}, and in ms-swift's own shuffle any of them may come next: {anew}"
            raise not_resumed(plan.checkpoint, why, "all chunks", f"those from {retired} on")


def _weights_of(args: Any, streams: Streams) -> tuple[float, ...]:
    """Returns what was given, or the samples of each stream."""
    given, name = args.interleave_prob, "interleave_prob"
    if given:
        if not all(weight > 0 for weight in given):
            raise refused(name, f"--{name} {' '.join(map(str, given))}: weights are numbers above 0")
        return tuple(map(float, given))
    for directory, one in zip(streams.directories, streams.facts, strict=True):
        if not one.ended or not one.samples:
            raise refused(name, f"{directory} is still being produced or empty: give the share of each with --{name}")
    weights = tuple(float(one.samples) for one in streams.facts)
    shares = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights[:SHOWN])
    notice(f"the streams of --dataset are blended by their sizes, {shares}; --{name} gives other shares")
    return weights


def _positions_of(args: Any, streams: Streams, rank: Rank) -> Facts:
    """Returns what all ranks know of the positions of the blend. A collective."""
    samples = sum(one.samples for one in streams.facts)
    if not all(one.ended for one in streams.facts) or progress_of(args, live=False).steps is not None:
        # Steps decide, and the gate finds the end.
        return Facts(BLENDED, 1, samples, False)
    found = 0
    if parallel.is_first():
        own = {"samples_per_chunk": args.sharded_lazy_samples_per_chunk, "max_wait": args.sharded_lazy_max_wait}
        with contextlib.suppress(ValueError):
            found = len(open_data(streams, rank, None, Order(), own, batch_size=batch_sizes(args, rank.dp_size)[0]))
    found = parallel.agree(found)
    if not found:
        less = f"less than one micro batch for {each_of(rank.dp_size)}"
        raise too_short(streams.where, samples, f"an epoch of the blend has {less}: a stream is too short")
    return Facts(BLENDED, 1, found, True)


def decide(args: Any, streams: Streams, facts: Facts, rank: Rank, lengths: str | None = None) -> RunPlan:
    """Decides how a stream or a blend is read; takes epochs out of Megatron's arguments where steps decide.

    `lengths` is the digest of what the order of ``--group_by_length true`` follows from.
    """
    checkpoint, megatron = resume_checkpoint(args), is_megatron(args)
    saved = None if checkpoint is None else load_position(checkpoint)
    progress = progress_of(args, live=not facts.ended)
    if progress.steps is not None and megatron and args.num_train_epochs is not None:
        notice(f"--num_train_epochs is put aside while the stream is produced: --train_iters {progress.steps} decides")
        args.num_train_epochs = None
    size, seed = facts.samples_per_chunk, (args.data_seed or 0) % 2**63
    batch_size, global_batch = batch_sizes(args, rank.dp_size)
    part = Part(rank.dp_size, batch_size, draws_per_step=global_batch // rank.dp_size)
    trained = None if progress.steps is None else progress.steps * global_batch
    layout, window = order_of(args, saved, facts, rank.dp_size, trained)
    units = _units(args, streams, part, trained, layout, window, saved)
    # The positions of a blend are dealt one by one; its streams have units of their own.
    unit = size if streams.blended else units[0]
    span, stream_id = window_positions(window, size, unit), stream_id_of(facts.stream)
    plan = RunPlan(
        streams=replace(streams, units=units),
        facts=facts,
        rank=rank,
        batch_size=batch_size,
        global_batch=global_batch,
        layout=layout,
        window=window,
        seed=seed,
        progress=progress,
        stop_at_end=progress.steps is not None and args.sharded_lazy_on_end == "stop",
        consumer=args.sharded_lazy_consumer or (saved.consumer if saved else consumer_name(args.output_dir)),
        take_over=args.sharded_lazy_take_over,
        checkpoint=checkpoint,
        saved=saved,
        state=RunState(stream_id, size, unit, span, seed, None, (part,), 0),
        grouping=lengths,
    )
    plan = replace(plan, epoch_samples=plan.epoch_length())
    if saved is not None:
        check_fits(saved, plan.position(0, 0), str(checkpoint))
    plan = _without_skipped(plan, args.sharded_lazy_skip)
    if layout == "strided":
        plan = goes_on(plan, part, megatron)
    elif saved is not None and not megatron and (counted := plan.counted(saved.step)) != saved.consumed:
        # By these the trainer counts batches to skip, in an order of ms-swift's own.
        was = f"{saved.consumed} samples were trained in {saved.step} steps, and the trainer would count {counted}"
        why = f"{was} with --gradient_accumulation_steps {plan.accumulation}: give the number it had"
        raise not_resumed(checkpoint, why, saved.consumed, counted)
    if not plan.epoch_samples:
        less = f"fewer than one micro batch of {batch_size} for {each_of(rank.dp_size)}"
        raise too_short(streams.where, facts.samples, f"the stream has ended with {facts.samples} samples, {less}")
    left_over = 0 if plan.total is None else plan.total - plan.epoch_samples
    if progress.steps is None and not plan.one_pass and not plan.skipped and left_over > 0:
        notice(f"{plan.total} samples; {left_over} of them are left over in each epoch, no micro batch for all ranks")
    return plan


def order_of(args: Any, saved: Position | None, facts: Facts, ranks: int, trained: int | None) -> tuple[str, int]:
    """Returns layout and window: what was begun goes on; else by the arguments. Steps train `trained` at the most."""
    grouped, live = bool(getattr(args, "group_by_length", False)), not facts.ended
    if saved is not None and (saved.layout == GROUPED) != grouped:
        was, way_out = ("without", "leave it out") if grouped else ("with", "keep it")
        why = f"the checkpoint was trained {was} --group_by_length true: {way_out}, or start anew from its weights"
        raise ResumeRefused(why, expected=saved.layout)
    if grouped:
        return GROUPED, 0
    asked = args.sharded_lazy_shuffle_window
    if args.sharded_lazy_shuffle_distance is not None:
        asked = _window_of_distance(args.sharded_lazy_shuffle_distance, saved is None, facts, ranks, trained)
    shuffle = bool(getattr(args, "train_dataloader_shuffle", True))
    # Training starts once ranks * 2 chunks are there; 8 are cheap to keep open.
    default = 0 if facts.dealt or not shuffle else 2 if live else 8
    window = asked if asked is not None else default
    blocks = is_megatron(args) and bool(args.data_sharding) and shuffle and asked is None
    begun = saved is not None and bool(saved.window or saved.layout == "block")
    if facts.dealt and asked is None and shuffle and not begun:
        notice("the rows of the stream were dealt by cost, so they are read in order: they are not shuffled once more")
        blocks = False
    if blocks and len(args.dataset) > 1:
        notice("--data_sharding true is put aside: each rank reads its own chunks of all streams, shuffled in windows")
        blocks = False
    if saved is not None:
        if saved.layout == "block" and not blocks:
            keep = "--data_sharding true --train_dataloader_shuffle true"
            why = "the checkpoint was trained in the shuffle of ms-swift's own sampler over the whole data set"
            raise ResumeRefused(f"{why}: keep {keep}, and leave out windows and distances", expected=keep)
        if blocks and saved.layout != "block":
            notice("--data_sharding true is put aside: the checkpoint was trained in the order of the stream")
        return saved.layout, saved.window if asked is None and shuffle == begun else window
    if blocks and live:
        notice(f"--data_sharding true is put aside on a live stream: windows of {window} chunks are shuffled")
    return ("block", 0) if blocks and not live else ("strided", window)


def _window_of_distance(distance: int, begins: bool, facts: Facts, ranks: int, trained: int | None) -> int:
    """Returns a window in chunks; refuses what a run that begins cannot reach. The same again where it is resumed."""
    name, window = "sharded_lazy_shuffle_distance", window_for_distance(distance, facts.samples_per_chunk)
    most = facts.samples if facts.ended else trained
    if not begins or most is None:
        return window
    largest = largest_distance(most // ranks)
    if distance > largest:
        there = f"the stream has {most} samples" if facts.ended else f"this run trains {most} samples at the most"
        why = f"{there}; those of {each_of(ranks)}, all shuffled together, are {largest} apart on average"
        raise refused(name, f"--{name} {distance}: {why}: give no more, or leave it out")
    first = "" if facts.ended else f"; training begins with {ranks * window} chunks"
    notice(f"--{name} {distance}: each rank shuffles windows of {window} chunks{first}")
    return window


def _units(
    args: Any, streams: Streams, part: Part, trained: int | None, layout: str, window: int, saved: Position | None
) -> tuple[int, ...]:
    """Returns how many samples of each stream a rank is dealt in a row, of `trained` where steps decide."""
    asked = parse_unit(args.sharded_lazy_unit)
    if layout != "strided":
        if asked not in (None, "auto", "chunk"):
            notice(f"--sharded_lazy_unit {asked} is put aside: ms-swift shuffles each rank's chunks as a whole")
        return tuple(facts.samples_per_chunk for facts in streams.facts)
    units = []
    for name, facts in zip(streams.names, streams.facts, strict=True):
        begun = state_of(saved, name) if asked in (None, "auto") else None
        unit = named_unit("chunk" if asked is None else asked, facts.samples_per_chunk, part.batch_size)
        units.append(begun.unit if begun is not None else unit or _auto_unit(facts, part, trained, window))
    return tuple(units)


def _auto_unit(facts: Facts, part: Part, trained: int | None, window: int) -> int:
    size = facts.samples_per_chunk
    # Of a live stream what the run would train is taken for its length, as for that of an epoch.
    limit = None if facts.ended else trained
    unit = auto_unit(part.dp, size, part.batch_size, facts.samples, facts.ended, limit) or size
    if unit != size:
        there = f"the stream has {facts.samples} samples" if facts.ended else f"the run trains {trained} samples"
        fewer = f"{there}, fewer than a chunk of {size} for {each_of(part.dp)}"
        first = f". {window * part.dp} chunks must be published first: --sharded_lazy_shuffle_window 0 begins with any"
        first = first if window and not facts.ended else ""
        notice(f"--sharded_lazy_unit auto: {fewer}, so they are dealt in batches of {unit}{first}")
    return unit


def _without_skipped(plan: RunPlan, skip: str | None) -> RunPlan:
    """Returns the plan with the state from which the run goes on, less what this start is told not to train."""
    saved = plan.saved
    state = plan.state if saved is None or saved.state is None else saved.state
    try:
        if plan.total is not None:
            course_of(state).epoch(plan.total)
    except ValueError as cause:
        why = f"it stands at sample {state.consumed}, the stream has ended with {plan.total}: was it cut?"
        raise not_resumed(plan.checkpoint, why, f"at least {state.consumed} samples", plan.total) from cause
    done = () if saved is None else saved.skipped
    new = [one for one in parse_skips(skip) if str(one) not in done] if skip is not None else []
    try:
        if new and plan.layout != "strided":
            raise ValueError("ms-swift's own shuffle draws every sample: leave out --data_sharding")
        if saved is None and any(one.kind == "steps" for one in new):
            raise ValueError("this run begins anew and has no steps: name samples or chunks")
        state = without(state, new, plan.total, plan.facts.samples)
    except ValueError as cause:
        raise refused("sharded_lazy_skip", f"--sharded_lazy_skip {skip!r}: {cause}") from cause
    return replace(plan, state=state, skipped=(*done, *map(str, new)))


class SampleLengths(NamedTuple):
    """How long the samples are, of shape (samples,), and a digest of it and of the order in which a few are put."""

    tokens: npt.NDArray[np.uint32]
    digest: str


def _grouping_refused(why: str) -> SettingsRefused:
    return refused("group_by_length", f"--group_by_length true: {why}")


def _sampler_of(megatron: bool) -> type[Any]:
    """Returns the sampler of ms-swift's trainer, which is imported already."""
    if megatron:
        from swift.megatron.trainers.base import MegatronPretrainingRandomSampler as Sampler
    else:
        from swift.trainers.mixin import BatchSamplerShard as Sampler
    return check_sampler(Sampler)


def check_sampler(sampler: type[Any]) -> type[Any]:
    """Returns a sampler of ms-swift; refuses one that does not group by length."""
    if "group_by_length" not in inspect.signature(sampler).parameters:
        raise _grouping_refused("not with the sampler of this ms-swift: leave it out, or upgrade to a later ms-swift 4")
    return sampler


def read_lengths(args: Any, directory: str, facts: Facts, sampler: type[Any]) -> SampleLengths:
    """Reads what the sampler sorts by, and makes sure that all ranks sort by the same. A collective."""
    if not facts.ended:
        instead = "or have rows dealt by cost instead, by `lazyshard-producer run --balance`"
        raise _grouping_refused(f"{directory} is still being produced: start once it has ended, {instead}")
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
        ask = "do the nodes have different versions of ms-swift, transformers or torch?"
        text = f"{directory}: rank 0 sees other lengths of its samples than this rank: {ask}"
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
        return list(sampler(**both, **({"seed": 42} if "seed" in parameters else {})))
    # As if there were no other rank, so that it is the same on all of them.
    alone = type("Alone", (sampler,), {"rank": 0, "world_size": 1})
    made = alone(batch_size=4, drop_last=False, data_seed=42, lengths=list(_FEW), **both)
    made.set_epoch(1)
    return list(made)
