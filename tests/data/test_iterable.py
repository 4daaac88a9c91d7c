"""The iterable form: the order of the map form, whatever the workers; and a state that counts what was handed out."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset, LazyShardedIterable
from lazyshard.errors import StateInvalid, StateMismatch
from tests.data.options import grouped
from tests.data.runs import State, open_ranks, part, read
from tests.data.workers import DEADLINE_S, ids
from tests.stream.streams import produce


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Forty samples in ten chunks."""
    return produce(tmp_path / "s", 40, 4)


def open_rank(stream: Path, rank: int = 0, dp: int = 2, **options: Any) -> LazyShardedIterable:
    return LazyShardedIterable(
        LazyShardedDataset(stream, dp_rank=rank, dp_size=dp, **grouped({"max_wait": DEADLINE_S, **options}))
    )


def batches(samples: LazyShardedIterable, workers: int, batch_size: int = 2) -> list[list[int]]:
    waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
    return list(DataLoader(samples, batch_size=batch_size, num_workers=workers, collate_fn=ids, **waiting))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["block", "strided"])
def test_order_is_that_of_the_map_form_whatever_the_workers(stream: Path, workers: int, layout: Any) -> None:
    for rank, lane in enumerate(read(open_ranks(stream, 2, batch_size=2, shuffle_window=1))):
        samples = open_rank(stream, rank, batch_size=2, shuffle_window=1, layout=layout)
        assert batches(samples, workers) == [lane[at : at + 2] for at in range(0, 20, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_pass_begins_where_a_loaded_state_stands(stream: Path, workers: int) -> None:
    state = open_ranks(stream, 2, batch_size=2)[0].state_dict(12)
    for dp in (2, 3):
        expected = read(open_ranks(stream, dp, state, batch_size=2))
        for rank, lane in enumerate(expected):
            samples = open_rank(stream, rank, dp, batch_size=2)
            samples.load_state_dict(state)
            found = batches(samples, workers)
            assert found == [lane[at : at + 2] for at in range(0, len(lane), 2)]
            # As the map form: until another epoch is set.
            assert batches(samples, workers) == found
            samples.set_epoch(1)
            assert len(batches(samples, workers)) == 40 // (2 * dp)


def test_state_counts_what_was_handed_out(stream: Path) -> None:
    samples = open_rank(stream)
    assert samples.state_dict()["parts"] == [part(2, 0)]
    iterator = iter(samples)
    assert ids(next(iterator) for _ in range(5)) == [0, 1, 2, 3, 8]
    state = samples.state_dict()
    assert (state["parts"], state["consumed"]) == ([part(2, 5)], 10)
    assert ids(iterator) == [*range(9, 12), *range(16, 20), *range(24, 28), *range(32, 36)]
    again = open_rank(stream)
    again.load_state_dict(state)
    assert ids(again)[:3] == [9, 10, 11]
    assert again.state_dict()["consumed"] == 40
    fewer = open_rank(stream, 0, 1)
    fewer.load_state_dict(state)
    iterator = iter(fewer)
    assert ids(next(iterator) for _ in range(4)) == [9, 10, 11, 13]
    assert fewer.state_dict()["parts"] == [part(2, 5), part(1, 4)]


def test_one_that_was_iterated_goes_back_and_forth_in_its_course(stream: Path) -> None:
    samples = open_rank(stream)
    iterator = iter(samples)
    states = [samples.state_dict()]
    for _ in range(3):
        next(iterator)
        states.append(samples.state_dict())
    for handed_out in (1, 3, 0, 2):
        samples.load_state_dict(states[handed_out])
        assert ids(samples)[:2] == [[0, 1], [1, 2], [2, 3], [3, 8]][handed_out]
        samples.load_state_dict(states[handed_out])
        assert samples.state_dict() == states[handed_out]
    other = open_ranks(stream, 3)[0].state_dict(6)
    with pytest.raises(RuntimeError, match="in use already and stands elsewhere"):
        samples.load_state_dict(other)


def test_epochs_have_their_own_order_and_state(stream: Path) -> None:
    samples = open_rank(stream, shuffle_window=1)
    first = ids(samples)
    samples.set_epoch(1)
    assert (samples.dataset.epoch, samples.state_dict()["parts"]) == (1, [part(2, 0, epoch=1)])
    second = ids(samples)
    assert (sorted(first) == sorted(second), first == second) == (True, False)
    iterator = iter(samples)
    for _ in range(3):
        next(iterator)
    state = samples.state_dict()
    again = open_rank(stream, shuffle_window=1)
    again.load_state_dict(state)
    assert ids(again) == second[3:]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_pass_ends_where_a_live_stream_ends_early(tmp_path: Path, workers: int) -> None:
    stream = produce(tmp_path / "s", 8, 4, end=False)
    samples = open_rank(stream, max_total_samples=100, batch_size=2)
    assert len(samples.dataset) == 100
    produce(stream, 26, 4)
    assert batches(samples, workers) == [[0, 1], [2, 3], [8, 9], [10, 11], [16, 17], [18, 19]]


@pytest.mark.parametrize("workers", [0, 2])
def test_num_samples_go_on_from_epoch_to_epoch(stream: Path, workers: int) -> None:
    samples = open_rank(stream, 0, 1, num_samples=100, batch_size=2)
    assert [i for batch in batches(samples, workers) for i in batch] == [*range(40), *range(40), *range(20)]


def test_state_at_the_end_of_an_epoch_leaves_nothing_of_it(stream: Path) -> None:
    samples = open_rank(stream)
    assert len(ids(samples)) == 20
    state = samples.state_dict()
    again = open_rank(stream)
    again.load_state_dict(state)
    assert ids(again) == []
    again.set_epoch(1)
    assert len(ids(again)) == 20


def test_what_workers_hand_out_is_not_counted_and_not_guessed(stream: Path) -> None:
    samples = open_rank(stream)
    assert len(batches(samples, 2)) == 10
    with pytest.raises(RuntimeError, match=r"this process cannot see how many were trained; save `dataset.state_dict"):
        samples.state_dict()
    assert samples.dataset.state_dict(8)["consumed"] == 8
    assert ids(samples)[:2] == [0, 1]
    assert samples.state_dict()["consumed"] == 40
    assert len(batches(samples, 2)) == 10
    samples.load_state_dict(samples.dataset.state_dict(8))
    assert samples.state_dict()["consumed"] == 8


def test_state_of_a_worker_is_refused_elsewhere(stream: Path) -> None:
    state: State = open_rank(stream).state_dict() | {"worker": 0, "workers": 2, "handed_out": 3}
    for use in (open_rank(stream).load_state_dict, open_ranks(stream, 2)[0].load_state_dict):
        with pytest.raises(
            StateInvalid, match=r"only the same number of workers can go on from; save `dataset.state_d"
        ):
            use(state)
    with pytest.raises(StateMismatch, match="saved with seed 0, here it is 1"):
        open_rank(stream, seed=1).load_state_dict(open_rank(stream).state_dict())


def test_copies_go_on_by_themselves(stream: Path) -> None:
    samples = open_rank(stream)
    samples.load_state_dict(open_ranks(stream, 2)[0].state_dict(12))
    for copied in (pickle.loads(pickle.dumps(samples)), copy.deepcopy(samples)):
        assert ids(copied)[:3] == [10, 11, 16]
    assert samples.state_dict()["consumed"] == 12
