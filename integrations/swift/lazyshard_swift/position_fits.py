"""Whether a run can go on exactly from the position of a checkpoint."""

from __future__ import annotations

from lazyshard_swift.errors import ResumeRefused
from lazyshard_swift.position import BLENDED, GROUPED, Position


def check_fits(position: Position, now: Position, checkpoint: str) -> None:
    """Refuses to go on where the next sample could not be exactly the next one.

    The number of ranks, the micro batch and the steps may differ, but under the stock sampler's own shuffle.

    Args:
        position: what the checkpoint says.
        now: what this run would save before its first step if it began anew.
        checkpoint: the checkpoint's folder.

    Raises:
        ResumeRefused: naming what differs, and the way out.
    """

    def refuse(what: str, way_out: str) -> ResumeRefused:
        expected, actual = getattr(position, what), getattr(now, what)
        name = what.replace("_", " ")
        return ResumeRefused(
            f"{checkpoint}: saved with {name} {expected}, this run has {name} {actual}: {way_out}",
            checkpoint=checkpoint,
            expected=str(expected),
            actual=str(actual),
        )

    if (position.blend is None) != (now.stream != BLENDED):
        one = f"the stream in {position.directory}" if position.blend is None else f"a blend of {position.directory}"
        raise ResumeRefused(
            f"{checkpoint}: it was trained on {one}, this run is on {now.directory}: give --dataset as it was, at "
            f"least two streams for a blend",
            checkpoint=checkpoint,
            expected=position.directory,
            actual=now.directory,
        )
    if position.stream != now.stream:
        raise ResumeRefused(
            f"{checkpoint}: it was trained on the stream {position.stream} (then in {position.directory}), and "
            f"{now.directory} holds the stream {now.stream}: give the directory of that stream as --dataset, or start "
            f"on this one anew from the weights alone",
            checkpoint=checkpoint,
            expected=position.stream,
            actual=now.stream,
        )
    if position.samples_per_chunk != now.samples_per_chunk:
        raise refuse("samples_per_chunk", "the same sample would be in another chunk")
    if position.seed != now.seed:
        raise refuse("seed", f"give --data_seed {position.seed}, or the order would be another")
    if position.window != now.window:
        raise refuse(
            "window",
            f"leave out --sharded_lazy_shuffle_window and --sharded_lazy_shuffle_distance, and keep "
            f"--train_dataloader_shuffle {'true' if position.window else 'false'}, or the order would be another",
        )
    if position.unit != now.unit:
        raise refuse("unit", "leave out --sharded_lazy_unit, or the order would be another")
    if position.layout != now.layout:
        raise refuse("layout", "the order would be another; keep --data_sharding as it was")
    if position.layout == "strided":
        return
    option = "--group_by_length true" if position.layout == GROUPED else "--data_sharding true"
    for what, why in (
        ("dp_size", "start with the number it had"),
        ("batch_size", "start with the micro batch that it had"),
        ("epoch_samples", "the stream must be the same length"),
    ):
        if getattr(position, what) != getattr(now, what):
            raise refuse(
                what,
                f"ms-swift's own shuffle over the whole data set ({option}) would be another; {why}. Runs that are to "
                f"be resumed with other ranks are started without {option.partition(' ')[0]}",
            )
    if position.grouping != now.grouping:
        raise ResumeRefused(
            f"{checkpoint}: its samples were grouped by other lengths than they have now, or by another version of "
            f"ms-swift, transformers or torch, so the order would be another: measure the stream as it was measured "
            f"then, or start on it anew from the weights alone",
            checkpoint=checkpoint,
            expected=position.grouping,
            actual=now.grouping,
        )
