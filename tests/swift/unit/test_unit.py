"""`--sharded_lazy_unit`: what is dealt in turn, the same for all ranks, and kept by the checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.plan.deal import Rules
from lazyshard_swift.checkpoints import load_position
from lazyshard_swift.errors import ResumeRefused
from lazyshard_swift.position import Position, parse
from tests.stream.streams import produce
from tests.swift.unit.runs import checkpoint, decided, hugging_face, megatron, open_streams, position, refused
from tests.swift.unit.test_rescale import History, Shape, any_shape, assert_once


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


@pytest.mark.parametrize("unit", ["batch", "3"])
@pytest.mark.parametrize("window", [0, 1, 2])
def test_position_with_a_unit_is_read_again(unit: str, window: int) -> None:
    saved = decided(args_of(unit, sharded_lazy_shuffle_window=window)).position(48, 3)
    assert parse(saved.to_bytes(), "lazyshard.json") == saved


def test_ranks_share_one_file(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_dataloader_shuffle": False, "num_train_epochs": 1}
    args = hugging_face(per_device_train_batch_size=2, sharded_lazy_unit="auto", **options)
    streams = open_streams(args, produce(tmp_path / "s", 20, 20), 4)
    found = [[stream[index] for index in range(rank, len(stream), 4)] for rank, stream in enumerate(streams)]
    assert found == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert "dealt in units of 2 samples" in repr(streams[0])


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By how many samples there are: in one chunk, and in three."""
    folder = tmp_path_factory.mktemp("streams")
    return {61: produce(folder / "1", 61, 61), 48: produce(folder / "3", 48, 20)}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["swift", "megatron"]))
def test_epochs_of_few_files_through_any_chain_of_starts(
    tmp_path_factory: pytest.TempPathFactory, streams: dict[int, Path], seed: int, kind: str
) -> None:
    choose = random.Random(seed)
    total, epochs = choose.choice([61, 48]), choose.randint(1, 3)
    history = History(
        kind,
        streams[total],
        tmp_path_factory.mktemp("run"),
        num_train_epochs=epochs,
        sharded_lazy_shuffle_window=choose.randint(0, 2),
        sharded_lazy_unit="auto",
        save_steps=choose.randint(1, 3),
    )
    shapes, units = [], set()
    for _ in range(choose.randint(1, 4)):
        shapes.append(any_shape(choose))
        ended = history.start(shapes[-1], choose.randint(0, 6))
        if history.checkpoint is not None:
            saved = load_position(history.checkpoint)
            assert saved is not None
            units.add(saved.unit)
        if ended:
            break
    shapes.append(any_shape(choose))
    assert history.start(shapes[-1])
    assert len(units) <= 1, "the unit of the first checkpoint is kept"
    assert_once(history, total, epochs, max([shapes[-1].step, *(shape.dp * shape.batch for shape in shapes)]))


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
