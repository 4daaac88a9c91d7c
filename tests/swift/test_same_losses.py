"""A stream trains as an ordinary file does that holds the same samples in the same order, to the digits of the losses.

The file holds what the stream draws, one epoch after the other, and ms-swift reads it by itself, in order, with the
flag off: so it is also seen here that without the flag ms-swift does what it always did.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import LazyShardedDataset, Order
from tests.swift.commands import RESUMABLE, Run, ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, assert_dealt, by_epoch, encoded_in, position_of
from tests.swift.streams import row, write_jsonl, write_rows, write_stream

pytestmark = [pytest.mark.timeout(400)]
SAMPLES: Final = 75
EPOCH: Final = 72  # samples of an epoch of two ranks in micro batches of 2
RANKS: Final = 2
STEP: Final = 2 * RANKS * MICRO
IN_ORDER: Final = {"train_dataloader_shuffle": False, "dataset_shuffle": False}


def drawn(directory: Path, count: int) -> list[int]:
    """The samples that the first indices of all ranks together draw: index i is that of rank i % ranks."""
    # Our default window of a stream that has ended, and ms-swift's default seed.
    order = Order(layout="strided", shuffle_window=8, seed=42)
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=RANKS, batch_size=MICRO, order=order, num_samples=count)
    return [dataset.draw(index).sample for index in range(count)]


def by_rank(order: Sequence[int]) -> dict[int, list[int]]:
    """ms-swift's own deal of a file in order: rank r gets the rows r, r + ranks, ..."""
    return {rank: list(order[rank::RANKS]) for rank in range(RANKS)}


def fed(run: Run) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """What each process was fed, by rank, step and micro batch."""
    return {(batch.rank, batch.step, batch.micro): batch.ids for batch in run.batches}


def train_both(work: Path, model: Path, command: Callable[..., Run], **options: Any) -> Run:
    """Trains two epochs of a stream, and the file of the same order without the flag; returns the first run."""
    directory = write_stream(work / "stream", 0, SAMPLES, SIZE)
    order = drawn(directory, 2 * EPOCH)
    options |= {"processes": RANKS}
    own = {"dataset": directory, "sharded_lazy": True, "num_train_epochs": 2, "save_strategy": "epoch"}
    cache = {"sharded_lazy_encode_cache": work / "cache", "environment": {"ENCODED": str(work / "encoded")}}
    stream = command(work / "lazy", model, **own, **cache, **options)
    rows = write_rows(work / "rows.jsonl", map(row, order))
    ordinary = command(work / "ordinary", model, dataset=rows, num_train_epochs=1, **IN_ORDER, **options)
    assert fed(stream) == fed(ordinary)
    assert ids_by_dp(ordinary.batches) == by_rank(order)
    assert stream.losses == pytest.approx(ordinary.losses, rel=1e-5)
    assert len(stream.losses) == len(order) // STEP
    encoded = encoded_in(work / "encoded")
    assert set(order) <= set(encoded) <= set(range(SAMPLES))
    assert set(encoded.values()) == {1}, "rows that were encoded again in the second epoch"
    # Without the flag there is nothing of ours but the arguments, all off.
    assert not list(ordinary.output_dir.rglob("lazyshard.json"))
    assert "lazyshard: " not in ordinary.output and ":lazyshard]" not in ordinary.output
    assert json.loads((ordinary.output_dir / "args.json").read_bytes())["sharded_lazy"] is False
    return stream


def test_megatron(tmp_path: Path, model: Path) -> None:
    run = train_both(tmp_path, model, megatron_sft, global_batch_size=STEP)
    first, second = by_epoch(ids_by_dp(run.batches), SAMPLES)
    assert len(assert_dealt(first, SAMPLES)) == len(assert_dealt(second, SAMPLES)) == SAMPLES - EPOCH
    assert all(first[dp] != second[dp] for dp in range(RANKS)), "both epochs in the same order"
    consumed = {path.name: position_of(path).consumed for path in run.output_dir.glob("checkpoint-*")}
    assert consumed == {"checkpoint-9": 72, "checkpoint-18": 144}


def test_swift(tmp_path: Path, model: Path) -> None:
    train_both(tmp_path, model, swift_sft, gradient_accumulation_steps=2)


def test_lowest_swift(tmp_path: Path, model: Path, lowest: Path) -> None:
    directory = write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    options: dict[str, Any] = {"packages": lowest, "dataset": directory, "sharded_lazy": True, "num_train_epochs": 1}
    run = swift_sft(tmp_path / "run", model, gradient_accumulation_steps=2, **options)
    assert ids_by_dp(run.batches) == by_rank(drawn(directory, EPOCH))
    assert json.loads((run.output_dir / "args.json").read_bytes())["swift_version"] == "4.0.0"


def test_lowest_megatron_stopped_and_resumed(tmp_path: Path, model: Path, lowest: Path) -> None:
    stop, directory = 4, write_stream(tmp_path / "stream", 0, SAMPLES, SIZE)
    # 4.0.0 tells torch's planner of checkpoints True where a newer torch expects a list of what is wrong.
    plugin = tmp_path / "no_errors.py"
    plugin.write_text(
        "from torch.distributed.checkpoint import default_planner\n"
        "default_planner._validate_global_plan = lambda *_, **__: []\n"
    )
    options: dict[str, Any] = {**RESUMABLE, "processes": RANKS, "packages": lowest, "plugins": [plugin]}
    options |= {"dataset": directory, "sharded_lazy": True, "global_batch_size": STEP}
    first = megatron_sft(tmp_path / "first", model, train_iters=stop, **options)
    checkpoint = first.output_dir / f"checkpoint-{stop}"
    assert position_of(checkpoint).consumed == STEP * stop
    more: dict[str, Any] = {"mcore_model": checkpoint, "finetune": False, "num_train_epochs": 2}
    second = megatron_sft(tmp_path / "second", model, **options, **more)
    assert ids_by_dp([*first.batches, *second.batches]) == by_rank(drawn(directory, 2 * EPOCH))


UNHOOKED: Final = """
import importlib.util, runpy, sys
found = [finder for finder in sys.meta_path if getattr(finder, "lazyshard_swift", False)]
for finder in found:
    sys.meta_path.remove(finder)
print("unhooked", len(found), flush=True)
sys.argv[0] = importlib.util.find_spec("swift.cli.sft").origin
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_swift_without_the_flag_is_the_same_as_without_the_hook(tmp_path: Path, model: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", 0, 8)
    options: dict[str, Any] = {"processes": 1, "dataset": data, "num_train_epochs": 1, "save_strategy": "epoch"}
    hooked = swift_sft(tmp_path / "hooked", model, **options)
    # What lazyshard_swift.pth has put there is taken away again, in the process that trains.
    script = tmp_path / "unhooked.py"
    script.write_text(UNHOOKED)
    bare = swift_sft(tmp_path / "bare", model, command=(str(script),), **options)
    assert "unhooked 1" in bare.output
    assert fed(hooked) == fed(bare)
    assert hooked.losses == bare.losses
    files = [
        {str(path.relative_to(run.output_dir)) for path in run.output_dir.rglob("*.json")} for run in (hooked, bare)
    ]
    assert files[0] == files[1]
    ours, theirs = (json.loads((run.output_dir / "args.json").read_bytes()) for run in (hooked, bare))
    added = {name: value for name, value in ours.items() if name not in theirs}
    assert added["sharded_lazy"] is False and all(name.startswith("sharded_lazy") for name in added)
    elsewhere = {name for name, value in theirs.items() if ours[name] != value}
    assert elsewhere <= {"output_dir", "logging_dir", "training_args", "run_name"}
