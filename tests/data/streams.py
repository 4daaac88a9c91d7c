"""Passes over small streams, and what they are to draw, as lists."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset, LazyShardedStream
from lazyshard.plan.course import AtEnd
from tests.data.runs import continued, open_rank
from tests.data.workers import loader
from tests.plan import oracle

Stream = LazyShardedStream[LazyShardedDataset]


def open_stream(
    directory: Path, rank: int = 0, dp: int = 1, *, at_end: AtEnd = "drop", state: Any = None, **options: Any
) -> Stream:
    return continued(LazyShardedStream(open_rank(directory, rank, dp, **options), at_end=at_end), state)


def loader_of(stream: Any, workers: int = 0, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return loader(stream, None, workers, batch_size=batch_size, **options)


def batches(stream: Any, workers: int = 0, batch_size: int = 2, **options: Any) -> list[list[int]]:
    return list(loader_of(stream, workers, batch_size, **options))


def in_step(streams: Iterable[Any], workers: int) -> list[list[list[int]]]:
    """Returns the batches of all ranks, read step by step as they train; none has one more than another."""
    steps = list(zip(*(loader_of(stream, workers) for stream in streams), strict=True))
    return [list(rank) for rank in zip(*steps, strict=True)]


def expected(
    total: int, dp: int, batch_size: int, *, unit: int = 4, window: int = 0, epoch: int = 0, at_end: AtEnd = "drop"
) -> list[list[int]]:
    """Returns what each rank draws of an epoch, by the oracle; of a stream in chunks of four, if not said otherwise."""
    dealt = oracle.dealt(dp, unit, 0, total)
    lanes = [oracle.shuffled(lane, window, 0, epoch, number) for number, lane in enumerate(dealt)]
    return oracle.ended(lanes, batch_size, at_end)


def in_batches(samples: list[int], size: int) -> list[list[int]]:
    return [samples[first : first + size] for first in range(0, len(samples), size)]
