"""`--dataset A B --interleave_prob …` by real commands: the shares, each sample once, other ranks and weights."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lazyshard.plan.blend import BlendTable
from lazyshard.stream import read_cursor
from tests.swift.commands import RESUMABLE, Run, ids_by_dp, start_megatron_sft, start_swift_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, fed_live, killed_at, lazyshard, position_of
from tests.swift.streams import write_stream

pytestmark = [pytest.mark.timeout(400)]

CONSUMER = "blended"

OTHER = 500
"""Rows of the second stream are numbered from here on."""


def streams(work: Path, first: int, second: int) -> list[Path]:
    """Two streams that have ended, of so many samples."""
    return [
        write_stream(work / "first", 0, first, SIZE),
        write_stream(work / "second", OTHER, OTHER + second, SIZE),
    ]


def of_streams(ids: Sequence[int]) -> list[int]:
    """Which stream each of these samples is of."""
    return [int(number >= OTHER) for number in ids]


def trained_until(run: Run, step: int) -> list[int]:
    return [number for batch in run.batches if batch.train and batch.step <= step for number in batch.ids]


def trace(directory: Path, checkpoint: Path, step: int) -> list[int]:
    """The samples of a stream that `lazyshard trace` says a step has trained."""
    done = lazyshard("trace", directory, "--state", checkpoint, "--step", f"{step}:{step + 1}", "--json")
    return [json.loads(line)["sample"] for line in done.stdout.splitlines()]


def test_swift_with_2_processes_then_1_and_other_weights(tmp_path: Path, model: Path) -> None:
    first, second = streams(tmp_path, 120, 100)
    options: dict[str, Any] = {
        "dataset": [first, second],
        "interleave_prob": [0.75, 0.25],
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "sharded_lazy_consumer": CONSUMER,
        "max_steps": 40,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    with start_swift_sft(tmp_path / "run1", model, processes=2, **options) as training:
        begun, checkpoint = killed_at(training, first, CONSUMER, random.Random(3).randint(5, 8))
    for ids in ids_by_dp(begun.batches).values():
        assert of_streams(ids) == BlendTable((3, 1)).streams(0, len(ids)), "the shares of the first start"
    saved = position_of(checkpoint)
    trained = trained_until(begun, saved.step)
    assert saved.blend is not None
    assert saved.consumed == len(trained) == saved.step * 2 * MICRO
    last = {batch.rank: batch.ids for batch in begun.batches if batch.step == saved.step}
    told = trace(first, checkpoint, saved.step)
    told += [OTHER + one for one in trace(second, checkpoint, saved.step)]
    assert Counter(told) == Counter(chain.from_iterable(last.values())), "what trace tells of the last step"
    more: dict[str, Any] = {"interleave_prob": [0.25, 0.75], "resume_from_checkpoint": checkpoint, "save_steps": 1000}
    more["max_steps"] = 200
    with start_swift_sft(tmp_path / "run2", model, processes=1, **{**options, **more}) as training:
        ended = training.end()
    (rest,) = ids_by_dp(ended.batches).values()
    assert of_streams(rest[:16]) == BlendTable((1, 3)).streams(0, 16), "the shares of the second start"
    assert not {number: n for number, n in Counter(trained + rest).items() if n > 1}, "trained more than once"
    # It ends with the second stream, before the first sample of that would come again.
    assert len([number for number in trained + rest if number >= OTHER]) > 100 - 2 * 2 * MICRO
    assert f"lazyshard: {second} has ended with 100 samples: training stops after step" in ended.output
    untrained = 120 - of_streams(trained + rest).count(0)
    assert f"; not trained: {untrained} of the 120 of {first}" in ended.output
    step = max(batch.step for batch in ended.batches)
    for number, directory in enumerate((first, second)):
        cursor = read_cursor(directory, CONSUMER)
        assert cursor is not None
        assert cursor.consumed == of_streams(trained + rest).count(number)
        assert cursor.chunks_before * SIZE <= cursor.consumed
        told_shares = [(one.stream, one.weight, one.consumed) for one in cursor.blend]
        counts = [of_streams(trained + rest).count(stream) for stream in range(2)]
        assert told_shares == [(str(first), 0.25, counts[0]), (str(second), 0.75, counts[1])], "what watch shows of it"
    assert position_of(tmp_path / "output" / f"checkpoint-{step}").consumed == len(trained + rest)


def test_megatron_with_4_then_2_ranks(tmp_path: Path, model: Path) -> None:
    first, second = streams(tmp_path, 150, 90)
    options: dict[str, Any] = {
        **RESUMABLE,
        "dataset": [first, second],
        "interleave_prob": [2, 1],
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "sharded_lazy_consumer": CONSUMER,
        "train_iters": 60,
        "save_steps": 2,
        "save_safetensors": False,
    }
    with start_megatron_sft(tmp_path / "run1", model, **options) as training:
        begun, checkpoint = killed_at(training, first, CONSUMER, random.Random(4).randint(4, 7))
    for ids in ids_by_dp(begun.batches).values():
        assert of_streams(ids) == BlendTable((2, 1)).streams(0, len(ids))
    trained = trained_until(begun, position_of(checkpoint).step)
    more = {"mcore_model": checkpoint, "finetune": False, "save_steps": 1000}
    with start_megatron_sft(tmp_path / "run2", model, processes=2, **{**options, **more}) as training:
        ended = training.end()
    rest = [number for batch in ended.batches if batch.train for number in batch.ids]
    assert not {number: n for number, n in Counter(trained + rest).items() if n > 1}, "trained more than once"
    counts = Counter(of_streams(trained + rest))
    assert counts[0] > 150 - 24, "it ends with the first stream, which is the shorter one for its share"
    assert abs(counts[0] - 2 * counts[1]) <= 8


@pytest.mark.sweep
def test_two_epochs_by_the_sizes_of_the_streams(tmp_path: Path, model: Path) -> None:
    run = swift_sft(
        tmp_path / "run",
        model,
        processes=2,
        dataset=streams(tmp_path, 48, 16),
        sharded_lazy=True,
        num_train_epochs=2,
        save_strategy="epoch",
    )
    by_dp = ids_by_dp(run.batches)
    every = [*range(48), *range(OTHER, OTHER + 16)]
    assert sorted(chain.from_iterable(ids[:32] for ids in by_dp.values())) == every
    assert sorted(chain.from_iterable(ids[32:] for ids in by_dp.values())) == every
    assert "the streams of --dataset are blended by their sizes, 0.75, 0.25" in run.output


def test_a_stream_that_is_still_produced_beside_one_that_has_ended(tmp_path: Path, model: Path) -> None:
    ended = write_stream(tmp_path / "ended", OTHER, OTHER + 200, SIZE)
    live = tmp_path / "live"
    with (
        start_swift_sft(
            tmp_path / "run",
            model,
            processes=2,
            dataset=[live, ended],
            interleave_prob=[0.5, 0.5],
            sharded_lazy=True,
            max_steps=60,
            save_strategy="steps",
            save_steps=1000,
        ) as training,
        fed_live(training, live, 70, 12, processes=2),
    ):
        run = training.end()
    trained = list(chain.from_iterable(ids_by_dp(run.batches).values()))
    assert not {number: n for number, n in Counter(trained).items() if n > 1}
    counts = Counter(of_streams(trained))
    assert 70 - 2 * 2 * MICRO < counts[0] <= 70, "it ends with the live stream"
    assert f"lazyshard: {live} has ended with 70 samples: training stops after step" in run.output
    assert abs(counts[0] - counts[1]) <= 2
