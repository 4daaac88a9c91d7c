"""A pass over the sequences of one rank, micro batch by micro batch, to the end of the epoch, and how far it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from lazyshard.data.rank import Rank
from lazyshard.data.samples import Met
from lazyshard.data.sequence_checks import check_beginning
from lazyshard.data.sequence_maker import SequenceMaker
from lazyshard.data.sequence_planner import SequencePlanner, SequenceWalk
from lazyshard.data.sequence_settings import SequenceSettings
from lazyshard.data.sequence_states import Standing
from lazyshard.data.shared import SharedNumbers
from lazyshard.data.worker_parent import parent_of_worker
from lazyshard.errors import LazyShardError
from lazyshard.format.sequence_state import Place
from lazyshard.plan.sequences import completed
from lazyshard.plan.splitting import SplitSequence
from lazyshard.stream import StreamReader

__all__ = ["SequencePasses"]

_log = logging.getLogger("lazyshard")


class _Progress(NamedTuple):
    """What a pass in this process has handed out.

    Attributes:
        epoch: of the pass.
        first: first sequence of the micro batch of all ranks that it is at.
        within: sequences of this rank's part of it that were handed out.
        place: where that micro batch can be made again.
        walk: through the sequences.
    """

    epoch: int
    first: int
    within: int
    place: Place
    walk: SequenceWalk


class SequencePasses:
    """The passes of one process, one at a time.

    Args:
        reader: the stream.
        planner: knows which sequences there are.
        maker: makes what is handed out.
        settings: of the sequences.
        shared: is told what was met.
        checked: whether the first chunk was looked at, if there was one yet.

    Attributes:
        checked: as given, or by a pass since.
    """

    def __init__(
        self,
        reader: StreamReader,
        planner: SequencePlanner,
        maker: SequenceMaker,
        settings: SequenceSettings,
        shared: SharedNumbers,
        *,
        checked: bool,
    ) -> None:
        self.checked = checked
        self._reader = reader
        self._planner = planner
        self._maker = maker
        self._settings = settings
        self._shared = shared
        self._progress: _Progress | None = None
        self._reported = (Met(0, 0, 0), 0, 0.0, 0)

    def begin(self, standing: Standing, rank: Rank, worker: WorkerInfo | None) -> Iterator[Any]:
        """Begins a pass. What it raises, `LazyShardedSequences.__iter__` says.

        Args:
            standing: where the run stands.
            rank: whose sequences are handed out.
            worker: the DataLoader worker that this process is; None for none.
        """
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        micro = rank.dp_size * self._settings.batch_size
        first, within = standing.consumed, standing.within
        if not standing.begun:
            first += number * micro
            within = 0 if number else within
        walk = SequenceWalk(self._planner, standing.place, standing.epoch)
        self._progress = None
        self._reported = (*self._reported[:3], 0)
        label = f"rank {rank.dp_rank} of {rank.dp_size}"
        self._reader.label = label if worker is None else f"{label}, worker {worker.id}"
        apart = worker is not None and getattr(worker, "worker_method", "multiprocessing") == "multiprocessing"
        self._reader.parent = parent_of_worker() if apart else None
        self._planner.tells = rank.dp_rank == 0 and number == 0
        return self._pass(walk, standing.epoch, rank, (first, within), workers * micro, counts=self._planner.tells)

    def standing(self, epoch: int, ranks: int, *, in_worker: bool) -> Standing | None:
        """Returns where the run stands by what this pass has handed out; None if it handed out none of that epoch.

        Args:
            epoch: that is set.
            ranks: of the run.
            in_worker: whether to stay in a micro batch that was handed out whole, as the next one is not this worker's.
        """
        progress = self._progress
        if progress is None or progress.epoch != epoch:
            return None
        _, first, within, place, walk = progress
        size = self._settings.batch_size
        if in_worker or within != size:
            return Standing(epoch, first, place, within, begun=in_worker)
        behind = first + ranks * size
        behind = behind if walk.total is None else min(behind, walk.total)
        return Standing(epoch, behind, walk.place_of(behind), 0)

    def forget(self) -> None:
        """Forgets what was handed out: the run goes on elsewhere."""
        self._progress = None

    def _pass(
        self, walk: SequenceWalk, epoch: int, rank: Rank, start: tuple[int, int], step: int, *, counts: bool
    ) -> Iterator[Any]:
        # The epoch is given: by now, at the first sequence that is asked for, another one may be set.
        number, size = rank.dp_rank, self._settings.batch_size
        micro = rank.dp_size * size
        first, within = start
        try:
            if not self.checked:
                self._reader.wait_for(1)
                self.checked = check_beginning(self._reader, self._settings.form.rule, self._settings.too_long)
            while True:
                walk.let_go(first)
                planned = walk.sequences(first, first + micro)
                if len(planned) < micro and not (planned := self._last(planned, rank, walk)):
                    return
                place = walk.place_of(first)
                for at in range(number * size + within, (number + 1) * size):
                    made = self._maker.make(planned[at], walk.window_of(first + at))
                    within += 1
                    self._progress = _Progress(epoch, first, within, place, walk)
                    self._report(walk.dropped if counts else 0)
                    yield made
                first, within = first + step, 0
        except LazyShardError as error:
            if get_worker_info() is not None:
                error.carry_fields()
            raise
        finally:
            self._report(walk.dropped if counts else 0)

    def _last(self, left: list[SplitSequence], rank: Rank, walk: SequenceWalk) -> list[SplitSequence]:
        """Returns what the epoch ends with, behind its whole micro batches."""
        if not left:
            return []
        size, at_end = self._settings.batch_size, self._settings.at_end
        if rank.dp_rank == 0:
            done = "they are not drawn" if at_end == "drop" else "one more micro batch of each rank draws them"
            _log.warning(
                "%s: %s sequences; left over at the end of the epoch: %d, fewer than dp_size * batch_size = %d * %d; "
                "at_end=%r: %s",
                *(self._reader.directory, walk.total, len(left), rank.dp_size, size, at_end, done),
            )
        return [] if at_end == "drop" else completed(left, rank.dp_size * size, self._settings.form.rule)

    def _report(self, dropped: int) -> None:
        met = (self._maker.met, self._reader.chunks_opened, self._reader.waited_s, dropped)
        if met == self._reported:
            return
        before, self._reported = self._reported, met
        waited_ms = round(met[2] * 1000) - round(before[2] * 1000)
        bad, skipped, filled = (new - old for new, old in zip(met[0][:3], before[0][:3], strict=True))
        self._shared.report(bad, met[1] - before[1], waited_ms, skipped + met[3] - before[3], filled)
