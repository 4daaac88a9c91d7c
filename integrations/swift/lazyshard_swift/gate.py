"""The data sets of a run, of one stream or of a blend of several, and the gate before each of its steps.

The gate says before each step whether its data is there, and whether the run goes on. Every rank asks it in its main
process, from the same published numbers, so all of them go on, stop or give up at the same step without a word between
them, pipeline stages that never see data included. The DataLoader's workers, which read ahead, have no deadline of
their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from lazyshard import BlendedDataset, EncodeCache, LazyShardedDataset, Order
from lazyshard.data.rank import Rank
from lazyshard.data.settings import UnitName
from lazyshard.errors import StateMismatch, StoreUnavailable, WaitTimeout
from lazyshard.stream import Published
from lazyshard_swift import errors, parallel
from lazyshard_swift.errors import ResumeRefused, StreamTooShort
from lazyshard_swift.parallel import Streams
from lazyshard_swift.rows import Encode, for_stream

Data: TypeAlias = LazyShardedDataset | BlendedDataset

_SAVE_S: Final = 1800.0
"""How long a rank that has given up may take to save what was trained, with all others."""


def open_data(
    streams: Streams,
    rank: Rank,
    encode: Sequence[Encode] | None,
    order: Order,
    own: dict[str, Any],
    whole: dict[str, Any],
) -> Data:
    """Opens one stream, or a blend of several.

    Args:
        streams: what is opened.
        rank: for which it is.
        encode: makes samples of rows, one for each stream; None gives the rows.
        order: of all; the units are those of the streams.
        own: other options of the data set of each stream; a `cache` is for streams of raw rows.
        whole: other options of the data set of all.
    """
    place = {"dp_rank": rank.dp_rank, "dp_size": rank.dp_size}
    cache = own.get("cache", EncodeCache())
    each: Sequence[Encode | None] = encode or [None] * len(streams.directories)
    units: Sequence[int | UnitName] = streams.units or ["chunk"] * len(streams.directories)
    options = [own | place | {"cache": for_stream(cache, one)} for one in each]
    orders = [replace(order, unit=unit) for unit in units]
    if not streams.blended:
        return LazyShardedDataset(streams.directories[0], each[0], order=orders[0], **options[0], **whole)
    # Layout and steps are the blend's, all else is that of each stream.
    shared = Order(layout=order.layout, micro_batches_per_step=order.micro_batches_per_step)
    parts = [
        LazyShardedDataset(directory, one, order=replace(dealt, layout="block", micro_batches_per_step=None), **option)
        for directory, one, dealt, option in zip(streams.directories, each, orders, options, strict=True)
    ]
    weighted = zip(parts, streams.weights, strict=True)
    return BlendedDataset(weighted, order=shared, stopping=streams.stopping, **whole)


def members(data: Data) -> tuple[LazyShardedDataset, ...]:
    """Returns the data set of each stream."""
    return data.datasets if isinstance(data, BlendedDataset) else (data,)


def load_state(data: Data, state: dict[str, Any], where: str) -> None:
    """Has a data set go on from a state.

    Raises:
        ResumeRefused: the state does not fit it.
    """
    try:
        data.load_state_dict(state)
    except StateMismatch as cause:
        raise ResumeRefused(
            f"{where}: {cause}", checkpoint=where, expected=cause.expected, actual=cause.actual
        ) from cause


class StepGate:
    """Decides step by step.

    Args:
        data: this rank's samples in order, strided, without an end (`num_samples`), with the deadline that counts.
        stop_at_end: whether a step that reaches past the end of the stream, or of the blend, is not trained.
        begun: whether the run has trained a step in an earlier start.
        shift: how many positions a blend's own part has behind it where the run's current part begins.

    Attributes:
        data: as given.
        stopped: whether a step was refused.
        gave_up: why, where all ranks gave up waiting; None where the stream has ended.
    """

    def __init__(self, data: Data, stop_at_end: bool, *, begun: bool = False, shift: int = 0) -> None:
        self.data = data
        self._shift = shift
        self._stop_at_end = stop_at_end
        self._begun = begun
        self.stopped = False
        self.gave_up: WaitTimeout | StoreUnavailable | None = None
        self._timer: threading.Timer | None = None

    def allows(self, first: int, stop: int, *, saves: bool = False) -> bool:
        """Returns whether a step is to be trained, waiting until that is certain.

        Args:
            first: the step's first position in this rank's lane, in the current part of the run.
            stop: the position after its last.
            saves: whether a refused step leads to a checkpoint, the same on all ranks. Where all ranks give up, the
                step is then refused, and `end` raises the error.

        Raises:
            WaitTimeout, StoreUnavailable: its data did not come in time.
            StreamTooShort: the stream has ended before even the first step was full.
        """
        if self.stopped:
            return False
        try:
            past = self._past(stop - 1)
        except IndexError as cause:
            # Not even one micro batch for each rank.
            if not self._begun or not self._stop_at_end:
                raise self._too_short() from cause
            past = True
        except (StoreUnavailable, WaitTimeout) as error:
            if not saves or not self._all_give_up(error, stop):
                raise
            return False
        if self._stop_at_end and past:
            if not first and not self._begun:
                raise self._too_short()
            self.stopped = True
        return not self.stopped

    def _all_give_up(self, error: WaitTimeout | StoreUnavailable, stop: int) -> bool:
        """Returns whether all ranks have given up before the same step, so that they can save a checkpoint together.

        A rank that has seen the data in the last moment trains, and waits for the others in its first collective.
        """
        timer = errors.end_within(_SAVE_S, error)
        if not parallel.all_come(f"gave up before {stop}"):
            timer.cancel()
            return False
        self.stopped, self.gave_up, self._timer = True, error, timer
        return True

    def end(self) -> None:
        """Raises what made all ranks give up, once what they have trained is saved; does nothing at a stream's end."""
        if self._timer is not None:
            self._timer.cancel()
        if self.gave_up is not None:
            raise self.gave_up

    def _past(self, position: int) -> bool:
        """Returns whether a position of this rank's lane is behind the end; waits for it."""
        data, rank = self.data, self.data.rank
        index = (position + self._shift) * rank.dp_size + rank.dp_rank
        return not data.in_epoch(index) if isinstance(data, BlendedDataset) else data.draw(index).epoch > 0

    def has(self, index: int) -> bool:
        """Returns whether an index of the run's current part can be read without waiting."""
        data = self.data
        self.published()
        if isinstance(data, BlendedDataset):
            return data.ready(index + self._shift * data.rank.dp_size)
        return data._draws.indices().ready(index)

    def published(self) -> list[Published]:
        """Returns what is published now of each stream."""
        return [dataset.published() for dataset in members(self.data)]

    def published_samples(self) -> int:
        """Returns how many samples are published now, of all streams."""
        return sum(one.samples for one in self.published())

    def _too_short(self) -> StreamTooShort:
        samples = self.published_samples()
        return StreamTooShort(
            f"{self.where}: the stream has ended with {samples} samples, fewer than one step takes: "
            f"nothing can be trained. Use a smaller global batch, or --sharded_lazy_on_end repeat",
            directory=self.where,
            samples=samples,
        )

    @property
    def where(self) -> str:
        """What is read, for messages."""
        return ", ".join(str(dataset.directory) for dataset in members(self.data))
