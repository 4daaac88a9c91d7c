"""Settles which unit "auto" stands for, the same on every rank whenever it asks: by the length of the stream alone."""

from __future__ import annotations

from lazyshard.data.index_space import length_unknown
from lazyshard.data.order import Order
from lazyshard.data.rank import Rank
from lazyshard.data.reading_marks import ReadingMarks
from lazyshard.data.run_states import RunStates
from lazyshard.plan import Course, Part
from lazyshard.stream import Published, StreamReader

__all__ = ["settle_unit"]


def settle_unit(
    states: RunStates, order: Order, rank: Rank, reader: StreamReader, consumer: str | None, since: float
) -> None:
    """Settles the unit of a run for good: that of the state which it goes on from, or of the settings.

    Waits where "auto" is not certain yet: until there is a full chunk for every rank, or the stream has ended.

    Args:
        states: where the run stands; knows the unit from here on.
        order: the settings.
        rank: whose data set it is.
        reader: the stream.
        consumer: for whom rank 0 tells the producer meanwhile what is waited for; None for nobody.
        since: when the data set was made, in seconds since 1970.

    Raises:
        LengthUnknown: the data set has no length, so there is nothing to wait for.
        WaitTimeout: it was not certain in time.
    """
    size, unit = reader.samples_per_chunk, states.unit
    if unit is None:
        unit = order.auto_unit(size, rank.dp_size, reader.refresh())
    if unit is None:
        if order.max_total_samples is None and order.num_samples is None:
            raise length_unknown(reader)
        unit = order.auto_unit(size, rank.dp_size, _wait(order, rank, reader, consumer, since))
    assert unit is not None, "certain once there are so many samples or the stream has ended"
    states.settle(unit)


def _wait(order: Order, rank: Rank, reader: StreamReader, consumer: str | None, since: float) -> Published:
    """Waits for a full chunk for every rank, or for the end of the stream."""
    label, on_wait = reader.label, reader.on_wait
    size = reader.samples_per_chunk
    reader.label = label or f"rank {rank.dp_rank} of {rank.dp_size}"
    try:
        if consumer is not None and rank.dp_rank == 0:
            # Or a producer that is held back by --max-ahead would wait for us, as we for it.
            course = Course(order.rules(size, size), [Part(rank.dp_size, order.batch_size)])
            marks = ReadingMarks(consumer, course, reader, since=since)
            marks.enter(0, order.max_total_samples, reader.seen.samples)
            reader.on_wait = marks.repeat
        return reader.wait_for(rank.dp_size * size)
    finally:
        reader.label, reader.on_wait = label, on_wait
