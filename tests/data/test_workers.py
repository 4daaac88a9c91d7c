"""The data set in DataLoader workers: every sample once, own chunks only, one epoch for all; orphans leave silently."""

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from lazyshard.stream import StreamReader, waiting
from lazyshard.stream.waiting import Parent
from tests.data.programs import programs, run_program, start_program
from tests.data.runs import open_rank, read
from tests.data.workers import DEADLINE_S, PICKLED, RecordOpened, loader
from tests.harness.processes.nursery import kill
from tests.stream.streams import produce, raised, wait_until


def flat(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 chunks of 4, and a tail of 7 in two more."""
    return produce(tmp_path_factory.mktemp("stream") / "s", 55, 4)


def in_one_process(directory: Path, rank: int, dp: int, window: int) -> list[list[int]]:
    dataset, orders = open_rank(directory, rank, dp, shuffle_window=window), []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders += read([dataset])
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
    twin = copy.deepcopy(dataset)
    twin[1]
    # What was met before is not counted again.
    flat(loader(twin, [0, 2, 3, 0], 2, batch_size=1))
    assert twin.stats()[:2] == (1, 2)
    # One worker, which inherits the open chunk: a fresh one each epoch unless they persist.
    batches = loader(dataset, dataset.rank_indices, 1, batch_size=4, persistent_workers=persistent)
    met = []
    for _ in range(3):
        flat(batches)
        met.append((dataset.stats().bad_samples, dataset.stats().chunks_opened))
    assert met == ([(2, 2)] * 3 if persistent else [(2, 2), (4, 3), (6, 4)])


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
    dataset: Any = open_rank(stream, batch_size=2, max_total_samples=None if iterable else 100)
    source, sampler = (LazyShardedStream(dataset), None) if iterable else (dataset, range(100))
    iterator: Any = iter(loader(source, sampler, 2, kind, batch_size=2, multiprocessing_context=method))
    assert sorted(flat(next(iterator) for _ in range(4))) == list(range(8))
    iterator._shutdown_workers()
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]
    assert killed == []


def alive(pid: int) -> bool:
    """Whether a process is there and not merely unreaped: nobody may be there to reap an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def waits(pid: int) -> bool:
    try:
        return any("inotify" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


@contextmanager
def training(tmp_path: Path, *arguments: str) -> Iterator[tuple[int, list[int]]]:
    program, told = "from tests.data.workers import main; main()", tmp_path / "told"
    process = start_program(program, tmp_path / "s", *arguments, tmp_path / "said", folder=tmp_path, out=told)
    workers: list[int] = []
    try:
        wait_until(lambda: told.exists() and told.read_text().count("\n") == 2, "two workers")
        workers += map(int, told.read_text().split())
        yield process, workers
    finally:
        kill(process)
        for worker in workers:
            if alive(worker):
                kill(worker)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "used", "size", "rows", "trained"),
    [
        ("fork", "used", "2", 4, ["0", "0 1", "2 3"]),
        ("spawn", "fresh", "2", 4, ["0 1", "2 3"]),
        # With batches that nobody takes.
        ("fork", "fresh", "8", 24, ["0 1"]),
        # Killed before they begin.
        ("fork", "early", "2", 4, []),
        ("fork", "early-stateful", "2", 4, []),
    ],
)
def test_workers_leave_too(tmp_path: Path, method: str, used: str, size: str, rows: int, trained: list[str]) -> None:
    produce(tmp_path / "s", rows, end=False)
    said = tmp_path / "said"
    with training(tmp_path, method, used, size) as (process, workers):
        if trained:
            wait_until(lambda: f"{trained[-1]}\n" in said.read_text() and all(map(waits, workers)), "workers that wait")
        assert all(map(alive, workers))
        kill(process)
        assert programs().reap(process, DEADLINE_S).status == -signal.SIGKILL
        wait_until(lambda: not any(map(alive, workers)), "the workers have left")
    assert said.read_text().splitlines() == trained


@pytest.mark.full
def test_wait_of_an_orphan_ends_in_an_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamReader(produce(tmp_path, 2, end=False), max_wait=DEADLINE_S)
    timers: list[Any] = []
    monkeypatch.setattr("threading.Timer", lambda *given: SimpleNamespace(start=lambda: timers.append(given)))
    monkeypatch.setattr(Parent, "gone", lambda self: True)
    reader.parent = Parent()
    assert raised(SystemExit, reader.read, 2).code == 1
    assert timers == [(1.0, os._exit, (1,))]
    # And where a file that is published does not appear.
    (tmp_path / "chunk_00000.jsonl").unlink()
    raised(SystemExit, reader.read, 0)


@pytest.mark.full
def test_orphan_that_is_stuck_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_FOLLOW_S", 0.01)
    monkeypatch.setattr(waiting, "_STUCK_S", 0.01)
    reading, writing = os.pipe()

    def train() -> None:
        if os.fork() == 0:
            Parent().follow()
            os.write(writing, b"%d\n" % os.getpid())
            lock = threading.Lock()
            lock.acquire()
            # As a worker whose sibling was killed with the lock of their queue.
            lock.acquire()
        time.sleep(DEADLINE_S)

    training = os.fork()
    if training == 0:
        try:
            train()
        finally:
            os._exit(0)
    worker = int(os.read(reading, 20))
    assert alive(worker)
    os.kill(training, signal.SIGKILL)
    os.waitpid(training, 0)
    wait_until(lambda: not alive(worker), "the worker has left")


@pytest.mark.full
@pytest.mark.parametrize("method", [None, "multiprocessing", "thread"])
def test_only_workers_have_a_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str | None) -> None:
    worker = method and SimpleNamespace(id=0, worker_method=method)
    # A training process may outlive the shell that started it.
    monkeypatch.setattr(shared, "get_worker_info", lambda: worker)
    # Nor is this one to end with the shell that started it.
    monkeypatch.setattr(Parent, "follow", lambda self: None)
    dataset = LazyShardedDataset(produce(tmp_path / "s", 2), dp_rank=0, dp_size=1)
    dataset.draw(0)
    assert (dataset.reader.parent is not None) is (method == "multiprocessing")
    assert pickle.loads(pickle.dumps(dataset)).reader.parent is None
