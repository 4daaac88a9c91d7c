"""A blend as an iterable: the order of its map form, to the end that `stopping` names, of live streams too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from lazyshard import BlendedDataset, LazyShardedIterable, LazyShardedStream
from lazyshard.errors import LengthUnknown, StateInvalid, WaitTimeout
from tests.data import blends
from tests.data.blends import Stream, blend, write
from tests.data.streams import batches, in_batches, in_step
from tests.data.test_live import producing
from tests.data.workers import DEADLINE_S, ids

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

WEIGHTS = {"a": 2.0, "b": 1.0}
STOPPING = ["first_exhausted", "all_exhausted"]


def open_blend(directory: Path, rank: int = 0, dp: int = 1, state: Any = None, **options: Any) -> Any:
    stream = LazyShardedStream(blend(directory, WEIGHTS, rank, dp, **options))
    if state is not None:
        stream.load_state_dict(state)
    return stream


def whole(directory: Path, rank: int, dp: int, **options: Any) -> list[str]:
    blended = blend(directory, WEIGHTS, rank, dp, **options)
    return blends.take(blended, len(blended.rank_indices))


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(("a", "b"), [(22, 13), (9, 30), (40, 6), (24, 12)])
def test_order_and_end_are_those_of_the_map_form(tmp_path: Path, stopping: Any, workers: int, a: int, b: int) -> None:
    for stream in (Stream("a", a, 4), Stream("b", b, 3)):
        write(tmp_path, stream)
    options: dict[str, Any] = {"batch_size": 2, "stopping": stopping, "shuffle_window": 1}
    for rank in (0, 1):
        found = batches(open_blend(tmp_path, rank, 2, **options), workers)
        assert found == in_batches(whole(tmp_path, rank, 2, **options), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("workers", [0, 2])
def test_live_streams_need_no_length(tmp_path: Path, stopping: Any, workers: int) -> None:
    with producing(tmp_path / "a", 4, 30), producing(tmp_path / "b", 3, 9):
        found = in_step((open_blend(tmp_path, rank, 2, batch_size=2, stopping=stopping) for rank in (0, 1)), workers)
    expected = []
    for rank in (0, 1):
        blended = blend(tmp_path, WEIGHTS, rank, 2, batch_size=2, stopping=stopping)
        expected.append(in_batches(ids(blended[index] for index in blended.rank_indices), 2))
    assert found == expected
    assert len(found[0]) == (6 if stopping == "first_exhausted" else 11)


def test_pass_waits_for_no_more_than_it_draws(tmp_path: Path) -> None:
    for stream in (Stream("a", 8, 4), Stream("b", 4, 4)):
        write(tmp_path, stream, end=False)
    with pytest.raises(LengthUnknown):
        len(blend(tmp_path, WEIGHTS, batch_size=3))
    found: list[str] = []
    with pytest.raises(WaitTimeout):
        for row in open_blend(tmp_path, batch_size=3, max_wait=0):
            found.append(row["id"])
    # 8 of a and 4 of b are there, in the proportion of the weights.
    assert sorted(found) == sorted([f"a{i}" for i in range(8)] + [f"b{i}" for i in range(4)])


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_goes_on_at_every_batch(tmp_path: Path, workers: int) -> None:
    for stream in (Stream("a", 22, 4), Stream("b", 13, 3)):
        write(tmp_path, stream)

    def loader(state: Any = None) -> Any:
        waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
        stream = open_blend(tmp_path, 1, 2, batch_size=2)
        opened = StatefulDataLoader(stream, batch_size=2, num_workers=workers, collate_fn=ids, **waiting)
        if state is not None:
            opened.load_state_dict(state)
        return opened

    expected = in_batches(whole(tmp_path, 1, 2, batch_size=2), 2)  # type: ignore[arg-type]
    opened = loader()
    iterator, states = iter(opened), [opened.state_dict()]
    for batch in iterator:
        assert batch == expected[len(states) - 1]
        states.append(opened.state_dict())
    assert len(states) == len(expected) + 1
    for count, state in enumerate(states):
        assert list(loader(state)) == expected[count:]


def test_states_go_on_with_other_ranks_and_within_micro_batches(tmp_path: Path) -> None:
    for stream in (Stream("a", 40, 4), Stream("b", 20, 4)):
        write(tmp_path, stream)
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
    with pytest.raises(StateInvalid, match="stands within a micro batch"):
        blend(tmp_path, WEIGHTS, 0, 2, batch_size=2).load_state_dict(within)
    with pytest.raises(RuntimeError, match="in use already and stands elsewhere"):
        stream.load_state_dict(open_blend(tmp_path, 0, 3, batch_size=2).state_dict(6))


def test_num_samples_end_it_whatever_the_streams(tmp_path: Path) -> None:
    for stream in (Stream("a", 8, 4), Stream("b", 4, 4)):
        write(tmp_path, stream)
    assert len(ids(open_blend(tmp_path, batch_size=2, num_samples=31))) == 30


def test_epochs_come_one_after_another(tmp_path: Path) -> None:
    for stream in (Stream("a", 16, 4), Stream("b", 8, 4)):
        write(tmp_path, stream)
    stream = open_blend(tmp_path, batch_size=2, shuffle_window=1)
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        blended = blend(tmp_path, WEIGHTS, batch_size=2, shuffle_window=1)
        blended.set_epoch(epoch)
        assert blends.ids(list(stream)) == blends.take(blended, 24)


def test_blend_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for stream in (Stream("a", 8, 4), Stream("b", 4, 4)):
        write(tmp_path, stream)
    with pytest.raises(ValueError, match="at_end='pad' is for a single stream: a blend ends by its `stopping`"):
        LazyShardedStream(blend(tmp_path, WEIGHTS), at_end="pad")
    used: BlendedDataset = blend(tmp_path, WEIGHTS)
    used[0]
    with pytest.raises(RuntimeError, match="a blend that is not used yet"):
        LazyShardedStream(used)
    with pytest.raises(RuntimeError, match="not used yet and in no blend"):
        LazyShardedStream(blend(tmp_path, WEIGHTS).datasets[0])


def test_an_iterable_with_a_length_takes_no_blend(tmp_path: Path) -> None:
    write(tmp_path, Stream("a", 8, 4))
    write(tmp_path, Stream("b", 8, 4))
    with pytest.raises(TypeError, match="a blend goes into a LazyShardedStream"):
        LazyShardedIterable(blend(tmp_path, WEIGHTS))  # type: ignore[arg-type]
