"""What a report says of the order in which a stream is read: what was found, and what to change. Decisions only.

Sentences and weights are as in `lazyshard.cli.report_advice`.
"""

from __future__ import annotations

from typing import Final

from lazyshard.cli.output import count
from lazyshard.cli.report_advice import LITTLE, Change, Finding
from lazyshard.inspection.inspection_shuffle import ShuffleReport, WindowReport
from lazyshard.inspection.report_chunks import Made
from lazyshard.inspection.report_training import TrainingFacts
from lazyshard.plan.unit import auto_unit

__all__ = ["shuffle_finding"]

_WORTH_SHUFFLING: Final = 1.5
"""So many times as far apart as in order windows must bring neighbours."""

_AS_GOOD: Final = 0.9
"""Of windows that reach this share of the furthest, the smallest is proposed: it holds the fewest chunks in memory."""


def shuffle_finding(
    found: ShuffleReport | None, reason: str, training: TrainingFacts, *, dealt: bool, made: Made
) -> Finding:
    """Says how far apart neighbours of the stream are trained.

    Args:
        found: for some windows; None where that is not known.
        reason: why it is not, "" where there is no row.
        training: how the stream is trained.
        dealt: whether it is dealt by cost.
        made: how its rows were made.
    """
    if found is None:
        return Finding(f"Not known: {reason}" if reason else "There is no row to shuffle.", known=False)
    if dealt:
        return Finding("Rows are dealt by cost, in an order by chance within each stripe: read them in order.")
    now = next((one for one in found.windows if one.window == (training.window or 0)), None)
    if now is None:
        return Finding("Not known: too little is published.", known=False)
    where = "in order" if not now.positions else f"in windows of {count(int(now.window), 'chunk')}"
    text = f"Read {where}, two neighbours of the stream are trained {_steps(now, found)} apart."
    rows = _rows_change(found, training)
    if training.window is None:
        text = f"How it is read is not known. {text}"
    if now.positions or made.shuffled:
        return Finding(f"{text} The producer has shuffled the rows." if made.shuffled else text, rows)
    wider = [one for one in found.windows if one.positions and one.window != "all"]
    furthest = max(map(_distance, wider), default=0.0)
    if furthest < _WORTH_SHUFFLING * _distance(now):
        return Finding(text, rows)
    best = next(one for one in wider if _distance(one) >= _AS_GOOD * furthest)
    change = (
        "Shuffle within windows, unless the rows come in an order by chance or will be dealt by cost: "
        f"{_steps(best, found)} between neighbours"
    )
    weight = LITTLE if training.window is None else 5 * LITTLE
    return Finding(text, (*rows, Change(weight, change, f"shuffle_window={best.window}")))


def _rows_change(found: ShuffleReport, training: TrainingFacts) -> tuple[Change, ...]:
    """Returns that more than one row is to be read at a time, where a few chunks are dealt to more ranks row by row."""
    size, ranks = found.samples_per_chunk, found.reading.ranks
    better = auto_unit(ranks, size, training.micro_batch_size, found.samples, found.ended, None)
    if better in (None, size, 1) or training.unit not in (None, size):
        return ()
    chunks = count(found.samples // size, "full chunk")
    change = (
        f"Deal micro batches in place of chunks: there are {chunks} for {ranks:,} ranks, so that each row is dealt, "
        "and read, by itself"
    )
    return (Change(2 * LITTLE, change, 'unit="auto"'),)


def _distance(one: WindowReport) -> float:
    return one.expected.neighbours if one.measured.neighbours is None else one.measured.neighbours


def _steps(one: WindowReport, found: ShuffleReport) -> str:
    steps = _distance(one) / found.reading.batch_size
    return f"{steps:,.0f} steps" if steps >= 10 else f"{steps:.1f} steps"
