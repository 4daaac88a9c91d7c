"""Who consumes a stream, by what is in `cursors/`: never an exception for what somebody else left there."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lazyshard import StreamReader
from lazyshard.errors import FileInvalid, StreamMissing, VersionUnsupported
from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.format.records import Manifest
from lazyshard.store import durable
from lazyshard.stream import (
    Consumer,
    consumers,
    forget_consumer,
    list_consumers,
    read_cursor,
    read_reading,
    write_cursor,
    write_reading,
)
from tests.stream.streams import foreign, names, produce, raising, recorded, rows


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 8, end=False)


def identity(stream: Path) -> str:
    return Manifest.decode((stream / "stream.json").read_bytes()).stream_id


def cursor(stream: Path, name: str = "sft", chunks: int = 2) -> Cursor:
    return Cursor(name, identity(stream), chunks * 2, chunks, {"dp_size": 1}, 1700000000.0)


def mark(stream: Path, name: str = "sft", needs: int = 4) -> ReadingMark:
    return ReadingMark(name, identity(stream), 2, 0, needs, 1700000000.0)


def test_consumers_are_listed_by_name_with_what_they_have_told(stream: Path) -> None:
    assert (list_consumers(stream), forget_consumer(stream / "nowhere", "sft")) == ((), False)
    odd = "a.reading.b.json"
    for told in (cursor(stream), cursor(stream, "dpo", 1), cursor(stream, odd)):
        write_cursor(stream, told)
    for hint in (mark(stream), mark(stream, "new"), mark(stream, "dpo")):
        assert write_reading(stream, hint)
    folder = stream / "cursors"
    (folder / "dpo.reading.json").write_bytes(b"torn")
    # Names that are nobody's.
    for name in (".sft.0123456789abcdef", ".x.json", "README", "sft.json.bak", "sft.yaml", ".json", ".reading.json"):
        (folder / name).write_bytes(b"x")
    with open(os.fsencode(folder) + b"/\xff.json", "wb"):
        pass
    assert list_consumers(str(stream), 4) == (
        Consumer(odd, cursor(stream, odd), None, None),
        Consumer("dpo", cursor(stream, "dpo", 1), None, None),
        Consumer("new", None, mark(stream, "new"), None),
        Consumer("sft", cursor(stream), mark(stream), None),
    )
    assert [one.chunks_before for one in list_consumers(stream)] == [2, 1, 0, 2]


@pytest.mark.parametrize("stream_id", ["f" * 32, None])
def test_cursor_and_mark_of_another_stream_do_not_count(stream: Path, stream_id: str | None) -> None:
    write_cursor(stream, replace(cursor(stream), stream_id=stream_id))
    write_reading(stream, replace(mark(stream), stream_id=stream_id))
    (found,) = list_consumers(stream)
    assert (found.cursor, found.reading, found.chunks_before) == (None, None, 0)
    assert found.problem is not None and identity(stream) in found.problem
    others = foreign(stream / "foreign", b'{"id":0}\n{"id":1}\n')
    told = Cursor("sft", None, 2, 1, {}, 1700000000.0)
    write_cursor(others, told)
    assert list_consumers(others) == (Consumer("sft", told, None, None),)


def test_damaged_manifest_and_cursors_that_cannot_be_listed_are_raised_and_not_taken_for_none(stream: Path) -> None:
    write_cursor(stream, cursor(stream))
    (stream / "cursors").rename(stream / "moved")
    (stream / "cursors").write_bytes(b"a file")
    with pytest.raises(NotADirectoryError):
        list_consumers(stream)
    (stream / "cursors").unlink()
    (stream / "moved").rename(stream / "cursors")
    (stream / "stream.json").write_bytes(b"{")
    with pytest.raises(FileInvalid):
        list_consumers(stream)


def test_forgotten_consumer_leaves_nothing_and_others_stay(stream: Path) -> None:
    for name in ("sft", "sft2"):
        write_cursor(stream, cursor(stream, name))
        write_reading(stream, mark(stream, name))
    folder = stream / "cursors"
    # What a kill has left half written goes too; of others, and of names that only look alike, nothing.
    for name in (".sft.0123456789abcdef", ".sft.reading.0123456789abcdef", ".sft2.0123456789abcdef", ".sft.x"):
        (folder / name).write_bytes(b"half")
    assert forget_consumer(stream, "sft") is True
    assert names(folder) == [".sft.x", ".sft2.0123456789abcdef", "sft2.json", "sft2.reading.json"]
    assert (read_cursor(stream, "sft"), read_reading(stream, "sft")) == (None, None)
    assert forget_consumer(str(stream), "sft") is False
    for left in ("sft.json", "sft.reading.json"):
        (folder / left).write_bytes(b"torn")
        assert forget_consumer(stream, "sft") is True


def test_forgetting_is_durable(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cursor(stream, cursor(stream))
    calls = recorded(monkeypatch)
    forget_consumer(stream, "sft")
    assert calls == ["unlink sft.reading.json", "unlink sft.json", "sync cursors"]


OLD = Cursor("sft", None, 8, 1, {"dp_size": 2}, 1700000000.0)
NEW = replace(OLD, consumed=16, chunks_before=2, updated_at=1700000009.0)


def test_cursor_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_cursor(tmp_path, "sft") is None
    assert read_cursor(tmp_path / "nowhere", "sft") is None
    with pytest.raises(StreamMissing) as caught:
        write_cursor(tmp_path / "nowhere", OLD)
    assert (caught.value.directory, names(tmp_path)) == (str(tmp_path / "nowhere"), [])
    write_cursor(tmp_path, OLD)
    assert read_cursor(tmp_path, "sft") == OLD
    write_cursor(str(tmp_path), NEW)
    assert (read_cursor(str(tmp_path), "sft"), read_cursor(tmp_path, "dpo")) == (NEW, None)
    assert (names(tmp_path), names(tmp_path / "cursors")) == (["cursors"], ["sft.json"])


def test_cursor_that_cannot_be_used_is_refused_by_its_name(tmp_path: Path) -> None:
    invalid = (b"", b"{", OLD.encode()[:-9], b"\0" * 100, OLD.encode().replace(b"sft", b"dpo"))
    later = OLD.encode().replace(b'"format":1', b'"format":2')
    cases: list[tuple[bytes, type[Exception]]] = [(later, VersionUnsupported), *((one, FileInvalid) for one in invalid)]
    for data, error in cases:
        write_cursor(tmp_path, OLD)
        path = tmp_path / "cursors" / "sft.json"
        path.write_bytes(data)
        with pytest.raises(error, match=str(path)):
            read_cursor(tmp_path, "sft")


@pytest.mark.parametrize("call", ["fsync", "write", "replace"])
def test_failed_write_leaves_the_old_cursor_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write_cursor(tmp_path, OLD)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, call, raising(OSError(errno.ENOSPC, "no space")))
        write_cursor(tmp_path, NEW)
    assert read_cursor(tmp_path, "sft") == OLD
    assert names(tmp_path / "cursors") == ["sft.json"]


def test_cursors_are_in_no_ones_way(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    write_cursor(live, OLD)
    waiting = StreamReader(produce(live, 4, end=False), max_wait=0)
    (live / "cursors" / ".sft.0123456789abcdef").write_bytes(b"killed")
    assert waiting.refresh().samples == 4
    # A producer that starts again clears what is its own only.
    produce(live, 7)
    (live / "head.json").unlink()
    assert list(StreamReader(live)) == rows(0, 7)
    assert read_cursor(live, "sft") == OLD
    others = foreign(tmp_path / "foreign", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n', end=True)
    write_cursor(others, OLD)
    assert list(StreamReader(others, 2)) == rows(0, 3)


OLD_MARK = ReadingMark("sft", None, 2, 0, 4, 1700000000.0)
NEW_MARK = replace(OLD_MARK, window=1, needs_chunks=8, updated_at=1700000009.0)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_told", set())


def test_mark_is_read_as_it_was_written_and_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raising(AssertionError("a hint was synced")))
    assert read_reading(tmp_path, "sft") is None
    for mark in (OLD_MARK, NEW_MARK):
        assert write_reading(str(tmp_path), mark)
        assert read_reading(str(tmp_path), "sft") == mark
    assert names(tmp_path / "cursors") == ["sft.reading.json"]
    # One that cannot be used is none.
    for data in (b"", b"{", OLD_MARK.encode()[:-9], OLD_MARK.encode().replace(b'"format":1', b'"format":2')):
        (tmp_path / "cursors" / "sft.reading.json").write_bytes(data)
        assert read_reading(tmp_path, "sft") is None


def test_directory_that_refuses_is_told_once_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = ((OSError(errno.ENOSPC, "no space"), "no space"), (PermissionError(13, "no"), f"uid {os.geteuid()}"))
    for error, told in refused:
        directory = tmp_path / told
        directory.mkdir()
        write_reading(directory, OLD_MARK)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_all", raising(error))
            assert [write_reading(directory, NEW_MARK) for _ in range(3)] == [False, False, False]
        assert (len(caplog.records), told in caplog.text) == (1, True)
        assert read_reading(directory, "sft") == OLD_MARK
        assert names(directory / "cursors") == ["sft.reading.json"]
        caplog.clear()
    (tmp_path / "cursors").write_bytes(b"a file")
    for place in (tmp_path, tmp_path / "nowhere"):
        assert not write_reading(place, OLD_MARK)
    assert len(caplog.records) == 2
    assert not (tmp_path / "nowhere").exists()
