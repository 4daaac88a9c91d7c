"""Commits: what the cursor says, which chunks it lets the producer delete, and who may write it."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset
from lazyshard.errors import CursorTaken, StateMismatch, WriterFailed
from lazyshard.format.state import RunState
from lazyshard.stream import read_cursor
from tests.data.runs import State, open_ranks
from tests.data.workers import loader
from tests.stream.streams import forked, produce


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Forty samples in ten chunks."""
    return produce(tmp_path / "s", 40, 4)


def open_run(stream: Path, dp: int = 2, state: State | None = None, **options: Any) -> list[LazyShardedDataset]:
    return open_ranks(stream, dp, state, **{"consumer": "sft", **options})


def chunks_before(stream: Path, consumer: str = "sft") -> int:
    cursor = read_cursor(stream, consumer)
    assert cursor is not None
    return cursor.chunks_before


def test_cursor_holds_the_state_and_the_numbers_of_the_plan(stream: Path) -> None:
    dataset = open_run(stream, batch_size=2, shuffle_window=1, seed=3)[0]
    assert dataset.commit(20, last_epoch=True) is True
    cursor = read_cursor(stream, "sft")
    assert cursor is not None
    assert (cursor.stream_id, cursor.consumed, cursor.chunks_before) == (dataset.stream_id, 20, 4)
    assert cursor.plan == {"dp_size": 2, "batch_size": 2, "unit": 4, "window": 4, "seed": 3}
    assert cursor.state == RunState.from_dict(dataset.state_dict(20), "here")
    assert cursor.owner


@pytest.mark.parametrize(
    ("options", "live", "expected"),
    [
        # In order, both ranks: a stripe of two chunks is needed whole until it is drawn. By consumed 0, 6, 8, 16, ...
        ({}, False, [0, 0, 2, 4, 4, 8, 10]),
        ({"shuffle_window": 2}, True, [0, 0, 0, 4, 4, 8, 10]),
        ({"unit": "sample"}, True, [0, 1, 2, 4, 5, 9, 10]),
    ],
)
def test_chunks_that_nothing_needs(tmp_path: Path, live: bool, options: dict[str, Any], expected: list[int]) -> None:
    stream = produce(tmp_path / "s", 24 if live else 40, 4, end=not live)
    dataset = open_run(stream, max_total_samples=100, **options)[0]
    assert (len(dataset) == 100) is live
    if live:
        produce(stream, 40, 4)
    found = []
    for consumed in (0, 6, 8, 16, 22, 36, 40):
        dataset.commit(consumed, last_epoch=True)
        found.append(chunks_before(stream))
    assert found == expected


def test_chunks_of_older_checkpoints_and_of_epochs_to_come_stay(stream: Path) -> None:
    dataset = open_run(stream)[0]
    older = [dataset.state_dict(consumed) for consumed in (24, 9 * 2, 30, 40)]
    for keep, before in ((older[:3], 4), (older[:1], 6), ([], 8)):
        dataset.commit(32, last_epoch=True, keep=keep)
        assert chunks_before(stream) == before
    dataset.commit(40, last_epoch=False)
    assert chunks_before(stream) == 0
    dataset.set_epoch(1)
    # The end of the epoch before, which has another one before it, keeps everything.
    for keep, before in (([], 8), (older[3:], 0)):
        dataset.commit(32, last_epoch=True, keep=keep)
        assert chunks_before(stream) == before
    steps = open_run(stream, num_samples=80, consumer="steps")[0]
    for consumed, before in ((38, 0), (56, 4)):
        steps.commit(72, last_epoch=True, keep=[steps.state_dict(consumed)])
        assert chunks_before(stream, "steps") == before


def test_checkpoint_of_other_ranks_can_be_named(stream: Path) -> None:
    before = open_run(stream)[0].state_dict(12)
    dataset = open_run(stream, 3, before)[0]
    for consumed, expected in ((12, 2), (15, 2), (24, 4), (36, 7), (39, 7)):
        dataset.commit(consumed, last_epoch=True)
        # One is left over in the end, which other ranks could still draw.
        assert chunks_before(stream) == expected, consumed
    dataset.commit(39, last_epoch=True, keep=[before])
    assert chunks_before(stream) == 2


def test_one_rank_writes_and_what_cannot_be_is_refused_on_every_rank(stream: Path) -> None:
    with pytest.raises(ValueError, match="consumer=NAME"):
        open_ranks(stream, 1)[0].commit(4, last_epoch=True)
    ranks = open_run(stream)
    for dataset in ranks:
        with pytest.raises(ValueError):
            dataset.commit(15, last_epoch=True)
    other = open_ranks(stream, 2, seed=1)[0].state_dict(8)
    with pytest.raises(StateMismatch):
        ranks[0].commit(16, last_epoch=True, keep=[other])
    assert read_cursor(stream, "sft") is None
    assert [dataset.commit(16, last_epoch=True) for dataset in reversed(ranks)] == [False, True]
    assert chunks_before(stream) == 4


def test_workers_commit_nothing(stream: Path) -> None:
    dataset = open_run(stream, 1)[0]

    def commit(rows: list[Any]) -> None:
        with pytest.raises(RuntimeError):
            dataset.commit(len(rows), last_epoch=True)

    assert len(list(loader(dataset, dataset.rank_indices[:4], 1, batch_size=4, collate_fn=commit))) == 1
    assert read_cursor(stream, "sft") is None


def test_second_run_of_a_name_is_refused_or_takes_over(stream: Path) -> None:
    first, second = (open_run(stream, 1)[0] for _ in range(2))
    first.commit(4, last_epoch=True)
    with pytest.raises(CursorTaken):
        second.commit(8, last_epoch=True)
    assert chunks_before(stream) == 1
    second.commit(8, last_epoch=True, take_over=True)
    with pytest.raises(CursorTaken):
        first.commit(12, last_epoch=True)
    second.commit(16, last_epoch=True)
    assert chunks_before(stream) == 4


def test_fork_does_not_write_its_parents_cursor_and_a_copy_does_not_own_it(stream: Path) -> None:
    dataset = open_run(stream, 1)[0]
    dataset.commit(4, last_epoch=True)
    assert forked(lambda: dataset.commit(8, last_epoch=True)) == 1
    copied = pickle.loads(pickle.dumps(dataset))
    with pytest.raises(CursorTaken):
        copied.commit(8, last_epoch=True)
    dataset.commit(12, last_epoch=True)
    assert chunks_before(stream) == 3


def test_a_disk_that_takes_no_cursor_is_told_and_tried_again(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    dataset = open_run(stream)[0]
    with monkeypatch.context() as patched:
        patched.setattr("lazyshard.store.durable.write_all", full)
        for _ in range(2):
            with pytest.raises(WriterFailed, match=r"'sft'.*No space left") as told:
                dataset.commit(16, last_epoch=True)
            assert told.value.errno == errno.ENOSPC
    dataset.commit(16, last_epoch=True)
    assert chunks_before(stream) == 4
    dataset.commit(24, last_epoch=True)
    assert chunks_before(stream) == 6


def test_run_that_goes_back_takes_its_cursor_back(stream: Path) -> None:
    first = open_run(stream)[0]
    older = first.state_dict(16)
    first.commit(32, last_epoch=True)
    del first
    again = open_run(stream, 2, older)[0]
    again.commit(again.consumed, last_epoch=True)
    assert chunks_before(stream) == 4
