"""Megatron's trainer: its own sampler over the stream, a gate before every step, positions in the checkpoints.

Only what is the same in ms-swift 4.0 to 4.6 is touched: `_prepare_dataloader`, `save_checkpoint`, `train`, and the
event ``on_step_begin`` of a trainer's callbacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from lazyshard_swift.ms_swift import for_streams, within, wrap

if TYPE_CHECKING:
    from lazyshard_swift.stream import TrainStream


def extend(module: ModuleType) -> None:
    """Wraps three methods of `BaseMegatronTrainer`."""
    makers = {"_prepare_dataloader": for_streams(_prepare_dataloader), "save_checkpoint": within(saving)}
    wrap(module.BaseMegatronTrainer, makers | {"train": for_streams(_train)})


class _Stopped(Exception):
    """Leaves ms-swift's loop, on all ranks before the same step, where the gate allows no further one."""


class _StepsHook:
    """A callback of the trainer, and what this run keeps. Any other event passes by."""

    def __init__(self, trainer: Any, stream: TrainStream) -> None:
        from lazyshard_swift.checkpoints import Checkpoints

        self.trainer = trainer
        self.stream = stream
        self.checkpoints = Checkpoints(stream.plan, trainer.args.output_dir)
        self.first_step = trainer.state.iteration

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return lambda *rest, **options: None

    def on_step_begin(self) -> None:
        """Waits for the step's data, or ends the training; commits a checkpoint that became durable meanwhile."""
        trainer, plan = self.trainer, self.stream.plan
        if self.checkpoints.pending:
            self.checkpoints.commit(_unfinished_saves())
        first = (trainer.state.consumed_train_samples - plan.consumed_before) // plan.rank.dp_size
        stop = first + trainer.args.global_batch_size // plan.rank.dp_size
        if not self.stream.gate.allows(first, stop, saves=self.checkpoints.is_due(trainer.state.iteration)):
            raise _Stopped
        self.stream.tell_progress(trainer.state.consumed_train_samples)

    def on_train_end(self, *rest: Any, **options: Any) -> None:
        """Tells of the cache of encoded samples."""
        self.stream.tell_cache()


def _prepare_dataloader(original: Any, self: Any, stream: TrainStream, *rest: Any, **options: Any) -> Any:
    """Has ms-swift make the loader of a stream."""
    _attach(self, stream)
    if stream.plan.layout != "strided":
        return original(self, stream, *rest, **options)
    # One pass over what is left of the run, in ms-swift's sequential form: rank r takes r, r + ranks, ... from what is
    # consumed of the current part on. Epochs and shuffle are the stream's.
    args, state = self.args, self.state
    consumed = state.consumed_train_samples - stream.plan.consumed_before
    steps = max(args.train_iters - state.iteration, 0)
    whole = Subset(stream, range(max(consumed + steps * args.global_batch_size, args.global_batch_size)))
    in_order = dict.fromkeys(("train_dataloader_shuffle", "data_sharding", "group_by_length"), False)
    with _changed(args, **in_order), _changed(state, consumed_train_samples=consumed):
        return original(self, whole, *rest, **options)


def _attach(trainer: Any, stream: TrainStream) -> None:
    """Gives a trainer what belongs to its stream, once: with virtual pipeline stages there are several loaders."""
    if hasattr(trainer, "_lazyshard"):
        return
    args, state, plan = trainer.args, trainer.state, stream.plan
    stream.check_resume(state.consumed_train_samples, state.iteration)
    left = plan.steps_left(args.global_batch_size)
    if plan.saved is not None and plan.layout == "strided" and left not in (None, args.train_iters - state.iteration):
        # Epochs decide, and it goes on with other ranks or batches: ms-swift takes all steps, those trained already
        # too, for steps of this start.
        from lazyshard_swift.parallel import notice

        planned, args.train_iters = args.train_iters, state.iteration + left
        if hasattr(state, "max_steps"):
            state.max_steps = args.train_iters
        epochs = f"{left} steps are left of {args.num_train_epochs} epochs"
        notice(f"{epochs}: training ends after step {args.train_iters}, not {planned}")
    trainer._lazyshard = _StepsHook(trainer, stream)
    trainer.callbacks.append(trainer._lazyshard)


@contextlib.contextmanager
def saving(trainer: Any) -> Iterator[None]:
    """Within it ms-swift saves a checkpoint, of any run; the position in a stream is kept with it."""
    ours: _StepsHook | None = getattr(trainer, "_lazyshard", None)
    if ours is None:
        yield
        return
    state = trainer.state
    consumed, at_once = state.consumed_train_samples, not trainer.args.async_save
    with ours.checkpoints.saving(consumed, state.iteration, at_once=at_once):
        yield
    ours.stream.tell_progress(consumed, at_once=True)


def _train(original: Any, self: Any, stream: TrainStream, *rest: Any, **options: Any) -> None:
    """Trains on a stream; ms-swift's loop is left in the middle, without an error, where the stream has ended."""
    # Before ms-swift shows how many steps there are.
    _attach(self, stream)
    try:
        original(self, stream, *rest, **options)
    except _Stopped:
        _finish(self)
    # ms-swift has waited for what was being saved.
    self._lazyshard.checkpoints.commit()
    stream.gate.end()


def _finish(trainer: Any) -> None:
    """Ends a training as ms-swift ends it after its last step: what is not logged yet, a checkpoint, the callbacks."""
    ours: _StepsHook = trainer._lazyshard
    args, state, module = trainer.args, trainer.state, _trainer_module()
    planned, args.train_iters = args.train_iters, state.iteration
    metrics = getattr(trainer, "_train_metrics", None)
    if metrics and metrics.get("n_steps"):
        trainer.on_log(logs=metrics)
        trainer._train_metrics = {}
    # Before saving, ms-swift takes out the hooks that its first step has put in.
    if module.should_disable_forward_pre_hook(args) and state.iteration > ours.first_step:
        module.disable_forward_pre_hook(trainer.wrapped_models)
        trainer._pre_hook_enabled = False
    if ours.checkpoints.last_step != state.iteration:
        trainer.save_checkpoint()
        trainer.call_event("on_save", output_dir=state.last_model_checkpoint)
    trainer.call_event("on_train_end")
    module.maybe_finalize_async_save(args, blocking=True, terminate=True)
    kept = state.last_model_checkpoint
    ours.stream.tell_stop(state.consumed_train_samples, args.global_batch_size, state.iteration, planned, kept)


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
