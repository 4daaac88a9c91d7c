"""One life of the soaked training job: its ranks, forks of the supervisor, in lockstep. The lockstep stands for the
collectives of a training step: a rank tells which samples it has read and goes on when all have. It is the supervisor
that sees every sample of every rank so, in order, and nothing has to be kept."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from tests.harness.processes.nursery import forked, kill, last_words, reap
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.soak import rank as soak_rank
from tests.harness.soak import rows as soak_rows
from tests.harness.soak.rank import END, FAILED, GO_ON, MESSAGE, SAVE, Rules, Shape, tell_error
from tests.harness.soak.watch import children
from tests.harness.tally import RunViolation
from tests.producer.commands import environment

FULL: Final = 7  # The exit code of a run that the filesystem has refused


class Producer:
    """Starts and reaps it. `starts`: how often it was started. `fulls`: how often it ended since the disk was full.
    `options`: of the command, besides source and stream. `stop`: the file that asks the source to end."""

    def __init__(self, stream: Path, options: Sequence[str], said: Path, stop: Path) -> None:
        self.pid = 0  # of the process, 0 while there is none
        self.starts = self.fulls = 0
        self.ended = False  # whether the stream has ended
        self._stream = stream
        self._options = tuple(options)
        self._said = said
        self._stop = stop
        self._expected: set[int] = set()
        self._start_at = 0.0

    def start(self, more: Sequence[str] = ()) -> None:
        """Starts it if it is not there, the stream has not ended, and the pause before it is over."""
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
        if not self.pid:
            return False
        found, status = os.waitpid(self.pid, os.WNOHANG)
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


Step = Sequence[npt.NDArray[np.int64]]  # The samples of each rank

_KINDS: Final = {
    "ChunkRetired": "gone",
    "StateMismatch": "gone",
    "ChunkCorrupt": "torn",
    "RowInvalid": "torn",
    "Torn": "torn",
    "WaitTimeout": "hang",
}


class Job:
    """The ranks of one life. `origin`: the checkpoint that it goes on from. `said`: folder for the ranks' words."""

    def __init__(
        self, shape: Shape, rules: Rules, stream: Path, folder: Path, origin: Checkpoint | None, said: Path
    ) -> None:
        self.shape = shape
        self.steps = 0  # steps that all ranks have told
        self.ended = False  # whether the epoch has ended, and all ranks with it
        self.doomed = False  # whether some of it was sent a signal by which it ends
        self.group = 0  # the process group of all of it
        self._rules = rules
        self._said = said
        self._pids: dict[int, int] = {}
        self._sockets: list[socket.socket] = []
        self._watches: list[int] = []
        self._told: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        for rank in range(shape.dp):
            self._start(rank, stream, folder, origin)
        for own in self._sockets:
            own.send(GO_ON)

    @property
    def pids(self) -> list[int]:
        return list(self._pids.values())

    def processes(self) -> list[tuple[int, str]]:
        """Returns ranks and their workers, (process id, kind) each."""
        ranks = [(pid, "rank 0" if rank == 0 else "rank") for rank, pid in self._pids.items()]
        return ranks + [(child, "worker") for pid in self.pids for child in children(pid)]

    def serve(self, seconds: float, on_step: Callable[[Step], bool]) -> bool:
        """Hears the ranks for so long; returns False once one of them is gone, as it was to be. `seconds`: of silence
        after which to return. `on_step`: is given each step; returns whether a checkpoint is to be written."""
        for key, _ in self._selector.select(seconds):
            rank = key.data
            said = self._heard(rank)
            if said.startswith(FAILED):
                return self._failed(rank, said[1:])
            if said:
                self._told[rank] = said
            elif not self._alive(rank):
                return self._gone(rank)
        if len(self._told) == self.shape.dp:
            self._go_on(on_step)
        return True

    def _heard(self, rank: int) -> bytes:
        """Returns what a rank says; nothing if it is its end that has woken us."""
        try:
            return self._sockets[rank].recv(MESSAGE, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def _go_on(self, on_step: Callable[[Step], bool]) -> None:
        told = [self._told[rank] for rank in range(self.shape.dp)]
        lengths = set(map(len, told))
        if len(lengths) > 1:
            raise RunViolation(
                "order", f"after {self.steps} steps ranks are not in lockstep: they told {lengths} bytes"
            )
        self._told.clear()
        word = GO_ON
        if told[0] == END:
            self.ended = True
        else:
            self.steps += 1
            if on_step([np.frombuffer(said[1:], dtype=np.int64) for said in told]):
                word = SAVE
        for own in self._sockets:
            # One that is killed meanwhile is noticed elsewhere.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                own.send(word)

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.doomed = True
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Ends and reaps the ranks; what workers they leave is in the group."""
        for rank, pid in list(self._pids.items()):
            if not self.ended:
                kill(pid)
            status = reap(self._pids.pop(rank), f"rank {rank}")
            if self.ended and status:
                raise RunViolation("error", f"rank {rank} ended with {status}: {self.said(rank)}")
        for own in self._sockets:
            own.close()
        for watch in self._watches:
            os.close(watch)
        self._selector.close()

    def said(self, rank: int) -> str:
        return last_words(self._said / f"rank-{rank}.log")

    def waiting(self) -> list[int]:
        """Returns the ranks that have not told of the step yet."""
        return sorted(set(range(self.shape.dp)) - set(self._told))

    def _start(self, rank: int, stream: Path, folder: Path, origin: Checkpoint | None) -> None:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = self._said / f"rank-{rank}.log"
        words.unlink(missing_ok=True)

        def work() -> int:
            # What others hold open would keep a rank from noticing that the supervisor is gone.
            for other in (own, *self._sockets):
                other.close()
            for watch in self._watches:
                os.close(watch)
            self._selector.close()
            try:
                its.recv(16)
                soak_rank.train(self._rules, self.shape, rank, stream, folder, origin, its)
            except Exception as error:
                its.send(tell_error(error))
                raise
            return 0

        pid = forked(work, words)
        its.close()
        self._pids[rank] = pid
        self.group = self.group or pid
        os.setpgid(pid, self.group)
        self._sockets.append(own)
        watch = os.pidfd_open(pid)
        self._watches.append(watch)
        self._selector.register(own, selectors.EVENT_READ, rank)
        # Its end of the socket would not tell: a worker has it too, and outlives the rank by seconds.
        self._selector.register(watch, selectors.EVENT_READ, rank)

    def _alive(self, rank: int) -> bool:
        return os.waitid(os.P_PID, self._pids[rank], os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    def _gone(self, rank: int) -> bool:
        if not self.doomed:
            raise RunViolation("error", f"rank {rank} is gone by itself: {self.said(rank)}")
        return False

    def _failed(self, rank: int, said: bytes) -> bool:
        error = orjson.loads(said)
        # What one says that has lost a worker, or another rank, is nobody's fault.
        if not self.doomed:
            where = f"after {self.steps} steps of life {self.shape.number} with {self.shape.dp} ranks"
            kind = "full" if error["full"] else _KINDS.get(error["kind"], "error")
            raise RunViolation(kind, f"rank {rank} {where}: {error['kind']}: {error['text']}")
        return False
