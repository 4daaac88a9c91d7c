"""Real runs that leave samples out, and two that would write one cursor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard.stream import read_cursor
from tests.swift.commands import start_swift_sft, swift_sft
from tests.swift.consumption import SIZE, audited, lazyshard
from tests.swift.streams import write_stream

pytestmark = [pytest.mark.timeout(400)]

SAMPLES = 64


def test_a_resumed_run_leaves_out_what_it_is_told_to_and_trace_and_audit_know(tmp_path: Path, model: Path) -> None:
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    options: dict[str, Any] = {
        "dataset": directory,
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    first = swift_sft(tmp_path / "run1", model, max_steps=8, **options)
    trained = {
        step: {one for batch in first.batches if batch.step == step for one in batch.ids} for step in range(1, 9)
    }
    before = set().union(*(trained[step] for step in range(1, 6)))
    told = trained[6] | trained[7] | {41, 42} | set(range(12 * SIZE, 13 * SIZE))
    second = swift_sft(
        tmp_path / "run2",
        model,
        max_steps=100,
        resume_from_checkpoint=tmp_path / "output" / "checkpoint-5",
        sharded_lazy_skip="steps 6:8, samples 41:43, chunks 12:13",
        **options,
    )
    after = [one for batch in second.batches for one in batch.ids]
    assert len(set(after)) == len(after)
    left_over = set(range(SAMPLES)) - before - told - set(after)
    assert not set(after) & (before | told)
    assert len(left_over) < 4
    epoch = audited(directory, tmp_path / "output")
    assert (epoch["trained"], epoch["proven"]) == (len(before) + len(after), True)
    assert epoch["twice"]["samples"] == epoch["missing"]["samples"] == 0
    some = min(told - before)
    last = max(batch.step for batch in second.batches)
    for step, words, there in ((5, "trained at step", False), (last, "skipped on purpose", True)):
        checkpoint = tmp_path / "output" / f"checkpoint-{step}"
        traced = lazyshard("trace", directory, "--state", checkpoint, "--sample", some)
        assert (words in traced.stdout) is there, traced.stdout


def test_of_two_runs_with_one_name_the_second_is_refused_or_takes_over(tmp_path: Path, model: Path) -> None:
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE, end=False)
    options: dict[str, Any] = {
        "processes": 1,
        "dataset": directory,
        "sharded_lazy": True,
        "sharded_lazy_consumer": "ours",
        "max_steps": 200,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    with start_swift_sft(tmp_path / "first", model, **options) as first:
        first.wait_for(lambda: 3 in first.losses, "loss of step 3")
        refused = swift_sft(tmp_path / "refused", model, code=2, **options)
        assert "--sharded_lazy_take_over true" in refused.tail()
        assert not refused.batches
        with start_swift_sft(tmp_path / "second", model, sharded_lazy_take_over=True, **options) as second:
            second.wait_for(lambda: 5 in second.losses, "loss of step 5")
            write_stream(directory, SAMPLES, SAMPLES + 20, SIZE)
            ended = second.end()
        went_on = first.end()
    for run in (ended, went_on):
        ids = [one for batch in run.batches for one in batch.ids]
        assert sorted(ids) == list(range(SAMPLES + 20))
    assert "has taken over the cursor of 'ours'; this run does not write it any more" in went_on.output
    cursor = read_cursor(directory, "ours")
    assert cursor is not None and cursor.consumed == SAMPLES + 20
