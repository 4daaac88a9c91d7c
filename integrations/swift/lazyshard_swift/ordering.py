"""In which order a run reads its stream: layout, window, and how many samples a rank is dealt in a row."""

from __future__ import annotations

from typing import Any

from lazyshard.format.state import PartState, RunState
from lazyshard.plan import auto_unit, named_unit
from lazyshard_swift import settings
from lazyshard_swift.errors import ResumeRefused, each_of
from lazyshard_swift.parallel import Facts, notice
from lazyshard_swift.position import BLENDED, GROUPED, Position
from lazyshard_swift.settings import groups_by_length, parse_unit, window_of_distance


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


def unit_of(
    args: Any,
    facts: Facts,
    part: PartState,
    progress: settings.Progress,
    order: tuple[str, int],
    saved: Position | None,
) -> int:
    """Returns how many samples a rank is dealt in a row."""
    layout, window = order
    if facts.stream == BLENDED:
        # Of positions of the blend, whose streams have units of their own.
        return facts.samples_per_chunk
    if layout == GROUPED:
        return facts.samples_per_chunk
    if layout == "block":
        asked = parse_unit(args.sharded_lazy_unit)
        if asked not in (None, "auto", "chunk"):
            notice(
                f"--sharded_lazy_unit {asked} is put aside: with --data_sharding true ms-swift shuffles each rank's "
                f"chunks as a whole"
            )
        return facts.samples_per_chunk
    return stream_unit(args, facts, part, progress, window, None if saved is None else saved.state)


def stream_unit(
    args: Any, facts: Facts, part: PartState, progress: settings.Progress, window: int, begun: RunState | None
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
