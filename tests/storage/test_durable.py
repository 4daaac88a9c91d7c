from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lazyshard.storage import durable


def replace_and_fail(source: Path, target: Path) -> None:
    os.rename(source, target)
    raise OSError(errno.EIO, "answer lost")


def fail(source: Path, target: Path) -> None:
    raise OSError(errno.EIO, "refused")


def test_rename_reported_as_failed_after_it_was_done_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", replace_and_fail)
    durable.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"new"


@pytest.mark.parametrize("target", [None, b"old"])
def test_rename_that_was_not_done_raises(target: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"new")
    if target is not None:
        (tmp_path / "b").write_bytes(target)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="refused"):
        durable.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_rename_between_two_names_of_one_file_that_was_not_done_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"new")
    os.link(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="refused"):
        durable.rename(tmp_path / "a", tmp_path / "b")


def test_short_writes_go_on_to_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    sizes: list[int] = []

    def short(fd: int, data: memoryview) -> int:
        sizes.append(write(fd, data[:3]))
        return sizes[-1]

    monkeypatch.setattr(os, "write", short)
    durable.publish_bytes(b"12345678", tmp_path / "file", tmp_path / "temporary")
    assert (tmp_path / "file").read_bytes() == b"12345678"
    assert sizes == [3, 3, 2]


def test_publish_replaces_the_whole_content_and_leaves_no_temporary(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a longer old content")
    (tmp_path / "temporary").write_bytes(b"left behind by a crash")
    with (tmp_path / "file").open("rb") as reader:
        durable.publish_bytes(b"new", tmp_path / "file", tmp_path / "temporary")
        assert reader.read() == b"a longer old content"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_publish_that_cannot_be_synced_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="bad disk"):
        durable.publish_bytes(b"new", tmp_path / "file", tmp_path / "temporary")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_publish_syncs_file_before_and_directory_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def noted_replace(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    durable.publish_bytes(b"new", tmp_path / "file", tmp_path / "temporary")
    assert steps == [str(tmp_path / "temporary"), "rename", str(tmp_path)]


def test_link_in_place_of_a_temporary_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"keep")
    (tmp_path / "temporary").symlink_to(tmp_path / "precious")
    durable.publish_bytes(b"new", tmp_path / "file", tmp_path / "temporary")
    assert (tmp_path / "precious").read_bytes() == b"keep"
    assert not (tmp_path / "file").is_symlink() and (tmp_path / "file").read_bytes() == b"new"


def test_remove_of_a_missing_file_is_no_error(tmp_path: Path) -> None:
    durable.remove(tmp_path / "missing")


def test_writing_back_is_a_hint_that_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = durable.create(tmp_path / "a")
    durable.write_all(fd, b"abc")
    durable.start_writing_back(fd, 0, 3)
    os.close(fd)
    durable.start_writing_back(fd, 0, 3)
    monkeypatch.setattr(durable, "_sync_file_range", None)
    durable.start_writing_back(fd, 0, 3)
    assert (tmp_path / "a").read_bytes() == b"abc"
