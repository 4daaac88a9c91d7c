"""Numbers that the processes of a data set share."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

from lazyshard.data import shared
from lazyshard.data.shared import EPOCH, SharedNumbers, Stats
from tests.stream.streams import forked


def as_worker(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    info: Any = None
    if number is not None:
        info = type("Info", (), {"id": number})()
    monkeypatch.setattr(shared, "get_worker_info", lambda: info)


def test_nothing_is_met_at_first() -> None:
    numbers = SharedNumbers()
    assert numbers.stats() == Stats(bad_samples=0, chunks_opened=0, waited_s=0.0)
    assert numbers.view[EPOCH] == 0


def test_reports_of_the_workers_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = SharedNumbers()
    for worker in (None, 0, 1, 0, 254, 255, 1_000):
        as_worker(monkeypatch, worker)
        numbers.report(Stats(1, 2, 1.5), Stats())
    assert numbers.stats() == Stats(bad_samples=7, chunks_opened=14, waited_s=10.5)


@pytest.mark.parametrize("worker", [None, 0, 254, 255, 100_000])
def test_reports_leave_the_epoch_alone(monkeypatch: pytest.MonkeyPatch, worker: int | None) -> None:
    numbers = SharedNumbers()
    numbers.view[EPOCH] = 7
    as_worker(monkeypatch, worker)
    numbers.report(Stats(1, 1, 0.001), Stats())
    assert numbers.view[EPOCH] == 7


def test_fork_of_a_process_with_threads_of_torch_makes_its_own() -> None:
    """In a process of its own, as nothing of torch's that takes threads can be used after it."""
    program = """
import os, signal, torch
torch.set_num_threads(2)
torch.ones(1 << 20).clone()
if os.fork() == 0:
    signal.alarm(60)
    from lazyshard.data.shared import SharedNumbers
    SharedNumbers().stats()
    os._exit(0)
print(os.wait()[1])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "0\n"


def test_fork_reads_and_writes_the_same_numbers() -> None:
    numbers = SharedNumbers()
    numbers.view[EPOCH] = 3

    def child() -> None:
        assert numbers.view[EPOCH] == 3
        numbers.view[EPOCH] = 2**62
        numbers.report(Stats(1, 2, 0.003), Stats())

    assert forked(child) == 0
    assert numbers.view[EPOCH] == 2**62
    assert numbers.stats() == Stats(1, 2, 0.003)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))], ids=["deepcopy", "pickle"])
def test_copy_has_numbers_of_its_own_which_it_shares_with_its_forks(copied: Any) -> None:
    numbers = SharedNumbers()
    numbers.view[EPOCH] = 3
    twin = copied(numbers)
    assert twin.view[EPOCH] == 3
    twin.view[EPOCH] = 4
    assert numbers.view[EPOCH] == 3

    def child() -> None:
        twin.view[EPOCH] += 1

    assert forked(child) == 0
    assert twin.view[EPOCH] == 5
