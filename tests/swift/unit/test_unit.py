"""`--sharded_lazy_unit`: what is dealt in turn, the same for all ranks, and kept by the checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.data.rank import Rank
from lazyshard.plan import Rules
from lazyshard_swift.checkpoints import load_position, save_position
from lazyshard_swift.errors import ResumeRefused
from lazyshard_swift.planning import decide
from lazyshard_swift.position import Position, parse
from lazyshard_swift.run_plan import RunPlan
from tests.stream.streams import produce
from tests.swift.unit.runs import facts, hugging_face, megatron, open_stream, plan, position
from tests.swift.unit.test_rescale import History, any_shape, assert_once


def decided(args: Any, samples: int = 100, ended: bool = True, dp: int = 2, per_chunk: int = 4) -> RunPlan:
    return decide(args, "/streams/one", facts(samples, ended, per_chunk), Rank(0, dp))


def resumed(folder: Path, saved: Position, **changes: Any) -> Any:
    save_position(saved, folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    common = {"micro_batch_size": 2, "train_iters": 7, "finetune": False, "mcore_model": str(folder)}
    return megatron(**{**common, **changes})


@pytest.mark.parametrize(
    ("unit", "samples"),
    [(None, 100), ("chunk", 100), ("batch", 2), ("sample", 1), ("30", 30), (30, 30), ("250", 250)],
)
def test_what_is_named_is_dealt(unit: Any, samples: int, notices: list[str]) -> None:
    run = decided(megatron(train_iters=7, micro_batch_size=2, sharded_lazy_unit=unit), dp=8, per_chunk=100)
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
    args = megatron(train_iters=iterations, micro_batch_size=2, sharded_lazy_unit="auto")
    run = decided(args, samples, ended, 8, 100)
    assert run.state.unit == unit
    assert len(notices) == (unit == 2)
    if notices:
        assert ("--sharded_lazy_shuffle_window 0 starts with what is there" in notices[0]) == (not ended)
        there = f"the stream has {samples} samples" if ended else f"the run trains {iterations * 16} samples"
        few = f"{there}, fewer than a chunk of 100 for each of 8 data-parallel ranks"
        assert f"{few}, so they are dealt in batches of 2" in notices[0]


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize("unit", [2, 3, 4])
def test_checkpoint_keeps_its_unit(tmp_path: Path, asked: str | None, unit: int) -> None:
    begun = decided(megatron(train_iters=7, micro_batch_size=2, sharded_lazy_unit=unit)).position(48, 3)
    # With other ranks, for which there are enough chunks or not.
    for dp, samples in ((2, 100), (1, 100), (40, 160), (20, 4000)):
        args = resumed(tmp_path / f"{dp}", begun, sharded_lazy_unit=asked, global_batch_size=2 * dp)
        run = decided(args, samples, dp=dp)
        assert run.state.unit == unit
        assert run.position(48, 3).unit == unit


def test_other_unit_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    begun = decided(megatron(train_iters=7, micro_batch_size=2, sharded_lazy_unit="batch")).position(48, 3)
    assert decided(resumed(tmp_path / "same", begun, sharded_lazy_unit="batch")).state.unit == 2
    others: list[dict[str, Any]] = [{"sharded_lazy_unit": "chunk"}, {"micro_batch_size": 4}]
    for number, changes in enumerate(others):
        args = resumed(tmp_path / str(number), begun, **{"sharded_lazy_unit": "batch", **changes})
        with pytest.raises(
            ResumeRefused, match="saved with unit 2, this run has unit 4: leave out --sharded_lazy_unit"
        ):
            decided(args)


def test_checkpoint_of_an_earlier_release_goes_on_by_chunks(tmp_path: Path) -> None:
    assert decided(resumed(tmp_path / "c", position(batch_size=2), sharded_lazy_unit="auto"), dp=50).state.unit == 4


def test_ms_swifts_own_shuffle_keeps_whole_chunks(tmp_path: Path, notices: list[str]) -> None:
    for unit in (None, "chunk", "auto"):
        run = decided(megatron(train_iters=7, data_sharding=True, sharded_lazy_unit=unit), 10, dp=8)
        assert (run.layout, run.state.unit) == ("block", 4)
    assert notices == []
    run = decided(megatron(train_iters=7, data_sharding=True, sharded_lazy_unit="batch"), 10, dp=8)
    assert (run.layout, run.state.unit) == ("block", 4)
    assert len(notices) == 1 and "--sharded_lazy_unit batch is put aside" in notices[0]


@pytest.mark.parametrize("unit", ["batch", "3"])
@pytest.mark.parametrize("window", [0, 1, 2])
def test_position_with_a_unit_is_read_again(unit: str, window: int) -> None:
    args = megatron(train_iters=7, micro_batch_size=2, sharded_lazy_unit=unit, sharded_lazy_shuffle_window=window)
    saved = decided(args).position(48, 3)
    assert parse(saved.to_bytes(), "lazyshard.json") == saved


def test_ranks_share_one_file(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 20, 20)
    options: dict[str, Any] = {"train_dataloader_shuffle": False, "num_train_epochs": 1}
    found = []
    for rank in range(4):
        run = plan(hugging_face(per_device_train_batch_size=2, sharded_lazy_unit="auto", **options), directory, rank, 4)
        stream = open_stream(run)
        found.append([stream[index] for index in range(rank, len(stream), 4)])
    assert found == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert "dealt in units of 2 samples, in the order of the stream" in repr(stream)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By how many chunks there are."""
    folder = tmp_path_factory.mktemp("streams")
    return {1: produce(folder / "1", 61, 61), 3: produce(folder / "3", 48, 20)}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["swift", "megatron"]))
def test_epochs_of_few_files_through_any_chain_of_starts(
    tmp_path_factory: pytest.TempPathFactory, streams: dict[int, Path], seed: int, kind: str
) -> None:
    choose = random.Random(seed)
    directory, epochs = streams[choose.choice([1, 3])], choose.randint(1, 3)
    history = History(
        kind,
        directory,
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
    most = max(shape.dp * shape.batch for shape in shapes)
    assert_once(history, 61 if directory == streams[1] else 48, epochs, max(most, shapes[-1].step))


def test_live_stream_of_few_files_is_trained_at_once_and_gone_on_with_once_it_has_ended(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    writer = ChunkWriter(directory, 20)
    for number in range(20):
        writer.write({"id": number})
    # Four ranks, six steps of four at the most: less than a chunk for each.
    options: dict[str, Any] = {"max_steps": 6, "train_dataloader_shuffle": False, "sharded_lazy_unit": "auto"}
    shape = any_shape(random.Random(0))._replace(dp=4, batch=1, accumulation=1)
    history = History("swift", directory, tmp_path / "run", save_steps=1, **options)
    history.start(shape, 4)
    assert sorted(history.trained) == [(0, number) for number in range(16)]
    for number in range(20, 200):
        writer.write({"id": number})
    writer.close()
    # By itself the stream would now have enough chunks for one, two or four ranks.
    assert history.start(shape._replace(dp=2, accumulation=2))
    assert sorted(history.trained) == [(0, number) for number in range(24)]
    assert [run.state.unit for run in history.plans] == [1, 1]
