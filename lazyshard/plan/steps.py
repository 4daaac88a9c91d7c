"""Steps: which positions of a part a training step takes, and which step takes a position.

All lanes of a part take `draws_per_step` positions in a step. Steps are counted through the whole run, from 0; what was
skipped takes none. Two kinds of trainers::

    draws_per_step=4, epochs of 10 positions        step 0     1     2     3     4     5
    even: steps go on over the end of an epoch          0-3   4-7   8-11 12-15 16-19 20-23
    cut:  the last step of an epoch takes what is left  0-3   4-7   8-9  10-13 14-17 18-19
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StepPlace(NamedTuple):
    """What a step takes: positions [start, stop) of every lane, counted from the beginning of a part."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PartSteps:
    """The steps of one part, of whose lanes `draws` positions were drawn, trained or skipped, after `first_step`.

    `draws_per_step` is 0 if not known. `cut`, where steps end with an epoch: its positions in the first one, in others.
    """

    first_step: int
    draws: int
    draws_per_step: int
    trained: bool = True
    cut: tuple[int, int] | None = None

    @property
    def known(self) -> bool:
        """Whether it is known which step takes what; of what was skipped there is nothing to know."""
        return not self.trained or self.draws_per_step > 0

    @property
    def stop_step(self) -> int:
        """Steps trained by the end of the part, one that was begun and not ended among them."""
        return self.first_step if not self.trained or not self.draws else self._step(self.draws - 1) + 1

    def step_of(self, position: int) -> int | None:
        """Returns the step that takes a position; None if it is not known, or was skipped."""
        return self._step(position) if self.trained and self.draws_per_step else None

    def positions(self, step: int) -> tuple[int, int]:
        """Returns the positions [start, stop) that a step of this part takes. Raises ValueError: it has none such."""
        within, each = step - self.first_step, self.draws_per_step
        if within < 0 or not self.trained or not each:
            raise ValueError(f"step {step} is none of the part that begins with step {self.first_step}")
        if self.cut is None:
            return within * each, (within + 1) * each
        start, (length, full) = 0, self.cut
        if (later := within + length // -each) >= 0:
            if not full:
                raise ValueError(f"step {step} is past the end: later epochs hold no whole batch")
            epoch, within = divmod(later, -(-full // each))
            start, length = length + epoch * full, full
        return start + within * each, start + min((within + 1) * each, length)

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
    """The steps of a run, part by part; the last one is current, so its steps have no end."""

    def __init__(self, parts: Sequence[PartSteps]) -> None:
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
        """Returns what a step took, or will take if the run goes on as it is; None if that is not known."""
        last = len(self.parts) - 1
        for number, part in enumerate(self.parts):
            if step < part.first_step:
                return None
            if not part.trained or (number < last and step >= part.stop_step):
                continue
            return StepPlace(number, *part.positions(step)) if part.draws_per_step else None
        return None

    def step_of(self, part: int, position: int) -> int | None:
        """Returns the step that takes a position of a part; None if it is not known, or was skipped."""
        return self.parts[part].step_of(position)

    def ragged(self) -> list[int]:
        """Returns the parts whose draws end within a step: a trainer only stops between two."""
        begun = [(n, one) for n, one in enumerate(self.parts) if one.trained and one.draws_per_step and one.draws]
        return [number for number, part in begun if part.positions(part.stop_step - 1)[1] != part.draws]

    def breaks(self) -> list[tuple[int, int, int]]:
        """Returns where steps of known parts do not follow on each other: part, steps before it, its first one."""
        befores = [0, *(part.stop_step for part in self.parts)]
        return [
            (number, before, part.first_step)
            for number, (before, part) in enumerate(zip(befores, self.parts, strict=False))
            if part.first_step != before and (not number or self.parts[number - 1].known)
        ]
