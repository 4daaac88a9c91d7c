"""Kill -9 in mid-run, and on from the checkpoint: together each sample once, and the same steps as if nothing had been.

What was trained after the checkpoint and before the kill is trained again: those steps are compared.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.swift import consumption
from tests.swift.commands import RESUMABLE, Batch, Run, ids_by_dp, start_megatron_sft, start_swift_sft, swift_sft
from tests.swift.consumption import SIZE, assert_cursor, assert_dealt, encoded_in, fed_live, position_of, sealed_in
from tests.swift.streams import published, write_jsonl, write_stream

pytestmark = [pytest.mark.timeout(400)]


def trained(run: Run) -> list[Batch]:
    return [batch for batch in run.batches if batch.train]


def until(run: Run, step: int) -> list[Batch]:
    return [batch for batch in trained(run) if batch.step <= step]


def assert_goes_on(killed: Run, resumed: Run, step: int) -> None:
    """Checks that `resumed` begins after `step`, and trains what `killed` trained of the same steps."""
    assert min(batch.step for batch in trained(resumed)) == step + 1
    first, second = (
        {(batch.rank, batch.step, batch.micro): batch.ids for batch in trained(run)} for run in (killed, resumed)
    )
    both = first.keys() & second.keys()
    assert {place: first[place] for place in both} == {place: second[place] for place in both}
    steps = killed.losses.keys() & resumed.losses.keys()
    assert steps, "no step was trained twice: nothing was compared"
    assert {n: resumed.losses[n] for n in steps} == pytest.approx({n: killed.losses[n] for n in steps}, rel=1e-5)


def test_megatron_live_trainer_and_producer_killed(tmp_path: Path, model: Path) -> None:
    samples, directory, output_dir = 141, tmp_path / "stream", tmp_path / "output"  # 17 steps of 8
    options: dict[str, Any] = {**RESUMABLE, **consumption.TP2_DP2, "dataset": directory, "output_dir": output_dir}
    options |= {"sharded_lazy": True, "train_iters": 60}
    with (
        start_megatron_sft(tmp_path / "run1", model, **options, save_steps=4) as training,
        fed_live(training, directory, samples, 3, processes=4) as producer,
    ):
        training.wait_for_step(6)
        producer.kill()
        killed = training.killed_after(6)
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


def test_swift_killed_in_its_second_epoch_encodes_nothing_again(tmp_path: Path, model: Path) -> None:
    samples = 95  # 23 micro batches for each process: 8 steps of 3, the last of 2
    directory = write_stream(tmp_path / "stream", 0, samples, SIZE)
    options: dict[str, Any] = {"dataset": directory, "sharded_lazy": True, "num_train_epochs": 2}
    options |= {"sharded_lazy_encode_cache": tmp_path / "cache", "sharded_lazy_encode_cache_size": "64MiB"}
    options |= {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 5, "eval_strategy": "epoch"}
    options |= {"val_dataset": write_jsonl(tmp_path / "validation.jsonl", 1000, 1004)}
    logs = [tmp_path / "encoded1", tmp_path / "encoded2"]
    with start_swift_sft(tmp_path / "run1", model, environment={"ENCODED": str(logs[0])}, **options) as training:
        killed = training.killed_after(12)
    # With another number of workers: what they had read ahead does not count.
    more: dict[str, Any] = {"resume_from_checkpoint": killed.output_dir / "checkpoint-10", "dataloader_num_workers": 2}
    resumed = swift_sft(tmp_path / "run2", model, environment={"ENCODED": str(logs[1])}, **options, **more)
    assert_goes_on(killed, resumed, 10)
    micros = Counter((batch.rank, batch.step) for batch in [*until(killed, 10), *trained(resumed)])
    assert micros == {(rank, step): 2 if step % 8 == 0 else 3 for rank in (0, 1) for step in range(1, 17)}
    first, second = consumption.by_epoch(ids_by_dp([*until(killed, 10), *resumed.batches]), samples)
    assert len(assert_dealt(first, samples)) == len(assert_dealt(second, samples)) == 3
    assert all(first[dp] != second[dp] for dp in (0, 1)), "both epochs in the same order"
    assert position_of(resumed.output_dir / "checkpoint-16").consumed == 184
    logged = [json.loads(line) for line in (resumed.output_dir / "logging.jsonl").read_text().splitlines()]
    assert {line["global_step/max_steps"] for line in logged if "eval_loss" in line} == {"16/16"}
    # What the first epoch trained is encoded; the validation data are ms-swift's own affair.
    times = encoded_in(logs[0]) + encoded_in(logs[1])
    assert {times[number] for ids in first.values() for number in ids} == {1}
    assert not set(encoded_in(logs[1])) & set(itertools.chain.from_iterable(first.values()))
