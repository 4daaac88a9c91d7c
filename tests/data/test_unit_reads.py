"""One file for many ranks: each opens it once and reads the bytes of its own rows, and no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset, Order
from tests.data.workers import loader

RANKS, BATCH, ROWS = 8, 4, 320


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose rows all have other lengths, so that bytes tell which rows were read."""
    directory = tmp_path_factory.mktemp("one") / "s"
    with ChunkWriter(directory, ROWS) as writer:
        for number in range(ROWS):
            writer.write({"id": number, "text": "x" * number})
    return directory


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Places and sizes of what is read of the file from now on."""
    found: list[tuple[int, int]] = []
    real = os.pread

    def counted(fd: int, size: int, at: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl"):
            found.append((at, at + size))
        return real(fd, size, at)

    monkeypatch.setattr(os, "pread", counted)
    return found


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges in order, neighbours made one; fails where two overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        assert not found or found[-1][1] <= start, "bytes that were read twice"
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


@pytest.mark.parametrize("layout", ["block", "strided"])
@pytest.mark.parametrize(
    ("unit", "reads"),
    [
        # Forty rows of each rank. No rank has a chunk, so they come one by one.
        ("chunk", 40),
        ("sample", 40),
        ("batch", 10),
        ("auto", 10),
        # An eighth of the file each, read ahead up to its end.
        (40, 1),
    ],
)
def test_each_rank_reads_the_bytes_of_its_rows_once(
    stream: Path, unit: Any, reads: int, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reads_of(monkeypatch)
    everything: list[tuple[int, int]] = []
    for rank in range(RANKS):
        dataset = LazyShardedDataset(
            stream, dp_rank=rank, dp_size=RANKS, batch_size=BATCH, order=Order(unit=unit, layout=layout), max_wait=0
        )
        found.clear()
        drawn = [number for batch in loader(dataset, dataset.rank_indices, 0, batch_size=BATCH) for number in batch]
        chunk = dataset.reader.chunk(0)
        assert joined(found) == joined([(chunk.offset(number), chunk.offset(number + 1)) for number in drawn])
        if unit != 40:
            assert len(found) == reads
        else:
            assert reads <= len(found) < 10
        assert dataset.stats().chunks_opened == 1
        everything += found
    assert joined(everything) == [(0, chunk.size)]


@pytest.mark.parametrize("unit", ["chunk", "batch", "sample"])
def test_shuffled_rows_are_read_by_themselves_where_many_ranks_share_a_file(
    stream: Path, unit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reads_of(monkeypatch)
    dataset = LazyShardedDataset(
        stream, dp_rank=3, dp_size=RANKS, batch_size=BATCH, order=Order(unit=unit, shuffle_window=1), max_wait=0
    )
    drawn = [number for batch in loader(dataset, dataset.rank_indices, 0, batch_size=BATCH) for number in batch]
    chunk = dataset.reader.chunk(0)
    assert joined(found) == joined([(chunk.offset(number), chunk.offset(number + 1)) for number in drawn])
