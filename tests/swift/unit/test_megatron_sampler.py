"""Megatron's path: ms-swift's own sampler over a stream, from every number of samples that a checkpoint can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard_swift.megatron import RunLength
from lazyshard_swift.stream import TrainStream
from tests.data import swift_samplers
from tests.stream.streams import produce
from tests.swift.unit.runs import load, megatron, open_streams

PER_CHUNK = 3


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift_samplers, "load", load)


def args_of(batch: int, global_batch: int, window: int | None = None, **changes: Any) -> Any:
    sizes = {"micro_batch_size": batch, "global_batch_size": global_batch}
    return megatron(**sizes, sharded_lazy_shuffle_window=window, **changes)


def batches_of(dataset: Any, stream: TrainStream, consumed: int, own: bool = False) -> list[list[int]]:
    """Returns what ms-swift's sampler draws on a rank; in its own shuffle, or in order as for our streams."""
    rank, batch = stream.plan.rank, stream.plan.batch_size
    return swift_samplers.megatron_batches(
        dataset, rank.dp_rank, rank.dp_size, batch, sharding=own, shuffle=own, consumed=consumed
    )


def strided(stream: TrainStream, samples: int, consumed: int) -> list[list[int]]:
    """What a rank gets from its sampler, from so many consumed samples on, as `lazyshard_swift.megatron` has it."""
    length = RunLength(stream, samples)
    return [length.__getitems__(indices) for indices in batches_of(length, stream, consumed)]


def block(stream: TrainStream, consumed: int) -> list[Any]:
    return [stream.__getitems__(indices) for indices in batches_of(stream, stream, consumed, own=True)]


def by_step(ranks: list[list[list[int]]], accumulation: int) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    firsts = range(0, len(ranks[0]), accumulation)
    return [sorted(i for each in ranks for found in each[at : at + accumulation] for i in found) for at in firsts]


def assert_once(ranks: list[list[list[int]]], total: int) -> list[int]:
    ids = [i for batches in ranks for found in batches for i in found]
    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(range(total))
    return ids


@pytest.mark.parametrize("total", [12, 31])
@pytest.mark.parametrize(("dp", "batch", "accumulation"), [(1, 1, 1), (1, 2, 3), (2, 1, 2), (2, 3, 1), (3, 2, 1)])
@pytest.mark.parametrize("window", [0, 2])
def test_run_over_several_epochs_goes_on_exactly_from_every_step(
    tmp_path: Path, total: int, dp: int, batch: int, accumulation: int, window: int
) -> None:
    directory, size = produce(tmp_path / "s", total, PER_CHUNK), dp * batch * accumulation
    args = args_of(batch, size, window, num_train_epochs=3)
    streams = open_streams(args, directory, dp)
    epoch_samples = total // (dp * batch) * dp * batch
    assert [len(stream) for stream in streams] == [epoch_samples] * dp
    # As ms-swift computes it.
    train_iters = 3 * epoch_samples // size
    whole = [strided(stream, train_iters * size, 0) for stream in streams]
    assert {len(batches) for batches in whole} == {train_iters * accumulation}
    per_epoch = epoch_samples // (dp * batch)
    for epoch in range(3):
        ids = assert_once([batches[epoch * per_epoch : (epoch + 1) * per_epoch] for batches in whole], total)
        assert epoch == 2 or len(ids) == epoch_samples
    for step in range(train_iters):
        rest = [strided(stream, train_iters * size, step * size) for stream in open_streams(args, directory, dp)]
        assert rest == [batches[step * accumulation :] for batches in whole], step


@pytest.mark.parametrize("longer", [0, 3])
def test_run_that_is_made_longer_on_resume_goes_on_exactly(tmp_path: Path, longer: int) -> None:
    streams = open_streams(args_of(1, 4, 2, train_iters=4), produce(tmp_path / "s", 30, PER_CHUNK), 2)
    whole = [strided(stream, 7 * 4, 0) for stream in streams]
    assert len(assert_once(whole, 30)) == 28
    for step in range(4):
        rest = [strided(stream, (4 + longer) * 4, step * 4) for stream in streams]
        assert by_step(rest, 2) == by_step(whole, 2)[step : 4 + longer]


def test_other_micro_batch_in_the_first_epoch_takes_the_same_samples_to_each_step(tmp_path: Path) -> None:
    directory, steps = produce(tmp_path / "s", 30, PER_CHUNK), []
    for batch in (1, 2):
        streams = open_streams(args_of(batch, 4, 2, train_iters=7), directory, 2)
        steps.append(by_step([strided(stream, 28, 8) for stream in streams], 2 // batch))
    assert steps[0] == steps[1]
    assert len(steps[0]) == 5


def test_live_stream_is_read_as_far_as_it_is_published(tmp_path: Path) -> None:
    read = []
    for stream in open_streams(args_of(1, 4, train_iters=100), produce(tmp_path / "s", 12, PER_CHUNK, end=False), 2):
        length, step = RunLength(stream, 400), 0
        indices = batches_of(length, stream, 0)
        assert len(indices) == 200
        while step < 3 and stream.gate.allows(step * 2, step * 2 + 2):
            read += [length.__getitems__(batch) for batch in indices[step * 2 : step * 2 + 2]]
            step += 1
    assert sorted(i for batch in read for i in batch) == list(range(12))


@pytest.mark.parametrize("total", [12, 31])
@pytest.mark.parametrize(("dp", "batch"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)])
def test_ms_swifts_own_sharding_reads_each_sample_once_from_every_count(
    tmp_path: Path, total: int, dp: int, batch: int
) -> None:
    directory, per_step = produce(tmp_path / "s", total, PER_CHUNK), dp * batch
    args = args_of(batch, per_step, num_train_epochs=2, data_sharding=True)
    streams = open_streams(args, directory, dp)
    samples = total // per_step * per_step
    assert [(stream.plan.layout, len(stream)) for stream in streams] == [("block", samples)] * dp
    epochs = []
    for epoch in range(2):
        whole = [block(stream, epoch * samples) for stream in streams]
        epochs.append(assert_once(whole, total))
        assert len(epochs[-1]) == samples
        for rank in range(dp):
            # Its own chunks; what is not dealt in whole stripes goes row by row.
            stripes = total // (PER_CHUNK * dp) * PER_CHUNK * dp
            assert {i // PER_CHUNK % dp for found in whole[rank] for i in found if i < stripes} == {rank}
        for step in range(samples // per_step):
            rest = [block(one, epoch * samples + step * per_step) for one in open_streams(args, directory, dp)]
            assert rest == [batches[step:] for batches in whole]
    assert epochs[0] != epochs[1]
