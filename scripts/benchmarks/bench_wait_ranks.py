"""The ranks of `scripts/bench wait`, a process each: they wait for a live stream, or read one that has ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset
from lazyshard.stream.waiting import Waker
from scripts.benchmarks.bench_harness import Failed, command, variables
from scripts.benchmarks.bench_process import memory_mb, say

LOOKS: Final = 5
"""Places of a pass at which memory is looked at; the highest counts."""


class Rank:
    """A process that calls a function of this module, and whose lines are read.

    Args:
        function: which one.
        settings: for that.
        home: a directory for what it leaves behind.
        before: a command that starts it.
    """

    def __init__(self, function: str, settings: dict[str, Any], home: Path, before: Sequence[str] = ()) -> None:
        self._function = function
        self._process = subprocess.Popen(
            [*before, *command(f"bench_wait_ranks.{function}", settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables(home, ours=True),
        )

    def line(self) -> dict[str, Any]:
        """Returns its next line of output.

        Raises:
            Failed: The process ended instead.
        """
        assert self._process.stdout is not None and self._process.stderr is not None
        for line in self._process.stdout:
            if line.strip():
                found: dict[str, Any] = json.loads(line)
                return found
        raise Failed(f"{self._function}: a rank has failed\n{self._process.stderr.read()}")

    def close(self) -> None:
        """Ends it, if it has not ended yet."""
        self._process.terminate()
        self._process.communicate()


@contextmanager
def closing_all(ranks: Iterable[Rank]) -> Iterator[None]:
    """Ends the processes, however it is left."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.close()


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
    total = stripes * ranks * per_chunk
    dataset = LazyShardedDataset(directory, dp_rank=rank, dp_size=ranks, max_total_samples=total, max_wait=600)
    indices = dataset.rank_indices
    say(ready=True)
    for stripe in range(stripes):
        row = dataset[indices[stripe * per_chunk]]
        say(at=time.monotonic(), id=row["id"])


def idle(directory: str, rank: int, ranks: int, published: int, settle_s: float, seconds: float) -> None:
    """Reads the first of `published` samples, waits for what is never published, and says what that takes.

    Args:
        directory: the stream.
        rank: which rank this is.
        ranks: of how many.
        published: samples in the stream, the same number for each rank.
        settle_s: seconds of the wait that are not measured.
        seconds: how long to measure.
    """
    patience = 10 * (settle_s + seconds)
    dataset = LazyShardedDataset(
        directory, dp_rank=rank, dp_size=ranks, max_total_samples=2 * published, max_wait=patience
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


def _little(row: dict[str, Any]) -> tuple[int, int]:
    """Returns a small part of a row, so that the transfer from worker to rank does not affect the figure."""
    return row["id"], len(row["text"])


def memory(directory: str, text: int, workers: int = 2, batch: int = 2) -> dict[str, float]:
    """Reads a stream once in a DataLoader, and returns the highest anonymous memory of this rank and of a worker."""
    dataset = LazyShardedDataset(directory, _little, dp_rank=0, dp_size=1, batch_size=batch)
    loader: DataLoader[Any] = DataLoader(
        dataset, sampler=dataset.rank_indices, batch_size=batch, num_workers=workers, collate_fn=list
    )
    seen: list[tuple[int, int]] = []
    rank = worker = 0.0
    every = max(1, len(loader) // LOOKS)
    for number, rows in enumerate(loader):
        seen += rows
        # The last batches of a pass may find that a worker has gone.
        if number % every == every // 2:
            rank = max(rank, memory_mb()["anonymous"])
            pids = [child.pid for child in multiprocessing.active_children() if child.pid]
            worker = max(worker, *(memory_mb(pid)["anonymous"] for pid in pids))
    if sorted(seen) != [(number, text) for number in range(len(dataset))]:
        raise AssertionError(f"{directory}: {len(seen)} samples of {len(dataset)} came, or others")
    return {"rank MB": rank, "worker MB": worker}
