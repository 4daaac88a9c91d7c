"""Ours in `scripts/bench_loaders`: `LazyShardedDataset` without an encoder, every row's digest checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset
from scripts.benchmarks.bench_loaders_cases import BATCH, WINDOW_CHUNKS, WORKERS, Opened, Settings


def lazyshard(settings: Settings, late: bool = True) -> tuple[Opened, bool]:
    """One rank of one: `ds[i]`, `ds.__getitems__` in batches where shuffled, or torch's DataLoader.

    Args:
        settings: what to read, and how.
        late: whether rows cross from the workers as they lie on disk, to be parsed in the main process.
    """
    drawn = settings.drawn()
    batched = settings.in_workers or settings.shuffled

    def opened() -> Iterable[Any]:
        window = WINDOW_CHUNKS if settings.shuffled else 0
        dataset = LazyShardedDataset(
            settings.data, batch_size=BATCH, dp_rank=0, dp_size=1, shuffle_window=window, late_parsing=late
        )
        if settings.in_workers:
            return DataLoader(
                dataset, BATCH, sampler=dataset.rank_indices, num_workers=WORKERS, collate_fn=list, drop_last=False
            )
        if batched:
            batches = (list(range(at, min(at + BATCH, len(drawn)))) for at in range(0, len(drawn), BATCH))
            return map(dataset.__getitems__, batches)
        return map(dataset.__getitem__, drawn)

    return opened, batched


def parsed_in_workers(settings: Settings) -> tuple[Opened, bool]:
    """The same with the default: workers hand out dicts, which are pickled."""
    return lazyshard(settings, late=False)


READERS = {"lazyshard": lazyshard, "lazyshard-dicts": parsed_in_workers}
