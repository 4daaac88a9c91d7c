"""States of iterables and torchdata.nodes, and of data sets in a loader: exact at every batch, for others too."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import BlendedDataset, LazyShardedDataset, LazyShardedIterable
from lazyshard.data.node import LazyShardedNode
from lazyshard.errors import StateInvalid, StateMismatch, WaitTimeout
from tests.data.runs import State, continued, open_rank, open_ranks
from tests.data.streams import Stream, batches, expected, in_batches, open_stream
from tests.data.workers import ids, loader
from tests.stream.streams import cursor_of, produce, raised, refusal_of
from tests.tiers import full

AT_ENDS = ["drop", "pad", "loop"]
FORMS = st.sampled_from([*AT_ENDS, "iterable"])


@pytest.fixture
def forty(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 40, 4)


def open_form(form: str, directory: Path, rank: int, dp: int, state: State | None = None, **options: Any) -> Any:
    """A stream by its `at_end`, or an "iterable" over a data set, or the data set itself: a "map"."""
    if form in AT_ENDS:
        at_end: Any = form
        return open_stream(directory, rank, dp, at_end=at_end, state=state, **options)
    dataset = open_rank(directory, rank, dp, **options)
    return continued(LazyShardedIterable(dataset) if form == "iterable" else dataset, state)


def stateful(samples: Any, workers: int, batch_size: int = 2, state: Any = None, **options: Any) -> Any:
    sampler = samples.rank_indices if isinstance(samples, LazyShardedDataset | BlendedDataset) else None
    opened: Any = loader(samples, sampler, workers, StatefulDataLoader, batch_size=batch_size, **options)
    return continued(opened, state)


def goes_on_at_every_batch(opened: Callable[..., Any]) -> list[Any]:
    """Returns all batches, once a loader from the state behind each of them, saved as plain values, has continued."""
    first = opened()
    iterator, states = iter(first), []
    whole: list[Any] = []
    while not whole or whole[-1] is not None:
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        states.append(file)
        whole.append(next(iterator, None))
    whole.pop()
    for count, file in enumerate(states):
        file.seek(0)
        assert list(opened(torch.load(file, weights_only=True))) == whole[count:]
    return whole


def begin(opened: Any, count: int) -> tuple[list[list[int]], Any]:
    iterator = iter(opened)
    return [next(iterator) for _ in range(count)], opened.state_dict()


@pytest.mark.parametrize(
    ("form", "workers"), [("pad", 0), ("drop", 2), ("map", 2), *full(("loop", 2), ("pad", 1), ("iterable", 2))]
)
def test_stateful_loader_goes_on_at_every_batch_and_in_the_next_epoch(tmp_path: Path, workers: int, form: str) -> None:
    directory = produce(tmp_path / "s", 17, 4)
    at_end: Any = form if form in AT_ENDS else "drop"
    whole, following = (in_batches(expected(17, 2, 2, window=4, epoch=epoch, at_end=at_end)[1], 2) for epoch in (1, 2))

    def opened(state: Any = None) -> Any:
        samples = open_form(form, directory, 1, 2, batch_size=2, shuffle_window=1)
        samples.set_epoch(1)
        return stateful(samples, workers, state=state)

    assert goes_on_at_every_batch(opened) == whole
    again = opened(begin(opened(), 1)[1])
    assert list(again) == whole[1:]
    again.dataset.set_epoch(2)
    assert list(again) == following


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (3, 2)])
def test_stateful_loader_goes_on_within_micro_batches(tmp_path: Path, workers: int, batch_size: int) -> None:
    directory = produce(tmp_path / "s", 13, 4)

    def opened(state: Any = None) -> Any:
        return stateful(open_stream(directory, batch_size=2, at_end="loop"), workers, batch_size, state)

    assert sorted(i for batch in goes_on_at_every_batch(opened) for i in batch) == [0, *range(13)]


def test_stateful_loader_goes_on_in_a_stream_that_has_grown_and_ended_since(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 16, 4, end=False)
    opened = stateful(open_stream(directory, 0, 2, batch_size=2), 2, prefetch_factor=1)
    iterator = iter(opened)
    found = [next(iterator) for _ in range(2)]
    state = opened.state_dict()
    produce(directory, 22, 4)
    whole = in_batches(expected(22, 2, 2)[0], 2)
    assert found + list(iterator) == whole
    assert list(stateful(open_stream(directory, 0, 2, batch_size=2), 2, state=state)) == whole[2:]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 30), st.integers(0, 1), st.integers(0, 12), FORMS)
def test_state_of_any_moment_goes_on_there(
    tmp_path_factory: pytest.TempPathFactory, dp: int, batch: int, total: int, windows: int, taken: int, form: str
) -> None:
    directory = produce(tmp_path_factory.mktemp("any") / "s", total, 4)
    options: dict[str, Any] = {"batch_size": batch, "shuffle_window": windows}
    at_end: Any = form if form in AT_ENDS else "drop"
    for rank, lane in enumerate(expected(total, dp, batch, window=4 * windows, at_end=at_end)):
        stream = open_form(form, directory, rank, dp, **options)
        found = [row["id"] for _, row in zip(range(taken), stream, strict=False)]
        assert found == lane[:taken]
        state = json.loads(json.dumps(stream.state_dict()))
        stream.load_state_dict(state)
        assert ids(stream) == lane[taken:]
        again = open_form(form, directory, rank, dp, state, **options)
        assert again.state_dict() == state
        assert ids(again) == lane[taken:]
        assert state == open_form(form, directory, 0, dp, state, **options).state_dict()


@pytest.mark.parametrize(("at_end", "drawn", "together"), [("drop", 44, 44), ("loop", 48, 45)])
def test_state_of_what_was_consumed_goes_on_with_others(tmp_path: Path, at_end: Any, drawn: int, together: int) -> None:
    directory = produce(tmp_path / "s", 45, 4)
    seen: list[int] = []
    state: State | None = None
    # Five are left for the last two ranks, which draw four in whole micro batches.
    for dp, workers, steps, behind in ((2, 0, 3, 12), (3, 0, 2, 24), (1, 1, 4, 32), (2, 2, None, drawn)):
        lanes = []
        for rank in range(dp):
            stream = open_stream(directory, rank, dp, state=state, batch_size=2, at_end=at_end)
            lanes.append(batches(stream, workers)[:steps])
            seen += [i for batch in lanes[-1] for i in batch]
        assert len({len(lane) for lane in lanes}) == 1
        assert len(seen) == behind
        state = stream.state_dict(behind)
    assert len(set(seen)) == together
    assert state is not None
    assert (state["consumed"], state.get("over")) == (44, None if at_end == "drop" else 4)


@pytest.mark.parametrize(("form", "before", "after"), [("map", 2, 1), ("iterable", 1, 2), *full(("drop", 2, 0))])
def test_torchdata_refuses_other_workers_and_our_state_goes_on(forty: Path, form: str, before: int, after: int) -> None:
    samples = open_form(form, forty, 1, 2, batch_size=2)
    found, saved = begin(stateful(samples, before), 3)
    state = (samples if form == "map" else samples.dataset).state_dict(3 * 4)
    if form != "map":
        refusal_of(RuntimeError, "workers return the samples", samples.state_dict)
    # Ours of a worker says why; torchdata's own are assertions.
    other = stateful(open_form(form, forty, 1, 2, batch_size=2), after, state=saved)
    refused = raised((AssertionError, StateInvalid), lambda: next(iter(other)))
    assert getattr(refused, "field", "workers") == "workers"
    going_on = stateful(open_form(form, forty, 1, 2, state, batch_size=2), after)
    assert found + list(going_on) == in_batches(expected(40, 2, 2)[1], 2)


@pytest.mark.parametrize(("form", "workers"), [("map", 0), ("iterable", 2), *full(("map", 2))])
def test_stateful_loader_that_began_behind_other_ranks_goes_on(forty: Path, form: str, workers: int) -> None:
    """Its own state is counted from the state that the data set began with, which is loaded first again."""
    begun = open_ranks(forty, 3, batch_size=2)[0].state_dict(12)
    whole = list(stateful(open_form("map", forty, 1, 2, begun, batch_size=2), 0))
    assert len(whole) == 7
    found, saved = begin(stateful(open_form(form, forty, 1, 2, begun, batch_size=2), workers), 3)
    assert found + list(stateful(open_form(form, forty, 1, 2, begun, batch_size=2), workers, state=saved)) == whole
    if form == "map":
        other = stateful(open_form(form, forty, 1, 2, batch_size=2), workers, state=saved)
        refusal_of(RuntimeError, "at another position", lambda: next(iter(other)))


def test_epoch_that_was_completed_is_over_for_any_ranks(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    stream = open_stream(directory, 0, 2, batch_size=4, at_end="loop")
    assert len(ids(stream)) == 8
    state = stream.state_dict()
    assert state == stream.state_dict(16)
    assert (state["consumed"], state["over"]) == (8, 8)
    for dp in (2, 1, 3):
        again = open_stream(directory, 0, dp, batch_size=4, at_end="loop", state=json.loads(json.dumps(state)))
        assert (again.consumed, ids(again)) == (16, [])
        assert again.state_dict()["over"] == 8
        assert again.state_dict(16) == again.state_dict()
        refusal_of(ValueError, r"consumed must be 16, .* got 24", again.state_dict, 24)
        again.set_epoch(1)
        assert ids(again) == expected(13, dp, 4, epoch=1, at_end="loop")[0]
        assert again.consumed == 0
    dataset = open_form("map", directory, 0, 2, state, batch_size=4)
    assert (dataset.consumed, len(dataset.rank_indices)) == (8, 0)


def test_state_is_that_of_the_data_set_until_the_end(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    stream = open_stream(directory, 0, 2, batch_size=2, at_end="pad")
    dataset = LazyShardedDataset(directory, dp_rank=1, dp_size=2, batch_size=2)
    for consumed in (0, 4, 8, 12):
        assert stream.state_dict(consumed) == dataset.state_dict(consumed)
    for consumed, what in ((18, "whole micro batches"), (20, "at most 16"), (-4, "at least 0"), (2, "batch_size")):
        refusal_of(ValueError, what, stream.state_dict, consumed)
    raised(TypeError, stream.state_dict, 8.0)  # type: ignore[arg-type]
    state = stream.state_dict(8)
    for form in ("iterable", "drop"):
        assert ids(open_form(form, directory, 0, 2, state, batch_size=2)) == expected(13, 2, 2)[0][4:]


def test_state_within_a_micro_batch_goes_on_only_there(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, 4)
    stream = open_stream(directory, 0, 2, batch_size=4)
    _, state = begin(stream, 6)
    assert (state["consumed"], state["handed_out"]) == (8, 2)
    for workers in (0, 2):
        again = open_stream(directory, 0, 2, batch_size=4, state=state)
        assert [i for batch in batches(again, workers, 4) for i in batch] == expected(24, 2, 4)[0][6:]
    refusals: list[tuple[int, int, Any, str]] = [
        (1, 4, state, "handed_out"),
        (2, 2, state, "handed_out"),
        *((2, 4, state | {"handed_out": value}, "handed_out") for value in (4, -1, True, "2")),
        *((2, 4, stream.dataset.state_dict(8) | {"over": value}, "over") for value in (-1, "8", None)),
    ]
    for dp, size, wrong, field in refusals:
        assert raised(StateInvalid, open_stream, directory, 0, dp, batch_size=size, state=wrong).field == field
    raised(StateInvalid, open_form, "map", directory, 0, 2, state, batch_size=4)
    of_worker = state | {"worker": 0, "workers": 2, "handed_out": 3}
    refusal_of(StateInvalid, "same number of workers", open_stream, directory, 0, 2, batch_size=4, state=of_worker)
    raised(StateMismatch, open_stream, produce(tmp_path / "other", 24, 4), 0, 2, batch_size=4, state=state)


@pytest.mark.parametrize(("at_end", "drawn", "done"), [("drop", 12, {8: 2, 12: 3}), ("loop", 16, {8: 2, 12: 3, 16: 3})])
def test_commit_of_the_last_step_lets_all_go(tmp_path: Path, at_end: Any, drawn: int, done: dict[int, int]) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    stream = open_stream(directory, batch_size=4, at_end=at_end, consumer="run")
    assert len(ids(stream)) == drawn
    # The one that is left over stays: other ranks could still train it.
    for consumed, chunks in done.items():
        assert stream.commit(consumed, last_epoch=True, keep=[stream.state_dict(consumed)])
        cursor = cursor_of(directory)
        assert (cursor.consumed, cursor.chunks_before) == (min(consumed, 12), chunks)
    refusal_of(ValueError, f"at most {drawn}", stream.commit, drawn + 4, last_epoch=True)


# As a source of torchdata.nodes.


def node_loader(stream: Stream, batch_size: int = 2, state: Any = None) -> Any:
    mapped = ParallelMapper(LazyShardedNode(stream), lambda row: row["id"], num_workers=2, method="thread")
    opened: Any = Loader(Prefetcher(Batcher(mapped, batch_size=batch_size, drop_last=False), prefetch_factor=2))
    return continued(opened, state)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_loader_goes_on_at_every_batch(tmp_path: Path, batch_size: int) -> None:
    directory = produce(tmp_path / "s", 21, 4)

    def opened(state: Any = None) -> Any:
        stream = open_stream(directory, 1, 2, batch_size=2, shuffle_window=1, at_end="pad")
        return node_loader(stream, batch_size, state)

    assert goes_on_at_every_batch(opened) == in_batches(expected(21, 2, 2, window=4, at_end="pad")[1], batch_size)


def test_epochs_begin_with_set_epoch_also_after_a_state(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 16, 4)
    first, again = (open_stream(directory, batch_size=2, shuffle_window=1) for _ in range(2))
    loaded, resumed = node_loader(first), node_loader(again)
    assert len([batch for batch, _ in zip(loaded, range(3), strict=False)]) == 3
    resumed.load_state_dict(loaded.state_dict())
    assert len(list(resumed)) in (4, 5)
    again.set_epoch(1)
    assert list(resumed) == in_batches(expected(16, 1, 2, window=4, epoch=1)[0], 2)


# torchdata's iterator joins its threads when it is collected; where the collector runs in one of them, that is refused.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function _ParallelMapperIter:pytest.PytestUnraisableExceptionWarning"
)
def test_errors_come_out_of_the_loader(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 8, 4, end=False)
    raised(WaitTimeout, lambda: list(node_loader(open_stream(directory, batch_size=2, max_wait=0))))
    node = LazyShardedNode(open_stream(directory, batch_size=2))
    state = open_stream(produce(tmp_path / "other", 8, 4), batch_size=2).state_dict()
    raised(StateMismatch, node.reset, state)
    given: list[Any] = ["stream", [1, 2], None, open_rank(directory)]
    for one in given:
        raised(TypeError, LazyShardedNode, one)


def test_stream_in_use_takes_any_state_of_its_course(forty: Path) -> None:
    """Also one before that with which it began, and of a run that has counted its steps."""
    begun, later = (open_stream(forty, batch_size=2).state_dict(count) for count in (20, 30))
    counting = open_stream(forty, batch_size=2, micro_batches_per_step=5).state_dict(10)
    stream = open_stream(forty, batch_size=2, state=begun)
    whole = ids(open_stream(forty, batch_size=2))
    assert ids(stream) == whole[20:]
    for state, position in ((later, 30), (counting, 10), (begun, 20)):
        stream.load_state_dict(state)
        assert ids(stream) == whole[position:]
