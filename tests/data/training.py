"""A training process with DataLoader workers, to be killed, which prints their ids; spawned ones can import it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset


def tell(worker: int) -> None:
    # In one write: the other worker's goes into the same file.
    os.write(1, b"%d\n" % os.getpid())


def collate(rows: list[dict[str, Any]]) -> tuple[list[int], str]:
    # Far more than a pipe holds: what nobody takes must not keep a worker from leaving.
    return [row["id"] for row in rows], "x" * 300_000


def main() -> None:
    # `used`: what is done before; `size`: batches read ahead; `said`: the file of all that is said.
    directory, method, used, size, said = sys.argv[1:]
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=1, batch_size=2, num_samples=1000, max_wait=float("inf"))
    if used == "used":
        print(dataset[0]["id"], file=sys.stderr)
    if used.startswith("early"):
        training = os.getpid()

        def lag() -> None:
            # Continues only when the training process has been killed.
            tell(0)
            while os.getppid() == training:
                time.sleep(0.01)

        os.register_at_fork(after_in_child=lag)
    kind: Any = DataLoader
    if used == "early-stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    options = {"num_workers": 2, "multiprocessing_context": method, "prefetch_factor": int(size)}
    loader = kind(
        dataset, sampler=dataset.rank_indices, batch_size=2, collate_fn=collate, worker_init_fn=tell, **options
    )
    for ids, _ in loader:
        print(*ids, file=sys.stderr, flush=True)
        if size != "2":
            # Takes no more: what the workers have got ready stays in the pipe.
            time.sleep(600)
