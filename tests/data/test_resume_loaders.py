"""Loaders of torch and torchdata that stop in the middle and go on: with as many workers, and with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import ChunkWriter, LazyShardedDataset, LazyShardedIterable
from lazyshard.errors import StateInvalid
from tests.data.runs import State, open_ranks
from tests.data.workers import DEADLINE_S, ids, loader
from tests.stream.streams import produce

# Which torchdata still calls, and torch has given up.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")]

BATCH = 2
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "shuffle_window": 1, "max_wait": DEADLINE_S}


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Forty samples in ten chunks."""
    return produce(tmp_path / "s", 40, 4)


def first_batches(dataset: LazyShardedDataset, workers: int, count: int) -> list[list[int]]:
    """Reads so many batches and drops the loader, which has read ahead by then."""
    iterator = iter(loader(dataset, dataset.rank_indices, workers, batch_size=BATCH))
    return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize("epoch", [0, 2])
def test_loader_goes_on_with_other_workers_in_the_middle_of_an_epoch(stream: Path, epoch: int) -> None:
    whole = open_ranks(stream, 2, **OPTIONS)[1]
    whole.set_epoch(epoch)
    expected = list(loader(whole, whole.rank_indices, 0, batch_size=BATCH))
    state: State | None = None
    found: list[list[int]] = []
    for workers, count in ((0, 2), (2, 3), (1, 1), (2, 4)):
        dataset = open_ranks(stream, 2, state, **OPTIONS)[1]
        if state is None:
            dataset.set_epoch(epoch)
        assert (dataset.epoch, dataset.consumed) == (epoch, len(found) * 2 * BATCH)
        found += first_batches(dataset, workers, count)
        state = dataset.state_dict(len(found) * 2 * BATCH)
    assert found == expected


def test_loader_goes_on_with_other_ranks_and_workers_while_the_stream_grows(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "s", 4)
    state: State | None = None
    seen: list[int] = []
    for number, (dp, workers, steps) in enumerate(((2, 2, 3), (3, 1, 2), (1, 2, 5), (2, 0, 2))):
        for row in range(16 * number, 16 * (number + 1)):
            writer.write({"id": row})
        ranks = open_ranks(tmp_path / "s", dp, state, max_total_samples=64, **OPTIONS)
        for dataset in ranks:
            seen += [i for batch in first_batches(dataset, workers, steps) for i in batch]
        state = ranks[0].state_dict(len(seen))
    writer.close()
    rest = open_ranks(tmp_path / "s", 1, state, max_total_samples=64, **OPTIONS)[0]
    seen += [i for batch in loader(rest, rest.rank_indices, 2, batch_size=BATCH) for i in batch]
    assert sorted(seen) == list(range(64))


def stateful_loader(samples: Any, workers: int) -> Any:
    waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
    if isinstance(samples, LazyShardedDataset):
        waiting["sampler"] = samples.rank_indices
    return StatefulDataLoader(samples, batch_size=BATCH, num_workers=workers, collate_fn=ids, **waiting)


def open_form(form: str, stream: Path, state: State | None = None, dp: int = 2) -> Any:
    dataset = open_ranks(stream, dp, **OPTIONS)[1 % dp]
    samples = LazyShardedIterable(dataset) if form == "iterable" else dataset
    if state is not None:
        samples.load_state_dict(state)
    return samples


@pytest.fixture
def expected(stream: Path) -> list[list[int]]:
    dataset = open_ranks(stream, 2, **OPTIONS)[1]
    return list(DataLoader(dataset, sampler=dataset.rank_indices, batch_size=BATCH, collate_fn=ids))


@pytest.mark.parametrize("form", ["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_stateful_loader_goes_on_from_its_own_state(
    stream: Path, tmp_path: Path, expected: list[list[int]], form: str, workers: int
) -> None:
    saved: Any = None
    found: list[list[int]] = []
    for count in (0, 3, 1, 4):
        batches = stateful_loader(open_form(form, stream), workers)
        if saved is not None:
            batches.load_state_dict(saved)
        iterator = iter(batches)
        found += [next(iterator) for _ in range(count)]
        torch.save(batches.state_dict(), tmp_path / "loader.pt")
        saved = torch.load(tmp_path / "loader.pt", weights_only=True)
        del iterator, batches
    samples = open_form(form, stream)
    last = stateful_loader(samples, workers)
    last.load_state_dict(saved)
    assert found + list(last) == expected
    samples.set_epoch(1)
    second = open_ranks(stream, 2, **OPTIONS)[1]
    second.set_epoch(1)
    assert list(last) == list(loader(second, second.rank_indices, 0, batch_size=BATCH))


@pytest.mark.parametrize("form", ["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_goes_on_in_a_later_epoch_that_is_set_again(stream: Path, form: str, workers: int) -> None:
    whole = open_ranks(stream, 2, **OPTIONS)[1]
    whole.set_epoch(1)
    second = list(loader(whole, whole.rank_indices, 0, batch_size=BATCH))
    samples = open_form(form, stream)
    batches = stateful_loader(samples, workers)
    assert len(list(batches)) == 10
    samples.set_epoch(1)
    iterator = iter(batches)
    found = [next(iterator) for _ in range(4)]
    saved = batches.state_dict()
    del iterator
    again = open_form(form, stream)
    again.set_epoch(1)
    batches = stateful_loader(again, workers)
    batches.load_state_dict(saved)
    assert found == second[:4]
    assert list(batches) == second[4:]


@pytest.mark.parametrize("form", ["map", "iterable"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (0, 2), (2, 0)])
def test_torchdata_refuses_its_state_with_another_number_of_workers_and_ours_goes_on(
    stream: Path, expected: list[list[int]], form: str, before: int, after: int
) -> None:
    samples = open_form(form, stream)
    batches = stateful_loader(samples, before)
    iterator = iter(batches)
    found = [next(iterator) for _ in range(3)]
    saved = batches.state_dict()
    dataset = samples.dataset if form == "iterable" else samples
    state = json.loads(json.dumps(dataset.state_dict(3 * 2 * BATCH)))
    del iterator, batches
    refusing = stateful_loader(open_form(form, stream), after)
    refusing.load_state_dict(saved)
    # Ours of a worker says why; torchdata's own are assertions.
    with pytest.raises((AssertionError, StateInvalid)) as refused:
        next(iter(refusing))
    if isinstance(refused.value, StateInvalid):
        assert "with another number of workers go on from what `dataset.state_dict(consumed)` gave" in str(
            refused.value
        )
        assert refused.value.field == "workers"
    going_on = stateful_loader(open_form(form, stream, state), after)
    assert found + list(going_on) == expected


@pytest.mark.parametrize("form", ["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_that_began_behind_other_ranks_goes_on(stream: Path, form: str, workers: int) -> None:
    """Its own state is counted from the state that the data set began with, which is loaded first again."""
    begun = open_ranks(stream, 3, **OPTIONS)[0].state_dict(12)
    dataset = open_ranks(stream, 2, begun, **OPTIONS)[1]
    expected = list(DataLoader(dataset, sampler=dataset.rank_indices, batch_size=BATCH, collate_fn=ids))
    assert len(expected) == 7
    batches = stateful_loader(open_form(form, stream, begun), workers)
    iterator = iter(batches)
    found = [next(iterator) for _ in range(3)]
    saved = batches.state_dict()
    del iterator, batches
    again = stateful_loader(open_form(form, stream, begun), workers)
    again.load_state_dict(saved)
    assert found + list(again) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_loader_of_another_beginning_is_refused(stream: Path, workers: int) -> None:
    begun = open_ranks(stream, 3, **OPTIONS)[0].state_dict(12)
    batches = stateful_loader(open_form("map", stream, begun), workers)
    next(iter(batches))
    saved = batches.state_dict()
    again = stateful_loader(open_form("map", stream), workers)
    again.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="in use already and stands elsewhere"):
        next(iter(again))
    del batches
