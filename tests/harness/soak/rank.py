"""What one rank of the soaked training job does: the loop of docs/resume.md, through a DataLoader with workers. A
commit that the disk had no room for is made up for at the next step."""

import errno
import socket
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import torch
from torch.utils.data import DataLoader

from lazyshard import BadRows, LazyShardedDataset, Order
from tests.harness.runs import checkpoints as run_checkpoints
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.runs.rank import Torn
from tests.harness.soak.rows import row

CONSUMER: Final = "soak"
ENDLESS: Final = 10**12  # More samples than any soak has: the stream ends before
SAVE: Final = b"save"  # Go on, after a checkpoint
STEP: Final = b"s"  # First byte of what a rank tells of a step; its samples follow, as int64
END: Final = b"."  # What it tells at the end of the epoch
FAILED: Final = b"!"  # First byte of what it tells of an error; JSON follows


class Rules(NamedTuple):
    per_chunk: int = 64  # rows of a chunk
    unit: int = 64  # samples that a rank gets in a row
    window: int = 2  # chunks that are shuffled together; 0 keeps the order
    seed: int = 0  # of the shuffle
    keep: int = 3  # checkpoints that are kept
    every: int = 20  # steps between two checkpoints
    max_wait_s: float = 60.0  # how long a reader waits at the most

    @property
    def window_samples(self) -> int:
        return -(-self.window * self.per_chunk // self.unit) * self.unit


class Shape(NamedTuple):
    number: int  # of the life
    dp: int  # ranks
    batch_size: int  # samples of a rank in a micro batch
    workers: int  # DataLoader workers of each rank


def train(
    rules: Rules,
    shape: Shape,
    rank: int,
    stream: Path,
    folder: Path,
    origin: Checkpoint | None,  # the checkpoint to go on from; None for a new run
    lockstep: socket.socket,
) -> None:
    """Trains until the epoch has ended; tells the other end, the supervisor's, of each step, and waits for its word."""
    order = Order(unit=rules.unit, shuffle_window=rules.window, seed=rules.seed)
    ranks = {"dp_rank": rank, "dp_size": shape.dp, "batch_size": shape.batch_size, "max_total_samples": ENDLESS}
    rest: dict[str, Any] = {**ranks, "max_wait": rules.max_wait_s, "bad_rows": BadRows("raise"), "consumer": CONSUMER}
    dataset = LazyShardedDataset(stream, order=order, **rest)
    if origin is not None:
        dataset.load_state_dict(origin.states[0])
    consumed = dataset.consumed
    due = not commit(dataset, consumed, older_states(folder, consumed))
    saved = consumed
    indices = dataset.rank_indices
    sizes: dict[str, Any] = {"batch_size": shape.batch_size, "num_workers": shape.workers}
    batches = iter(DataLoader(dataset, sampler=indices, collate_fn=checked, **sizes))
    # A life that begins when the stream has ended has no indices behind its last step.
    for step, index in enumerate(indices[:: shape.batch_size], 1):
        if not dataset.in_epoch(index):
            break
        lockstep.send(STEP + next(batches).numpy().tobytes())
        word = lockstep.recv(16)
        consumed += shape.dp * shape.batch_size
        if word == SAVE and rank == 0:
            run_checkpoints.write(folder, Checkpoint(consumed, shape.number, step, [dataset.state_dict(consumed)]))
            run_checkpoints.remove(folder, run_checkpoints.found(folder)[rules.keep :])
            saved, due = consumed, True
        if due and rank == 0:
            due = not commit(dataset, saved, older_states(folder, saved))
    # So that the workers end now, and not when they find that their parent has gone.
    del batches
    lockstep.send(END)
    lockstep.recv(16)


def checked(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Returns the numbers of a batch's samples, each row looked at: in the worker, and sent as a tensor."""
    for found in rows:
        sample = found.get("id")
        if type(sample) is not int or found != row(sample):
            raise Torn(f"read {found}")
    return torch.tensor([found["id"] for found in rows], dtype=torch.int64)


def older_states(folder: Path, consumed: int) -> list[dict[str, Any]]:
    return [kept.states[0] for kept in run_checkpoints.found(folder) if kept.consumed < consumed]


def commit(dataset: LazyShardedDataset, consumed: int, older: list[dict[str, Any]]) -> bool:
    """Tells the producer what is in durable checkpoints; returns False if the disk was full."""
    try:
        dataset.commit(consumed, last_epoch=True, keep=older)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def tell_error(error: BaseException) -> bytes:
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return FAILED + orjson.dumps({"kind": type(error).__name__, "text": f"{error}"[:20_000], "full": full})
