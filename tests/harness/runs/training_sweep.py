"""Training jobs that are killed and resumed with other ranks, over streams that are still produced: see tests/crash."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.harness.runs.plan import make_blend_plan, make_plan
from tests.harness.runs.play import Runs
from tests.harness.tally import Tally

__all__ = ["sweep"]

_RUNS: Final = 1000


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Plays 1,000 runs of 3 to 5 kills each, about a second of one CPU a run; a seed a run, from `seed` * 1,000 on.

    Every fourth one is over a blend.
    """
    with Runs(place) as nursery:
        for number in range(seed * _RUNS, seed * _RUNS + max(1, int(_RUNS * scale))):
            blend = number % 4 == 3
            played = nursery.play(make_blend_plan(number) if blend else make_plan(number))
            tally.count("runs over blends", blend)
            kills = sum(played.kills.values())
            tally.trial(faults=kills + played.deaths, points=kills)
            tally.count("kills of all ranks", kills)
            tally.count("kills of the producer alone", played.deaths)
            tally.count("resumes from an older checkpoint", played.again)
            tally.count("chunks deleted", played.deleted)
            if played.kind is not None:
                again = f"scripts/sweep_resumes {'--blend ' if blend else ''}--runs 1 --seed {number}"
                tally.violation(f"{played.kind}: {played.text} (alone: {again})")
