"""How even the steps of a stream are: what the slowest rank costs over what ranks cost in the mean.

Lengths come from what `lazyshard measure` has found, else from the seals; where neither has them, from a field of the
rows, which have to be read for it. Those of the samples of packs come from the packs, since what a pack costs does not
follow from all of its tokens. Beside the stream as it is there are the same rows in an order by chance, and dealt by
cost (`lazyshard.plan.balance`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lazyshard.errors import LazyShardError
from lazyshard.format.dealt import DealtByCost
from lazyshard.inspection.inspection import SAMPLED_ROWS, SCANNED_ROWS
from lazyshard.inspection.row_costs import RowCosts
from lazyshard.plan import permutation
from lazyshard.plan.balance import Balance, Cost, Evenness, evenness, step_costs
from lazyshard.stream.chunk import read_dealt
from lazyshard.stream.stream import Stream

__all__ = ["LENGTH_FIELD", "BalanceReport", "RanksReport", "Training", "dealt_by_cost", "report_balance"]

LENGTH_FIELD: Final = "length"
"""Where a row's length in tokens is looked for, if nobody names another field."""

_TRIES: Final = 10
"""Chunks that are tried before it is given up to find out what rows are."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Training:
    """How a stream would be trained.

    Attributes:
        ranks: data-parallel ranks, each with chunks of its own.
        micro_batch_size: rows of one rank in a micro batch.
        length_field: the field with a row's length in tokens, for rows whose seal does not tell it.
        cost: of a row.
    """

    ranks: int
    micro_batch_size: int
    length_field: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class RanksReport:
    """How even steps are with so many ranks.

    Attributes:
        ranks: how many.
        as_it_is: in the order of the stream; None where it has no whole step.
        by_chance: the same rows in an order that knows nothing of their length.
        dealt: the same rows dealt by cost for the ranks that were asked for; None where the stream is that already, or
            its chunks hold no whole micro batches.
    """

    ranks: int
    as_it_is: Evenness | None
    by_chance: Evenness | None
    dealt: Evenness | None


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """How even the steps of a stream are.

    Attributes:
        samples: that are published.
        ended: whether no more follow.
        samples_per_chunk: of the stream.
        made: how its producer has dealt it, None where it has not.
        training: how it would be trained.
        looked_at: rows that were looked at.
        from_seals: how many of their lengths the seals told.
        measured: how many of them were measured since, and stand beside the seals.
        packed: whether rows are packs, of which each sample costs what it costs by itself.
        ranks: for the ranks that were asked for, half and twice as many; in rising order.
    """

    samples: int
    ended: bool
    samples_per_chunk: int
    made: DealtByCost | None
    training: Training
    looked_at: int
    from_seals: int
    measured: int
    packed: bool
    ranks: tuple[RanksReport, ...]


def dealt_by_cost(stream: Stream) -> DealtByCost | None:
    """Returns how the newest chunk of a stream was dealt; None if it was not, or there is no chunk.

    Raises:
        SealInvalid, OSError: its seal cannot be read.
    """
    chunks = stream.published().chunks
    if stream.stream_id is None or chunks <= stream.retired():
        return None
    return read_dealt(stream.directory, chunks - 1)


def report_balance(
    stream: Stream,
    training: Training,
    *,
    every: bool = False,
    most: int | None = None,
    unread: list[LazyShardError | OSError] | None = None,
) -> BalanceReport:
    """Looks at the costs that meet in steps, as ranks that read chunks in order would train them.

    Args:
        stream: the stream.
        training: how it would be trained.
        every: whether to look at all rows. Otherwise of a long stream evenly spaced pieces are looked at, each of a
            chunk for twice as many ranks.
        most: how many rows these hold at the most, but for one piece; None for `SAMPLED_ROWS`. Fewer where lengths have
            to be read from the rows.
        unread: takes what is wrong with pieces that cannot be looked at, which are left out then; None to raise it.

    Raises:
        RowInvalid: a row has no length where one is looked for.
        TokensInvalid: a file of measured lengths cannot be used.
        LazyShardError, OSError: a chunk cannot be read.
    """
    published = stream.published()
    size, ranks = stream.samples_per_chunk, training.ranks
    counts = [*([ranks // 2] if ranks > 1 and ranks % 2 == 0 else []), ranks, 2 * ranks]
    looks = [_Look(count, size, training.micro_batch_size) for count in counts]
    made = dealt_by_cost(stream)
    dealing = None
    if size % training.micro_batch_size == 0 and not _is_made(made, training):
        dealing = Balance(ranks, size, training.micro_batch_size)
    looked_at = 0
    rows = RowCosts(stream, training.length_field)
    known = _Known(rows, most or SAMPLED_ROWS, strict=unread is None)
    for number, chunks in enumerate(_pieces(stream, published.chunks, 2 * ranks, every, known)):
        try:
            costs = np.concatenate([rows.costs(chunk, training.cost) for chunk in chunks])
        except (LazyShardError, OSError) as error:
            if unread is None:
                raise
            unread.append(error)
            continue
        looked_at += len(costs)
        ended = published.ended and chunks.stop == published.chunks
        orders = [costs, costs[permutation(len(costs), number)], None if dealing is None else _dealt(dealing, costs)]
        for look in looks:
            look.take(orders, ended)
    return BalanceReport(
        published.samples,
        published.ended,
        size,
        made,
        training,
        looked_at,
        rows.sealed,
        rows.measured,
        rows.packed,
        tuple(look.report() for look in looks),
    )


class _Look:
    """Collects the costs of steps with so many ranks, for each order of the rows."""

    def __init__(self, ranks: int, samples_per_chunk: int, micro_batch_size: int) -> None:
        self._ranks = ranks
        self._reading = (ranks, samples_per_chunk, micro_batch_size)
        self._found: tuple[list[_Floats], ...] = ([], [], [])

    def take(self, orders: Sequence[_Floats | None], ended: bool) -> None:
        for found, costs in zip(self._found, orders, strict=True):
            if costs is not None:
                found.append(step_costs(costs, *self._reading, ended=ended))

    def report(self) -> RanksReport:
        even = [evenness(np.concatenate(found)) if found else None for found in self._found]
        return RanksReport(self._ranks, *even)


class _Known:
    """How many rows are looked at: as many as asked for where lengths are known, few where rows have to be read."""

    def __init__(self, rows: RowCosts, most: int, *, strict: bool) -> None:
        self._rows = rows
        self._most = most
        self._strict = strict

    def most(self, chunks: Sequence[int]) -> int:
        """Returns it by the first of some chunks; by the next one where that cannot be read and nobody minds."""
        for chunk in chunks[:_TRIES]:
            try:
                return self._most if self._rows.are_known(chunk) else min(self._most, SCANNED_ROWS)
            except (LazyShardError, OSError):
                if self._strict:
                    raise
        return min(self._most, SCANNED_ROWS)


def _pieces(stream: Stream, chunks: int, width: int, every: bool, known: _Known) -> Iterator[range]:
    """Yields the chunks to look at, a piece at a time; each begins where all ranks' first chunks do."""
    first = -(-min(stream.retired(), chunks) // width) * width
    starts = list(range(first, chunks, width))
    if not starts:
        return
    fit = max(1, known.most(starts) // (width * stream.samples_per_chunk))
    if not every and len(starts) > fit:
        # Whole ones only: what is left at the end is no stripe yet, or dealt otherwise.
        whole = starts if (chunks - first) % width == 0 else starts[:-1]
        starts = [whole[index * len(whole) // fit] for index in range(min(fit, len(whole)))]
    for start in starts:
        yield range(start, min(start + width, chunks))


def _dealt(balance: Balance, costs: _Floats) -> _Floats:
    pieces = (costs[first : first + balance.stripe] for first in range(0, len(costs), balance.stripe))
    return np.concatenate([piece[balance.order(piece, number * balance.stripe)] for number, piece in enumerate(pieces)])


def _is_made(made: DealtByCost | None, training: Training) -> bool:
    if made is None:
        return False
    cost = Cost(made.cost_per_token, made.cost_per_token_squared)
    return (made.ranks, made.micro_batch_size, cost) == (training.ranks, training.micro_batch_size, training.cost)
