"""Whose data set it is: what is given, Megatron, torch.distributed, one process; and never a guess."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lazyshard import LazyShardedDataset
from lazyshard.data import resolve_rank
from lazyshard.data.rank import Rank
from lazyshard.errors import RankInvalid
from tests.stream.streams import produce, python


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def megatron(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, *, initialized: bool = True) -> None:
    """Puts a Megatron in place in which each data-parallel rank has two context-parallel peers."""

    def of(number: int, peers: int) -> Any:
        def answer(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
            assert initialized, "data parallel group is not initialized"
            return number * peers if with_context_parallel else number

        return answer

    module = ModuleType("megatron.core.parallel_state")
    vars(module).update(
        model_parallel_is_initialized=lambda: initialized,
        get_data_parallel_rank=of(rank, 2),
        get_data_parallel_world_size=of(size, 2),
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", module)


def test_process_alone_is_0_of_1() -> None:
    assert resolve_rank() == Rank(0, 1)


def test_what_is_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, 3, 4)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert resolve_rank(1, 2) == Rank(1, 2)


@pytest.mark.parametrize("given", [(1, None), (None, 2), (0, None)])
def test_one_without_the_other_is_refused(given: Any) -> None:
    with pytest.raises(RankInvalid, match="dp_rank and dp_size belong together") as caught:
        resolve_rank(*given)
    assert (caught.value.dp_rank, caught.value.dp_size) == given


@pytest.mark.parametrize("given", [(2, 2), (-1, 2), (0, 0), (0.0, 2), ("0", 2), (True, 2), (0, True)])
def test_impossible_rank_is_refused(given: Any) -> None:
    with pytest.raises(RankInvalid, match="expected 0 <= dp_rank < dp_size"):
        resolve_rank(*given)


def test_megatrons_context_parallel_peers_share_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, 3, 4)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert resolve_rank() == Rank(3, 4)


def test_megatron_that_is_not_initialised_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, 3, 4, initialized=False)
    assert resolve_rank() == Rank(0, 1)


@pytest.mark.parametrize("world", ["2", "1024"])
def test_one_of_several_processes_in_which_nothing_is_initialised_is_refused(
    monkeypatch: pytest.MonkeyPatch, world: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(RankInvalid, match=f"WORLD_SIZE is {world}, but neither Megatron nor torch.distributed"):
        resolve_rank()


@pytest.mark.parametrize("world", ["", "1"])
def test_world_of_one_is_alone(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert resolve_rank() == Rank(0, 1)


def test_data_set_asks_when_it_is_first_used_and_never_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = LazyShardedDataset(produce(tmp_path / "s", 16, 2))
    with pytest.raises(RankInvalid):
        len(dataset)
    megatron(monkeypatch, 1, 2)
    assert (len(dataset), dataset.rank) == (16, Rank(1, 2))
    assert [dataset[i]["id"] for i in dataset.rank_indices] == [2, 3, 6, 7, 10, 11, 14, 15]
    megatron(monkeypatch, 3, 4)
    assert dataset.rank == Rank(1, 2)
    # Where neither is initialised, as in a spawned worker, the copy knows.
    copied = pickle.loads(pickle.dumps(dataset))
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    assert copied.rank == Rank(1, 2)


DISTRIBUTED = """
import sys
import torch.distributed as dist
from lazyshard.data import resolve_rank
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=rank, world_size=1)
print(*resolve_rank())
# Of a larger world: what counts is what it says, and no other process is needed to say it.
dist.get_rank, dist.get_world_size = lambda: 2, lambda: 3
print(*resolve_rank())
dist.destroy_process_group()
"""


def test_torch_distributed_is_asked_where_it_is_initialised(tmp_path: Path) -> None:
    done = python(DISTRIBUTED, tmp_path / "store", 0)
    assert (done.stdout, done.returncode) == ("0 1\n2 3\n", 0), done.stderr
