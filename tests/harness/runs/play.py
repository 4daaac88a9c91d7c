"""Plays a run: a live stream of which a training job reads, killed and resumed with other ranks until all is
trained. What is to hold is checked against what the ranks have written down of what they read."""

import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lazyshard.inspection.verification import verify
from lazyshard.stream import read_retired
from tests.harness.planted import runs as run_mutants
from tests.harness.processes.nursery import Nursery, adopt_orphans, has_children, leave, reap_group
from tests.harness.runs import checkpoints as run_checkpoints
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.runs.history import Lived, check_blend, check_kept, check_whole, of_stream, read_steps, steps_left
from tests.harness.runs.kills import Board
from tests.harness.runs.life import Life, Producing
from tests.harness.runs.plan import LifePlan, RunPlan
from tests.harness.runs.rank import Rank
from tests.harness.tally import RunViolation

RUN_S: Final = 100.0  # How long a run may take; what hangs in it says so itself before that


@dataclass
class Played:
    seed: int  # its seed
    # how often its ranks were killed, by where; "end" also where what was planned was not met on the way.
    kills: dict[str, int] = field(default_factory=dict)
    deaths: int = 0  # how often the producer was killed and they were not
    again: int = 0  # lives that went on from an older checkpoint than the newest one
    deleted: int = 0  # how many of them were deleted
    kind: str | None = None  # of the violation; None if everything held
    text: str = ""  # what was wrong


class Runs(Nursery):
    """A nursery of runs: it has loaded torch, the package and the producer once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "tests.harness.processes.commands", __name__)
        self._runs = 0

    def play(self, run: RunPlan, mutant: str | None = None) -> Played:
        """Plays a run; see `play`. What it writes is removed if everything held."""
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
    # A session of its own, so that its process groups are.
    os.setsid()
    leave(pickle.dumps(play(run, mutant, folder)))


def play(run: RunPlan, mutant: str | None, folder: Path) -> Played:
    """Plays a run, in a process that has nothing else to do and ends with it. `mutant`: by its name, what is broken in
    the package first; None for nothing. `folder`: is made, for all that the run writes."""
    folder.mkdir(parents=True)
    adopt_orphans()
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
    if played.kind is None and has_children():
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
        origin, newer = _choose(checkpoints, plan.back)
        played.again += bool(newer)
        started = None if origin is None else (origin.life, origin.steps)
        steps = _steps_left(run, lives, origin, plan)
        if not steps and plan.kill is not None:
            # Once is enough to see that nothing is trained again.
            if done:
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
    if run.others:
        check_blend(run, lives)
    else:
        check_whole(run, lives)
    for stream in streams:
        # One that was killed at work leaves what its next start would remove.
        findings = [found for found in verify(stream, jobs=1).findings if found.severity != "leftover"]
        if findings:
            raise RunViolation("torn", f"the stream {stream.name} is damaged: {findings}")


def _choose(folder: Path, back: int) -> tuple[Checkpoint | None, bool]:
    kept = run_checkpoints.found(folder)
    if not kept:
        return None, False
    back = min(back, len(kept) - 1)
    run_checkpoints.remove(folder, kept[:back])
    return kept[back], back > 0


def _steps_left(run: RunPlan, lives: Sequence[Lived], origin: Checkpoint | None, plan: LifePlan) -> int:
    if run.others:
        return steps_left(run, lives, None if origin is None else (origin.life, origin.steps), plan)
    return max(0, run.total - (0 if origin is None else origin.consumed)) // (plan.dp * plan.batch_size)


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
            check_kept(stream, trained, checkpoint.life, checkpoint.steps, retired)
    return deleted
