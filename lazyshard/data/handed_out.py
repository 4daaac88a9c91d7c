"""What the state of an iterable says beside that of its run: of which worker it is, and where in a micro batch."""

from __future__ import annotations

from typing import Any

from lazyshard.data.run_state import HANDED_OUT, WORKER, WORKERS
from lazyshard.errors import StateInvalid

Worker = tuple[int, int]
"""Number of a DataLoader worker, and how many there are."""


def check_worker(state: dict[str, Any], here: Worker | None, where: str) -> None:
    """Raises StateInvalid: a state is that of another worker than this, or of none; None for the whole run."""
    there = (state[WORKER], state.get(WORKERS)) if WORKER in state else None
    if there != here:
        mine, other = (f"DataLoader worker {one[0]} of {one[1]}" if one else "a whole run" for one in (here, there))
        raise StateInvalid(
            f"{where}: expected that of {mine}, found that of {other}; with another number of workers go on from what "
            f"`state_dict(consumed)` gave",
            field=WORKERS,
            expected=mine,
            actual=other,
        )


def check_micro_batch(there: tuple[Any, Any], here: tuple[int, int], where: str) -> None:
    """Raises StateInvalid: a state stands within a micro batch of other ranks, or of another batch size."""
    if there != here:
        mine, other = (f"{ranks!r:.20} ranks, batch_size {size!r:.20}" for ranks, size in (here, there))
        raise StateInvalid(
            f"{where}: it stands within a micro batch of {there[1]!r:.20} of {there[0]!r:.20} ranks, here it is "
            f"{here[1]} of {here[0]}: go on from one that was saved at the end of a micro batch",
            field=HANDED_OUT,
            expected=mine,
            actual=other,
        )


def read_count(state: dict[str, Any], name: str, most: int | None, where: str) -> int:
    """Returns how many were handed out, by a field of a state, 0 if it has none.

    Raises:
        StateInvalid: it is no integer from 0, or above the most.
    """
    found = state.get(name, 0)
    if type(found) is not int or found < 0 or (most is not None and found > most):
        expected = "an integer from 0" + ("" if most is None else f" to {most}")
        raise StateInvalid(
            f"{where}: expected {expected} as {name!r}, found {found!r:.100}; go on from an older checkpoint",
            field=name,
            expected=expected,
            actual=f"{found!r:.100}",
        )
    return found
