"""The public API as a typed user writes it: checked by mypy, never run. See test_public_api.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

from lazyshard import ChunkWriter, LazyShardedDataset, LazyShardedIterable, StreamReader


def write_a_stream(directory: Path) -> None:
    with ChunkWriter(directory, 1000) as writer:
        assert_type(writer, ChunkWriter)
        writer.write({"text": "a row"})
        writer.write(b'{"text": "a row that is JSON already"}')
        writer.write({"text": "a row of known length"}, tokens=4)


def write_a_part_of_a_stream(directory: str) -> None:
    writer = ChunkWriter(directory, samples_per_chunk=1000)
    writer.write({"text": "a row"})
    writer.close(end=False)
    writer.close()


def read_a_stream(directory: Path) -> StreamReader:
    return StreamReader(directory)


def encode(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_ids": list(row["text"].encode())}


def train(directory: Path) -> None:
    plain = LazyShardedDataset(directory)
    as_torch_knows_it: Dataset[Any] = plain
    assert_type(len(plain), int)

    full = LazyShardedDataset(
        str(directory),
        encode,
        dp_rank=0,
        dp_size=2,
        samples_per_chunk=1000,
        max_total_samples=1_000_000,
        num_samples=8,
        batch_size=4,
        unit="chunk",
        layout="block",
        shuffle_window=0,
        seed=0,
        max_wait=600.0,
        on_bad_sample="substitute",
        max_bad_samples=100,
        cache_bytes=0,
        consumer="run",
        micro_batches_per_step=2,
    )
    full.set_epoch(1)

    for batch in DataLoader(as_torch_knows_it, batch_size=4):
        print(batch)


def resume(directory: Path, saved: dict[str, Any]) -> None:
    dataset = LazyShardedDataset(directory, batch_size=4, consumer="run", micro_batches_per_step=1)
    dataset.load_state_dict(saved)
    dataset.skip(samples=[(0, 10)], chunks=[(4, 5)], steps=[(100, 110)])
    assert_type(dataset.consumed, int)
    assert_type(dataset.epoch, int)
    assert_type(dataset.rank_indices, range)
    assert_type(dataset.state_dict(), dict[str, Any])
    assert_type(dataset.commit(8, last_epoch=True, keep=[dataset.state_dict(4)], take_over=False), bool)

    samples = LazyShardedIterable(dataset)
    samples.load_state_dict(dataset.state_dict(8))
    samples.set_epoch(1)
    assert_type(samples.dataset, LazyShardedDataset)
    assert_type(samples.state_dict(), dict[str, Any])
    for batch in DataLoader(samples, batch_size=4):
        print(batch)
