"""`Packs`: packs of the rows of streams, made during training, at the indices of ms-swift's samplers.

The lengths in the seals decide which rows are in a pack (`LazyShardedSequences`). To ms-swift the packs are the
samples; they are numbered through the run and dealt by micro batches. An epoch ends with the last one of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lazyshard import BadRows, BlendedDataset, LazyShardedDataset, LazyShardedSequences, Pack
from lazyshard.data.rank import carrying, enter_process
from lazyshard.data.run_state import EpochPosition
from lazyshard.errors import LengthUnknown, StreamMismatch
from lazyshard.format.state import BlendState, SequenceState, WindowPlace
from lazyshard.stream.sequences import SequenceWalk
from lazyshard_swift.checkpoints import Position
from lazyshard_swift.errors import refused

if TYPE_CHECKING:
    from lazyshard_swift.run_plan import RunPlan


class Packs(LazyShardedSequences):
    """The packs of one rank, indexed from the start of the plan's current part. Without a window, rows are in order."""

    def __init__(self, source: LazyShardedDataset | BlendedDataset, plan: RunPlan, bad_rows: BadRows) -> None:
        # Indices count from pack number `before` of the run; the loaded state is after `trained` packs.
        self._before, self._trained, self._pid = plan.course.consumed_before, plan.consumed, 0
        order: dict[str, Any] = {"window": plan.window, "seed": plan.seed} if plan.window else {}
        order |= {"bad_rows": bad_rows, "too_long": "raise" if bad_rows.action == "raise" else "drop"}
        steps = plan.state.parts[-1].draws_per_step // plan.batch_size
        order |= {"batch_size": plan.batch_size, "micro_batches_per_step": steps or None} | plan.rank._asdict()
        try:
            super().__init__(source, form=Pack(plan.pack_tokens or 0), **order)
        except (LengthUnknown, StreamMismatch) as cause:
            raise refused("packing", f"true: {cause}") from cause

    def _attach(self) -> None:
        super()._attach()
        self.datasets = self._rows.datasets
        # The epoch of the last pack that was found, the packs of the run before that epoch, and its walk.
        self._at: tuple[int, int, SequenceWalk] | None = None
        self._least = self.last = 0  # the first pack that is still planned; the packs of the last epoch that has ended

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_at": None}

    def __getitem__(self, index: int) -> Any:
        """Returns the encoded rows of a pack, waiting for its window; raises as a pass does."""
        with carrying():
            epoch, pack, walk = self._find(index)
            own = walk.sequences(pack, pack + 1)[0]
            made = self._maker.make(own, walk.window_of(pack).sequences, epoch)
        self._report(0)
        return made

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the packs of a micro batch."""
        return [self[index] for index in indices]

    def in_epoch(self, index: int) -> bool:
        """Returns whether an index is in the epoch in which this start begins, waiting until that is certain.

        Raises IndexError: there are fewer packs than in one micro batch of all ranks.
        """
        return self._find(index)[0] == self._start.epoch

    def ready(self, index: int) -> bool:
        """Returns whether no pack has to be waited for, which is certain once the streams have ended."""
        return all(one.reader.seen.ended for one in self.datasets)

    def total(self) -> int:
        """Returns the number of packs in the epoch in which this start begins, waiting for its end."""
        walk = SequenceWalk(self._planner, self._start.place, self._start.epoch)
        while walk.total is None:
            walk.let_go(stop := walk.places[-1].before)
            walk.place_of(stop + 1)
        return walk.total

    def state_after(self, trained: int) -> SequenceState:
        """Returns the state after a number of packs of the run."""
        position, dp = self._start, self.rank.dp_size
        if trained > self._trained:
            # The last index of the micro batches before.
            epoch, last, walk = self._find((trained - self._before) // dp * dp - 1)
            position = EpochPosition(epoch, last + 1, walk.place_of(last + 1))
        return SequenceState.from_dict(self._state_at(position), "the state")

    def rows_at(self, position: Position) -> Position:
        """Returns a position of the run with the state of the rows, from which all later packs are made."""
        if not isinstance(position.blend, SequenceState):
            return position
        rows = self._dataset._state_after(self._planner.first_window(position.blend.place) * self._rows.rows)
        if isinstance(rows, BlendState):
            return replace(position, blend=rows)
        return replace(position, state=rows, blend=None)

    def _find(self, index: int) -> tuple[int, int, SequenceWalk]:
        """Returns the epoch of an index, the number of its pack there, and the walk to it; releases what is before."""
        position, lane = divmod(index, self.rank.dp_size)
        batch, within = divmod(position, self._size)
        micro = self.rank.dp_size * self._size
        start = self._before + batch * micro
        if self._pid != os.getpid():
            self._pid, self._at = os.getpid(), None
            for dataset in self.datasets:
                dataset._entered(self._start.epoch)
                enter_process(dataset.reader, self.rank)
        epoch, consumed, place, *_ = self._start
        at = epoch, self._trained - consumed, SequenceWalk(self._planner, place, epoch)
        at = at if self._at is None or start < self._least else self._at
        while True:
            epoch, before, walk = at
            first = start - before
            walk.let_go(first)
            if len(walk.sequences(first, first + micro)) == micro:
                self._at, self._least = at, start
                return epoch, first + lane * self._size + within, walk
            # The next epoch begins after the last whole micro batch.
            self.last = walk.total or 0
            if not (whole := self.last - (self.last - first) % micro):
                raise IndexError(f"an epoch has {self.last} packs, fewer than {micro}, one micro batch of all ranks")
            at = epoch + 1, before + whole, SequenceWalk(self._planner, WindowPlace(), epoch + 1)
