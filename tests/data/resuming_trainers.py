"""Trains one number with Hugging Face's Trainer or accelerate, in forks of a process that has imported transformers."""

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

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
    return LazyShardedDataset(
        run["stream"], dp_rank=0, dp_size=run["ranks"], batch_size=BATCH, order=order, num_samples=run["rows"]
    )


class StreamTrainer(Trainer):  # type: ignore[misc]
    """Trainer with an unprepared loader, which already reads only the samples of this rank."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        dataset = self.train_dataset
        return DataLoader(dataset, sampler=dataset.rank_indices, batch_size=BATCH, collate_fn=self.data_collator)


def with_trainer(run: dict[str, Any]) -> list[list[int]]:
    model = OneNumber()
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
    args = TrainingArguments(
        output_dir=run["folder"],
        max_steps=run["stop"],
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        save_strategy="steps",
        save_steps=run["save"],
        **quiet,
    )
    trainer = StreamTrainer(model, args, train_dataset=open_stream(run), data_collator=collate)
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
    for number, batch in enumerate(batches, 1):
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

    A run: `way` ("trainer", which skips, or "accelerate"), `stream`, `ranks`, of which it is the first, `folder` of the
    checkpoints, `from` (the checkpoint to continue from, or None) and `begin` (its step), `rows` (to train in all),
    `save` and `stop` (after how many steps it saves, and is over).
    """
    seen = []
    for run in runs:
        batches = (with_trainer if run["way"] == "trainer" else with_accelerate)(run)
        seen.append([list(chain(*batches[at : at + ACCUMULATION])) for at in range(0, len(batches), ACCUMULATION)])
    return seen
