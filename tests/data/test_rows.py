"""Rows as they cross from DataLoader workers: parsed late, as they lie on disk, and with arrays."""

from __future__ import annotations

import os
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import lazyshard
from lazyshard import ChunkWriter, EncodeCache, LateRow, LazyShardedDataset, LazyShardedStream, as_tensor
from lazyshard.errors import ChunkCorrupt
from tests.data.options import grouped
from tests.data.runs import open_rank
from tests.data.workers import PICKLED
from tests.stream.arrays import expected, produce, values
from tests.stream.streams import produce as produce_rows
from tests.stream.streams import raised, refusal_of

LINE = b'{"id":7,"deep":[1,2]}\n'

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def kinds(rows: list[Any]) -> list[tuple[str, Any]]:
    """Collates: tells, of each row, what it is in the worker, and sends it on."""
    return [(type(row).__name__, row) for row in rows]


def opened(directory: Path, **options: Any) -> LazyShardedDataset:
    return open_rank(directory, **{"encode_fn": LateRow, "batch_size": 2, **options})


def test_a_row_is_a_mapping_that_nobody_parses_who_only_sends_it() -> None:
    row = LateRow(LINE)
    assert row == {"id": 7, "deep": [1, 2]}
    assert (row["id"], len(row), list(row), "deep" in row, "other" in row) == (7, 2, ["id", "deep"], True, False)
    assert repr(row) == "LateRow({'id': 7, 'deep': [1, 2]})"
    refusal_of(KeyError, "other", lambda: row["other"])
    sent = pickle.dumps(LateRow(LINE))
    assert LINE in sent
    assert type(pickle.loads(sent)) is dict
    # What was changed deep in it is sent.
    row["deep"].append(3)
    assert pickle.loads(pickle.dumps(row)) == {"id": 7, "deep": [1, 2, 3]}
    assert default_collate([LateRow(b'{"name":"a"}'), LateRow(b'{"name":"b"}')]) == {"name": ["a", "b"]}


SIZES = [200_000, 10, 70_000, 80_000, 10, 300_000, 65_000, 66_000]


@pytest.mark.parametrize(
    ("start", "window", "sizes"),
    [("fork", 0, SIZES), ("fork", 2, [1] * 12), (PICKLED, 2, SIZES), (PICKLED, 0, [1] * 12)],
)
def test_rows_are_late_in_workers_and_dicts_behind(tmp_path: Path, start: str, window: int, sizes: list[int]) -> None:
    dataset = opened(large(tmp_path / "s", sizes), shuffle_window=window)
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": kinds, "multiprocessing_context": start}
    found = [pair for batch in DataLoader(dataset, 2, sampler=dataset.rank_indices, **options) for pair in batch]
    assert {kind for kind, _ in found} == {"LateRow"}
    assert {type(row) for _, row in found} == {dict}
    assert sorted((row["id"], row["blob"]) for _, row in found) == [(i, chr(97 + i) * n) for i, n in enumerate(sizes)]
    assert dataset[0] == found[0][1]
    assert type(dataset[0]) is dict
    iterable: Any = StatefulDataLoader(lazyshard.LazyShardedIterable(dataset), batch_size=2, **options)
    assert [pair for batch in iterable for pair in batch] == found


def large(directory: Path, sizes: list[int], per_chunk: int = 2) -> Path:
    with ChunkWriter(directory, per_chunk) as writer:
        for i, size in enumerate(sizes):
            writer.write({"id": i, "blob": chr(97 + i) * size})
    return directory


def test_of_a_large_row_only_the_place_crosses(tmp_path: Path) -> None:
    def sent(rows: list[Any]) -> list[tuple[int, int]]:
        return [(len(ForkingPickler.dumps(row)), len(pickle.dumps(row))) for row in rows]

    dataset = opened(large(tmp_path / "s", [70_000, 10]))
    (batch,) = DataLoader(dataset, 2, num_workers=1, collate_fn=sent)
    between, kept = batch[0]
    assert between < 1_000, "a row of 70,000 bytes is to cross as a place"
    assert kept > 70_000, "what is pickled for another time or place holds the row itself"
    assert batch[1][0] < 1_000


def test_of_a_large_row_that_was_looked_at_the_row_crosses(tmp_path: Path) -> None:
    def changed(rows: list[Any]) -> list[Any]:
        rows[0]["more"].append(1)
        return rows

    with ChunkWriter(tmp_path / "s", 2) as writer:
        writer.write({"blob": "a" * 70_000, "more": [0]})
        writer.write({"blob": "b", "more": [0]})
    (batch,) = DataLoader(opened(tmp_path / "s"), 2, num_workers=1, collate_fn=changed)
    assert batch == [{"blob": "a" * 70_000, "more": [0, 1]}, {"blob": "b", "more": [0]}]


def test_a_large_row_is_refused_that_was_changed_after_its_worker_had_read_it(tmp_path: Path) -> None:
    directory = large(tmp_path / "s", [70_000, 70_000])

    def damaging(rows: list[Any]) -> list[Any]:
        with open(directory / "chunk_00000.jsonl", "r+b") as file:
            os.pwrite(file.fileno(), b"!", 40_000)
        return rows

    caught = raised(ChunkCorrupt, lambda: list(DataLoader(opened(directory), 2, num_workers=1, collate_fn=damaging)))
    assert (caught.file, caught.row, caught.byte) == (str(directory / "chunk_00000.jsonl"), 0, 0)


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
    found = dataset(one, steps=[lazyshard.Filter(lambda row: int(row["x"][0]) % 2 == 0)])
    assert {values(row)[0] for row in found.__getitems__(list(range(4)))} == {0, 2}
    assert [values(row) for row in LazyShardedStream(dataset(one))] == expected(0, 8)
    blend = lazyshard.BlendedDataset([(dataset(one), 0.5), (dataset(other), 0.5)], num_samples=16, batch_size=4)
    rows = blend.__getitems__(list(range(16)))
    assert sorted(values(row) for row in rows if "x" in row) == expected(0, 8)
    assert sorted(row["id"] for row in rows if "x" not in row) == list(range(8))


def test_tensor_shares_the_memory_of_its_array(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 1, arrays=True) as writer:
        bits = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy().view(lazyshard.BFLOAT16)
        writer.write({"x": np.arange(3), "b": bits})
    row = dataset(tmp_path, batch_size=1)[0]
    tensor, brain = as_tensor(row["x"]), as_tensor(row["b"])
    row["x"][0] = 9
    assert tensor.tolist() == [9, 1, 2]
    # That of a read-only one is a copy.
    row["x"].flags.writeable = False
    as_tensor(row["x"])[0] = 5
    assert row["x"].tolist() == [9, 1, 2]
    refusal_of(ValueError, "LateRow", dataset, tmp_path, encode_fn=LateRow)
    assert (brain.dtype, brain.tolist()) == (torch.bfloat16, [1.5, -2.0])
