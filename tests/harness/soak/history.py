"""The history of a run that survives its kills: checks each step against it, and goes back with the run.

Beside the samples themselves it is only kept where the ranks stood at the checkpoints that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lazyshard.storage import read_retired
from tests.harness.runs.checkpoints import Checkpoint
from tests.harness.soak.ledger import Ledger, Violation
from tests.harness.soak.order import DeclaredOrder, Standing
from tests.harness.soak.rank import Rules, Shape


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of a checkpoint.

    Attributes:
        stretch: of the run, that ends with it.
        standing: of the ranks.
        floor: whoever goes on from it draws no sample below.
    """

    stretch: int
    standing: Standing
    floor: int


class History:
    """The bookkeeping of a run.

    Args:
        rules: of the run.
        dp: ranks that begin it.

    Attributes:
        ledger: which samples are trained.
        trained: samples that were trained, those of lost stretches too.
        ranks_before: of the checkpoint that the current life goes on from.
    """

    def __init__(self, rules: Rules, dp: int) -> None:
        self.ledger = Ledger()
        self.trained = 0
        self.ranks_before = dp
        self._rules = rules
        self._order = DeclaredOrder(rules.unit, rules.window_samples, rules.seed, dp)
        self._beginning = Snapshot(0, self._order.standing, 0)
        self._snapshots: dict[int, Snapshot] = {}
        self._consumed = 0

    @property
    def total(self) -> int | None:
        """The stream's samples; None as long as they are not decided."""
        return self._order.total

    def learn_end(self, decided: Path) -> None:
        """Reads with which sample the source ends, which it has decided before it gave the last ones."""
        if self._order.total is None and decided.exists():
            self._order.total = int(decided.read_text())

    def go_on(self, origin: Checkpoint | None, dp: int) -> None:
        """Begins a life with so many ranks, from a checkpoint or from the beginning."""
        snapshot = self._beginning if origin is None else self._snapshots[origin.consumed]
        self._consumed = 0 if origin is None else origin.consumed
        self.ranks_before = len(snapshot.standing.own)
        self.ledger.roll_back(snapshot.stretch)
        self._order.go_on(snapshot.standing, dp)

    def train(self, step: Sequence[npt.NDArray[np.int64]], shape: Shape, number: int) -> None:
        """Checks and counts a step.

        Args:
            step: the samples of each rank.
            shape: of the life.
            number: of the step, in messages.

        Raises:
            Violation: `twice`, `lost` or `order`.
        """
        samples = np.concatenate(step)
        self.ledger.train(samples)
        for rank, (found, expected) in enumerate(zip(step, self._order.draw(shape.batch_size), strict=True)):
            if found.tolist() != expected:
                at = f"life {shape.number}, step {number}, rank {rank} of {shape.dp}"
                raise Violation("order", f"{at}: read {found.tolist()[:8]}, declared are {expected[:8]}")
        self._consumed += len(samples)
        self.trained += len(samples)

    def close(self) -> None:
        """Says that a checkpoint is written now.

        Raises:
            Violation: `lost`, somebody was to have drawn a sample by now.
        """
        floor = self._order.floor()
        self._snapshots[self._consumed] = Snapshot(self.ledger.close(), self._order.standing, floor)
        self.ledger.check_below(floor)

    def check_kept(self, stream: Path, checkpoints: Path) -> int:
        """Checks that what any kept checkpoint needs is still there, and forgets what none goes back to.

        Returns:
            Chunks that are deleted.

        Raises:
            Violation: `gone`.
        """
        # Before the checkpoints: those that are found after are the ones that were kept then, or newer.
        retired = read_retired(stream)
        kept = sorted(int(path.stem) for path in checkpoints.glob("*.json"))
        for consumed in kept:
            needed = self._snapshots[consumed].floor // self._rules.per_chunk
            if needed < retired:
                text = f"chunks below {retired} are deleted; the checkpoint after {consumed} samples needs {needed}"
                raise Violation("gone", text)
        if kept:
            self.ledger.settle(self._snapshots[kept[0]].stretch)
            for consumed in [consumed for consumed in self._snapshots if consumed < kept[0]]:
                del self._snapshots[consumed]
        return retired

    def check_whole(self, shape: Shape) -> None:
        """Checks that all is trained, but for what the last ranks leave over.

        Raises:
            Violation: `lost`.
        """
        missing = (self.total or 0) - self.ledger.trained
        if self.total is None or not 0 <= missing < shape.dp * shape.batch_size:
            raise Violation("lost", f"of {self.total} samples {self.ledger.trained} were trained")
