"""A sample of the power cuts of `power.sweep`, and a proof that they show what careful code must not forget."""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lazyshard.format.records import seal_name
from tests.harness.disks import FILESYSTEMS, Disk, Filesystem, fast_folder
from tests.harness.planted.power import OF_A_CONSUMER, OF_A_PRODUCER, OF_A_RESTART
from tests.harness.power import sweep as power
from tests.harness.power.lives import Stop, Told, Whole
from tests.harness.processes.nursery import Nursery
from tests.harness.scenes.table import POWER
from tests.harness.tally import Tally
from tests.tiers import full

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a filesystem")]


class Place:  # What the tests share: a process that has loaded everything, disks, and what is made on them
    def __init__(self, folder: Path, forks: Nursery, stack: ExitStack) -> None:
        self.folder, self.forks, self._stack = folder, forks, stack
        self._disks: dict[Filesystem, Disk] = {}
        self._made: dict[str, tuple[power.PlayedScene, Whole]] = {}

    def disk(self, filesystem: Filesystem) -> Disk:
        if filesystem not in self._disks:
            self._disks[filesystem] = self._stack.enter_context(Disk(self.folder / filesystem, filesystem))
        return self._disks[filesystem]

    def bench(self, filesystem: Filesystem, name: str, mutant: str | None = None) -> power.Bench:
        if name not in self._made:
            folder = self.folder / f"in {name}"
            folder.mkdir()
            played = power.PlayedScene(name, POWER[name], POWER[name].make(folder))
            self._made[name] = played, power.make_whole(self.forks, folder, played)
        return power.Bench(self.forks, self.disk(filesystem), *self._made[name], mutant)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    fallback = tmp_path_factory.mktemp("power")
    with (
        fast_folder(fallback) as folder,
        Nursery(folder / "forks", "tests.harness.processes.commands") as forks,
        ExitStack() as stack,
    ):
        yield Place(folder, forks, stack)


@pytest.fixture(scope="module")
def beginning(place: Place) -> power.Beginning:
    return power.begin(place.forks, place.folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("filesystem", "name", "every"),
    [
        *(("ext4", "plain", 47), ("xfs", "plain", 47), ("ext4", "retained", 101), ("xfs", "encoded retained", 151)),
        *(("ext4", "gzipped", 61), ("xfs", "followed", 61), ("ext4", "encoded", 71), ("xfs", "encoded", 71)),
    ],
)
def test_power_cut_at_any_call_loses_nothing(filesystem: Filesystem, name: str, every: int, place: Place) -> None:
    tally = Tally("power")
    power.cut_at_each_call(tally, place.bench(filesystem, name), every)
    assert tally.violations == []
    assert tally.trials > 8


@pytest.mark.full
@pytest.mark.parametrize(
    ("filesystem", "name", "power_first", "every"),
    [
        *(("ext4", "followed", False, 251), ("ext4", "plain", True, 251), ("xfs", "plain", False, 251)),
        *(("xfs", "retained", False, 701), ("ext4", "encoded", False, 307)),
    ],
)
def test_power_cut_in_recovery(filesystem: Filesystem, name: str, power_first: bool, every: int, place: Place) -> None:
    tally = Tally("power")
    power.cut_in_each_recovery(tally, place.bench(filesystem, name), every, power_first=power_first)
    assert tally.violations == []
    assert tally.faults > tally.trials > 8


@pytest.mark.parametrize(
    ("filesystem", "swift", "every"),
    [("ext4", True, 307), ("xfs", False, 307), *full(("ext4", True, 37), ("xfs", False, 37))],
)
def test_power_cut_at_any_call_of_a_consumer_deletes_nothing_that_it_needs(
    filesystem: Filesystem, swift: bool, every: int, place: Place, beginning: power.Beginning
) -> None:
    tally = Tally("power")
    bench = power.RunBench(place.forks, place.disk(filesystem), beginning, swift)
    power.cut_at_each_call(tally, bench, every)
    assert tally.violations == []
    assert tally.trials > (2 if every == 307 else 8)


@pytest.mark.full
@pytest.mark.parametrize(("mutant", "filesystem", "name", "first", "broken"), OF_A_PRODUCER)
def test_a_cut_of_the_power_shows(
    mutant: str, filesystem: Filesystem, name: str, first: int, broken: str, place: Place
) -> None:
    tally = Tally("power")
    power.cut_at_each_call(tally, place.bench(filesystem, name, mutant), first=first)
    assert [broken in violation for violation in tally.violations] == [True], tally.violations


@pytest.mark.full
@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_a_cut_after_a_restart_shows_what_it_believes_too_early(filesystem: Filesystem, place: Place) -> None:
    bench = place.bench(filesystem, "plain", OF_A_RESTART)
    tally, kills = Tally("power"), (Stop(call, "after") for call in itertools.count(30))
    power.cut_in_recovery(tally, bench, next(stop for stop in kills if _has_sealed(bench, stop)))
    assert ["1 chunks were told, 0 are there" in violation for violation in tally.violations] == [True]


def _has_sealed(bench: power.Bench, stop: Stop) -> bool:
    trial = power.ProducerTrial(bench)
    trial.live(stop)
    sealed, told = (trial.out / seal_name(0)).exists(), Told.look(trial.out).chunks
    trial.remove()
    assert not sealed or told == 0
    return sealed


@pytest.mark.full
@pytest.mark.parametrize(("mutant", "filesystem", "first", "broken"), OF_A_CONSUMER)
def test_a_cut_of_a_consumers_power_shows(
    mutant: str, filesystem: Filesystem, first: int, broken: str, place: Place, beginning: power.Beginning
) -> None:
    tally = Tally("power")
    bench = power.RunBench(place.forks, place.disk(filesystem), beginning, mutant=mutant)
    power.cut_at_each_call(tally, bench, first=first)
    assert [broken in violation for violation in tally.violations] == [True], tally.violations
