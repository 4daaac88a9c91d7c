"""What is left of a stream for a consumer that has trained what is there, and what it keeps all the same.

Decisions only.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyshard.format import Cursor
from lazyshard.stream.run_state import course_of


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left where no step is.

    Attributes:
        samples: how many samples its newest checkpoint has not trained: fewer than its next step takes.
        keeps: its newest checkpoint needs none of the chunks of the half-open range [chunks_before, keeps), which it
            is not done with: an older checkpoint does, or an epoch that is to follow. Not more than `chunks_before`
            where there is no such chunk, or that cannot be told.
        limited: it takes no more of the stream than it has had, by its `max_total_samples`.
    """

    samples: int
    keeps: int
    limited: bool = False


def remainder(cursor: Cursor, samples: int, chunks: int, ended: bool) -> Remainder | None:
    """Returns what is left, None where there is a step still to train.

    Args:
        cursor: the consumer's.
        samples: published; a run may take fewer for all.
        chunks: that hold them.
        ended: nothing will follow.
    """
    limit = None if cursor.state is None else cursor.state.max_total_samples
    limited = limit is not None and (limit < samples or (limit == samples and not ended))
    total = limit if limited else samples if ended else None
    left = max(0, (samples if total is None else total) - cursor.consumed)
    if left >= _step(cursor):
        return None
    through = total is not None and not left
    return Remainder(left, chunks if through else _needed_from(cursor, total), limited)


def _step(cursor: Cursor) -> int:
    """Returns how many samples a step takes, or a micro batch of all ranks where the number of those is not told."""
    if cursor.state is None:
        return cursor.plan.get("dp_size", 1) * cursor.plan.get("batch_size", 1)
    part = cursor.state.parts[-1]
    return part.dp * max(part.batch_size, part.draws_per_step)


def _needed_from(cursor: Cursor, total: int | None) -> int:
    if cursor.state is None:
        return cursor.chunks_before
    course = course_of(cursor.state)
    return course.done_before(course.current.draws, total) // cursor.state.samples_per_chunk
