"""Megatron's trainer of ms-swift 3.12, around the training loop of Megatron-LM itself.

`swift.megatron.trainers.base` hands the run to Megatron-LM's `pretrain`. What is touched, in the order of a run:

    as_in_4                         the arguments under the names of 4.x, with the rank that Megatron will give
    build_pretraining_data_loader   rank and resume checked, ms-swift's strided sampler, the gate of the first step
    checkpoint_and_decide_exit      of Megatron-LM, the last call of a step: the gate of the next one
    save_checkpoint                 the position inside, the cursor after

A stream that has ended sets ``train_iters`` to the steps trained, so the loop ends by its own condition and `pretrain`
saves and evaluates as after any last step. Read in the sources of ms-swift 3.12.6 and Megatron-LM core 0.12 to 0.15;
never run with them, since Megatron-LM is no package. What is not certain is therefore refused, see `_UNCERTAIN`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from lazyshard.data import resolve_rank
from lazyshard.data.rank import Rank
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.pipeline import is_stream
from lazyshard_swift.wording import stopped
from lazyshard_swift.wrapping import wrap

if TYPE_CHECKING:
    from lazyshard_swift.checkpoints import Checkpoints
    from lazyshard_swift.stream import TrainStream

_UNCERTAIN: Final = {
    "async_save": "the position would be committed before the checkpoint is on disk",
    "rampup_batch_size": "steps of different sizes would be planned as if they were alike",
    "decrease_batch_size_if_needed": "steps of different sizes would be planned as if they were alike",
    "train_samples": "the run would not be planned in steps",
    "iterations_to_skip": "samples would be passed over",
    "group_by_length": "that its sampler takes lengths from the data set was never seen",
    "packing": "that its trainer takes the packs of a stream was never seen",
}
"""Arguments, of ms-swift or of Megatron-LM alone, and what would go wrong with them."""


def extend(module: ModuleType) -> None:
    """Wraps three methods of `BaseMegatronTrainer`.

    Raises:
        AttributeError: something is missing there, or in Megatron-LM's `training`; nothing was replaced.
    """
    for owner, name in ((module.training, "checkpoint_and_decide_exit"), (module, "get_args")):
        if not callable(getattr(owner, name, None)):
            raise AttributeError(f"{owner.__name__} has no {name}")
    wrap(
        module.BaseMegatronTrainer,
        {
            "build_pretraining_data_loader": _build_loader(module),
            "save_checkpoint": _save_checkpoint(module),
            "train": _train(module),
        },
    )


def as_in_4(args: Any) -> Any:
    """Returns a copy of 3.12's arguments with what 4.x calls otherwise.

    ``lazyshard_rank`` is the data-parallel rank that this process will have; data sets are made before Megatron's
    groups.

    Raises:
        SettingsRefused: with these arguments nothing can be promised.
    """
    _check_certain(args)
    if (args.train_iters is None) == (args.max_epochs is None):
        raise _refused(
            "train_iters",
            "say how long to train, either with --train_iters N or, once the stream has ended, with --max_epochs N",
        )
    return SimpleNamespace(
        **{
            **vars(args),
            "output_dir": args.save,
            "num_train_epochs": args.max_epochs,
            "mcore_model": args.load,
            "mcore_adapter": args.adapter_load,
            # The stream shuffles, in windows: one way through all of it that is known to be right.
            "data_sharding": False,
            "lazyshard_rank": _coming_rank(args),
        }
    )


def _coming_rank(args: Any) -> Rank:
    """Returns the rank that Megatron gives this process in its order of groups, tp-cp-ep-dp-pp.

    Raises:
        SettingsRefused: the processes cannot be divided so.
    """
    process, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inner = args.tensor_model_parallel_size * args.context_parallel_size
    size, rest = divmod(world, inner * args.pipeline_model_parallel_size)
    if rest or not size:
        raise _refused(
            "tensor_model_parallel_size",
            f"{world} processes cannot be divided by tensor_model_parallel_size {args.tensor_model_parallel_size} x "
            f"context_parallel_size {args.context_parallel_size} x pipeline_model_parallel_size "
            f"{args.pipeline_model_parallel_size}",
        )
    return Rank(process // inner % size, size)


def _check_certain(args: Any) -> None:
    for name, why in _UNCERTAIN.items():
        if getattr(args, name, None):
            raise _refused(
                name,
                f"--{name} cannot work with --sharded_lazy true in this ms-swift: {why}. Leave it out, or upgrade to "
                f"ms-swift 4",
            )


def _check_attached(stream: TrainStream, args: Any) -> None:
    """Refuses what shows only now that Megatron's arguments and groups are there."""
    _check_certain(args)
    planned, given = stream.plan.rank, resolve_rank()
    if planned != given:
        raise _refused(
            "sharded_lazy",
            f"Megatron made this process data-parallel rank {given.dp_rank} of {given.dp_size}, its data were planned "
            f"for rank {planned.dp_rank} of {planned.dp_size}: the groups are in an unusual order (such as "
            f"--use_tp_pp_dp_mapping), which --sharded_lazy true does not support in this ms-swift. Upgrade to "
            f"ms-swift 4",
        )


class _Steps:
    """What a run keeps, and what happens between its steps.

    Args:
        stream: the training data.
        checkpoints: of the run.
        args: Megatron-LM's arguments, which its loop looks at.
    """

    def __init__(self, stream: TrainStream, checkpoints: Checkpoints, args: Any) -> None:
        self.stream = stream
        self.checkpoints = checkpoints
        self._args = args

    def go_on(self, iteration: int) -> None:
        """Waits for the next step's data, or ends the loop where the stream has ended.

        Args:
            iteration: steps trained.
        """
        args, plan = self._args, self.stream.plan
        consumed = args.consumed_train_samples
        if iteration >= args.train_iters:
            return
        first = plan.draws_after(consumed)
        if self.stream.gate.allows(first, first + args.global_batch_size // plan.rank.dp_size):
            return
        from lazyshard_swift.logs import notice

        planned, args.train_iters = args.train_iters, iteration
        notice(
            stopped(
                *self.stream.why_it_stops(consumed, args.global_batch_size),
                step=iteration,
                planned=planned,
                trained=consumed,
                checkpoint=None,  # Megatron-LM saves it behind the loop
            )
        )


def _build_loader(module: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_pretraining_data_loader(
            self: Any, dataset: Any, consumed_samples: int, *rest: Any, **options: Any
        ) -> Any:
            if not is_stream(dataset):
                return original(self, dataset, consumed_samples, *rest, **options)
            from lazyshard_swift.loaders import RunLength

            args = module.get_args()
            # Before `_attach`, which may find out that the stream has ended already. Not train_iters alone: Megatron-LM
            # may count steps from 0 although ms-swift has restored the samples consumed.
            steps, before = max(args.train_iters - args.iteration, 0), dataset.plan.consumed_before
            _attach(self, dataset, consumed_samples, args)
            left = dataset.plan.steps_left(args.global_batch_size)
            if left is not None and len(dataset.plan.state.parts) > 1:
                # ms-swift takes those trained already, with other ranks or batches, for steps of this start.
                steps, args.train_iters = left, args.iteration + left
            # One pass over what is left of the run, in ms-swift's sequential form: rank r takes r, r + ranks, ... from
            # what is consumed of the current part on. Epochs and shuffle are the stream's.
            consumed = consumed_samples - before
            length = RunLength(dataset, max(consumed + steps * args.global_batch_size, args.global_batch_size))
            sequential = {"train_dataloader_shuffle": False, "data_sharding": False, "group_by_length": False}
            with _changed(args, dataloader_type="cyclic", **sequential):
                return original(self, length, consumed, *rest, **options)

        return build_pretraining_data_loader

    return make


def _attach(trainer: Any, stream: TrainStream, consumed: int, args: Any) -> None:
    """Gives a trainer what belongs to its stream, once: with virtual pipeline stages there are several loaders."""
    if hasattr(trainer, "_lazyshard"):
        return
    from lazyshard_swift.checkpoints import Checkpoints

    _check_attached(stream, args)
    stream.check_resume(consumed, args.iteration)
    trainer._lazyshard = _Steps(stream, Checkpoints(stream.plan, args.save), args)
    trainer._lazyshard.go_on(args.iteration)


def _train(module: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(self: Any, train_dataset: Any, *rest: Any, **options: Any) -> Any:
            if not is_stream(train_dataset):
                return original(self, train_dataset, *rest, **options)
            decide = module.training.checkpoint_and_decide_exit

            def checkpoint_and_decide_exit(*step: Any, **named: Any) -> Any:
                should_exit = decide(*step, **named)
                if not should_exit:
                    # In Megatron-LM `curr_iteration` is the number of the step just trained, from 0.
                    self._lazyshard.go_on(module.get_args().curr_iteration + 1)
                return should_exit

            with _changed(module.training, checkpoint_and_decide_exit=checkpoint_and_decide_exit):
                return original(self, train_dataset, *rest, **options)

        return train

    return make


def _save_checkpoint(module: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(self: Any, iteration: int, *rest: Any, **options: Any) -> Any:
            ours: _Steps | None = getattr(self, "_lazyshard", None)
            if ours is None:
                return original(self, iteration, *rest, **options)
            from lazyshard_swift import parallel

            args = module.get_args()
            folder = os.path.join(args.save, f"checkpoint-{iteration}")
            ours.checkpoints.begin(folder, args.consumed_train_samples, iteration)
            result = original(self, iteration, *rest, **options)
            # Every rank has written its part.
            parallel.barrier()
            ours.checkpoints.commit()
            return result

        return save_checkpoint

    return make


@contextlib.contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    vars(owner).update({name: values[name] for name in before})
    try:
        yield
    finally:
        vars(owner).update(before)


def _refused(argument: str, message: str) -> SettingsRefused:
    return SettingsRefused(message, argument=argument)
