"""Memory does not grow with the stream: what is held late is what was held early."""

import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import BlendedDataset, ChunkWriter, LateRow, LazyShardedStream, StreamReader
from tests.data.runs import open_rank

SAMPLES: Final = 4_400
PER_CHUNK: Final = 3
LOOKS: Final = (1_608, 2_508, 3_408, 4_308)
"""After so many samples it is looked how much is held, always at the end of a window. By the first look 256 chunks of
each stream are open, also of the two that are blended."""

ALLOWED: Final = 2.0
"""Bytes a sample by which Python's memory may grow: a leak of one object of a sample takes 16 at least."""

pytestmark = pytest.mark.full

Row = dict[str, Any]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    for name, samples in (("long", SAMPLES), ("other", SAMPLES // 2)):
        assert sum(1 for _ in written(folder / name, samples)) == samples
    return folder / "long"


def written(directory: Path, samples: int = SAMPLES) -> Iterator[object]:
    with ChunkWriter(directory, PER_CHUNK) as writer:
        for number in range(samples):
            yield writer.write({"id": number, "text": "x" * 50})


def each(dataset: Any) -> Iterator[object]:
    return (dataset[index] for index in range(SAMPLES))


def blended(directory: Path) -> BlendedDataset:
    return BlendedDataset([(open_rank(directory), 0.5), (open_rank(directory.with_name("other")), 0.5)])


READINGS: Final[dict[str, Callable[[Path], Iterator[object]]]] = {
    "reader": lambda directory: iter(StreamReader(directory)),
    "writer": lambda directory: written(directory.with_name("again")),
    "data set": lambda directory: each(open_rank(directory)),
    "shuffled": lambda directory: each(open_rank(directory, shuffle_window=4)),
    "late parsing": lambda directory: each(open_rank(directory, encode_fn=LateRow)),
    "iterable": lambda directory: iter(LazyShardedStream(open_rank(directory), at_end="drop")),
    "blend": lambda directory: each(blended(directory)),
}


def growth(samples: Iterator[object]) -> float:
    """Returns by how many bytes a sample the memory grows that Python holds.

    The least between two looks: what is imported or cached once is no leak, which is seen between all of them.
    """
    held: list[int] = []
    tracemalloc.start()
    try:
        for before, look in itertools.pairwise((0, *LOOKS)):
            assert sum(1 for _ in itertools.islice(samples, look - before)) == look - before
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    spans = zip(itertools.pairwise(held), itertools.pairwise(LOOKS), strict=True)
    return min((later - early) / (stop - first) for (early, later), (first, stop) in spans)


@pytest.mark.parametrize("name", READINGS)
def test_memory_does_not_grow_with_the_samples_that_were_read(name: str, stream: Path) -> None:
    assert growth(READINGS[name](stream)) < ALLOWED


def test_a_planted_leak_of_an_integer_a_sample_is_found_by_far(stream: Path) -> None:
    kept: list[int] = []

    def encode(row: Row) -> Row:
        kept.append(row["id"])
        return row

    assert growth(each(open_rank(stream, encode_fn=encode))) > 10 * ALLOWED
