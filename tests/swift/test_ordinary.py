"""The baseline: ordinary data and ms-swift's own samplers, nothing of lazyshard; what the harness tells of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.swift.commands import Batch, ids_by_dp, megatron_sft, swift_sft
from tests.swift.streams import write_jsonl

SAMPLES: Final = 24
GLOBAL_BATCH: Final = 8

# Of the runs, at one time with others on 2 cores.
pytestmark = [pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("ordinary") / "rows.jsonl", 0, SAMPLES)


def steps(batches: list[Batch]) -> dict[int, set[int]]:
    """What was trained in each step, on all ranks together."""
    found: dict[int, set[int]] = {}
    for batch in batches:
        found.setdefault(batch.step, set()).update(batch.ids)
    return found


def assert_each_sample_once(by_dp: dict[int, list[int]]) -> None:
    assert Counter(number for ids in by_dp.values() for number in ids) == Counter(range(SAMPLES))


def assert_losses_of_an_untrained_model(losses: dict[int, float], count: int) -> None:
    """Those of a guess among the 512 tokens, ln 512 = 6.24."""
    assert list(losses) == list(range(1, count + 1))
    assert all(math.isclose(loss, math.log(512), rel_tol=0.05) for loss in losses.values())


@pytest.mark.sweep
def test_megatron_with_four_data_parallel_ranks(tmp_path: Path, model: Path, data: Path) -> None:
    run = megatron_sft(
        tmp_path / "run", model, dataset=data, num_train_epochs=1, micro_batch_size=1, global_batch_size=GLOBAL_BATCH
    )
    by_dp = ids_by_dp(run.batches)
    assert {dp: len(ids) for dp, ids in by_dp.items()} == dict.fromkeys(range(4), SAMPLES // 4)
    assert_each_sample_once(by_dp)
    assert_losses_of_an_untrained_model(run.losses, SAMPLES // GLOBAL_BATCH)
    # Gradient accumulation: two micro batches in a step.
    assert {(batch.step, batch.micro) for batch in run.batches} == {
        (step, micro) for step in (1, 2, 3) for micro in (0, 1)
    }
    assert all(len(ids) == GLOBAL_BATCH for ids in steps(run.batches).values())


@pytest.mark.sweep
def test_megatron_tensor_and_pipeline_peers_get_the_same_samples(tmp_path: Path, model: Path, data: Path) -> None:
    run = megatron_sft(
        tmp_path / "run",
        model,
        dataset=data,
        num_train_epochs=1,
        global_batch_size=GLOBAL_BATCH,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    places = {(batch.rank, batch.tp, batch.pp, batch.dp) for batch in run.batches}
    assert places == {(0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 1, 0), (3, 1, 1, 0)}
    assert_each_sample_once(ids_by_dp(run.batches))  # fails where the four differ
    assert_losses_of_an_untrained_model(run.losses, SAMPLES // GLOBAL_BATCH)


@pytest.mark.sweep
def test_swift_with_two_processes(tmp_path: Path, model: Path, data: Path) -> None:
    run = swift_sft(tmp_path / "run", model, dataset=data, num_train_epochs=1, gradient_accumulation_steps=2)
    by_dp = ids_by_dp(run.batches)
    assert {dp: len(ids) for dp, ids in by_dp.items()} == dict.fromkeys(range(2), SAMPLES // 2)
    assert_each_sample_once(by_dp)
    assert_losses_of_an_untrained_model(run.losses, SAMPLES // GLOBAL_BATCH)
    assert all(len(ids) == GLOBAL_BATCH for ids in steps(run.batches).values())


def test_swift_is_the_same_as_without_the_hook(tmp_path: Path, model: Path, data: Path) -> None:
    options: dict[str, Any] = {"processes": 1, "dataset": data, "num_train_epochs": 1, "save_strategy": "epoch"}
    hooked = swift_sft(tmp_path / "hooked", model, **options)
    # Python runs this after the .pth files: what lazyshard_swift.pth has put there is taken away again.
    site = tmp_path / "site" / "sitecustomize.py"
    site.parent.mkdir()
    site.write_text(
        "import sys\n"
        "found = [finder for finder in sys.meta_path if getattr(finder, 'lazyshard_swift', False)]\n"
        "for finder in found:\n"
        "    sys.meta_path.remove(finder)\n"
        "print('unhooked', len(found), flush=True)\n"
    )
    bare = swift_sft(tmp_path / "bare", model, environment={"PYTHONPATH": str(site.parent)}, **options)
    assert "unhooked 1" in bare.output
    assert [batch.ids for batch in hooked.batches] == [batch.ids for batch in bare.batches]
    assert hooked.losses == bare.losses
    ours, theirs = (
        {str(path.relative_to(run.output_dir)) for path in run.output_dir.rglob("*.json")} for run in (hooked, bare)
    )
    assert ours == theirs
    arguments = [json.loads((run.output_dir / "args.json").read_bytes()) for run in (hooked, bare)]
    added = {name: value for name, value in arguments[0].items() if name not in arguments[1]}
    assert added["sharded_lazy"] is False and all(name.startswith("sharded_lazy") for name in added)
    elsewhere = {name for name, value in arguments[1].items() if arguments[0][name] != value}
    assert elsewhere <= {"output_dir", "logging_dir", "training_args", "run_name"}, (
        "arguments that are not as they were"
    )
