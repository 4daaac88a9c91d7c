"""Steps: which positions of a part a training step takes, and which step takes a position.

All lanes of a part take as many positions in a step: `draws_per_step`, the micro batch times the accumulation. Steps
are counted through the whole run, from 0; each part says how many were trained before it. Two kinds of trainers::

    draws_per_step=4, epochs of 10 positions        step 0     1     2     3     4     5
    even: steps go on over the end of an epoch          0-3   4-7   8-11 12-15 16-19 20-23
    cut:  the last step of an epoch takes what is left  0-3   4-7   8-9  10-13 14-17 18-19

Where epochs hold whole steps both are the same. What was skipped takes no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lazyshard.plan.deal import check_field

__all__ = ["PartSteps", "StepPlace", "Steps"]


class StepPlace(NamedTuple):
    """What a step takes: positions of the half-open range [start, stop) of every lane, counted from a part's begin."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PartSteps:
    """The steps of one part.

    Attributes:
        first_step: steps trained before it.
        draws: positions of each lane that were drawn.
        draws_per_step: positions of each lane in a step; 0 where that is not known.
        trained: False if what it drew was skipped.
        cut: positions of each lane in the epoch in which the part begins, and in every later one, where steps end with
            an epoch; None where they go on.

    Raises:
        ValueError: a field is outside its range.
    """

    first_step: int
    draws: int
    draws_per_step: int
    trained: bool = True
    cut: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        check_field("first_step", self.first_step, 0)
        check_field("draws", self.draws, 0)
        check_field("draws_per_step", self.draws_per_step, 0)
        for length in self.cut or ():
            check_field("length of an epoch", length, 0)

    @property
    def known(self) -> bool:
        """Whether it is known which step takes what; of what was skipped there is nothing to know."""
        return not self.trained or self.draws_per_step > 0

    @property
    def stop_step(self) -> int:
        """Steps trained by the end of the part, one that was begun and not ended among them."""
        return self.first_step if not self.trained or not self.draws else self._step(self.draws - 1) + 1

    def step_of(self, position: int) -> int | None:
        """Return the step that takes a position; None if it is not known, or was skipped."""
        return self._step(position) if self.trained and self.draws_per_step else None

    def positions(self, step: int) -> tuple[int, int]:
        """Return the half-open range of positions that a step of this part takes.

        Raises:
            ValueError: the step lies before the part, or the part does not know its steps.
        """
        within, each = step - self.first_step, self.draws_per_step
        if within < 0 or not self.trained or not each:
            raise ValueError(f"step {step} is none of the part that begins with step {self.first_step}")
        if self.cut is None:
            return within * each, (within + 1) * each
        length, full = self.cut
        steps = -(-length // each)
        if within < steps:
            return within * each, min((within + 1) * each, length)
        if not full:
            raise ValueError(f"step {step} is past the end: later epochs hold no whole batch")
        epoch, within = divmod(within - steps, -(-full // each))
        start = length + epoch * full
        return start + within * each, start + min((within + 1) * each, full)

    def _step(self, position: int) -> int:
        each = self.draws_per_step
        if not each:
            return self.first_step
        if self.cut is None or position < self.cut[0]:
            return self.first_step + position // each
        length, full = self.cut
        if not full:
            raise ValueError(f"position {position} is past the end: later epochs hold no whole batch")
        epoch, within = divmod(position - length, full)
        return self.first_step - (-length // each) + epoch * -(-full // each) + within // each


class Steps:
    """The steps of a run, part by part.

    Args:
        parts: in order, at least one; the last one is current, so its steps have no end.

    Attributes:
        parts: as given.
    """

    def __init__(self, parts: Sequence[PartSteps]) -> None:
        if not parts:
            raise ValueError("a run has at least one part")
        self.parts = tuple(parts)

    @property
    def trained(self) -> int:
        """Steps trained so far; as far as it is known."""
        return self.parts[-1].stop_step

    @property
    def unknown(self) -> int | None:
        """The first part that does not know its steps, None if all do."""
        return next((number for number, part in enumerate(self.parts) if not part.known), None)

    def place(self, step: int) -> StepPlace | None:
        """Return what a step took, or will take if the run goes on as it is.

        Returns:
            None if it is not known: it lies in a part that does not know its steps, or in none.

        Raises:
            ValueError: as `PartSteps.positions`.
        """
        last = len(self.parts) - 1
        for number, part in enumerate(self.parts):
            if step < part.first_step:
                return None
            if not part.trained or (number < last and step >= part.stop_step):
                continue
            return StepPlace(number, *part.positions(step)) if part.draws_per_step else None
        return None

    def step_of(self, part: int, position: int) -> int | None:
        """Return the step that takes a position of a part; None if it is not known, or was skipped."""
        return self.parts[part].step_of(position)

    def ragged(self) -> list[int]:
        """Return the parts whose draws end within a step: a trainer only stops between two."""
        found = []
        for number, part in enumerate(self.parts):
            if part.trained and part.draws_per_step and part.draws:
                _, stop = part.positions(part.stop_step - 1)
                if stop != part.draws:
                    found.append(number)
        return found

    def breaks(self) -> list[tuple[int, int, int]]:
        """Return where steps do not follow on each other: part, steps by the end of the one before, steps it begins at.

        Parts that do not know their steps, or whose predecessor does not, are passed over.
        """
        found = []
        before = 0
        for number, part in enumerate(self.parts):
            if part.first_step != before and (not number or self.parts[number - 1].known):
                found.append((number, before, part.first_step))
            before = part.stop_step
        return found
