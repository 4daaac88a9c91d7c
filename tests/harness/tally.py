"""What a sweep counts: how many places a fault was put at, what came of it, and what was broken."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


class RunViolation(AssertionError):  # A promise to a run of training that was not kept
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        # `twice`, `skipped`, `lost`, `order`, `gone`, `torn`, `hang`, `full`, `leak`, `error`, `producer`, `refused`
        self.kind = kind
        self.text = text  # what was seen


@dataclass
class Tally:
    name: str  # of the sweep
    points: int = 0  # different places of faults: calls of a run, bytes of a file, states of the model
    trials: int = 0  # runs, or steps of a model, that were checked
    faults: int = 0  # faults that came about: kills, errors, power cuts, damaged files
    violations: list[str] = field(default_factory=list)  # a line each, with what is needed to see it again
    notes: list[str] = field(default_factory=list)  # why, a line each: a filesystem that this machine lacks
    more: dict[str, int] = field(default_factory=dict)  # further counts, by name
    seconds: float = 0.0  # how long it took
    say: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        self._started = self._said = time.monotonic()

    def trial(self, faults: int = 1, points: int = 0, trials: int = 1) -> None:
        self.trials += trials
        self.faults += faults
        self.points += points
        now = time.monotonic()
        self.seconds = now - self._started
        if self.say is not None and now - self._said >= 10.0:
            self._said = now
            self.say(str(self))

    def violation(self, what: str) -> None:
        self.violations.append(what)
        print(f"{self.name}: VIOLATION: {what}", file=sys.stderr, flush=True)

    def count(self, name: str, number: int = 1) -> None:
        self.more[name] = self.more.get(name, 0) + number

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "say"}

    def __str__(self) -> str:
        more = "".join(f", {number:,} {name}" for name, number in self.more.items())
        return (
            f"{self.name}: {self.points:,} points, {self.trials:,} trials, {self.faults:,} faults{more}, "
            f"{len(self.violations):,} violations, {self.seconds:,.0f} s"
        )
