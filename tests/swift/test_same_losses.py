"""A stream trains as an ordinary file does that holds the same samples in the same order, to the digits of the losses.

The file holds what the stream draws, one epoch after the other, and ms-swift reads it by itself, in order, with the
flag off: so it is also seen here that without the flag ms-swift does what it always did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import LazyShardedDataset, Order
from tests.swift.commands import RESUMABLE, Run, ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, assert_dealt, by_epoch, position_of
from tests.swift.streams import row, write_stream

pytestmark = [pytest.mark.timeout(400)]

SAMPLES: Final = 75
EPOCHS: Final = 2
SEED: Final = 42
"""ms-swift's default for --data_seed."""

WINDOW: Final = 8
"""Our default for a stream that has ended."""

IN_ORDER: Final = {"train_dataloader_shuffle": False, "dataset_shuffle": False}


def drawn(directory: Path, ranks: int, count: int) -> list[int]:
    """The samples that the first indices of all ranks together draw: index i is that of rank i % ranks."""
    dataset = LazyShardedDataset(
        directory,
        dp_rank=0,
        dp_size=ranks,
        batch_size=MICRO,
        order=Order(layout="strided", shuffle_window=WINDOW, seed=SEED),
        num_samples=count,
    )
    return [dataset.draw(index).sample for index in range(count)]


def write_ordered(path: Path, numbers: Sequence[int]) -> Path:
    path.write_text("".join(json.dumps(row(number)) + "\n" for number in numbers), encoding="utf-8")
    return path


def fed(run: Run) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """What each process was fed, by rank, step and micro batch."""
    return {(batch.rank, batch.step, batch.micro): batch.ids for batch in run.batches}


def assert_same(stream: Run, ordinary: Run, order: Sequence[int], ranks: int) -> None:
    assert fed(stream) == fed(ordinary)
    # ms-swift's own deal of a file in order: rank r gets the rows r, r + ranks, ...
    for rank in range(ranks):
        ids = [number for batch in ordinary.batches if batch.dp == rank for number in batch.ids]
        assert ids == list(order[rank::ranks])
    assert stream.losses == pytest.approx(ordinary.losses, rel=1e-5)
    assert len(stream.losses) == len(order) // (ranks * MICRO * 2)


def assert_untouched(ordinary: Run) -> None:
    """Checks that a run without the flag has nothing of ours but the arguments, all off."""
    assert not list(ordinary.output_dir.rglob("lazyshard.json"))
    assert "lazyshard: " not in ordinary.output and ":lazyshard]" not in ordinary.output
    arguments = json.loads((ordinary.output_dir / "args.json").read_bytes())
    assert arguments["sharded_lazy"] is False


def test_megatron(tmp_path: Path, model: Path) -> None:
    ranks, epoch = 4, 72  # 4 steps and a half of 16
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    order = drawn(directory, ranks, EPOCHS * epoch)
    options: dict[str, Any] = {"global_batch_size": 2 * ranks * MICRO}
    stream = megatron_sft(
        tmp_path / "lazy",
        model,
        dataset=directory,
        sharded_lazy=True,
        num_train_epochs=EPOCHS,
        save_strategy="epoch",
        **options,
    )
    ordinary = megatron_sft(
        tmp_path / "ordinary",
        model,
        dataset=write_ordered(tmp_path / "rows.jsonl", order),
        num_train_epochs=1,
        **IN_ORDER,
        **options,
    )
    assert_same(stream, ordinary, order, ranks)
    assert_untouched(ordinary)
    first, second = by_epoch(ids_by_dp(stream.batches), SAMPLES)
    assert len(assert_dealt(first, SAMPLES)) == len(assert_dealt(second, SAMPLES)) == SAMPLES - epoch
    assert all(first[dp] != second[dp] for dp in range(ranks)), "both epochs in the same order"
    # Steps 4 and 8 are the last that end within their epochs, 9 is the end.
    consumed = {path.name: position_of(path).consumed for path in stream.output_dir.glob("checkpoint-*")}
    assert consumed == {"checkpoint-4": 64, "checkpoint-8": 128, "checkpoint-9": 144}
    assert "lazyshard: 75 samples; 3 of them are left over in each epoch" in stream.output


def train_both(work: Path, model: Path, epochs: int, **options: Any) -> Run:
    """Trains a stream and the file of the same order by `swift sft`; returns the run without the flag."""
    ranks, epoch = 2, 72
    directory = write_stream(work / "stream", 0, SAMPLES, SIZE)
    order = drawn(directory, ranks, epochs * epoch)
    options["gradient_accumulation_steps"] = 2
    stream = swift_sft(work / "lazy", model, dataset=directory, sharded_lazy=True, num_train_epochs=epochs, **options)
    rows = write_ordered(work / "rows.jsonl", order)
    ordinary = swift_sft(work / "ordinary", model, dataset=rows, num_train_epochs=1, **IN_ORDER, **options)
    assert_same(stream, ordinary, order, ranks)
    assert_untouched(ordinary)
    return ordinary


def test_swift(tmp_path: Path, model: Path) -> None:
    train_both(tmp_path, model, EPOCHS, save_strategy="epoch")


def test_lowest_swift(tmp_path: Path, model: Path, lowest: Path) -> None:
    ordinary = train_both(tmp_path, model, 1, packages=lowest)
    assert json.loads((ordinary.output_dir / "args.json").read_bytes())["swift_version"] == "4.0.0"


def test_lowest_megatron(tmp_path: Path, model: Path, lowest: Path) -> None:
    ranks, stop = 4, 4
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    order = drawn(directory, ranks, 9 * 16)
    # 4.0.0 tells torch's planner of checkpoints True where a newer torch expects a list of what is wrong.
    plugin = tmp_path / "no_errors.py"
    plugin.write_text(
        "from torch.distributed.checkpoint import default_planner\n"
        "default_planner._validate_global_plan = lambda *_, **__: []\n"
    )
    options: dict[str, Any] = {
        **RESUMABLE,
        "packages": lowest,
        "plugins": [plugin],
        "dataset": directory,
        "sharded_lazy": True,
        "global_batch_size": 2 * ranks * MICRO,
    }
    first = megatron_sft(tmp_path / "first", model, train_iters=stop, **options)
    checkpoint = first.output_dir / f"checkpoint-{stop}"
    assert position_of(checkpoint).consumed == 16 * stop
    second = megatron_sft(
        tmp_path / "second", model, mcore_model=checkpoint, finetune=False, num_train_epochs=EPOCHS, **options
    )
    given: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for batch in (*first.batches, *second.batches):
        given[batch.dp] += batch.ids
    assert given == {rank: order[rank::ranks] for rank in range(ranks)}
