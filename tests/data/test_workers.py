"""The data set in DataLoader workers, forked and spawned: every sample once, own chunks only, one epoch for all."""

import copy
import pickle
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import LazyShardedDataset, LazyShardedStream
from lazyshard.data import rank as shared
from lazyshard.data.rank import EPOCH, SharedNumbers, Stats
from lazyshard.data.settings import LayoutName
from tests.data.programs import run_program
from tests.data.runs import open_rank
from tests.data.workers import DEADLINE_S, PICKLED, RecordOpened, ids, loader
from tests.stream.streams import forked, produce


def flat(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 chunks of 4, and a tail of 7 in two more."""
    return produce(tmp_path_factory.mktemp("stream") / "s", 55, 4)


def in_one_process(directory: Path, rank: int, dp: int, window: int) -> list[list[int]]:
    """What a rank reads in three epochs."""
    orders = []
    for epoch in range(3):
        dataset = open_rank(directory, rank, dp, shuffle_window=window)
        dataset.set_epoch(epoch)
        orders.append([dataset[index]["id"] for index in dataset.rank_indices])
    assert len({tuple(order) for order in orders}) == (3 if window else 1)
    return orders


@pytest.mark.parametrize(
    ("start", "persistent", "workers", "layout", "window", "rank"),
    [("fork", True, 1, "block", 2, 0), ("fork", False, 3, "strided", 0, 1), (PICKLED, True, 2, "strided", 2, 2)],
)
def test_workers_see_the_epoch_that_is_set_and_open_no_file_of_another_ranks_chunk(
    stream: Path, tmp_path: Path, start: str, persistent: bool, workers: int, layout: LayoutName, window: int, rank: int
) -> None:
    options: dict[str, Any] = {"persistent_workers": persistent, "multiprocessing_context": start}
    opened = RecordOpened(tmp_path / "opened")
    dataset = open_rank(stream, rank, 3, layout=layout, shuffle_window=window)
    batches = loader(dataset, dataset.rank_indices, workers, batch_size=2, worker_init_fn=opened, **options)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(flat(batches))
    assert orders == in_one_process(stream, rank, 3, window)
    chunks = set(opened.chunks())
    assert {chunk for chunk in chunks if chunk < 12} == set(range(rank, 12, 3))
    # The tail is dealt row by row.
    assert chunks - set(range(12)) <= {12, 13}
    # A seal and a data file each.
    assert 2 * dataset.stats().chunks_opened == len(opened.chunks())


@pytest.mark.parametrize("epoch", [0, 1])
def test_rows_read_ahead_before_the_fork_are_not_taken_for_another_epochs(stream: Path, epoch: int) -> None:
    dataset = open_rank(stream, 0, 2, shuffle_window=2)
    dataset.set_epoch(1)
    before = [dataset[index]["id"] for index in dataset.rank_indices[:5]]
    dataset.set_epoch(epoch)
    order = flat(loader(dataset, dataset.rank_indices, 2, batch_size=2))
    assert order == in_one_process(stream, 0, 2, 2)[epoch]
    assert (order[:5] == before) is (epoch == 1)


def refuse_odd(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] % 4 == 1:
        raise ValueError("odd")
    return row


@pytest.mark.parametrize("persistent", [True, False])
def test_statistics_go_on_from_epoch_to_epoch(tmp_path: Path, persistent: bool) -> None:
    dataset = open_rank(produce(tmp_path / "s", 8, 4), encode_fn=refuse_odd)
    assert dataset[0] == {"id": 0}
    assert dataset.stats()[:2] == (0, 1)
    # One worker, which inherits the open chunk: a fresh one each epoch unless they persist.
    batches = loader(dataset, dataset.rank_indices, 1, batch_size=4, persistent_workers=persistent)
    met = []
    for _ in range(3):
        flat(batches)
        met.append((dataset.stats().bad_samples, dataset.stats().chunks_opened))
    assert met == ([(2, 2)] * 3 if persistent else [(2, 2), (4, 3), (6, 4)])


def test_what_the_parent_met_is_not_counted_again_by_its_workers(tmp_path: Path) -> None:
    dataset = open_rank(produce(tmp_path / "s", 8, 4), encode_fn=refuse_odd)
    dataset[1]
    flat(loader(dataset, [0, 2, 3, 0], 2, batch_size=1))
    assert dataset.stats()[:2] == (1, 1)


def test_reports_of_the_workers_add_up_and_leave_the_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = SharedNumbers()
    assert numbers.stats() == Stats(bad_samples=0, chunks_opened=0, waited_s=0.0)
    assert numbers.view[EPOCH] == 0
    numbers.view[EPOCH] = 7
    for worker in (None, 0, 1, 0, 254, 255, 1_000, 100_000):
        info: Any = None if worker is None else SimpleNamespace(id=worker)
        monkeypatch.setattr(shared, "get_worker_info", lambda info=info: info)
        numbers.report(Stats(1, 2, 1.5), Stats())
        assert numbers.view[EPOCH] == 7
    assert numbers.stats() == Stats(bad_samples=8, chunks_opened=16, waited_s=12.0)


def test_fork_of_a_process_with_threads_of_torch_makes_its_own(tmp_path: Path) -> None:
    """In a process of its own, as nothing of torch's that takes threads can be used after it."""
    program = """
import os, signal, torch
torch.set_num_threads(2)
torch.ones(1 << 20).clone()
if os.fork() == 0:
    signal.alarm(60)
    from lazyshard.data.rank import SharedNumbers
    SharedNumbers().stats()
    os._exit(0)
print(os.wait()[1])
"""
    ended = run_program(program, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))], ids=["deepcopy", "pickle"])
def test_copy_has_numbers_of_its_own_which_it_shares_with_its_forks(copied: Any) -> None:
    numbers = SharedNumbers()
    numbers.view[EPOCH] = 3
    twin = copied(numbers)
    assert twin.view[EPOCH] == 3
    twin.view[EPOCH] = 4
    assert numbers.view[EPOCH] == 3

    def child() -> None:
        twin.view[EPOCH] += 2**62
        twin.report(Stats(1, 2, 0.003), Stats())

    assert forked(child) == 0
    assert twin.view[EPOCH] == 2**62 + 4
    assert (twin.stats(), numbers.stats()) == (Stats(1, 2, 0.003), Stats())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("method", "kind", "iterable"),
    [("fork", DataLoader, True), ("fork", StatefulDataLoader, False), (PICKLED, StatefulDataLoader, False)],
)
def test_workers_that_wait_for_rows_end_with_their_loader(
    method: str, kind: Any, iterable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[BaseProcess] = []

    def kill(process: BaseProcess) -> None:
        killed.append(process)
        process.kill()

    monkeypatch.setattr(BaseProcess, "terminate", kill)
    stream = produce(tmp_path / "s", 8, end=False)
    length = None if iterable else 100
    dataset: Any = LazyShardedDataset(stream, dp_rank=0, dp_size=1, batch_size=2, max_total_samples=length)
    given = {"dataset": LazyShardedStream(dataset)} if iterable else {"dataset": dataset, "sampler": range(100)}
    options = {"num_workers": 2, "collate_fn": ids, "multiprocessing_context": method, "timeout": DEADLINE_S}
    iterator: Any = iter(kind(**given, batch_size=2, **options))
    taken = [next(iterator) for _ in range(4)]
    assert sorted(chain.from_iterable(taken)) == list(range(8))
    iterator._shutdown_workers()
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]
    assert killed == []
