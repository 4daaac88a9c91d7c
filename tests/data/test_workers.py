"""The data set in DataLoader workers, forked and spawned: every sample once, own chunks only, one epoch for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

from lazyshard import LazyShardedDataset
from lazyshard.data.settings import LayoutName
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, PICKLED, RecordOpened, ids, loader
from tests.stream.streams import produce


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, dp_rank=rank, dp_size=dp, max_wait=DEADLINE_S, **grouped(options))


def flat(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 chunks of 4, and a tail of 7 in two more."""
    return produce(tmp_path_factory.mktemp("stream") / "s", 55, 4)


@pytest.mark.parametrize("layout", ["block", "strided"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_ranks_with_workers_read_every_sample_once(stream: Path, layout: LayoutName, workers: int) -> None:
    read: list[int] = []
    for rank in range(3):
        dataset = open_rank(stream, rank, 3, batch_size=2, layout=layout)
        batches = list(loader(dataset, dataset.rank_indices, workers, batch_size=2))
        assert len(batches) == 9
        read += flat(batches)
    assert len(read) == 54
    assert len(set(read)) == 54
    assert set(read) <= set(range(55))


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_yield_the_order_of_one_process(stream: Path, workers: int) -> None:
    dataset = open_rank(stream, 1, 3, batch_size=2, shuffle_window=1)
    expected = [row["id"] for row in map(dataset.__getitem__, dataset.rank_indices)]
    assert flat(loader(dataset, dataset.rank_indices, workers, batch_size=2)) == expected
    assert sorted(expected[:4]) == [4, 5, 6, 7]


@pytest.mark.parametrize("workers", [0, 3])
def test_loader_without_batches_yields_every_sample_once(stream: Path, workers: int) -> None:
    dataset = open_rank(stream)
    rows = list(loader(dataset, dataset.rank_indices, workers, batch_size=None, collate_fn=None))
    assert rows == [{"id": i} for i in range(55)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("layout", ["block", "strided"])
@pytest.mark.parametrize("window", [0, 2])
def test_workers_of_a_rank_open_no_file_of_another_ranks_chunk(
    stream: Path, tmp_path: Path, layout: LayoutName, workers: int, window: int
) -> None:
    for rank in range(3):
        opened = RecordOpened(tmp_path / str(rank))
        dataset = open_rank(stream, rank, 3, layout=layout, shuffle_window=window)
        list(loader(dataset, dataset.rank_indices, workers, batch_size=2, worker_init_fn=opened))
        chunks = set(opened.chunks())
        assert {chunk for chunk in chunks if chunk < 12} == set(range(rank, 12, 3))
        # The tail is dealt row by row.
        assert chunks - set(range(12)) <= {12, 13}


@pytest.mark.parametrize("workers", [0, 3])
def test_ranks_with_the_layout_that_does_not_fit_read_every_sample_once(stream: Path, workers: int) -> None:
    read: list[int] = []
    for rank in range(3):
        dataset = open_rank(stream, rank, 3, layout="block")
        read += flat(loader(dataset, range(rank, len(dataset), 3), workers, batch_size=2))
    assert len(read) == len(set(read)) == 54


def epochs_in_one_process(directory: Path, rank: int, dp: int, epochs: int) -> list[list[int]]:
    orders = []
    for epoch in range(epochs):
        dataset = open_rank(directory, rank, dp, shuffle_window=2)
        dataset.set_epoch(epoch)
        orders.append([dataset[index]["id"] for index in dataset.rank_indices])
    assert orders[0] != orders[1] != orders[2]
    return orders


@pytest.mark.parametrize("persistent", [True, False])
def test_forked_workers_see_the_epoch_that_is_set(stream: Path, persistent: bool) -> None:
    dataset = open_rank(stream, 0, 2, shuffle_window=2)
    batches = loader(dataset, dataset.rank_indices, 3, batch_size=2, persistent_workers=persistent)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(flat(batches))
    assert orders == epochs_in_one_process(stream, 0, 2, 3)


def test_spawned_workers_see_the_epoch_and_open_their_own_chunks_only(stream: Path, tmp_path: Path) -> None:
    opened = RecordOpened(tmp_path / "opened")
    dataset = open_rank(stream, 0, 2, shuffle_window=2)
    batches = loader(
        dataset,
        dataset.rank_indices,
        2,
        batch_size=2,
        persistent_workers=True,
        multiprocessing_context=PICKLED,
        worker_init_fn=opened,
    )
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(flat(batches))
    assert orders == epochs_in_one_process(stream, 0, 2, 3)
    assert set(opened.chunks()) == {*range(0, 12, 2), 12, 13}
    # A seal and a data file each.
    assert 2 * dataset.stats().chunks_opened == len(opened.chunks())


@pytest.mark.parametrize("epoch", [0, 1])
def test_rows_read_ahead_before_the_fork_are_not_taken_for_another_epochs(stream: Path, epoch: int) -> None:
    dataset = open_rank(stream, 0, 2, shuffle_window=2)
    dataset.set_epoch(1)
    before = [dataset[index]["id"] for index in dataset.rank_indices[:5]]
    dataset.set_epoch(epoch)
    order = flat(loader(dataset, dataset.rank_indices, 2, batch_size=2))
    assert order == epochs_in_one_process(stream, 0, 2, 3)[epoch]
    assert (order[:5] == before) is (epoch == 1)


def test_rows_read_ahead_before_the_fork_are_used_by_both_sides(stream: Path) -> None:
    dataset = open_rank(stream)
    assert [dataset[0]["id"], dataset[1]["id"]] == [0, 1]
    batches = iter(loader(dataset, dataset.rank_indices, 2, batch_size=5))
    assert [dataset[2]["id"], dataset[9]["id"], dataset[10]["id"]] == [2, 9, 10]
    assert flat(batches) == list(range(55))


def refuse_odd(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] % 4 == 1:
        raise ValueError("odd")
    return row


@pytest.mark.parametrize("persistent", [True, False])
def test_statistics_go_on_from_epoch_to_epoch(tmp_path: Path, persistent: bool) -> None:
    directory = produce(tmp_path / "s", 8, 4)
    dataset = open_rank(directory, encode_fn=refuse_odd)
    assert dataset[0] == {"id": 0}
    assert dataset.stats()[:2] == (0, 1)
    # One worker, which inherits the open chunk: a fresh one each epoch unless they persist.
    batches = loader(dataset, dataset.rank_indices, 1, batch_size=4, persistent_workers=persistent)
    met = []
    for _ in range(3):
        flat(batches)
        met.append((dataset.stats().bad_samples, dataset.stats().chunks_opened))
    assert met == ([(2, 2)] * 3 if persistent else [(2, 2), (4, 3), (6, 4)])


def test_workers_do_not_count_again_what_their_parent_met(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, 4)
    dataset = open_rank(directory, encode_fn=refuse_odd)
    dataset[1]
    flat(loader(dataset, [0, 2, 3, 0], 3, batch_size=1))
    assert dataset.stats()[:2] == (1, 1)


@pytest.mark.parametrize("kind", ["subset", "concat", "split"])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_wrappers_read_every_sample_once(
    stream: Path, kind: Literal["subset", "concat", "split"], workers: int
) -> None:
    dataset = open_rank(stream)
    if kind == "subset":
        whole = Subset(dataset, range(10, 20))
        assert flat(loader(whole, range(10), workers, batch_size=3)) == list(range(10, 20))
    elif kind == "concat":
        both: ConcatDataset[Any] = ConcatDataset([dataset, open_rank(stream, 1, 2)])
        assert flat(loader(both, range(53, 58), workers, batch_size=3)) == [53, 54, 0, 1, 2]
    else:
        first, second = random_split(dataset, [15, 40])
        read = [flat(loader(part, range(len(part)), workers, batch_size=3)) for part in (first, second)]
        assert sorted(read[0] + read[1]) == list(range(55))
        assert len(read[0]) == 15


def test_loader_with_its_own_shuffle_reads_every_sample_once(stream: Path) -> None:
    dataset = open_rank(stream)
    batches = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, collate_fn=ids, timeout=DEADLINE_S)
    order = flat(batches)
    assert sorted(order) == list(range(55))
    assert order != sorted(order)
