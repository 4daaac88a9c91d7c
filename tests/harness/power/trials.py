"""One stream on a disk whose power is cut, made by one life of the command after the other, and where it is cut. Cuts
come at each call of a run, and at each call of the recovery from a kill or a cut."""

from __future__ import annotations

import itertools
import secrets
import shutil
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lazyshard.stream import list_consumers
from tests.harness.disks import Disk
from tests.harness.power.checks import Found, Told, Whole, check, check_ended, read_whole
from tests.harness.power.lives import Stop, produce
from tests.harness.processes.kill_points import WHENS, When
from tests.harness.processes.nursery import Nursery
from tests.harness.scenes.sources import FedSource
from tests.harness.scenes.table import Scene
from tests.harness.tally import Tally, Violation
from tests.producer.commands import run_arguments


@dataclass(frozen=True, slots=True)
class PlayedScene:
    """A scene with its sources, the same ones in each life."""

    name: str  # of the scene
    scene: Scene  # what is produced
    sources: list[FedSource]

    def arguments(self, out: Path) -> list[str]:
        of_sources = [argument for source in self.sources for argument in source.arguments]
        return [*run_arguments(out, [], self.scene.per_chunk, *self.scene.options), *of_sources]


class Trial:
    """A stream on a disk. `whole`: what is to come of it. `mutant`: what is wrong with the producer."""

    def __init__(
        self, forks: Nursery, disk: Disk, out: Path, played: PlayedScene, whole: Whole, mutant: str | None = None
    ) -> None:
        self._forks, self._disk, self.out = forks, disk, out
        self._set, self._whole, self._mutant = played, whole, mutant
        self._told_file = disk.point.parent / "told"
        self._told = Told()
        self._found = Found()
        self.stopped = False  # whether the last life was ended as it was to be

    def live(self, stop: Stop) -> None:
        """Lives once, up to a kill or a power cut, and checks what is left; cut after the end if it gets there."""
        self._told_file.unlink(missing_ok=True)
        ended = self._forks.call(produce, **self._request(stop))
        status = ended.status
        self.stopped = status == -signal.SIGKILL
        if status not in (0, -signal.SIGKILL):
            raise Violation(f"the command exits with {status}: {ended.last_words}")
        if status == 0:
            committed = max((one.chunks_before for one in list_consumers(self.out)), default=0)
            self._told = replace(self._told.and_later(Told.look(self.out, committed)), finished=True)
            if not self._told.ended:
                raise Violation("the command has finished, and readers are not told that the stream has ended")
            if stop.power_of is not None:
                # Nothing is left to be stopped: what is told now is all of it.
                self._disk.cut(flush=stop.flush)
        else:
            self._told = self._told.and_later(Told.read(self._told_file))
            if stop.power_of is not None:
                self._disk.restart()
        found = check(self.out, self._whole, self._told, self._found)
        if stop.power_of is not None:
            # After a kill that may be there only for as long as the power stays.
            self._found = found

    @property
    def met(self) -> str:
        """Name of the call at which the last life was stopped; empty where it was not."""
        return self._told.met

    def finish(self) -> None:
        """Runs the command until it is through, which is at once, and checks the whole."""
        ended = self._forks.call(produce, **self._request(None))
        if ended.status:
            raise Violation(f"the last run exits with {ended.status}: {ended.last_words}")
        check_ended(self.out, self._whole, self._told, self._found)

    def remove(self) -> None:
        """Removes the stream and the folder in which it was: the disk has room for some thousand names."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self._disk.sync()

    def _request(self, stop: Stop | None) -> dict[str, Any]:
        return {
            "arguments": self._set.arguments(self.out),
            "stop": None if stop is None else asdict(stop),
            "mutant": self._mutant,
            "told": str(self._told_file),
            "commits": self._set.scene.behind is not None,
        }


def make_whole(forks: Nursery, folder: Path, played: PlayedScene) -> Whole:
    """Makes the stream without a fault, keeping all of it, and reads it."""
    out = folder / f"whole {played.name}"
    arguments = played.arguments(out)
    if "--retain" in arguments:
        arguments[arguments.index("--retain") + 1] = "all"
    ended = forks.call(produce, arguments=arguments, stop=None, mutant=None, told="")
    if ended.status:
        raise RuntimeError(f"{played.name}: without any fault the command exits with {ended.status}: {ended.said}")
    return read_whole(out, played.scene.per_chunk, seals=not played.scene.journal)


RECOVERY_CALLS: Final = 45
"""More than a start and the first publish after it take: what comes then is that of a run which had no fault before."""

ORDER: Final[tuple[When, ...]] = ("half", "before", "after")
"""What is no write is stopped before it where it is to be stopped half way: known only when it has happened."""


@dataclass(frozen=True, slots=True)
class Bench:
    forks: Nursery  # where lives are lived
    disk: Disk  # the disk
    played: PlayedScene  # what is made
    whole: Whole  # what is to come of it
    mutant: str | None = None  # what is wrong with the producer

    def trial(self) -> Trial:
        """Returns a new stream, in a folder that nobody ever had: a cut brings back what was removed."""
        out = self.disk.point / secrets.token_hex(8) / "out"
        return Trial(self.forks, self.disk, out, self.played, self.whole, self.mutant)

    def stop(self, call: int, when: When, *, flush: bool, power: bool = True) -> Stop:
        return Stop(call, when, str(self.disk.point) if power else None, flush and power)

    def __str__(self) -> str:
        mutant = f", mutant {self.mutant}" if self.mutant else ""
        return f"{self.disk.filesystem}, {self.played.name}{mutant}"


def cut_at_each_call(tally: Tally, bench: Bench, every: int = 1, offset: int = 0, *, first: int = 1) -> None:
    """Cuts the power at every so-many-th point of a run from call `first` on, with and without the journal written.
    What a mutant breaks is looked for until it shows."""
    points = itertools.count(offset)
    for call in itertools.count(first):
        met, finished = "", False
        for when, flush in itertools.product(ORDER, (False, True)):
            if when == "before" and met not in ("", "write"):
                continue
            if next(points) % every:
                continue
            trial = bench.trial()
            finished |= not _tried(tally, bench, trial, [bench.stop(call, when, flush=flush)])
            met = trial.met
            if bench.mutant and tally.violations:
                return
        if finished:
            return


def cut_in_each_recovery(
    tally: Tally, bench: Bench, every: int = 1, offset: int = 0, *, power_first: bool = False
) -> None:
    """Kills at each call of a run, or cuts the power there, and cuts it at each of the next; one pair in so many."""
    for first, second in ((call, later) for call in itertools.count(1) for later in range(1, RECOVERY_CALLS)):
        # Of few pairs with one call, those with its neighbours have the others.
        if (7 * first + second + offset) % every:
            continue
        # Each pair one way, all ways among neighbours.
        first_way, second_way = WHENS[(first + second) % 3], WHENS[second % 3]
        flush = bool((first + second // 3) % 2)
        stops = [
            bench.stop(first, first_way, flush=not flush, power=power_first),
            bench.stop(second, second_way, flush=flush),
        ]
        if not _tried(tally, bench, bench.trial(), stops) or (bench.mutant and tally.violations):
            return


def cut_in_recovery(tally: Tally, bench: Bench, first: Stop) -> None:
    """Cuts the power after each call of the run that follows this one. What a mutant breaks is looked for until it
    shows."""
    for second, flush in itertools.product(range(1, RECOVERY_CALLS), (False, True)):
        _tried(tally, bench, bench.trial(), [first, bench.stop(second, "after", flush=flush)])
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
    except Violation as violation:
        stopped |= trial.stopped
        tally.violation(f"{bench}: {', then '.join(map(str, stops))}: {violation}")
    finally:
        trial.remove()
    # A run that is finished is cut after its end.
    tally.trial(lives, points=1)
    return stopped
