"""Kill -9 in mid-run, and on from the checkpoint: together each sample once, and the same steps as if nothing had been.

What was trained after the checkpoint and before the kill is trained again: those steps are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard.stream import read_cursor
from tests.swift.commands import RESUMABLE, Batch, Run, ids_by_dp, start_megatron_sft, start_swift_sft, swift_sft
from tests.swift.consumption import (
    SIZE,
    TP2_DP2,
    assert_cursor,
    assert_dealt,
    by_epoch,
    fed_live,
    position_of,
    sealed_in,
)
from tests.swift.streams import published, write_stream

pytestmark = [pytest.mark.timeout(400)]


def until(run: Run, step: int) -> list[Batch]:
    return [batch for batch in run.batches if batch.step <= step]


def assert_goes_on(killed: Run, resumed: Run, step: int) -> None:
    """Checks that `resumed` begins after `step`, and trains what `killed` trained of the same steps."""
    assert min(batch.step for batch in resumed.batches) == step + 1
    first, second = (
        {(batch.rank, batch.step, batch.micro): batch.ids for batch in run.batches} for run in (killed, resumed)
    )
    both = first.keys() & second.keys()
    assert {place: first[place] for place in both} == {place: second[place] for place in both}
    steps = killed.losses.keys() & resumed.losses.keys()
    assert steps, "no step was trained twice: nothing was compared"
    assert {n: resumed.losses[n] for n in steps} == pytest.approx({n: killed.losses[n] for n in steps}, rel=1e-5)


def test_megatron_live_trainer_and_producer_killed(tmp_path: Path, model: Path) -> None:
    samples, directory, output_dir = 141, tmp_path / "stream", tmp_path / "output"  # 17 steps of 8
    options: dict[str, Any] = {
        **RESUMABLE,
        **TP2_DP2,
        "dataset": directory,
        "output_dir": output_dir,
        "sharded_lazy": True,
        "train_iters": 60,
    }
    with (
        start_megatron_sft(tmp_path / "run1", model, **options, save_steps=4) as training,
        fed_live(training, directory, samples, 3, processes=4) as producer,
    ):
        training.wait_for(lambda: 6 in training.losses, "loss of step 6")
        producer.kill()
        training.kill()
        killed = training.wait()
    assert not (directory / "stream.end").exists()
    checkpoint = output_dir / "checkpoint-4"
    # The first window of 2 chunks of each rank is through.
    assert_cursor(checkpoint, directory, 32, {number for batch in until(killed, 4) for number in batch.ids})
    begun = published(directory)
    more = {"mcore_model": checkpoint, "finetune": False, "dataloader_num_workers": 2, "save_steps": 1000}
    with (
        start_megatron_sft(tmp_path / "run2", model, **{**options, **more}) as training,
        fed_live(training, directory, samples, 6, processes=4),
    ):
        resumed = training.end()
    assert resumed.batches[0].time < max(sealed_in(directory).values()), "the stream was complete before training began"
    assert begun < samples
    assert_goes_on(killed, resumed, 4)
    left_over = assert_dealt(ids_by_dp([*until(killed, 4), *resumed.batches]), samples)
    assert len(left_over) == 5
    assert list(resumed.losses) == list(range(1, 18))
    assert_cursor(output_dir / "checkpoint-17", directory, 136, set(range(samples)) - left_over)


def test_megatron_async_save_moves_the_cursor_when_it_is_durable(tmp_path: Path, model: Path) -> None:
    directory, output_dir = write_stream(tmp_path / "stream", 0, 2000, SIZE), tmp_path / "output"

    def consumed() -> int:
        cursor = read_cursor(directory, "async")
        return 0 if cursor is None else cursor.consumed

    with start_megatron_sft(
        tmp_path / "run",
        model,
        processes=2,
        dataset=directory,
        output_dir=output_dir,
        sharded_lazy=True,
        sharded_lazy_consumer="async",
        num_train_epochs=1,
        global_batch_size=4,
        no_save_optim=False,
        save_safetensors=False,
        async_save=True,
        save_steps=30,
    ) as training:
        training.wait_for(lambda: consumed() > 0, "cursor")
        training.kill()
        run = training.wait()
    step = consumed() // 4
    # The position lies there from the beginning of the save on, Megatron's metadata only at its end.
    assert position_of(output_dir / f"checkpoint-{step}").consumed == 4 * step
    assert (output_dir / f"checkpoint-{step}" / f"iter_{step:07d}" / "metadata.json").exists()
    assert step % 30 == 0
    assert max(batch.step for batch in run.batches) > step, "written during the save, not some steps later"


def test_swift_killed_in_its_second_epoch(tmp_path: Path, model: Path) -> None:
    samples = 47  # 23 micro batches: 8 steps of 3, the last of 2
    options: dict[str, Any] = {
        "processes": 1,
        "dataset": write_stream(tmp_path / "stream", 0, samples, SIZE),
        "sharded_lazy": True,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    with start_swift_sft(tmp_path / "run1", model, **options) as training:
        training.wait_for(lambda: 12 in training.losses, "loss of step 12")
        training.kill()
        killed = training.wait()
    # With another number of workers: what they had read ahead does not count.
    more: dict[str, Any] = {"resume_from_checkpoint": killed.output_dir / "checkpoint-10", "dataloader_num_workers": 2}
    resumed = swift_sft(tmp_path / "run2", model, **options, **more)
    assert_goes_on(killed, resumed, 10)
    first, second = by_epoch(ids_by_dp([*until(killed, 10), *resumed.batches]), samples)
    assert len(assert_dealt(first, samples)) == len(assert_dealt(second, samples)) == 1
    assert position_of(resumed.output_dir / "checkpoint-16").consumed == 92
