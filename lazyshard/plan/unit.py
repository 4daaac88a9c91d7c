"""Units: how many samples in a row a rank is dealt, and which unit `auto` stands for.

Chunks are the best unit where each rank gets some of its own: it opens no other rank's. With fewer chunks than ranks
there is no whole stripe of them, and the whole stream is tail, dealt row by row (`lazyshard.plan.deal`): balanced, but
each row is a read of its own, and on a stream that grows nothing can be drawn before its end is known. So chunks are
**enough** if there is at least one full one for every rank. Eight ranks, four samples a chunk::

    chunks    9         8         7 and 3 rows    1
    unit      4         4         the batch       the batch

Where they are enough, what is left of them for the tail is less than a stripe: under half of the stream, and a share
that shrinks as it grows.

Who decides must not go by how much is published when it happens to look: ranks look at different times. So the answer
is a function of the stream's length alone, and is open until that says it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["UNIT_NAMES", "auto_unit", "named_unit", "window_positions"]

UNIT_NAMES: Final = ("chunk", "sample", "batch", "auto")


def named_unit(unit: str | int, samples_per_chunk: int, batch_size: int) -> int | None:
    """Return how many samples a unit has, by its name or number; None for "auto": see `auto_unit`.

    Raises:
        ValueError: there is no such unit.
    """
    if type(unit) is int and unit >= 1:
        return unit
    units = {"chunk": samples_per_chunk, "sample": 1, "batch": batch_size, "auto": None}
    if not isinstance(unit, str) or unit not in units:
        raise ValueError(f"unit is one of {', '.join(UNIT_NAMES)} or a number from 1, got {unit!r}")
    return units[unit]


def auto_unit(
    dp: int, samples_per_chunk: int, batch_size: int, published: int, ended: bool, limit: int | None
) -> int | None:
    """Return the unit that "auto" stands for: a chunk if there is a full one for each rank, else a micro batch.

    A batch for every rank is what a step needs at the least, so with it as the unit nothing that is drawn is tail.

    Args:
        dp: number of ranks.
        samples_per_chunk: rows of every chunk but possibly the last.
        batch_size: samples of one rank in a micro batch.
        published: samples that are published.
        ended: whether none will follow.
        limit: samples that are drawn at the most, None for no bound.

    Returns:
        None as long as what is still to come decides: until `dp * samples_per_chunk` samples are published or the
        stream has ended. With chunks as the unit the first step would have to wait for as many. Once it is not None, it
        is the same for every later `published` and `ended` of the stream.
    """
    enough = dp * samples_per_chunk
    if limit is not None and limit < enough:
        return batch_size
    if published >= enough:
        return samples_per_chunk
    return batch_size if ended else None


def window_positions(chunks: int, samples_per_chunk: int, unit: int) -> int:
    """Return how many positions of a rank a window of so many chunks' worth of samples has: whole units.

    So it is known to be published when its stripes are.

    >>> window_positions(2, 1000, 1000), window_positions(2, 1000, 64), window_positions(0, 1000, 64)
    (2000, 2048, 0)
    """
    return -(-chunks * samples_per_chunk // unit) * unit
