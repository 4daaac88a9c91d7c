"""One rank of a real run: it reads its batches, waits for the other ranks, and computes for as long as it is told."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, Final

from lazyshard import LazyShardedDataset, Order
from lazyshard.format.names import HEAD, RETIRED, SEAL_SUFFIX
from lazyshard.simulation.setting import Setting
from lazyshard.stream.waiting import Waker

CONSUMER: Final = "simulated"
LONGEST_S: Final = 120.0
"""No part of a real run takes as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    ids: list[int]  # of the rows, in order
    began: list[float]  # when each step began, by the monotonic clock, which all processes of a machine share
    waited: list[float]  # how many seconds it waited for rows before each step, by the reader's own word
    ended_s: float  # when the last step ended
    opens: dict[str, int]  # how often it opened files of each kind: head, chunk, retired


class Opens:
    """Counts the opens of this process, by kind of file, from when it is made to when the process ends."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            self.counts[kind(os.path.basename(os.fspath(arguments[0])))] += 1


def kind(name: str) -> str:
    if name in (HEAD, RETIRED):
        return name.partition(".")[0]
    return "chunk" if name.startswith("chunk_") and name.endswith((".jsonl", SEAL_SUFFIX)) else "other"


def rank_process(setting: Setting, directory: Path, rank: int, go: Event, barrier: Barrier, answer: Connection) -> None:
    """Does the work of one rank and answers with a `Trained`, or with the text of what went wrong."""
    try:
        answer.send(_train(setting, directory, rank, go, barrier))
    except BrokenBarrierError:
        answer.send(f"rank {rank}: another rank has failed, or did not come within {LONGEST_S:.0f} s")
    except BaseException as error:
        barrier.abort()
        answer.send(f"rank {rank}: {type(error).__name__}: {error}")


def _train(setting: Setting, directory: Path, rank: int, go: Event, barrier: Barrier) -> Trained:
    opens = Opens()
    if not setting.woken:
        # As on a network filesystem, where nobody hears of another machine's writes.
        Waker._refused = True
    if not go.wait(LONGEST_S):
        raise TimeoutError(f"no start within {LONGEST_S:.0f} s")
    dataset = LazyShardedDataset(
        directory,
        dp_rank=rank,
        dp_size=setting.ranks,
        batch_size=setting.batch,
        max_total_samples=setting.rows,
        order=Order(shuffle_window=setting.window, micro_batches_per_step=setting.micro_batches),
        consumer=CONSUMER,
        max_wait=LONGEST_S,
    )
    indices, every = dataset.rank_indices, setting.checkpoint_steps
    ids: list[int] = []
    began: list[float] = []
    waited: list[float] = []
    for step in range(setting.steps):
        before = dataset.reader.waited_s
        for first in range(step * setting.draws, (step + 1) * setting.draws, setting.batch):
            ids += [row["id"] for row in dataset.__getitems__(list(indices[first : first + setting.batch]))]
        waited.append(dataset.reader.waited_s - before)
        # Gradients are exchanged: no rank goes on before all have had their batch.
        barrier.wait(LONGEST_S)
        began.append(time.monotonic())
        time.sleep(max(0.0, began[-1] + setting.step_seconds - time.monotonic()))
        if every and (step + 1) % every == 0:
            dataset.commit((step + 1) * setting.step_rows, last_epoch=True)
    return Trained(ids=ids, began=began, waited=waited, ended_s=time.monotonic(), opens=dict(opens.counts))
