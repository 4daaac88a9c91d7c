"""One rank of `scripts/bench_wait`: waits for a live stream, or reads one that has ended.

    python scripts/benchmarks/bench_wait_process.py WHAT SETTINGS

WHAT is latency, idle or memory, SETTINGS their JSON. Each line that it prints is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset
from lazyshard.storage.watch import Waker

MARKS: Final = 5
"""Places of a pass at which memory is looked at; the highest counts."""


def say(**found: Any) -> None:
    """Prints one line."""
    print(json.dumps(found), flush=True)


def latency(directory: str, rank: int, ranks: int, per_chunk: int, stripes: int, woken: bool) -> None:
    """Says that it is there, then of the first sample of each own chunk when it came out, and which it was.

    Args:
        directory: the stream.
        rank: which rank this is.
        ranks: of how many.
        per_chunk: samples of each chunk.
        stripes: how many chunks each rank has.
        woken: let the local filesystem wake it; otherwise it polls, as it must where another machine writes.
    """
    Waker._refused = not woken
    dataset = LazyShardedDataset(
        directory, dp_rank=rank, dp_size=ranks, max_total_samples=stripes * ranks * per_chunk, max_wait=600
    )
    indices = dataset.rank_indices
    say(ready=True)
    for stripe in range(stripes):
        row = dataset[indices[stripe * per_chunk]]
        say(at=time.monotonic(), id=row["id"])


def idle(directory: str, rank: int, ranks: int, published: int, settle_s: float, seconds: float, woken: bool) -> None:
    """Reads the first of `published` samples, waits for what is never published, and tells what that takes.

    Args:
        directory: the stream.
        rank: which rank this is.
        ranks: of how many.
        published: samples in the stream, the same number for each rank.
        settle_s: seconds of the wait that are not measured.
        seconds: how long to measure.
        woken: let the local filesystem wake it.
    """
    Waker._refused = not woken
    dataset = LazyShardedDataset(
        directory, dp_rank=rank, dp_size=ranks, max_total_samples=2 * published, max_wait=10 * (settle_s + seconds)
    )
    dataset[dataset.rank_indices[0]]

    def measure() -> None:
        time.sleep(settle_s)
        processor, clock, began = time.process_time(), time.monotonic(), time.time()
        time.sleep(seconds)
        took = time.process_time() - processor
        say(share=took / (time.monotonic() - clock), began=began, stopped=time.time())
        os._exit(0)

    threading.Thread(target=measure, daemon=True).start()
    dataset[dataset.rank_indices[published // ranks]]
    raise AssertionError("what was never published has come")


def length(row: dict[str, Any]) -> tuple[int, int]:
    """Returns little of a row, so that what passes from worker to rank is no part of the figure."""
    return row["id"], len(row["text"])


def memory_mb(pid: int) -> tuple[float, float]:
    """Returns MB of a process: its proportional share of all, and of that what is anonymous."""
    found = {}
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            name, *rest = line.split()
            if name in ("Pss:", "Pss_Anon:"):
                found[name] = int(rest[0]) * 1024 / 1e6
    return found["Pss:"], found["Pss_Anon:"]


def highest(marks: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns the highest of each of the two."""
    first, second = zip(*marks, strict=True)
    return max(first), max(second)


def memory(directory: str, batch: int, workers: int, text: int) -> None:
    """Reads a stream once, checks that each sample came once, and tells the highest memory of rank and workers."""
    dataset = LazyShardedDataset(directory, length, dp_rank=0, dp_size=1, batch_size=batch)
    loader = DataLoader(
        dataset, sampler=dataset.rank_indices, batch_size=batch, num_workers=workers, collate_fn=lambda rows: rows
    )
    seen: list[tuple[int, int]] = []
    ranks: list[tuple[float, float]] = []
    children: list[tuple[float, float]] = []
    every = max(1, len(loader) // MARKS)
    for number, rows in enumerate(loader):
        seen += rows
        # The last batches of a pass may find that a worker has gone.
        if number % every == every // 2:
            ranks.append(memory_mb(os.getpid()))
            children += [memory_mb(child.pid) for child in multiprocessing.active_children() if child.pid]
    if sorted(seen) != [(number, text) for number in range(len(dataset))]:
        raise AssertionError(f"{directory}: {len(seen)} samples of {len(dataset)} came, or others")
    say(rank=highest(ranks), worker=highest(children), workers=len(children) // len(ranks))


def main() -> int:
    """Does what the first argument names."""
    works: dict[str, Callable[..., None]] = {"latency": latency, "idle": idle, "memory": memory}
    works[sys.argv[1]](**json.loads(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
