"""`huggingface`: ms-swift's own sampler and loader of its trainer over real streams, all ranks together."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lazyshard.errors import WaitTimeout
from lazyshard_swift.errors import StreamTooShort
from lazyshard_swift.huggingface import gated_loader, strided_sampler
from lazyshard_swift.megatron import RunLength
from lazyshard_swift.run_plan import RunPlan, consumed_after
from tests.data import swift_samplers
from tests.stream.streams import produce
from tests.swift.unit.runs import hugging_face, open_stream, plan

PER_CHUNK = 3
Batches = list[list[int]]


@pytest.fixture(scope="module")
def real() -> ModuleType:
    """ms-swift's `dataloader/shard.py`."""
    return swift_samplers.load("dataloader/shard.py")


class Run:
    """What ms-swift builds on one rank."""

    def __init__(self, real: ModuleType, run: RunPlan, accumulation: int, *, skip: int = 0, **options: Any) -> None:
        self.plan = run
        self.stream = open_stream(run)
        placed = type("Placed", (real.BatchSamplerShard,), {"rank": run.rank.dp_rank, "world_size": run.rank.dp_size})
        sampler: Any = strided_sampler(placed)(
            len(self.stream),
            batch_size=run.batch_size,
            shuffle=True,
            drop_last=False,
            data_seed=42,
            tp_size=1,
        )
        if skip:
            sampler = importlib.import_module("accelerate.data_loader").SkipBatchSampler(sampler, skip_batches=skip)
        loader = gated_loader(real.DataLoaderShard, self.stream, accumulation)
        self.loader: Any = loader(
            self.stream, device=None, batch_sampler=sampler, collate_fn=list, **{"num_workers": 0, **options}
        )

    def epoch(self, epoch: int) -> Batches:
        self.loader.set_epoch(epoch)
        return list(self.loader)


def runs(real: ModuleType, args: Any, directory: Path, dp: int, **options: Any) -> list[Run]:
    accumulation = args.training_args.gradient_accumulation_steps
    return [Run(real, plan(args, directory, rank, dp), accumulation, **options) for rank in range(dp)]


def flat(ranks: list[Batches]) -> list[int]:
    return [i for batches in ranks for batch in batches for i in batch]


@pytest.mark.parametrize("total", [6, 25])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_every_epoch_has_every_sample_once_over_all_ranks(
    tmp_path: Path, real: ModuleType, total: int, window: int, accumulation: int
) -> None:
    directory = produce(tmp_path / "s", total, PER_CHUNK)
    for dp in (1, 2, 3):
        for batch in (1, 2):
            args = hugging_face(
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulation,
                sharded_lazy_shuffle_window=window,
            )
            ranks = runs(real, args, directory, dp)
            orders = []
            for epoch in range(3):
                read = [run.epoch(epoch) for run in ranks]
                assert {len(batches) for batches in read} == {total // (dp * batch)}
                assert {len(found) for batches in read for found in batches} == {batch}
                ids = flat(read)
                assert len(set(ids)) == len(ids) == total // (dp * batch) * dp * batch
                assert set(ids) <= set(range(total))
                orders.append(ids)
            assert [len(run.loader) for run in ranks] == [total // (dp * batch)] * dp
            if window and total > 12:
                assert orders[0] != orders[1] != orders[2]
            if not window:
                assert orders[0] == orders[1] == orders[2]


def test_ranks_read_their_own_chunks_in_order(tmp_path: Path, real: ModuleType) -> None:
    directory = produce(tmp_path / "s", 12, PER_CHUNK)
    args = hugging_face(per_device_train_batch_size=2, train_dataloader_shuffle=False)
    assert [run.epoch(0) for run in runs(real, args, directory, 2)] == [
        [[0, 1], [2, 6], [7, 8]],
        [[3, 4], [5, 9], [10, 11]],
    ]


def test_epochs_go_on_through_the_streams_own(tmp_path: Path, real: ModuleType) -> None:
    directory = produce(tmp_path / "s", 5, PER_CHUNK)
    args = hugging_face(per_device_train_batch_size=2, sharded_lazy_shuffle_window=2)
    (run,) = runs(real, args, directory, 1)
    asked = [list(run.loader.batch_sampler) for epoch in range(3) if not run.loader.set_epoch(epoch)]
    # Sample 5 of each epoch is left over.
    assert asked == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


@pytest.mark.parametrize(("dp", "batch", "accumulation"), [(1, 1, 1), (2, 2, 2), (3, 1, 2), (2, 1, 4)])
def test_resume_at_any_batch_goes_on_with_the_next_sample(
    tmp_path: Path, real: ModuleType, dp: int, batch: int, accumulation: int
) -> None:
    directory = produce(tmp_path / "s", 25, PER_CHUNK)
    args = hugging_face(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, sharded_lazy_shuffle_window=2
    )
    whole = [[run.epoch(epoch) for epoch in range(2)] for run in runs(real, args, directory, dp)]
    for skip in range(1, 25 // (dp * batch) + 1):
        rests = runs(real, args, directory, dp, skip=skip)
        for rank, rest in enumerate(rests):
            assert len(rest.loader) == len(whole[rank][0]) - skip
            for epoch in (1, 0):
                assert rest.epoch(epoch) == whole[rank][epoch][skip:], (rank, epoch, skip)


@pytest.mark.parametrize("nested", [(2, 3), (5, 0)])
def test_batches_that_were_skipped_twice_are_both_skipped(
    tmp_path: Path, real: ModuleType, nested: tuple[int, int]
) -> None:
    directory = produce(tmp_path / "s", 12, PER_CHUNK)
    (run,) = runs(real, hugging_face(train_dataloader_shuffle=False), directory, 1, skip=nested[0])
    skip = importlib.import_module("accelerate.data_loader").SkipBatchSampler
    again = type(run.loader)(
        run.stream, device=None, batch_sampler=skip(run.loader.batch_sampler, nested[1]), collate_fn=list
    )
    assert list(again) == [[i] for i in range(5, 12)]


@pytest.mark.parametrize("total", [4, 7, 23])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_live_stream_that_ends_early_stops_all_ranks_at_the_last_whole_step(
    tmp_path: Path, real: ModuleType, total: int, accumulation: int
) -> None:
    for dp, batch, window in ((1, 1, 0), (1, 2, 2), (2, 1, 2), (3, 1, 0)):
        directory = produce(tmp_path / f"{dp} {batch}", 0, PER_CHUNK, end=False)
        args = hugging_face(
            max_steps=100,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            sharded_lazy_shuffle_window=window,
        )
        ranks = runs(real, args, directory, dp)
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
        ids = flat(read)
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(range(total))
        assert all(run.stream.gate.stopped for run in ranks)
        # Whatever the trainer does about the rest of its plan.
        assert [run.epoch(1) for run in ranks] == [[]] * dp


def test_live_stream_that_is_repeated_goes_on_with_the_next_epoch(tmp_path: Path, real: ModuleType) -> None:
    directory = produce(tmp_path / "s", 0, PER_CHUNK, end=False)
    args = hugging_face(max_steps=9, per_device_train_batch_size=2, sharded_lazy_on_end="repeat")
    ranks = runs(real, args, directory, 2)
    produce(directory, 13, PER_CHUNK)
    read = [run.epoch(0) for run in ranks]
    assert [len(batches) for batches in read] == [9, 9]
    for epoch in range(3):
        ids = flat([batches[epoch * 3 : epoch * 3 + 3] for batches in read])
        assert len(set(ids)) == len(ids) == 12
    assert not any(run.stream.gate.stopped for run in ranks)


@pytest.mark.parametrize(("max_steps", "batches"), [(-1, [5, 5]), (10, [4, 0])])
def test_partial_last_step_of_an_epoch_is_trained_where_epochs_decide(
    tmp_path: Path, real: ModuleType, max_steps: int, batches: list[int]
) -> None:
    directory = produce(tmp_path / "s", 10, PER_CHUNK)
    args = hugging_face(max_steps=max_steps, gradient_accumulation_steps=2)
    for run in runs(real, args, directory, 2):
        assert [len(run.epoch(epoch)) for epoch in range(2)] == batches


def test_data_that_do_not_come_are_a_timeout_before_their_step(tmp_path: Path, real: ModuleType) -> None:
    directory = produce(tmp_path / "s", 9, PER_CHUNK, end=False)
    args = hugging_face(max_steps=10, gradient_accumulation_steps=2, train_dataloader_shuffle=False)
    (run,) = runs(real, args, directory, 1)
    read: Batches = []
    with pytest.raises(WaitTimeout) as timeout:
        read.extend(iter(run.loader))
    # extend keeps what came: 4 steps of 2, of the fifth the data end with sample 8.
    assert read == [[i] for i in range(8)]
    assert timeout.value.chunk == 3


def test_nothing_is_read_before_the_gate_has_let_the_first_step_through(tmp_path: Path, real: ModuleType) -> None:
    directory = produce(tmp_path / "s", 2, 2, end=False)
    args = hugging_face(max_steps=10, gradient_accumulation_steps=3)
    (run,) = runs(real, args, directory, 1)
    asked: list[Any] = []
    vars(run.stream)["_dataset"] = type("Recorder", (), {"__getitems__": lambda _, indices: asked.append(indices)})()
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
def test_workers_deliver_the_same_batches(tmp_path: Path, real: ModuleType, persistent: bool) -> None:
    directory = produce(tmp_path / "s", 25, PER_CHUNK)
    args = hugging_face(per_device_train_batch_size=2, gradient_accumulation_steps=2, sharded_lazy_shuffle_window=2)
    alone = Run(real, plan(args, directory, 1, 2), 2)
    workers = Run(real, plan(args, directory, 1, 2), 2, num_workers=2, persistent_workers=persistent)
    for epoch in (0, 1, 1, 0):
        assert workers.epoch(epoch) == alone.epoch(epoch)


@pytest.mark.usefixtures("no_worker_left")
def test_workers_end_with_a_stream_that_ends_early(tmp_path: Path, real: ModuleType) -> None:
    directory = produce(tmp_path / "s", 0, PER_CHUNK, end=False)
    run = Run(real, plan(hugging_face(max_steps=100), directory, 0, 1), 1, num_workers=1)
    produce(directory, 5, PER_CHUNK)
    assert sorted(i for batch in run.epoch(0) for i in batch) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("total", [12, 25])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_consumed_after_a_step_is_what_the_loaders_have_delivered(
    tmp_path: Path, real: ModuleType, total: int, accumulation: int
) -> None:
    directory = produce(tmp_path / "s", total, PER_CHUNK)
    args = hugging_face(per_device_train_batch_size=2, gradient_accumulation_steps=accumulation)
    ranks = runs(real, args, directory, 2)
    samples, delivered = ranks[0].plan.epoch_samples, 0
    found = [consumed_after(0, samples, 4, accumulation)]
    expected = [0]
    step = 0
    for epoch in range(3):
        batches = ranks[0].epoch(epoch)
        for first in range(0, len(batches), accumulation):
            step += 1
            delivered += 2 * sum(len(batch) for batch in batches[first : first + accumulation])
            expected.append(delivered)
            found.append(consumed_after(step, samples, 4, accumulation))
    assert found == expected


def test_run_length_hands_the_indices_on(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 12, PER_CHUNK)
    stream = open_stream(plan(hugging_face(train_dataloader_shuffle=False), directory, 0, 2))
    length = RunLength(stream, 100)
    assert len(length) == 100
    assert length[2] == 1
    # Behind the 12 indices of the first epoch comes the second.
    assert length.__getitems__([8, 10, 12, 14]) == [7, 8, 0, 1]
