"""`swift rlhf` and `megatron rlhf` train rows of a stream as ms-swift itself trains a file of the same rows.

In the oracles ms-swift reads the file with the flag off, in an order that places each row where the stream has it.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from lazyshard import ChunkWriter
from tests.swift.commands import ids_by_dp, megatron_sft, start_swift_sft, swift_sft
from tests.swift.conftest import ModelMaker
from tests.swift.consumption import SIZE, assert_cursor, encoded_in, fed_live, sealed_in
from tests.swift.streams import row, write_rows, write_stream
from tests.swift.warm import run_warm

pytestmark = [pytest.mark.timeout(400)]
SAMPLES: Final = 16
RLHF: Final = ("swift", "rlhf")
STREAM: Final = {"sharded_lazy": True, "train_dataloader_shuffle": False, "num_train_epochs": 1}
FILE: Final = {"dataset_shuffle": False, "num_train_epochs": 1}
GRPO: Final[dict[str, Any]] = {
    **{"command": RLHF, "rlhf_type": "grpo", "reward_funcs": "length", "num_generations": 2, "use_vllm": False},
    **{"plugins": [Path(__file__).with_name("rewards_plugin.py")], "max_completion_length": 8, "temperature": 1.0},
}


def shuffled(order: Iterable[int]) -> list[int]:
    """Rows in the order that trl's sampler, with ms-swift's default seed, shuffles to this one."""
    numbers = list(order)
    places = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(42)).tolist()
    rows = dict(zip(places, numbers, strict=True))
    return [rows[place] for place in range(len(numbers))]


@pytest.mark.parametrize(("generation", "iterations", "accumulation"), [(2, 2, 1), (1, 1, 2)])
def test_grpo(tmp_path: Path, model: Path, generation: int, iterations: int, accumulation: int) -> None:
    options = {**GRPO, "processes": 1, "steps_per_generation": generation, "num_iterations": iterations}
    options |= {"gradient_accumulation_steps": accumulation}
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    stream = swift_sft(tmp_path / "lazy", model, dataset=directory, **STREAM, **options)
    rows = write_rows(tmp_path / "rows.jsonl", map(row, range(SAMPLES)))
    file = swift_sft(tmp_path / "ordinary", model, dataset=rows, **FILE, **options)
    assert [(one.step, one.micro, one.ids) for one in stream.batches] == [
        (one.step, one.micro, one.ids) for one in file.batches
    ]
    assert stream.losses == pytest.approx(file.losses, rel=1e-4, abs=1e-7)
    assert len(stream.losses) == SAMPLES * iterations // accumulation


def test_grpo_live_killed_within_a_rollout(tmp_path: Path, model: Path) -> None:
    # Both ranks draw 2 samples for 4 steps: in 2 iterations one in each step.
    directory, output_dir = tmp_path / "stream", tmp_path / "output"
    options = {**GRPO, "dataset": directory, "sharded_lazy": True, "max_steps": 100, "output_dir": output_dir}
    options |= {"steps_per_generation": 2, "num_iterations": 2, "save_strategy": "steps", "save_steps": 6}
    with (
        start_swift_sft(tmp_path / "run1", model, **options) as training,
        fed_live(training, directory, 40, 4, processes=2),
    ):
        killed = training.killed_after(10)
    checkpoint = output_dir / "checkpoint-6"
    # The second rollout, of which 2 steps are trained, does not count.
    assert_cursor(checkpoint, directory, 4, {number for one in killed.batches if one.step <= 4 for number in one.ids})
    resumed = swift_sft(tmp_path / "run2", model, **options, resume_from_checkpoint=checkpoint)
    assert killed.batches[0].time < max(sealed_in(directory).values())
    assert min(one.step for one in resumed.batches) == 7
    both = {one.step: one.step for one in killed.batches if one.step > 6}
    first, second = ({(one.rank, one.step): one.ids for one in run.batches} for run in (killed, resumed))
    assert both and {place: ids for place, ids in first.items() if place[1] in both}.items() <= second.items()
    batches = [*(one for one in killed.batches if one.step <= 6), *resumed.batches]
    assert Counter(number for one in batches for number in set(one.ids)) == dict.fromkeys(range(40), 2)
    assert max(resumed.losses) == 40
    assert "training stops after step 40 of 100, on all ranks, with 40 samples trained" in resumed.output


def test_kto_of_rows_with_their_pairs(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {"command": RLHF, "rlhf_type": "kto", "processes": 1, "gradient_accumulation_steps": 2}
    labelled = [{**row(number), "label": number % 3 > 0} for number in range(SAMPLES)]
    rows = write_rows(tmp_path / "rows.jsonl", labelled)
    in_order = {"train_dataloader_shuffle": False, **FILE}
    file = swift_sft(tmp_path / "ordinary", model, dataset=rows, **in_order, **options)
    # ms-swift shuffles with the seed of the data, and pairs each row with the one before in batches of a step, here 4.
    order = np.random.default_rng(42).permutation(SAMPLES).tolist()
    with ChunkWriter(tmp_path / "stream", SIZE) as writer:
        for place, number in enumerate(order):
            other = labelled[order[place - 1 if place % 4 else place + 3]]
            writer.write(labelled[number] | {"rejected_response": other["messages"][1]["content"]})
    stream = swift_sft(tmp_path / "lazy", model, dataset=tmp_path / "stream", **STREAM, **options)
    assert ids_by_dp(stream.batches) == ids_by_dp(file.batches) == {0: order}
    assert stream.losses == pytest.approx(file.losses, rel=1e-5)
    assert len(set(stream.losses.values())) == len(stream.losses) == SAMPLES // 4


def teach(folder: Path, model: Path, teacher: Path) -> Path:
    """Returns a stream of rows that the program of the example has scored."""
    chats = write_rows(folder / "chats.jsonl", map(row, range(SAMPLES)))
    student = ("--model", model, "--model_type", "qwen3", "--template", "qwen2_5")
    run_warm(folder, Path(__file__).with_name("teacher_program.py"), chats, folder / "taught", teacher, *student)
    return folder / "taught"


def test_gkd_of_stored_outputs(tmp_path: Path, model: Path, make_model: ModelMaker) -> None:
    teacher = make_model(3)
    options = {"command": RLHF, "rlhf_type": "gkd", "processes": 1, "lmbda": 0.0, "gkd_logits_topk": 5}
    taught, logs = teach(tmp_path, model, teacher), tmp_path / "encoded"
    stored: dict[str, Any] = {**options, "teacher_model_server": "rows", "environment": {"ENCODED": str(logs)}}
    stream = swift_sft(tmp_path / "lazy", model, dataset=taught, **STREAM, **stored)
    local = {**options, "teacher_model": teacher, "teacher_model_type": "qwen3"}
    rows = write_rows(tmp_path / "rows.jsonl", map(row, shuffled(range(SAMPLES))))
    file = swift_sft(tmp_path / "ordinary", model, dataset=rows, **FILE, **local)
    assert ids_by_dp(stream.batches) == ids_by_dp(file.batches) == {0: list(range(SAMPLES))}
    assert stream.losses == pytest.approx(file.losses, rel=1e-5)
    assert set(encoded_in(logs)) == set(range(SAMPLES))


def test_gkd_of_megatron(tmp_path: Path, model: Path, make_model: ModelMaker) -> None:
    teacher, command = make_model(3), ("megatron", "rlhf")
    options: dict[str, Any] = {"command": command, "rlhf_type": "gkd", "processes": 2, "lmbda": 0.0}
    options |= {"gkd_logits_topk": 5, "global_batch_size": 4, "train_dataloader_shuffle": False}
    directory = teach(tmp_path, model, teacher)
    more = {"sharded_lazy": True, "teacher_model_server": "rows", "train_iters": SAMPLES // 4}
    stream = megatron_sft(tmp_path / "lazy", model, dataset=directory, **more, **options)
    lanes = ids_by_dp(stream.batches)
    rows = [row(number) for pair in zip(lanes[0], lanes[1], strict=True) for number in pair]
    local = {"teacher_model": teacher, "teacher_model_type": "qwen3", "dataset_shuffle": False}
    file = write_rows(tmp_path / "rows.jsonl", rows)
    ordinary = megatron_sft(tmp_path / "ordinary", model, dataset=file, train_iters=SAMPLES // 4, **local, **options)
    # There each batch is also one of the teacher.
    assert lanes == {dp: list(dict.fromkeys(ids)) for dp, ids in ids_by_dp(ordinary.batches).items()}
    assert sorted(lanes[0] + lanes[1]) == list(range(SAMPLES))
    assert stream.losses == pytest.approx(ordinary.losses, rel=1e-5)
