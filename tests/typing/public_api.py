"""The public API as a typed user writes it: checked by mypy, never run. See test_public_api.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

from lazyshard import (
    BFLOAT16,
    BadRows,
    Batches,
    BlendedDataset,
    ChunkWriter,
    EncodeCache,
    Filter,
    LazyShardedDataset,
    LazyShardedIterable,
    LazyShardedSequences,
    LazyShardedStream,
    Map,
    MessageTransform,
    Order,
    Pack,
    Pad,
    Split,
    StreamReader,
    as_tensor,
    check_config,
    load,
    window_for_distance,
)


def write_and_read(directory: Path) -> StreamReader:
    with ChunkWriter(directory, 1000, arrays=True) as writer:
        assert_type(writer, ChunkWriter)
        writer.write({"input_ids": np.zeros(3, np.int32), "mel": [np.zeros(2, np.uint16).view(BFLOAT16)]})
        writer.write(b'{"text": "a row that is JSON already"}')
        writer.write({"text": "a row of known length"}, tokens=4)
    part = ChunkWriter(str(directory), samples_per_chunk=1000)
    part.close(end=False)
    reader = StreamReader(directory)
    assert_type((writer.arrays, reader.arrays), tuple[bool, bool])
    assert_type(as_tensor(reader.read(0)["input_ids"]), torch.Tensor)
    return reader


def encode(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_ids": list(row["text"].encode())}


def keep(row: dict[str, Any], index: int) -> bool:
    return index % 2 == 0


def train(directory: Path) -> None:
    full = LazyShardedDataset(
        str(directory),
        encode,
        steps=[Filter(keep, with_indices=True), Map("my_rows:add", remove_columns=["id"]), MessageTransform(dict)],
        dp_rank=0,
        dp_size=2,
        samples_per_chunk=1000,
        max_total_samples=1_000_000,
        num_samples=8,
        batch_size=4,
        order=Order(unit="chunk", layout="block", shuffle_window=0, seed=0, micro_batches_per_step=2),
        max_wait=600.0,
        bad_rows=BadRows(limit=None),
        cache=EncodeCache(Path("/dev/shm/cache"), 10**9, {"max_length": 512, "template": None}, memory_bytes=0),
        consumer="run",
    )
    as_torch_knows_it: Dataset[Any] = LazyShardedDataset(directory)
    DataLoader(as_torch_knows_it, batch_size=4)
    full.set_epoch(1)
    assert_type(window_for_distance(10_000, full.samples_per_chunk), int)
    assert_type(len(full), int)
    stats = full.stats()
    assert_type((stats.dropped, stats.encoded, stats.from_cache, stats.filled), tuple[int, int, int, int])


def train_by_a_file(file: Path, saved: dict[str, Any]) -> None:
    assert_type(check_config(file)[0].line, int | None)
    loaded = load(file, dp_rank=0, dp_size=2)
    loaded.load_state_dict(saved)
    assert_type(loaded.loader, DataLoader[Any])
    assert_type(loaded.state_dict(loaded.consumed + 8), dict[str, Any])
    loaded.set_epoch(1)
    load({"version": 1, "datasets": [{"path": directory} for directory in ("chat", "code")]})


def resume(directory: Path, saved: dict[str, Any]) -> None:
    dataset = LazyShardedDataset(directory, batch_size=4, consumer="run", order=Order(micro_batches_per_step=1))
    dataset.load_state_dict(saved)
    dataset.skip(samples=[(0, 10)], chunks=[(4, 5)], steps=[(100, 110)])
    assert_type((dataset.consumed, dataset.epoch, dataset.unit), tuple[int, int, int])
    assert_type((dataset.rank_indices, dataset.state_dict()), tuple[range, dict[str, Any]])
    assert_type(dataset.commit(8, last_epoch=True, keep=[dataset.state_dict(4)], take_over=False), bool)

    batches = dataset.batches(epochs=2, num_workers=2, collate_fn=list)
    assert_type(batches, Batches)
    batches.load_state_dict(saved)
    assert_type(next(iter(batches)), Any)
    assert_type((batches.step, batches.consumed, batches.epoch, batches.step_complete), tuple[int, int, int, bool])
    assert_type((batches.state_dict(), batches.commit()), tuple[dict[str, Any], bool])

    samples = LazyShardedIterable(dataset)
    samples.load_state_dict(dataset.state_dict(8))
    samples.set_epoch(1)
    assert_type((samples.dataset, samples.state_dict()), tuple[LazyShardedDataset, dict[str, Any]])
    DataLoader(samples, batch_size=4)


def pack_while_training(directory: Path, saved: dict[str, Any]) -> None:
    for form in (Pack(8192), Pad(4096, token=0), Split(size=4096, bos=1, eos=2, every_bos=None, overlap=0)):
        sequences = LazyShardedSequences(
            directory,
            encode,
            form=form,
            batch_size=2,
            dp_rank=0,
            dp_size=2,
            window=8,
            seed=0,
            at_end="complete",
            too_long="drop",
            max_wait=600.0,
            bad_rows=BadRows("raise", limit=100),
            micro_batches_per_step=4,
        )
        sequences.load_state_dict(saved)
        sequences.skip(samples=[(3, 5)], chunks=[(7, 8)], steps=[(2, 3)])
        sequences.set_epoch(1)
        assert_type(sequences.state_dict(8), dict[str, Any])
        assert_type((sequences.window, sequences.consumed), tuple[int, int])
        DataLoader(sequences, batch_size=2)


def without_a_length(directory: Path, saved: dict[str, Any]) -> None:
    stream = LazyShardedStream(LazyShardedDataset(directory, batch_size=4), at_end="loop")
    stream.load_state_dict(saved)
    stream.set_epoch(stream.epoch)
    assert_type((stream.dataset, stream.consumed), tuple[LazyShardedDataset, int])
    assert_type(stream.state_dict(8), dict[str, Any])
    assert_type(stream.commit(8, last_epoch=True, keep=[saved]), bool)
    DataLoader(stream, batch_size=4)
    blended = LazyShardedStream(BlendedDataset([(LazyShardedDataset(directory), 1.0)]))
    assert_type(blended.dataset, BlendedDataset)
