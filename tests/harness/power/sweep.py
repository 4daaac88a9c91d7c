"""Power cuts on ext4 and xfs at every call that changes a file, and of recoveries, with and without the journal."""

import itertools
import json
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from lazyshard.stream import list_consumers, read_cursor, read_retired
from tests.harness.disks import FILESYSTEMS, Disk, fast_folder
from tests.harness.power import lives
from tests.harness.power.lives import TOTAL, Progress, Stop, Told, Whole, check, check_ended, found, produce, train
from tests.harness.processes.kill_points import WHENS, When
from tests.harness.processes.nursery import Ended, Nursery
from tests.harness.processes.producing import run_arguments
from tests.harness.scenes.sources import FedSource
from tests.harness.scenes.table import CONSUMED, CONSUMER, POWER, Scene
from tests.harness.tally import Tally


class PlayedScene(NamedTuple):
    name: str  # of the scene
    scene: Scene  # what is produced
    sources: list[FedSource]

    def arguments(self, out: Path) -> list[str]:
        of_sources = [argument for source in self.sources for argument in source.arguments]
        return [*run_arguments(out, [], self.scene.per_chunk, *self.scene.options), *of_sources]


class Bench(NamedTuple):
    forks: Nursery  # where lives are lived
    disk: Disk  # the disk
    played: PlayedScene  # what is made
    whole: Whole  # what is to come of it
    mutant: str | None = None  # what is wrong with the producer

    def trial(self) -> "ProducerTrial":
        return ProducerTrial(self)

    def __str__(self) -> str:
        return f"{self.disk.filesystem}, {self.played.name}, mutant {self.mutant}"


class RunBench(NamedTuple):
    forks: Nursery
    disk: Disk
    beginning: "Beginning"
    swift: bool = False  # whether checkpoints are kept as ms-swift's plug-in does
    mutant: str | None = None  # what is wrong with the consumer

    def trial(self) -> "ConsumerTrial":
        return ConsumerTrial(self)

    def __str__(self) -> str:
        return f"{self.disk.filesystem}, consumer{' as ms-swift' * self.swift}, mutant {self.mutant}"


class Trial:  # What is on a disk, in a folder that nobody ever had: a cut brings back what was removed
    def __init__(self, bench: Bench | RunBench) -> None:
        self.folder = bench.disk.point / secrets.token_hex(8)
        self.met = ""  # name of the call at which the last life was stopped; empty where it was not
        self.stopped = False  # whether the last life was ended as it was to be
        self._forks, self._disk = bench.forks, bench.disk
        self._told_file = bench.disk.point.parent / "told"

    def remove(self) -> None:
        """Removes the folder: the disk has room for some thousand names."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._disk.sync()

    def _stopped(self, ended: Ended) -> dict[str, Any]:
        """Returns what was told by then; nothing where it was not stopped."""
        self.stopped = ended.status == -signal.SIGKILL
        assert self.stopped or ended.status == 0, f"the life exits with {ended.status}: {ended.last_words}"
        told: dict[str, Any] = json.loads(self._told_file.read_text()) if self.stopped else {}
        self._told_file.unlink(missing_ok=True)
        self.met = told.get("met", "")
        return told

    def _cut(self, stop: Stop) -> None:
        if stop.power_of is not None and self.stopped:
            self._disk.restart()
        elif stop.power_of is not None:
            self._disk.cut(flush=stop.flush)


class ProducerTrial(Trial):
    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._played, self._whole, self._mutant = bench.played, bench.whole, bench.mutant
        self.out = self.folder / "out"
        self._told, self._found = Told(), lives.Found()

    def live(self, stop: Stop) -> None:
        told = self._stopped(self._produce(stop))
        if self.stopped:
            self._told = self._told.and_later(Told(**told))
        else:
            # Nothing is left to be stopped: what is told now is all of it.
            committed = max((one.chunks_before for one in list_consumers(self.out)), default=0)
            self._told = replace(self._told.and_later(Told.look(self.out, committed)), finished=True)
            assert self._told.ended, "the command has finished, and readers are not told that the stream has ended"
        self._cut(stop)
        found = check(self.out, self._whole, self._told, self._found)
        if stop.power_of is not None:
            self._found = found  # After a kill that may be there only for as long as the power stays

    def finish(self, turn: int) -> None:
        ended = self._produce(None)
        assert not ended.status, f"the last run exits with {ended.status}: {ended.last_words}"
        check_ended(self.out, self._whole, self._told, self._found)

    def _produce(self, stop: Stop | None) -> Ended:
        given = (self._played.arguments(self.out), stop, self._mutant, str(self._told_file))
        return self._forks.call(produce, *given, commits=self._played.scene.behind is not None)


def make_whole(forks: Nursery, folder: Path, played: PlayedScene) -> Whole:
    out = folder / f"whole {played.name}"
    arguments = played.arguments(out)
    if "--retain" in arguments:
        arguments[arguments.index("--retain") + 1] = "all"
    ended = forks.call(produce, arguments)
    if ended.status:
        raise RuntimeError(f"{played.name}: without any fault the command exits with {ended.status}: {ended.said}")
    return lives.read_whole(out, played.scene.per_chunk, seals=not played.scene.journal)


RECOVERY_CALLS: Final = 45  # More than a start and the first publish after it take
ORDER: Final[tuple[When, ...]] = ("half", "before", "after")  # Whether it is a write is known after "half"


def cut_at_each_call(tally: Tally, bench: Bench | RunBench, every: int = 1, offset: int = 0, *, first: int = 1) -> None:
    """Cuts at points of a life from call `first` on, with the journal and without. Of a mutant, until it shows."""
    points = itertools.count(offset)
    for call in itertools.count(first):
        met, finished = "", False
        for when, flush in itertools.product(ORDER, (False, True)):
            if when == "before" and met not in ("", "write"):
                continue
            point = next(points)
            if point % every:
                continue
            trial = bench.trial()
            finished |= not tried(tally, bench, trial, [Stop(call, when, str(bench.disk.point), flush)], point // every)
            met = trial.met
            if bench.mutant and tally.violations:
                return
        if finished:
            return


def cut_in_each_recovery(tally: Tally, bench: Bench, every: int, offset: int = 0, power_first: bool = False) -> None:
    """Kills at each call of a run, or cuts the power there, and cuts it at each of the next; one pair in so many."""
    power = str(bench.disk.point)
    for first, second in ((call, later) for call in itertools.count(1) for later in range(1, RECOVERY_CALLS)):
        if (7 * first + second + offset) % every:  # The neighbours of a call have the others
            continue
        flush = bool((first + second // 3) % 2)  # Each pair one way, all ways among neighbours
        begun = Stop(first, WHENS[(first + second) % 3], power if power_first else None, power_first and not flush)
        if not tried(tally, bench, bench.trial(), [begun, Stop(second, WHENS[second % 3], power, flush)]):
            return


def cut_in_recovery(tally: Tally, bench: Bench, first: Stop) -> None:
    for second, flush in itertools.product(range(1, RECOVERY_CALLS), (False, True)):
        tried(tally, bench, bench.trial(), [first, Stop(second, "after", str(bench.disk.point), flush)])
        if bench.mutant and tally.violations:
            return


def tried(
    tally: Tally, bench: Bench | RunBench, trial: "ProducerTrial | ConsumerTrial", stops: list[Stop], turn: int = 0
) -> bool:
    """Returns whether the first life was stopped; a run that finishes sooner needs no further one."""
    lives, stopped = 0, False
    try:
        for stop in stops:
            lives += 1
            trial.live(stop)
            stopped |= trial.stopped
            if not trial.stopped:
                break
        trial.finish(turn)
    except AssertionError as violation:
        stopped |= trial.stopped
        tally.violation(f"{bench}: {', then '.join(map(str, stops))}: {violation}")
    finally:
        trial.remove()
    tally.trial(lives, points=1)  # A run that is finished is cut after its end
    return stopped


PER_CHUNK: Final = CONSUMED.per_chunk
LIVE: Final = 4  # Chunks of the stream that are published when the run starts


class Beginning(NamedTuple):
    folder: Path  # the stream as it is when the run starts
    played: PlayedScene  # what is produced


def begin(forks: Nursery, folder: Path) -> Beginning:
    played = PlayedScene("consumer", CONSUMED, CONSUMED.make(folder))
    out = folder / "live"
    ended = forks.call(produce, played.arguments(out), chunks=LIVE)
    if ended.status != -signal.SIGKILL:
        raise RuntimeError(f"the producer was not killed but exits with {ended.status}: {ended.said}")
    return Beginning(out, played)


class ConsumerTrial(Trial):
    def __init__(self, bench: RunBench) -> None:
        super().__init__(bench)
        self._swift, self._mutant, self._played = bench.swift, bench.mutant, bench.beginning.played
        self._stream, self._checkpoints = self.folder / "stream", self.folder / "checkpoints"
        self.folder.mkdir()
        shutil.copytree(bench.beginning.folder, self._stream)
        self._checkpoints.mkdir()
        self._disk.sync()

    def live(self, stop: Stop) -> None:
        told = self._stopped(self._train(LIVE * PER_CHUNK, stop))
        self._cut(stop)
        self._check(Progress(**told) if self.stopped else Progress(LIVE * PER_CHUNK, LIVE * PER_CHUNK))

    def finish(self, turn: int) -> None:
        """The producer deletes by the cursor and finishes, before the run continues or after; the rest is trained."""
        if turn % 2 == 0:
            self._finish_training(LIVE * PER_CHUNK)
        ended = self._forks.call(produce, self._played.arguments(self._stream))
        assert not ended.status, f"the producer exits with {ended.status}: {ended.last_words}"
        mark, needed = read_retired(self._stream), len(self._trained()) // PER_CHUNK
        assert mark <= needed, f"chunks below {mark} are deleted, the newest checkpoint needs chunk {needed}"
        self._finish_training(TOTAL)
        assert self._trained() == list(range(TOTAL)), f"trained in the end: {self._trained()}"

    def _train(self, until: int, stop: Stop | None = None) -> Ended:
        given = (str(self._stream), self._checkpoints, until, self._swift, stop, self._mutant, str(self._told_file))
        return self._forks.call(train, *given)

    def _finish_training(self, until: int) -> None:
        ended = self._train(until)
        assert not ended.status, f"the run that continues exits with {ended.status}: {ended.last_words}"
        self._check(Progress(until, until))

    def _trained(self) -> list[int]:
        return next((one.ids for one in found(self._checkpoints)), [])

    def _check(self, told: Progress) -> None:
        trained = self._trained()
        saved = len(trained)
        assert trained == list(range(saved)), f"trained, by the newest checkpoint: {trained}"
        assert saved >= told.saved, f"a checkpoint at {told.saved} was saved, the newest is at {saved}"
        for consumer in list_consumers(self._stream, TOTAL):
            assert consumer.problem is None, f"the cursor does not count: {consumer.problem}"
        cursor = read_cursor(self._stream, CONSUMER)
        if cursor is None:
            needed = told.committed or (self.met == "" and told.saved)
            assert not needed, f"committed up to {told.committed}, and there is no cursor"
            return
        at, done = cursor.consumed, cursor.chunks_before
        assert at >= told.committed, f"committed up to {told.committed}, the cursor says {at}"
        right = at % lives.EVERY == 0 and done * PER_CHUNK <= saved
        assert right, f"the cursor stands at {at} and is done with {done} chunks, the newest checkpoint is at {saved}"


# Of the pairs of points one in so many: all first ones, and with the neighbours of each all second ones
_STACKED: Final = {"plain": 6, "gzipped": 18, "followed": 6, "retained": 36, "encoded": 18, "encoded retained": 36}


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Cuts the power at every 1/scale-th point; `seed` decides with which it begins. `place`: where images are put."""
    every = max(1, round(1 / scale))
    with fast_folder(place) as folder, Nursery(folder / "forks", "tests.harness.processes.commands") as forks:
        (folder / "in").mkdir()
        made = {name: PlayedScene(name, scene, scene.make(folder / "in")) for name, scene in POWER.items()}
        wholes = {name: make_whole(forks, folder, played) for name, played in made.items()}
        beginning = begin(forks, folder)
        for filesystem in FILESYSTEMS:
            try:
                with Disk(folder / filesystem, filesystem) as disk:
                    for name, played in made.items():
                        bench = Bench(forks, disk, played, wholes[name])
                        with _counted(tally, f"{filesystem} {name}, cut"):
                            cut_at_each_call(tally, bench, every, seed)
                        stacked = every * _STACKED[name]
                        with _counted(tally, f"{filesystem} {name}, killed and cut in the recovery"):
                            cut_in_each_recovery(tally, bench, stacked, seed)
                        with _counted(tally, f"{filesystem} {name}, cut and cut in the recovery"):
                            cut_in_each_recovery(tally, bench, 2 * stacked, seed, power_first=True)
                    for swift in (False, True):
                        with _counted(tally, f"{filesystem} consumer{' as of ms-swift' if swift else ''}, cut"):
                            cut_at_each_call(tally, RunBench(forks, disk, beginning, swift), every, seed)
            except pytest.skip.Exception as reason:
                tally.notes.append(f"{filesystem} was left out: {reason}")


@contextmanager
def _counted(tally: Tally, name: str) -> Iterator[None]:
    before = tally.trials
    yield
    tally.count(name, tally.trials - before)
