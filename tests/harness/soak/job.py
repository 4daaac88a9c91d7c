"""The producer of a soak, and one life of its training job."""

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import torch
from torch.utils.data import DataLoader

from lazyshard import BadRows, LazyShardedDataset, Order
from tests.harness.processes.environment import environment
from tests.harness.processes.nursery import GO_ON, Ranks, forked, kill, last_words, reap
from tests.harness.runs import checkpoints as run_checkpoints
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.runs.rank import Torn
from tests.harness.soak import rows as soak_rows
from tests.harness.soak.rows import row
from tests.harness.soak.watch import children
from tests.harness.tally import RunViolation

CONSUMER: Final = "soak"
ENDLESS: Final = 10**12  # More samples than any soak has: the stream ends before
SAVE: Final = b"save"  # Continue, after a checkpoint
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
    origin: Checkpoint | None,  # the checkpoint to continue from; None for a new run
    lockstep: socket.socket,
) -> None:
    """Trains until the epoch has ended; tells the other end, the supervisor's, of each step, and waits for its word."""
    order = Order(unit=rules.unit, shuffle_window=rules.window, seed=rules.seed)
    ranks = {"dp_rank": rank, "dp_size": shape.dp, "batch_size": shape.batch_size, "max_total_samples": ENDLESS}
    rest: dict[str, Any] = {**ranks, "max_wait": 60.0, "bad_rows": BadRows("raise"), "consumer": CONSUMER}
    dataset = LazyShardedDataset(stream, order=order, **rest)
    if origin is not None:
        dataset.load_state_dict(origin.states[0])
    consumed = dataset.consumed
    due = not commit(dataset, consumed, older_states(folder, consumed))
    saved = consumed
    indices = dataset.rank_indices
    sizes: dict[str, Any] = {"batch_size": shape.batch_size, "num_workers": shape.workers}
    batches = iter(DataLoader(dataset, sampler=indices, collate_fn=checked, **sizes))
    for step, index in enumerate(indices[:: shape.batch_size], 1):  # Behind the last step there may be no index
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
    del batches  # So that the workers end now, and not when they find that their parent has gone
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


FULL: Final = 7  # The exit code of a run that the filesystem has refused


class Producer:
    """Starts and reaps it. `options`: of the command, besides source and stream. `stop`: asks the source to end."""

    def __init__(self, stream: Path, options: Sequence[str], said: Path, stop: Path) -> None:
        self.pid = 0  # of the process, 0 while there is none
        self.starts = self.fulls = 0  # how often it was started, and has ended since the disk was full
        self.ended = False  # whether the stream has ended
        self._stream, self._options, self._said, self._stop = stream, tuple(options), said, stop
        self._expected: set[int] = set()
        self._start_at = 0.0

    def start(self, more: Sequence[str] = ()) -> None:
        if self.pid or self.ended or time.monotonic() < self._start_at:
            return
        self._expected.clear()
        command = [sys.executable, "-m", "lazyshard_producer", "run", "--no-progress"]
        command += ["--source", soak_rows.SOURCE, "--out", str(self._stream), *self._options, *more]
        variables = environment() | {soak_rows.STOP: str(self._stop)}
        self._said.write_bytes(b"")  # Of all its lives the last words of one are enough
        self.pid = forked(lambda: os.execve(sys.executable, command, variables), self._said)
        self.starts += 1

    def signal(self, number: signal.Signals, pause_s: float = 0.0) -> None:
        """Sends it a signal; one by which it ends is expected from now on, and it is started again after a pause."""
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._expected |= {-signal.SIGKILL} if number == signal.SIGKILL else {0, -signal.SIGTERM}
            self._start_at = time.monotonic() + pause_s

    def check(self, *, full: bool) -> bool:
        """Reaps it if it has ended; returns whether it has just now. `full`: whether the disk is, or was just now."""
        found, status = os.waitpid(self.pid, os.WNOHANG) if self.pid else (0, 0)
        if not found:
            return False
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and (self._stream / "stream.end").exists():
            self.ended = True
        elif code == FULL and full:
            self.fulls += 1
            self._start_at = max(self._start_at, time.monotonic() + 0.5)
        elif code not in self._expected:
            raise RunViolation("producer", f"it ended by itself with {code}: {last_words(self._said)}")
        return True

    def close(self) -> None:
        if self.pid:
            kill(self.pid)
            reap(self.pid, "the producer")
            self.pid = 0

    def said(self) -> str:
        return last_words(self._said)


Step = Sequence[list[int]]  # The samples of each rank

_KINDS: Final = {
    **{"ChunkRetired": "gone", "StateMismatch": "gone", "WaitTimeout": "hang"},
    **{"ChunkCorrupt": "torn", "RowInvalid": "torn", "Torn": "torn"},
}


class Job:  # The ranks of one life, on from `origin`. Its supervisor sees all that they read: nothing has to be kept.
    def __init__(
        self, shape: Shape, rules: Rules, stream: Path, folder: Path, origin: Checkpoint | None, said: Path
    ) -> None:
        self.shape = shape
        self.steps = 0  # steps that all ranks have told
        self.ended = False  # whether the epoch has ended, and all ranks with it
        self.doomed = False  # whether some of it was sent a signal by which it ends
        self._ranks = Ranks(said)
        for rank in range(shape.dp):
            self._ranks.start(rank, partial(train, rules, shape, rank, stream, folder, origin), tell_error)
        self._ranks.tell()

    @property
    def pids(self) -> list[int]:
        return list(self._ranks.pids.values())

    @property
    def group(self) -> int:
        return self._ranks.group

    def processes(self) -> list[tuple[int, str]]:
        ranks = [(pid, "rank 0" if rank == 0 else "rank") for rank, pid in self._ranks.pids.items()]
        return ranks + [(child, "worker") for pid in self.pids for child in children(pid)]

    def serve(self, seconds: float, on_step: Callable[[Step], bool]) -> bool:
        """Hears the ranks for so long; returns False once one is gone. `on_step`: whether to save after it."""
        for key, _ in self._ranks.selector.select(seconds):
            said = self._ranks.heard(key.data)
            pid, gone = self._ranks.pids[key.data], os.WEXITED | os.WNOWAIT | os.WNOHANG
            if said.startswith(FAILED) or (not said and os.waitid(os.P_PID, pid, gone) is not None):
                self._check_doomed(key.data, said)
                return False
            if said:
                self._ranks.told[key.data] = said
        if len(self._ranks.told) == self.shape.dp:
            self._go_on(on_step)
        return True

    def _go_on(self, on_step: Callable[[Step], bool]) -> None:
        told = [self._ranks.told[rank] for rank in range(self.shape.dp)]
        lengths = set(map(len, told))
        if len(lengths) > 1:
            raise RunViolation("order", f"after {self.steps} steps ranks are not in lockstep: {lengths} bytes told")
        self.ended = told[0] == END
        self.steps += not self.ended
        saves = not self.ended and on_step([np.frombuffer(said[1:], dtype=np.int64).tolist() for said in told])
        self._ranks.tell(SAVE if saves else GO_ON)

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        self.doomed |= number in (signal.SIGKILL, signal.SIGTERM)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        for rank, pid in list(self._ranks.pids.items()):
            if not self.ended:
                kill(pid)
            status = self._ranks.reap(rank)
            if self.ended and status:
                raise RunViolation("error", f"rank {rank} ended with {status}: {self._ranks.said(rank)}")
        self._ranks.close()

    def waiting(self) -> list[int]:
        return sorted(set(range(self.shape.dp)) - set(self._ranks.told))

    def _check_doomed(self, rank: int, said: bytes) -> None:
        if self.doomed:
            return
        if not said:
            raise RunViolation("error", f"rank {rank} is gone by itself: {self._ranks.said(rank)}")
        error = orjson.loads(said[1:])
        where = f"after {self.steps} steps of life {self.shape.number} with {self.shape.dp} ranks"
        kind = "full" if error["full"] else _KINDS.get(error["kind"], "error")
        raise RunViolation(kind, f"rank {rank} {where}: {error['kind']}: {error['text']}")
