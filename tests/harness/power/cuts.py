"""Cuts of a run of the producer's command: at each call, and at each call of the recovery from a kill or a cut."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Final

from tests.harness.disks.power import Disk
from tests.harness.power.checks import Violation, Whole
from tests.harness.power.lives import Stop
from tests.harness.power.trials import Scenario, Trial
from tests.harness.processes.kill_points import WHENS, When
from tests.harness.processes.nursery import Nursery
from tests.harness.tally import Tally

RECOVERY_CALLS: Final = 45
"""More than a start and the first publish after it take: what comes then is that of a run which had no fault before."""

ORDER: Final[tuple[When, ...]] = ("half", "before", "after")
"""What is no write is stopped before it where it is to be stopped half way: known only when it has happened."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A disk and what is made on it.

    Attributes:
        forks: where lives are lived.
        disk: the disk.
        scenario: what is made.
        whole: what is to come of it.
        mutant: what is wrong with the producer.
    """

    forks: Nursery
    disk: Disk
    scenario: Scenario
    whole: Whole
    mutant: str | None = None

    def trial(self) -> Trial:
        """Returns a new stream, in a folder that nobody ever had: a cut brings back what was removed."""
        out = self.disk.point / secrets.token_hex(8) / "out"
        return Trial(self.forks, self.disk, out, self.scenario, self.whole, self.mutant)

    def stop(self, call: int, when: When, *, flush: bool, power: bool = True) -> Stop:
        """Returns how a life ends there."""
        return Stop(call, when, str(self.disk.point) if power else None, flush and power)

    def __str__(self) -> str:
        mutant = f", mutant {self.mutant}" if self.mutant else ""
        return f"{self.disk.filesystem}, {self.scenario.name}{mutant}"


def cut_at_each_call(tally: Tally, bench: Bench, every: int = 1, offset: int = 0, *, first: int = 1) -> None:
    """Cuts the power at every so-many-th point of a run from call `first` on, with and without the journal written.

    What a mutant breaks is looked for until it shows.
    """
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
    """Cuts the power after each call of the run that follows this one.

    What a mutant breaks is looked for until it shows.
    """
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
