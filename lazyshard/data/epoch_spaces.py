"""The index spaces of a data set, one for each epoch that is set: what is left of a run's epoch, and whole ones."""

from __future__ import annotations

import time

from torch.utils.data._utils.worker import WorkerInfo

from lazyshard.data.auto_unit import settle_unit
from lazyshard.data.index_space import IndexSpace
from lazyshard.data.order import Order
from lazyshard.data.rank import Rank
from lazyshard.data.run_states import RunStates
from lazyshard.data.shared import SharedNumbers
from lazyshard.data.worker_parent import parent_of_worker
from lazyshard.stream import StreamReader

__all__ = ["EpochSpaces"]


class EpochSpaces:
    """The index spaces of one data set. What they count with is settled with the first one.

    Args:
        order: the settings.
        rank: whose data set it is.
        reader: the stream.
        consumer: for whom rank 0 keeps a reading mark; None for nobody.
        states: where the run stands.
        epoch: the epoch that is set.
        shared: what the processes of the data set share.

    Attributes:
        rank: as given.

    Raises:
        LengthUnknown, ValueError: as `IndexSpace`.
        WaitTimeout: which unit "auto" stands for was not certain in time.
    """

    def __init__(
        self,
        order: Order,
        rank: Rank,
        reader: StreamReader,
        consumer: str | None,
        states: RunStates,
        epoch: int,
        shared: SharedNumbers,
    ) -> None:
        self.rank = rank
        self._order = order
        self._consumer = consumer
        self._states = states
        self._shared = shared
        self._since = time.time()
        self._told: set[str] = set()
        settle_unit(states, order, rank, reader, consumer, self._since)
        known = order.known_total(reader.refresh())
        self._total = order.max_total_samples if known is None else known
        # One value that is only ever replaced, so that no thread meets the space of one epoch under another's number.
        self._newest = (epoch, self._make(epoch, reader))

    def at(self, epoch: int, reader: StreamReader) -> IndexSpace:
        """Returns the index space of an epoch that is set."""
        found, space = self._newest
        if found != epoch:
            space = self._make(epoch, reader)
            self._newest = (epoch, space)
        return space

    def enter(self, reader: StreamReader, worker: WorkerInfo | None) -> None:
        """Makes a reader this process's own: a DataLoader worker's, or the main process's."""
        rank = f"rank {self.rank.dp_rank} of {self.rank.dp_size}"
        reader.label = rank if worker is None else f"{rank}, worker {worker.id}"
        # Newer releases of torch have workers that are threads: those end with their process.
        apart = worker is not None and getattr(worker, "worker_method", "multiprocessing") == "multiprocessing"
        reader.parent = parent_of_worker() if apart else None
        tells = self._consumer is not None and self.rank.dp_rank == 0
        reader.on_wait = self.repeat if tells else None

    def repeat(self) -> None:
        """Tells the producer again what is needed, if it is not told any more."""
        marks = self._newest[1].marks
        if marks is not None:
            marks.repeat()

    def _make(self, epoch: int, reader: StreamReader) -> IndexSpace:
        state = self._states.of(epoch, self.rank.dp_size)
        return IndexSpace(
            self._order,
            self.rank,
            reader,
            state,
            self._total,
            self._consumer,
            self._since,
            self._told,
            self._shared,
        )
