"""Durable writes, and files that are opened: links, pipes, stale handles, rights."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import FileRefused, FileUnreadable
from lazyshard.store import durable
from lazyshard.store.files import open_file, read_file
from lazyshard.stream.listing import list_chunks
from tests.stream.streams import needs_root, open_descriptors, python


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


@pytest.mark.parametrize("target", [None, b"old", "another name of it"])
def test_rename_that_was_not_done_raises(
    target: bytes | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"new")
    if isinstance(target, str):
        os.link(tmp_path / "a", tmp_path / "b")
    elif target is not None:
        (tmp_path / "b").write_bytes(target)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="refused"):
        durable.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == b"new"


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


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a named pipe"),
        (os.mkdir, "a directory"),
        (make_socket, "a named pipe, socket or device"),
        (lambda path: path.symlink_to("/dev/null"), "a link to /dev/null, out of the stream"),
        (lambda path: path.symlink_to(path), "a link that leads to itself"),
    ],
)
def test_what_is_no_plain_file_is_refused_without_blocking(
    make: Callable[[Path], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    make(Path("file"))
    before = open_descriptors()
    with pytest.raises(FileRefused) as caught:
        read_file(Path("file"))
    assert caught.value.kind == kind
    assert caught.value.file == "file"
    assert open_descriptors() == before


@needs_root
@pytest.mark.root
def test_device_is_refused(tmp_path: Path) -> None:
    os.mknod(tmp_path / "file", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    try:
        with pytest.raises(FileRefused, match="found a device"):
            read_file(tmp_path / "file")
    except FileUnreadable:
        pytest.skip("this filesystem is mounted nodev")


def test_link_out_of_the_stream_is_refused_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "stream").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    for number, target in enumerate([tmp_path / "secret", Path("../secret"), Path("link_0")]):
        (tmp_path / "stream" / f"link_{number}").symlink_to(target)
        with pytest.raises(FileRefused, match="out of the stream"):
            read_file(tmp_path / "stream" / f"link_{number}")


def test_link_within_the_stream_is_followed(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    (stream / "deep").mkdir(parents=True)
    (stream / "deep" / "data").write_bytes(b"data")
    (stream / "link").symlink_to("deep/data")
    (tmp_path / "alias").symlink_to(stream)
    assert read_file(stream / "link") == read_file(tmp_path / "alias" / "link") == b"data"


def test_link_within_the_stream_to_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(FileRefused, match="named pipe"):
        read_file(tmp_path / "link")


def test_missing_file_and_dangling_link_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("missing")
    for name in ("missing", "link"):
        with pytest.raises(FileNotFoundError) as caught:
            read_file(tmp_path / name)
        assert "missing" in str(caught.value.filename)


@needs_root
@pytest.mark.root
def test_unreadable_names_path_and_uid(tmp_path: Path) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    tried = python("import lazyshard", before=nobody)
    if tried.returncode:
        pytest.skip(f"user 65534 cannot run this Python with this checkout: {tried.stderr.strip()[-200:]}")
    file = tmp_path / "file"
    file.write_bytes(b"x")
    file.chmod(0)
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o711)
    for path in (tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o011)
    done = python(
        "import sys\nfrom pathlib import Path\nfrom lazyshard.errors import FileUnreadable\n"
        "from lazyshard.store.files import read_file\nfrom lazyshard.stream.listing import list_chunks\n"
        "for call, path in ((read_file, sys.argv[1]), (list_chunks, sys.argv[2])):\n"
        "    try:\n        call(Path(path))\n"
        "    except FileUnreadable as error:\n        print(error.uid, error.file, 'uid 65534' in str(error))\n",
        file,
        hidden,
        before=nobody,
    )
    assert done.stdout == f"65534 {file} True\n65534 {hidden} True\n", done.stderr


class Stale:
    """Stands before a function of os and gives ESTALE for the first so many calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self.calls = 0
        self.times = times
        self.real = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(errno.ESTALE, "Stale file handle")
        return self.real(*arguments, **named)


@pytest.mark.parametrize("name", ["open", "fstat", "pread"])
def test_stale_once_is_opened_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"data")
    before = open_descriptors()
    Stale(monkeypatch, name, 1)
    assert read_file(tmp_path / "file") == b"data"
    monkeypatch.undo()
    assert open_descriptors() == before


@pytest.mark.parametrize("name", ["open", "fstat", "pread"])
def test_stale_for_ever_is_raised_after_a_few_tries(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"data")
    before = open_descriptors()
    stale = Stale(monkeypatch, name, 10**9)
    with pytest.raises(OSError) as caught:
        read_file(tmp_path / "file")
    monkeypatch.undo()
    assert caught.value.errno == errno.ESTALE
    assert stale.calls == 5
    del caught
    assert open_descriptors() == before


def test_descriptor_lives_as_long_as_the_object(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    before = open_descriptors()
    file = open_file(tmp_path / "file")
    assert (file.size, open_descriptors()) == (4, before + 1)
    del file
    assert open_descriptors() == before


def test_listing_refuses_two_files_of_one_number(tmp_path: Path) -> None:
    (tmp_path / "chunk_1.jsonl").touch()
    (tmp_path / "chunk_00001.jsonl").touch()
    with pytest.raises(ValueError, match=r"chunk_00001.jsonl and chunk_1.jsonl are both chunk 1; keep one"):
        list_chunks(tmp_path)


def test_listing_passes_over_other_names_and_counts_to_the_gap(tmp_path: Path) -> None:
    for name in (
        "chunk_0.jsonl",
        "chunk_0.jsonl.completed",
        "chunk_1.jsonl",
        "chunk_2.jsonl.completed",
        "x",
        "chunk_.jsonl",
    ):
        (tmp_path / name).touch()
    listing = list_chunks(tmp_path)
    assert (listing.sealed, listing.complete, listing.gap) == (1, 1, 1)
