"""Explores the model whole: two faults anywhere, on streams of two and three chunks; and every mutant.

Points are states, trials moves from one to another. CPU time: about ten minutes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from tests.harness.model.explore import Explored, explore
from tests.harness.model.stream import Plan
from tests.harness.model.world import World
from tests.harness.planted.model import MUTANTS
from tests.harness.tally import Tally

FAULTS: Final = 2

PLANS: Final = (
    Plan(1),
    Plan(1, partial=True),
    Plan(2, partial=True),
    Plan(2),
    Plan(2, keeps=2),
    Plan(3, partial=True),
    Plan(3),
    Plan(3, partial=True, keeps=2),
)
"""The smallest first."""


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    """Explores all plans; with a scale below 1 the first of them. Nothing is drawn by chance."""
    for plan in PLANS[: math.ceil(len(PLANS) * scale)]:
        known = Explored()

        def aside(found: Explored, known: Explored = known) -> None:
            _count(tally, found, known)

        found = explore(World(plan), FAULTS, aside=aside)
        _count(tally, found, known)
        tally.count("runs finished in different ways", found.finished)
        tally.notes.append(
            f"{plan.chunks} chunks{', the last one partial' if plan.partial else ''}, {plan.keeps} checkpoints kept, "
            f"{FAULTS} faults: {found.states:,} states, {found.moves:,} moves"
        )
        if found.broken is not None:
            tally.violation(f"{plan}: {found}")
    _tell_apart(tally)
    _find_mutants(tally)


def _tell_apart(tally: Tally) -> None:
    """Looks whether telling all files with temporary names apart finds anything else, where that can be done."""
    for every_junk in (False, True):
        found = explore(World(Plan(0), every_junk=every_junk), 1)
        tally.notes.append(
            f"no chunks, 1 fault{', temporary files told apart' if every_junk else ''}: {found.states:,} states"
        )
        if found.broken is not None:
            tally.violation(str(found))


def _find_mutants(tally: Tally) -> None:
    for mutant in MUTANTS:
        found = explore(mutant.world(), len(mutant.kinds))
        if found.broken is None or mutant.finds not in found.broken:
            tally.violation(f"{mutant.name} was to be found by {mutant.finds!r}, found was {found.broken!r}")
            continue
        tally.count("mutants found")
        less = explore(mutant.world(), len(mutant.kinds) - 1) if mutant.kinds else None
        if less is not None and less.broken is not None:
            tally.violation(f"{mutant.name} is found with one fault less: {less}")
        tally.notes.append(f"{mutant.name}: found after {found.states:,} states, in {len(found.history)} steps")


def _count(tally: Tally, found: Explored, known: Explored) -> None:
    """Adds what was found since the last time."""
    tally.trial(0)
    tally.trials += found.moves - known.moves - 1
    tally.points += found.states - known.states
    tally.faults += sum(found.faults.values()) - sum(known.faults.values())
    known.states, known.moves = found.states, found.moves
    known.faults = found.faults.copy()
