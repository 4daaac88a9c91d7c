"""Trainers in the place of ms-swift's two, each one rank, with their own arithmetic of steps, epochs and what to skip.

Samplers and loader are ms-swift's; the loops around them are those of transformers and of `BaseMegatronTrainer`.
"""

import importlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from lazyshard_swift import trainers
from lazyshard_swift.run_plan import RunPlan
from lazyshard_swift.stream import TrainStream
from tests.swift.unit.runs import as_rank, load, open_stream, plan


@dataclass
class Trained:
    """What one rank has trained in one start: the samples of each step, by number of the step from 0."""

    steps: dict[int, list[int]] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    ended: bool = False


def resumed(plan: RunPlan) -> TrainStream:
    """Opens the stream as `open_train_stream` does, with its checks."""
    found = open_stream(plan)
    if plan.saved is not None:
        found.check_resume(plan.saved.consumed, plan.saved.step)
    return found


def train(
    kind: str, directory: Path, args: Any, dp: int, kill: int | None = None
) -> tuple[list[RunPlan], list[Trained]]:
    """Trains on all ranks, one after the other; returns their plans, and what they have trained.

    Up to step `kill`, counted from 0, or to the end. Arguments also have `save_steps`.
    """
    trainer = train_hugging_face if kind == "swift" else train_megatron
    plans, found = [plan(args, directory, rank, dp) for rank in range(dp)], []
    for rank, each in enumerate(plans):
        with as_rank(rank):
            found.append(trainer(each, args, kill))
    assert len({(tuple(each.steps), tuple(each.saved), each.ended) for each in found}) == 1, "ranks that differ"
    return plans, found


def train_hugging_face(plan: RunPlan, args: Any, kill: int | None) -> Trained:
    module, found = _hugging_face(plan.rank.dp_rank, plan.rank.dp_size), Trained()
    trainer = module.SwiftMixin()
    own = args.training_args
    trainer.args = SimpleNamespace(**vars(args))
    trainer.args.gradient_accumulation_steps, trainer.args.eval_strategy = own.gradient_accumulation_steps, "no"
    trainer.train_dataset, trainer.batch_size, trainer.callbacks = resumed(plan), plan.batch_size, []
    trainer.state = SimpleNamespace(global_step=0, max_steps=0)
    trainer.add_callback = trainer.callbacks.append
    accumulation = own.gradient_accumulation_steps
    # transformers.Trainer.set_initial_training_values
    loader = trainer.get_train_dataloader()
    per_epoch = max(math.ceil(len(loader) / accumulation), 1)
    # The stream may have set them.
    own_steps, own_epochs = trainer.args.max_steps, trainer.args.num_train_epochs
    max_steps = own_steps if own_steps > 0 else math.ceil(own_epochs * per_epoch)
    epochs = math.ceil(own_steps / per_epoch if own_steps > 0 else own_epochs)
    # _init_training_state
    done = 0 if plan.saved is None else plan.saved.step
    trainer.state = SimpleNamespace(global_step=done, max_steps=max_steps)
    first_epoch, skip = done // per_epoch, done % per_epoch * accumulation
    _call(trainer, "on_train_begin")
    for epoch in range(first_epoch, epochs):
        here, step, first = loader, -1, 0
        if epoch == first_epoch and skip:
            here = trainer.get_train_dataloader(skip_batches=skip)
            step, first = skip - 1, skip // accumulation
        here.set_epoch(epoch)
        batches = iter(here)
        stop = False
        for update in range(first, per_epoch):
            size = accumulation if update < per_epoch - 1 else len(loader) % accumulation or accumulation
            if trainer.state.global_step == kill:
                return found
            for batch in [batch for _, batch in zip(range(size), batches, strict=False)]:
                step += 1
                found.steps.setdefault(trainer.state.global_step, []).extend(batch)
                if (step + 1) % accumulation == 0 or step + 1 == len(loader):
                    trainer.state.global_step += 1
                    stop = trainer.state.global_step >= max_steps
                    save = args.save_strategy == "steps" and trainer.state.global_step % args.save_steps == 0
                    _step_ends(trainer, found, save, "on_step_end")
            if stop:
                break
        assert stop or next(batches, None) is None, "more than an epoch"
        # transformers' DefaultFlowCallback.
        stop = _step_ends(trainer, found, args.save_strategy == "epoch", "on_epoch_end") or stop
        if stop or step < 0:
            break
    found.ended = True
    return found


def _step_ends(trainer: Any, found: Trained, save: bool, event: str) -> bool:
    control = _call(trainer, event, should_save=save)
    if control.should_save:
        if trainer.state.global_step not in found.saved:
            found.saved.append(trainer.state.global_step)
        trainer._save_checkpoint(None, None)
    return bool(control.should_training_stop)


def _call(trainer: Any, event: str, should_save: bool = False) -> Any:
    control = SimpleNamespace(should_save=should_save, should_evaluate=False, should_training_stop=False)
    for callback in trainer.callbacks:
        getattr(callback, event)(trainer.args, trainer.state, control)
    return control


def _hugging_face(rank: int, size: int) -> ModuleType:
    """Returns `swift.trainers.mixin`, extended: what of it makes the loader."""
    real = load("dataloader/shard.py")
    skipping = importlib.import_module("accelerate.data_loader").SkipBatchSampler
    module = ModuleType("swift.trainers.mixin")
    placed = type("BatchSamplerShard", (real.BatchSamplerShard,), {"rank": rank, "world_size": size})

    class DataLoaderMixin:
        def get_train_dataloader(self: Any, skip_batches: int = 0) -> Any:
            names = vars(module)
            own: dict[str, Any] = {"batch_size": self.batch_size, "shuffle": True, "drop_last": False, "data_seed": 42}
            if self.args.group_by_length:
                own |= {"group_by_length": True, "lengths": self.train_dataset["lengths"]}
            sampler = names["BatchSamplerShard"](len(self.train_dataset), **own)
            if skip_batches:
                sampler = skipping(sampler, skip_batches=skip_batches)
            return names["DataLoaderShard"](
                self.train_dataset, device=None, batch_sampler=sampler, collate_fn=list, num_workers=0
            )

    class SwiftMixin(DataLoaderMixin):
        def train(self: Any) -> None: ...

        def _save_checkpoint(self: Any, *rest: Any) -> None:
            Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "trainer_state.json").touch()

    vars(module).update(BatchSamplerShard=placed, DataLoaderShard=real.DataLoaderShard)
    vars(module).update(DataLoaderMixin=DataLoaderMixin, SwiftMixin=SwiftMixin)
    trainers.extend(module)
    return module


def train_megatron(plan: RunPlan, args: Any, kill: int | None) -> Trained:
    module, found = _megatron(), Trained()
    trainer = module.BaseMegatronTrainer()
    dataset, rank = resumed(plan), plan.rank
    own = SimpleNamespace(**{**vars(args), "async_save": False})
    step_batch = own.micro_batch_size * rank.dp_size
    if own.num_train_epochs is not None:
        # init_iters
        own.train_iters = len(dataset) // step_batch * step_batch * own.num_train_epochs // own.global_batch_size
    done = (0, 0) if plan.saved is None else (plan.saved.step, plan.saved.consumed)
    trainer.args, trainer.rank, trainer.callbacks, trainer.found, trainer.kill = own, rank, [], found, kill
    trainer.state = SimpleNamespace(
        iteration=done[0], consumed_train_samples=done[1], max_steps=own.train_iters, last_model_checkpoint=None
    )
    trainer.train(dataset, None)
    found.ended = found.ended or kill is None
    return found


def _megatron() -> ModuleType:
    """Returns `swift.megatron.trainers.base`, extended."""
    real = load("megatron/trainers/batch_sampler.py")
    module = ModuleType("swift.megatron.trainers.base")

    class BaseMegatronTrainer:
        def _prepare_dataloader(self: Any, train_dataset: Any, val_dataset: Any = None) -> Any:
            args = self.args
            sampler = real.MegatronPretrainingRandomSampler(
                train_dataset,
                total_samples=len(train_dataset),
                consumed_samples=self.state.consumed_train_samples,
                micro_batch_size=args.micro_batch_size,
                data_parallel_rank=self.rank.dp_rank,
                data_parallel_size=self.rank.dp_size,
                data_sharding=args.data_sharding,
                shuffle=args.train_dataloader_shuffle,
                group_by_length=args.group_by_length,
                seed=args.data_seed,
            )
            # cyclic_iter: the sampler begins another epoch each time that it is asked.
            return (train_dataset.__getitems__(batch) for batches in itertools.repeat(sampler) for batch in batches)

        def train(self: Any, train_dataset: Any, val_dataset: Any) -> None:
            self.call_event("on_train_begin")
            batches: Iterator[list[int]] = self._prepare_dataloader(train_dataset)
            args, state = self.args, self.state
            per_step = args.global_batch_size // (args.micro_batch_size * self.rank.dp_size)
            while state.iteration < args.train_iters:
                if state.iteration == self.kill:
                    return
                self.call_event("on_step_begin")
                self.found.steps[state.iteration] = [i for _ in range(per_step) for i in next(batches)]
                state.iteration += 1
                state.consumed_train_samples += args.global_batch_size
                self.call_event("on_step_end")
                if state.iteration % args.save_steps == 0:
                    self.save_checkpoint()
            self.found.ended = True

        def save_checkpoint(self: Any) -> None:
            self.found.saved.append(self.state.iteration)
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.iteration}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "latest_checkpointed_iteration.txt").write_text(str(self.state.iteration))

        def call_event(self: Any, event: str, **options: Any) -> None:
            for callback in self.callbacks:
                getattr(callback, event)(**options)

    names = ("should_disable_forward_pre_hook", "disable_forward_pre_hook", "maybe_finalize_async_save")
    vars(module).update({name: lambda *rest, **options: False for name in names})
    vars(module).update(BaseMegatronTrainer=BaseMegatronTrainer)
    vars(module).update(MegatronPretrainingRandomSampler=real.MegatronPretrainingRandomSampler)
    trainers.extend(module)
    return module
