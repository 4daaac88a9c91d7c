"""Megatron's trainer: its own sampler over the stream, a gate before every step, positions in the checkpoints.

Only what is the same in ms-swift 4.0 to 4.6 is touched: `_prepare_dataloader`, `save_checkpoint`, `train`, and the
event ``on_step_begin`` of a trainer's callbacks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from lazyshard_swift.hooked import within, wrap
from lazyshard_swift.pipeline import is_stream

if TYPE_CHECKING:
    from lazyshard_swift.checkpoints import Checkpoints
    from lazyshard_swift.stream import TrainStream


def extend(module: ModuleType) -> None:
    """Wraps three methods of `BaseMegatronTrainer`."""
    wrap(
        module.BaseMegatronTrainer,
        {"_prepare_dataloader": _prepare_dataloader, "save_checkpoint": within(saving), "train": _train},
    )


class _Stopped(Exception):
    """Leaves ms-swift's loop where the gate allows no further step. Raised on all ranks before the same step."""


class _StepsHook:
    """A callback of the trainer, and what this run keeps. Any other event passes by.

    Args:
        trainer: ms-swift's.
        stream: its training data.
        checkpoints: of the run.
    """

    def __init__(self, trainer: Any, stream: TrainStream, checkpoints: Checkpoints) -> None:
        self.trainer = trainer
        self.stream = stream
        self.checkpoints = checkpoints
        self.first_step = trainer.state.iteration

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return _pass_by

    def on_step_begin(self) -> None:
        """Waits for the step's data, or ends the training; commits a checkpoint that became durable meanwhile."""
        trainer, plan = self.trainer, self.stream.plan
        if self.checkpoints.pending:
            self.checkpoints.commit(_unfinished_saves())
        first = plan.draws_after(trainer.state.consumed_train_samples)
        stop = first + trainer.args.global_batch_size // plan.rank.dp_size
        if not self.stream.gate.allows(first, stop, saves=self.checkpoints.is_due(trainer.state.iteration)):
            raise _Stopped
        self.stream.tell_progress(trainer.state.consumed_train_samples)

    def on_train_end(self, *rest: Any, **options: Any) -> None:
        """Tells of the cache of encoded samples."""
        self.stream.tell_cache()


def _pass_by(*rest: Any, **options: Any) -> None:
    return None


def _prepare_dataloader(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_dataloader(self: Any, train_dataset: Any, *rest: Any, **options: Any) -> Any:
        if not is_stream(train_dataset):
            return original(self, train_dataset, *rest, **options)
        with loading(self, train_dataset) as dataset:
            return original(self, dataset, *rest, **options)

    return prepare_dataloader


@contextlib.contextmanager
def loading(trainer: Any, stream: TrainStream) -> Iterator[Any]:
    """Within it ms-swift makes the loader of a stream, of the data set that it yields."""
    _attach(trainer, stream)
    if stream.plan.layout != "strided":
        yield stream
        return
    # One pass over what is left of the run, in ms-swift's sequential form: rank r takes r, r + ranks, ... from what is
    # consumed of the current part on. Epochs and shuffle are the stream's.
    args, state = trainer.args, trainer.state
    consumed = state.consumed_train_samples - stream.plan.consumed_before
    steps = max(args.train_iters - state.iteration, 0)
    with (
        _changed(args, train_dataloader_shuffle=False, data_sharding=False, group_by_length=False),
        _changed(state, consumed_train_samples=consumed),
    ):
        yield RunLength(stream, max(consumed + steps * args.global_batch_size, args.global_batch_size))


def _attach(trainer: Any, stream: TrainStream) -> None:
    """Gives a trainer what belongs to its stream, once: with virtual pipeline stages there are several loaders."""
    if hasattr(trainer, "_lazyshard"):
        return
    from lazyshard_swift.checkpoints import Checkpoints

    stream.check_resume(trainer.state.consumed_train_samples, trainer.state.iteration)
    _plan_steps(trainer, stream)
    trainer._lazyshard = _StepsHook(trainer, stream, Checkpoints(stream.plan, trainer.args.output_dir))
    trainer.callbacks.append(trainer._lazyshard)


def _plan_steps(trainer: Any, stream: TrainStream) -> None:
    """Sets how many steps the run has in all where epochs decide and it goes on with other ranks or batches.

    ms-swift takes all steps, those trained already too, for steps of this start.
    """
    args, state = trainer.args, trainer.state
    left = stream.plan.steps_left(args.global_batch_size)
    if stream.plan.saved is None or stream.plan.layout != "strided":
        return
    if left is None or args.train_iters == state.iteration + left:
        return
    from lazyshard_swift.parallel import notice

    planned, args.train_iters = args.train_iters, state.iteration + left
    if hasattr(state, "max_steps"):
        state.max_steps = args.train_iters
    notice(
        f"{left} steps are left of {args.num_train_epochs} epochs: training ends after step {args.train_iters}, "
        f"not {planned}"
    )


@contextlib.contextmanager
def saving(trainer: Any) -> Iterator[None]:
    """Within it ms-swift saves a checkpoint, of any run; the position in a stream is kept with it."""
    ours: _StepsHook | None = getattr(trainer, "_lazyshard", None)
    if ours is None:
        yield
        return
    from lazyshard_swift import parallel

    state = trainer.state
    folder = os.path.join(trainer.args.output_dir, f"checkpoint-{state.iteration}")
    ours.checkpoints.begin(folder, state.consumed_train_samples, state.iteration)
    yield
    if not trainer.args.async_save:
        # Every rank has written its part.
        parallel.barrier()
        ours.checkpoints.commit()
    ours.stream.tell_progress(state.consumed_train_samples, at_once=True)


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    def train(self: Any, train_dataset: Any, *rest: Any, **options: Any) -> Any:
        if not is_stream(train_dataset):
            return original(self, train_dataset, *rest, **options)
        with training(self, train_dataset):
            return original(self, train_dataset, *rest, **options)

    return train


@contextlib.contextmanager
def training(trainer: Any, stream: TrainStream) -> Iterator[None]:
    """Within it ms-swift trains on a stream. It is left in the middle, without an error, where the stream has ended.

    Raises:
        WaitTimeout, StoreUnavailable: no data came in time. What was trained is saved, if all ranks could.
    """
    # Before ms-swift shows how many steps there are.
    _attach(trainer, stream)
    try:
        yield
    except _Stopped:
        _finish(trainer)
    # ms-swift has waited for what was being saved.
    trainer._lazyshard.checkpoints.commit()
    stream.gate.end()


def _finish(trainer: Any) -> None:
    """Ends a training as ms-swift ends it after its last step: what is not logged yet, a checkpoint, the callbacks."""
    from lazyshard_swift.parallel import notice, stopped

    ours: _StepsHook = trainer._lazyshard
    args, state, module = trainer.args, trainer.state, _trainer_module()
    planned, args.train_iters = args.train_iters, state.iteration
    metrics = getattr(trainer, "_train_metrics", None)
    if metrics and metrics.get("n_steps"):
        trainer.on_log(logs=metrics)
        trainer._train_metrics = {}
    # Before saving, ms-swift takes out the hooks that its first step has put in.
    hooked = module.should_disable_forward_pre_hook(args) and state.iteration > ours.first_step
    if hooked:
        module.disable_forward_pre_hook(trainer.wrapped_models)
        trainer._pre_hook_enabled = False
    if ours.checkpoints.last_step != state.iteration:
        trainer.save_checkpoint()
        trainer.call_event("on_save", output_dir=state.last_model_checkpoint)
    trainer.call_event("on_train_end")
    module.maybe_finalize_async_save(args, blocking=True, terminate=True)
    consumed = state.consumed_train_samples
    notice(
        stopped(
            *ours.stream.why_it_stops(consumed, args.global_batch_size),
            step=state.iteration,
            planned=planned,
            trained=consumed,
            checkpoint=state.last_model_checkpoint,
        )
    )


def _unfinished_saves() -> int:
    """Returns how many of the checkpoints that --async_save has begun are not on disk; they get there in order."""
    from swift.megatron.utils import megatron_lm_utils

    count: int = megatron_lm_utils._async_calls_queue.get_num_unfinalized_calls()
    return count


def _trainer_module() -> Any:
    import swift.megatron.trainers.base

    return swift.megatron.trainers.base


@contextlib.contextmanager
def _changed(args: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(args, name) for name in values if hasattr(args, name)}
    vars(args).update({name: values[name] for name in before})
    try:
        yield
    finally:
        vars(args).update(before)


class RunLength(Dataset[Any]):
    """A stream with the length of a whole run, for a sampler that goes through it once.

    Args:
        stream: the stream.
        samples: how many samples the run takes, over all ranks.
    """

    def __init__(self, stream: TrainStream, samples: int) -> None:
        self._stream = stream
        self._samples = samples

    def __len__(self) -> int:
        """Samples of the run, over all ranks."""
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """Returns an encoded sample."""
        return self._stream[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the encoded samples of a batch."""
        return self._stream.__getitems__(indices)
