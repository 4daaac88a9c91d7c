"""The demo's training job: each process of `torchrun` trains on its own chunks of a growing stream.

    torchrun --standalone --nproc_per_node 2 scripts/demonstration/demo_train.py STREAM FOLDER

lazyshard does not communicate between ranks; they only exchange DistributedDataParallel's gradients and the loss.
Rank r writes FOLDER/rank_r.jsonl (`scripts/demonstration/demo_steps.py`) and its output to FOLDER/rank_r.log.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Final, TextIO

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lazyshard import BadRows, LazyShardedDataset
from scripts.demonstration.demo_model import ByteModel, collate, encode
from scripts.demonstration.demo_settings import BATCH, WORKERS
from scripts.demonstration.demo_steps import Finish, Step, finish_line, step_line

MOST_SAMPLES: Final = 1_000_000
"""Upper limit of samples, as the length of a stream that does not exist yet is unknown."""

PATIENCE_S: Final = 120.0
"""Longest wait for the producer or another rank."""


def train(stream: Path, record: TextIO) -> Finish:
    """Trains on this rank's part of the stream until its end, and writes a line per step."""
    dataset = LazyShardedDataset(
        stream, encode, batch_size=BATCH, max_total_samples=MOST_SAMPLES, max_wait=PATIENCE_S, bad_rows=BadRows("raise")
    )
    indices = dataset.rank_indices
    loader = DataLoader(dataset, sampler=indices, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate)
    batches = iter(loader)
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for done in range(0, len(indices), BATCH):
        started = time.monotonic()
        # Stop before a second epoch once the stream has ended. All ranks do so at the same step.
        if not dataset.in_epoch(indices[done]):
            break
        batch = next(batches)
        waited = time.monotonic() - started
        loss = model(batch.inputs, batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.SUM)
        value = mean.item() / torch.distributed.get_world_size()
        record.write(step_line(Step(batch.ids, value, waited, time.monotonic(), dataset.published().samples)))
    return Finish(dataset.leftover, time.monotonic())


def main() -> int:
    """Runs one rank and returns the exit code."""
    stream, folder = map(Path, sys.argv[1:])
    rank = os.environ["RANK"]
    with (folder / f"rank_{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    with (folder / f"rank_{rank}.jsonl").open("w", buffering=1) as record:
        record.write(finish_line(train(stream, record)))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
