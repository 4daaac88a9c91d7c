"""A stream as a source of torchdata.nodes: its loader ends with the stream, and goes on exactly at every batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher

from lazyshard.data.node import LazyShardedNode
from lazyshard.errors import StateMismatch, WaitTimeout
from tests.data.runs import open_rank
from tests.data.streams import Stream, expected, in_batches, open_stream
from tests.data.test_live import producing
from tests.stream.streams import produce


def number(row: dict[str, Any]) -> int:
    return int(row["id"])


def loader(stream: Stream, *, prefetch: int = 2, batch_size: int = 2) -> Any:
    mapped = ParallelMapper(LazyShardedNode(stream), number, num_workers=2, method="thread")
    return Loader(Prefetcher(Batcher(mapped, batch_size=batch_size, drop_last=False), prefetch_factor=prefetch))


def test_loader_ends_with_a_live_stream(tmp_path: Path) -> None:
    with producing(tmp_path / "s", 4, 21):
        found = [list(loader(open_stream(tmp_path / "s", rank, 2, batch_size=2, at_end="loop"))) for rank in (0, 1)]
    assert found == [in_batches(lane, 2) for lane in expected(21, 2, 2, at_end="loop")]


@pytest.mark.parametrize("batch_size", [2, 3])
def test_loader_goes_on_at_every_batch(tmp_path: Path, batch_size: int) -> None:
    directory = produce(tmp_path / "s", 21, 4)
    options: dict[str, Any] = {"batch_size": 2, "shuffle_window": 1, "at_end": "pad"}
    whole = in_batches(expected(21, 2, 2, window=4, at_end="pad")[1], batch_size)
    first = loader(open_stream(directory, 1, 2, **options), batch_size=batch_size)
    iterator, states = iter(first), []
    for batch in whole:
        states.append(json.loads(json.dumps(first.state_dict())))
        assert next(iterator) == batch
    assert next(iterator, None) is None
    for count, state in enumerate(states):
        again = loader(open_stream(directory, 1, 2, **options), batch_size=batch_size)
        again.load_state_dict(state)
        assert list(again) == whole[count:]


def test_epochs_begin_with_set_epoch_also_after_a_state(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 16, 4)
    first, again = (open_stream(directory, batch_size=2, shuffle_window=1) for _ in range(2))
    loaded, resumed = loader(first), loader(again)
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
    with pytest.raises(WaitTimeout):
        list(loader(open_stream(directory, batch_size=2, max_wait=0)))
    node = LazyShardedNode(open_stream(directory, batch_size=2))
    state = open_stream(produce(tmp_path / "other", 8, 4), batch_size=2).state_dict()
    with pytest.raises(StateMismatch):
        node.reset(state)


def test_what_is_no_stream_is_refused(tmp_path: Path) -> None:
    given: list[Any] = ["stream", [1, 2], None, open_rank(produce(tmp_path / "s", 8, 4))]
    for one in given:
        with pytest.raises(TypeError):
            LazyShardedNode(one)
