"""Who consumes a stream, by what is in `cursors/`: never an exception for what somebody else left there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lazyshard.errors import FileInvalid, FileUnreadable
from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.format.records import Manifest
from lazyshard.stream import (
    Consumer,
    forget_consumer,
    list_consumers,
    read_cursor,
    read_reading,
    write_cursor,
    write_reading,
)
from tests.stream.streams import foreign, forked, names, needs_root, produce


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
    for told in (cursor(stream), cursor(stream, "dpo", 1)):
        write_cursor(stream, told)
    for hint in (mark(stream), mark(stream, "new")):
        assert write_reading(stream, hint)
    assert list_consumers(stream, 4) == (
        Consumer("dpo", cursor(stream, "dpo", 1), None, None),
        Consumer("new", None, mark(stream, "new"), None),
        Consumer("sft", cursor(stream), mark(stream), None),
    )
    assert [one.chunks_before for one in list_consumers(str(stream))] == [1, 0, 2]


def test_stream_without_cursors_has_no_consumers(stream: Path) -> None:
    assert list_consumers(stream) == ()
    assert forget_consumer(stream, "sft") is False
    assert forget_consumer(stream / "nowhere", "sft") is False
    (stream / "cursors").mkdir()
    assert list_consumers(stream) == ()


def test_names_that_are_nobodys_are_passed_over(stream: Path) -> None:
    write_cursor(stream, cursor(stream))
    folder = stream / "cursors"
    for name in (".sft.0123456789abcdef", ".x.json", "README", "sft.json.bak", "sft.yaml", ".json", ".reading.json"):
        (folder / name).write_bytes(b"x")
    with open(os.fsencode(folder) + b"/\xff.json", "wb"):
        pass
    assert [one.name for one in list_consumers(stream)] == ["sft"]


def test_name_with_dots_is_one_consumers_name(stream: Path) -> None:
    name = "a.reading.b.json"
    write_cursor(stream, cursor(stream, name))
    write_reading(stream, mark(stream, name))
    assert list_consumers(stream) == (Consumer(name, cursor(stream, name), mark(stream, name), None),)


def test_torn_reading_mark_is_none_and_leaves_the_cursor_as_it_is(stream: Path) -> None:
    write_cursor(stream, cursor(stream))
    write_reading(stream, mark(stream))
    (stream / "cursors" / "sft.reading.json").write_bytes(b"")
    assert list_consumers(stream) == (Consumer("sft", cursor(stream), None, None),)


def test_pipes_and_folders_for_cursors_are_problems_that_hang_nobody(stream: Path) -> None:
    folder = stream / "cursors"
    folder.mkdir()
    os.mkfifo(folder / "pipe.json")
    os.mkfifo(folder / "pipe.reading.json")
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to("/etc/hostname")
    found = list_consumers(stream)
    assert [(one.name, one.chunks_before, one.problem is not None) for one in found] == [
        ("folder", 0, True),
        ("link", 0, True),
        ("pipe", 0, True),
    ]


@pytest.mark.parametrize("stream_id", ["f" * 32, None])
def test_cursor_and_mark_of_another_stream_do_not_count(stream: Path, stream_id: str | None) -> None:
    write_cursor(stream, replace(cursor(stream), stream_id=stream_id))
    write_reading(stream, replace(mark(stream), stream_id=stream_id))
    (found,) = list_consumers(stream)
    assert (found.cursor, found.reading, found.chunks_before) == (None, None, 0)
    assert found.problem is not None and f"in the directory is stream {identity(stream)}" in found.problem


def test_cursor_of_a_foreign_directory_counts_there(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "f", b'{"id":0}\n{"id":1}\n')
    told = Cursor("sft", None, 2, 1, {}, 1700000000.0)
    write_cursor(directory, told)
    assert list_consumers(directory) == (Consumer("sft", told, None, None),)


def test_damaged_manifest_is_raised(stream: Path) -> None:
    write_cursor(stream, cursor(stream))
    (stream / "stream.json").write_bytes(b"{")
    with pytest.raises(FileInvalid):
        list_consumers(stream)


def test_cursors_that_cannot_be_listed_are_raised_and_not_taken_for_none(stream: Path) -> None:
    (stream / "cursors").write_bytes(b"a file")
    with pytest.raises(NotADirectoryError):
        list_consumers(stream)


@needs_root
def test_cursors_that_may_not_be_read_name_the_user(stream: Path) -> None:
    write_cursor(stream, cursor(stream))
    stream.chmod(0o755)
    (stream / "cursors").chmod(0o700)

    def look() -> None:
        # By its relative name: the directories above are closed to others.
        os.chdir(stream)
        os.setgroups([])
        os.setresuid(65534, 65534, 65534)
        with pytest.raises(FileUnreadable, match="uid 65534 may not read it"):
            list_consumers(Path())

    assert forked(look) == 0


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
    steps: list[str] = []
    fsync, unlink = os.fsync, os.unlink

    def noted_fsync(fd: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def noted_unlink(path: Path) -> None:
        steps.append(f"unlink {path.name}")
        unlink(path)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "unlink", noted_unlink)
    forget_consumer(stream, "sft")
    assert steps == ["unlink sft.reading.json", "unlink sft.json", "sync cursors"]
