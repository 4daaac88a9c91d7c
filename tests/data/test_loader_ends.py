"""A loader that is left in mid-stream: its workers, which wait for rows, end by themselves and are not killed."""

from __future__ import annotations

from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import LazyShardedDataset, LazyShardedStream
from tests.data.workers import DEADLINE_S, ids
from tests.stream.streams import produce

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The processes that this one kills, from here on."""
    found: list[int | None] = []

    def kill(process: BaseProcess) -> None:
        found.append(process.pid)
        process.kill()

    monkeypatch.setattr(BaseProcess, "terminate", kill)
    return found


def take_and_leave(loader: DataLoader[Any], samples: int) -> None:
    iterator: Any = iter(loader)
    taken = [next(iterator) for _ in range(samples // 2)]
    assert sorted(chain.from_iterable(taken)) == list(range(samples))
    iterator._shutdown_workers()
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_that_wait_for_rows_end_with_their_loader(
    method: str, kind: Any, tmp_path: Path, killed: list[int | None]
) -> None:
    stream = produce(tmp_path / "s", 8, end=False)
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1, batch_size=2, max_total_samples=100)
    loader = kind(
        dataset,
        sampler=dataset.rank_indices,
        batch_size=2,
        num_workers=2,
        collate_fn=ids,
        multiprocessing_context=method,
        timeout=DEADLINE_S,
    )
    take_and_leave(loader, 8)
    assert killed == []


def test_workers_of_a_stream_end_too(tmp_path: Path, killed: list[int | None]) -> None:
    dataset = LazyShardedDataset(produce(tmp_path / "s", 8, end=False), dp_rank=0, dp_size=1, batch_size=2)
    loader = DataLoader(LazyShardedStream(dataset), batch_size=2, num_workers=2, collate_fn=ids, timeout=DEADLINE_S)
    take_and_leave(loader, 8)
    assert killed == []


def test_what_waits_in_no_worker_is_ended_by_nobody(tmp_path: Path) -> None:
    dataset = LazyShardedDataset(produce(tmp_path / "s", 2), dp_rank=0, dp_size=1)
    assert dataset[0] == {"id": 0}
    assert dataset.reader.parent is None
