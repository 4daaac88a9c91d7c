"""Random runs: 2 to 12 writers of one stream, each in a process; kills and stops of any; ranks that read live."""

import faulthandler
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from lazyshard import ChunkWriter, StreamReader
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.errors import StreamEnded
from lazyshard.format.records import END
from lazyshard.inspection.verification import verify
from lazyshard.store import durable
from lazyshard.stream import members, sequencer
from lazyshard.stream.members import read_committed
from tests.harness.disks import fast_folder
from tests.harness.many import points
from tests.harness.processes.kill_points import WHENS, KillPoint, When
from tests.harness.processes.nursery import Nursery, exit_status, forked, has_ended, kill
from tests.harness.tally import Tally

Kill = Literal["one", "sequencer", "all", "stop"]
HANGS_S: Final = 90.0
LEASE_S: Final = 0.5  # of the sequencer in these runs: one that is stopped is soon fenced
_RUNS: Final = 200


@dataclass(frozen=True)
class Run:
    seed: int
    rows: dict[str, int]  # of each writer, by name
    per_chunk: int
    named: bool  # whether names are declared, else their number
    linked: bool  # whether the filesystem has hard links
    overlap: bool
    pause_s: float  # most between two rows
    points: dict[str, list[tuple[int, When]]]  # by writer: calls at which its first lives are killed
    kills: list[Kill]  # beside these, by the clock
    ranks: list[int] = field(default_factory=list)  # of each life of the training


def make_run(seed: int) -> Run:
    dice = random.Random(seed)
    writers = dice.choice((2, 2, 3, 4, 5, 6, 8, 12))
    rows = {f"w{number}": dice.choice((0, dice.randint(1, 9), dice.randint(10, 90))) for number in range(writers)}
    points = {
        name: [(dice.randint(1, 250), dice.choice(WHENS)) for _ in range(dice.randint(0, 2))]
        for name in dice.sample(sorted(rows), max(1, writers // 2))
    }
    kinds: tuple[Kill, ...] = ("one", "sequencer", "sequencer", "all", "stop")
    kills = [dice.choice(kinds) for _ in range(dice.randint(1, 8))]
    return Run(
        seed,
        rows,
        per_chunk=dice.choice((2, 3, 7, 10)),
        named=dice.random() < 0.5,
        linked=dice.random() < 0.75,
        overlap=dice.random() < 0.3,
        pause_s=dice.choice((0.0, 0.002, 0.01)),
        points=points,
        kills=kills,
        ranks=[dice.randint(1, 4) for _ in range(dice.randint(1, 4))],
    )


def write(run: Run, directory: Path, name: str, life: int, mutant: Callable[[], None] | None) -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sequencer.LEASE_S = LEASE_S  # type: ignore[misc]
    members.RETRY_S = sequencer.RETRY_S = 0.1  # type: ignore[attr-defined, misc]
    if not run.linked:
        durable.link = lambda source, target: False
    if mutant is not None:
        mutant()
    if life < len(found := run.points.get(name, [])):
        KillPoint(*found[life]).install()
    dice = random.Random(f"{run.seed} {name} {life}")
    declared: Any = sorted(run.rows) if run.named else len(run.rows)
    with (
        suppress(StreamEnded),
        ChunkWriter(directory, run.per_chunk, writer=name, writers=declared, overlap=run.overlap) as writer,
    ):
        for number in range(writer.source or 0, run.rows[name]):
            if run.pause_s:
                time.sleep(dice.random() * run.pause_s)
            writer.write({"id": f"{name}-{number}"}, source=number + 1)
    return 0


def read(run: Run, directory: Path, left: Path) -> int:
    """Reads the stream from its beginning while it is written."""
    ids = [row["id"] for row in StreamReader(directory, run.per_chunk, max_wait=HANGS_S)]
    left.write_text(json.dumps(ids))
    return 0


def train(run: Run, directory: Path, left: Path) -> int:
    """Ranks of one life after the other, each with its own data set, resumed from the state of the life before."""
    total, consumed, trained, state = sum(run.rows.values()), 0, list[str](), None
    for number, ranks in enumerate([*run.ranks, 1]):
        rest = total - consumed
        steps = rest // ranks if number == len(run.ranks) else rest // ranks // 2
        given: dict[str, Any] = {"dp_size": ranks, "max_total_samples": total, "max_wait": HANGS_S}
        sets = [LazyShardedDataset(directory, dp_rank=rank, **given) for rank in range(ranks)]
        for one in sets:
            if state is not None:
                one.load_state_dict(state)
            trained += [one[index]["id"] for index in one.rank_indices[:steps]]
        consumed += steps * ranks
        state = sets[0].state_dict(consumed)
    left.write_text(json.dumps(trained))
    return 0


class Played:
    """A run in progress: its processes, by name."""

    def __init__(self, run: Run, folder: Path, mutant: Callable[[], None] | None) -> None:
        self.run, self.directory, self.kills = run, folder / "stream", 0
        self._folder, self._mutant = folder, mutant
        self._dice = random.Random(f"{run.seed} kills")
        self._lives: dict[str, int] = defaultdict(int)
        self._pids: dict[str, int] = {}
        self._stopped: dict[int, float] = {}

    def play(self) -> None:
        """Raises AssertionError: a promise was not kept."""
        readers = self._start_readers()
        for name in self.run.rows:
            self._start(name)
        kills, deadline = list(self.run.kills), time.monotonic() + HANGS_S
        try:
            while self._pids:
                time.sleep(0.01 + self._dice.random() * 0.1)
                self._wake()
                if kills:
                    self._kill(kills.pop())
                self._reap()
                if time.monotonic() > deadline:
                    self._tell_stacks()
                    raise AssertionError(f"it hangs: {self._pids}, {read_committed(self.directory)}: {self._said()}")
            assert (self.directory / END).exists(), "all writers have ended, and the stream has not"
            for name, pid in readers.items():
                assert has_ended(pid, HANGS_S), f"{name} hangs: {self._said()}"
                readers[name] = 0
                assert exit_status(pid) == 0, f"{name} fails: {self._said()}"
        finally:
            for pid in [*self._pids.values(), *filter(None, readers.values())]:
                kill(pid)
                exit_status(pid)
        self._check()

    def _start_readers(self) -> dict[str, int]:
        if not sum(self.run.rows.values()):  # A data set must have samples
            return {}
        works = {"reader": read, "training": train}
        return {name: self._fork(name, work, self._folder / name) for name, work in works.items()}

    def _fork(self, name: str, work: Callable[..., int], *given: Any) -> int:
        return forked(lambda: work(self.run, self.directory, *given), self._folder / f"{name}.log")

    def _start(self, name: str) -> None:
        self._pids[name] = self._fork(name, write, name, self._lives[name], self._mutant)
        self._lives[name] += 1

    def _reap(self) -> None:
        for name, pid in list(self._pids.items()):
            if has_ended(pid, 0.0):
                status = exit_status(pid)
                del self._pids[name]
                self._stopped.pop(pid, None)
                assert status in (0, -signal.SIGKILL), f"{name} ends with {status}: {self._said()}"
                if status:
                    self.kills += 1
                    self._start(name)

    def _kill(self, what: Kill) -> None:
        pids = list(self._pids.values())
        if what in ("sequencer", "stop") and (found := read_committed(self.directory)) and found.pid in pids:
            pids = [found.pid]
        elif what != "all":
            pids = [self._dice.choice(pids)]
        for pid in pids:
            if what == "stop":
                os.kill(pid, signal.SIGSTOP)
                self._stopped[pid] = time.monotonic() + 2 * LEASE_S * self._dice.random()
            else:
                kill(pid)

    def _wake(self) -> None:
        for pid, at in list(self._stopped.items()):
            if time.monotonic() >= at:
                del self._stopped[pid]
                os.kill(pid, signal.SIGCONT)

    def _tell_stacks(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    def _said(self) -> str:
        return " | ".join(f"{path.stem}: {path.read_text()[-1500:]}" for path in self._folder.glob("*.log"))

    def _check(self) -> None:
        rows = list(StreamReader(self.directory, self.run.per_chunk))
        ids = [row["id"] for row in rows]
        for name, count in self.run.rows.items():
            own = [int(one.rpartition("-")[2]) for one in ids if one.startswith(f"{name}-")]
            assert own == list(range(count)), f"of {count} rows of {name} there are {own}"
        if ids:
            seen = json.loads((self._folder / "reader").read_bytes())
            assert seen == ids, "a reader beside it was given other rows"
            trained = json.loads((self._folder / "training").read_bytes())
            assert sorted(trained) == sorted(ids), "ranks were not given each row once"
        findings = [one for one in verify(self.directory, jobs=1).findings if one.severity != "leftover"]
        assert not findings, f"the stream is damaged: {findings}"


def play(seed: int, folder: Path, mutant: Callable[[], None] | None = None) -> int:
    """Plays a run; returns how many processes were killed. Raises AssertionError."""
    folder.mkdir()
    played = Played(make_run(seed), folder, mutant)
    try:
        played.play()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}; {make_run(seed)}") from error
    return played.kills


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Plays 200 runs, a seed each, from `seed` * 200 on, and kills at every call."""
    step = max(1, round(1 / scale))
    with fast_folder(place) as folder, Nursery(folder / "forks", __name__, points.__name__) as forks:
        for work, when in itertools.product((points.sequence, points.both), WHENS):
            (folder / "points").mkdir()
            try:
                calls = forks.result(points.sweep, folder / "points", work, (when,), step)
                tally.trial(faults=calls // step, points=calls // step, trials=calls // step)
            except AssertionError as error:
                tally.violation(f"{work.__name__}, killed {when} a call: {error}")
            shutil.rmtree(folder / "points")
        for number in range(seed * _RUNS, seed * _RUNS + max(1, int(_RUNS * scale))):
            try:
                kills = forks.result(play, number, folder / f"{number}")
            except AssertionError as error:
                tally.violation(str(error))
                kills = 0
            tally.trial(faults=kills, points=kills)
