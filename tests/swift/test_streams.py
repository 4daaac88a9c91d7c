"""What real runs consumed of ended streams and of ones being written: each sample once, each rank its own chunks."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lazyshard.format.state import BlendState
from lazyshard.stream import read_cursor
from tests.plan.oracle import split_owners
from tests.swift import consumption
from tests.swift.commands import ids_by_dp, megatron_sft, start_megatron_sft, start_swift_sft, swift_sft
from tests.swift.conftest import ModelMaker
from tests.swift.consumption import MICRO, SIZE, assert_cursor, assert_dealt, encoded_in, fed_live, position_of
from tests.swift.streams import text, write_rows, write_stream

pytestmark = [pytest.mark.timeout(400)]


def test_cp2_dp2_with_data_sharding_and_validation_data(tmp_path: Path, model: Path) -> None:
    samples = 83  # 10 whole stripes and 3 rows
    validation = write_stream(tmp_path / "validation", 1000, 1008, SIZE)
    stream = write_stream(tmp_path / "stream", 0, samples, SIZE)
    options: dict[str, Any] = {"dataset": stream, "sharded_lazy": True, "num_train_epochs": 1, "global_batch_size": 4}
    options |= {"data_sharding": True, "val_dataset": validation, "eval_steps": 10, "context_parallel_size": 2}
    options |= {"sharded_lazy_encode_cache": tmp_path / "cache", "environment": {"ENCODED": str(tmp_path / "encoded")}}
    run = megatron_sft(tmp_path / "run", model, **options)
    consumption.assert_places(run.batches, dp=2, cp=2)
    by_dp = ids_by_dp(run.batches)
    assert len(assert_dealt(by_dp, samples)) == 3
    assert position_of(run.output_dir / "checkpoint-20").layout == "block"
    # Over the whole of each rank's own chunks, where the window would be its first 8.
    assert all(max(ids[:16]) >= 64 for ids in by_dp.values()), "not ms-swift's shuffle over all"
    evaluated = [batch for batch in run.batches if not batch.train]
    assert {number for batch in evaluated for number in batch.ids} == set(range(1000, 1008))
    assert len(re.findall(r"'eval_loss': ", run.output)) == 2, run.tail()
    # Peers share what one of them has encoded.
    encoded = {number: times for number, times in encoded_in(tmp_path / "encoded").items() if number < 1000}
    assert set().union(*by_dp.values()) <= set(encoded)
    assert set(encoded.values()) == {1}


def test_virtual_pipelines_live_go_on_with_the_next_epoch(tmp_path: Path, make_model: ModelMaker) -> None:
    samples, steps = 83, 8  # an epoch of 80 samples, 5 steps of 4 micro batches a rank, and 48 of the next one
    directory = tmp_path / "stream"
    options: dict[str, Any] = {"dataset": directory, "sharded_lazy": True, "train_iters": steps}
    options |= {"sharded_lazy_on_end": "repeat", "sharded_lazy_unit": "batch", "global_batch_size": 16}
    options |= {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    with (
        start_megatron_sft(tmp_path / "run", make_model(4), **options) as training,
        fed_live(training, directory, samples, 12, processes=4),
    ):
        run = training.end()
    consumption.assert_read_while_written(run, directory, samples)
    consumption.assert_places(run.batches, dp=2, pp=2)
    micros = Counter((batch.rank, batch.vp, batch.step) for batch in run.batches)
    assert micros == {(rank, part, step): 4 for rank in range(4) for part in (0, 1) for step in range(1, steps + 1)}
    first, second = consumption.by_epoch(ids_by_dp(run.batches), samples)
    assert len(assert_dealt(first, samples, MICRO)) == 3
    assert len(assert_dealt(second, samples, MICRO)) == samples - 48
    assert all(first[dp][:24] != second[dp] for dp in range(2)), "both epochs in the same order"
    assert list(run.losses) == list(range(1, steps + 1))
    assert "training stops after step" not in run.output
    # Another epoch may follow, so no chunk is given up.
    assert_cursor(run.output_dir / f"checkpoint-{steps}", directory, steps * 16, set())


def test_pt_of_one_process_live_with_a_configuration_file(tmp_path: Path, model: Path) -> None:
    samples, directory = 63, tmp_path / "stream"
    own = {"sharded_lazy": True, "sharded_lazy_shuffle_window": 3, "sharded_lazy_consumer": "from-yaml"}
    configuration = {"dataset": str(directory), **own, "max_steps": 40, "save_strategy": "steps", "save_steps": 1000}
    configuration |= {"gradient_accumulation_steps": 2}
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in configuration.items()))
    # Texts without a question, as pre-training takes them.
    write_rows(directory.with_suffix(".source.jsonl"), map(text, range(samples)))
    # The harness's own defaults come after the file's, and would count.
    options = dict.fromkeys(("save_strategy", "gradient_accumulation_steps"))
    command = ("swift", "pt", str(file))
    with (
        start_swift_sft(tmp_path / "run", model, processes=1, command=command, **options) as training,
        fed_live(training, directory, samples, 12, processes=1),
    ):
        run = training.end()
    consumption.assert_read_while_written(run, directory, samples)
    assert list(run.losses) == list(range(1, 16))
    left_over = assert_dealt(ids_by_dp(run.batches), samples)
    assert len(left_over) == samples - 15 * 2 * MICRO
    checkpoint = run.output_dir / "checkpoint-15"
    (told,) = [line for line in run.output.splitlines() if f"lazyshard: {directory} has ended with 63 samples" in line]
    assert "after step 15 of 40, on all ranks, with 60 samples trained" in told
    assert told.endswith(f"; not trained: 3 of the 63 of {directory}. Checkpoint: {checkpoint}")
    assert_cursor(checkpoint, directory, 60, set(range(samples)) - left_over)
    arguments = json.loads((run.output_dir / "args.json").read_bytes())
    assert {name: arguments[name] for name in own} == own
    assert (position_of(checkpoint).consumer, position_of(checkpoint).window) == ("from-yaml", 3)


def test_live_stream_split_into_training_and_validation(tmp_path: Path, model: Path) -> None:
    directory = write_stream(tmp_path / "stream", 0, 24, SIZE, end=False)
    options: dict[str, Any] = {"dataset": directory, "sharded_lazy": True, "split_dataset_ratio": 0.1, "max_steps": 40}
    options |= {"save_strategy": "steps", "save_steps": 5, "eval_steps": 4, "dataloader_num_workers": 2}
    with start_swift_sft(tmp_path / "run", model, **options) as training:
        training.wait_for_step(3)
        write_stream(directory, 24, 60, SIZE)
        run = training.end()
    owners = split_owners((9, 1), 60)
    trained = [number for ids in ids_by_dp(run.batches).values() for number in ids]
    assert len(trained) == len(set(trained)) == 52
    assert {owners[number] for number in trained} == {0}
    # Two micro batches of all ranks are left over, and nothing that was published later is evaluated.
    assert max(trained) > 50
    evaluated = Counter(number for batch in run.batches if not batch.train for number in batch.ids)
    assert set(evaluated) == {number for number in range(24) if owners[number] == 1} == {9, 19}
    assert {batch.step for batch in run.batches if not batch.train} >= {4, 8, 12}
    assert f"val_dataset: 2 samples of {directory}" in run.output
    checkpoint = run.output_dir / "checkpoint-13"
    position = position_of(checkpoint)
    assert position.state is not None and position.state.split == ((9, 1), 0)
    cursor = read_cursor(directory, position.consumer)
    # Validation needs every chunk.
    assert cursor is not None and (cursor.consumed, cursor.chunks_before) == (52, 0)
    more: dict[str, Any] = {"resume_from_checkpoint": checkpoint, "split_dataset_ratio": 0.2}
    with start_swift_sft(tmp_path / "run2", model, **options | more) as training:
        refused = training.wait()
    assert refused.returncode != 0
    assert f"{checkpoint}: it draws train of 9:1, here it is train of 4:1: keep --split_dataset_ratio" in refused.output
    assert "exitcode  : 2 " in refused.output


@pytest.mark.sweep
def test_blend_by_sizes_whose_streams_have_units_of_their_own_and_keep_them(tmp_path: Path, model: Path) -> None:
    # One file, and five chunks of 12, which are enough for two ranks.
    dataset = [write_stream(tmp_path / "one", 0, 60, 60), write_stream(tmp_path / "five", 500, 560, 12)]
    options: dict[str, Any] = {"dataset": dataset, "sharded_lazy": True, "sharded_lazy_unit": "auto"}
    options |= {"train_dataloader_shuffle": False, "output_dir": tmp_path / "output", "num_train_epochs": 1}
    options |= {"save_strategy": "steps", "save_steps": 6}
    with start_swift_sft(tmp_path / "run1", model, **options) as training:
        killed = training.killed_after(7)
    first = ids_by_dp(batch for batch in killed.batches if batch.step <= 6)
    assert "the streams of --dataset are blended by their sizes, 0.5, 0.5" in killed.output
    shares = {rank: [[n for n in ids if (n < 500) is one] for one in (True, False)] for rank, ids in first.items()}
    assert shares == {0: [[0, 1, 4, 5, 8, 9], list(range(500, 506))], 1: [[2, 3, 6, 7, 10, 11], list(range(512, 518))]}
    # One rank would find a full chunk in the one file too.
    more: dict[str, Any] = {"resume_from_checkpoint": tmp_path / "output" / "checkpoint-6", "processes": 1}
    second = swift_sft(tmp_path / "run2", model, **options | more)
    trained = [*first[0], *first[1], *ids_by_dp(second.batches)[0]]
    assert len(trained) == len(set(trained)) > 120 - 4
    step = max(batch.step for batch in second.batches)
    for number in (6, step):
        blend = position_of(tmp_path / "output" / f"checkpoint-{number}").blend
        assert isinstance(blend, BlendState) and [member.unit for member in blend.members] == [2, 12]
