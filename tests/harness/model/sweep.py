"""Explores the model whole, about ten minutes of CPU time: points are states, trials moves from one to another."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from tests.harness.model.disk import Disk
from tests.harness.model.producer import Plan
from tests.harness.model.world import FAULTS as KINDS
from tests.harness.model.world import World
from tests.harness.planted.model import MUTANTS
from tests.harness.tally import Tally


@dataclass
class Explored:
    states: int = 0  # different states, the first one included
    moves: int = 0  # what leads from one to another: steps and faults
    faults: Counter[str] = field(default_factory=Counter)  # moves that are faults, by kind
    finished: int = 0  # states in which both processes have succeeded
    broken: str | None = None  # which promise is broken, None if all hold
    history: list[str] = field(default_factory=list)  # what has led there, a line each

    def __str__(self) -> str:
        lines = [f"{number:3}. {line}" for number, line in enumerate(self.history, 1)]
        return "\n".join([f"{self.broken} (found after {self.states:,} states)", *lines])


class Explorable(Protocol):
    """A world of any states and moves."""

    def first(self, faults: int) -> Any: ...
    def moves(self, state: Any, /) -> Iterable[Any]: ...
    def has_finished(self, state: Any, /) -> bool: ...
    def disk(self, state: Any, /) -> Disk: ...


def explore(world: Explorable, faults: int) -> Explored:
    first = world.first(faults)
    before: dict[Any, Any] = {first: None}
    waiting = deque([first])
    found = Explored()
    while waiting and found.broken is None:
        state = waiting.popleft()
        found.finished += world.has_finished(state)
        for move in world.moves(state):
            found.moves += 1
            if move.who in KINDS:
                found.faults[move.who] += 1
            if move.broken is not None:
                found.broken, found.history = move.broken, _history(world, before, state, move)
                break
            if move.state not in before:
                before[move.state] = state
                waiting.append(move.state)
    found.states = len(before)
    return found


def _history(world: Explorable, before: dict[Any, Any], state: Any, last: Any) -> list[str]:
    moves = [(state, last)]
    while (earlier := before[state]) is not None:
        moves.append((earlier, next(move for move in world.moves(earlier) if move.state == state)))
        state = earlier
    return [_line(world, earlier, move) for earlier, move in reversed(moves)]


def _line(world: Explorable, state: Any, move: Any) -> str:
    if move.who != "power cut":
        word = {"kill": "KILL", "refuse": "ERROR"}.get(move.who, move.who)
        return f"{word}: {move.what}"
    before, after = world.disk(state).visible(), world.disk(move.state).visible()
    lost = [f"{path} is gone" for path in before if path not in after]
    back = [f"{path} holds {value}" for path, value in after.items() if before.get(path) != value]
    return f"POWER CUT: {', '.join(lost + back) or 'nothing is lost'}"


FAULTS: Final = 2

PLANS: Final = (  # The smallest first
    *(Plan(1), Plan(1, partial=True), Plan(2, partial=True), Plan(2), Plan(2, keeps=2), Plan(3, partial=True)),
    *(Plan(3), Plan(3, partial=True, keeps=2)),
)


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    worlds = [(World(plan), FAULTS) for plan in PLANS[: math.ceil(len(PLANS) * scale)]]
    for world, faults in (*worlds, (World(Plan(0)), 1), (World(Plan(0), every_junk=True), 1)):
        found = explore(world, faults)
        tally.trial(sum(found.faults.values()), found.states, found.moves)
        tally.count("runs finished in different ways", found.finished)
        tally.notes.append(f"{world.plan}, {faults} faults: {found.states:,} states, {found.moves:,} moves")
        if found.broken is not None:
            tally.violation(f"{world.plan}: {found}")
    for mutant in MUTANTS:
        found = explore(mutant.world(), len(mutant.kinds))
        if found.broken is None or mutant.finds not in found.broken:
            tally.violation(f"{mutant.name} was to be found by {mutant.finds!r}, found was {found.broken!r}")
            continue
        tally.count("mutants found")
        less = explore(mutant.world(any_faults=True), len(mutant.kinds) - 1) if mutant.kinds else None
        if less is not None and less.broken is not None:
            tally.violation(f"{mutant.name} is found with one fault less: {less}")
