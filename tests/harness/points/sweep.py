"""Every crash point: the producer's command is stopped, or has an error, at each call that changes a file.

For every kind of source (`scenes.table`), each call N = 1, 2, ... of a run until it gets through without one: killed
before, after and half way through it; an error in its place, once and from there on; and once more at each call M of
the run that goes on from there. While all this happens a process reads the stream (`points.reader`). What is to hold is
in `points.sealed` for every instant and in `points.trial` for the end. The streams are in memory where there is room
for them: a kill shows the same there.

    python -m tests.harness.points.sweep SCENE FAULT ...     plays one trial again, as a violation names it:
    python -m tests.harness.points.sweep plain kill@17/half EIO@3/before
"""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.harness.disks import fast_folder
from tests.harness.points.reader import Reader
from tests.harness.points.trial import Stage, Trial
from tests.harness.processes.commands import Commands
from tests.harness.processes.kill_points import ERRORS, Fault, When, parse_faults, ways
from tests.harness.scenes.table import POINTS
from tests.harness.tally import Tally

# Scenes that have every error; the others differ from them in how they read, which changes no file
_ERRONEOUS: Final = ("plain", "made", "split", "followed", "retained", "small disk", "encoded", "encoded retained")

_STACKED: Final[dict[str, tuple[tuple[str, When, int], ...]]] = {
    "plain": (("kill", "before", 1), ("kill", "half", 1), ("kill", "after", 3), ("EIO", "before", 3)),
    "made": (("kill", "before", 5), ("kill", "half", 3), ("EIO", "before", 7)),
    "split": (("kill", "before", 9),),
    "retained": (("kill", "before", 7), ("kill", "half", 5), ("EIO", "before", 11)),
    "encoded": (("kill", "before", 5), ("kill", "half", 3), ("EIO", "before", 7)),
    "encoded retained": (("kill", "before", 13),),
}
"""First faults, each at every call, and the every how manieth call of the run after it that has a second one."""

_AGAIN: Final[tuple[tuple[str, When, bool], ...]] = (
    *(("kill", "before", False), ("EIO", "before", False), ("kill", "half", False)),
    *(("kill", "after", False), ("ENOSPC", "before", True), ("EIO", "after", False)),
)
"""What happens in the run after the first fault: one of them at each of its calls, in turn."""

# So many numbers in a row that no call had are behind a run's end: of a live source the next one may take more
_UNMET: Final = 2
_MOST_CALLS: Final = 2000
_MOST_VIOLATIONS: Final = 20  # Of one fault there may be one at every point; more tell nothing new


class Sweeper:
    """Plays a scene with faults at every call, and counts."""

    def __init__(
        self,
        stage: Stage,
        tally: Tally,
        name: str,
        step: int = 1,  # every how manieth call is tried
        seed: int = 0,  # with which of them it begins
        most: int = _MOST_VIOLATIONS,  # after so many violations it tries no more
        first: int = 1,  # calls before this one are not tried
    ) -> None:
        self._stage, self._tally, self._name, self._step, self._first = stage, tally, name, step, first
        self._begins = itertools.count(seed)
        self._most = len(tally.violations) + most

    def at_every_call(self, kind: str, when: When, *, always: bool = False) -> int:
        """Puts a fault of one kind at every call of a first run; returns at how many."""
        return self._count(lambda number: self.play([Fault(kind, number, when, always)]), self._step)

    def twice(self, kind: str, when: When, step: int) -> int:
        """Puts a fault at every call of a first run, and after each one at every `step`-th of the run that goes on."""
        return self._count(lambda number: self._after(Fault(kind, number, when), number, step), self._step)

    def in_pairs(self, second_step: int = 1) -> int:
        """Stops a run at every call, then another one at each `second_step`-th; returns at how many of the first's. See
        `Trial.take_over`."""
        turns = itertools.count()

        def first(number: int) -> bool:
            begin = 1 + next(turns) % second_step
            met = False
            for second in range(begin, _MOST_CALLS, second_step):
                met, again = self._pair(number, second)
                if not met or not again or len(self._tally.violations) >= self._most:
                    break
            return met

        return self._count(first, self._step)

    def _pair(self, first: int, second: int) -> tuple[bool, bool]:
        met, trial = (False, False), None
        try:
            trial = Trial(self._stage)
            met = trial.take_over(first, second)
            trial.finish()
        except AssertionError as error:
            self._tally.violation(f"{self._name} pair@{first}/{second}: {error}")
            met = (True, True)
        if trial is not None:
            trial.remove()
        self._tally.trial(faults=sum(met), points=int(all(met)))
        return met

    def play(self, faults: Sequence[Fault], before: Trial | None = None) -> bool:
        """Plays one trial; returns whether the last of its faults came about."""
        trial = None
        met = False
        with self._told(faults if before is None else [*before.suffered, *faults]):
            trial = Trial(self._stage, before)
            for fault in faults:
                met = trial.suffer(fault)
            trial.finish()
            if not self._tally.trials % 8:
                trial.finish_again()
        if trial is not None:
            trial.remove()
            for call in trial.met:
                self._tally.count(f"faults at {call}")
        self._tally.trial(faults=0 if trial is None else len(trial.met), points=int(met))
        return met

    def _after(self, first: Fault, number: int, step: int) -> bool:
        met = False
        base = None
        with self._told([first]):
            base = Trial(self._stage)
            met = base.suffer(first)
        if base is not None:
            if met:
                turns = itertools.count(number)
                self._count(lambda second: self._second(base, first, second, next(turns)), step)
            base.remove()
        return met

    def _second(self, base: Trial, first: Fault, number: int, turn: int) -> bool:
        kind, when, always = _AGAIN[turn % len(_AGAIN)]
        again = Fault(kind, number, when, always)
        # What a live source gave in the first run is not there any more.
        return self.play([first, again]) if self._stage.scene.live else self.play([again], base)

    def _count(self, play: Callable[[int], bool], step: int) -> int:
        met = unmet = 0
        for number in range(self._first + next(self._begins) % step, _MOST_CALLS, step):
            if len(self._tally.violations) >= self._most:
                break
            if play(number):
                met, unmet = met + 1, 0
            else:
                unmet += 1
                if unmet == _UNMET:
                    break
        return met

    @contextmanager
    def _told(self, faults: Sequence[Fault]) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self._tally.violation(f"{self._name} {' '.join(map(str, faults))}: {error}")


@contextmanager
def stage(name: str, place: Path, broken: Sequence[str] = ()) -> Iterator[Stage]:
    """A scene by its name, ready to be played; see `Stage`."""
    with fast_folder(place) as folder, Commands(folder) as nursery, Reader() as reader:
        yield Stage(POINTS[name], nursery, reader, folder / "stage", broken)


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    step = max(1, round(1 / scale))
    for name in POINTS:
        with contextlib.ExitStack() as stack:
            try:
                sweeper = Sweeper(stack.enter_context(stage(name, place)), tally, name, step, seed)
            except AssertionError as error:
                tally.violation(f"{name}: {error}")
                continue
            for when in ways("kill"):
                sweeper.at_every_call("kill", when)
            if name in _ERRONEOUS:
                for kind in ERRORS:
                    for when in ways(kind):
                        sweeper.at_every_call(kind, when)
                    sweeper.at_every_call(kind, ways(kind)[0], always=True)
            for kind, when, every in _STACKED.get(name, ()):
                sweeper.twice(kind, when, every)


def main() -> int:
    name, *faults = sys.argv[1:]
    tally = Tally(name)
    with tempfile.TemporaryDirectory() as place, stage(name, Path(place)) as played:
        Sweeper(played, tally, name).play(parse_faults(" ".join(faults)))
    print(tally)
    return int(bool(tally.violations))


if __name__ == "__main__":
    sys.exit(main())
