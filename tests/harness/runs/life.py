"""One life of a training job: its ranks, in lockstep, until all is trained or they are killed. Each rank is a fork of
the supervisor, and so has loaded all there is to load. The ranks are one process group, which a kill ends at once;
where the producer is to die with them, it is moved into that group. The lockstep is the harness's, and stands for the
collectives of a training step: the package needs none."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lazyshard.errors import ChunkCorrupt, ChunkRetired, RowInvalid, StateInvalid, StateMismatch, WaitTimeout
from lazyshard_producer.cli import main as produce
from lazyshard_producer.holding import holdback
from tests.harness.processes.nursery import forked, kill, last_words, reap, reap_group
from tests.harness.runs.history import OF_A_STREAM
from tests.harness.runs.kills import PRODUCER, Board, count_calls
from tests.harness.runs.plan import LifePlan, RunPlan
from tests.harness.runs.rank import CONSUMER, Rank, Torn, row
from tests.harness.tally import RunViolation

_OFTEN_S: Final = 0.005
"""How often it looks at its consumers: what may be deleted is to be deleted at once, not when all is over."""


class Producing:
    """The producer. `run`: the run, as one over this stream alone."""

    def __init__(self, run: RunPlan, folder: Path, board: Board, number: int = 0) -> None:
        self.stream = folder / f"stream-{number}"  # the stream's directory
        self.fd = -1  # is readable when it has ended; -1 while there is none
        self.died = 0  # how often it was killed alone
        self._run = run
        self._board = board
        self._number = number
        self._said = folder / f"producer-{number}.log"
        self._source = folder / f"rows-{number}.jsonl"
        first = number * OF_A_STREAM
        self._source.write_text("".join(json.dumps(row(first + sample)) + "\n" for sample in range(run.samples)))
        self._deaths = iter(run.deaths)
        self._pid = 0
        self._ended = False

    def start(self, group: int) -> None:
        """Starts it if it is not there and the stream has not ended, and moves it into a group; 0 is one of its own."""
        if self._pid == 0 and not self._ended:
            alone_at = next(self._deaths, 0)
            self._pid = forked(lambda: self._produce(alone_at), self._said)
            self.fd = os.pidfd_open(self._pid)
            self._board.set_producing(self._number, True)
        if self._pid:
            # Fails if it is gone by now, which is noticed elsewhere.
            with contextlib.suppress(ProcessLookupError):
                os.setpgid(self._pid, group or self._pid)

    def has_ended(self) -> None:
        """Reaps it; one that was killed alone may be started again."""
        status = self._reap()
        self._ended = status == 0
        if status not in (0, -signal.SIGKILL):
            raise RunViolation("producer", f"the producer ended with {status}: {last_words(self._said)}")
        if status and not self._board.killed:
            self.died += 1

    def stop(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()

    def said(self) -> str:
        return last_words(self._said)

    def _reap(self) -> int:
        status = reap(self._pid, "the producer")
        os.close(self.fd)
        self._pid, self.fd = 0, -1
        self._board.set_producing(self._number, False)
        return status

    def _produce(self, alone_at: int) -> int:
        holdback.LOOK_S = holdback.HELD_LOOK_S = _OFTEN_S  # type: ignore[misc]
        holdback._RETRY_MIN_S = _OFTEN_S  # type: ignore[misc]
        count_calls(self._board, PRODUCER + self._number, alone_at)
        return produce(
            [
                *("run", "--source", str(self._source), "--out", str(self.stream), "--no-progress"),
                *(
                    "--samples-per-chunk",
                    str(self._run.per_chunk),
                    "--retain",
                    self._run.retain,
                    "--consumers",
                    CONSUMER,
                ),
                *self._run.pace,
            ]
        )


START_S: Final = 45.0  # How long the ranks may take to their first step

_KINDS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (ChunkRetired, "gone"),
    (StateMismatch, "refused"),
    (StateInvalid, "refused"),
    (ChunkCorrupt, "torn"),
    (RowInvalid, "torn"),
    (Torn, "torn"),
    (WaitTimeout, "hang"),
)


@dataclass
class Life:
    plan: LifePlan
    patience_s: float  # how long the ranks may take for a step
    steps: int  # steps that are left to train
    board: Board  # what its processes have in common
    folder: Path  # for what they say and write down
    producing: Sequence[Producing]  # the producers, one for each stream
    # groups of which one process was killed and the others one by one: what those left is not reaped.
    left_alone: list[int] = field(default_factory=list)
    _pids: dict[int, int] = field(default_factory=dict)
    _watches: dict[int, int] = field(default_factory=dict)
    _group: int = 0
    _sockets: list[socket.socket] = field(default_factory=list)

    def run(self, ranks: Sequence[Rank]) -> bool:
        """Runs the ranks; returns True if they came to the end, False if they were killed as planned. Raises
        TimeoutError: what was killed is still there."""
        self.folder.mkdir()
        try:
            for rank in ranks:
                self._start(rank)
            self._start_producers()
            # The first ones may have had all of them killed before the last ones hear of it.
            self._go_on()
            return self._supervise()
        finally:
            self._end()

    def _end(self) -> None:
        if self._dies_together:
            self._stop_producers()
        for pid in self._pids.values():
            kill(pid)
        for rank in list(self._pids):
            self._reap(rank)
        if self.plan.kill is not None and self.plan.kill.whose == "one":
            self.left_alone.append(self._group)
        elif self._group:
            reap_group(self._group)
        for own in self._sockets:
            own.close()
        for fd in self._watches.values():
            os.close(fd)

    def _reap(self, rank: int) -> int:
        return reap(self._pids.pop(rank), f"rank {rank}")

    @property
    def _dies_together(self) -> bool:
        return self.plan.kill is not None and self.plan.kill.whose == "all"

    def _start(self, rank: Rank) -> None:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def work() -> int:
            # What others hold open would keep a rank from noticing that the supervisor is gone.
            for other in (own, *self._sockets):
                other.close()
            try:
                assert its.recv(16) == b"go on"
                count_calls(self.board, rank.rank)
                rank.train(its)
            except Exception as error:
                its.send(json.dumps({"kind": kind_of(error), "text": f"{type(error).__name__}: {error}"}).encode())
                raise
            return 0

        pid = forked(work, self.folder / f"rank-{rank.rank}.log")
        self._watches[rank.rank] = os.pidfd_open(pid)
        its.close()
        self._sockets.append(own)
        self._pids[rank.rank] = pid
        self._group = self._group or pid
        os.setpgid(pid, self._group)

    def _start_producers(self) -> None:
        for one in self.producing:
            one.start(self._group if self._dies_together else 0)

    def _stop_producers(self) -> None:
        for one in self.producing:
            one.stop()

    def _supervise(self) -> bool:
        waiting: dict[int, str] = {}
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            for rank, own in enumerate(self._sockets):
                selector.register(own, selectors.EVENT_READ, rank)
            # Its end of the socket would not tell: a DataLoader worker has it too, and outlives the rank by seconds.
            for rank, fd in self._watches.items():
                selector.register(fd, selectors.EVENT_READ, rank)
            watched: dict[int, Producing] = {}
            step = 0
            while True:
                for one in self.producing:
                    if one.fd >= 0 and one.fd not in watched:
                        watched[one.fd] = one
                        selector.register(one.fd, selectors.EVENT_READ, None)
                found = selector.select(deadline - time.monotonic())
                if not found:
                    raise RunViolation("hang", f"nothing goes on any more: {self._who_waits(waiting)}")
                for key, _ in found:
                    if key.data is None:
                        selector.unregister(key.fd)
                        watched.pop(key.fd).has_ended()
                        if not self.board.killed:
                            self._start_producers()
                        continue
                    said = heard(self._sockets[key.data])
                    if not said:
                        self._check_killed(key.data)
                        return False
                    if said.startswith("{"):
                        self._fail(key.data, json.loads(said))
                        return False
                    waiting[key.data] = said
                if len(waiting) < len(self._sockets):
                    continue
                said = waiting[0]
                if len(set(waiting.values())) > 1:
                    raise RunViolation("order", f"after {step} steps ranks are not in lockstep: {waiting}")
                waiting.clear()
                deadline = time.monotonic() + self.patience_s
                self._go_on()
                if said.startswith("ended"):
                    self._check_ended()
                    return True
                if self._is_due(step):
                    return False
                step += 1

    def _go_on(self) -> None:
        for own in self._sockets:
            try:
                own.send(b"go on")
            except (BrokenPipeError, ConnectionResetError):
                # Killed; its end of file tells.
                continue

    def _is_due(self, step: int) -> bool:
        """Kills at any instant of the next step, if it is the one; returns whether it was."""
        planned = self.plan.kill
        if planned is None or planned.where != "any" or step != int(planned.share * self.steps):
            return False
        # Not for luck: whatever instant that is, it has to be survived.
        time.sleep(planned.delay_s)
        if planned.whose == "one":
            self.board.kill_from_outside(self._pids[planned.rank])
        else:
            self.board.kill_from_outside(-self._group)
        if self._dies_together:
            # One that was there before may not have been in the group yet.
            self._stop_producers()
        return True

    def _check_killed(self, rank: int) -> None:
        if not self.board.killed:
            words = last_words(self.folder / f"rank-{rank}.log")
            raise RunViolation("error", f"rank {rank} is gone without a word: {words}")
        if self._dies_together:
            # One that was there before may not have been in the group yet.
            self._stop_producers()

    def _check_ended(self) -> None:
        for rank in list(self._pids):
            status = self._reap(rank)
            if status:
                words = last_words(self.folder / f"rank-{rank}.log")
                raise RunViolation("error", f"rank {rank} ended with {status}: {words}")

    def _fail(self, rank: int, said: dict[str, Any]) -> None:
        # What one says that has lost another one is nobody's fault.
        if not self.board.killed:
            raise RunViolation(said["kind"], f"rank {rank}: {said['text']}; {self._where()}")

    def _who_waits(self, waiting: dict[int, str]) -> str:
        said = "; another one: ".join(one.said()[-600:] for one in self.producing)
        return f"{self._where()}; arrived: {sorted(waiting)}; the producer: {said}"

    def _where(self) -> str:
        return ", ".join(self.board.where(rank) for rank in range(len(self._sockets)))


def heard(own: socket.socket) -> str:
    try:
        return own.recv(20_000, socket.MSG_DONTWAIT).decode()
    except ConnectionResetError:
        # With something that it had not heard.
        return ""
    except BlockingIOError:
        # Its end is what has woken us.
        return ""


def kind_of(error: BaseException) -> str:
    """Returns the kind of violation that an error of a rank is."""
    kind = next((kind for known, kind in _KINDS if isinstance(error, known)), "error")
    return "gone" if kind == "refused" and "deleted" in str(error) else kind
