"""Two producers at a time where file locks do not meet, each stopped before every one of its calls that touch files.

First `ChunkWriter` alone, with all pairs of calls that change files or look at them, and three of them by chance
(`tests.harness.writers.races`); then the command, which also keeps refused rows, follows directories, encodes and
deletes, at every call of the first run that changes files and some of the second one (`Sweeper.in_pairs`). A point
is a pair of calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.harness.points.sweep import Sweeper, stage
from tests.harness.tally import Tally
from tests.harness.writers.crashes import fast_directory
from tests.harness.writers.races import race_by_chance, race_in_pairs

SCENES: Final = {"plain": 3, "made": 7, "followed": 7, "retained": 11, "encoded": 7}
"""Which scenes of the command are played, and every how manieth call of the second run."""

_RACES: Final = 5000


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Plays all of it, or of the first one's calls every 1/scale-th."""
    step = max(1, round(1 / scale))
    with fast_directory(place) as folder:
        for arrays, begun in ((False, False), (False, True), (True, True)):
            pairs = race_in_pairs(
                folder, arrays=arrays, begun=begun, looks=True, step=step, first=seed % step, found=tally.violation
            )
            tally.points += pairs
            tally.trials += pairs
            tally.trial(2 * pairs)
        races = max(1, round(scale * _RACES))
        race_by_chance(folder, range(seed * races, (seed + 1) * races), found=tally.violation)
        tally.trials += races
    for name, every in SCENES.items():
        with stage(name, place) as played:
            Sweeper(played, tally, name, step, seed).in_pairs(every)
