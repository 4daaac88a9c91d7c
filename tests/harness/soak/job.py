"""The producer of a soak, and one life of its training job."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from tests.harness.processes.environment import environment
from tests.harness.processes.lockstep import GO_ON, Ranks
from tests.harness.processes.nursery import forked, kill, last_words, reap
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.soak import rank as soak_rank
from tests.harness.soak import rows as soak_rows
from tests.harness.soak.rank import END, FAILED, SAVE, Rules, Shape, tell_error
from tests.harness.soak.watch import children
from tests.harness.tally import RunViolation

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
        # Of all its lives the last words of one are enough.
        self._said.write_bytes(b"")
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
        """Reaps it if it has ended; returns whether it has just now. `full`: whether the disk is full, or was a moment
        ago."""
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


class Job:
    """The ranks of one life. `origin`: the checkpoint that it goes on from. `said`: folder for the ranks' words. It is
    the supervisor that sees every sample of every rank, in order, and nothing has to be kept."""

    def __init__(
        self, shape: Shape, rules: Rules, stream: Path, folder: Path, origin: Checkpoint | None, said: Path
    ) -> None:
        self.shape = shape
        self.steps = 0  # steps that all ranks have told
        self.ended = False  # whether the epoch has ended, and all ranks with it
        self.doomed = False  # whether some of it was sent a signal by which it ends
        self._ranks = Ranks(said)
        for rank in range(shape.dp):
            train = partial(soak_rank.train, rules, shape, rank, stream, folder, origin)
            self._ranks.start(rank, train, tell_error)
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
        """Hears the ranks for so long; returns False once one of them is gone, as it was to be. `seconds`: of silence
        after which to return. `on_step`: is given each step; returns whether a checkpoint is to be written."""
        for key, _ in self._ranks.selector.select(seconds):
            said = self._ranks.heard(key.data)
            if said.startswith(FAILED) or (not said and not self._alive(key.data)):
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
        """Ends and reaps the ranks; what workers they leave is in the group."""
        for rank, pid in list(self._ranks.pids.items()):
            if not self.ended:
                kill(pid)
            status = self._ranks.reap(rank)
            if self.ended and status:
                raise RunViolation("error", f"rank {rank} ended with {status}: {self._ranks.said(rank)}")
        self._ranks.close()

    def waiting(self) -> list[int]:
        return sorted(set(range(self.shape.dp)) - set(self._ranks.told))

    def _alive(self, rank: int) -> bool:
        return os.waitid(os.P_PID, self._ranks.pids[rank], os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    def _check_doomed(self, rank: int, said: bytes) -> None:
        if self.doomed:
            return
        if not said:
            raise RunViolation("error", f"rank {rank} is gone by itself: {self._ranks.said(rank)}")
        error = orjson.loads(said[1:])
        where = f"after {self.steps} steps of life {self.shape.number} with {self.shape.dp} ranks"
        kind = "full" if error["full"] else _KINDS.get(error["kind"], "error")
        raise RunViolation(kind, f"rank {rank} {where}: {error['kind']}: {error['text']}")
