"""Cursors in a bucket: whole, and one run's alone."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset
from lazyshard.errors import CursorTaken, StoreUnavailable
from lazyshard.format.cursor import Cursor, ReadingMark, cursor_name
from lazyshard.format.names import CURSORS
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.store.room import FOLDER_VARIABLE
from lazyshard.store.urls import UrlPath
from lazyshard.stream import CursorOwner, forget_consumer, list_consumers, read_cursor, read_reading, write_reading
from tests.store.server import BROKEN, BUSY, Server
from tests.store.streams import publish, put


def cursor(consumed: int) -> Cursor:
    return Cursor("run", None, consumed, 0, {}, time.time())


def written(bucket: UrlPath) -> int:
    """How far the cursor in a bucket is."""
    found = read_cursor(bucket, "run")
    assert found is not None
    return found.consumed


def test_a_run_commits_and_its_marks_are_read(tmp_path: Path, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 12)
    dataset = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, consumer="run")
    assert [dataset[index]["id"] for index in dataset.rank_indices[:5]] == list(range(5))
    assert dataset.commit(5, last_epoch=True)
    (found,) = list_consumers(bucket, 6)
    assert (found.name, found.problem, found.chunks_before) == ("run", None, 2)
    assert found.cursor is not None
    assert (found.cursor.consumed, found.cursor.stream_id) == (5, dataset.stream_id)
    assert found.reading is not None
    assert found.cursor.state is not None
    after = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, consumer="run")
    after.load_state_dict(found.cursor.state.to_dict())
    assert [after[index]["id"] for index in after.rank_indices] == list(range(5, 12))


def test_a_second_run_on_this_machine_is_refused(bucket: UrlPath) -> None:
    with CursorOwner(bucket, "run") as first:
        first.begin(cursor(1))
        with pytest.raises(CursorTaken) as caught:
            CursorOwner(bucket, "run")
        assert (caught.value.directory, caught.value.consumer) == (str(bucket), "run")
        first.write(cursor(2))
    with CursorOwner(bucket, "run") as second:
        second.begin(cursor(3))
    assert written(bucket) == 3


@pytest.mark.parametrize("between", [False, True])
def test_a_later_run_elsewhere_takes_over_and_nothing_comes_between_the_look_and_the_write(
    between: bool, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = CursorOwner(bucket, "run")
    first.begin(cursor(1))
    # Another machine has another cache, and with it another lock.
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "elsewhere"))
    second = CursorOwner(bucket, "run")

    def begin(method: str, key: str) -> Any:
        if method == "PUT" and not second.begun:
            server.fault = lambda method, key: None
            second.begin(cursor(2))

    if between:
        server.fault = begin
    else:
        second.begin(cursor(2))
    with pytest.raises(CursorTaken):
        first.write(cursor(9))
    assert written(bucket) == 2
    second.write(cursor(3))
    assert written(bucket) == 3


def test_a_cursor_that_was_removed_or_torn_is_written_anew(bucket: UrlPath, caplog: pytest.LogCaptureFixture) -> None:
    path = bucket / CURSORS / cursor_name("run")
    assert isinstance(path, UrlPath)
    with CursorOwner(bucket, "run") as owner:
        owner.begin(cursor(1))
        put(path, b"{")
        owner.write(cursor(2))
        path.store.delete(path.key)
        owner.write(cursor(3))
    assert len([one for one in caplog.messages if "anew" in one]) == 1
    assert written(bucket) == 3


def test_a_write_whose_answer_was_lost_is_no_take_over(server: Server, bucket: UrlPath) -> None:
    with CursorOwner(bucket, "run") as owner:
        owner.begin(cursor(1))
        lost: list[str] = []

        def lose(method: str, key: str) -> Any:
            if method == "PUT" and not lost:
                lost.append(key)
                found = read_cursor(bucket, "run")
                assert found is not None
                put(bucket / CURSORS / cursor_name("run"), replace(found, consumed=2, updated_at=7.0).encode())
                return 500, BROKEN
            return None

        server.fault = lose
        owner.write(replace(cursor(2), updated_at=7.0))
    assert lost
    assert written(bucket) == 2


def test_cursor_that_is_not_written_is_an_error(
    server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.3")
    with CursorOwner(str(bucket), "run") as owner:
        owner.begin(cursor(1))
        server.fault = lambda method, key: (503, BUSY) if method == "PUT" else None
        with pytest.raises(StoreUnavailable) as caught:
            owner.write(cursor(2))
        assert caught.value.url == f"{bucket}/cursors/run.json"
        server.fault = lambda method, key: None
        owner.write(cursor(3))


def test_a_mark_that_cannot_be_written_is_told_once_and_goes_with_its_consumer(
    server: Server, bucket: UrlPath, caplog: pytest.LogCaptureFixture
) -> None:
    mark = ReadingMark("run", None, 1, 0, 3, 1.0)
    assert write_reading(bucket, mark)
    assert read_reading(bucket, "run") == mark
    server.fault = lambda method, key: (503, BUSY)
    with caplog.at_level(logging.WARNING):
        assert not write_reading(bucket, mark)
        assert not write_reading(bucket, mark)
    assert len([one for one in caplog.messages if "cannot be written" in one]) == 1
    server.fault = lambda method, key: None
    with CursorOwner(bucket, "run") as owner:
        owner.begin(cursor(1))
    assert [one.name for one in list_consumers(bucket)] == ["run"]
    assert forget_consumer(bucket, "run")
    assert list_consumers(bucket) == ()
    assert not forget_consumer(bucket, "run")
