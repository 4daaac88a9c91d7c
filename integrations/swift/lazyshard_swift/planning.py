"""From arguments, stream and checkpoint to the plan of a run, its order included: the same on all ranks.

The order is the layout, the window, and how many samples a rank is dealt in a row. `--sharded_lazy_shuffle_distance`
chooses the window that draws neighbours so far apart.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from lazyshard.data.rank import Rank
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.deal import auto_unit, named_unit, window_positions
from lazyshard.plan.shuffle import expected_neighbours, largest_distance, window_for_distance
from lazyshard.stream.run_state import course_of
from lazyshard_swift.arguments import ENDED_WINDOW, LIVE_WINDOW, parse_skips, parse_unit
from lazyshard_swift.checkpoints import GROUPED, TRACKER, Position, check_whole, consumer_name, load_position
from lazyshard_swift.errors import ResumeRefused, SettingsRefused, each_of, not_resumed, refused, too_short
from lazyshard_swift.ms_swift import is_megatron
from lazyshard_swift.parallel import Facts, Streams, notice, stream_id_of
from lazyshard_swift.run_plan import Progress, RunPlan, check_fits, epoch_length, goes_on, state_of, without

_DISTANCE = "sharded_lazy_shuffle_distance"


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
    layout, window = order_of(args, saved, facts)
    batch_size, global_batch = batch_sizes(args, rank.dp_size)
    part = Part(rank.dp_size, batch_size, draws_per_step=global_batch // rank.dp_size)
    steps = None if progress.steps is None else progress.steps * global_batch
    units = _units(args, streams, part, steps, (layout, window), saved)
    # The positions of a blend are dealt one by one; its streams have units of their own.
    unit = size if streams.blended else units[0]
    if saved is None and args.sharded_lazy_shuffle_distance is not None:
        _check_distance(args.sharded_lazy_shuffle_distance, streams.where, facts.total, steps, rank.dp_size)
        notice(distance_told(args.sharded_lazy_shuffle_distance, size, facts.total, rank.dp_size, unit))
    span, stream_id = window_positions(window, size, unit), stream_id_of(facts.stream)
    state = RunState(stream_id, size, unit, span, seed, None, (part,), 0)
    plan = RunPlan(
        streams=replace(streams, units=units),
        facts=facts,
        rank=rank,
        batch_size=batch_size,
        layout=layout,
        window=window,
        seed=seed,
        epoch_samples=0,
        progress=progress,
        stop_at_end=progress.steps is not None and args.sharded_lazy_on_end == "stop",
        consumer=args.sharded_lazy_consumer or (saved.consumer if saved else consumer_name(args.output_dir)),
        take_over=args.sharded_lazy_take_over,
        checkpoint=checkpoint,
        saved=saved,
        state=state,
        grouping=lengths,
    )
    plan = replace(plan, epoch_samples=epoch_length(plan, global_batch))
    if saved is not None:
        check_fits(saved, plan.position(0, 0), str(checkpoint))
    plan = _without_skipped(plan, args.sharded_lazy_skip)
    if layout == "strided":
        plan = goes_on(plan, part, global_batch, megatron)
    elif saved is not None and not megatron:
        _check_counted(plan, saved, global_batch // plan.micro_samples)
    if not plan.epoch_samples:
        less = f"fewer than one micro batch of {batch_size} for {each_of(rank.dp_size)}: nothing can be trained"
        why = f"the stream has ended with {facts.samples} samples, {less}"
        raise too_short(streams.where, facts.samples, why)
    left_over = 0 if plan.total is None else plan.total - plan.epoch_samples
    if progress.steps is None and not plan.one_pass and not plan.skipped and left_over > 0:
        fewer = f"fewer than the {rank.dp_size} * {batch_size} of a micro batch on all ranks"
        notice(f"{plan.total} samples; {left_over} of them are left over in each epoch, {fewer}")
    return plan


def progress_of(args: Any, live: bool) -> Progress:
    """Returns whether steps or epochs decide how long the run is, as ms-swift would, but by steps on a live stream."""
    megatron, epochs = is_megatron(args), args.num_train_epochs
    option = "train_iters" if megatron else "max_steps"
    steps = getattr(args, option)
    if not steps or steps < 0:
        steps = None
    if live:
        if steps is None:
            ends = "If the stream ends earlier, training stops with it, unless --sharded_lazy_on_end repeat is given"
            why = "the stream is still being produced, so an epoch has no length yet"
            raise refused(option, f"{why}: say with --{option} N how many steps to train at the most. {ends}")
        for name in ("save_strategy", "eval_strategy"):
            if str(getattr(args, name, "")).rsplit(".", 1)[-1].lower() == "epoch":
                why = "needs an end of the epoch, and the stream is still being produced"
                raise refused(name, f"--{name} epoch {why}: use --{name} steps")
        return Progress(steps, None)
    if megatron and epochs is None and steps is None:
        raise refused(option, "say how long to train, with --num_train_epochs N or --train_iters N")
    # ms-swift: Megatron's epochs count before its iterations, in the Hugging Face trainer steps count before epochs.
    by_epochs = epochs is not None if megatron else steps is None
    return Progress(None, epochs) if by_epochs else Progress(steps, None)


def _check_distance(distance: int, where: str, total: int | None, trained: int | None, ranks: int) -> None:
    """Refuses a distance that a run which begins anew, and trains so many samples at the most, cannot have."""
    most = total if total is not None else trained
    if most is None or distance <= (largest := largest_distance(most // ranks)):
        return
    each = f"{most // ranks} for {each_of(ranks)}"
    why = f"{where} is still being produced, and this run trains {most} samples at the most, {each}"
    if total is not None:
        why = f"{where} has ended with {total} samples, {each}"
    way_out = f"give {largest} at the most" if largest else "leave it out"
    together = f"all of them shuffled together are {largest} apart on average"
    raise refused(_DISTANCE, f"--{_DISTANCE} {distance}: {why}; {together}: {way_out}")


def _window_of_distance(distance: int, samples_per_chunk: int) -> int:
    """Returns the window in chunks: a function of these two alone, so that a run that is resumed has it again."""
    window = window_for_distance(distance, samples_per_chunk)
    if window * samples_per_chunk >= 2**62:
        raise refused(_DISTANCE, f"--{_DISTANCE} {distance} is more than any stream holds: give a smaller one")
    return window


def distance_told(distance: int, samples_per_chunk: int, total: int | None, ranks: int, unit: int) -> str:
    """Returns for the log what a distance comes to; `total` is None while the stream has not ended.

    >>> distance_told(10_000, 1000, None, 8, 1000)
    '--sharded_lazy_shuffle_distance 10000: each rank shuffles windows of 30 chunks; training begins with 240 chunks'
    >>> distance_told(1000, 1000, 100_000, 8, 1000)
    '--sharded_lazy_shuffle_distance 1000: each rank shuffles windows of 3 chunks; neighbours are 967 apart on average'
    """
    window = _window_of_distance(distance, samples_per_chunk)
    positions = window_positions(window, samples_per_chunk, unit)
    if total is None:
        then = f"training begins with {-(-ranks * positions // samples_per_chunk)} chunks"
    else:
        # The last window is as short as what is left, so in this stream it may be less than was asked for.
        then = f"neighbours are {expected_neighbours(ranks, unit, positions, total // ranks):.0f} apart on average"
    return f"--{_DISTANCE} {distance}: each rank shuffles windows of {window} chunks; {then}"


def _without_skipped(plan: RunPlan, skip: str | None) -> RunPlan:
    """Returns the plan with the state from which the run goes on, less what this start is told not to train."""
    saved, state = plan.saved, plan.state
    if saved is not None and saved.state is not None:
        state = saved.state
    try:
        if plan.total is not None:
            course_of(state).epoch(plan.total)
    except ValueError as cause:
        why = f"it stands at sample {state.consumed}, the stream has ended with {plan.total}: was it cut?"
        raise not_resumed(plan.checkpoint, why, f"at least {state.consumed} samples", plan.total) from cause
    done = () if saved is None else saved.skipped
    new = [one for one in parse_skips(skip) if str(one) not in done] if skip is not None else []

    def refuse(why: str) -> SettingsRefused:
        return refused("sharded_lazy_skip", f"--sharded_lazy_skip {skip!r}: {why}")

    if new and plan.layout != "strided":
        raise refuse("ms-swift's own shuffle over the whole data set draws every sample: leave out --data_sharding")
    if saved is None and any(one.kind == "steps" for one in new):
        raise refuse("steps are those of a run that has a checkpoint, and this one begins anew: name samples or chunks")
    try:
        state = without(state, new, plan.total, plan.facts.samples)
    except ValueError as cause:
        raise refuse(str(cause)) from cause
    return replace(plan, state=state, skipped=(*done, *map(str, new)))


def _check_counted(plan: RunPlan, saved: Position, accumulation: int) -> None:
    """Refuses steps of another size in an order of ms-swift's own: by these its trainer counts batches to skip."""
    counted = plan.counted(saved.step, accumulation)
    if counted != saved.consumed:
        trained = f"{saved.consumed} samples were trained in {saved.step} steps, and the trainer would count {counted}"
        why = f"{trained} with --gradient_accumulation_steps {accumulation}: give the number it had"
        raise not_resumed(plan.checkpoint, why, saved.consumed, counted)


def batch_sizes(args: Any, dp_size: int) -> tuple[int, int]:
    """Returns the samples of one rank in a micro batch, and those of all ranks in a step."""
    if is_megatron(args):
        return args.micro_batch_size, args.global_batch_size
    # ms-swift chooses the accumulation where none is given, and leaves it in the trainer's own arguments alone.
    trainer = args.training_args
    batch_size = trainer.per_device_train_batch_size * max(1, trainer.n_gpu)
    return batch_size, batch_size * trainer.gradient_accumulation_steps * dp_size


def resume_checkpoint(args: Any) -> str | None:
    """Returns the folder that holds the checkpoint which ms-swift will go on from, None if it starts anew."""
    if not is_megatron(args):
        weights_only = getattr(args, "resume_only_model", False) and getattr(args, "ignore_data_skip", False)
        if weights_only or not args.resume_from_checkpoint:
            return None
        check_whole(args.resume_from_checkpoint, "resume_from_checkpoint")
        return str(args.resume_from_checkpoint)
    # In the order in which a later one overrides what ms-swift has loaded from an earlier one.
    for option in ("mcore_adapter", "mcore_model", "adapters", "model") if not args.finetune else ():
        given = getattr(args, option)
        folder = given[0] if option == "adapters" and given else given
        if folder:
            check_whole(str(folder), option)
            if os.path.exists(os.path.join(folder, TRACKER)):
                return str(folder)
    return None


def order_of(args: Any, saved: Position | None, facts: Facts) -> tuple[str, int]:
    """Returns layout and window: what was begun goes on; else by the arguments."""
    grouped, live = bool(getattr(args, "group_by_length", False)), not facts.ended
    if saved is not None and (saved.layout == GROUPED) != grouped:
        was, way_out = ("without", "leave it out") if grouped else ("with", "keep it")
        why = f"the checkpoint was trained {was} --group_by_length true, and the order would be another"
        anew = "start on the stream anew from the weights alone"
        raise ResumeRefused(f"{why}: {way_out}, or {anew}", expected=saved.layout)
    if grouped:
        return GROUPED, 0
    asked, distance = args.sharded_lazy_shuffle_window, args.sharded_lazy_shuffle_distance
    if distance is not None:
        asked = _window_of_distance(distance, facts.samples_per_chunk)
    shuffle = bool(getattr(args, "train_dataloader_shuffle", True))
    default = 0 if facts.dealt or not shuffle else LIVE_WINDOW if live else ENDED_WINDOW
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
            out = "leave out --sharded_lazy_shuffle_window and --sharded_lazy_shuffle_distance"
            raise ResumeRefused(f"{why}: keep {keep}, and {out}", expected=keep)
        if blocks and saved.layout != "block":
            notice("--data_sharding true is put aside: the checkpoint was trained in the order of the stream")
        return saved.layout, saved.window if asked is None and shuffle == begun else window
    if blocks and live:
        own = f"each rank reads its own chunks, shuffled in windows of {window}"
        notice(f"--data_sharding true is put aside, which would wait for the last chunk of the stream: {own}")
    return ("block", 0) if blocks and not live else ("strided", window)


def _units(
    args: Any, streams: Streams, part: Part, trained: int | None, order: tuple[str, int], saved: Position | None
) -> tuple[int, ...]:
    """Returns how many samples of each stream a rank is dealt in a row, of `trained` where steps decide."""
    asked, sizes = parse_unit(args.sharded_lazy_unit), [facts.samples_per_chunk for facts in streams.facts]
    if order[0] != "strided":
        if asked not in (None, "auto", "chunk"):
            notice(f"--sharded_lazy_unit {asked} is put aside: ms-swift shuffles each rank's chunks as a whole")
        return tuple(sizes)
    units = []
    for name, facts, size in zip(streams.names, streams.facts, sizes, strict=True):
        begun = state_of(saved, name) if asked in (None, "auto") else None
        unit = named_unit("chunk" if asked is None else asked, size, part.batch_size)
        units.append(begun.unit if begun is not None else unit or _auto_unit(facts, part, trained, order[1]))
    return tuple(units)


def _auto_unit(facts: Facts, part: Part, trained: int | None, window: int) -> int:
    size = facts.samples_per_chunk
    # Of a live stream what the run would train is taken for its length, as for that of an epoch.
    limit = None if facts.ended else trained
    unit = auto_unit(part.dp, size, part.batch_size, facts.samples, facts.ended, limit) or size
    if unit != size:
        there = f"the stream has {facts.samples} samples" if facts.ended else f"the run trains {trained} samples"
        text = f"--sharded_lazy_unit auto: {there}, fewer than a chunk of {size} for {each_of(part.dp)}"
        text += f", so they are dealt in batches of {unit}"
        if window and not facts.ended:
            text += f". Windows of {window} chunks a rank, {window * part.dp} in all, must be published first"
            text += ": --sharded_lazy_shuffle_window 0 starts with what is there"
        notice(text)
    return unit
