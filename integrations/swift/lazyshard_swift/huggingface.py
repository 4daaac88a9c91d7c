"""The Hugging Face trainer of `swift sft`: its loader with our sampler and a gate, positions in the checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from lazyshard_swift.pipeline import is_stream
from lazyshard_swift.wrapping import wrap


def extend(module: ModuleType) -> None:
    """Wraps the making of the training loader and the saving of checkpoints."""
    for name in ("BatchSamplerShard", "DataLoaderShard"):
        if not isinstance(getattr(module, name, None), type):
            raise AttributeError(f"{module.__name__} has no {name}")
    wrap(module.DataLoaderMixin, {"get_train_dataloader": _get_train_dataloader(module)})
    wrap(module.SwiftMixin, {"_save_checkpoint": _save_checkpoint})


def consumed_after(step: int, epoch_samples: int, micro_samples: int, accumulation_steps: int) -> int:
    """Returns how many samples the trainer has taken after so many steps.

    Args:
        step: steps trained.
        epoch_samples: samples of an epoch, over all ranks.
        micro_samples: samples of a micro batch, over all ranks.
        accumulation_steps: micro batches of a step; the last step of an epoch has what is left.
    """
    batches = epoch_samples // micro_samples
    epoch, within = divmod(step, -(-batches // accumulation_steps))
    return epoch * epoch_samples + min(within * accumulation_steps, batches) * micro_samples


def _get_train_dataloader(module: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_train_dataloader(self: Any, *rest: Any, **options: Any) -> Any:
            stream = self.train_dataset
            if not is_stream(stream):
                return original(self, *rest, **options)
            from lazyshard_swift.loaders import gated_loader, strided_sampler

            _attach(self, stream)
            sampler = strided_sampler(module.BatchSamplerShard)
            loader = gated_loader(module.DataLoaderShard, stream, self.args.gradient_accumulation_steps)
            with _replaced(module, BatchSamplerShard=sampler, DataLoaderShard=loader):
                made = original(self, *rest, **options)
            # On a resume ms-swift before 4.6 leaves a new loader in epoch 0 (modelscope/ms-swift issue 10050).
            made.set_epoch(_consumed(self, stream) // stream.plan.epoch_samples)
            return made

        return get_train_dataloader

    return make


def _attach(trainer: Any, stream: Any) -> None:
    """Gives a trainer what belongs to its stream, once: the loader is made again on a resume."""
    if hasattr(trainer, "_lazyshard"):
        return
    from transformers import TrainerCallback

    from lazyshard_swift.checkpoints import Checkpoints
    from lazyshard_swift.logs import notice

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Checks where a resumed run goes on, and sees to the end of one whose stream has ended."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            stream.check_resume(_consumed(trainer, stream), state.global_step)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if not stream.gate.stopped:
                return
            control.should_training_stop = True
            if trainer._lazyshard.last_step != state.global_step and args.save_strategy != "no":
                control.should_save = True
            consumed, samples = _consumed(trainer, stream), stream.gate.published_samples()
            notice(
                f"the stream has ended with {samples} samples: training stops after step {state.global_step} of "
                f"{state.max_steps}, on all ranks alike, with {consumed} samples trained and {samples - consumed} left "
                f"over, fewer than a step takes"
            )

    trainer._lazyshard = Checkpoints(stream.plan, trainer.args.output_dir)
    trainer.add_callback(Steps())


def _consumed(trainer: Any, stream: Any) -> int:
    plan = stream.plan
    return consumed_after(
        trainer.state.global_step,
        plan.epoch_samples,
        plan.batch_size * plan.rank.dp_size,
        trainer.args.gradient_accumulation_steps,
    )


def _save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_checkpoint(self: Any, *rest: Any, **options: Any) -> Any:
        checkpoints = getattr(self, "_lazyshard", None)
        if checkpoints is None:
            return original(self, *rest, **options)
        from lazyshard_swift import parallel

        step = self.state.global_step
        folder = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        checkpoints.begin(folder, _consumed(self, self.train_dataset), step)
        result = original(self, *rest, **options)
        # Every rank has written its part.
        parallel.barrier()
        checkpoints.commit()
        return result

    return save_checkpoint


@contextlib.contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Has the module see other classes under these names for a while; its loader is made within one call."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
