"""Workers whose training process was killed: they leave soon, and say nothing."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyshard import LazyShardedDataset
from lazyshard.data import rank as processes
from lazyshard.stream import StreamReader, waiting
from lazyshard.stream.waiting import Parent
from tests.data.programs import programs, start_program
from tests.harness.processes.nursery import kill
from tests.stream.streams import DEADLINE_S, produce, raised, wait_until

pytestmark = pytest.mark.full


def alive(pid: int) -> bool:
    """Whether a process is there and not merely unreaped: nobody may be there to reap an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def waits(pid: int) -> bool:
    """Whether a worker waits for the stream: it watches the directory."""
    try:
        return any("inotify" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


@contextmanager
def training(tmp_path: Path, *arguments: str) -> Iterator[tuple[int, list[int]]]:
    """Runs a training process; yields its id, and its workers'."""
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


@pytest.mark.parametrize("method", [None, "multiprocessing", "thread"])
def test_only_workers_have_a_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str | None) -> None:
    worker = method and SimpleNamespace(id=0, worker_method=method)
    # A training process may outlive the shell that started it.
    monkeypatch.setattr(processes, "get_worker_info", lambda: worker)
    # Nor is this one to end with the shell that started it.
    monkeypatch.setattr(Parent, "follow", lambda self: None)
    dataset = LazyShardedDataset(produce(tmp_path / "s", 2), dp_rank=0, dp_size=1)
    dataset.draw(0)
    assert (dataset.reader.parent is not None) is (method == "multiprocessing")
    assert pickle.loads(pickle.dumps(dataset)).reader.parent is None
