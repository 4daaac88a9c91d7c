"""Kill -9 at a random step, and on with another number of ranks: what the surviving history trained, by real commands.

Each start trains under another number of data-parallel ranks, the stream grows between them and ends before the last.
Of each start counts what was trained up to the checkpoint that the next one goes on from.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.swift.commands import RESUMABLE, start_megatron_sft, start_swift_sft
from tests.swift.consumption import SIZE, TP2_DP2, assert_every_sample_once, killed_at, position_of
from tests.swift.streams import write_stream

pytestmark = [pytest.mark.timeout(400)]

CONSUMER = "rescaled"


def test_swift_with_4_then_2_then_3_processes(tmp_path: Path, model: Path) -> None:
    choose, samples = random.Random(11), 221
    directory = write_stream(tmp_path / "stream", 0, 96, SIZE, end=False)
    options: dict[str, Any] = {
        "dataset": directory,
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "sharded_lazy_consumer": CONSUMER,
        "max_steps": 60,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    with start_swift_sft(tmp_path / "run1", model, processes=4, **options) as training:
        first, checkpoint = killed_at(training, directory, CONSUMER, choose.randint(4, 8))
    checkpoints = [checkpoint]
    write_stream(directory, 96, 160, SIZE, end=False)
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "resume_from_checkpoint": checkpoint}
    begun = position_of(checkpoint).step
    with start_swift_sft(tmp_path / "run2", model, processes=2, **options, **more) as training:
        second, checkpoint = killed_at(training, directory, CONSUMER, begun + choose.randint(3, 5))
    checkpoints.append(checkpoint)
    write_stream(directory, 160, samples, SIZE)
    more = {"per_device_train_batch_size": 1, "resume_from_checkpoint": checkpoint}
    with start_swift_sft(
        tmp_path / "run3", model, processes=3, **{**options, "max_steps": 200, "save_steps": 1000}, **more
    ) as training:
        third = training.end()
    last = max(batch.step for batch in third.batches)
    checkpoints.append(tmp_path / "output" / f"checkpoint-{last}")
    assert_every_sample_once([first, second, third], checkpoints, samples)
    assert "with 2 data-parallel ranks and micro batches of 2, before with 4 and 2" in second.output


def test_megatron_with_tp2_dp2_then_dp4_then_dp2(tmp_path: Path, model: Path) -> None:
    choose, samples = random.Random(12), 181
    directory = write_stream(tmp_path / "stream", 0, 96, SIZE, end=False)
    options: dict[str, Any] = {
        **RESUMABLE,
        "dataset": directory,
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "sharded_lazy_consumer": CONSUMER,
        "train_iters": 60,
        "save_steps": 3,
        "save_safetensors": False,
        # Or Megatron cannot load its optimizer with another tensor parallelism.
        "dist_ckpt_optim_fully_reshardable": True,
    }
    with start_megatron_sft(tmp_path / "run1", model, **{**options, **TP2_DP2}) as training:
        first, checkpoint = killed_at(training, directory, CONSUMER, choose.randint(4, 8))
    checkpoints = [checkpoint]
    write_stream(directory, 96, 140, SIZE, end=False)
    more: dict[str, Any] = {"mcore_model": checkpoint, "finetune": False}
    begun = position_of(checkpoint).step
    with start_megatron_sft(tmp_path / "run2", model, **options, **more, micro_batch_size=1) as training:
        second, checkpoint = killed_at(training, directory, CONSUMER, begun + choose.randint(4, 6))
    checkpoints.append(checkpoint)
    write_stream(directory, 140, samples, SIZE)
    more["mcore_model"] = checkpoint
    with start_megatron_sft(
        tmp_path / "run3", model, processes=2, **{**options, "save_steps": 1000}, **more
    ) as training:
        third = training.end()
    last = max(batch.step for batch in third.batches)
    checkpoints.append(tmp_path / "output" / f"checkpoint-{last}")
    assert_every_sample_once([first, second, third], checkpoints, samples)
