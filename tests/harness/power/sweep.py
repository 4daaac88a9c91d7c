"""Power cuts on ext4 and xfs: at every call of producers and consumers that changes a file; see scripts/test_faults.
What of a run a cut shows depends on the filesystem, and on whether its journal came onto the device: each is cut both
ways. Parts: `single`, a cut at each point; `kill, cut`, a kill at each call and a cut at each point of the recovery;
`cut, cut`, likewise; and cuts of a consumer that keeps checkpoints, by itself and as ms-swift's plug-in does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.harness.disks import FILESYSTEMS, Disk, fast_folder
from tests.harness.power.consumer import begin, cut_consumer_at_each_call
from tests.harness.power.trials import Bench, PlayedScene, cut_at_each_call, cut_in_each_recovery, make_whole
from tests.harness.processes.nursery import Nursery
from tests.harness.scenes.table import POWER
from tests.harness.tally import Tally

_STACKED_EVERY: Final = {
    "plain": 6,
    "gzipped": 18,
    "followed": 6,
    "retained": 36,
    "encoded": 18,
    "encoded retained": 36,
}
"""Of the pairs of points one in so many: all first ones, and with the neighbours of each all second ones."""


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Cuts the power at all points, or with a smaller `scale` at every 1/scale-th; `seed` decides with which it begins.
    `place`: folder for images where there is no room in memory."""
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
                        stacked = every * _STACKED_EVERY[name]
                        with _counted(tally, f"{filesystem} {name}, killed and cut in the recovery"):
                            cut_in_each_recovery(tally, bench, stacked, seed)
                        with _counted(tally, f"{filesystem} {name}, cut and cut in the recovery"):
                            cut_in_each_recovery(tally, bench, 2 * stacked, seed, power_first=True)
                    for swift in (False, True):
                        with _counted(tally, f"{filesystem} consumer{' as of ms-swift' if swift else ''}, cut"):
                            cut_consumer_at_each_call(tally, forks, disk, beginning, every, seed, swift=swift)
            except pytest.skip.Exception as reason:
                tally.notes.append(f"{filesystem} was left out: {reason}")


@contextmanager
def _counted(tally: Tally, name: str) -> Iterator[None]:
    before = tally.trials
    yield
    tally.count(name, tally.trials - before)
