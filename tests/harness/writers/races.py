"""Rival producers of one stream, whose locks do not meet, as threads of which one runs. Named writers: `many`."""

import fcntl
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from lazyshard.errors import ProducerFenced
from tests.harness.disks import fast_folder
from tests.harness.points.sweep import Sweeper, stage
from tests.harness.processes.kill_points import CALLS
from tests.harness.tally import Tally
from tests.harness.writers.crashes import check, check_clean, produce

_TO_THE_END: Final = 1 << 30
_LAST: Final = 99  # The writer that comes when the race is over
_MAKES: Final = os.O_CREAT | os.O_TRUNC
_LOOKS: Final = ("listdir", "scandir", "stat", "lstat")  # Functions of `os` that look at names, besides `open`
_here = threading.local()


class _Killed(BaseException):
    """Ends a racer at its next change of a file."""


class Turn(NamedTuple):
    who: int  # the number of the writer that runs
    changes: int | None = None  # before how many changes of files it stops again; None to run to its end


class Racer:
    def __init__(self, directory: Path, *, arrays: bool) -> None:
        self.fenced = False  # whether it has ended because another one had the stream
        self.failure: BaseException | None = None  # what else it has ended by
        self.ended = self._killed = False
        self._directory, self._arrays = directory, arrays
        self._left = 0
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self, changes: int | None) -> None:
        if not self.ended:
            self._left = _TO_THE_END if changes is None else changes
            self._go.release()
            self._stopped.acquire()

    def kill(self) -> None:
        self._killed = True
        self.advance(None)

    def before_change(self) -> None:
        if not self._left:
            self._stopped.release()
            self._go.acquire()
        if self._killed:
            raise _Killed
        self._left -= 1

    def _run(self) -> None:
        self._go.acquire()
        _here.racer = self
        try:
            produce(self._directory, arrays=self._arrays)
        except ProducerFenced:
            self.fenced = True
        except BaseException as error:
            self.failure = error
        finally:
            self.ended = True
            self._stopped.release()


@contextmanager
def without_locks(*, looks: bool = False) -> Iterator[None]:
    """Has file locks hold nobody off, and racers stop where they are to: before changes of files, and before looks."""

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            racer = getattr(_here, "racer", None)
            if racer is not None and (looks or name != "open" or arguments[1] & _MAKES):
                racer.before_change()
            return call(*arguments, **named)

        return counting

    calls: dict[str, Any] = {name: counted(name, getattr(os, name)) for name in (*CALLS, *(_LOOKS if looks else ()))}
    with mock.patch.multiple(os, **calls), mock.patch.object(fcntl, "flock", lambda fd, operation: None):
        yield


def race(directory: Path, turns: Iterable[Turn], *, arrays: bool = False) -> tuple[int, ...]:
    """Plays a race, and one more writer after it; returns how many turns each was stopped in before it had ended."""
    racers: dict[int, Racer] = {}
    stops: dict[int, int] = {}
    try:
        _play(directory, (*turns, Turn(_LAST)), racers, stops, arrays=arrays)
        check_clean(directory, arrays=arrays)
        assert not all(racer.fenced for who, racer in racers.items() if who != _LAST), "nobody has got through"
    finally:
        for racer in racers.values():
            racer.kill()
    return tuple(stops[who] for who in sorted(stops) if who != _LAST)


def _play(folder: Path, turns: Iterable[Turn], racers: dict[int, Racer], stops: dict[int, int], arrays: bool) -> None:
    sealed: dict[str, bytes] = {}
    for who, changes in turns:
        if who not in racers:
            racers[who] = Racer(folder, arrays=arrays)
        racer = racers[who]
        racer.advance(changes)
        stops[who] = stops.get(who, 0) + (not racer.ended)
        if racer.failure is not None:
            failure = racer.failure
            raise AssertionError(f"writer {who} ends by {type(failure).__name__}: {failure}") from failure
        sealed = check(folder, sealed, arrays=arrays)


def race_in_pairs(
    root: Path,
    *,
    arrays: bool = False,
    begun: bool = False,  # whether a third one was killed before, with a chunk that is not sealed yet
    looks: bool = False,  # whether they are stopped before looks at files too, which count as changes then
    step: int = 1,  # every how manieth stop of the first one is played
    first: int = 0,  # before which change that one is stopped first
    other: int = 0,  # likewise the second one, in the first round
    found: Callable[[str], object],
) -> int:
    pairs = 0
    killed = [Turn(2, _unsealed_at(root, arrays, looks))] if begun else []
    for at in range(first, _TO_THE_END, step):
        for second in range(other if at == first else 0, _TO_THE_END):
            stops = _tell(root, [*killed, Turn(0, at), Turn(1, second), Turn(0), Turn(1)], arrays, found, looks)
            pairs += 1
            if stops is not None and not stops[1]:
                break
        if stops is not None and not stops[0]:
            return pairs
    raise AssertionError


def race_by_chance(root: Path, seeds: Sequence[int], *, found: Callable[[str], object]) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        turns = [Turn(dice.randrange(3), dice.choice((1, 2, 3, 5, 8, 13, 21, 34))) for _ in range(dice.randint(4, 16))]
        ends = [Turn(who) for who in dice.sample(range(3), 3)]
        _tell(root, [*turns, *ends], bool(seed % 2), found)


def _unsealed_at(root: Path, arrays: bool, looks: bool) -> int:
    directory = root / "begun"
    for changes in range(_TO_THE_END):
        racer = Racer(directory, arrays=arrays)
        with without_locks(looks=looks):
            racer.advance(changes)
            there = (directory / "chunk_00001.jsonl").exists()
            racer.kill()
        shutil.rmtree(directory, ignore_errors=True)
        if there:
            return changes
    raise AssertionError


def _tell(
    root: Path, turns: list[Turn], arrays: bool, found: Callable[[str], object], looks: bool = False
) -> tuple[int, ...] | None:
    directory = root / "race"
    try:
        with without_locks(looks=looks):
            return race(directory, turns, arrays=arrays)
    except AssertionError as error:
        found(f"{[tuple(turn) for turn in turns]}{' with arrays' * arrays}{' before looks too' * looks}: {error}")
        return None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    step = max(1, round(1 / scale))
    with fast_folder(place) as folder:
        for arrays, begun in ((False, False), (False, True), (True, True)):
            pairs = race_in_pairs(
                folder, arrays=arrays, begun=begun, looks=True, step=step, first=seed % step, found=tally.violation
            )
            tally.points += pairs
            tally.trials += pairs
            tally.trial(2 * pairs)
        races = max(1, round(scale * 5000))
        race_by_chance(folder, range(seed * races, (seed + 1) * races), found=tally.violation)
        tally.trials += races
    # Every how manieth call of the second run is played.
    for name, every in {"plain": 3, "made": 7, "followed": 7, "retained": 11, "encoded": 7}.items():
        with stage(name, place) as played:
            Sweeper(played, tally, name, step, seed).in_pairs(every)
