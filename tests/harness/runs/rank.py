"""What one rank of a training job does: reads its samples in order, writes down what it has read, keeps checkpoints. It
is what a user's loop is to be: the state is saved with what was trained, the cursor follows the checkpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from torch.utils.data import DataLoader

from lazyshard import BadRows, Order
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.iterable import LazyShardedIterable, LazyShardedStream
from tests.data.options import grouped
from tests.harness.runs import checkpoints as run_checkpoints
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.runs.kills import PRODUCER, Board, Phase
from tests.harness.runs.plan import Kill, LifePlan, RunPlan

Data: TypeAlias = LazyShardedDataset | BlendedDataset
Iterable: TypeAlias = LazyShardedStream[LazyShardedDataset] | LazyShardedStream[BlendedDataset]
CONSUMER: Final = "train"
# Longer than any producer here may take, shorter than the harness waits: it is this that tells what is missing
MAX_WAIT_S: Final = 20.0
_write = os.write  # Not counted: what was trained is written down for the harness


class Torn(AssertionError):
    """A row is not what was produced."""


def row(sample: int) -> dict[str, Any]:
    return {"id": sample, "text": f"row {sample} " * (1 + sample % 3)}


@dataclass(frozen=True, slots=True)
class Rank:
    run: RunPlan  # the run
    life: LifePlan  # the life
    number: int  # of the life
    rank: int  # which one
    steps: int  # steps that are left to train
    streams: tuple[Path, ...]  # the directory of each stream
    records: Path  # folder in which it writes down what it has read
    checkpoints: Path  # folder of the checkpoints
    origin: Checkpoint | None  # the checkpoint that it goes on from; None for a new run
    board: Board  # of the run

    def train(self, lockstep: socket.socket) -> None:
        """Trains until the epoch has ended; tells of each step, and goes on when all ranks have come to its end."""
        dataset, samples = self._start()
        if self.life.early and self.origin is not None:
            self._commit(dataset, 0, dataset.consumed)
        batch_size, dp = self.life.batch_size, self.life.dp
        consumed = before = dataset.consumed
        fd = os.open(self.records / f"rank-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        batches = batches_of(self.life, dataset, samples)
        step = 0
        while True:
            self._enter(step, "before a step")
            self._kill_at(step, "publish", self._kill_producer)
            self._kill_at(step, "step", self.board.kill, call=1)
            self._kill_at(step, "read", self._kill_reading)
            self._enter(step, "reading")
            batch = next(batches, None)
            if batch is None:
                break
            _write(fd, f"{step} {' '.join(str(checked(found)) for found in batch)}\n".encode())
            self._enter(step, "waiting for the other ranks")
            lockstep.send(b"trained")
            assert lockstep.recv(16) == b"go on"
            step += 1
            consumed = before + step * dp * batch_size
            self._kill_at(step - 1, "step", self.board.kill, call=2)
            if step % self.life.every == 0:
                self._save(dataset, samples, step, consumed)
        self._save(dataset, samples, step, consumed)
        if self.life.kill is not None and self.rank == 0:
            self.board.kill_late()
        self._enter(step, "done")
        lockstep.send(f"ended {step}".encode())
        assert lockstep.recv(16) == b"go on"

    def _start(self) -> tuple[Data, Iterable | None]:
        """Returns the data set, and the iterable form of it that is to be read, None for none."""
        self._enter(0, "starting")
        kill = self._kill("start")
        with self.board.armed(self.rank, "reads", 0 if kill is None else kill.call):
            dataset = self._open_blend() if self.run.others else self._open()
            if self.origin is not None:
                dataset.load_state_dict(state_of(self.origin, self.rank))
            samples: Iterable | None = None
            if isinstance(dataset, BlendedDataset):
                samples = LazyShardedStream(dataset) if self.life.iterable else None
            elif self.life.iterable and self.run.indices is None:
                # With indices beyond the epoch it would go on with the next one.
                samples = LazyShardedIterable(dataset)
            if not isinstance(samples, LazyShardedStream) or isinstance(samples, LazyShardedIterable):
                assert dataset.rank_indices is not None
        return dataset, samples

    def _open(self) -> LazyShardedDataset:
        return LazyShardedDataset(
            self.streams[0],
            batch_size=self.life.batch_size,
            num_samples=self.run.indices,
            **grouped(layout=self.run.layout, **self._options(self.run)),
        )

    def _open_blend(self) -> BlendedDataset:
        pairs = [
            (LazyShardedDataset(directory, **grouped(self._options(stream))), weight)
            for directory, stream, weight in zip(self.streams, self.run.streams, self.life.weights, strict=True)
            if weight
        ]
        indices = None if self.life.iterable else self.run.indices
        return BlendedDataset(
            pairs, batch_size=self.life.batch_size, order=Order(layout=self.run.layout), num_samples=indices
        )

    def _options(self, stream: RunPlan) -> dict[str, Any]:
        return {
            "dp_rank": self.rank,
            "dp_size": self.life.dp,
            "unit": stream.unit,
            "shuffle_window": stream.window,
            "seed": self.run.seed,
            "max_total_samples": stream.limit,
            "max_wait": MAX_WAIT_S,
            "bad_rows": BadRows("raise"),
            "consumer": CONSUMER,
        }

    def _save(self, dataset: Data, samples: Iterable | None, step: int, consumed: int) -> None:
        # What workers hand out, the iterable cannot count.
        counting = samples if not self.life.workers else None
        state = dataset.state_dict(consumed) if counting is None else counting.state_dict()
        if self.rank:
            return
        folder, kill = self.checkpoints, self._kill("checkpoint")
        due = kill is not None and step >= int(kill.share * self.steps)
        self._enter(step, "writing a checkpoint")
        with self.board.armed(self.rank, "changes", kill.call if due and kill is not None else 0):
            run_checkpoints.write(folder, Checkpoint(consumed, self.number, step, [state]))
            # Before the commit: what it does not name, nobody may go on from.
            run_checkpoints.remove(folder, run_checkpoints.found(folder)[self.run.keep :])
        self._commit(dataset, step, consumed)

    def _commit(self, dataset: Data, step: int, consumed: int) -> None:
        kill = self._kill("commit")
        due = kill is not None and step >= int(kill.share * self.steps)
        self._enter(step, "committing")
        kept = run_checkpoints.found(self.checkpoints)
        with self.board.armed(self.rank, "changes", kill.call if due and kill is not None else 0):
            commit(dataset, consumed, [older.states[0] for older in kept if older.consumed < consumed])

    def _enter(self, step: int, phase: Phase) -> None:
        self.board.enter(self.rank, step, phase)

    def _kill(self, where: str) -> Kill | None:
        kill = self.life.kill
        return kill if kill is not None and kill.where == where and kill.rank == self.rank else None

    def _kill_at(self, step: int, where: str, do: Callable[[], object], call: int | None = None) -> None:
        """Does something at the step for which a kill of this rank is planned."""
        kill = self.life.kill
        if (
            kill is not None
            and kill.where == where
            and kill.rank == self.rank
            and step == int(kill.share * self.steps)
            and call in (None, kill.call)
        ):
            do()

    def _kill_reading(self) -> None:
        assert self.life.kill is not None
        self.board.arm(self.rank, "reads", self.life.kill.call)

    def _kill_producer(self) -> None:
        assert self.life.kill is not None
        there = [number for number in range(len(self.streams)) if self.board.producing(number)]
        if not there:
            # The streams have ended.
            self.board.kill()
        self.board.arm(PRODUCER + there[0], "changes", self.life.kill.call)


def batches_of(life: LifePlan, dataset: Data, samples: Iterable | None) -> Iterator[list[dict[str, Any]]]:
    """Yields this rank's batches until the epoch has ended, from the iterable form where that is given."""
    size = life.batch_size
    options: dict[str, Any] = {"batch_size": size, "num_workers": life.workers, "collate_fn": list}
    if samples is not None:
        yield from DataLoader(samples, **options)
        return
    indices = dataset.rank_indices
    loader = iter(DataLoader(dataset, sampler=indices, **options)) if life.workers else None
    for first in range(0, len(indices), size):
        batch = list(indices[first : first + size])
        # Before it is read: rows of the next epoch may be gone.
        if not dataset.in_epoch(batch[0]):
            return
        yield dataset.__getitems__(batch) if loader is None else next(loader)


def checked(found: dict[str, Any]) -> int:
    sample = found.get("id")
    if type(sample) is not int or found != row(sample):
        raise Torn(f"read {found}")
    return sample


# What a mutation replaces, where it is not the package's own code.


def state_of(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Returns the state in a checkpoint: one for all ranks, however many there are now."""
    return checkpoint.states[0]


def commit(dataset: Data, consumed: int, older: list[dict[str, Any]]) -> None:
    """Tells the producer what is in durable checkpoints, and what else somebody may go on from."""
    dataset.commit(consumed, last_epoch=True, keep=older)
