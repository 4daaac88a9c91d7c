"""Which samples the surviving history of a run has trained, in memory that does not grow with the run.

For each sample from the first that could still be trained anew it is kept in which stretch of the run that was, a
stretch being what lies between two checkpoints. So a resume from an older checkpoint takes back what came after it::

    base                                                 stretches since the run began: 1 | 2 | 3
    v
    | 1 1 1 1 2 2 1 2 2 3 3 2 . 3 . . . .                samples from `base` on; `.` is not trained
    roll back to the checkpoint behind stretch 2:
    | 1 1 1 1 2 2 1 2 2 . . 2 . . . . . .
    the checkpoints before it are gone, so nothing takes that back any more:
                        | . . 2 . . . . .                `base` moves up
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

MOST: Final = 1 << 24
"""So many samples may lie between the first that is not trained for good and the last that is trained."""


class Violation(AssertionError):
    """A promise that was not kept.

    Attributes:
        kind: which one.
        text: what was seen.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


class Ledger:
    """The bookkeeping.

    Attributes:
        base: every sample below is trained for good.
        stretch: number of the current stretch, from 1.
    """

    def __init__(self) -> None:
        self.base = 0
        self.stretch = 1
        self._marks: npt.NDArray[np.uint32] = np.zeros(1 << 12, dtype=np.uint32)

    @property
    def trained(self) -> int:
        """How many samples the surviving history has trained."""
        return self.base + int(np.count_nonzero(self._marks))

    @property
    def size(self) -> int:
        """How many samples it keeps something for."""
        return len(self._marks)

    def train(self, samples: npt.NDArray[np.int64]) -> None:
        """Counts the samples of a step.

        Raises:
            Violation: `twice`, one of them is trained already; `lost`, one that was left behind never came.
        """
        places = samples - self.base
        known = places[(places >= 0) & (places < len(self._marks))]
        again = places < 0
        again[(places >= 0) & (places < len(self._marks))] = self._marks[known] > 0
        if again.any() or len(np.unique(samples)) < len(samples):
            raise Violation("twice", f"samples {sorted(samples[again].tolist())[:10]} of {len(samples)} came again")
        most = int(places.max()) + 1
        if most > MOST:
            raise Violation("lost", f"sample {self.lowest()} was not trained, {int(samples.max())} is")
        if most > len(self._marks):
            grown = np.zeros(max(most, 2 * len(self._marks)), dtype=np.uint32)
            grown[: len(self._marks)] = self._marks
            self._marks = grown
        self._marks[places] = self.stretch

    def close(self) -> int:
        """Ends a stretch, where a checkpoint is written; returns its number."""
        self.stretch += 1
        return self.stretch - 1

    def roll_back(self, stretch: int) -> None:
        """Takes back what came after a stretch; 0 takes back all that is not for good."""
        self._marks[self._marks > stretch] = 0
        self.stretch = stretch + 1

    def settle(self, stretch: int) -> None:
        """Says that nothing up to the end of a stretch will be taken back."""
        settled = (self._marks > 0) & (self._marks <= stretch)
        count = len(settled) if settled.all() else int(np.argmin(settled))
        if count:
            self._marks = np.concatenate((self._marks[count:], np.zeros(count, dtype=np.uint32)))
            self.base += count
        used = np.flatnonzero(self._marks)
        needed = int(used[-1]) + 1 if len(used) else 0
        if len(self._marks) > max(1 << 12, 4 * needed):
            self._marks = self._marks[: max(1 << 12, 2 * needed)].copy()

    def lowest(self) -> int:
        """Returns the first sample that is not trained."""
        open_marks = np.flatnonzero(self._marks == 0)
        return self.base + (int(open_marks[0]) if len(open_marks) else len(self._marks))

    def check_below(self, floor: int) -> None:
        """Checks that every sample below a number is trained.

        Raises:
            Violation: `lost`.
        """
        if self.lowest() < floor:
            raise Violation("lost", f"sample {self.lowest()} was never trained, and nobody is to draw it any more")
