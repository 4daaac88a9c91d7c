"""Explores all states of a world, breadth first: what is found first is one of the shortest histories."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tests.harness.model.disk import SHORT, ZEROS, Disk
from tests.harness.model.world import Move, State, World

_ASIDE: Final = 1 << 12
"""States between two calls of `aside`."""


@dataclass
class Explored:
    """What was explored.

    Attributes:
        states: different states, the first one included.
        moves: what leads from one to another: steps and faults.
        faults: moves that are faults, by kind.
        finished: states in which both processes have succeeded.
        broken: which promise is broken, None if all hold.
        history: what has led there, a line each.
        whole: whether there is no other state.
    """

    states: int = 0
    moves: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    broken: str | None = None
    history: list[str] = field(default_factory=list)
    whole: bool = True

    def __str__(self) -> str:
        """Returns the history, readable."""
        lines = [f"{number:3}. {line}" for number, line in enumerate(self.history, 1)]
        return "\n".join([f"{self.broken} (found after {self.states:,} states)", *lines])


def explore(
    world: World,
    faults: int,
    *,
    most: int | None = None,
    aside: Callable[[Explored], object] = lambda _: None,
) -> Explored:
    """Explores a world until a promise is broken or there is nothing else.

    Args:
        world: the world.
        faults: how many faults may come.
        most: how many states to look at; None for all.
        aside: is called now and then.
    """
    first = world.first(faults)
    before: dict[State, State | None] = {first: None}
    waiting = deque([first])
    found = Explored()
    looked = 0
    while waiting:
        state = waiting.popleft()
        found.finished += world.has_finished(state)
        for move in world.moves(state):
            found.moves += 1
            if move.who not in ("producer", "consumer"):
                found.faults[move.who] += 1
            if move.broken is not None:
                found.states = len(before)
                found.broken = move.broken
                found.history = _history(world, before, state, move)
                found.whole = False
                return found
            if move.state not in before:
                before[move.state] = state
                waiting.append(move.state)
        found.states = len(before)
        if most is not None and found.states >= most:
            found.whole = False
            return found
        looked += 1
        if looked % _ASIDE == 0:
            aside(found)
    return found


def _history(world: World, before: dict[State, State | None], state: State, last: Move) -> list[str]:
    """Returns what has led to a state, and what comes then."""
    moves = [(state, last)]
    while (earlier := before[state]) is not None:
        moves.append((earlier, next(move for move in world.moves(earlier) if move.state == state)))
        state = earlier
    return [_line(world, earlier, move) for earlier, move in reversed(moves)]


def _line(world: World, state: State, move: Move) -> str:
    if move.who == "power cut":
        return f"POWER CUT: {_lost(world.disk(state), world.disk(move.state))}"
    if move.who == "kill":
        return f"KILL of the {' '.join(map(_text, move.what))}"
    if move.who == "refuse":
        return f"ERROR: the filesystem refuses {_text(move.what)}"
    return f"{move.who}: {_text(move.what)}"


def _text(what: object) -> str:
    if not isinstance(what, tuple):
        return str(what)
    return " ".join(_text(part) for part in what)


def _lost(disk: Disk, left: Disk) -> str:
    """Returns what a power cut has changed, in words."""
    before, after = disk.visible(), left.visible()
    told = [f"{path} is gone" for path in before if path not in after]
    told += [f"{path} is back" for path in after if path not in before]
    for path, value in after.items():
        if path in before and before[path] != value:
            told.append(f"{path} is torn" if value in (SHORT, ZEROS) else f"{path} is as before: {_text(value)}")
    return ", ".join(told) or "nothing is lost"
