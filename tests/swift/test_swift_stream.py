"""`swift sft --sharded_lazy true`, the Hugging Face trainer: what 1 and 2 processes consumed. And the `pt` commands.

The checks are those of `test_megatron_stream`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter
from tests.swift.commands import Run, ids_by_dp, megatron_sft, start_swift_sft, swift_sft
from tests.swift.consumption import (
    MICRO,
    SIZE,
    assert_cursor,
    assert_dealt,
    assert_read_while_written,
    assert_stopped_at_end,
    by_epoch,
    fed_live,
    position_of,
)
from tests.swift.streams import row, write_jsonl, write_stream

# One run takes 10 to 15 s on 2 idle cores.
pytestmark = [pytest.mark.timeout(300)]

ACCUMULATION: Final = 3


def swift_live(work: Path, model: Path, samples: int, processes: int, **options: Any) -> Run:
    """Runs `swift sft` on `work / "stream"` from before it is there until it has ended."""
    directory = work / "stream"
    with (
        start_swift_sft(work / "run", model, processes=processes, **options) as training,
        fed_live(training, directory, samples, 12, processes=processes),
    ):
        run = training.end()
    assert_read_while_written(run, directory, samples)
    return run


def write_plain_stream(directory: Path, samples: int) -> Path:
    """A stream of texts without a question, as pre-training takes them. They name themselves as those of `row` do."""
    with ChunkWriter(directory, SIZE) as writer:
        for number in range(samples):
            question, answer = (message["content"] for message in row(number)["messages"])
            writer.write({"messages": [{"role": "assistant", "content": f"{question} {answer}"}]})
    return directory


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_two_epochs_whose_last_steps_are_short(tmp_path: Path, model: Path, processes: int) -> None:
    samples = 45  # an epoch of 44: 22 or 11 micro batches for each process, which 3 does not divide
    directory = write_stream(tmp_path / "stream", 0, samples, SIZE)
    run = swift_sft(
        tmp_path / "run",
        model,
        processes=processes,
        dataset=directory,
        sharded_lazy=True,
        num_train_epochs=2,
        gradient_accumulation_steps=ACCUMULATION,
        save_strategy="epoch",
        val_dataset=write_jsonl(tmp_path / "validation.jsonl", 1000, 1004),
        eval_strategy="epoch",
    )
    assert {batch.rank for batch in run.batches} == set(range(processes))
    by_dp = ids_by_dp(run.batches)
    first, second = by_epoch(by_dp, samples)
    assert len(assert_dealt(first, samples)) == len(assert_dealt(second, samples)) == 1
    assert all(first[dp] != second[dp] for dp in by_dp), "both epochs in the same order"
    batches = 22 // processes
    steps = -(-batches // ACCUMULATION)
    micros = Counter((batch.rank, batch.step) for batch in run.batches)
    full = dict.fromkeys(((rank, step) for rank in range(processes) for step in range(1, 2 * steps + 1)), ACCUMULATION)
    short = {(rank, epoch * steps): batches % ACCUMULATION for rank in range(processes) for epoch in (1, 2)}
    assert micros == full | short
    assert list(run.losses) == list(range(1, 2 * steps + 1))
    consumed = {path.name: position_of(path).consumed for path in run.output_dir.glob("checkpoint-*")}
    assert consumed == {f"checkpoint-{steps}": 44, f"checkpoint-{2 * steps}": 88}
    logged = [json.loads(line) for line in (run.output_dir / "logging.jsonl").read_text().splitlines()]
    evaluated = {line["global_step/max_steps"] for line in logged if "eval_loss" in line}
    assert evaluated == {f"{steps}/{2 * steps}", f"{2 * steps}/{2 * steps}"}


def test_one_process_live_with_a_configuration_file(tmp_path: Path, model: Path) -> None:
    samples = 63
    configuration = {
        "dataset": str(tmp_path / "stream"),
        "sharded_lazy": True,
        "sharded_lazy_shuffle_window": 3,
        "sharded_lazy_consumer": "from-yaml",
        "max_steps": 40,
        "save_strategy": "steps",
        "save_steps": 1000,
        "gradient_accumulation_steps": 2,
    }
    file = tmp_path / "config.yaml"
    file.write_text(
        "".join(f"{name}: {json.dumps(value)}\n" for name, value in configuration.items()), encoding="utf-8"
    )
    # The harness's own defaults come after the file's, and would count.
    options = dict.fromkeys(("save_strategy", "gradient_accumulation_steps"))
    run = swift_live(tmp_path, model, samples, processes=1, command=("swift", "sft", str(file)), **options)
    assert_stopped_at_end(run, tmp_path / "stream", samples, ranks=1, step_samples=2 * MICRO, planned=40)
    arguments = json.loads((run.output_dir / "args.json").read_bytes())
    assert {name: arguments[name] for name in configuration if name.startswith("sharded_lazy")} == {
        "sharded_lazy": True,
        "sharded_lazy_shuffle_window": 3,
        "sharded_lazy_consumer": "from-yaml",
    }
    assert position_of(run.output_dir / "checkpoint-15").consumer == "from-yaml"
    assert position_of(run.output_dir / "checkpoint-15").window == 3


@pytest.mark.parametrize(
    ("train", "options", "step"),
    [
        (swift_sft, {"processes": 1, "command": ("swift", "pt"), "save_strategy": "epoch"}, 8),
        pytest.param(
            megatron_sft,
            {"processes": 2, "command": ("megatron", "pt"), "global_batch_size": 4},
            4,
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_pt(tmp_path: Path, model: Path, train: Callable[..., Run], options: dict[str, Any], step: int) -> None:
    samples = 17
    directory = write_plain_stream(tmp_path / "stream", samples)
    run = train(tmp_path / "run", model, dataset=directory, sharded_lazy=True, num_train_epochs=1, **options)
    left_over = assert_dealt(ids_by_dp(run.batches), samples)
    assert len(left_over) == 1
    assert_cursor(run.output_dir / f"checkpoint-{step}", directory, 16, set(range(samples)) - left_over)


@pytest.mark.parametrize(
    ("train", "command"),
    [
        pytest.param(swift_sft, ("swift", "sft"), marks=pytest.mark.sweep),
        pytest.param(swift_sft, ("swift", "pt"), marks=pytest.mark.sweep),
        (megatron_sft, ("megatron", "sft")),
    ],
)
def test_help_shows_the_arguments(
    tmp_path: Path, model: Path, train: Callable[..., Run], command: tuple[str, str]
) -> None:
    run = train(tmp_path / "run", model, processes=1, command=(*command, "--help"))
    names = ("", "_samples_per_chunk", "_max_wait", "_shuffle_window", "_shuffle_distance", "_consumer")
    for name in (*names, "_on_bad_sample", "_on_end"):
        assert f"--sharded_lazy{name} " in run.output
