"""Cursors in a bucket: whole, and one run's alone. The commands that read take a URL as they take a directory."""

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset, Order
from lazyshard.cli.main import main
from lazyshard.errors import CursorTaken, StoreUnavailable
from lazyshard.format.records import CURSORS, chunk_name, seal_name
from lazyshard.format.state import Cursor, ReadingHint, cursor_name
from lazyshard.store.files import FOLDER_VARIABLE, UrlPath
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.stream import CursorOwner, list_consumers, read_cursor, read_reading, write_reading
from tests.store.server import BROKEN, BUSY, Server
from tests.store.streams import publish, put
from tests.stream.streams import raised

DIFFER = r"\([0-9.]+ s, [^)]*\)|\"(seconds|looked_at_s|heartbeat_age_s|free_bytes)\":[^,}]+"
"""What is not the same at another moment, or is not known of a store."""


def cursor(consumed: int) -> Cursor:
    return Cursor("run", None, consumed, 0, {}, time.time())


def written(bucket: UrlPath) -> int:
    """How far the cursor in a bucket is."""
    found = read_cursor(bucket, "run")
    assert found is not None
    return found.consumed


def test_a_run_commits_is_read_gone_on_with_traced_audited_and_forgotten(tmp_path: Path, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 12)
    order = Order(micro_batches_per_step=2, unit="batch")
    options: dict[str, Any] = {"batch_size": 2, "consumer": "run", "order": order}
    dataset = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, **options)
    assert [dataset[index]["id"] for index in dataset.rank_indices[:8]] == list(range(8))
    assert dataset.commit(8, last_epoch=True)
    (found,) = list_consumers(bucket, 6)
    assert (found.name, found.problem, found.chunks_before) == ("run", None, 4)
    assert found.cursor is not None
    assert (found.cursor.consumed, found.cursor.stream_id) == (8, dataset.stream_id)
    assert found.reading is not None
    assert found.cursor.state is not None
    after = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, **options)
    after.load_state_dict(found.cursor.state.to_dict())
    assert [after[index]["id"] for index in after.rank_indices] == list(range(8, 12))
    assert main(["trace", str(bucket), "--consumer", "run", "--step", "1"]) == 0
    assert main(["audit", str(bucket), "--consumer", "run"]) == 9
    assert [main(["forget", str(bucket), "run", "--yes"]) for _ in range(2)] == [0, 3]
    assert list_consumers(bucket) == ()


def test_a_second_run_and_a_write_that_fails(server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.3")
    with CursorOwner(str(bucket), "run") as first:
        first.begin(cursor(1))
        caught = raised(CursorTaken, CursorOwner, bucket, "run")
        assert (caught.directory, caught.consumer) == (str(bucket), "run")
        server.fault = lambda method, key: (503, BUSY) if method == "PUT" else None
        assert raised(StoreUnavailable, first.write, cursor(2)).url == f"{bucket}/cursors/run.json"
        server.fault = lambda method, key: None
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
    raised(CursorTaken, first.write, cursor(9))
    assert written(bucket) == 2
    second.write(cursor(3))
    assert written(bucket) == 3


def test_a_cursor_removed_torn_or_lost(server: Server, bucket: UrlPath, caplog: pytest.LogCaptureFixture) -> None:
    path = bucket / CURSORS / cursor_name("run")
    with CursorOwner(bucket, "run") as owner:
        owner.begin(cursor(1))
        put(path, b"{")
        owner.write(cursor(2))
        path.store.delete(path.key)
        owner.write(cursor(3))
        assert len([one for one in caplog.messages if "again" in one]) == 1
        assert written(bucket) == 3
        lost: list[str] = []

        def lose(method: str, key: str) -> Any:
            if method == "PUT" and not lost:
                lost.append(key)
                found = read_cursor(bucket, "run")
                assert found is not None
                put(path, replace(found, consumed=4, updated_at=7.0).encode())
                return 500, BROKEN
            return None

        server.fault = lose
        owner.write(replace(cursor(4), updated_at=7.0))
    assert lost
    assert written(bucket) == 4


def test_a_mark_that_cannot_be_written(server: Server, bucket: UrlPath, caplog: pytest.LogCaptureFixture) -> None:
    mark = ReadingHint("run", None, 1, 0, 3, 1.0)
    assert write_reading(bucket, mark)
    assert read_reading(bucket, "run") == mark
    server.fault = lambda method, key: (503, BUSY)
    with caplog.at_level(logging.WARNING):
        assert not write_reading(bucket, mark)
        assert not write_reading(bucket, mark)
    assert len([one for one in caplog.messages if "cannot be written" in one]) == 1


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture
def folder(tmp_path: Path, bucket: UrlPath) -> Path:
    return publish(tmp_path / "local", bucket, 25, 4)


@pytest.mark.parametrize(
    "commands",
    [
        ("inspect {}", "inspect {} 7 --rows 2", "status {} --json", "verify {}"),
        pytest.param(("inspect {} --chunk 6", "inspect {} --json", "verify {} --quick --json"), marks=pytest.mark.full),
    ],
    ids=["text", "more"],
)
def test_it_tells_the_same(
    folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str], commands: tuple[str, ...]
) -> None:
    for command in commands:
        told = []
        for stream in (folder, bucket):
            code, text = run(capsys, *command.format(stream).split())
            assert code == 0, text
            told.append(re.sub(DIFFER, "", text).replace(str(stream), "STREAM"))
        assert told[0] == told[1]


@pytest.mark.full
def test_verify_of_a_store(folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str], server: Server) -> None:
    assert len(LazyShardedDataset(bucket, dp_rank=0, dp_size=1)) == 25
    put(bucket / chunk_name(2), (folder / chunk_name(2)).read_bytes().replace(b"9", b"8"))
    put(bucket / chunk_name(3), (folder / chunk_name(3)).read_bytes()[:-3])
    bucket.store.delete(f"{bucket.key}/{seal_name(4)}")
    code, text = run(capsys, "verify", bucket)
    assert code == 5
    damaged = [f"damage: {name}" for name in (chunk_name(2), chunk_name(3), seal_name(4))]
    assert [":".join(line.split(":")[:2]) for line in text.splitlines()[:-1]] == damaged
    server.asked.clear()
    code, text = run(capsys, "verify", bucket, "--quick")
    assert code == 5
    assert chunk_name(3) in text
    assert not server.gets(".jsonl")


def test_nothing_there_and_no_answer_are_told(
    server: Server, bucket: UrlPath, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = ("status", "inspect", "verify")
    for command in commands:
        code, text = run(capsys, command, bucket)
        assert code == 5 if command != "verify" else code in (2, 5, 7)
        assert str(bucket) in text
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.2")
    server.fault = lambda method, key: (503, BUSY)
    for command in commands:
        code, text = run(capsys, command, bucket)
        assert code == 7
        assert "Traceback" not in text
