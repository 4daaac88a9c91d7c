"""Power cuts on ext4 and xfs at every call of producers and consumers that changes a file, and of their recoveries:
each with and without the journal written, since what a cut shows depends on that."""

import itertools
import json
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from lazyshard.stream import list_consumers, read_cursor, read_retired
from tests.harness.disks import FILESYSTEMS, Disk, fast_folder
from tests.harness.power.lives import (
    EVERY,
    TOTAL,
    Checkpoint,
    Found,
    Progress,
    Stop,
    Told,
    Whole,
    check,
    check_ended,
    found,
    produce,
    read_whole,
    train,
)
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

    def stop(self, call: int, when: When, *, flush: bool, power: bool = True) -> Stop:
        return Stop(call, when, str(self.disk.point) if power else None, flush and power)

    def __str__(self) -> str:
        mutant = f", mutant {self.mutant}" if self.mutant else ""
        return f"{self.disk.filesystem}, {self.played.name}{mutant}"


class Trial:
    """A stream on a disk, in a folder that nobody ever had: a cut brings back what was removed."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._disk, self._whole = bench.disk, bench.whole
        self.out = bench.disk.point / secrets.token_hex(8) / "out"
        self._told_file = bench.disk.point.parent / "told"
        self._told = Told()
        self._found = Found()
        self.stopped = False  # whether the last life was ended as it was to be

    def live(self, stop: Stop) -> None:
        """Lives once, up to a kill or a power cut, and checks what is left; cut after the end if it gets there."""
        self._told_file.unlink(missing_ok=True)
        ended = self._produce(stop)
        self.stopped = ended.status == -signal.SIGKILL
        assert not (ended.status and not self.stopped), f"the command exits with {ended.status}: {ended.last_words}"
        if not self.stopped:
            committed = max((one.chunks_before for one in list_consumers(self.out)), default=0)
            self._told = replace(self._told.and_later(Told.look(self.out, committed)), finished=True)
            assert self._told.ended, "the command has finished, and readers are not told that the stream has ended"
            if stop.power_of is not None:
                # Nothing is left to be stopped: what is told now is all of it.
                self._disk.cut(flush=stop.flush)
        else:
            self._told = self._told.and_later(Told(**json.loads(self._told_file.read_text())))
            if stop.power_of is not None:
                self._disk.restart()
        found = check(self.out, self._whole, self._told, self._found)
        if stop.power_of is not None:
            self._found = found  # After a kill that may be there only for as long as the power stays

    @property
    def met(self) -> str:
        """Name of the call at which the last life was stopped; empty where it was not."""
        return self._told.met

    def finish(self) -> None:
        ended = self._produce(None)
        assert not ended.status, f"the last run exits with {ended.status}: {ended.last_words}"
        check_ended(self.out, self._whole, self._told, self._found)

    def remove(self) -> None:
        """Removes the stream and the folder in which it was: the disk has room for some thousand names."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self._disk.sync()

    def _produce(self, stop: Stop | None) -> Ended:
        played, commits = self._bench.played, self._bench.played.scene.behind is not None
        given = (played.arguments(self.out), stop, self._bench.mutant, str(self._told_file))
        return self._bench.forks.call(produce, *given, commits=commits)


def make_whole(forks: Nursery, folder: Path, played: PlayedScene) -> Whole:
    out = folder / f"whole {played.name}"
    arguments = played.arguments(out)
    if "--retain" in arguments:
        arguments[arguments.index("--retain") + 1] = "all"
    ended = forks.call(produce, arguments)
    if ended.status:
        raise RuntimeError(f"{played.name}: without any fault the command exits with {ended.status}: {ended.said}")
    return read_whole(out, played.scene.per_chunk, seals=not played.scene.journal)


# More than a start and the first publish after it take: what comes then is that of a run which had no fault before
RECOVERY_CALLS: Final = 45
# What is no write is stopped before it where it is to be stopped half way: known only when it has happened
ORDER: Final[tuple[When, ...]] = ("half", "before", "after")


Attempt = Callable[[int, Stop], tuple[str, bool]]


def _at_each_call(attempt: Attempt, disk: Disk, every: int, offset: int, first: int) -> None:
    """Attempts every so-many-th point from call `first` on, and is told the call and whether it was the last one."""
    points = itertools.count(offset)
    for call in itertools.count(first):
        met, finished = "", False
        for when, flush in itertools.product(ORDER, (False, True)):
            if when == "before" and met not in ("", "write"):
                continue
            point = next(points)
            if point % every == 0:
                met, last = attempt(point, Stop(call, when, str(disk.point), flush))
                finished |= last
        if finished:
            return


def cut_at_each_call(tally: Tally, bench: Bench, every: int = 1, offset: int = 0, *, first: int = 1) -> None:
    """Cuts the power at points of a run. What a mutant breaks is looked for until it shows."""

    def attempt(point: int, stop: Stop) -> tuple[str, bool]:
        if bench.mutant and tally.violations:
            return "", True
        trial = Trial(bench)
        stopped = _tried(tally, bench, trial, [stop])
        return trial.met, not stopped

    _at_each_call(attempt, bench.disk, every, offset, first)


def cut_in_each_recovery(tally: Tally, bench: Bench, every: int, offset: int = 0, power_first: bool = False) -> None:
    """Kills at each call of a run, or cuts the power there, and cuts it at each of the next; one pair in so many."""
    for first, second in ((call, later) for call in itertools.count(1) for later in range(1, RECOVERY_CALLS)):
        # Of few pairs with one call, those with its neighbours have the others.
        if (7 * first + second + offset) % every:
            continue
        # Each pair one way, all ways among neighbours.
        flush = bool((first + second // 3) % 2)
        begun = bench.stop(first, WHENS[(first + second) % 3], flush=not flush, power=power_first)
        stops = [begun, bench.stop(second, WHENS[second % 3], flush=flush)]
        if not _tried(tally, bench, Trial(bench), stops) or (bench.mutant and tally.violations):
            return


def cut_in_recovery(tally: Tally, bench: Bench, first: Stop) -> None:
    """Cuts the power after each call of the run that follows this one; of a mutant until it shows."""
    for second, flush in itertools.product(range(1, RECOVERY_CALLS), (False, True)):
        _tried(tally, bench, Trial(bench), [first, bench.stop(second, "after", flush=flush)])
        if bench.mutant and tally.violations:
            return


def _tried(tally: Tally, bench: Bench, trial: Trial, stops: list[Stop]) -> bool:
    """Returns whether the first life was stopped; a run that finishes sooner needs no further one."""
    lives, stopped = 0, False
    try:
        for stop in stops:
            lives += 1
            trial.live(stop)
            stopped |= trial.stopped
            if not trial.stopped:
                break
        trial.finish()
    except AssertionError as violation:
        stopped |= trial.stopped
        tally.violation(f"{bench}: {', then '.join(map(str, stops))}: {violation}")
    finally:
        trial.remove()
    # A run that is finished is cut after its end.
    tally.trial(lives, points=1)
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


class RunBench(NamedTuple):
    forks: Nursery  # where lives are lived
    disk: Disk
    beginning: Beginning
    swift: bool = False  # whether checkpoints are kept as ms-swift's plug-in does
    mutant: str | None = None  # what is wrong with the consumer


class ConsumerTrial:
    """A stream and a run on it, on a disk."""

    def __init__(self, bench: RunBench) -> None:
        self._forks, self._disk, self._beginning, self._swift, self._mutant = bench
        disk, beginning, folder = bench.disk, bench.beginning, bench.disk.point / secrets.token_hex(8)
        self._folder, self._stream, self._checkpoints = folder, folder / "stream", folder / "checkpoints"
        self._told_file = disk.point.parent / "progress"
        self.met = ""  # name of the call at which that was
        self.stopped = False  # whether the life was ended as it was to be
        folder.mkdir()
        shutil.copytree(beginning.folder, self._stream)
        self._checkpoints.mkdir()
        disk.sync()

    def live(self, stop: Stop) -> None:
        """Trains what is published, up to a power cut; cut after the end if it gets there."""
        self._told_file.unlink(missing_ok=True)
        ended = self._train(LIVE * PER_CHUNK, stop)
        self.stopped = ended.status == -signal.SIGKILL
        assert not (ended.status and not self.stopped), f"the run exits with {ended.status}: {ended.last_words}"
        if self.stopped:
            told = Progress(**json.loads(self._told_file.read_text()))
            self._disk.restart()
        else:
            told = Progress(LIVE * PER_CHUNK, LIVE * PER_CHUNK)
            self._disk.cut(flush=stop.flush)
        self.met = told.met
        self._check(told)

    def finish(self, *, producer_first: bool) -> None:
        """The producer deletes by the cursor and finishes, before the run goes on or after; the rest is trained."""
        if not producer_first:
            self._finish_training(LIVE * PER_CHUNK)
        self._produce()
        self._finish_training(TOTAL)
        newest = self._newest()
        assert not (newest is None or newest.ids != list(range(TOTAL))), f"trained in the end: {newest and newest.ids}"

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._disk.sync()

    def _train(self, until: int, stop: Stop | None = None) -> Ended:
        given = (str(self._stream), self._checkpoints, until, self._swift, stop, self._mutant, str(self._told_file))
        return self._forks.call(train, *given)

    def _finish_training(self, until: int) -> None:
        ended = self._train(until)
        assert not ended.status, f"the run that goes on exits with {ended.status}: {ended.last_words}"
        self._check(Progress(until, until))

    def _produce(self) -> None:
        ended = self._forks.call(produce, self._beginning.played.arguments(self._stream))
        assert not ended.status, f"the producer exits with {ended.status}: {ended.last_words}"
        newest = self._newest()
        mark, needed = read_retired(self._stream), 0 if newest is None else len(newest.ids) // PER_CHUNK
        assert mark <= needed, f"chunks below {mark} are deleted, the newest checkpoint needs chunk {needed}"

    def _newest(self) -> Checkpoint | None:
        return next(iter(found(self._checkpoints)), None)

    def _check(self, told: Progress) -> None:
        newest = self._newest()
        saved = 0 if newest is None else len(newest.ids)
        if newest is not None and newest.ids != list(range(saved)):
            raise AssertionError(f"trained, by the newest checkpoint: {newest.ids}")
        assert saved >= told.saved, f"a checkpoint at {told.saved} was saved, the newest is at {saved}"
        for consumer in list_consumers(self._stream, TOTAL):
            assert consumer.problem is None, f"the cursor does not count: {consumer.problem}"
        cursor = read_cursor(self._stream, CONSUMER)
        if cursor is None:
            if told.committed or (self.met == "" and told.saved):
                raise AssertionError(f"committed up to {told.committed}, and there is no cursor")
            return
        assert cursor.consumed >= told.committed, f"committed up to {told.committed}, the cursor says {cursor.consumed}"
        if cursor.consumed % EVERY or cursor.chunks_before * PER_CHUNK > saved:
            done = f"done with {cursor.chunks_before} chunks, the newest checkpoint is at {saved}"
            raise AssertionError(f"the cursor stands at {cursor.consumed}, {done}")


def cut_consumer_at_each_call(tally: Tally, bench: RunBench, every: int = 1, offset: int = 0, first: int = 1) -> None:
    """Cuts the power at points of a consumer's run; of a mutant until it shows."""

    def attempt(point: int, stop: Stop) -> tuple[str, bool]:
        if bench.mutant and tally.violations:
            return "", True
        trial = ConsumerTrial(bench)
        try:
            trial.live(stop)
            trial.finish(producer_first=bool(point // every % 2))
        except AssertionError as violation:
            kind = "consumer as ms-swift's" if bench.swift else "consumer"
            tally.violation(f"{bench.disk.filesystem}, {kind}, mutant {bench.mutant}: {stop}: {violation}")
        finally:
            trial.remove()
        tally.trial(points=1)
        return trial.met, not trial.stopped

    _at_each_call(attempt, bench.disk, every, offset, first)


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
                            cut_consumer_at_each_call(tally, RunBench(forks, disk, beginning, swift), every, seed)
            except pytest.skip.Exception as reason:
                tally.notes.append(f"{filesystem} was left out: {reason}")


@contextmanager
def _counted(tally: Tally, name: str) -> Iterator[None]:
    before = tally.trials
    yield
    tally.count(name, tally.trials - before)
