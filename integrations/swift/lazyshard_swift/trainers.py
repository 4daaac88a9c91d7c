"""ms-swift's two trainers: a callback with a gate before each step, and the position saved with each checkpoint.

The Hugging Face trainer of `swift sft` counts steps, and builds its loader from classes of this module. Megatron's
counts samples, and keeps its sampler; only what is the same in ms-swift 4.0 to 4.6 is changed in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from lazyshard_swift.ms_swift import changed, is_stream, notice, require, wrap

# Everything else is imported where it is needed: a run without the flag loads none of it.
if TYPE_CHECKING:
    from lazyshard_swift.run_plan import RunPlan
    from lazyshard_swift.stream import TrainStream


def extend(module: ModuleType) -> None:
    """Wraps the creation of the training loader, the saving of checkpoints, and Megatron's loop."""
    if module.__name__ == "swift.trainers.mixin":
        require(module, "BatchSamplerShard", "DataLoaderShard")
        wrap(module.DataLoaderMixin, {"get_train_dataloader self": functools.partial(_make_loader, module)})
        wrap(module.SwiftMixin, {"_save_checkpoint self": _save})
        wrap(module.SwiftMixin, {"train self": functools.partial(_train_hugging_face, module)})
        return
    require(module, "MegatronPretrainingRandomSampler", "maybe_finalize_async_save")
    require(module, "should_disable_forward_pre_hook", "disable_forward_pre_hook")
    require(module.BaseMegatronTrainer, "call_event")
    data = "self train_dataset val_dataset"
    own: dict[str, Callable[..., Any]] = {f"train {data}": functools.partial(_train, module)}
    own |= {f"_prepare_dataloader {data}": _prepare_dataloader, "save_checkpoint self": _save}
    wrap(module.BaseMegatronTrainer, own)


class _Callback:
    """A callback of a trainer, with the state of its stream. Ignores all other events."""

    def __init__(self, trainer: Any, stream: TrainStream) -> None:
        from lazyshard_swift.checkpoints import Checkpoints

        self.trainer, self.stream, self.plan = trainer, stream, stream.plan
        self.checkpoints = Checkpoints(stream.plan, trainer.args.output_dir)

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return lambda *rest, **options: None

    def counts(self) -> tuple[int, int]:
        """Returns the samples and the steps that were trained since the run began."""
        return self.trainer.state.consumed_train_samples, self.trainer.state.iteration

    def log_stop(self, planned: int) -> None:
        """Logs why the run has stopped before the planned number of steps, and the checkpoint, if there is one."""
        (consumed, step), gate = self.counts(), self.stream.gate
        why, left = "no data arrived in time", ""
        if gate.gave_up is None:
            why, left = self.plan.end(consumed, gate.published())
        stops = f"training stops after step {step} of {planned}, on all ranks, with {consumed} samples trained"
        saved = f". Checkpoint: {self.checkpoints.folder(step)}" if self.checkpoints.last_step == step else ""
        notice(f"{why}: {stops}{left}{saved}")


def _save(original: Any, self: Any, *rest: Any, **options: Any) -> Any:
    """Lets ms-swift save a checkpoint of any run, and saves the position in the stream with it."""
    run: _Callback | None = getattr(self, "_lazyshard", None)
    if run is None:
        return original(self, *rest, **options)
    from lazyshard_swift.checkpoints import barrier

    consumed, step = run.counts()
    run.checkpoints.begin(consumed, step)
    result = original(self, *rest, **options)
    if isinstance(run, _HuggingFaceCallback) or not self.args.async_save:
        # Every rank has written its part.
        barrier()
        run.checkpoints.commit()
    run.stream.log_progress(consumed, at_once=True)
    return result


def _train_hugging_face(module: ModuleType, original: Any, self: Any, *rest: Any, **options: Any) -> Any:
    """Trains; on a stream with ms-swift's loader, also where the trainer of an RLHF type has another one."""
    if is_stream(self.train_dataset) and not isinstance(self, module.DataLoaderMixin):
        self.__class__ = type(type(self).__name__, (module.DataLoaderMixin, type(self)), {})
    return original(self, *rest, **options)


class _HuggingFaceCallback(_Callback):
    def counts(self) -> tuple[int, int]:
        plan, step = self.plan, self.trainer.state.global_step
        return plan.counted(step) + plan.index_offset + plan.course.consumed_before, step

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.stream.check_resume(*self.counts())
        if self.plan.rollout.steps > 1:
            # The trainer counts micro batches of this start; in the middle of a rollout only the rest of it follows.
            self.trainer._step = state.global_step * args.gradient_accumulation_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        consumed, step = self.counts()
        self.stream.log_progress(consumed)
        # The trainer's own epoch is the rest of the run; the trainer handles the end of that itself.
        last = step % self.plan.rollout.steps == 0
        if self.plan.one_pass and last and step < state.max_steps and self.plan.ends_epoch(consumed):
            control.should_save = control.should_save or args.save_strategy == "epoch"
            control.should_evaluate = control.should_evaluate or args.eval_strategy == "epoch"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.stream.gate.stopped:
            control.should_training_stop = True
            missing = self.checkpoints.last_step != state.global_step and args.save_strategy != "no"
            control.should_save = control.should_save or missing

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.stream.log_cache()
        if self.stream.gate.stopped:
            # The checkpoint is saved by now.
            self.log_stop(state.max_steps)
            self.stream.gate.end()


def _make_loader(module: ModuleType, original: Any, self: Any, *rest: Any, **options: Any) -> Any:
    stream = self.train_dataset
    if not is_stream(stream):
        return original(self, *rest, **options)
    # Only once: on a resume the loader is made again.
    if not hasattr(self, "_lazyshard"):
        self._lazyshard = _HuggingFaceCallback(self, stream)
        self.add_callback(self._lazyshard)
    plan = stream.plan
    if plan.one_pass:
        # The trainer has planned its steps for epochs of equal length.
        whole = -(-plan.epoch_samples // plan.global_batch) * plan.rollout.steps
        self.args.max_steps = min(whole, self.args.max_steps) if plan.by_steps and plan.rollout.steps > 1 else whole
    skipped, begun = divmod(options.get("skip_batches", 0), plan.rollout.batches)
    sampler = _batch_sampler(module.BatchSamplerShard, plan)
    loader = _gated_loader(module.DataLoaderShard, self._lazyshard, begun)
    options |= {"skip_batches": skipped} if skipped or begun else {}
    with changed(module, BatchSamplerShard=sampler, DataLoaderShard=loader):
        made = original(self, *rest, **options)
    # On a resume ms-swift before 4.6 leaves a new loader in epoch 0 (modelscope/ms-swift issue 10050).
    made.set_epoch(plan.counted(self.state.global_step) // plan.epoch_samples)
    return made


def _batch_sampler(original: type[Any], plan: RunPlan) -> type[Any]:
    """Returns a subclass of ms-swift's `BatchSamplerShard` that passes its epoch to the gate.

    If strided, it does not shuffle, since that would wait for the last chunk; the stream shuffles instead.
    """
    own: dict[str, Any] = {"batch_size": plan.batch_size}
    own, epoch_samples = (own | {"shuffle": False}, plan.epoch_samples) if plan.layout == "strided" else (own, 0)

    class EpochBatchSampler(original):  # type: ignore[misc]
        lazyshard_epoch = 0

        def __init__(self, *rest: Any, **options: Any) -> None:
            super().__init__(*rest, **options | own)

        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self.lazyshard_epoch = epoch

        def __iter__(self) -> Iterator[list[int]]:
            first = self.lazyshard_epoch * epoch_samples
            return ([first + index for index in batch] for batch in super().__iter__())

    return EpochBatchSampler


def _gated_loader(original: type[Any], run: _HuggingFaceCallback, begun: int) -> type[Any]:
    """Returns a subclass of ms-swift's `DataLoaderShard` that calls the stream's gate before each step.

    It yields the rows of a rollout for each of its micro batches; `begun` ones of the first rollout are trained.
    """
    plan, gate, rollout = run.plan, run.stream.gate, run.plan.rollout
    accumulation = plan.accumulation * rollout.batches // rollout.steps

    class GatedLoader(original):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(self.batch_sampler) * rollout.batches - begun

        def __iter__(self) -> Iterator[Any]:
            sampler, skipped = self.batch_sampler, 0
            # After a resume accelerate's SkipBatchSampler wraps ours.
            while not hasattr(sampler, "lazyshard_epoch"):
                skipped += sampler.skip_batches
                sampler = sampler.batch_sampler
            count, number = len(sampler) * rollout.batches, skipped * rollout.batches + begun
            start = (sampler.lazyshard_epoch * plan.epoch_samples + plan.index_offset) // plan.dp_size
            batches: Iterator[Any] | None = None
            batch: Any = None
            while number < count:
                # The last step of an epoch may have fewer; if steps set the length, that one is not trained.
                whole = accumulation - number % accumulation
                size, first = min(whole, count - number), start + number // rollout.batches * plan.batch_size
                stop = number + (whole if plan.stop_at_end else size)
                stop = start + -(-stop // rollout.batches) * plan.batch_size
                due = run.checkpoints.is_due(run.trainer.state.global_step)
                if not gate.allows(first, stop, saves=due and run.trainer.args.save_strategy != "no"):
                    return
                # Workers start reading here, so only after the gate has allowed the first step.
                batches = batches or super().__iter__()
                for micro in range(number, number + size):
                    if not micro % rollout.batches or batch is None:
                        batch = next(batches)  # a missing one is a RuntimeError, not a short step
                    yield batch if rollout.copies == 1 else [row for row in batch for _ in range(rollout.copies)]
                number += size

    return GatedLoader


class _Stopped(Exception):
    """Leaves ms-swift's loop, on all ranks before the same step, when the gate allows no further one."""


class _MegatronCallback(_Callback):
    def __init__(self, trainer: Any, stream: TrainStream) -> None:
        super().__init__(trainer, stream)
        args, state, plan = trainer.args, trainer.state, self.plan
        consumed, self.first_step = self.counts()
        stream.check_resume(consumed, self.first_step)
        left = plan.draws_left()
        if plan.saved is None or plan.layout != "strided" or left is None:
            return
        steps, planned = left * plan.dp_size // plan.global_batch, args.train_iters
        args.train_iters = state.iteration + steps
        if args.train_iters != planned:
            # Epochs set the length, and the run continues with other ranks or batches, but ms-swift counts all steps,
            # including those already trained, as steps of this start.
            if hasattr(state, "max_steps"):
                state.max_steps = args.train_iters
            epochs = f"{steps} steps are left of {args.num_train_epochs} epochs"
            notice(f"{epochs}: training ends after step {args.train_iters}, not {planned}")

    def on_step_begin(self, *rest: Any, **options: Any) -> None:
        """Waits for the step's data, or ends the training; commits a checkpoint that has become durable meanwhile."""
        plan = self.plan
        if self.checkpoints.pending:
            from swift.megatron.utils import megatron_lm_utils

            # Saves of --async_save are finished in order.
            self.checkpoints.commit(megatron_lm_utils._async_calls_queue.get_num_unfinalized_calls())
        consumed, step = self.counts()
        first = (consumed - plan.course.consumed_before) // plan.dp_size
        stop = first + plan.global_batch // plan.dp_size
        if not self.stream.gate.allows(first, stop, saves=self.checkpoints.is_due(step)):
            raise _Stopped
        self.stream.log_progress(consumed)

    def on_train_end(self, *rest: Any, **options: Any) -> None:
        self.stream.log_cache()


def _attach(trainer: Any, stream: TrainStream) -> _MegatronCallback:
    """Adds the callback for the stream to a trainer, once: with virtual pipeline stages there are several loaders."""
    if not hasattr(trainer, "_lazyshard"):
        trainer._lazyshard = _MegatronCallback(trainer, stream)
        trainer.callbacks.append(trainer._lazyshard)
    run: _MegatronCallback = trainer._lazyshard
    return run


def _prepare_dataloader(original: Any, self: Any, stream: TrainStream, *rest: Any, **options: Any) -> Any:
    """Lets ms-swift make the loader of a stream."""
    if not is_stream(stream):
        return original(self, stream, *rest, **options)
    run, plan = _attach(self, stream), stream.plan
    if plan.layout != "strided":
        return original(self, stream, *rest, **options)
    # One pass over the rest of the run, in ms-swift's sequential form: rank r takes r, r + ranks, ... from the consumed
    # samples of the current part on. The stream handles epochs and shuffle.
    consumed, step = run.counts()
    consumed -= plan.course.consumed_before
    steps = max(self.args.train_iters - step, 0)
    whole = Subset(stream, range(max(consumed + steps * plan.global_batch, plan.global_batch)))
    in_order = dict.fromkeys(("train_dataloader_shuffle", "data_sharding", "group_by_length"), False)
    with changed(self.args, **in_order), changed(self.state, consumed_train_samples=consumed):
        return original(self, whole, *rest, **options)


def _train(module: ModuleType, original: Any, self: Any, stream: TrainStream, *rest: Any, **options: Any) -> Any:
    """Trains on a stream; when the stream has ended, leaves ms-swift's loop in the middle without an error."""
    if not is_stream(stream):
        return original(self, stream, *rest, **options)
    # Before ms-swift prints the number of steps.
    run = _attach(self, stream)
    try:
        original(self, stream, *rest, **options)
    except _Stopped:
        _finish(run, module)
    # ms-swift has waited for pending saves.
    run.checkpoints.commit()
    stream.gate.end()


def _finish(run: _MegatronCallback, module: Any) -> None:
    """Ends a training as ms-swift does after its last step: logs the rest, saves a checkpoint, calls the callbacks."""
    trainer, args, state = run.trainer, run.trainer.args, run.trainer.state
    planned, args.train_iters = args.train_iters, state.iteration
    metrics = getattr(trainer, "_train_metrics", None)
    if metrics and metrics.get("n_steps"):
        trainer.on_log(logs=metrics)
        trainer._train_metrics = {}
    # Before saving, ms-swift removes the hooks that its first step has installed.
    if module.should_disable_forward_pre_hook(args) and state.iteration > run.first_step:
        module.disable_forward_pre_hook(trainer.wrapped_models)
        trainer._pre_hook_enabled = False
    if run.checkpoints.last_step != state.iteration:
        trainer.save_checkpoint()
        trainer.call_event("on_save", output_dir=state.last_model_checkpoint)
    trainer.call_event("on_train_end")
    module.maybe_finalize_async_save(args, blocking=True, terminate=True)
    run.log_stop(planned)
