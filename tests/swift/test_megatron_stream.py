"""`megatron sft --sharded_lazy true`, 4 processes: what the ranks consumed of ended streams and of one being written.

Of every run: each sample once, all processes of a data-parallel rank fed the same, each rank from its own chunks alone.
The live streams come from the real producer, and begin when the training has; where they end, it ends by itself.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.swift.commands import ids_by_dp, megatron_sft
from tests.swift.conftest import ModelMaker
from tests.swift.consumption import (
    PP2_DP2,
    SIZE,
    STOPPED,
    TP2_DP2,
    assert_cursor,
    assert_dealt,
    assert_places,
    by_epoch,
    position_of,
    train_live,
)
from tests.swift.streams import write_stream

# One run takes 25 to 35 s on 2 idle cores.
pytestmark = [pytest.mark.timeout(400)]


def test_tp2_dp2_with_data_sharding_and_validation_data(tmp_path: Path, model: Path) -> None:
    samples = 107  # 13 whole stripes and 3 rows
    directory = write_stream(tmp_path / "stream", 0, samples, SIZE)
    # The chunk files of a stream that has ended: a stream itself is no validation data.
    validation = sorted(write_stream(tmp_path / "validation", 1000, 1008, SIZE).glob("chunk_*.jsonl"))
    run = megatron_sft(
        tmp_path / "run",
        model,
        dataset=directory,
        sharded_lazy=True,
        num_train_epochs=1,
        global_batch_size=4,
        data_sharding=True,
        val_dataset=validation,
        eval_steps=13,
        **TP2_DP2,
    )
    assert_places(run.batches, dp=2, tp=2)
    by_dp = ids_by_dp(run.batches)
    assert len(assert_dealt(by_dp, samples)) == 3
    assert position_of(run.output_dir / "checkpoint-26").layout == "block"
    # Over the whole of each rank's own chunks, where the window would be its first 8.
    assert all(max(ids[:16]) >= 64 for ids in by_dp.values()), "not ms-swift's shuffle over all"
    evaluated = [batch for batch in run.batches if not batch.train]
    assert {number for batch in evaluated for number in batch.ids} == set(range(1000, 1008))
    assert len(re.findall(r"'eval_loss': ", run.output)) == 2, run.tail()


def test_virtual_pipeline_stages_get_the_same_four_micro_batches_in_a_step(
    tmp_path: Path, make_model: ModelMaker
) -> None:
    samples = 83  # 10 whole stripes and 3 rows; 80 samples are 5 steps
    directory = write_stream(tmp_path / "stream", 0, samples, SIZE)
    run = megatron_sft(
        tmp_path / "run",
        make_model("qwen3", layers=4),
        dataset=directory,
        sharded_lazy=True,
        num_train_epochs=1,
        global_batch_size=16,
        virtual_pipeline_model_parallel_size=2,
        **PP2_DP2,
    )
    assert_places(run.batches, dp=2, pp=2)
    assert len(assert_dealt(ids_by_dp(run.batches), samples)) == 3
    steps = Counter((batch.rank, batch.vp, batch.step) for batch in run.batches)
    assert steps == {(rank, part, step): 4 for rank in range(4) for part in (0, 1) for step in range(1, 6)}


def test_context_parallel_peers_get_the_same_samples(tmp_path: Path, model: Path) -> None:
    samples = 51
    directory = write_stream(tmp_path / "stream", 0, samples, SIZE)
    run = megatron_sft(
        tmp_path / "run", model, dataset=directory, sharded_lazy=True, num_train_epochs=1, context_parallel_size=2
    )
    assert_places(run.batches, dp=2, cp=2)
    assert len(assert_dealt(ids_by_dp(run.batches), samples)) == 3


def test_pp2_dp2_live_goes_on_with_the_next_epoch(tmp_path: Path, model: Path) -> None:
    samples, steps = 87, 16  # an epoch of 84 samples, and 44 of the next one
    run = train_live(tmp_path, model, samples, train_iters=steps, sharded_lazy_on_end="repeat", **PP2_DP2)
    assert_places(run.batches, dp=2, pp=2)
    first, second = by_epoch(ids_by_dp(run.batches), samples)
    assert len(assert_dealt(first, samples)) == 3
    assert len(assert_dealt(second, samples)) == samples - 44
    assert all(first[dp][:22] != second[dp] for dp in range(2)), "both epochs in the same order"
    assert list(run.losses) == list(range(1, steps + 1))
    assert not STOPPED.search(run.output)
    # Another epoch may follow, so no chunk is given up.
    assert_cursor(run.output_dir / f"checkpoint-{steps}", tmp_path / "stream", steps * 8, set())
