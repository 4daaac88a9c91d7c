"""What a sweep counts: how many places a fault was put at, what came of it, and what was broken."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

__all__ = ["RunViolation", "Tally", "Violation"]

_SECONDS_BETWEEN_LINES: Final = 10.0


class Violation(AssertionError):
    """A promise that was not kept."""


class RunViolation(Violation):
    """A promise to a run of training that was not kept.

    Attributes:
        kind: which one: `twice`, `skipped`, `lost`, `order`, `gone` (what is needed was deleted), `torn`, `hang`,
            `full`, `leak`, `error` (somebody failed who had no reason to), `producer` (it did), `refused` (a state that
            was to be accepted).
        text: what was seen.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


@dataclass
class Tally:
    """The counts of one sweep.

    Attributes:
        name: of the sweep.
        points: different places at which a fault was put: the N-th call of a run in one of three ways, a byte of a
            file, a state of the model.
        trials: runs, or steps of a model, that were checked.
        faults: faults that came about: kills, errors, power cuts, damaged files.
        violations: promises that were broken, a line each, with what is needed to see it again.
        notes: what was not done and why, a line each: a filesystem that this machine lacks.
        more: further counts, by name.
        seconds: how long it took.
    """

    name: str
    points: int = 0
    trials: int = 0
    faults: int = 0
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    say: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        self._started = self._said = time.monotonic()

    def trial(self, faults: int = 1, points: int = 0, trials: int = 1) -> None:
        """Counts one or several, and says now and then how far it is."""
        self.trials += trials
        self.faults += faults
        self.points += points
        now = time.monotonic()
        self.seconds = now - self._started
        if self.say is not None and now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            self.say(str(self))

    def violation(self, what: str) -> None:
        """Counts a promise that was broken, and says so at once."""
        self.violations.append(what)
        print(f"{self.name}: VIOLATION: {what}", file=sys.stderr, flush=True)

    def count(self, name: str, number: int = 1) -> None:
        """Counts something else."""
        self.more[name] = self.more.get(name, 0) + number

    def as_json(self) -> dict[str, Any]:
        """Returns the counts as JSON has them."""
        found = asdict(self)
        del found["say"]
        return found

    def __str__(self) -> str:
        more = "".join(f", {number:,} {name}" for name, number in self.more.items())
        return (
            f"{self.name}: {self.points:,} points, {self.trials:,} trials, {self.faults:,} faults{more}, "
            f"{len(self.violations):,} violations, {self.seconds:,.0f} s"
        )
