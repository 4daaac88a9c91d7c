"""Megatron's path: ms-swift's own sampler over a stream, from every number of samples that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard_swift.megatron import RunLength
from lazyshard_swift.stream import TrainStream
from tests.data import swift_samplers
from tests.data.swift_samplers import megatron_batches
from tests.stream.streams import produce
from tests.swift.unit.runs import megatron, open_stream, plan

PER_CHUNK = 3


@pytest.fixture(autouse=True, scope="module")
def loaded_once() -> Iterator[None]:
    loaded: dict[str, Any] = {}
    load = swift_samplers.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swift_samplers, "load", lambda file: loaded.get(file) or loaded.setdefault(file, load(file)))
        yield


def strided(stream: TrainStream, samples: int, consumed: int) -> list[list[int]]:
    """What a rank gets from its sampler, from so many consumed samples on, as `lazyshard_swift.megatron` has it."""
    length, run = RunLength(stream, samples), stream.plan
    batches = megatron_batches(
        length, run.rank.dp_rank, run.rank.dp_size, run.batch_size, sharding=False, shuffle=False, consumed=consumed
    )
    return [length.__getitems__(indices) for indices in batches]


def by_step(ranks: list[list[list[int]]], accumulation: int) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    steps = len(ranks[0]) // accumulation
    return [
        sorted(
            i for batches in ranks for batch in batches[step * accumulation : (step + 1) * accumulation] for i in batch
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize("total", [12, 31])
@pytest.mark.parametrize(("dp", "batch", "accumulation"), [(1, 1, 1), (1, 2, 3), (2, 1, 2), (2, 3, 1), (3, 2, 1)])
@pytest.mark.parametrize("window", [0, 2])
def test_run_over_several_epochs_goes_on_exactly_from_every_step(
    tmp_path: Path, total: int, dp: int, batch: int, accumulation: int, window: int
) -> None:
    directory = produce(tmp_path / "s", total, PER_CHUNK)
    size = dp * batch * accumulation
    args = megatron(
        num_train_epochs=3, micro_batch_size=batch, global_batch_size=size, sharded_lazy_shuffle_window=window
    )
    streams = [open_stream(plan(args, directory, rank, dp)) for rank in range(dp)]
    epoch_samples = total // (dp * batch) * dp * batch
    assert [len(stream) for stream in streams] == [epoch_samples] * dp
    # As ms-swift computes it.
    train_iters = 3 * epoch_samples // size
    whole = [strided(stream, train_iters * size, 0) for stream in streams]
    assert {len(batches) for batches in whole} == {train_iters * accumulation}
    per_epoch = epoch_samples // (dp * batch)
    for epoch in range(3):
        ids = [i for batches in whole for found in batches[epoch * per_epoch : (epoch + 1) * per_epoch] for i in found]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(range(total))
        if epoch < 2:
            assert len(ids) == epoch_samples
    for step in range(train_iters):
        resumed = [open_stream(plan(args, directory, rank, dp)) for rank in range(dp)]
        rest = [strided(stream, train_iters * size, step * size) for stream in resumed]
        assert rest == [batches[step * accumulation :] for batches in whole], step


@pytest.mark.parametrize("longer", [0, 3])
def test_run_that_is_made_longer_on_resume_goes_on_exactly(tmp_path: Path, longer: int) -> None:
    directory = produce(tmp_path / "s", 30, PER_CHUNK)
    args = megatron(train_iters=4, micro_batch_size=1, global_batch_size=4, sharded_lazy_shuffle_window=2)
    streams = [open_stream(plan(args, directory, rank, 2)) for rank in range(2)]
    whole = [strided(stream, 7 * 4, 0) for stream in streams]
    assert len({i for step in by_step(whole, 2) for i in step}) == 28
    for step in range(4):
        rest = [strided(stream, (4 + longer) * 4, step * 4) for stream in streams]
        assert by_step(rest, 2) == by_step(whole, 2)[step : 4 + longer]


def test_other_micro_batch_in_the_first_epoch_takes_the_same_samples_to_each_step(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 30, PER_CHUNK)
    steps = []
    for batch in (1, 2):
        args = megatron(train_iters=7, micro_batch_size=batch, global_batch_size=4, sharded_lazy_shuffle_window=2)
        streams = [open_stream(plan(args, directory, rank, 2)) for rank in range(2)]
        steps.append(by_step([strided(stream, 28, 8) for stream in streams], 2 // batch))
    assert steps[0] == steps[1]
    assert len(steps[0]) == 5


def test_live_stream_is_read_as_far_as_it_is_published(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 12, PER_CHUNK, end=False)
    args = megatron(train_iters=100, micro_batch_size=1, global_batch_size=4)
    streams = [open_stream(plan(args, directory, rank, 2)) for rank in range(2)]
    read = []
    for stream in streams:
        length = RunLength(stream, 400)
        indices = megatron_batches(length, stream.plan.rank.dp_rank, 2, 1, sharding=False, shuffle=False)
        assert len(indices) == 200
        step = 0
        while step < 3 and stream.gate.allows(step * 2, step * 2 + 2):
            read += [length.__getitems__(batch) for batch in indices[step * 2 : step * 2 + 2]]
            step += 1
    assert sorted(i for batch in read for i in batch) == list(range(12))


def block(stream: TrainStream, consumed: int) -> list[Any]:
    run = stream.plan
    batches = megatron_batches(
        stream, run.rank.dp_rank, run.rank.dp_size, run.batch_size, sharding=True, shuffle=True, consumed=consumed
    )
    return [stream.__getitems__(indices) for indices in batches]


@pytest.mark.parametrize("total", [12, 31])
@pytest.mark.parametrize(("dp", "batch"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)])
def test_ms_swifts_own_sharding_reads_each_sample_once_from_every_count(
    tmp_path: Path, total: int, dp: int, batch: int
) -> None:
    directory = produce(tmp_path / "s", total, PER_CHUNK)
    args = megatron(num_train_epochs=2, micro_batch_size=batch, global_batch_size=dp * batch, data_sharding=True)
    streams = [open_stream(plan(args, directory, rank, dp)) for rank in range(dp)]
    assert {stream.plan.layout for stream in streams} == {"block"}
    per_step = dp * batch
    samples = total // per_step * per_step
    assert [len(stream) for stream in streams] == [samples] * dp
    epochs = []
    for epoch in range(2):
        whole = [block(stream, epoch * samples) for stream in streams]
        ids = [i for batches in whole for found in batches for i in found]
        assert len(set(ids)) == len(ids) == samples
        assert set(ids) <= set(range(total))
        epochs.append(ids)
        for rank in range(dp):
            # Its own chunks; what is not dealt in whole stripes goes row by row.
            stripes = total // (PER_CHUNK * dp) * PER_CHUNK * dp
            own = {i // PER_CHUNK % dp for found in whole[rank] for i in found if i < stripes}
            assert own == {rank}
        for step in range(samples // per_step):
            resumed = [open_stream(plan(args, directory, rank, dp)) for rank in range(dp)]
            rest = [block(stream, epoch * samples + step * per_step) for stream in resumed]
            assert rest == [batches[step:] for batches in whole]
    assert epochs[0] != epochs[1]
