"""What a shuffle gives a training run: another order in each epoch, and over all chunks where the window holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lazyshard import StreamReader, window_for_distance
from tests.data.runs import open_rank
from tests.data.workers import ids
from tests.plan.distances import neighbours
from tests.stream.streams import produce

CHUNKS, PER_CHUNK, RANKS = 24, 5, 2
RANK_CHUNKS = CHUNKS // RANKS


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", CHUNKS * PER_CHUNK, PER_CHUNK)


def drawn(stream: Path, rank: int, epoch: int, workers: int = 0, **options: Any) -> list[int]:
    """The samples that a rank's loader hands out in an epoch, in order."""
    dataset = open_rank(stream, rank, RANKS, batch_size=5, seed=3, **options)
    dataset.set_epoch(epoch)
    loader: Any = DataLoader(dataset, 5, sampler=dataset.rank_indices, num_workers=workers, collate_fn=ids)
    return [one for batch in loader for one in batch]


def chunk_order(samples: list[int]) -> list[int]:
    """The chunks, by when the first sample of each comes."""
    return list(dict.fromkeys(sample // PER_CHUNK for sample in samples))


@pytest.mark.parametrize("window", [RANK_CHUNKS, RANK_CHUNKS + 7])
def test_a_window_of_all_chunks_of_a_rank_shuffles_their_order(stream: Path, window: int) -> None:
    own = list(range(0, CHUNKS, RANKS))
    orders = []
    for epoch in range(3):
        samples = drawn(stream, 0, epoch, shuffle_window=window)
        orders.append(chunk_order(samples))
        assert sorted(orders[-1]) == own
        # Samples of the beginning and of the end of the stream stand together from the first batches on.
        first = {sample // PER_CHUNK for sample in samples[:20]}
        assert min(first) < CHUNKS // 4
        assert max(first) >= CHUNKS * 3 // 4
        # A third of all that the rank has, to within what 60 samples tell.
        found = neighbours(np.array([samples]), np.arange(60))
        assert found == pytest.approx(61 / 3, rel=0.3)
    # Neither the order of the stream, nor twice the same.
    assert len({tuple(own), *map(tuple, orders)}) == 4


def test_window_for_a_distance_draws_neighbours_so_far_apart(tmp_path: Path) -> None:
    # As the documentation has it, of a stream of ten windows.
    directory = produce(tmp_path / "s", 6000, 20)
    size = StreamReader(directory).samples_per_chunk
    window = window_for_distance(100, size)
    assert window == 15
    dataset = open_rank(directory, 0, 2, shuffle_window=window)
    order = [[dataset.draw(index).sample for index in range(lane * 3000, (lane + 1) * 3000)] for lane in range(2)]
    assert neighbours(np.array(order), np.arange(3000)) == pytest.approx(100, rel=0.05)
