"""Mistakes of which a soak must find each: installed in its process before all else, so that its ranks have them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lazyshard import LazyShardedDataset
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import Chunk
from tests.harness.soak import rank as soak_rank


@dataclass(frozen=True, slots=True)
class Mutant:
    install: Callable[[], None]  # makes it
    kinds: frozenset[str]  # what a soak may find first


def _leak_descriptors() -> None:
    """The reader leaves a descriptor open with every chunk."""
    original = StreamReader._open

    def opened(self: StreamReader, number: int) -> Chunk:
        chunk = original(self, number)
        os.open(chunk.path, os.O_RDONLY)
        return chunk

    StreamReader._open = opened  # type: ignore[method-assign]


def _acknowledge_early() -> None:
    """Rank 0 tells the producer of more than is in a checkpoint."""
    original = soak_rank.commit

    def commit(dataset: LazyShardedDataset, consumed: int, older: list[dict[str, Any]]) -> bool:
        step = dataset.rank.dp_size * dataset._draws.order.batch_size
        return original(dataset, consumed + 40 * step, [])

    soak_rank.commit = commit


def _lose_a_sample() -> None:
    original = StreamReader.lines_published

    def lines_published(self: StreamReader, first: int, stop: int, at_least: int = 1) -> list[bytes]:
        # Not over the end of a chunk.
        lost = first % 97 == 96 and (first + 1) % self.samples_per_chunk != 0
        return original(self, first + lost, max(stop, first + lost + 1), at_least)

    StreamReader.lines_published = lines_published  # type: ignore[method-assign]


MUTANTS: Final[dict[str, Mutant]] = {
    "leaked descriptors": Mutant(_leak_descriptors, frozenset({"leak"})),
    "early acknowledgement": Mutant(_acknowledge_early, frozenset({"gone"})),
    "lost sample": Mutant(_lose_a_sample, frozenset({"lost", "order", "twice"})),
}
