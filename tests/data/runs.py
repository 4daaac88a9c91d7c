"""Runs over small streams: what all ranks of a part draw, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lazyshard import LazyShardedDataset
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S

State = dict[str, Any]


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, **grouped({"dp_rank": rank, "dp_size": dp, "max_wait": DEADLINE_S, **options}))


def open_steps(directory: Path, *steps: Any, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return open_rank(directory, rank, dp, steps=steps, **options)


def open_ranks(directory: Path, dp: int, state: State | None = None, **options: Any) -> list[LazyShardedDataset]:
    ranks = []
    for rank in range(dp):
        dataset = open_rank(directory, rank, dp, **options)
        if state is not None:
            dataset.load_state_dict(state)
        ranks.append(dataset)
    return ranks


def read(ranks: list[LazyShardedDataset], draws: int | None = None) -> list[list[int]]:
    """Returns the ids of the next so many samples of each rank, None for what is left of the epoch."""
    return [[dataset[index]["id"] for index in dataset.rank_indices[:draws]] for dataset in ranks]


def part(dp: int, draws: int, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"dp": dp, "batch_size": 1, "draws": draws, "epoch": None, "trained": True, "skip": []}
    return known | {"first_step": 0, "draws_per_step": 0} | fields
