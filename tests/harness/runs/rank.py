"""What a rank of a training job does, as a user's loop is to: save the state with what was trained, then the cursor."""

import os
import socket
from collections.abc import Iterator
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
from tests.harness.runs.kills import PRODUCER, Board, count_calls
from tests.harness.runs.plan import Kill, LifePlan, RunPlan

Data: TypeAlias = LazyShardedDataset | BlendedDataset
Iterable: TypeAlias = LazyShardedStream[LazyShardedDataset] | LazyShardedStream[BlendedDataset]

CONSUMER: Final = "train"
MAX_WAIT_S: Final = 20.0  # Longer than a producer may take, shorter than the harness waits: this tells what is missing
_write = os.write  # Not counted: what was trained is written down for the harness


class Torn(AssertionError):
    """A row is not what was produced."""


def row(sample: int) -> dict[str, Any]:
    return {"id": sample, "text": f"row {sample} " * (1 + sample % 3)}


@dataclass(frozen=True, slots=True)
class Rank:
    run: RunPlan
    life: LifePlan
    number: int  # of the life
    rank: int  # which one
    steps: int  # steps that are left to train
    streams: tuple[Path, ...]  # the directory of each stream
    records: Path  # folder in which it writes down what it has read
    checkpoints: Path  # folder of the checkpoints
    origin: Checkpoint | None  # the checkpoint that it continues from; None for a new run
    board: Board  # of the run

    def train(self, lockstep: socket.socket) -> None:
        """Trains until the epoch has ended; tells of each step, and continues when all ranks have come to its end."""
        count_calls(self.board, self.rank)
        dataset, samples = self._start()
        if self.life.early and self.origin is not None:
            self._commit(dataset, 0, dataset.consumed)
        consumed = before = dataset.consumed
        fd = os.open(self.records / f"rank-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        batches = batches_of(self.life, dataset, samples)
        step = 0
        while True:
            self.board.enter(self.rank, step, "before a step")
            if kill := self._kill("publish", step):
                self._kill_producer(kill)
            if (kill := self._kill("step", step)) and kill.call == 1:
                self.board.kill()
            if kill := self._kill("read", step):
                self.board.arm(self.rank, "reads", kill.call)
            self.board.enter(self.rank, step, "reading")
            batch = next(batches, None)
            if batch is None:
                break
            _write(fd, f"{step} {' '.join(str(checked(found)) for found in batch)}\n".encode())
            self.board.enter(self.rank, step, "waiting for the other ranks")
            lockstep.send(b"trained")
            assert lockstep.recv(16) == b"continue"
            if (kill := self._kill("step", step)) and kill.call == 2:
                self.board.kill()
            step += 1
            consumed = before + step * self.life.dp * self.life.batch_size
            if step % self.life.every == 0:
                self._save(dataset, samples, step, consumed)
        self._save(dataset, samples, step, consumed)
        if self.life.kill is not None and self.rank == 0:
            self.board.late = 1
            self.board.kill()
        self.board.enter(self.rank, step, "done")
        lockstep.send(f"ended {step}".encode())
        assert lockstep.recv(16) == b"continue"

    def _kill(self, where: str, step: int, *, later: bool = False) -> Kill | None:
        kill = self.life.kill
        if kill is None or kill.where != where or kill.rank != self.rank:
            return None
        at = int(kill.share * self.steps)
        return kill if step == at or (later and step > at) else None

    def _start(self) -> tuple[Data, Iterable | None]:
        self.board.enter(self.rank, 0, "starting")
        kill = self._kill("start", 1 << 30, later=True)
        with self.board.armed(self.rank, "reads", kill.call if kill else 0):
            dataset = self._open_blend() if self.run.others else self._open()
            if self.origin is not None:
                dataset.load_state_dict(state_of(self.origin, self.rank))
            samples: Iterable | None = None
            if isinstance(dataset, BlendedDataset):
                samples = LazyShardedStream(dataset) if self.life.iterable else None
            elif self.life.iterable and self.run.indices is None:
                samples = LazyShardedIterable(
                    dataset
                )  # With indices beyond the epoch it would continue with the next one
            if not isinstance(samples, LazyShardedStream) or isinstance(samples, LazyShardedIterable):
                assert dataset.rank_indices is not None
        return dataset, samples

    def _open(self) -> LazyShardedDataset:
        given = grouped(layout=self.run.layout, **self._options(self.run))
        batch_size, indices = self.life.batch_size, self.run.indices
        return LazyShardedDataset(self.streams[0], batch_size=batch_size, num_samples=indices, **given)

    def _open_blend(self) -> BlendedDataset:
        pairs = [
            (LazyShardedDataset(directory, **grouped(self._options(stream))), weight)
            for directory, stream, weight in zip(self.streams, self.run.streams, self.life.weights, strict=True)
            if weight
        ]
        indices = None if self.life.iterable else self.run.indices
        order = Order(layout=self.run.layout)
        return BlendedDataset(pairs, batch_size=self.life.batch_size, order=order, num_samples=indices)

    def _options(self, stream: RunPlan) -> dict[str, Any]:
        return {
            **{"dp_rank": self.rank, "dp_size": self.life.dp, "unit": stream.unit, "shuffle_window": stream.window},
            **{"seed": self.run.seed, "max_total_samples": stream.limit, "max_wait": MAX_WAIT_S},
            **{"bad_rows": BadRows("raise"), "consumer": CONSUMER},
        }

    def _save(self, dataset: Data, samples: Iterable | None, step: int, consumed: int) -> None:
        counts = samples is not None and not self.life.workers  # What workers hand out, the iterable cannot count
        state = samples.state_dict() if samples is not None and counts else dataset.state_dict(consumed)
        if self.rank:
            return
        kill = self._kill("checkpoint", step, later=True)
        self.board.enter(self.rank, step, "saving")
        with self.board.armed(self.rank, "changes", kill.call if kill else 0):
            run_checkpoints.write(self.checkpoints, Checkpoint(consumed, self.number, step, [state]))
            # Before the commit: what it does not name, nobody may continue from.
            run_checkpoints.remove(self.checkpoints, run_checkpoints.found(self.checkpoints)[self.run.keep :])
        self._commit(dataset, step, consumed)

    def _commit(self, dataset: Data, step: int, consumed: int) -> None:
        kill = self._kill("commit", step, later=True)
        self.board.enter(self.rank, step, "committing")
        kept = run_checkpoints.found(self.checkpoints)
        with self.board.armed(self.rank, "changes", kill.call if kill else 0):
            commit(dataset, consumed, [older.states[0] for older in kept if older.consumed < consumed])

    def _kill_producer(self, kill: Kill) -> None:
        there = [number for number, producing in enumerate(self.board.producing) if producing]
        if not there:
            self.board.kill()
        self.board.arm(PRODUCER + there[0], "changes", kill.call)


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
        if not dataset.in_epoch(batch[0]):  # Before it is read: rows of the next epoch may be gone
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
    """Tells the producer what is in durable checkpoints, and what else somebody may continue from."""
    dataset.commit(consumed, last_epoch=True, keep=older)
