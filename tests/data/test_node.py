"""A stream as a source of torchdata.nodes: its loader ends with the stream, and goes on exactly at every batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher

from lazyshard import LazyShardedDataset
from lazyshard.data.node import LazyShardedNode
from lazyshard.errors import StateMismatch, WaitTimeout
from tests.data.streams import Stream, expected, in_batches, open_stream
from tests.data.test_live import producing
from tests.stream.streams import produce


def number(row: dict[str, Any]) -> int:
    return int(row["id"])


def loader(stream: Stream, *, prefetch: int = 2, batch_size: int = 2) -> Any:
    mapped = ParallelMapper(LazyShardedNode(stream), number, num_workers=2, method="thread")
    return Loader(Prefetcher(Batcher(mapped, batch_size=batch_size, drop_last=False), prefetch_factor=prefetch))


@pytest.mark.parametrize("at_end", ["drop", "pad", "loop"])
def test_loader_ends_with_a_live_stream(tmp_path: Path, at_end: Any) -> None:
    with producing(tmp_path / "s", 4, 21):
        found = [list(loader(open_stream(tmp_path / "s", rank, 2, batch_size=2, at_end=at_end))) for rank in (0, 1)]
    assert found == [in_batches(lane, 2) for lane in expected(21, 2, 2, at_end=at_end)]


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
    stream = open_stream(directory, batch_size=2, shuffle_window=1)
    first = loader(stream)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    again = open_stream(directory, batch_size=2, shuffle_window=1)
    resumed = loader(again)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 5
    again.set_epoch(1)
    assert list(resumed) == in_batches(expected(16, 1, 2, window=4, epoch=1)[0], 2)


def test_errors_come_out_of_the_loader(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 8, 4, end=False)
    with pytest.raises(WaitTimeout, match="waiting for chunk 2"):
        list(loader(open_stream(directory, batch_size=2, max_wait=0)))
    node = LazyShardedNode(open_stream(directory, batch_size=2))
    state = open_stream(produce(tmp_path / "other", 8, 4), batch_size=2).state_dict()
    with pytest.raises(StateMismatch, match="belongs to another stream"):
        node.reset(state)


@pytest.mark.parametrize("given", ["stream", [1, 2], None])
def test_what_is_no_stream_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a stream, as in LazyShardedNode\(LazyShardedStream\("):
        LazyShardedNode(given)


def test_a_data_set_is_no_stream(tmp_path: Path) -> None:
    dataset = LazyShardedDataset(produce(tmp_path / "s", 8, 4), dp_rank=0, dp_size=1)
    with pytest.raises(TypeError, match="expected a stream"):
        LazyShardedNode(dataset)  # type: ignore[arg-type]
