"""From arguments, stream and checkpoint to the plan of a run, its order included: the same on all ranks.

The order is the layout, the window, and how many samples a rank is dealt in a row.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from lazyshard.data.rank import Rank
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.plan.deal import auto_unit, named_unit, window_positions
from lazyshard.stream.run_state import course_of
from lazyshard_swift import settings
from lazyshard_swift.checkpoints import TRACKER, check_whole, load_position
from lazyshard_swift.errors import ResumeRefused, SettingsRefused, StreamTooShort, each_of
from lazyshard_swift.parallel import Facts, Streams, notice, stream_id_of
from lazyshard_swift.position import GROUPED, Position, check_fits
from lazyshard_swift.run_plan import (
    RunPlan,
    consumed_after,
    end_of_epochs,
    goes_straight_on,
    gone_on,
    state_of,
    without,
)
from lazyshard_swift.settings import (
    check_distance_reach,
    distance_told,
    groups_by_length,
    parse_skips,
    parse_unit,
    window_of_distance,
)


def decide(args: Any, streams: Streams, facts: Facts, rank: Rank, lengths: str | None = None) -> RunPlan:
    """Decides how a stream or a blend is read.

    Args:
        args: ms-swift's arguments. Epochs are taken out of Megatron's where steps decide.
        streams: what is trained, without the units that are decided here.
        facts: what all ranks know of the stream, or of the positions of the blend.
        rank: of this process.
        lengths: digest of what the order of ``--group_by_length true`` follows from; None without it.

    Raises:
        SettingsRefused: the arguments do not fit the stream.
        PositionInvalid: the checkpoint's position cannot be read.
        ResumeRefused: the checkpoint was trained on another stream, or in an order that these arguments do not give.
        StreamTooShort: the stream has ended with less than a micro batch a rank.
    """
    directory, checkpoint = streams.where, resume_checkpoint(args)
    saved = None if checkpoint is None else load_position(checkpoint)
    live = not facts.ended
    progress = settings.progress(args, live)
    if progress.steps is not None and settings.is_megatron(args) and args.num_train_epochs is not None:
        notice(
            f"the stream is still being produced, so --num_train_epochs {args.num_train_epochs} is put aside and "
            f"--train_iters {progress.steps} decides"
        )
        args.num_train_epochs = None
    size, seed = facts.samples_per_chunk, (args.data_seed or 0) % 2**63
    total = facts.samples if facts.ended else None
    layout, window = order_of(args, live, saved, facts)
    batch_size, global_batch = batch_sizes(args, rank.dp_size)
    if saved is None and args.sharded_lazy_shuffle_distance is not None:
        most = None if progress.steps is None else progress.steps * global_batch
        check_distance_reach(args.sharded_lazy_shuffle_distance, directory, total, most, rank.dp_size)
    part = Part(rank.dp_size, batch_size, draws_per_step=global_batch // rank.dp_size)
    units = _units(args, streams, part, progress, (layout, window), saved)
    # The positions of a blend are dealt one by one; its streams have units of their own.
    unit = facts.samples_per_chunk if streams.blended else units[0]
    if saved is None and args.sharded_lazy_shuffle_distance is not None:
        notice(distance_told(args.sharded_lazy_shuffle_distance, size, total, rank.dp_size, unit))
    span = window_positions(window, size, unit)
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
        consumer=args.sharded_lazy_consumer or (saved.consumer if saved else settings.consumer_name(args.output_dir)),
        take_over=args.sharded_lazy_take_over,
        checkpoint=checkpoint,
        saved=saved,
        state=RunState(stream_id_of(facts.stream), size, unit, span, seed, None, (part,), 0),
        grouping=lengths,
    )
    plan = replace(plan, epoch_samples=_epoch_samples(plan, plan.state, global_batch))
    if saved is not None:
        assert checkpoint is not None
        check_fits(saved, plan.position(0, 0), checkpoint)
    plan = _without_skipped(plan, args)
    if layout == "strided":
        plan = _gone_on(plan, part, global_batch, settings.is_megatron(args))
    elif saved is not None and not settings.is_megatron(args):
        _check_counted(plan, saved, global_batch)
    if not plan.epoch_samples:
        raise StreamTooShort(
            f"{directory}: the stream has ended with {facts.samples} samples, fewer than one micro batch of "
            f"{batch_size} for {each_of(rank.dp_size)}: nothing can be trained",
            directory=directory,
            samples=facts.samples,
        )
    _tell_leftover(plan)
    return plan


def _without_skipped(plan: RunPlan, args: Any) -> RunPlan:
    """Returns the plan with the state from which the run goes on, less what this start is told not to train.

    Raises:
        ResumeRefused: the stream has fewer samples than were trained.
        SettingsRefused: what is to be skipped cannot be.
    """
    saved, state = plan.saved, plan.state
    if saved is not None and saved.state is not None:
        state = saved.state
    try:
        if plan.total is not None:
            course_of(state).epoch(plan.total)
    except ValueError as cause:
        assert saved is not None
        raise ResumeRefused(
            f"{plan.checkpoint}: it stands at sample {saved.consumed}, the stream has ended with "
            f"{plan.facts.samples}: was it cut?",
            checkpoint=plan.checkpoint,
            expected=f"at least {saved.consumed} samples",
            actual=str(plan.facts.samples),
        ) from cause
    done = () if saved is None else saved.skipped
    skips = [] if args.sharded_lazy_skip is None else list(parse_skips(args.sharded_lazy_skip))
    new = [one for one in skips if str(one) not in done]

    def refuse(why: str) -> SettingsRefused:
        return SettingsRefused(f"--sharded_lazy_skip {args.sharded_lazy_skip!r}: {why}", argument="sharded_lazy_skip")

    if new and plan.layout != "strided":
        raise refuse(
            "ms-swift's own shuffle over the whole data set draws every sample: leave out --data_sharding true"
        )
    if saved is None and any(one.kind == "steps" for one in new):
        raise refuse(
            "steps are those of a run that has a checkpoint, and this one begins anew: name samples or chunks, or go "
            "on from a checkpoint"
        )
    try:
        state = without(state, new, plan.total, plan.facts.samples)
    except ValueError as cause:
        raise refuse(str(cause)) from cause
    return replace(plan, state=state, skipped=(*done, *map(str, new)))


def _gone_on(plan: RunPlan, part: Part, global_batch: int, megatron: bool) -> RunPlan:
    """Returns the plan with the course as it goes on with the ranks of this start, and what the trainer is told."""
    saved, state = plan.saved, plan.state
    micro, accumulation = plan.batch_size * plan.rank.dp_size, global_batch // (plan.batch_size * plan.rank.dp_size)
    if saved is None:
        plan = replace(plan, epoch_samples=_epoch_samples(plan, state, global_batch))
        return plan if megatron else _counted_unevenly(plan, accumulation)
    epoch_samples = _epoch_samples(plan, gone_on(state, saved, part, False), global_batch)
    if megatron:
        straight = goes_straight_on(state, saved, part, saved.step * global_batch)
        return replace(plan, state=gone_on(state, saved, part, straight), epoch_samples=epoch_samples)
    if saved.by_steps and plan.progress.steps is not None:
        # The trainer counts the batches to skip from the start of an epoch of this length.
        epoch_samples = saved.epoch_samples
    counted = consumed_after(saved.step, epoch_samples, micro, accumulation) if epoch_samples >= micro else -1
    straight = goes_straight_on(state, saved, part, counted)
    plan = replace(plan, state=gone_on(state, saved, part, straight), epoch_samples=epoch_samples)
    return _counted_unevenly(plan, accumulation) if straight else _in_one_pass(plan, micro, accumulation)


def _in_one_pass(plan: RunPlan, micro: int, accumulation: int) -> RunPlan:
    """Returns the plan of a run whose trainer is given all that is left as one epoch, behind the steps it trained."""
    saved, progress = plan.saved, plan.progress
    assert saved is not None
    if progress.steps is not None:
        batches = max(progress.steps, saved.step) * accumulation
    else:
        assert plan.total is not None and progress.epochs is not None
        left = end_of_epochs(plan.state, plan.total, progress.epochs) - plan.draws
        batches = saved.step * accumulation + max(0, left) // plan.batch_size
    offset = plan.rank.dp_size * plan.draws - saved.step * accumulation * micro
    return replace(plan, epoch_samples=batches * micro, index_offset=offset, one_pass=True)


def _check_counted(plan: RunPlan, saved: Position, global_batch: int) -> None:
    """Refuses steps of another size in an order of ms-swift's own, whose batches to skip its trainer counts by steps.

    Raises:
        ResumeRefused: with the way out.
    """
    micro = plan.batch_size * plan.rank.dp_size
    counted = consumed_after(saved.step, plan.epoch_samples, micro, global_batch // micro)
    if counted != saved.consumed:
        raise ResumeRefused(
            f"{plan.checkpoint}: {saved.consumed} samples were trained in {saved.step} steps, and with "
            f"--gradient_accumulation_steps {global_batch // micro} the trainer would take them for {counted}: give "
            f"the number it had. Runs that are to be resumed with another one are started without --group_by_length",
            checkpoint=plan.checkpoint,
            expected=str(saved.consumed),
            actual=str(counted),
        )


def _counted_unevenly(plan: RunPlan, accumulation: int) -> RunPlan:
    """Returns the plan; where the last step of each epoch is a smaller one, its state does not say how large one is."""
    batches = plan.epoch_samples // (plan.batch_size * plan.rank.dp_size)
    if plan.stop_at_end or (plan.progress.epochs or 2) <= 1 or not batches % accumulation:
        return plan
    part = replace(plan.state.parts[-1], draws_per_step=0)
    return replace(plan, state=replace(plan.state, parts=(*plan.state.parts[:-1], part)))


def _epoch_samples(plan: RunPlan, state: RunState, global_batch: int) -> int:
    """Returns the length of an epoch, over all ranks: of the stream if it has ended, else of the run."""
    if plan.total is not None:
        return course_of(state).full_epoch_length(plan.total) * plan.rank.dp_size
    assert plan.progress.steps is not None
    return plan.progress.steps * global_batch


def _tell_leftover(plan: RunPlan) -> None:
    if plan.total is None or plan.progress.steps is not None or plan.one_pass or plan.skipped:
        return
    if plan.epoch_samples < plan.total:
        notice(
            f"{plan.total} samples; {plan.total - plan.epoch_samples} of them are left over in each epoch, fewer than "
            f"the {plan.rank.dp_size} * {plan.batch_size} of a micro batch on all ranks"
        )


def batch_sizes(args: Any, dp_size: int) -> tuple[int, int]:
    """Returns the samples of one rank in a micro batch, and those of all ranks in a step."""
    if settings.is_megatron(args):
        return args.micro_batch_size, args.global_batch_size
    # ms-swift chooses the accumulation where none is given, and leaves it in the trainer's own arguments alone.
    trainer = args.training_args
    batch_size = trainer.per_device_train_batch_size * max(1, trainer.n_gpu)
    return batch_size, batch_size * trainer.gradient_accumulation_steps * dp_size


def resume_checkpoint(args: Any) -> str | None:
    """Returns the folder that holds the checkpoint which ms-swift will go on from, None if it starts anew.

    Raises:
        ResumeRefused: its save was interrupted.
        PositionInvalid: its position cannot be read.
    """
    if not settings.is_megatron(args):
        weights_only = getattr(args, "resume_only_model", False) and getattr(args, "ignore_data_skip", False)
        if weights_only or not args.resume_from_checkpoint:
            return None
        check_whole(args.resume_from_checkpoint, "resume_from_checkpoint")
        return str(args.resume_from_checkpoint)
    if args.finetune:
        return None
    # In the order in which a later one overrides what ms-swift has loaded from an earlier one.
    for option in ("mcore_adapter", "mcore_model", "adapters", "model"):
        given = getattr(args, option)
        folder = given[0] if option == "adapters" and given else given
        if not folder:
            continue
        check_whole(str(folder), option)
        if os.path.exists(os.path.join(folder, TRACKER)):
            return str(folder)
    return None


def order_of(args: Any, live: bool, saved: Position | None, facts: Facts) -> tuple[str, int]:
    """Returns layout and window: what was begun goes on; else by the arguments."""
    if saved is not None and (saved.layout == GROUPED) != groups_by_length(args):
        was, way_out = ("with", "keep it") if saved.layout == GROUPED else ("without", "leave it out")
        raise ResumeRefused(
            f"the checkpoint was trained {was} --group_by_length true, and the order would be another: {way_out}, or "
            f"start on the stream anew from the weights alone",
            expected=saved.layout,
        )
    if groups_by_length(args):
        return GROUPED, 0
    asked, distance = args.sharded_lazy_shuffle_window, args.sharded_lazy_shuffle_distance
    if distance is not None:
        asked = window_of_distance(distance, facts.samples_per_chunk)
    shuffle = bool(getattr(args, "train_dataloader_shuffle", True))
    window = asked if asked is not None else settings.default_window(shuffle and not facts.dealt, live)
    blocks = settings.is_megatron(args) and bool(args.data_sharding) and shuffle and asked is None
    begun = saved is not None and bool(saved.window or saved.layout == "block")
    if facts.dealt and asked is None and shuffle and not begun:
        notice(
            "the rows of the stream were dealt by cost, so that all ranks have as much to do in a step, and each rank "
            "reads its chunks in order: they are not shuffled once more"
        )
        blocks = False
    if blocks and len(args.dataset) > 1:
        notice("--data_sharding true is put aside: each rank reads its own chunks of all streams, shuffled in windows")
        blocks = False
    if saved is not None:
        if saved.layout == "block" and not blocks:
            raise ResumeRefused(
                "the checkpoint was trained in the shuffle of ms-swift's own sampler over the whole data set: keep "
                "--data_sharding true and --train_dataloader_shuffle true, and leave out --sharded_lazy_shuffle_window "
                "and --sharded_lazy_shuffle_distance",
                expected="--data_sharding true --train_dataloader_shuffle true",
            )
        if blocks and saved.layout != "block":
            notice("--data_sharding true is put aside: the checkpoint was trained in the order of the stream")
        if asked is None and shuffle == bool(saved.window or saved.layout == "block"):
            window = saved.window
        return saved.layout, window
    if blocks and live:
        notice(
            "--data_sharding true is put aside: ms-swift's shuffle over the whole data set would wait for the last "
            "chunk of a stream that is still being produced. Each rank reads its own chunks nevertheless, shuffled in "
            f"windows of {window} chunks"
        )
    return ("block", 0) if blocks and not live else ("strided", window)


def _units(
    args: Any,
    streams: Streams,
    part: Part,
    progress: settings.Progress,
    order: tuple[str, int],
    saved: Position | None,
) -> tuple[int, ...]:
    """Returns how many samples of each stream a rank is dealt in a row."""
    layout, window = order
    if layout == "strided":
        return tuple(
            stream_unit(args, facts, part, progress, window, state_of(saved, name))
            for name, facts in zip(streams.names, streams.facts, strict=True)
        )
    asked = parse_unit(args.sharded_lazy_unit)
    if asked not in (None, "auto", "chunk"):
        notice(
            f"--sharded_lazy_unit {asked} is put aside: with --data_sharding true ms-swift shuffles each rank's "
            f"chunks as a whole"
        )
    return tuple(facts.samples_per_chunk for facts in streams.facts)


def stream_unit(
    args: Any, facts: Facts, part: Part, progress: settings.Progress, window: int, begun: RunState | None
) -> int:
    """Returns how many samples of a stream a rank is dealt in a row: what was begun goes on; else by the arguments.

    Args:
        args: ms-swift's arguments.
        facts: what all ranks know of the stream, so that "auto" is the same on all of them.
        part: ranks, micro batch and steps.
        progress: how long the run is.
        window: chunks of a rank that are shuffled together.
        begun: where the stream stands, None where the run begins with it.
    """
    asked, size = parse_unit(args.sharded_lazy_unit), facts.samples_per_chunk
    if begun is not None and asked in (None, "auto"):
        return begun.unit
    unit = named_unit("chunk" if asked is None else asked, size, part.batch_size)
    if unit is not None:
        return unit
    # Of a live stream what the run would train is taken for its length, as for that of an epoch.
    planned = None if progress.steps is None else progress.steps * part.draws_per_step * part.dp
    limit = None if facts.ended else planned
    unit = auto_unit(part.dp, size, part.batch_size, facts.samples, facts.ended, limit) or size
    if unit != size:
        there = f"the stream has {facts.samples} samples" if facts.ended else f"the run trains {planned} samples"
        text = (
            f"--sharded_lazy_unit auto: {there}, fewer than a chunk of {size} for {each_of(part.dp)}, so they "
            f"are dealt in batches of {unit}"
        )
        if window and not facts.ended:
            text += (
                f". They are shuffled in windows of {window} chunks a rank, {window * part.dp} in all, which must be "
                f"published first unless the stream ends: --sharded_lazy_shuffle_window 0 starts with what is there"
            )
        notice(text)
    return unit
