"""The Hugging Face trainer of `swift sft`: its loader with our sampler and a gate, positions in the checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lazyshard_swift.ms_swift import is_stream, within, wrap

# Anything else is imported where it is needed: a run without the flag loads none of it.
if TYPE_CHECKING:
    from lazyshard_swift.stream import TrainStream


def extend(module: ModuleType) -> None:
    """Wraps the making of the training loader and the saving of checkpoints."""
    for name in ("BatchSamplerShard", "DataLoaderShard"):
        if not isinstance(getattr(module, name, None), type):
            raise AttributeError(f"{module.__name__} has no {name}")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_train_dataloader(self: Any, *rest: Any, **options: Any) -> Any:
            stream = self.train_dataset
            if not is_stream(stream):
                return original(self, *rest, **options)
            with _own_classes(self, stream, module):
                made = original(self, *rest, **options)
            # On a resume ms-swift before 4.6 leaves a new loader in epoch 0 (modelscope/ms-swift issue 10050).
            made.set_epoch(_counted(self, stream) // stream.plan.epoch_samples)
            return made

        return get_train_dataloader

    wrap(module.DataLoaderMixin, {"get_train_dataloader": make})
    wrap(module.SwiftMixin, {"_save_checkpoint": within(saving)})


@contextlib.contextmanager
def _own_classes(trainer: Any, stream: TrainStream, module: ModuleType) -> Iterator[None]:
    """Within it ms-swift makes the loader of a stream, of classes of ours under its own names."""
    _attach(trainer, stream)
    plan, accumulation = stream.plan, trainer.args.gradient_accumulation_steps
    if plan.one_pass:
        # The trainer has planned its steps by epochs that are all alike.
        trainer.args.max_steps = -(-plan.epoch_samples // (plan.micro_samples * accumulation))

    def saves() -> bool:
        return trainer.args.save_strategy != "no" and bool(trainer._lazyshard.is_due(trainer.state.global_step))

    before = {"BatchSamplerShard": module.BatchSamplerShard, "DataLoaderShard": module.DataLoaderShard}
    vars(module).update(
        BatchSamplerShard=batch_sampler(module.BatchSamplerShard, strided=plan.layout == "strided"),
        DataLoaderShard=gated_loader(module.DataLoaderShard, stream, accumulation, saves),
    )
    try:
        yield
    finally:
        vars(module).update(before)


def _attach(trainer: Any, stream: TrainStream) -> None:
    """Gives a trainer what belongs to its stream, once: the loader is made again on a resume."""
    if hasattr(trainer, "_lazyshard"):
        return
    from transformers import TrainerCallback

    from lazyshard_swift.checkpoints import Checkpoints

    class StepsCallback(TrainerCallback):  # type: ignore[misc]
        """Checks where a resumed run goes on, and sees to the end of one whose stream has ended."""

        stopped = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            stream.check_resume(_consumed(trainer, stream), state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            consumed = _consumed(trainer, stream)
            stream.tell_progress(consumed)
            # The trainer's own epoch is the rest of the run; its end is the trainer's affair.
            inside = stream.plan.one_pass and state.global_step < state.max_steps
            if inside and stream.plan.ends_epoch(consumed, _step_samples(trainer, stream)):
                control.should_save = control.should_save or _goes_by_epochs(args.save_strategy)
                control.should_evaluate = control.should_evaluate or _goes_by_epochs(args.eval_strategy)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if not stream.gate.stopped:
                return
            self.stopped = control.should_training_stop = True
            if trainer._lazyshard.last_step != state.global_step and args.save_strategy != "no":
                control.should_save = True

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            stream.tell_cache()
            if self.stopped:
                # The checkpoint is there by now.
                kept, step, size = trainer._lazyshard, state.global_step, _step_samples(trainer, stream)
                saved = kept.folder(step) if kept.last_step == step else None
                stream.tell_stop(_consumed(trainer, stream), size, step, state.max_steps, saved)
                stream.gate.end()

    trainer._lazyshard = Checkpoints(stream.plan, trainer.args.output_dir)
    trainer.add_callback(StepsCallback())


def _counted(trainer: Any, stream: TrainStream) -> int:
    """Returns how many samples the trainer takes to have been trained, by its steps."""
    return stream.plan.counted(trainer.state.global_step, trainer.args.gradient_accumulation_steps)


def _step_samples(trainer: Any, stream: TrainStream) -> int:
    return stream.plan.micro_samples * int(trainer.args.gradient_accumulation_steps)


def _consumed(trainer: Any, stream: TrainStream) -> int:
    """Returns how many samples were trained since the run began."""
    return _counted(trainer, stream) + stream.plan.index_offset + stream.plan.consumed_before


def _goes_by_epochs(strategy: Any) -> bool:
    return str(getattr(strategy, "value", strategy)) == "epoch"


@contextlib.contextmanager
def saving(trainer: Any) -> Iterator[None]:
    """Within it ms-swift saves a checkpoint, of any run; the position in a stream is kept with it."""
    checkpoints = getattr(trainer, "_lazyshard", None)
    if checkpoints is None:
        yield
        return
    stream = trainer.train_dataset
    with checkpoints.saving(_consumed(trainer, stream), trainer.state.global_step):
        yield
    stream.tell_progress(_consumed(trainer, stream), at_once=True)


def batch_sampler(original: type[Any], *, strided: bool) -> type[Any]:
    """Returns a subclass of ms-swift's `BatchSamplerShard` that tells its epoch to the gate.

    Strided, it does not shuffle, since that would wait for the last chunk; the stream shuffles instead.
    """

    class EpochBatchSampler(original):  # type: ignore[misc]
        _epoch = 0

        def __init__(self, total_samples: int, *rest: Any, **options: Any) -> None:
            super().__init__(total_samples, *rest, **options | ({"shuffle": False} if strided else {}))
            self._epoch_samples = total_samples

        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self._epoch = epoch

        def __iter__(self) -> Iterator[list[int]]:
            first = self._epoch * self._epoch_samples if strided else 0
            for batch in super().__iter__():
                yield [first + index for index in batch] if strided else batch

    return EpochBatchSampler


def gated_loader(
    original: type[Any], stream: TrainStream, accumulation_steps: int, saves: Callable[[], bool] = lambda: False
) -> type[Any]:
    """Returns a subclass of ms-swift's `DataLoaderShard` that asks the stream's gate before each step.

    `saves` says whether a checkpoint is saved where the loader ends before its time.
    """

    class GatedLoader(original):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            sampler, skipped = self.batch_sampler, 0
            # After a resume accelerate's SkipBatchSampler is around ours.
            while not hasattr(sampler, "_epoch_samples"):
                skipped += sampler.skip_batches
                sampler = sampler.batch_sampler
            plan, count = stream.plan, len(sampler)
            start = (sampler._epoch * plan.epoch_samples + plan.index_offset) // plan.rank.dp_size
            batches: Iterator[Any] | None = None
            for number in range(skipped, count):
                if number % accumulation_steps == 0 or batches is None:
                    first, size = start + number * plan.batch_size, plan.batch_size
                    # In the last step of an epoch there may be fewer; where steps decide, that one is not trained.
                    whole = accumulation_steps - number % accumulation_steps
                    step = whole if plan.stop_at_end else min(whole, count - number)
                    if not stream.gate.allows(first, first + step * size, saves=saves()):
                        return
                if batches is None:
                    # Workers start reading here, so not before the gate has let the first step through.
                    batches = super().__iter__()
                yield next(batches)

    return GatedLoader
