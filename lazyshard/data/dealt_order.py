"""Says where a data set reads a stream whose rows were dealt by cost in an order that undoes it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from lazyshard.data.order import Order
from lazyshard.errors import LazyShardError
from lazyshard.format.dealt import DealtByCost
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import read_dealt

__all__ = ["is_dealt", "may_undo", "tell_undone"]

_log = logging.getLogger("lazyshard")


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


def may_undo(order: Order) -> bool:
    """Whether samples meet in other steps than in a stream that is read chunk by chunk, in order."""
    return not order.blended and (order.shuffle_window > 0 or order.unit != "chunk" or order.batch_size > 1)


def tell_undone(order: Order, unit: int, reader: StreamReader) -> None:
    """Warns if the stream was dealt by cost and this order undoes that.

    Args:
        order: the settings.
        unit: samples that are dealt to a rank in a row.
        reader: the stream, of which a chunk has been opened.
    """
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


def _reasons(order: Order, unit: int, samples_per_chunk: int, made: DealtByCost) -> Iterator[str]:
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
