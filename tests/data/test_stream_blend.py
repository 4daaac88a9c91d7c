"""A blend as an iterable: the order of its map form, to the end that `stopping` names, of live streams too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard import BlendedDataset, LazyShardedIterable, LazyShardedStream
from lazyshard.errors import StateInvalid, WaitTimeout
from tests.data import blends
from tests.data.blends import Stream, blend, write
from tests.data.streams import batches, in_batches, in_step
from tests.data.test_live import producing
from tests.data.test_stream_state import stateful
from tests.data.workers import ids
from tests.tiers import full

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

WEIGHTS = {"a": 2.0, "b": 1.0}


def open_blend(directory: Path, rank: int = 0, dp: int = 1, state: Any = None, **options: Any) -> Any:
    stream = LazyShardedStream(blend(directory, WEIGHTS, rank, dp, **options))
    if state is not None:
        stream.load_state_dict(state)
    return stream


def whole(directory: Path, rank: int, dp: int, epoch: int = 0, **options: Any) -> Any:
    blended = blend(directory, WEIGHTS, rank, dp, **options)
    blended.set_epoch(epoch)
    return blends.take(blended, len(blended.rank_indices))


def write_both(directory: Path, a: int, b: int, *, end: bool = True) -> None:
    for stream in (Stream("a", a, 4), Stream("b", b, 4)):
        write(directory, stream, end=end)


@pytest.mark.parametrize(
    ("stopping", "workers", "rank", "a", "b"),
    [
        ("first_exhausted", 0, 0, 24, 12),
        ("first_exhausted", 3, 1, 9, 30),
        ("all_exhausted", 0, 1, 9, 30),
        ("all_exhausted", 1, 0, 22, 13),
        *full(("first_exhausted", 1, 1, 22, 13), ("all_exhausted", 3, 0, 24, 12)),
    ],
)
def test_order_and_end_are_those_of_the_map_form(
    tmp_path: Path, stopping: Any, workers: int, rank: int, a: int, b: int
) -> None:
    write_both(tmp_path, a, b)
    options: dict[str, Any] = {"batch_size": 2, "stopping": stopping, "shuffle_window": 1}
    stream = open_blend(tmp_path, rank, 2, **options)
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        assert batches(stream, workers) == in_batches(whole(tmp_path, rank, 2, epoch, **options), 2)


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
    expected = in_batches(whole(tmp_path, 1, 2, batch_size=2), 2)
    opened = stateful(open_blend(tmp_path, 1, 2, batch_size=2), workers)
    states = [opened.state_dict()]
    for batch, wanted in zip(opened, expected, strict=True):
        assert batch == wanted
        states.append(opened.state_dict())
    for count, state in enumerate(states):
        assert list(stateful(open_blend(tmp_path, 1, 2, batch_size=2), workers, state=state)) == expected[count:]


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
    # And back, in one that is used.
    stream.load_state_dict(state)
    assert ids(stream)[1:] == ids(again)
    assert ids(again) == ids(open_blend(tmp_path, 0, 2, batch_size=2, state=state))[1:]
    with pytest.raises(StateInvalid, match="within a micro batch"):
        blend(tmp_path, WEIGHTS, 0, 2, batch_size=2).load_state_dict(within)
    with pytest.raises(RuntimeError, match="in use already"):
        stream.load_state_dict(open_blend(tmp_path, 0, 3, batch_size=2).state_dict(6))


def test_blend_that_cannot_be_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, 8, 4)
    with pytest.raises(ValueError, match="at_end='pad'"):
        LazyShardedStream(blend(tmp_path, WEIGHTS), at_end="pad")
    used: BlendedDataset = blend(tmp_path, WEIGHTS)
    used[0]
    with pytest.raises(RuntimeError, match="not used yet"):
        LazyShardedStream(used)
    with pytest.raises(RuntimeError, match="in no blend"):
        LazyShardedStream(blend(tmp_path, WEIGHTS).datasets[0])
    with pytest.raises(TypeError, match="LazyShardedStream"):
        LazyShardedIterable(blend(tmp_path, WEIGHTS))  # type: ignore[arg-type]
