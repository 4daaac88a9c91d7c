"""Real runs over a stream of one file: all ranks share it, each reads its own rows, and a resume goes on so."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.swift.commands import ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO, position_of
from tests.swift.streams import write_stream

pytestmark = [pytest.mark.timeout(400)]

SAMPLES = 61


def test_megatron_with_4_processes_on_one_file(tmp_path: Path, model: Path) -> None:
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, 100)
    run = megatron_sft(
        tmp_path / "run", model, dataset=directory, sharded_lazy=True, sharded_lazy_unit="batch", num_train_epochs=1
    )
    by_dp = ids_by_dp(run.batches)
    assert sorted(chain.from_iterable(by_dp.values())) == sorted(set(chain.from_iterable(by_dp.values())))
    # Seven steps of 8; each rank shuffles its own batches of the file.
    assert {rank: len(ids) for rank, ids in by_dp.items()} == dict.fromkeys(range(4), 14)
    assert all(number // MICRO % 4 == rank for rank, ids in by_dp.items() for number in ids if number < 56)
    assert all(ids != sorted(ids) for ids in by_dp.values())


@pytest.mark.sweep
def test_each_stream_of_a_blend_has_its_own_unit_and_keeps_it(tmp_path: Path, model: Path) -> None:
    # One file, and five chunks of 12, which are enough for two ranks.
    dataset = [write_stream(tmp_path / "one", 0, 60, 60), write_stream(tmp_path / "five", 500, 560, 12)]
    options: dict[str, Any] = {
        "dataset": dataset,
        "interleave_prob": [0.5, 0.5],
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "sharded_lazy_unit": "auto",
        "train_dataloader_shuffle": False,
        "save_strategy": "steps",
        "save_steps": 6,
    }
    first = swift_sft(tmp_path / "run1", model, processes=2, max_steps=6, **options)
    by_dp = ids_by_dp(first.batches)
    assert {rank: [number for number in ids if number < 500] for rank, ids in by_dp.items()} == {
        0: [0, 1, 4, 5, 8, 9],
        1: [2, 3, 6, 7, 10, 11],
    }
    assert {rank: [number for number in ids if number >= 500] for rank, ids in by_dp.items()} == {
        0: list(range(500, 506)),
        1: list(range(512, 518)),
    }
    # One rank would find a full chunk in the one file too.
    more: dict[str, Any] = {"max_steps": 100, "resume_from_checkpoint": tmp_path / "output" / "checkpoint-6"}
    second = swift_sft(tmp_path / "run2", model, processes=1, **{**options, **more})
    trained = [*chain.from_iterable(by_dp.values()), *chain.from_iterable(ids_by_dp(second.batches).values())]
    assert len(trained) == len(set(trained)) > 120 - 4
    step = max(batch.step for batch in second.batches)
    for number in (6, step):
        blend = position_of(tmp_path / "output" / f"checkpoint-{number}").blend
        assert blend is not None and [member.unit for member in blend.members] == [2, 12]
    plans = [json.loads(next((one / "cursors").glob("[!.]*[!g].json")).read_bytes())["plan"] for one in dataset]
    assert [plan["unit"] for plan in plans] == [2, 12]
