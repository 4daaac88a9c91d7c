"""Cursors and reading marks on disk: whole or not there, whatever fails; in nobody's way."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lazyshard import StreamReader
from lazyshard.errors import FileInvalid, StreamMissing, VersionUnsupported
from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.store import durable
from lazyshard.stream import consumers, read_cursor, read_reading, write_cursor, write_reading
from tests.stream.streams import foreign, forked, names, produce, rows

OLD = Cursor("sft", None, 8, 1, {"dp_size": 2}, 1700000000.0)
NEW = replace(OLD, consumed=16, chunks_before=2, updated_at=1700000009.0)


def test_cursor_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_cursor(tmp_path, OLD)
    assert read_cursor(tmp_path, "sft") == OLD
    write_cursor(str(tmp_path), NEW)
    assert read_cursor(str(tmp_path), "sft") == NEW
    assert names(tmp_path) == ["cursors"]
    assert names(tmp_path / "cursors") == ["sft.json"]


def test_cursor_that_was_never_written_is_none(tmp_path: Path) -> None:
    assert read_cursor(tmp_path, "sft") is None
    assert read_cursor(tmp_path / "nowhere", "sft") is None
    write_cursor(tmp_path, OLD)
    assert read_cursor(tmp_path, "dpo") is None


def test_cursor_into_no_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(StreamMissing, match="no such directory, so no cursor can be written there") as caught:
        write_cursor(tmp_path / "nowhere", OLD)
    assert caught.value.directory == str(tmp_path / "nowhere")
    assert names(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"{", OLD.encode()[:-9], b"\0" * 100])
def test_torn_cursor_is_refused_by_its_name(tmp_path: Path, data: bytes) -> None:
    write_cursor(tmp_path, OLD)
    path = tmp_path / "cursors" / "sft.json"
    path.write_bytes(data)
    with pytest.raises(FileInvalid, match=str(path)) as caught:
        read_cursor(tmp_path, "sft")
    assert caught.value.file == str(path)
    write_cursor(tmp_path, NEW)
    assert read_cursor(tmp_path, "sft") == NEW


def test_cursor_of_a_later_release_is_refused_by_its_name(tmp_path: Path) -> None:
    write_cursor(tmp_path, OLD)
    path = tmp_path / "cursors" / "sft.json"
    path.write_bytes(OLD.encode().replace(b'"format":1', b'"format":2'))
    with pytest.raises(VersionUnsupported, match=str(path)):
        read_cursor(tmp_path, "sft")


def test_cursor_copied_to_another_name_is_refused(tmp_path: Path) -> None:
    write_cursor(tmp_path, OLD)
    os.rename(tmp_path / "cursors" / "sft.json", tmp_path / "cursors" / "dpo.json")
    with pytest.raises(FileInvalid, match="field 'consumer': expected one of dpo, found 'sft'"):
        read_cursor(tmp_path, "dpo")


@pytest.mark.parametrize("call", ["fsync", "write", "replace"])
def test_write_that_fails_leaves_the_old_cursor_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_cursor(tmp_path, OLD)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="no space"):
            write_cursor(tmp_path, NEW)
    assert read_cursor(tmp_path, "sft") == OLD
    assert names(tmp_path / "cursors") == ["sft.json"]
    write_cursor(tmp_path, NEW)
    assert read_cursor(tmp_path, "sft") == NEW


def test_rename_whose_answer_was_lost_counts_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file = os.replace

    def answer_lost(source: Path, target: Path) -> None:
        replace_file(source, target)
        raise OSError(errno.ENOENT, "the server has done that already")

    monkeypatch.setattr(os, "replace", answer_lost)
    write_cursor(tmp_path, NEW)
    assert read_cursor(tmp_path, "sft") == NEW


def recorded(monkeypatch: pytest.MonkeyPatch, also: Callable[[str], None] = lambda _: None) -> list[str]:
    """Lists the calls that decide what is durable: the names synced, and the rename."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.replace

    def note(call: str) -> None:
        also(call)
        calls.append(call)

    def noted_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        note("sync temporary" if path.name.startswith(".sft.") else f"sync {path.name}")
        fsync(fd)

    def noted_rename(source: Path, target: Path) -> None:
        note("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_rename)
    return calls


def test_content_and_every_name_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    calls = recorded(monkeypatch)
    write_cursor(tmp_path / "s", OLD)
    expected = ["sync s", "sync temporary", "rename", "sync cursors"]
    assert calls == expected
    calls.clear()
    # The folder's name again: who made it may have been killed in between.
    write_cursor(tmp_path / "s", NEW)
    assert calls == expected


@pytest.mark.parametrize("point", range(4))
def test_writer_killed_at_any_point_leaves_the_old_cursor_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    write_cursor(tmp_path, OLD)
    passed = iter(range(4))

    def kill(_: str) -> None:
        if next(passed) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        recorded(monkeypatch, kill)
        write_cursor(tmp_path, NEW)

    assert forked(write) == -signal.SIGKILL
    # Killed before the rename, or when it is there but perhaps not durable.
    assert read_cursor(tmp_path, "sft") == (NEW if point == 3 else OLD)
    write_cursor(tmp_path, NEW)
    assert read_cursor(tmp_path, "sft") == NEW


def test_cursors_are_in_no_ones_way(tmp_path: Path) -> None:
    live = produce(tmp_path / "live", 4, end=False)
    waiting = StreamReader(live, max_wait=0)
    write_cursor(live, OLD)
    (live / "cursors" / ".sft.0123456789abcdef").write_bytes(b"killed")
    assert waiting.refresh().samples == 4
    assert [waiting.read(i) for i in range(4)] == rows(0, 4)
    # A producer that starts again clears what is its own only.
    produce(live, 7)
    assert list(StreamReader(live)) == rows(0, 7)
    (live / "head.json").unlink()
    assert list(StreamReader(live)) == rows(0, 7)
    assert read_cursor(live, "sft") == OLD
    others = foreign(tmp_path / "foreign", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n', end=True)
    write_cursor(others, OLD)
    assert list(StreamReader(others, 2)) == rows(0, 3)


def test_directory_of_cursors_alone_is_no_stream_yet(tmp_path: Path) -> None:
    write_cursor(tmp_path, OLD)
    assert list(StreamReader(produce(tmp_path, 3))) == rows(0, 3)


OLD_MARK = ReadingMark("sft", None, 2, 0, 4, 1700000000.0)
NEW_MARK = replace(OLD_MARK, window=1, needs_chunks=8, updated_at=1700000009.0)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_told", set())


def test_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_reading(tmp_path, "sft") is None
    assert write_reading(tmp_path, OLD_MARK)
    assert read_reading(tmp_path, "sft") == OLD_MARK
    assert write_reading(str(tmp_path), NEW_MARK)
    assert read_reading(str(tmp_path), "sft") == NEW_MARK
    assert names(tmp_path / "cursors") == ["sft.reading.json"]


def test_mark_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(_: int) -> None:
        raise AssertionError("a hint was synced")

    monkeypatch.setattr(os, "fsync", sync)
    assert write_reading(tmp_path, OLD_MARK)


@pytest.mark.parametrize(
    "data", [b"", b"{", OLD_MARK.encode()[:-9], OLD_MARK.encode().replace(b'"format":1', b'"format":2')]
)
def test_mark_that_cannot_be_used_is_none(tmp_path: Path, data: bytes) -> None:
    write_reading(tmp_path, OLD_MARK)
    (tmp_path / "cursors" / "sft.reading.json").write_bytes(data)
    assert read_reading(tmp_path, "sft") is None
    assert write_reading(tmp_path, NEW_MARK)
    assert read_reading(tmp_path, "sft") == NEW_MARK


def test_directory_that_refuses_is_told_once_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cursors").write_bytes(b"a file")
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert [write_reading(tmp_path, OLD_MARK) for _ in range(3)] == [False, False, False]
        assert not write_reading(tmp_path / "nowhere", OLD_MARK)
    assert len(caplog.records) == 2
    assert not (tmp_path / "nowhere").exists()


def test_disk_that_is_full_leaves_the_old_mark_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_reading(tmp_path, OLD_MARK)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_all", full)
        assert not write_reading(tmp_path, NEW_MARK)
    assert read_reading(tmp_path, "sft") == OLD_MARK
    assert names(tmp_path / "cursors") == ["sft.reading.json"]
    assert "No space left" in caplog.text


def test_writer_killed_while_it_writes_leaves_the_old_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reading(tmp_path, OLD_MARK)

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        monkeypatch.setattr(os, "replace", kill)
        write_reading(tmp_path, NEW_MARK)

    assert forked(write) == -signal.SIGKILL
    assert read_reading(tmp_path, "sft") == OLD_MARK
    assert len(names(tmp_path / "cursors")) == 2


def test_who_may_write_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("lazyshard.stream.consumers.publish_bytes", refuse)
    assert not write_reading(tmp_path, OLD_MARK)
    (told,) = caplog.messages
    assert told.endswith(f"what this run waits for; let uid {os.geteuid()} write to {tmp_path}/cursors")
