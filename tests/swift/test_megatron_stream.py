"""`megatron sft --sharded_lazy true`, 4 processes: what the ranks consumed of an ended stream and of one being written.

Of both: each sample once, all processes of a data-parallel rank fed the same, each rank from its own chunks alone.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.swift.commands import ids_by_dp, megatron_sft, start_megatron_sft
from tests.swift.conftest import ModelMaker
from tests.swift.consumption import (
    SIZE,
    assert_cursor,
    assert_dealt,
    assert_places,
    assert_read_while_written,
    by_epoch,
    fed_live,
    position_of,
)
from tests.swift.streams import write_stream

pytestmark = [pytest.mark.timeout(400)]


def test_cp2_dp2_with_data_sharding_and_validation_data(tmp_path: Path, model: Path) -> None:
    samples = 83  # 10 whole stripes and 3 rows
    # The chunk files of a stream that has ended: a stream itself is no validation data.
    validation = sorted(write_stream(tmp_path / "validation", 1000, 1008, SIZE).glob("chunk_*.jsonl"))
    run = megatron_sft(
        tmp_path / "run",
        model,
        dataset=write_stream(tmp_path / "stream", 0, samples, SIZE),
        sharded_lazy=True,
        num_train_epochs=1,
        global_batch_size=4,
        data_sharding=True,
        val_dataset=validation,
        eval_steps=10,
        context_parallel_size=2,
    )
    assert_places(run.batches, dp=2, cp=2)
    by_dp = ids_by_dp(run.batches)
    assert len(assert_dealt(by_dp, samples)) == 3
    assert position_of(run.output_dir / "checkpoint-20").layout == "block"
    # Over the whole of each rank's own chunks, where the window would be its first 8.
    assert all(max(ids[:16]) >= 64 for ids in by_dp.values()), "not ms-swift's shuffle over all"
    evaluated = [batch for batch in run.batches if not batch.train]
    assert {number for batch in evaluated for number in batch.ids} == set(range(1000, 1008))
    assert len(re.findall(r"'eval_loss': ", run.output)) == 2, run.tail()


def test_virtual_pipelines_live_go_on_with_the_next_epoch(tmp_path: Path, make_model: ModelMaker) -> None:
    samples, steps = 83, 8  # an epoch of 80 samples, 5 steps of 4 micro batches a rank, and 48 of the next one
    directory = tmp_path / "stream"
    with (
        start_megatron_sft(
            tmp_path / "run",
            make_model("qwen3", layers=4),
            dataset=directory,
            sharded_lazy=True,
            sharded_lazy_on_end="repeat",
            train_iters=steps,
            global_batch_size=16,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
        ) as training,
        fed_live(training, directory, samples, 12, processes=4),
    ):
        run = training.end()
    assert_read_while_written(run, directory, samples)
    assert_places(run.batches, dp=2, pp=2)
    micros = Counter((batch.rank, batch.vp, batch.step) for batch in run.batches)
    assert micros == {(rank, part, step): 4 for rank in range(4) for part in (0, 1) for step in range(1, steps + 1)}
    first, second = by_epoch(ids_by_dp(run.batches), samples)
    assert len(assert_dealt(first, samples)) == 3
    assert len(assert_dealt(second, samples)) == samples - 48
    assert all(first[dp][:24] != second[dp] for dp in range(2)), "both epochs in the same order"
    assert list(run.losses) == list(range(1, steps + 1))
    assert "training stops after step" not in run.output
    # Another epoch may follow, so no chunk is given up.
    assert_cursor(run.output_dir / f"checkpoint-{steps}", directory, steps * 16, set())
