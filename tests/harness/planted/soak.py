"""Mistakes of which a soak must find each: installed in its process before all else, so that its ranks have them."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from lazyshard import LazyShardedDataset
from lazyshard.stream import StreamReader
from tests.harness.planted.planting import around
from tests.harness.soak import job as soak_job


class Mutant(NamedTuple):
    install: Callable[[], None]  # makes it
    kinds: frozenset[str]  # what a soak may find first


def _leak_descriptors(opened: Any, self: StreamReader, number: int) -> Any:
    chunk = opened(self, number)
    os.open(chunk.path, os.O_RDONLY)
    return chunk


def _acknowledge_early(commit: Any, dataset: LazyShardedDataset, consumed: int, older: list[dict[str, Any]]) -> Any:
    step = dataset.rank.dp_size * dataset._states.order.batch_size
    return commit(dataset, consumed + 40 * step, [])


def _lose_a_sample(lines: Any, self: StreamReader, first: int, stop: int, at_least: int = 1) -> Any:
    """A reader skips a sample now and then, not over the end of a chunk."""
    lost = first % 97 == 96 and (first + 1) % self.samples_per_chunk != 0
    return lines(self, first + lost, max(stop, first + lost + 1), at_least)


MUTANTS: Final[dict[str, Mutant]] = {
    "leaked descriptors": Mutant(partial(around, StreamReader, "_open", _leak_descriptors), frozenset({"leak"})),
    "early acknowledgement": Mutant(partial(around, soak_job, "commit", _acknowledge_early), frozenset({"gone"})),
    "lost sample": Mutant(
        partial(around, StreamReader, "lines_published", _lose_a_sample), frozenset({"lost", "order", "twice"})
    ),
}
