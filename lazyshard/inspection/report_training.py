"""How a stream is trained, as its consumers' cursors tell, its producer, or whoever asks. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lazyshard.format.dealt import DealtByCost
from lazyshard.stream.consumers import Consumer

RANKS: Final = 8
"""A node's, where nothing tells how many there are."""

_MOST_RANKS: Final = 1 << 20
"""No run has more: a report must not become costly by what a file says."""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """How a stream is trained, or would be.

    Attributes:
        ranks: data-parallel ranks.
        micro_batch_size: samples of a rank in a micro batch.
        told_by: who tells the ranks: "option", the name of a consumer after "consumer ", "producer", or "nobody".
        rank_step_samples: samples of a rank in a step, all its micro batches together; None where nothing tells.
        unit: samples that are dealt to ranks in turn; None where nothing tells.
        window: chunks of a rank that are shuffled together, 0 in order; None where nothing tells.
    """

    ranks: int
    micro_batch_size: int
    told_by: str
    rank_step_samples: int | None = None
    unit: int | None = None
    window: int | None = None

    @property
    def step_samples(self) -> int:
        """Samples of a step over all ranks, at the least."""
        return self.ranks * (self.rank_step_samples or self.micro_batch_size)


def training_of(
    consumers: Sequence[Consumer],
    dealt: DealtByCost | None,
    ranks: int | None,
    micro_batch_size: int | None,
    global_batch_size: int | None,
    samples_per_chunk: int | None,
) -> TrainingFacts:
    """Returns how a stream is trained: as it is asked for, else as its newest consumer does, else as it was dealt.

    Args:
        consumers: its consumers.
        dealt: how its producer has dealt it by cost, None where it has not.
        ranks: as asked for; None for what is told.
        micro_batch_size: the same.
        global_batch_size: the same, in samples over all ranks.
        samples_per_chunk: of the stream, None where it is not known.
    """
    newest = max((one for one in consumers if _ranks(one) is not None), key=_written_at, default=None)
    told, told_by = None, "nobody"
    batch = per_step = unit = window = None
    if newest is not None:
        told, told_by = _ranks(newest), f"consumer {newest.name}"
        cursor = newest.cursor
        if cursor is not None:
            plan = cursor.plan
            batch, unit, positions = plan.get("batch_size"), plan.get("unit"), plan.get("window")
            if cursor.state is not None:
                part = cursor.state.parts[-1]
                batch, unit, positions = part.batch_size, cursor.state.unit, cursor.state.window
                per_step = part.draws_per_step or None
            if positions is not None and samples_per_chunk:
                window = -(-positions // samples_per_chunk)
    elif dealt is not None:
        told, told_by = dealt.ranks, "producer"
    if dealt is not None and batch is None:
        batch = dealt.micro_batch_size
    if ranks is not None:
        told_by = "option"
    found = ranks or told or RANKS
    size = micro_batch_size or batch or 1
    if global_batch_size is not None:
        per_step = max(size, global_batch_size // found)
    return TrainingFacts(found, size, told_by, per_step, unit or None, window)


def _ranks(consumer: Consumer) -> int | None:
    cursor, reading = consumer.cursor, consumer.reading
    found = None
    if cursor is not None:
        found = cursor.plan.get("dp_size") if cursor.state is None else cursor.state.parts[-1].dp
    if found is None and reading is not None:
        found = reading.dp_size
    return found if found is not None and 1 <= found <= _MOST_RANKS else None


def _written_at(consumer: Consumer) -> float:
    return max(one.updated_at for one in (consumer.cursor, consumer.reading) if one is not None)
