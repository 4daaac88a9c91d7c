"""Trains one number with Hugging Face's Trainer or accelerate, in forks of a process that has imported transformers."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from lazyshard import LazyShardedDataset, Order

BATCH = 2
ACCUMULATION = 2


class OneNumber(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.ones(1))
        self.seen: list[list[int]] = []

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(ids.tolist())
        return {"loss": (self.number * ids).mean()}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"ids": torch.tensor([row["id"] for row in rows])}


def open_stream(run: dict[str, Any]) -> LazyShardedDataset:
    order = Order(shuffle_window=1, micro_batches_per_step=ACCUMULATION)
    rank = {"dp_rank": run["rank"], "dp_size": run["ranks"]}
    return LazyShardedDataset(run["stream"], **rank, batch_size=BATCH, order=order, num_samples=run["rows"])


class StreamTrainer(Trainer):  # type: ignore[misc]
    """Trainer with an unprepared loader, which already reads only the samples of this rank."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        dataset = self.train_dataset
        return DataLoader(dataset, sampler=dataset.rank_indices, batch_size=BATCH, collate_fn=self.data_collator)


class KeepState(TrainerCallback):  # type: ignore[misc]
    """Saves the state of the data set in each checkpoint."""

    def __init__(self, dataset: LazyShardedDataset, samples_per_step: int) -> None:
        self.dataset, self.samples_per_step = dataset, samples_per_step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = state.global_step, self.dataset.consumed

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, consumed = self.begun
        consumed += (state.global_step - step) * self.samples_per_step
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "data.json"
            path.write_text(json.dumps(self.dataset.state_dict(consumed)))


def with_trainer(run: dict[str, Any]) -> list[list[int]]:
    dataset, model = open_stream(run), OneNumber()
    skips = run["with"] == "trainer-skips"
    if run["from"] and not skips:
        dataset.load_state_dict(json.loads((Path(run["from"]) / "data.json").read_text()))
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
    args = TrainingArguments(
        output_dir=run["folder"],
        max_steps=run["stop"],
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        save_strategy="steps",
        save_steps=run["save"],
        ignore_data_skip=not skips,
        **quiet,
    )
    callbacks = [KeepState(dataset, BATCH * ACCUMULATION * run["ranks"])]
    trainer = StreamTrainer(model, args, train_dataset=dataset, data_collator=collate, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=run["from"])
    return model.seen


def with_accelerate(run: dict[str, Any]) -> list[list[int]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    dataset, model = open_stream(run), OneNumber()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    batches = dataset.batches(collate_fn=collate)
    accelerator.register_for_checkpointing(batches)
    if run["from"]:
        accelerator.load_state(run["from"])
    loader: Any = batches
    if run["with"] == "accelerate-skips":
        # Its own way, in which the loader is its own too; this process is all there is, for it.
        whole = open_stream(run)
        alone: Any = DataLoader(whole, sampler=whole.rank_indices, batch_size=BATCH, collate_fn=collate)
        loader = skip_first_batches(accelerator.prepare(alone), batches.consumed // (BATCH * run["ranks"]))
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        step, within = divmod(number, ACCUMULATION)
        step += run["begin"]
        if not within and step == run["save"]:
            accelerator.save_state(str(Path(run["folder"]) / f"checkpoint-{step}"))
        if not within and step == run["stop"]:
            break
    return model.seen


def train(runs: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Trains runs that follow each other, and returns the ids of the rows of each step of each of them.

    A run: `with` ("trainer", "trainer-skips", "accelerate" or "accelerate-skips"), `stream`, `rank` and `ranks`,
    `folder` of the checkpoints, `from` (the checkpoint to continue from, or None) and `begin` (its step), `rows` (to
    train in all), `save` and `stop` (after how many steps it saves, and is over).
    """
    seen = []
    for run in runs:
        batches = (with_trainer if run["with"].startswith("trainer") else with_accelerate)(run)
        seen.append([list(chain(*batches[at : at + ACCUMULATION])) for at in range(0, len(batches), ACCUMULATION)])
    return seen
