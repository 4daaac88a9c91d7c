"""`--sharded_lazy_unit`: what is dealt in turn, the same for all ranks, and kept by the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from lazyshard.plan.deal import Rules
from lazyshard_swift.errors import ResumeRefused
from lazyshard_swift.position import Position
from tests.stream.streams import produce
from tests.swift.unit.runs import checkpoint, decided, megatron, position, refused
from tests.swift.unit.test_rescale import History, Shape


def args_of(unit: Any, **changes: Any) -> Any:
    return megatron(**{"train_iters": 7, "micro_batch_size": 2, "sharded_lazy_unit": unit, **changes})


def resumed(folder: Path, saved: Position, unit: Any, **changes: Any) -> Any:
    return args_of(unit, finetune=False, mcore_model=checkpoint(folder, saved), **changes)


@pytest.mark.parametrize(
    ("unit", "samples"),
    [(None, 100), ("chunk", 100), ("batch", 2), ("sample", 1), ("30", 30), (30, 30), ("250", 250)],
)
def test_what_is_named_is_dealt(unit: Any, samples: int, notices: list[str]) -> None:
    run = decided(args_of(unit), dp=8, per_chunk=100)
    # Eight chunks' worth, in whole units.
    assert run.course.rules == Rules(samples, -(-800 // samples) * samples, 42)
    assert run.position(0, 0).unit == samples
    assert notices == []


@pytest.mark.parametrize(
    ("samples", "ended", "iterations", "unit"),
    [
        # Eight ranks with chunks of 100; steps of 16.
        (800, True, 10, 100),
        (799, True, 10, 2),
        # Once it has ended its own length counts, not how much of it is trained.
        (5000, True, 1, 100),
        # Of a live stream nobody knows more than what the run is to train; what is published is of no account.
        (0, False, 50, 100),
        (0, False, 49, 2),
        (5000, False, 49, 2),
    ],
)
def test_auto_goes_by_what_all_ranks_know(
    samples: int, ended: bool, iterations: int, unit: int, notices: list[str]
) -> None:
    run = decided(args_of("auto", train_iters=iterations), samples, ended, 8, 100)
    assert run.state.unit == unit
    assert len(notices) == (unit == 2)
    if notices:
        assert ("--sharded_lazy_shuffle_window 0" in notices[0]) == (not ended)
        assert f"{samples if ended else iterations * 16} samples" in notices[0]


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize("unit", [2, 3, 4])
def test_checkpoint_keeps_its_unit(tmp_path: Path, asked: str | None, unit: int) -> None:
    begun = decided(args_of(unit)).position(48, 3)
    # With other ranks, for which there are enough chunks or not.
    for dp, samples in ((2, 100), (1, 100), (40, 160), (20, 4000)):
        run = decided(resumed(tmp_path / f"{dp}", begun, asked, global_batch_size=2 * dp), samples, dp=dp)
        assert run.state.unit == run.position(48, 3).unit == unit
    # One of an earlier release goes on by chunks.
    assert decided(resumed(tmp_path / "c", position(batch_size=2), "auto"), dp=50).state.unit == 4


def test_other_unit_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    begun = decided(args_of("batch")).position(48, 3)
    assert decided(resumed(tmp_path, begun, "batch")).state.unit == 2
    changed = [resumed(tmp_path, begun, "chunk"), resumed(tmp_path, begun, "batch")]
    changed[1].micro_batch_size = 4
    for args in changed:
        with refused(ResumeRefused, "--sharded_lazy_unit", expected="2", actual="4"):
            decided(args)


def test_ms_swifts_own_shuffle_keeps_whole_chunks(notices: list[str]) -> None:
    for unit in (None, "chunk", "auto", "batch"):
        assert notices == []
        run = decided(args_of(unit, data_sharding=True, micro_batch_size=1), 10, dp=8)
        assert (run.layout, run.state.unit) == ("block", 4)
    assert len(notices) == 1 and "--sharded_lazy_unit batch is put aside" in notices[0]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By how many samples there are: in one chunk, and in three."""
    folder = tmp_path_factory.mktemp("streams")
    return {61: produce(folder / "1", 61, 61), 48: produce(folder / "3", 48, 20)}


def test_live_stream_of_few_files_is_trained_at_once_and_gone_on_with_once_it_has_ended(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    writer = ChunkWriter(directory, 20)
    for number in range(20):
        writer.write({"id": number})
    # Four ranks, six steps of four at the most: less than a chunk for each.
    options: dict[str, Any] = {"max_steps": 6, "train_dataloader_shuffle": False, "sharded_lazy_unit": "auto"}
    history = History("swift", directory, tmp_path / "run", save_steps=1, **options)
    history.start(Shape(4, 1, 1), 4)
    assert sorted(history.trained) == [(0, number) for number in range(16)]
    for number in range(20, 200):
        writer.write({"id": number})
    writer.close()
    # By itself the stream would now have enough chunks for one, two or four ranks.
    assert history.start(Shape(2, 1, 2))
    assert sorted(history.trained) == [(0, number) for number in range(24)]
    assert [run.state.unit for run in history.plans] == [1, 1]
