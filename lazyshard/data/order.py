"""The settings of a data set that decide which sample is drawn when."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from lazyshard.data.settings import Order
from lazyshard.errors import LazyShardError
from lazyshard.format.seal import DealtByCost
from lazyshard.plan.course import Course
from lazyshard.plan.deal import auto_unit, named_unit
from lazyshard.stream import Published, StreamReader
from lazyshard.stream.chunk import read_dealt

_log = logging.getLogger("lazyshard")

ENDLESS: Final = 1 << 60
"""Samples of a stream that goes on from epoch to epoch."""


@dataclass(frozen=True, kw_only=True)
class RunOrder(Order):
    """The order, and what else decides which sample is drawn when.

    Attributes:
        batch_size: samples of one rank in a micro batch.
        max_total_samples: the stream is taken to end there at the latest; None for no bound.
        num_samples: samples over all ranks, however long an epoch is; None for those of one epoch.
        blended: whether a blend draws, in batches that mix streams and epochs.
        unit_batch: samples of the "batch" that is dealt in turn, where that is not `batch_size`.
    """

    batch_size: int
    max_total_samples: int | None
    num_samples: int | None = None
    blended: bool = False
    unit_batch: int | None = None

    @classmethod
    def of(cls, order: Order, batch_size: int, max_total_samples: int | None, num_samples: int | None) -> RunOrder:
        """Returns an order with these.

        Raises:
            ValueError: one of them is impossible.
        """
        return cls(**vars(order), batch_size=batch_size, max_total_samples=max_total_samples, num_samples=num_samples)

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ValueError(f"batch_size must be an int >= 1, got {self.batch_size!r}")
        limit = self.max_total_samples
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_total_samples is an integer from 1, got {limit!r}")
        count = self.num_samples
        # More than that `len` cannot say.
        if count is not None and (type(count) is not int or not 1 <= count <= sys.maxsize):
            raise ValueError(f"num_samples is an integer from 1 to {sys.maxsize}, got {count!r}")

    def without_end(self) -> RunOrder:
        """Returns the same settings for as many indices as are asked for, where the number is not given."""
        return self if self.num_samples is not None else replace(self, num_samples=ENDLESS)

    def in_blend(self) -> RunOrder:
        """Returns the settings of one stream of a blend: draws one by one, without an end, in the same order."""
        return replace(
            self,
            batch_size=1,
            unit_batch=self.batch_size,
            layout="strided",
            num_samples=ENDLESS,
            micro_batches_per_step=None,
            blended=True,
        )

    @property
    def draws_per_step(self) -> int:
        """Positions of each rank in an optimiser step; 0 where it is not known."""
        return self.batch_size * (self.micro_batches_per_step or 0)

    def unit_samples(self, samples_per_chunk: int) -> int | None:
        """Returns how many samples are dealt in a row; None for "auto"."""
        return named_unit(self.unit, samples_per_chunk, self.unit_batch or self.batch_size)

    def auto_unit(self, samples_per_chunk: int, dp: int, published: Published) -> int | None:
        """Returns the same for "auto", from what is known of the stream; None as long as that is open."""
        size = self.unit_batch or self.batch_size
        return auto_unit(dp, samples_per_chunk, size, published.samples, published.ended, self.max_total_samples)

    def known_total(self, published: Published) -> int | None:
        """Returns how many samples there are to draw, None as long as that is open."""
        limit = self.max_total_samples
        if published.ended:
            return published.samples if limit is None else min(published.samples, limit)
        return limit if limit is not None and published.samples >= limit else None

    def block(self, course: Course, total: int | None) -> int | None:
        """Returns how many positions of the current part each rank has, given the total to count with.

        Returns:
            They end where the epoch does in which the course stands, or with `num_samples`; None as long as that is
            open.

        Raises:
            ValueError: num_samples is less than one batch of every rank.
        """
        step = course.dp * course.batch_size
        if self.num_samples is not None:
            if self.num_samples < step and len(course.parts) == 1:
                raise ValueError(
                    f"num_samples is at least dp_size * batch_size = {course.dp} * {course.batch_size} = {step}, got "
                    f"{self.num_samples}"
                )
            return max(0, self.num_samples - course.consumed_before) // step * course.batch_size
        return None if total is None else course.epoch_stop(course.current.draws, total)


def is_dealt(reader: StreamReader) -> bool:
    """Whether the newest chunk of a stream was dealt by cost; False where there is none yet, or it cannot be told."""
    chunks = reader.seen.chunks
    if reader.stream_id is None or not chunks:
        return False
    try:
        return read_dealt(reader.directory, chunks - 1) is not None
    except (LazyShardError, OSError):
        # Who needs this seal to read the chunk says what is wrong with it.
        return False


def tell_undone(order: RunOrder, unit: int, reader: StreamReader) -> None:
    """Warns if the stream was dealt by cost and this order has samples meet in other steps."""
    if order.blended or not (order.shuffle_window or order.unit != "chunk" or order.batch_size > 1):
        return
    made = reader.dealt
    why = [] if made is None else list(_reasons(order, unit, reader.samples_per_chunk, made))
    if made is not None and why:
        _log.warning(
            "%s: its rows were dealt by cost (lazyshard-producer --balance %d), so that all ranks have as much to do "
            "in a step, and this order undoes it: %s",
            reader.directory,
            made.ranks,
            "; ".join(why),
        )


def _reasons(order: RunOrder, unit: int, samples_per_chunk: int, made: DealtByCost) -> Iterator[str]:
    if order.shuffle_window:
        yield (
            f"shuffle_window={order.shuffle_window} puts rows into other steps, give 0 (in ms-swift "
            f"--sharded_lazy_shuffle_window 0)"
        )
    if unit != samples_per_chunk:
        yield f"unit={order.unit!r} gives ranks other rows, give 'chunk'"
    if order.batch_size % made.micro_batch_size:
        yield (
            f"batch_size={order.batch_size} is no multiple of the micro batches of {made.micro_batch_size} that cost "
            f"the same"
        )
