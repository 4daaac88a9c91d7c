"""`LazyShardedStream` and `LazyShardedIterable`, over blends too: end by themselves, alike on every rank, or wait."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedIterable, LazyShardedStream
from lazyshard.errors import ChunkRetired, LengthUnknown, StateInvalid, WaitTimeout
from lazyshard.plan.course import AtEnd
from lazyshard.stream.listing import retire
from tests.data.runs import Stream, blend, continued, open_rank, take, write
from tests.data.streams import batches, expected, in_batches, in_step, open_stream
from tests.data.test_live import producing
from tests.data.test_stream_state import goes_on_at_every_batch, stateful
from tests.data.workers import ids
from tests.stream.streams import produce, raised, refusal_of
from tests.tiers import full

AT_ENDS: list[AtEnd] = ["drop", "pad", "loop"]
ANY = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def open_iterable(*given: Any, **options: Any) -> LazyShardedIterable:
    return LazyShardedIterable(open_rank(*given, **options))


@pytest.mark.parametrize("at_end", ["drop", "loop"])
def test_what_is_left_over_is_told_by_rank_0(tmp_path: Path, at_end: Any, caplog: pytest.LogCaptureFixture) -> None:
    directory = produce(tmp_path / "s", 17, 3)
    for rank, lane in enumerate(expected(17, 2, 4, unit=3, at_end=at_end)):
        assert ids(open_stream(directory, rank, 2, batch_size=4, at_end=at_end)) == lane
    (said,) = caplog.messages
    assert f"left over at the end of the epoch: 1, fewer than dp_size * batch_size = 2 * 4; at_end={at_end!r}" in said
    assert ("7" in said.rpartition(":")[2]) == (at_end != "drop")


@pytest.mark.parametrize(("at_end", "workers"), [("drop", 2), ("loop", 0), *full(("pad", 2))])
def test_live_stream_needs_no_length(tmp_path: Path, workers: int, at_end: Any) -> None:
    with producing(tmp_path / "s", 4, 26):
        found = in_step((open_stream(tmp_path / "s", rank, 2, batch_size=2, at_end=at_end) for rank in (0, 1)), workers)
    assert found == [in_batches(lane, 2) for lane in expected(26, 2, 2, at_end=at_end)]


def test_iterable_ends_where_a_live_stream_ends_early(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 8, 4, end=False)
    samples = open_iterable(stream, 0, 2, max_total_samples=100, batch_size=2)
    assert len(samples.dataset) == 100
    produce(stream, 26, 4)
    assert batches(samples, 2) == [[0, 1], [2, 3], [8, 9], [10, 11], [16, 17], [18, 19]]


@pytest.mark.parametrize(("workers", "batch_size"), [(3, 3), (2, 8), (0, 1)])
def test_other_batches_of_the_loader_repeat_and_lose_nothing(tmp_path: Path, workers: int, batch_size: int) -> None:
    directory = produce(tmp_path / "s", 24, 4)
    ranks = [batches(open_stream(directory, rank, 2, batch_size=2), workers, batch_size) for rank in (0, 1)]
    assert list(map(len, ranks[0])) == list(map(len, ranks[1]))
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(24))


@pytest.mark.parametrize(("form", "workers"), [(open_stream, 2), (open_iterable, 0)])
def test_num_samples_go_on_from_epoch_to_epoch(tmp_path: Path, workers: int, form: Callable[..., Any]) -> None:
    samples = form(produce(tmp_path / "s", 9, 4), num_samples=26, batch_size=2)
    assert [i for batch in batches(samples, workers) for i in batch] == [*range(8), *range(8), *range(8), 0, 1]
    assert len(samples.dataset) == 26


def in_turn(directory: Path, rank: int, dp: int, workers: int, batch_size: int, **options: Any) -> list[int]:
    """What a loader hands out whose workers are all this process."""
    shares = []
    for worker in range(workers):
        stream = open_stream(directory, rank, dp, batch_size=batch_size, **options)
        with mock.patch(
            "lazyshard.data.iterable.get_worker_info", lambda w=worker: SimpleNamespace(id=w, num_workers=workers)
        ):
            shares.append(in_batches(ids(iter(stream)), batch_size))
    turns = max(map(len, shares))
    return [i for turn in range(turns) for share in shares if turn < len(share) for i in share[turn]]


@ANY
@given(data=st.data())
def test_ranks_workers_and_ends_are_as_of_lists(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dp, workers, batch = (data.draw(st.integers(1, 4), label=name) for name in ("dp", "workers", "batch size"))
    total, per_chunk = data.draw(st.integers(0, 40), label="samples"), data.draw(st.integers(1, 5), label="per chunk")
    unit, size = data.draw(st.sampled_from([("chunk", per_chunk), ("sample", 1), ("batch", batch)]), label="unit")
    windows = data.draw(st.integers(0, 2), label="windows")
    limit = data.draw(st.sampled_from([None, 15]), label="limit")
    at_end = data.draw(st.sampled_from(AT_ENDS), label="at_end")
    directory = produce(tmp_path_factory.mktemp("any") / "s", total, per_chunk)
    options: dict[str, Any] = {"unit": unit, "shuffle_window": windows, "max_total_samples": limit, "at_end": at_end}
    window = -(-windows * per_chunk // size) * size
    drawn = expected(min(total, limit or total), dp, batch, unit=size, window=window, at_end=at_end)
    for rank, lane in enumerate(drawn):
        assert ids(open_stream(directory, rank, dp, batch_size=batch, **options)) == lane
        assert in_turn(directory, rank, dp, workers, batch, **options) == lane


@ANY
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 30), st.integers(0, 1), st.sampled_from(AT_ENDS))
def test_pass_over_a_growing_stream_goes_on_where_it_had_to_wait(
    tmp_path_factory: pytest.TempPathFactory, dp: int, batch: int, total: int, windows: int, at_end: Any
) -> None:
    directory = tmp_path_factory.mktemp("grows") / "s"
    writer = ChunkWriter(directory, 4)
    options: dict[str, Any] = {"batch_size": batch, "shuffle_window": windows, "max_wait": 0, "at_end": at_end}
    ranks = [open_stream(directory, rank, dp, **options) for rank in range(dp)]
    found: list[list[int]] = [[] for _ in ranks]
    for number in range(total + 1):
        if number == total:
            writer.close()
        else:
            writer.write({"id": number})
        if number % 4 != 3 and number < total:
            continue
        for stream, seen in zip(ranks, found, strict=True):
            try:
                for row in stream:
                    seen.append(row["id"])
                assert number == total
            except WaitTimeout:
                assert number < total
            stream.load_state_dict(stream.state_dict())
        assert len(set(map(len, found))) == 1
    assert found == expected(total, dp, batch, window=4 * windows, at_end=at_end)


def test_samples_that_complete_the_epoch_are_encoded_and_replaced_as_all(tmp_path: Path) -> None:
    def encode(row: dict[str, Any]) -> int:
        if row["id"] in (0, 5):
            raise ValueError("bad")
        return int(row["id"]) * 10

    directory = produce(tmp_path / "s", 6, 4)
    stream = open_stream(directory, encode_fn=encode, batch_size=4, at_end="loop")
    first, *found = list(stream)
    assert first in (10, 20, 30)
    assert found == [10, 20, 30, 40, 40, first, 10]
    assert stream.dataset.stats().bad_samples == 2


def test_loop_names_the_chunk_that_is_gone_where_pad_goes_on(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 13, 4)
    retire(directory, 2, 4)
    state = open_rank(directory, batch_size=4).state_dict(12)
    assert ids(open_stream(directory, batch_size=4, at_end="pad", state=state)) == [12, 9, 10, 11]
    looping = open_stream(directory, batch_size=4, at_end="loop", state=state)
    assert raised(ChunkRetired, lambda: list(looping)).chunks_before == 2


def test_what_cannot_be_a_stream_is_refused_and_a_data_set_in_one_has_no_indices(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 8, 4)
    refused: list[dict[str, Any]] = [{"at_end": "stop"}, {"at_end": "pad", "num_samples": 8}]
    for options in refused:
        refusal_of(ValueError, "at_end", open_stream, directory, **options)
    refusal_of(TypeError, "got '/", lambda: LazyShardedStream(str(directory)))  # type: ignore[type-var]
    used, dataset = open_rank(directory), open_rank(directory)
    used[0]
    refusal_of(RuntimeError, "that is unused", LazyShardedStream, used)
    LazyShardedStream(dataset)
    for ask in (lambda: len(dataset), lambda: dataset.rank_indices, lambda: next(iter(DataLoader(dataset)))):
        refusal_of(LengthUnknown, "pass the stream to the loader", ask)


# As an iterable a blend has the order of its map form, to the end that `stopping` names, of live streams too.

WEIGHTS = {"a": 2.0, "b": 1.0}


def open_blend(directory: Path, rank: int = 0, dp: int = 1, state: Any = None, **options: Any) -> Any:
    return continued(LazyShardedStream(blend(directory, WEIGHTS, rank, dp, **options)), state)


def whole(directory: Path, rank: int, dp: int, epoch: int = 0, **options: Any) -> Any:
    blended = blend(directory, WEIGHTS, rank, dp, **options)
    blended.set_epoch(epoch)
    return take(blended, len(blended.rank_indices))


def write_both(directory: Path, a: int, b: int, *, end: bool = True) -> None:
    for stream in (Stream("a", a, 4), Stream("b", b, 4)):
        write(directory, stream, end=end)


@pytest.mark.parametrize(
    ("stopping", "workers", "a", "b"),
    [("first_exhausted", 3, 9, 30), ("all_exhausted", 0, 9, 30), ("all_exhausted", 1, 22, 13)],
)
def test_order_and_end_are_those_of_the_map_form(tmp_path: Path, stopping: Any, workers: int, a: int, b: int) -> None:
    write_both(tmp_path, a, b)
    options: dict[str, Any] = {"batch_size": 2, "stopping": stopping, "shuffle_window": 1}
    stream = open_blend(tmp_path, 1, 2, **options)
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        assert batches(stream, workers) == in_batches(whole(tmp_path, 1, 2, epoch, **options), 2)


@pytest.mark.parametrize(("stopping", "workers"), [("first_exhausted", 2), ("all_exhausted", 0)])
def test_live_streams_need_no_length(tmp_path: Path, stopping: Any, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 2, "stopping": stopping}
    with producing(tmp_path / "a", 4, 30), producing(tmp_path / "b", 3, 9):
        found = in_step((open_blend(tmp_path, rank, 2, **options) for rank in (0, 1)), workers)
    assert len(found[0]) == (6 if stopping == "first_exhausted" else 11)
    for rank in (0, 1):
        blended = blend(tmp_path, WEIGHTS, rank, 2, **options)
        assert found[rank] == in_batches(ids(blended[index] for index in blended.rank_indices), 2)


def test_pass_waits_for_no_more_than_it_draws_and_num_samples_end_it(tmp_path: Path) -> None:
    write_both(tmp_path, 8, 4, end=False)
    found: list[str] = []
    with pytest.raises(WaitTimeout):
        for row in open_blend(tmp_path, batch_size=3, max_wait=0):
            found.append(row["id"])
    # 8 of a and 4 of b are there, in the proportion of the weights.
    assert sorted(found) == sorted([f"a{i}" for i in range(8)] + [f"b{i}" for i in range(4)])
    write_both(tmp_path, 8, 4)
    assert len(ids(open_blend(tmp_path, batch_size=2, num_samples=31))) == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_goes_on_at_every_batch(tmp_path: Path, workers: int) -> None:
    write_both(tmp_path, 12, 8)

    def opened(state: Any = None) -> Any:
        return stateful(open_blend(tmp_path, 1, 2, batch_size=2), workers, state=state)

    assert goes_on_at_every_batch(opened) == in_batches(whole(tmp_path, 1, 2, batch_size=2), 2)


def test_states_go_on_with_other_ranks_and_within_micro_batches(tmp_path: Path) -> None:
    write_both(tmp_path, 40, 20)
    stream = open_blend(tmp_path, 0, 2, batch_size=2)
    iterator = iter(stream)
    for _ in range(6):
        next(iterator)
    state = stream.state_dict()
    assert state == stream.state_dict(12) == blend(tmp_path, WEIGHTS, 0, 2, batch_size=2).state_dict(12)
    rest = [ids(open_blend(tmp_path, rank, 3, batch_size=2, state=state)) for rank in range(3)]
    drawn = [ids(open_blend(tmp_path, rank, 2, batch_size=2))[:6] for rank in range(2)]
    every = [i for rank in drawn + rest for i in rank]
    # With three ranks the 32 of a that were left end after 30.
    assert len(set(every)) == len(every) == 54
    next(iterator)
    within = json.loads(json.dumps(stream.state_dict()))
    assert within == state | {"handed_out": 1}
    again = open_blend(tmp_path, 0, 2, batch_size=2, state=within)
    assert ids(again) == ids(iterator)
    stream.load_state_dict(state)
    assert ids(stream)[1:] == ids(again)
    assert ids(again) == ids(open_blend(tmp_path, 0, 2, batch_size=2, state=state))[1:]
    refusal_of(StateInvalid, "within a micro batch", blend, tmp_path, WEIGHTS, 0, 2, within, batch_size=2)
    other = open_blend(tmp_path, 0, 3, batch_size=2).state_dict(6)
    refusal_of(RuntimeError, "already in use", stream.load_state_dict, other)


def test_blend_that_cannot_be_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, 8, 4)
    refusal_of(ValueError, "at_end='pad'", LazyShardedStream, blend(tmp_path, WEIGHTS), at_end="pad")
    used: BlendedDataset = blend(tmp_path, WEIGHTS)
    used[0]
    refusal_of(RuntimeError, "that is unused", LazyShardedStream, used)
    refusal_of(RuntimeError, "in no blend", LazyShardedStream, blend(tmp_path, WEIGHTS).datasets[0])
    given: Any = blend(tmp_path, WEIGHTS)
    refusal_of(TypeError, "LazyShardedStream", LazyShardedIterable, given)
