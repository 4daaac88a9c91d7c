"""`Batches`: the micro batches of a rank, and the count of what was trained: what a training loop needs of its data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import BatchSampler, DataLoader

if TYPE_CHECKING:
    from lazyshard.data.blended import BlendedDataset
    from lazyshard.data.dataset import LazyShardedDataset

__all__ = ["Batches"]

_log = logging.getLogger("lazyshard")

_OWN: Final = frozenset({"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})


class Batches(Iterator[Any]):
    """The micro batches of this rank, from where the run stands to the end of the epoch; made by `dataset.batches`.

    ::

        batches = dataset.batches(num_workers=2, collate_fn=collate)
        for batch in batches:
            train(batch)
            if batches.step % 100 == 0:
                save({"model": model.state_dict(), "data": batches.state_dict()})
                batches.commit()

    A micro batch counts as trained once it was handed out, so save after training on it; what workers read ahead never
    counts. The epoch ends on every rank after as many micro batches, and after a whole optimiser step: with
    `micro_batches_per_step`, fewer micro batches than a step takes are left over.

    A loop that was left with `break`, or by an error, goes on in the next ``for``, with the micro batch that it has not
    got. A ``for`` behind the end of an epoch begins the next one, of as many as `epochs` says; `dataset.set_epoch` sets
    another one.

    Raises:
        ValueError: there is no such number of epochs, or `num_samples` says how long the run is.
        TypeError: an option of the DataLoader is that of the data set.
    """

    def __init__(
        self,
        dataset: LazyShardedDataset | BlendedDataset,
        size: int,
        per_step: int,
        epochs: int,
        by_epoch: bool,
        options: dict[str, Any],
    ) -> None:
        if type(epochs) is not int or epochs < 1:
            raise ValueError(f"epochs is an integer from 1, got {epochs!r}")
        if epochs > 1 and not by_epoch:
            raise ValueError("with num_samples the run ends there, however many epochs that takes: leave epochs out")
        if own := sorted(_OWN & options.keys()):
            raise TypeError(
                f"{', '.join(own)}: the data set decides that in batches(); batch_size is an argument of the data set, "
                f"the other options of a DataLoader may be given"
            )
        self._dataset = dataset
        self._size = size
        self._per_step = per_step
        self._epochs = epochs if by_epoch else None
        self._sampler = BatchSampler(range(0), size, drop_last=False)
        self._options = options
        self._loader = self._make_loader()
        self._running: Any = None
        # What follows is that of the epoch, which is begun once somebody asks: a state may be loaded before.
        self._epoch: int | None = None
        self._indices = range(0)
        self._over = False
        # Samples, and micro batches of the state's current part, that were trained before; steps before that part.
        self._consumed = 0
        self._before = 0
        self._first_step = 0
        # Micro batches that were handed out since.
        self._trained = 0

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._dataset.epoch

    @property
    def consumed(self) -> int:
        """Samples trained over all ranks, in whole steps, since the run began; with `set_epoch` since the epoch did."""
        behind = self._behind()
        trained = max(0, behind - behind % self._per_step - self._before)
        return self._consumed + trained * self._size * self._dataset.rank.dp_size

    @property
    def step(self) -> int:
        """Whole optimiser steps handed out, counted as `consumed`, and as `lazyshard trace` numbers them."""
        return self._first_step + self._behind() // self._per_step

    @property
    def step_complete(self) -> bool:
        """Whether the micro batch handed out last is the last one of its optimiser step."""
        return self._behind() % self._per_step == 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run after `step`: plain values for any checkpoint, the same on every rank.

        Within a step it is that before the step, as the weights are.
        """
        return self._dataset.state_dict(self.consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a run stands, with any number of ranks: as `load_state_dict` of the data set, and as early."""
        self._dataset.load_state_dict(state)
        self._epoch = None

    def commit(
        self, *, last_epoch: bool | None = None, keep: Iterable[dict[str, Any]] = (), take_over: bool = False
    ) -> bool:
        """Tells the producer that the checkpoint with `state_dict()` is safely on disk; see `commit` of the data set.

        Args:
            last_epoch: whether no other epoch follows this one; None as `epochs` says. Where `num_samples` says how
                long the run is, None keeps every chunk.
            keep: states of older checkpoints from which the run may still be resumed.
            take_over: go on although another run on this machine commits under the same name; that one is refused.
        """
        if last_epoch is None:
            last_epoch = self._epochs is not None and self.epoch + 1 >= self._epochs
        return self._dataset.commit(self.consumed, last_epoch=last_epoch, keep=keep, take_over=take_over)

    def __iter__(self) -> Batches:
        """Goes on, or begins the next epoch at the end of this one. Raises RuntimeError: there is none any more."""
        epochs = self._epochs
        self._behind()
        if self._over and epochs is not None and self.epoch + 1 < epochs:
            self._dataset.set_epoch(self.epoch + 1)
        elif self._over or (epochs is not None and self.epoch >= epochs):
            raise RuntimeError(
                "all of num_samples is trained: a longer run takes a larger number"
                if epochs is None
                else f"epoch {self.epoch + self._over} is to begin, but the run has {epochs}: batches(epochs=...) says "
                f"how many epochs there are"
            )
        return self

    def __next__(self) -> Any:
        """Returns the next micro batch, waiting for what is not published yet. Raises as the data set does."""
        self._behind()
        if self._over or not self._goes_on():
            if not self._over and self._dataset.rank.dp_rank == 0:
                self._tell_end()
            self._over, self._running = True, None
            raise StopIteration
        try:
            if self._running is None:
                self._sampler.sampler = self._indices[self._trained * self._size :]
                self._running = iter(self._loader)
            batch = next(self._running)
        except BaseException:
            # It would go on behind what it has failed to hand out. Its workers end here, not with the traceback.
            getattr(self._running, "_shutdown_workers", int)()
            self._loader, self._running = self._make_loader(), None
            raise
        self._trained += 1
        return batch

    def _tell_end(self) -> None:
        if not self._trained:
            _log.warning("epoch %d is trained already: it ended with step %d", self.epoch, self.step)
        elif self._epochs is not None and (left := sum(1 for _ in self._left_of_step())):
            _log.warning(
                "epoch %d ends with step %d; %d samples more are left over, too few for the %d micro batches of a step",
                *(self.epoch, self.step, left * self._size * self._dataset.rank.dp_size, self._per_step),
            )

    def _left_of_step(self) -> Iterator[int]:
        """Yields the last index of each micro batch that is left at the end of the epoch."""
        for end in range((self._trained + 1) * self._size - 1, len(self._indices), self._size):
            if not self._dataset.in_epoch(self._indices[end]):
                return
            yield end

    def _make_loader(self) -> DataLoader[Any]:
        drawn: Any = self._dataset
        return DataLoader(drawn, batch_sampler=self._sampler, **self._options)

    def _behind(self) -> int:
        """Returns how many micro batches of the state's current part were trained; begins the epoch that is set."""
        if self._epoch != self._dataset.epoch:
            self._indices = self._dataset._left()
            state = self._dataset.state_dict()
            part = state["parts"][-1]
            self._consumed, self._before = state["consumed"], part["draws"] // self._size
            self._first_step = part["first_step"]
            self._epoch, self._trained, self._running, self._over = self._dataset.epoch, 0, None, False
        return self._before + self._trained

    def _goes_on(self) -> bool:
        """Returns whether the next micro batch is one of a whole step in this epoch, waiting until that is certain."""
        within = self._behind() % self._per_step
        if within and self._trained:
            return True
        last = (self._trained + self._per_step - within) * self._size - 1
        return last < len(self._indices) and (self._epochs is None or self._dataset.in_epoch(self._indices[last]))
