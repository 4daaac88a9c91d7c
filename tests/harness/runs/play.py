"""Plays a run: a live stream, and a training job, killed and resumed with other ranks until all is trained."""

import contextlib
import json
import os
import pickle
import selectors
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lazyshard.errors import ChunkCorrupt, ChunkRetired, RowInvalid, StateInvalid, StateMismatch, WaitTimeout
from lazyshard.inspection.verification import verify
from lazyshard.stream import read_retired
from lazyshard_producer import limits as holdback
from lazyshard_producer.cli import main as produce
from tests.harness.planted import runs as run_mutants
from tests.harness.processes import nursery
from tests.harness.processes.nursery import Nursery, Ranks, forked, kill, last_words, leave, reap, reap_group
from tests.harness.runs import checkpoints as run_checkpoints
from tests.harness.runs import history
from tests.harness.runs.history import OF_A_STREAM, Lived, check_blend, check_whole, of_stream, read_steps, steps_left
from tests.harness.runs.kills import PRODUCER, Board, count_calls
from tests.harness.runs.plan import LifePlan, RunPlan
from tests.harness.runs.rank import CONSUMER, Rank, Torn, row
from tests.harness.tally import RunViolation

_OFTEN_S: Final = 0.005  # How often it looks at its consumers: what may be deleted is to go at once


class Producing:  # The producer. `run`: the run, as one over this stream alone.
    def __init__(self, run: RunPlan, folder: Path, board: Board, number: int = 0) -> None:
        self.stream = folder / f"stream-{number}"  # the stream's directory
        self.fd = -1  # is readable when it has ended; -1 while there is none
        self.died = 0  # how often it was killed alone
        self._run, self._board, self._number = run, board, number
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
            self._board.producing[self._number] = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):  # Fails if it is gone by now, which is noticed elsewhere
                os.setpgid(self._pid, group or self._pid)

    def has_ended(self) -> None:
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
        self._board.producing[self._number] = False
        return status

    def _produce(self, alone_at: int) -> int:
        holdback.LOOK_S = holdback.HELD_LOOK_S = _OFTEN_S  # type: ignore[misc]
        holdback.retry_s = lambda held_s: min(2.0, max(_OFTEN_S, held_s / 10))  # type: ignore[attr-defined]
        count_calls(self._board, PRODUCER + self._number, alone_at)
        command = ["run", "--source", str(self._source), "--out", str(self.stream), "--no-progress"]
        command += ["--samples-per-chunk", str(self._run.per_chunk), "--retain", self._run.retain]
        return produce([*command, "--consumers", CONSUMER, *self._run.pace])


_KINDS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    *((ChunkRetired, "gone"), (StateMismatch, "refused"), (StateInvalid, "refused"), (ChunkCorrupt, "torn")),
    *((RowInvalid, "torn"), (Torn, "torn"), (WaitTimeout, "hang")),
)


class Life:
    """`left_alone` is given groups of which one process was killed and the others one by one: what those left stays."""

    def __init__(
        self,
        plan: LifePlan,
        patience_s: float,  # how long the ranks may take for a step
        steps: int,  # steps that are left to train
        board: Board,
        folder: Path,  # for what they say and write down
        producing: Sequence[Producing],  # the producers, one for each stream
        left_alone: list[int],
    ) -> None:
        folder.mkdir()
        self._plan, self._patience_s, self._steps, self._board = plan, patience_s, steps, board
        self._producing, self._left_alone, self._ranks = producing, left_alone, Ranks(folder)
        self._dies_together = plan.kill is not None and plan.kill.whose == "all"

    def run(self, ranks: Sequence[Rank]) -> bool:
        """Runs the ranks; returns True if they came to the end, False if they were killed as planned."""
        try:
            for rank in ranks:
                self._ranks.start(rank.rank, rank.train, _tell_error)
            self._start_producers()
            self._ranks.tell()  # The first ones may have had all of them killed before the last ones hear of it
            return self._supervise()
        finally:
            self._end()

    def _end(self) -> None:
        self._stop_producers()
        for pid in self._ranks.pids.values():
            kill(pid)
        for rank in list(self._ranks.pids):
            self._ranks.reap(rank)
        if self._plan.kill is not None and self._plan.kill.whose == "one":
            self._left_alone.append(self._ranks.group)
        elif self._ranks.group:
            reap_group(self._ranks.group)
        self._ranks.close()

    def _start_producers(self) -> None:
        for one in self._producing:
            one.start(self._ranks.group if self._dies_together else 0)

    def _stop_producers(self) -> None:
        for one in self._producing if self._dies_together else ():
            one.stop()

    def _supervise(self) -> bool:
        deadline = time.monotonic() + 45.0  # How long the ranks may take to their first step
        selector = self._ranks.selector
        watched: dict[int, Producing] = {}
        step = 0
        while True:
            for one in self._producing:
                if one.fd >= 0 and one.fd not in watched:
                    watched[one.fd] = one
                    selector.register(one.fd, selectors.EVENT_READ, None)
            found = selector.select(deadline - time.monotonic())
            if not found:
                raise RunViolation("hang", f"nothing continues any more: {self._who_waits()}")
            for key, _ in found:
                if key.data is None:
                    selector.unregister(key.fd)
                    watched.pop(key.fd).has_ended()
                    if not self._board.killed:
                        self._start_producers()
                    continue
                said = self._ranks.heard(key.data)
                if not said or said.startswith(b"{"):
                    self._check_killed(key.data, said)
                    return False
                self._ranks.told[key.data] = said
            told = self._ranks.told
            if len(told) < len(self._ranks):
                continue
            if len(set(told.values())) > 1:
                raise RunViolation("order", f"after {step} steps ranks are not in lockstep: {told}")
            ended = told[0].startswith(b"ended")
            deadline = time.monotonic() + self._patience_s
            self._ranks.tell()
            if ended:
                self._check_ended()
            if ended or self._is_due(step):
                return ended
            step += 1

    def _is_due(self, step: int) -> bool:
        planned = self._plan.kill
        if planned is None or planned.where != "any" or step != int(planned.share * self._steps):
            return False
        time.sleep(planned.delay_s)  # Not for luck: whatever instant that is, it has to be survived
        self._board.kill_from_outside(self._ranks.pids[planned.rank] if planned.whose == "one" else -self._ranks.group)
        self._stop_producers()  # One that was there before may not have been in the group yet
        return True

    def _check_killed(self, rank: int, said: bytes) -> None:
        if self._board.killed:
            if not said:
                self._stop_producers()
        elif said:
            error = json.loads(said)
            raise RunViolation(error["kind"], f"rank {rank}: {error['text']}; {self._where()}")
        else:
            raise RunViolation("error", f"rank {rank} is gone without a word: {self._ranks.said(rank)}")

    def _check_ended(self) -> None:
        for rank in list(self._ranks.pids):
            status = self._ranks.reap(rank)
            if status:
                raise RunViolation("error", f"rank {rank} ended with {status}: {self._ranks.said(rank)}")

    def _who_waits(self) -> str:
        said = "; another one: ".join(one.said()[-600:] for one in self._producing)
        return f"{self._where()}; arrived: {sorted(self._ranks.told)}; the producer: {said}"

    def _where(self) -> str:
        return ", ".join(self._board.where(rank) for rank in range(len(self._ranks)))


def _tell_error(error: BaseException) -> bytes:
    kind = next((kind for known, kind in _KINDS if isinstance(error, known)), "error")
    kind = "gone" if kind == "refused" and "deleted" in str(error) else kind
    return json.dumps({"kind": kind, "text": f"{type(error).__name__}: {error}"}).encode()


RUN_S: Final = 100.0  # How long a run may take; what hangs in it says so itself before that


@dataclass
class Played:
    seed: int  # its seed
    kills: dict[str, int] = field(default_factory=dict)  # of its ranks; "end" also where no plan was met
    deaths: int = 0  # how often the producer was killed and they were not
    again: int = 0  # lives that continued from an older checkpoint than the newest one
    deleted: int = 0  # how many of them were deleted
    kind: str | None = None  # of the violation; None if everything held
    text: str = ""  # what was wrong


class Runs(Nursery):  # A nursery of runs: it has loaded torch, the package and the producer once
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "tests.harness.processes.commands", __name__)
        self._runs = 0

    def play(self, run: RunPlan, mutant: str | None = None) -> Played:
        self._runs += 1
        folder = self.folder / f"run-{self._runs}-seed-{run.seed}"
        ended = self.call(_play_alone, run, mutant, folder, within_s=RUN_S)
        if not ended.left:
            how = f"took more than {RUN_S:.0f} s" if ended.late else f"ended with {ended.status}"
            kind = "hang" if ended.late else "error"
            return Played(run.seed, kind=kind, text=f"the run {how}: {ended.said[-3000:]}")
        played: Played = pickle.loads(ended.left)
        if played.kind is None:
            shutil.rmtree(folder)
        return played


def _play_alone(run: RunPlan, mutant: str | None, folder: Path) -> None:
    os.setsid()
    leave(pickle.dumps(play(run, mutant, folder)))


def play(run: RunPlan, mutant: str | None, folder: Path) -> Played:
    """Plays a run, in a process that ends with it. `mutant`: what is broken first. `folder`: is made."""
    folder.mkdir(parents=True)
    nursery.adopt_orphans()
    if mutant is not None:
        run_mutants.MUTANTS[mutant].install()
    played = Played(run.seed)
    board = Board.make()
    producing = [Producing(stream, folder, board, number) for number, stream in enumerate(run.streams)]
    left_alone: list[int] = []
    try:
        _live(run, folder, board, producing, played, left_alone)
    except RunViolation as error:
        played.kind, played.text = error.kind, error.text
    except TimeoutError as error:
        played.kind, played.text = "hang", str(error)
    finally:
        for one in producing:
            one.stop()
        for group in left_alone:
            reap_group(group)
    if played.kind is None and nursery.has_children():
        played.kind, played.text = "error", "processes are left"
    played.deaths = sum(one.died for one in producing)
    return played


def _live(
    run: RunPlan, folder: Path, board: Board, producing: Sequence[Producing], played: Played, left_alone: list[int]
) -> None:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    streams = tuple(one.stream for one in producing)
    lives: list[Lived] = []
    done = False
    for plan in run.lives:
        kept = run_checkpoints.found(checkpoints)
        back = max(0, min(plan.back, len(kept) - 1))
        run_checkpoints.remove(checkpoints, kept[:back])
        played.again += back > 0
        origin = kept[back] if kept else None
        started = None if origin is None else (origin.life, origin.steps)
        steps = max(0, run.total - (0 if origin is None else origin.consumed)) // (plan.dp * plan.batch_size)
        if run.others:
            steps = steps_left(run, lives, started, plan)
        if not steps and plan.kill is not None:
            if done:  # Once is enough to see that nothing is trained again
                continue
            done = True
        number = len(lives)
        home = folder / f"life-{number}"
        kill = plan.kill
        board.reset("before" if kill is None else kill.when, lonely=kill is not None and kill.whose == "one")
        life = Life(plan, run.patience_s, steps, board, home, producing, left_alone)
        ended = life.run(
            [Rank(run, plan, number, rank, steps, streams, home, checkpoints, origin, board) for rank in range(plan.dp)]
        )
        if not ended:
            assert plan.kill is not None
            where = "end" if board.late else plan.kill.where
            played.kills[where] = played.kills.get(where, 0) + 1
        lives.append(Lived(plan, started, read_steps(home, plan.dp)))
        played.deleted = _check_disk(run, lives, checkpoints, streams)
    for one in producing:
        one.stop()
    (check_blend if run.others else check_whole)(run, lives)
    for stream in streams:
        # One that was killed at work leaves what its next start would remove.
        findings = [found for found in verify(stream, jobs=1).findings if found.severity != "leftover"]
        if findings:
            raise RunViolation("torn", f"the stream {stream.name} is damaged: {findings}")


def _check_disk(run: RunPlan, lives: Sequence[Lived], folder: Path, streams: Sequence[Path]) -> int:
    """Checks that whatever a kept checkpoint needs is still there; returns how many chunks are deleted."""
    deleted = 0
    for number, (directory, stream) in enumerate(zip(streams, run.streams, strict=True)):
        if not directory.is_dir():
            continue
        retired = read_retired(directory)
        deleted += retired
        trained = of_stream(lives, number) if run.others else lives
        for checkpoint in run_checkpoints.found(folder):
            history.check_kept(stream, trained, checkpoint.life, checkpoint.steps, retired)
    return deleted
