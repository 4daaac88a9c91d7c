"""The data set under the samplers of the installed ms-swift: every sample exactly once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard import LazyShardedDataset
from tests.data import runs, swift_samplers
from tests.stream.streams import produce
from tests.tiers import full

Batches = Callable[[LazyShardedDataset, int, int, int, int], list[list[int]]]
"""Indices of the batches of rank r of dp ranks with so many samples to a batch, in an epoch."""

PER_CHUNK = 4


def megatron(sharding: bool, shuffle: bool) -> Batches:
    def batches(dataset: LazyShardedDataset, rank: int, dp: int, batch: int, epoch: int) -> list[list[int]]:
        consumed = epoch * len(dataset)
        return swift_samplers.megatron_batches(
            dataset, rank, dp, batch, sharding=sharding, shuffle=shuffle, consumed=consumed
        )

    return batches


def shard(shuffle: bool) -> Batches:
    def batches(dataset: LazyShardedDataset, rank: int, dp: int, batch: int, epoch: int) -> list[list[int]]:
        return swift_samplers.shard_batches(len(dataset), rank, dp, batch, shuffle=shuffle, epoch=epoch)

    return batches


SAMPLERS: dict[str, tuple[str, Batches]] = {
    "megatron, data_sharding": ("block", megatron(True, True)),
    "megatron, in turn": ("strided", megatron(False, False)),
    "megatron, shuffled over all, block": ("block", megatron(False, True)),
    "megatron, shuffled over all, strided": ("strided", megatron(False, True)),
    "hugging face, in turn": ("strided", shard(False)),
    "hugging face, shuffled": ("strided", shard(True)),
}


def ids_by_rank(
    directory: Path, name: str, dp: int, batch: int, window: int, epochs: int = 1
) -> list[list[list[list[int]]]]:
    """Returns ids of rows by rank, epoch and batch."""
    layout, batches_of = SAMPLERS[name]
    ranks = []
    for rank in range(dp):
        dataset = runs.open_rank(directory, rank, dp, batch_size=batch, layout=layout, shuffle_window=window)
        rank_epochs = []
        for epoch in range(epochs):
            dataset.set_epoch(epoch)
            batches = batches_of(dataset, rank, dp, batch, epoch) if len(dataset) else []
            rank_epochs.append([[row["id"] for row in dataset.__getitems__(indices)] for indices in batches])
        ranks.append(rank_epochs)
    return ranks


# Chunk-aligned and not, fewer chunks than ranks, less than a stripe.
RUNS = [(61, 3, 2), (5, 8, 1), (5, 1, 4), (64, 4, 2), (37, 5, 1), (37, 8, 4), (13, 6, 2), (61, 7, 1), (64, 2, 4)]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("total", "dp", "batch"), [(24, 3, 2), *RUNS[:3], *full(*RUNS[3:])])
def test_ranks_together_read_every_sample_once(tmp_path: Path, name: str, total: int, dp: int, batch: int) -> None:
    directory = produce(tmp_path / "s", total, PER_CHUNK)
    for window in (0, 2):
        ranks = ids_by_rank(directory, name, dp, batch, window, epochs=2)
        orders = [[i for epochs in ranks for rows in epochs[epoch] for i in rows] for epoch in (0, 1)]
        steps = total // (dp * batch)
        for epoch, read in enumerate(orders):
            assert [len(epochs[epoch]) for epochs in ranks] == [steps] * dp
            assert len(set(read)) == len(read) == steps * dp * batch
            assert set(read) <= set(range(total))
        if total == 24:
            assert (orders[0] == orders[1]) is (window == 0 and "in turn" in name)
