"""Whose data set it is: what is given, Megatron, torch.distributed, one process; never a guess, nor another rank."""

import ctypes
import json
import pickle
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import LazyShardedDataset
from lazyshard.data import resolve_rank
from lazyshard.data.rank import Rank
from lazyshard.errors import ConfigInvalid
from tests.data.programs import run_program
from tests.data.runs import State, open_ranks
from tests.plan import oracle
from tests.stream.streams import forked, produce, raised, refusal_of


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


@pytest.mark.parametrize(
    ("given", "asked", "world", "expected"),
    [
        ((), None, "", Rank(0, 1)),
        ((), None, "1", Rank(0, 1)),
        ((1, 2), True, "8", Rank(1, 2)),
        # Context-parallel peers share a rank.
        ((), True, "8", Rank(3, 4)),
        ((), False, None, Rank(0, 1)),
    ],
)
def test_rank_is_the_one_given_or_megatrons_or_that_of_a_process_alone(
    monkeypatch: pytest.MonkeyPatch, given: Any, asked: bool | None, world: str | None, expected: Rank
) -> None:
    if asked is not None:
        megatron(monkeypatch, 3, 4, initialized=asked)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    assert resolve_rank(*given) == expected


ONE_ONLY = [(1, None), (None, 2), (0, None)]


@pytest.mark.parametrize("given", [*ONE_ONLY, (2, 2), (-1, 2), (0, 0), (0.0, 2), ("0", 2), (True, 2), (0, True)])
def test_impossible_rank_is_refused_before_a_stream_is_waited_for(given: Any, tmp_path: Path) -> None:
    for use in (resolve_rank, lambda rank, size: LazyShardedDataset(tmp_path / "no", dp_rank=rank, dp_size=size)):
        caught = raised(ConfigInvalid, use, *given)
        assert f"dp_rank={given[0]!r} and dp_size={given[1]!r}" in str(caught)
    if given in ONE_ONLY:
        assert (caught.dp_rank, caught.dp_size) == given


def test_data_set_asks_when_it_is_first_used_and_never_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = LazyShardedDataset(produce(tmp_path / "s", 16, 2))
    refusal_of(ConfigInvalid, "WORLD_SIZE is 4", len, dataset)
    megatron(monkeypatch, 1, 2)
    assert (len(dataset), dataset.rank) == (16, Rank(1, 2))
    assert [dataset[i]["id"] for i in dataset.rank_indices] == [2, 3, 6, 7, 10, 11, 14, 15]
    megatron(monkeypatch, 3, 4)
    assert dataset.rank == Rank(1, 2)
    # Where neither is initialised, as in a spawned worker, the copy knows.
    copied = pickle.loads(pickle.dumps(dataset))
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    assert copied.rank == Rank(1, 2)


DISTRIBUTED: Final = """
import sys
import torch.distributed as dist
from lazyshard.data import resolve_rank
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
print(*resolve_rank())
# Of a larger world: what counts is what it says, and no other process is needed to say it.
dist.get_rank, dist.get_world_size = lambda: 2, lambda: 3
print(*resolve_rank())
dist.destroy_process_group()
"""


def test_torch_distributed_is_asked_where_it_is_initialised(tmp_path: Path) -> None:
    done = run_program(DISTRIBUTED, tmp_path / "store", folder=tmp_path)
    assert (done.stdout, done.returncode) == ("0 1\n2 3\n", 0), done.stderr


TRAIN: Final = """
import ctypes, json, os, pathlib, signal, socket, sys
from lazyshard import LazyShardedDataset, Order

stream, out, (rank, ranks, workers, kill_at, port) = sys.argv[1], pathlib.Path(sys.argv[2]), map(int, sys.argv[3:])
if port:
    socket.create_connection(("127.0.0.1", port)).close()
    # Cut off, in a network of its own in which nothing is up.
    assert ctypes.CDLL(None).unshare(0x40000000 | 0x10000000) == 0
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5)
        sys.exit("it is not cut off")
    except OSError:
        pass

def encode(row):
    if row["id"] % 7 == 3:
        raise ValueError("too long")
    return row["id"]

dataset = LazyShardedDataset(stream, encode, dp_rank=rank, dp_size=ranks, batch_size=4, order=Order(shuffle_window=2))
batches = dataset.batches(num_workers=workers, collate_fn=list)
saved = out / "state.json"
if saved.exists():
    batches.load_state_dict(json.loads(saved.read_text()))
for batch in batches:
    with (out / "trained.jsonl").open("a") as file:
        print(json.dumps([batches.step, batch]), file=file)
    if batches.step % 3 == 0:
        (out / "new").write_text(json.dumps(batches.state_dict()))
        (out / "new").rename(saved)
    if batches.step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def train(stream: Path, out: Path, rank: int, ranks: int, workers: int, kill_at: int = 0, port: int = 0) -> int:
    out.mkdir(exist_ok=True)
    return run_program(TRAIN, stream, out, rank, ranks, workers, kill_at, port, folder=out).returncode


def trained(out: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (out / "trained.jsonl").read_text().splitlines()]


def _unshare() -> None:
    assert ctypes.CDLL(None).unshare(0x40000000 | 0x10000000) == 0


@pytest.mark.full
def test_ranks_whose_network_is_cut_train_each_sample_once(tmp_path: Path) -> None:
    if forked(_unshare):
        pytest.skip("needs leave to make a network namespace")
    stream = produce(tmp_path / "s", 120, 10)
    ids: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in range(3):
            assert train(stream, tmp_path / str(rank), rank, 3, rank, port=server.getsockname()[1]) == 0
            ids += [number for _, batch in trained(tmp_path / str(rank)) for number in batch]
    assert set(ids) == {number for number in range(120) if number % 7 != 3}
    assert len(ids) == 120


@pytest.mark.full
def test_substitutes_are_the_same_after_kills_as_without(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 200, 10)
    assert train(stream, tmp_path / "whole", 0, 1, 0) == 0
    whole = trained(tmp_path / "whole")
    assert len([number for _, batch in whole for number in batch if number % 7 != 3]) == 200
    for workers, kill_at in ((2, 4), (0, 11), (1, 31), (2, 35)):
        assert train(stream, tmp_path / "killed", 0, 1, workers, kill_at) == -9
    assert train(stream, tmp_path / "killed", 0, 1, 2) == 0
    again = trained(tmp_path / "killed")
    # Steps that a checkpoint did not have are trained again, by the same samples.
    assert [step for step, _ in again] == [*range(1, 5), *range(4, 12), *range(10, 32), *range(31, 36), *range(34, 51)]
    assert all([step, batch] in whole for step, batch in again)


PER_CHUNK = 4
TOTAL = 90
PART = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 70))  # Ranks, micro batch and draws


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return produce(tmp_path_factory.mktemp("stream") / "s", TOTAL, PER_CHUNK)


@settings(deadline=None, database=None, derandomize=True, max_examples=150)
@given(data=st.data())
def test_any_chain_of_ranks_draws_what_lists_say(stream: Path, data: st.DataObject) -> None:
    """A run that stops within a part and starts again, at the end of any micro batch, is the same run."""
    units: list[int | str] = ["chunk", "sample", 3]
    unit = data.draw(st.sampled_from(units), label="unit")
    window, seed = data.draw(st.integers(0, 3), label="window"), data.draw(st.integers(0, 2), label="seed")
    layout, stop = data.draw(st.sampled_from(["block", "strided"])), data.draw(st.integers(0, 60), label="stop")
    parts: list[tuple[int, int, int]] = []
    for dp, batch_size, draws in data.draw(st.lists(PART, min_size=1, max_size=5), label="parts"):
        # With the same ranks and micro batch it would continue in the same part.
        dp += bool(parts and parts[-1][:2] == (dp, batch_size))
        parts.append((dp, batch_size, draws // batch_size * batch_size or batch_size))
    size = unit if isinstance(unit, int) else {"chunk": PER_CHUNK, "sample": 1}[unit]
    positions = -(-window * PER_CHUNK // size) * size
    state: State | None = None
    consumed = 0
    common: dict[str, Any] = {"unit": unit, "shuffle_window": window, "seed": seed, "num_samples": 100_000}
    lists = oracle.course_of_draws(size, positions, seed, [(*part, []) for part in parts], TOTAL)
    for (dp, batch_size, draws), expected in zip(parts, lists, strict=True):
        options = {**common, "batch_size": batch_size}
        ranks = open_ranks(stream, dp, state, layout=layout, **options)
        for dataset, lane in zip(ranks, expected, strict=True):
            indices = dataset.rank_indices[:draws]
            assert [dataset.draw(index) for index in indices] == lane
            assert [row["id"] for row in dataset.__getitems__(list(indices))] == [sample for _, sample in lane]
        before = min(stop, draws) // batch_size * batch_size
        again = open_ranks(stream, dp, ranks[0].state_dict(consumed + dp * before), **options)
        for dataset, lane in zip(again, expected, strict=True):
            assert [dataset.draw(index) for index in dataset.rank_indices[: draws - before]] == lane[before:]
        assert ranks[0].consumed == consumed
        consumed += dp * draws
        state = ranks[0].state_dict(consumed)
