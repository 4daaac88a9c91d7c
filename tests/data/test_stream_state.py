"""States of a `LazyShardedStream`: exact at every batch of torchdata's loader, and for other ranks and workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import ChunkWriter, LazyShardedDataset, LazyShardedIterable
from lazyshard.errors import StateInvalid, StateMismatch
from lazyshard.stream import read_cursor
from tests.data.runs import State, part
from tests.data.streams import Stream, batches, expected, in_batches, open_stream
from tests.data.test_live import producing
from tests.data.workers import DEADLINE_S, ids
from tests.stream.streams import produce

# Which torchdata still calls, and torch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

AT_ENDS = ["drop", "pad", "loop"]


def stateful(stream: Stream, workers: int, batch_size: int, **options: Any) -> Any:
    waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
    return StatefulDataLoader(stream, batch_size=batch_size, num_workers=workers, collate_fn=ids, **waiting, **options)


@pytest.mark.parametrize("at_end", AT_ENDS)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_stateful_loader_goes_on_at_every_batch(tmp_path: Path, workers: int, at_end: Any) -> None:
    directory = produce(tmp_path / "s", 21, 4)
    options: dict[str, Any] = {"batch_size": 2, "shuffle_window": 1, "at_end": at_end}
    whole = in_batches(expected(21, 2, 2, window=4, at_end=at_end)[1], 2)
    batches = stateful(open_stream(directory, 1, 2, **options), workers, 2)
    iterator, states = iter(batches), []
    for count in range(len(whole) + 1):
        torch.save(batches.state_dict(), tmp_path / "loader.pt")
        states.append(torch.load(tmp_path / "loader.pt", weights_only=True))
        assert next(iterator, None) == (whole[count] if count < len(whole) else None)
    for count, state in enumerate(states):
        again = stateful(open_stream(directory, 1, 2, **options), workers, 2)
        again.load_state_dict(state)
        assert list(again) == whole[count:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_stateful_loader_of_other_batches_goes_on_within_micro_batches(
    tmp_path: Path, workers: int, batch_size: int
) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    whole = list(stateful(open_stream(directory, batch_size=2, at_end="loop"), workers, batch_size))
    assert sorted(i for batch in whole for i in batch) == [0, *range(13)]
    for count in range(len(whole)):
        batches = stateful(open_stream(directory, batch_size=2, at_end="loop"), workers, batch_size)
        iterator = iter(batches)
        assert [next(iterator) for _ in range(count)] == whole[:count]
        state = json.loads(json.dumps(batches.state_dict())) if not workers else batches.state_dict()
        del iterator
        again = stateful(open_stream(directory, batch_size=2, at_end="loop"), workers, batch_size)
        again.load_state_dict(state)
        assert list(again) == whole[count:]


def test_stateful_loader_goes_on_in_a_stream_that_has_grown_and_ended_since(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "s", 4)
    for number in range(16):
        writer.write({"id": number})
    batches = stateful(open_stream(tmp_path / "s", 0, 2, batch_size=2), 2, 2, prefetch_factor=1)
    iterator = iter(batches)
    found = [next(iterator) for _ in range(2)]
    state = batches.state_dict()
    # Its workers wait for more meanwhile.
    for number in range(16, 22):
        writer.write({"id": number})
    writer.close()
    whole = in_batches(expected(22, 2, 2)[0], 2)
    assert found + list(iterator) == whole
    again = stateful(open_stream(tmp_path / "s", 0, 2, batch_size=2), 2, 2)
    again.load_state_dict(state)
    assert list(again) == whole[2:]


def test_stateful_loader_goes_on_in_the_next_epoch(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    options: dict[str, Any] = {"batch_size": 4, "shuffle_window": 1, "at_end": "pad"}
    for workers in (0, 2):
        stream = open_stream(directory, **options)
        batches = stateful(stream, workers, 4)
        iterator = iter(batches)
        next(iterator)
        state = batches.state_dict()
        del iterator
        stream = open_stream(directory, **options)
        batches = stateful(stream, workers, 4)
        batches.load_state_dict(state)
        assert len(list(batches)) == 3
        stream.set_epoch(1)
        assert list(batches) == in_batches(expected(13, 1, 4, window=4, epoch=1, at_end="pad")[0], 4)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    dp=st.integers(1, 3),
    batch=st.integers(1, 3),
    total=st.integers(0, 30),
    windows=st.integers(0, 1),
    taken=st.integers(0, 12),
    at_end=st.sampled_from(AT_ENDS),
)
def test_state_of_any_moment_goes_on_there(
    tmp_path_factory: pytest.TempPathFactory, dp: int, batch: int, total: int, windows: int, taken: int, at_end: Any
) -> None:
    directory = produce(tmp_path_factory.mktemp("any") / "s", total, 4)
    options: dict[str, Any] = {"batch_size": batch, "shuffle_window": windows, "at_end": at_end}
    for rank, lane in enumerate(expected(total, dp, batch, window=4 * windows, at_end=at_end)):
        stream = open_stream(directory, rank, dp, **options)
        found = [row["id"] for _, row in zip(range(taken), stream, strict=False)]
        assert found == lane[:taken]
        state = json.loads(json.dumps(stream.state_dict()))
        # In this one, and in a new one: there it is the same state again.
        stream.load_state_dict(state)
        assert ids(stream) == lane[taken:]
        again = open_stream(directory, rank, dp, state=state, **options)
        assert again.state_dict() == state
        assert ids(again) == lane[taken:]
        # And those of the other ranks, if they have drawn as much.
        assert state == open_stream(directory, 0, dp, state=state, **options).state_dict()


def run(directory: Path, dp: int, workers: int, steps: int | None, state: State | None, **options: Any) -> Any:
    """Returns what all ranks draw in so many batches, and the state behind them."""
    seen: list[int] = []
    lengths = set()
    for rank in range(dp):
        stream = open_stream(directory, rank, dp, state=state, batch_size=2, **options)
        found = batches(stream, workers)[:steps]
        lengths.add(len(found))
        seen += [i for batch in found for i in batch]
    assert len(lengths) == 1
    consumed = stream.consumed + 2 * dp * lengths.pop()
    return seen, stream.state_dict(consumed)


@pytest.mark.parametrize("at_end", AT_ENDS)
def test_state_of_what_was_consumed_goes_on_with_other_ranks_and_workers(tmp_path: Path, at_end: Any) -> None:
    directory = produce(tmp_path / "s", 45, 4)
    seen: list[int] = []
    state = None
    for dp, workers, steps in ((2, 0, 3), (3, 2, 2), (1, 1, 4)):
        found, state = run(directory, dp, workers, steps, state, at_end=at_end)
        seen += found
    # Five are left for two ranks, which draw four in whole micro batches.
    assert len(set(seen)) == len(seen) == 32
    found, state = run(directory, 2, 2, None, state, at_end=at_end)
    seen += found
    assert state["consumed"] == 44
    assert len(set(seen)) == (44 if at_end == "drop" else 45)
    assert len(seen) == (44 if at_end == "drop" else 48)
    assert state.get("over") == (None if at_end == "drop" else 4)


@pytest.mark.parametrize("at_end", ["pad", "loop"])
def test_epoch_that_was_completed_is_over_for_any_ranks(tmp_path: Path, at_end: Any) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    stream = open_stream(directory, 0, 2, batch_size=4, at_end=at_end)
    assert len(ids(stream)) == 8
    state = stream.state_dict()
    assert state == stream.state_dict(16)
    assert (state["consumed"], state["over"]) == (8, 8)
    for dp in (2, 1, 3):
        again = open_stream(directory, 0, dp, batch_size=4, at_end=at_end, state=json.loads(json.dumps(state)))
        assert (again.consumed, ids(again)) == (16, [])
        assert again.state_dict()["over"] == 8
        assert again.state_dict(16) == again.state_dict()
        with pytest.raises(ValueError, match="consumed is 16 where this epoch is over, got 24"):
            again.state_dict(24)
        again.set_epoch(1)
        assert ids(again) == expected(13, dp, 4, epoch=1, at_end=at_end)[0]
        assert again.consumed == 0
    # Of what was left over the data set knows nothing.
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=2, batch_size=4)
    dataset.load_state_dict(state)
    assert (dataset.consumed, len(dataset.rank_indices)) == (8, 0)


def test_state_is_that_of_the_data_set_until_the_end(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    stream = open_stream(directory, 0, 2, batch_size=2, at_end="pad")
    assert stream.state_dict()["parts"] == [part(2, 0, batch_size=2)]
    dataset = LazyShardedDataset(directory, dp_rank=1, dp_size=2, batch_size=2)
    for consumed in (0, 4, 8, 12):
        assert stream.state_dict(consumed) == dataset.state_dict(consumed)
    for consumed, message in ((18, "counts whole micro batches"), (20, "consumed is at most 16"), (-4, "at least 0")):
        with pytest.raises(ValueError, match=message):
            stream.state_dict(consumed)
    with pytest.raises(ValueError, match="grows by dp_size"):
        stream.state_dict(2)
    with pytest.raises(TypeError, match=r"an int, got 8\.0"):
        stream.state_dict(8.0)  # type: ignore[arg-type]


def test_state_within_a_micro_batch_goes_on_only_there(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 4)
    stream = open_stream(directory, 0, 2, batch_size=4)
    iterator = iter(stream)
    for _ in range(6):
        next(iterator)
    state = stream.state_dict()
    assert (state["consumed"], state["handed_out"]) == (8, 2)
    for workers in (0, 1, 2):
        again = open_stream(directory, 0, 2, batch_size=4, state=state)
        assert [i for batch in batches(again, workers, 4) for i in batch] == expected(24, 2, 4)[0][6:]
    for dp, size in ((1, 4), (2, 2)):
        with pytest.raises(StateInvalid, match="stands within a micro batch"):
            open_stream(directory, 0, dp, batch_size=size, state=state)
    for handed_out in (4, -1, True, "2"):
        with pytest.raises(StateInvalid, match="stands within a micro batch, behind"):
            open_stream(directory, 0, 2, batch_size=4, state=state | {"handed_out": handed_out})
    with pytest.raises(StateInvalid, match="give one that was saved at the end of a micro batch"):
        LazyShardedDataset(directory, dp_rank=0, dp_size=2, batch_size=4).load_state_dict(state)
    for over in (-1, "8", None):
        with pytest.raises(StateInvalid, match="expected a number of samples as 'over'"):
            open_stream(directory, 0, 2, batch_size=4, state=stream.dataset.state_dict(8) | {"over": over})


def test_states_of_other_streams_and_workers_are_refused(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 4)
    state = open_stream(directory).state_dict()
    with pytest.raises(StateMismatch, match="belongs to another stream"):
        open_stream(produce(tmp_path / "other", 24, 4), state=state)
    with pytest.raises(StateInvalid, match="only the same number of workers can go on from"):
        open_stream(directory, state=state | {"worker": 0, "workers": 2, "handed_out": 3})
    batches = stateful(open_stream(directory), 2, 2)
    next(iter(batches))
    saved = batches.state_dict()
    again = stateful(open_stream(directory), 1, 2)
    again.load_state_dict(saved)
    with pytest.raises(StateInvalid, match="expected the state of DataLoader worker 0 of 1, found that of 0 of 2"):
        next(iter(again))
    del batches, again


def test_states_pass_between_the_two_iterables_and_the_data_set(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 4)
    state = open_stream(directory, batch_size=2).state_dict(10)
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=1, batch_size=2)
    samples = LazyShardedIterable(dataset)
    samples.load_state_dict(state)
    assert len(dataset) == 24
    assert ids(samples) == ids(open_stream(directory, batch_size=2, state=state)) == list(range(10, 24))


@pytest.mark.parametrize("at_end", ["drop", "loop"])
def test_commit_of_the_last_step_lets_the_stream_go(tmp_path: Path, at_end: Any) -> None:
    with producing(tmp_path / "s", 4, 13):
        stream = open_stream(tmp_path / "s", batch_size=4, at_end=at_end, consumer="run")
        assert len(ids(stream)) == (12 if at_end == "drop" else 16)
    done = {}
    for consumed in (8, 12, 16):
        if consumed > 12 and at_end == "drop":
            with pytest.raises(ValueError, match="at most 12"):
                stream.commit(consumed, last_epoch=True)
            continue
        keep = [stream.state_dict(consumed)]
        assert stream.commit(consumed, last_epoch=True, keep=keep)
        cursor = read_cursor(tmp_path / "s", "run")
        assert cursor is not None
        done[consumed] = (cursor.consumed, cursor.chunks_before)
    # The one that is left over stays: other ranks could still train it.
    assert done == {8: (8, 2), 12: (12, 3)} | ({16: (12, 3)} if at_end == "loop" else {})
