"""From arguments, stream and checkpoint to the plan of a run: the same on all ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from lazyshard.data.rank import Rank
from lazyshard.plan import Deal, Plan
from lazyshard_swift import settings
from lazyshard_swift.errors import ResumeRefused, StreamTooShort
from lazyshard_swift.logs import notice
from lazyshard_swift.parallel import FOREIGN, Facts
from lazyshard_swift.position import Position, load, stamp
from lazyshard_swift.settings import Progress


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What was decided for a run; the same on every rank but for `rank`.

    Attributes:
        directory: of the stream.
        facts: what all ranks know of it.
        rank: whose samples this process reads.
        batch_size: samples of a rank in a micro batch.
        layout: "strided", or "block" under the stock sampler's own shuffle.
        window: chunks of a rank that are shuffled together.
        seed: of the shuffle.
        epoch_samples: the length of an epoch as ms-swift is told it.
        progress: whether steps or epochs decide how long the run is.
        stop_at_end: whether the run stops where the stream ends.
        consumer: name of the cursor.
        checkpoint: the checkpoint to go on from, None for none.
        saved: the position in that checkpoint, None for none.
    """

    directory: str
    facts: Facts
    rank: Rank
    batch_size: int
    layout: str
    window: int
    seed: int
    epoch_samples: int
    progress: Progress
    stop_at_end: bool
    consumer: str
    checkpoint: str | None
    saved: Position | None

    @property
    def stream_id(self) -> str | None:
        """The id in the stream's manifest, None where it has none."""
        return None if self.facts.stream.startswith(FOREIGN) else self.facts.stream

    @property
    def plan(self) -> Plan:
        """The plan that the data set draws by."""
        size = self.facts.samples_per_chunk
        return Plan(
            Deal(self.rank.dp_size, size), batch_size=self.batch_size, window=self.window * size, seed=self.seed
        )

    def position(self, consumed: int, step: int) -> Position:
        """Returns where the run stands after so many samples and steps."""
        return Position(
            stream=self.facts.stream,
            directory=self.directory,
            samples_per_chunk=self.facts.samples_per_chunk,
            consumed=consumed,
            step=step,
            dp_size=self.rank.dp_size,
            batch_size=self.batch_size,
            layout=self.layout,
            window=self.window,
            seed=self.seed,
            epoch_samples=self.epoch_samples,
            by_steps=self.progress.steps is not None,
            consumer=self.consumer,
            saved_at=stamp(),
        )


def decide(args: Any, directory: str, facts: Facts, rank: Rank) -> RunPlan:
    """Decides how a stream is read.

    Args:
        args: ms-swift's arguments. Epochs are taken out of Megatron's where steps decide.
        directory: of the stream.
        facts: what all ranks know of it.
        rank: of this process.

    Raises:
        SettingsRefused: the arguments do not fit the stream.
        PositionInvalid: the checkpoint's position cannot be read.
        ResumeRefused: the checkpoint was trained in an order that these arguments do not give.
        StreamTooShort: the stream has ended with less than a micro batch a rank.
    """
    checkpoint = resume_checkpoint(args)
    saved = None if checkpoint is None else load(checkpoint)
    live = not facts.ended
    progress = settings.progress(args, live)
    if progress.steps is not None and settings.is_megatron(args) and args.num_train_epochs is not None:
        notice(
            f"the stream is still being produced, so --num_train_epochs {args.num_train_epochs} is put aside and "
            f"--train_iters {progress.steps} decides"
        )
        args.num_train_epochs = None
    layout, window = _order(args, live, saved)
    batch_size, global_batch = batch_sizes(args, rank.dp_size)
    size = facts.samples_per_chunk
    plan = Plan(Deal(rank.dp_size, size), batch_size=batch_size, window=window * size)
    if saved is not None and saved.by_steps and not settings.is_megatron(args) and progress.steps is not None:
        # The Hugging Face trainer counts the batches to skip from the start of an epoch of this length.
        epoch_samples = saved.epoch_samples
    elif live:
        assert progress.steps is not None
        epoch_samples = progress.steps * global_batch
    else:
        epoch_samples = plan.epoch_length(facts.samples) * rank.dp_size
    if facts.ended and progress.steps is None and epoch_samples < facts.samples:
        notice(
            f"{facts.samples} samples; {facts.samples - epoch_samples} of them are left over in each epoch, fewer than "
            f"the {rank.dp_size} * {batch_size} of a micro batch on all ranks"
        )
    if not epoch_samples:
        raise StreamTooShort(
            f"{directory}: the stream has ended with {facts.samples} samples, fewer than one micro batch of "
            f"{batch_size} for each of {rank.dp_size} data-parallel ranks: nothing can be trained",
            directory=directory,
            samples=facts.samples,
        )
    consumer = args.sharded_lazy_consumer or (saved.consumer if saved else settings.consumer_name(args.output_dir))
    return RunPlan(
        directory=directory,
        facts=facts,
        rank=rank,
        batch_size=batch_size,
        layout=layout,
        window=window,
        seed=(args.data_seed or 0) % 2**63,
        epoch_samples=epoch_samples,
        progress=progress,
        stop_at_end=progress.steps is not None and args.sharded_lazy_on_end == "stop",
        consumer=consumer,
        checkpoint=checkpoint,
        saved=saved,
    )


def _order(args: Any, live: bool, saved: Position | None) -> tuple[str, int]:
    """Returns layout and window: what was begun goes on; else by the arguments."""
    asked = args.sharded_lazy_shuffle_window
    shuffle = bool(getattr(args, "train_dataloader_shuffle", True))
    window = asked if asked is not None else settings.default_window(shuffle, live)
    blocks = settings.is_megatron(args) and bool(args.data_sharding) and shuffle and asked is None
    if saved is not None:
        if saved.layout == "block" and not blocks:
            raise ResumeRefused(
                "the checkpoint was trained in the shuffle of ms-swift's own sampler over the whole data set: keep "
                "--data_sharding true and --train_dataloader_shuffle true, and leave out --sharded_lazy_shuffle_window",
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


def batch_sizes(args: Any, dp_size: int) -> tuple[int, int]:
    """Returns the samples of one rank in a micro batch, and those of all ranks in a step."""
    if settings.is_megatron(args):
        return args.micro_batch_size, args.global_batch_size
    # ms-swift chooses the accumulation where none is given, and leaves it in the trainer's own arguments alone.
    trainer = args.training_args
    batch_size = trainer.per_device_train_batch_size * max(1, trainer.n_gpu)
    return batch_size, batch_size * trainer.gradient_accumulation_steps * dp_size


def resume_checkpoint(args: Any) -> str | None:
    """Returns the folder that holds the checkpoint which ms-swift will go on from, None if it starts anew."""
    if not settings.is_megatron(args):
        weights_only = getattr(args, "resume_only_model", False) and getattr(args, "ignore_data_skip", False)
        return None if weights_only else (args.resume_from_checkpoint or None)
    if args.finetune:
        return None
    adapters = args.adapters[0] if args.adapters else None
    # In the order in which a later one overrides what ms-swift has loaded from an earlier one.
    for folder in (args.mcore_adapter, args.mcore_model, adapters, args.model):
        if folder and os.path.exists(os.path.join(folder, "latest_checkpointed_iteration.txt")):
            return str(folder)
    return None
