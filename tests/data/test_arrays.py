"""Rows with arrays in training: by the data set, its iterable forms, workers, blends and encoders."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lazyshard import (
    BFLOAT16,
    BlendedDataset,
    ChunkWriter,
    EncodeCache,
    Filter,
    LateRow,
    LazyShardedDataset,
    LazyShardedStream,
    as_tensor,
)
from tests.data.options import grouped
from tests.data.workers import PICKLED
from tests.stream.arrays import expected, produce, values
from tests.stream.streams import produce as produce_rows


def dataset(directory: Path, *given: Any, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, *given, **grouped({"dp_rank": 0, "dp_size": 1, "batch_size": 4} | options))


def encode(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "x": as_tensor(row["x"]), "n": as_tensor(row["n"][0])}


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle_window": 2}, {"shuffle_window": 20}, {"unit": 1}, {"cache": EncodeCache(memory_bytes=1 << 20)}],
    ids=str,
)
def test_every_order_gives_rows_with_their_arrays(options: dict[str, Any], tmp_path: Path) -> None:
    found = dataset(produce(tmp_path, 40), **options)
    for epoch in range(2):
        found.set_epoch(epoch)
        one_by_one = [values(found[index]) for index in found.rank_indices]
        batches = [list(map(values, found.__getitems__(list(range(at, at + 4))))) for at in range(0, 40, 4)]
        assert sorted(one_by_one) == expected(0, 40)
        assert [row for batch in batches for row in batch] == one_by_one


def test_workers_send_arrays_that_can_be_written_to(tmp_path: Path) -> None:
    one = dataset(produce(tmp_path, 8))
    loader = DataLoader(one, batch_size=4, num_workers=1, collate_fn=list, multiprocessing_context=PICKLED)
    rows = [row for batch in loader for row in batch]
    assert [values(row) for row in rows] == expected(0, 8)
    for row in rows:
        row["x"][0] = 7


def test_encoded_batches_are_tensors_made_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(DataLoader(dataset(produce(tmp_path, 8), encode), batch_size=4))
    assert [batch["x"].tolist() for batch in batches] == [
        [[number, -1] for number in range(at, at + 4)] for at in (0, 4)
    ]
    assert [batch["n"].dtype for batch in batches] == [torch.float16] * 2


def test_steps_iterable_form_and_blend_give_arrays(tmp_path: Path) -> None:
    one, other = produce(tmp_path / "one", 8), produce_rows(tmp_path / "other", 8)
    found = dataset(one, steps=[Filter(lambda row: int(row["x"][0]) % 2 == 0)])
    assert {values(row)[0] for row in found.__getitems__(list(range(4)))} == {0, 2}
    assert [values(row) for row in LazyShardedStream(dataset(one))] == expected(0, 8)
    blend = BlendedDataset([(dataset(one), 0.5), (dataset(other), 0.5)], num_samples=16, batch_size=4)
    rows = blend.__getitems__(list(range(16)))
    assert sorted(values(row) for row in rows if "x" in row) == expected(0, 8)
    assert sorted(row["id"] for row in rows if "x" not in row) == list(range(8))


def test_tensor_shares_the_memory_of_its_array(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 1, arrays=True) as writer:
        bits = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy().view(BFLOAT16)
        writer.write({"x": np.arange(3), "b": bits})
    row = dataset(tmp_path, batch_size=1)[0]
    tensor, brain = as_tensor(row["x"]), as_tensor(row["b"])
    row["x"][0] = 9
    assert tensor.tolist() == [9, 1, 2]
    # That of a read-only one is a copy.
    row["x"].flags.writeable = False
    as_tensor(row["x"])[0] = 5
    assert row["x"].tolist() == [9, 1, 2]
    with pytest.raises(ValueError, match="LateRow"):
        dataset(tmp_path, encode_fn=LateRow)
    assert (brain.dtype, brain.tolist()) == (torch.bfloat16, [1.5, -2.0])
