"""`--sharded_lazy_shuffle_distance` in the real `swift sft`: on two processes the order of its window, on resume too.

Arithmetic: tests/plan/test_shuffle_distance; decisions: tests/swift/unit/test_planning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import LazyShardedDataset, Order, window_for_distance
from tests.swift.commands import ids_by_dp, swift_sft
from tests.swift.consumption import MICRO, SIZE, position_of
from tests.swift.streams import write_stream

# One run takes 10 to 20 s on 2 idle cores.
pytestmark = [pytest.mark.timeout(300)]

RANKS: Final = 2
SAMPLES: Final = 12 * SIZE * RANKS
DISTANCE: Final = SIZE
"""Three chunks: (3 * SIZE + 1) / 3 is more, two are not enough."""

OPTIONS: Final[dict[str, Any]] = {
    "processes": RANKS,
    "sharded_lazy": True,
    "save_strategy": "steps",
    "save_steps": 3,
    "gradient_accumulation_steps": 1,
}


@pytest.mark.sweep
def test_order_is_that_of_the_window_and_stays_it_on_resume(tmp_path: Path, model: Path) -> None:
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    options = {**OPTIONS, "dataset": directory, "sharded_lazy_shuffle_distance": DISTANCE}
    first = swift_sft(tmp_path / "first", model, max_steps=3, **options)
    assert f"--sharded_lazy_shuffle_distance {DISTANCE}: each rank shuffles windows of 3 chunks" in first.output
    checkpoint = first.output_dir / "checkpoint-3"
    assert position_of(checkpoint).window == window_for_distance(DISTANCE, SIZE) == 3
    second = swift_sft(tmp_path / "second", model, max_steps=9, resume_from_checkpoint=checkpoint, **options)
    trained = ids_by_dp([*first.batches, *second.batches])
    for rank in range(RANKS):
        dataset = LazyShardedDataset(
            directory, dp_rank=rank, dp_size=RANKS, batch_size=MICRO, order=Order(shuffle_window=3, seed=42)
        )
        assert trained[rank] == [dataset.draw(index).sample for index in dataset.rank_indices[: 9 * MICRO]]
    # Another distance would be another order.
    other = {**options, "processes": 1, "sharded_lazy_shuffle_distance": 2 * DISTANCE}
    refused = swift_sft(tmp_path / "other", model, max_steps=9, resume_from_checkpoint=checkpoint, code=2, **other)
    assert "saved with window 3, this run has window 6: leave out" in refused.output
    assert not refused.batches


def test_distance_that_cannot_be_reached_is_refused(tmp_path: Path, model: Path) -> None:
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    # Of one rank that has them all.
    largest = (SAMPLES + 1) // 3
    run = swift_sft(
        tmp_path / "run",
        model,
        max_steps=3,
        dataset=directory,
        code=2,
        **{**OPTIONS, "processes": 1, "sharded_lazy_shuffle_distance": largest + 1},
    )
    assert f"lazyshard: error: --sharded_lazy_shuffle_distance {largest + 1}: " in run.output
    assert f"give {largest} at the most (exit code 2)" in run.output
    assert not run.batches
