"""`huggingface`: ms-swift's own sampler and loader of its trainer over real streams, all ranks together."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import WaitTimeout
from lazyshard_swift.errors import StreamTooShort
from lazyshard_swift.huggingface import gated_loader, strided_sampler
from lazyshard_swift.megatron import RunLength
from lazyshard_swift.run_plan import RunPlan, consumed_after
from tests.stream.streams import produce
from tests.swift.unit.runs import hugging_face, load, open_stream, plan

PER_CHUNK = 3
Batches = list[list[int]]


class Run:
    """What ms-swift builds on one rank."""

    def __init__(self, run: RunPlan, accumulation: int, *, skip: int = 0, **options: Any) -> None:
        self.plan, self.stream = run, open_stream(run)
        real = load("dataloader/shard.py")
        placed = type("Placed", (real.BatchSamplerShard,), {"rank": run.rank.dp_rank, "world_size": run.rank.dp_size})
        own: dict[str, Any] = {"batch_size": run.batch_size, "shuffle": True, "drop_last": False}
        sampler: Any = strided_sampler(placed)(len(self.stream), **own, data_seed=42, tp_size=1)
        if skip:
            sampler = importlib.import_module("accelerate.data_loader").SkipBatchSampler(sampler, skip_batches=skip)
        options = {"num_workers": 0, **options, "device": None, "batch_sampler": sampler, "collate_fn": list}
        self.loader: Any = gated_loader(real.DataLoaderShard, self.stream, accumulation)(self.stream, **options)

    def epoch(self, epoch: int) -> Batches:
        self.loader.set_epoch(epoch)
        return list(self.loader)


def runs(args: Any, directory: Path, dp: int, **options: Any) -> list[Run]:
    accumulation = args.training_args.gradient_accumulation_steps
    return [Run(plan(args, directory, rank, dp), accumulation, **options) for rank in range(dp)]


def args_of(batch: int = 1, accumulation: int = 1, window: int | None = None, **changes: Any) -> Any:
    common: dict[str, Any] = {"sharded_lazy_shuffle_window": window, "gradient_accumulation_steps": accumulation}
    return hugging_face(per_device_train_batch_size=batch, **common, **changes)


def assert_once(ranks: list[Batches], total: int) -> list[int]:
    """Checks that no sample comes twice; returns all."""
    ids = [i for batches in ranks for batch in batches for i in batch]
    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(range(total))
    return ids


@pytest.mark.parametrize("total", [6, 25])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_every_epoch_has_every_sample_once_over_all_ranks(
    tmp_path: Path, total: int, window: int, accumulation: int
) -> None:
    directory = produce(tmp_path / "s", total, PER_CHUNK)
    for dp, batch in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)):
        ranks, orders = runs(args_of(batch, accumulation, window), directory, dp), []
        for epoch in range(3):
            read = [run.epoch(epoch) for run in ranks]
            assert [list(map(len, batches)) for batches in read] == [[batch] * (total // (dp * batch))] * dp
            orders.append(assert_once(read, total))
        assert [len(run.loader) for run in ranks] == [total // (dp * batch)] * dp
        if window and total > 12:
            assert orders[0] != orders[1] != orders[2]
        if not window:
            assert orders[0] == orders[1] == orders[2]


def test_ranks_read_their_own_chunks_in_order(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 12, PER_CHUNK)
    found = [run.epoch(0) for run in runs(args_of(2, train_dataloader_shuffle=False), directory, 2)]
    assert found == [[[0, 1], [2, 6], [7, 8]], [[3, 4], [5, 9], [10, 11]]]


def test_epochs_go_on_through_the_streams_own(tmp_path: Path) -> None:
    (run,) = runs(args_of(2, window=2), produce(tmp_path / "s", 5, PER_CHUNK), 1)
    asked = [list(run.loader.batch_sampler) for epoch in range(3) if not run.loader.set_epoch(epoch)]
    # Sample 5 of each epoch is left over.
    assert asked == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


@pytest.mark.parametrize(("dp", "batch", "accumulation"), [(1, 1, 1), (2, 2, 2), (3, 1, 2), (2, 1, 4)])
def test_resume_at_any_batch_goes_on_with_the_next_sample(
    tmp_path: Path, dp: int, batch: int, accumulation: int
) -> None:
    directory, args = produce(tmp_path / "s", 25, PER_CHUNK), args_of(batch, accumulation, 2)
    whole = [[run.epoch(epoch) for epoch in range(2)] for run in runs(args, directory, dp)]
    for skip in range(1, 25 // (dp * batch) + 1):
        for rank, rest in enumerate(runs(args, directory, dp, skip=skip)):
            assert len(rest.loader) == len(whole[rank][0]) - skip
            for epoch in (1, 0):
                assert rest.epoch(epoch) == whole[rank][epoch][skip:], (rank, epoch, skip)


@pytest.mark.parametrize("nested", [(2, 3), (5, 0)])
def test_batches_that_were_skipped_twice_are_both_skipped(tmp_path: Path, nested: tuple[int, int]) -> None:
    directory = produce(tmp_path / "s", 12, PER_CHUNK)
    (run,) = runs(args_of(train_dataloader_shuffle=False), directory, 1, skip=nested[0])
    skip = importlib.import_module("accelerate.data_loader").SkipBatchSampler
    sampler = skip(run.loader.batch_sampler, nested[1])
    again = type(run.loader)(run.stream, device=None, batch_sampler=sampler, collate_fn=list)
    assert list(again) == [[i] for i in range(5, 12)]


@pytest.mark.parametrize("total", [4, 7, 23])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_live_stream_that_ends_early_stops_all_ranks_at_the_last_whole_step(
    tmp_path: Path, total: int, accumulation: int
) -> None:
    for dp, batch, window in ((1, 1, 0), (1, 2, 2), (2, 1, 2), (3, 1, 0)):
        directory = produce(tmp_path / f"{dp} {batch}", 0, PER_CHUNK, end=False)
        ranks = runs(args_of(batch, accumulation, window, max_steps=100), directory, dp)
        assert [len(run.loader) for run in ranks] == [100 * accumulation] * dp
        produce(directory, total, PER_CHUNK)
        steps = total // (dp * batch * accumulation)
        if not steps:
            for run in ranks:
                with pytest.raises(StreamTooShort):
                    run.epoch(0)
            continue
        read = [run.epoch(0) for run in ranks]
        assert [len(batches) for batches in read] == [steps * accumulation] * dp
        assert_once(read, total)
        assert all(run.stream.gate.stopped for run in ranks)
        # Whatever the trainer does about the rest of its plan.
        assert [run.epoch(1) for run in ranks] == [[]] * dp


def test_live_stream_that_is_repeated_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 0, PER_CHUNK, end=False)
    ranks = runs(args_of(2, max_steps=9, sharded_lazy_on_end="repeat"), directory, 2)
    produce(directory, 13, PER_CHUNK)
    read = [run.epoch(0) for run in ranks]
    assert [len(batches) for batches in read] == [9, 9]
    for epoch in range(3):
        assert len(assert_once([batches[epoch * 3 : epoch * 3 + 3] for batches in read], 13)) == 12
    assert not any(run.stream.gate.stopped for run in ranks)


@pytest.mark.parametrize(("max_steps", "batches"), [(-1, [5, 5]), (10, [4, 0])])
def test_partial_last_step_of_an_epoch_is_trained_where_epochs_decide(
    tmp_path: Path, max_steps: int, batches: list[int]
) -> None:
    directory = produce(tmp_path / "s", 10, PER_CHUNK)
    for run in runs(args_of(accumulation=2, max_steps=max_steps), directory, 2):
        assert [len(run.epoch(epoch)) for epoch in range(2)] == batches


def test_data_that_do_not_come_are_a_timeout_before_their_step(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 9, PER_CHUNK, end=False)
    (run,) = runs(args_of(accumulation=2, max_steps=10, train_dataloader_shuffle=False), directory, 1)
    read: Batches = []
    with pytest.raises(WaitTimeout) as timeout:
        read.extend(iter(run.loader))
    # extend keeps what came: 4 steps of 2, of the fifth the data end with sample 8.
    assert read == [[i] for i in range(8)]
    assert timeout.value.chunk == 3


def test_nothing_is_read_before_the_gate_has_let_the_first_step_through(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 2, 2, end=False)
    (run,) = runs(args_of(accumulation=3, max_steps=10), directory, 1)
    asked: list[Any] = []
    run.loader.dataset.__class__ = type("Recorder", (type(run.stream),), {"__getitems__": asked.append})
    with pytest.raises(WaitTimeout):
        next(iter(run.loader))
    assert asked == []


@pytest.fixture
def no_worker_left() -> Iterator[None]:
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("no_worker_left")
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_deliver_the_same_batches(tmp_path: Path, persistent: bool) -> None:
    run = plan(args_of(2, 2, 2), produce(tmp_path / "s", 25, PER_CHUNK), 1, 2)
    alone, workers = Run(run, 2), Run(run, 2, num_workers=2, persistent_workers=persistent)
    for epoch in (0, 1, 1, 0):
        assert workers.epoch(epoch) == alone.epoch(epoch)


@pytest.mark.usefixtures("no_worker_left")
def test_workers_end_with_a_stream_that_ends_early(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 0, PER_CHUNK, end=False)
    (run,) = runs(args_of(max_steps=100), directory, 1, num_workers=1)
    produce(directory, 5, PER_CHUNK)
    assert sorted(assert_once([run.epoch(0)], 5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("total", [12, 25])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_consumed_after_a_step_is_what_the_loaders_have_delivered(
    tmp_path: Path, total: int, accumulation: int
) -> None:
    ranks = runs(args_of(2, accumulation), produce(tmp_path / "s", total, PER_CHUNK), 2)
    expected = [0]
    for epoch in range(3):
        batches = ranks[0].epoch(epoch)
        for first in range(0, len(batches), accumulation):
            expected.append(expected[-1] + 2 * sum(map(len, batches[first : first + accumulation])))
    samples = ranks[0].plan.epoch_samples
    assert [consumed_after(step, samples, 4, accumulation) for step in range(len(expected))] == expected


def test_run_length_hands_the_indices_on(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 12, PER_CHUNK)
    length = RunLength(open_stream(plan(args_of(train_dataloader_shuffle=False), directory, 0, 2)), 100)
    assert (len(length), length[2]) == (100, 1)
    # Behind the 12 indices of the first epoch comes the second.
    assert length.__getitems__([8, 10, 12, 14]) == [7, 8, 0, 1]
