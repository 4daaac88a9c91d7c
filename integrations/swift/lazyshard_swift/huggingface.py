"""The Hugging Face trainer of `swift sft`: its loader with our sampler and a gate, positions in the checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lazyshard_swift.hooked import within, wrap
from lazyshard_swift.pipeline import is_stream

# Anything else is imported where it is needed: a run without the flag loads none of it.
if TYPE_CHECKING:
    from lazyshard_swift.stream import TrainStream


def extend(module: ModuleType) -> None:
    """Wraps the making of the training loader and the saving of checkpoints."""
    for name in ("BatchSamplerShard", "DataLoaderShard"):
        if not isinstance(getattr(module, name, None), type):
            raise AttributeError(f"{module.__name__} has no {name}")
    wrap(module.DataLoaderMixin, {"get_train_dataloader": _get_train_dataloader(module)})
    wrap(module.SwiftMixin, {"_save_checkpoint": within(saving)})


def _get_train_dataloader(module: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_train_dataloader(self: Any, *rest: Any, **options: Any) -> Any:
            stream = self.train_dataset
            if not is_stream(stream):
                return original(self, *rest, **options)
            sampler, loader = loader_classes(self, stream, module.BatchSamplerShard, module.DataLoaderShard)
            with _replaced(module, BatchSamplerShard=sampler, DataLoaderShard=loader):
                made = original(self, *rest, **options)
            begin_epoch(self, stream, made)
            return made

        return get_train_dataloader

    return make


def loader_classes(trainer: Any, stream: Any, sampler: type[Any], loader: type[Any]) -> tuple[type[Any], type[Any]]:
    """Returns the classes of which ms-swift is to make the loader of a stream.

    Args:
        trainer: ms-swift's.
        stream: the training data.
        sampler: ms-swift's `BatchSamplerShard`.
        loader: ms-swift's `DataLoaderShard`.
    """
    _attach(trainer, stream)
    if stream.plan.one_pass:
        # The trainer has planned its steps by epochs that are all alike.
        trainer.args.max_steps = _steps_in_all(trainer, stream)
    make_sampler = strided_sampler if stream.plan.layout == "strided" else sampler_in_epochs
    return make_sampler(sampler), gated_loader(
        loader, stream, trainer.args.gradient_accumulation_steps, lambda: _saves(trainer)
    )


def begin_epoch(trainer: Any, stream: Any, loader: Any) -> None:
    """Has a loader that was just made begin where the trainer stands.

    On a resume ms-swift before 4.6 leaves a new loader in epoch 0 (modelscope/ms-swift issue 10050).
    """
    loader.set_epoch(_counted(trainer, stream) // stream.plan.epoch_samples)


def _attach(trainer: Any, stream: Any) -> None:
    """Gives a trainer what belongs to its stream, once: the loader is made again on a resume."""
    if hasattr(trainer, "_lazyshard"):
        return
    from transformers import TrainerCallback

    from lazyshard_swift.checkpoints import Checkpoints
    from lazyshard_swift.parallel import notice

    class StepsCallback(TrainerCallback):  # type: ignore[misc]
        """Checks where a resumed run goes on, and sees to the end of one whose stream has ended."""

        stopped = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            stream.check_resume(_consumed(trainer, stream), state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            stream.tell_progress(_consumed(trainer, stream))
            # The trainer's own epoch is the rest of the run; its end is the trainer's affair.
            if stream.plan.one_pass and state.global_step < state.max_steps and _ends_epoch(trainer, stream):
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
                notice(_stopped(trainer, stream))
                stream.gate.end()

    trainer._lazyshard = Checkpoints(stream.plan, trainer.args.output_dir)
    trainer.add_callback(StepsCallback())


def _stopped(trainer: Any, stream: Any) -> str:
    from lazyshard_swift.parallel import stopped

    plan, state, step = stream.plan, trainer.state, trainer.state.global_step
    consumed = _consumed(trainer, stream)
    saved = trainer._lazyshard.last_step == step
    return stopped(
        *stream.why_it_stops(consumed, plan.batch_size * plan.rank.dp_size * trainer.args.gradient_accumulation_steps),
        step=step,
        planned=state.max_steps,
        trained=consumed,
        checkpoint=os.path.join(trainer.args.output_dir, f"checkpoint-{step}") if saved else None,
    )


def _saves(trainer: Any) -> bool:
    """Returns whether there are steps that a checkpoint is to be saved of."""
    due: bool = trainer._lazyshard.is_due(trainer.state.global_step)
    return due and trainer.args.save_strategy != "no"


def _counted(trainer: Any, stream: Any) -> int:
    """Returns how many samples the trainer takes to have been trained, by its steps."""
    from lazyshard_swift.run_plan import consumed_after

    plan, accumulation = stream.plan, trainer.args.gradient_accumulation_steps
    micro = plan.batch_size * plan.rank.dp_size
    return consumed_after(trainer.state.global_step, plan.epoch_samples, micro, accumulation)


def _consumed(trainer: Any, stream: Any) -> int:
    """Returns how many samples were trained since the run began."""
    consumed: int = _counted(trainer, stream) + stream.plan.index_offset + stream.plan.consumed_before
    return consumed


def _steps_in_all(trainer: Any, stream: Any) -> int:
    plan, accumulation = stream.plan, trainer.args.gradient_accumulation_steps
    steps: int = -(-plan.epoch_samples // (plan.batch_size * plan.rank.dp_size * accumulation))
    return steps


def _ends_epoch(trainer: Any, stream: Any) -> bool:
    """Returns whether an epoch of the stream ends with the step that was just trained."""
    from lazyshard_swift.run_plan import ends_epoch

    plan = stream.plan
    if plan.total is None:
        return False
    stop = plan.draws_after(_consumed(trainer, stream))
    first = stop - plan.batch_size * trainer.args.gradient_accumulation_steps
    return ends_epoch(plan.state, plan.total, max(first, 0), stop)


def _goes_by_epochs(strategy: Any) -> bool:
    return str(getattr(strategy, "value", strategy)) == "epoch"


@contextlib.contextmanager
def saving(trainer: Any) -> Iterator[None]:
    """Within it ms-swift saves a checkpoint, of any run; the position in a stream is kept with it."""
    checkpoints = getattr(trainer, "_lazyshard", None)
    if checkpoints is None:
        yield
        return
    from lazyshard_swift import parallel

    step = trainer.state.global_step
    folder = os.path.join(trainer.args.output_dir, f"checkpoint-{step}")
    stream = trainer.train_dataset
    checkpoints.begin(folder, _consumed(trainer, stream), step)
    yield
    # Every rank has written its part.
    parallel.barrier()
    checkpoints.commit()
    stream.tell_progress(_consumed(trainer, stream), at_once=True)


@contextlib.contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Has the module see other classes under these names for a while; its loader is made within one call."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def sampler_in_epochs(original: type[Any]) -> type[Any]:
    """Returns a subclass of ms-swift's `BatchSamplerShard`, in the same order, that tells its epoch to the gate."""

    class EpochBatchSampler(original):  # type: ignore[misc]
        _epoch = 0

        def __init__(self, total_samples: int, *rest: Any, **options: Any) -> None:
            super().__init__(total_samples, *rest, **options)
            self._epoch_samples = total_samples

        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self._epoch = epoch

    return EpochBatchSampler


def strided_sampler(original: type[Any]) -> type[Any]:
    """Returns a subclass of ms-swift's `BatchSamplerShard` that keeps to its strided order, epoch after epoch.

    ms-swift's own shuffle goes over all indices, so it would wait for the last chunk; the stream shuffles instead.
    """

    class StridedBatchSampler(sampler_in_epochs(original)):  # type: ignore[misc]
        def __init__(self, total_samples: int, *rest: Any, **options: Any) -> None:
            options["shuffle"] = False
            super().__init__(total_samples, *rest, **options)

        def __iter__(self) -> Iterator[list[int]]:
            first = self._epoch * self._epoch_samples
            for batch in super().__iter__():
                yield [first + index for index in batch]

    return StridedBatchSampler


def gated_loader(
    original: type[Any], stream: TrainStream, accumulation_steps: int, saves: Callable[[], bool] = lambda: False
) -> type[Any]:
    """Returns a subclass of ms-swift's `DataLoaderShard` that asks the stream's gate before each step.

    Args:
        original: ms-swift's class.
        stream: the stream.
        accumulation_steps: micro batches of a step.
        saves: says whether a checkpoint is saved where the loader ends before its time.
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
