"""Reading marks on disk: whole or not there, never in a reader's way."""

from __future__ import annotations

import errno
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lazyshard.format import ReadingMark
from lazyshard.storage import durable, read_reading, reading, write_reading
from tests.storage.streams import forked, names

OLD = ReadingMark("sft", None, 2, 0, 4, 1700000000.0)
NEW = replace(OLD, window=1, needs_chunks=8, updated_at=1700000009.0)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_told", set())


def test_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_reading(tmp_path, "sft") is None
    assert write_reading(tmp_path, OLD)
    assert read_reading(tmp_path, "sft") == OLD
    assert write_reading(str(tmp_path), NEW)
    assert read_reading(str(tmp_path), "sft") == NEW
    assert names(tmp_path / "cursors") == ["sft.reading.json"]


def test_mark_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(_: int) -> None:
        raise AssertionError("a hint was synced")

    monkeypatch.setattr(os, "fsync", sync)
    assert write_reading(tmp_path, OLD)


@pytest.mark.parametrize("data", [b"", b"{", OLD.encode()[:-9], OLD.encode().replace(b'"format":1', b'"format":2')])
def test_mark_that_cannot_be_used_is_none(tmp_path: Path, data: bytes) -> None:
    write_reading(tmp_path, OLD)
    (tmp_path / "cursors" / "sft.reading.json").write_bytes(data)
    assert read_reading(tmp_path, "sft") is None
    assert write_reading(tmp_path, NEW)
    assert read_reading(tmp_path, "sft") == NEW


def test_named_pipe_does_not_hang_who_reads_a_mark(tmp_path: Path) -> None:
    (tmp_path / "cursors").mkdir()
    os.mkfifo(tmp_path / "cursors" / "sft.reading.json")
    assert read_reading(tmp_path, "sft") is None


@pytest.mark.parametrize("name", ["../sft", "a/b", "", ".sft", "sft.reading"])
def test_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="the name of a consumer is"):
        read_reading(tmp_path, name)


def test_directory_that_refuses_is_told_once_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cursors").write_bytes(b"a file")
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert [write_reading(tmp_path, OLD) for _ in range(3)] == [False, False, False]
        assert not write_reading(tmp_path / "nowhere", OLD)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert f"{tmp_path}/cursors/sft.reading.json: cannot be written (File exists)" in told[0]
    assert "the producer is not told how far this run reads" in told[0]
    assert not (tmp_path / "nowhere").exists()


def test_disk_that_is_full_leaves_the_old_mark_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_reading(tmp_path, OLD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_all", full)
        assert not write_reading(tmp_path, NEW)
    assert read_reading(tmp_path, "sft") == OLD
    assert names(tmp_path / "cursors") == ["sft.reading.json"]
    assert "No space left" in caplog.text


def test_writer_killed_while_it_writes_leaves_the_old_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reading(tmp_path, OLD)

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        monkeypatch.setattr(os, "replace", kill)
        write_reading(tmp_path, NEW)

    assert forked(write) == -signal.SIGKILL
    assert read_reading(tmp_path, "sft") == OLD
    assert len(names(tmp_path / "cursors")) == 2


def test_who_may_write_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("lazyshard.storage.reading.publish_bytes", refuse)
    assert not write_reading(tmp_path, OLD)
    (told,) = caplog.messages
    assert told.endswith(f"what this run waits for; let uid {os.geteuid()} write to {tmp_path}/cursors")
