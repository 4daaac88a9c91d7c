"""A stream whose rows were dealt by cost: an order that undoes it is said once, with the way out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lazyshard import ChunkWriter, LazyShardedDataset, Order
from tests.data.options import grouped

MADE = {"recipe": {"balance": 2, "micro_batch_size": 2, "length_field": "length", "cost_per_token": 1.0}}


def produce(directory: Path, source: Any = MADE) -> Path:
    with ChunkWriter(directory, 4) as writer:
        for number in range(16):
            writer.write({"id": number}, source=source)
    return directory


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in found if "dealt by cost" in text]


def read(directory: Path, dp_rank: int = 0, **more: Any) -> None:
    arguments = {"batch_size": 2, "shuffle_window": 0} | more
    dataset = LazyShardedDataset(directory, dp_rank=dp_rank, dp_size=2, **grouped(arguments))
    for index in dataset.rank_indices:
        dataset[index]


def test_a_window_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s")
    read(stream, shuffle_window=2)
    assert warnings(caplog) == [
        f"{stream}: its rows were dealt by cost (lazyshard-producer --balance 2), so that all ranks have as much to do "
        f"in a step, and this order undoes it: shuffle_window=2 puts rows into other steps, give 0 (in ms-swift "
        f"--sharded_lazy_shuffle_window 0)"
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"unit": "sample"}, "it: unit='sample' gives ranks other rows, give 'chunk'"),
        ({"batch_size": 3}, "it: batch_size=3 is no multiple of the micro batches of 2 that cost the same"),
    ],
)
def test_other_units_and_batches_are_said(
    arguments: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(produce(tmp_path / "s"), **arguments)
    (warning,) = warnings(caplog)
    assert reason in warning


def test_the_order_in_which_rows_were_dealt_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s")
    read(stream)
    read(stream, batch_size=4)
    read(stream, unit=4)
    # One rank says it for all.
    read(stream, dp_rank=1, shuffle_window=2)
    assert warnings(caplog) == []


def test_other_streams_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(produce(tmp_path / "s", {"recipe": {"shuffle": 8}}), shuffle_window=2)
    assert warnings(caplog) == []


def test_workers_say_it_once(tmp_path: Path) -> None:
    stream, log = produce(tmp_path / "s"), tmp_path / "log"
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=2, batch_size=2, order=Order(shuffle_window=1))
    # Forked workers write to the same file.
    handler = logging.FileHandler(log)
    logging.getLogger("lazyshard").addHandler(handler)
    try:
        for epoch in range(2):
            dataset.set_epoch(epoch)
            loader = DataLoader(dataset, sampler=dataset.rank_indices, batch_size=2, num_workers=1, collate_fn=list)
            assert len(list(loader)) == 4
    finally:
        logging.getLogger("lazyshard").removeHandler(handler)
        handler.close()
    assert log.read_text().count("its rows were dealt by cost") == 1
