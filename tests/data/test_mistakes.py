"""Mistakes that are easily made in a training script, and what the data set says of them."""

from __future__ import annotations

import gc
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import lazyshard
from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, Order
from lazyshard.errors import RankInvalid, StreamMissing
from tests.data.workers import DEADLINE_S, ids


def produce(directory: Path, samples: int, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, 4)
    for number in range(writer.published_samples, samples):
        writer.write({"id": number})
    writer.close(end=end)
    return directory


def test_end_is_found_in_every_epoch_and_not_before(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 8, end=False)
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, max_total_samples=100, batch_size=2)
    assert len(dataset) == 100
    produce(stream, 12)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert [index for index in dataset.rank_indices if dataset.in_epoch(index)] == list(range(12))


def test_later_epoch_of_an_ended_stream_is_whole(tmp_path: Path) -> None:
    dataset = LazyShardedDataset(produce(tmp_path / "s", 8), dp_rank=0, dp_size=1)
    dataset.set_epoch(3)
    assert all(map(dataset.in_epoch, dataset.rank_indices))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:Exception in thread QueueFeederThread:pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DataLoader, {}),
        (DataLoader, {"num_workers": 2}),
        (DataLoader, {"shuffle": True}),
        (DataLoader, {"batch_size": None}),
        (StatefulDataLoader, {}),
        (StatefulDataLoader, {"shuffle": True}),
    ],
)
def test_a_forgotten_sampler_is_refused_before_the_first_batch(
    kind: Any, options: dict[str, Any], rank: int, tmp_path: Path
) -> None:
    """On rank 0 too, whose own indices are the first ones."""
    dataset = LazyShardedDataset(produce(tmp_path / "s", 16), dp_rank=rank, dp_size=2, batch_size=2)
    blend = BlendedDataset([(LazyShardedDataset(tmp_path / "s", dp_rank=rank, dp_size=2), 1)], batch_size=2)
    for data, name in ((dataset, "dataset"), (blend, "blend")):
        loader = kind(data, **{"batch_size": 2, "collate_fn": ids, **options})
        assert len(loader) > 1
        with pytest.raises(RankInvalid) as raised:
            next(iter(loader))
        assert (raised.value.dp_rank, raised.value.dp_size) == (rank, 2)
        assert f"sampler={name}.rank_indices" in str(raised.value)
        assert f"{name}.batches(...)" in str(raised.value)
        del loader, raised
    # Torch has started its workers by then, and ends them with the error.
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(DEADLINE_S)


@pytest.mark.parametrize("workers", [0, 2])
def test_who_deals_samples_out_or_reads_them_all_is_not_refused(workers: int, tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 16)
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": ids, "num_workers": workers}
    alone = LazyShardedDataset(stream, dp_rank=0, dp_size=1)
    assert [*chain.from_iterable(DataLoader(alone, **options))] == list(range(16))
    ranks = [
        LazyShardedDataset(stream, dp_rank=r, dp_size=2, batch_size=2, order=Order(layout="strided")) for r in (0, 1)
    ]
    assert [[dataset[index]["id"] for index in range(2)] for dataset in ranks] == [[0, 4], [0, 4]]
    for rank, dataset in enumerate(ranks):
        share: Any = {"num_processes": 2, "process_index": rank, "rng_types": []}
        for loader in (
            DataLoader(dataset, sampler=DistributedSampler(dataset, 2, rank, shuffle=True), **options),
            prepare_data_loader(DataLoader(dataset, shuffle=True, **options), **share),
            prepare_data_loader(DataLoader(dataset, **options), **share),
        ):
            assert len([*chain.from_iterable(loader)]) == 8


@pytest.mark.parametrize("window", [0, 1])
def test_forgotten_sampler_is_told_once_by_the_rank_that_reads_another_ones_part(
    window: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = produce(tmp_path / "s", 16)
    first, second = (
        LazyShardedDataset(stream, dp_rank=r, dp_size=2, order=Order(shuffle_window=window)) for r in (0, 1)
    )
    for index in first.rank_indices:
        assert first[index]
    assert caplog.messages == []
    for index in first.rank_indices:
        assert second[index]
    assert len(caplog.messages) == 1
    assert "rank 1 of 2 was asked for index 0, which is rank 0's" in caplog.messages[0]
    assert "did you forget `sampler=dataset.rank_indices`" in caplog.messages[0]


def test_another_batch_size_than_the_loaders_is_told_on_a_live_stream_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = produce(tmp_path / "s", 16, end=False)
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, max_total_samples=100, batch_size=2)
    for start in (0, 2):
        assert len(dataset.__getitems__([start, start + 1])) == 2
    assert caplog.messages == []
    for start in (4, 8):
        assert len(dataset.__getitems__(list(range(start, start + 4)))) == 4
    assert len(caplog.messages) == 1
    assert "asked for a batch of 4, batch_size is 2" in caplog.messages[0]
    caplog.clear()
    ended = LazyShardedDataset(produce(stream, 16), dp_rank=0, dp_size=1, batch_size=2)
    assert len(ended.__getitems__(list(range(4)))) == 4
    assert caplog.messages == []


def test_going_on_into_the_next_epoch_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s", 8, end=False)
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, max_total_samples=20)
    assert len(dataset) == 20
    produce(stream, 10)
    assert [dataset[index]["id"] for index in range(20)] == [*range(10), *range(10)]
    assert len(caplog.messages) == 1
    assert "has ended with 10 samples; what is read from here on is the next epoch" in caplog.messages[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_asks_where_the_epoch_ends_is_told_nothing(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The question itself and workers that read ahead draw of the next epoch too."""
    stream = produce(tmp_path / "s", 40, end=False)
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, batch_size=2, max_total_samples=100)
    loader = DataLoader(dataset, sampler=dataset.rank_indices, batch_size=2, num_workers=workers)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        if not dataset.in_epoch(dataset.rank_indices[step * 2]):
            break
        seen += batch["id"].tolist()
        if step == 0:
            produce(stream, 44)
    assert seen == list(range(44))
    assert "next epoch" not in capfd.readouterr().err
    assert caplog.messages == []


@pytest.mark.parametrize("end", [True, False])
def test_samples_past_max_total_samples_are_told(end: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = produce(tmp_path / "s", 16, end=end)
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, max_total_samples=6)
    assert [dataset[index]["id"] for index in range(len(dataset))] == list(range(6))
    assert caplog.messages == [
        f"{stream}: 16 samples are published, but max_total_samples is 6: those past it are not drawn"
    ]


def test_name_of_a_data_set_on_a_hub_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "org/name"
    for call in (
        lambda: LazyShardedDataset(name, dp_rank=0, dp_size=1),
        lambda: lazyshard.load({"version": 1, "datasets": [{"path": name}]}, dp_rank=0, dp_size=1),
    ):
        with pytest.raises(StreamMissing, match="on a hub") as caught:
            call()
        assert str(caught.value.directory).endswith(name)
