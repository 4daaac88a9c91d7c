"""Durable writes, and files that are opened: links, pipes, stale handles, rights."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from lazyshard.errors import FileRefused
from lazyshard.store import durable
from lazyshard.store.files import read_file
from lazyshard.stream.listing import list_chunks
from tests.stream.streams import needs_root, open_descriptors, python, raising, recorded


@pytest.mark.parametrize(
    ("target", "done"), [("old", True), (None, True), (None, False), ("old", False), ("another name of it", False)]
)
def test_failed_rename_may_be_done(
    target: str | None, done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, named = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"new")
    if target == "old":
        named.write_bytes(b"old")
    elif target is not None:
        os.link(source, named)

    def lost(source: Path, target: Path) -> None:
        if done:
            os.rename(source, target)
        raise OSError(errno.EIO, "answer lost")

    monkeypatch.setattr(os, "replace", lost)
    with contextlib.nullcontext() if done else pytest.raises(OSError, match="lost"):
        durable.rename(source, named)
    assert (named if done else source).read_bytes() == b"new"
    # To remove what is not there is no error.
    durable.remove(tmp_path / "missing")


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


def test_publish_replaces_the_content_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, temporary = tmp_path / "file", tmp_path / "temporary"
    file.write_bytes(b"a longer old content")
    temporary.write_bytes(b"left behind by a crash")
    calls = recorded(monkeypatch)
    with file.open("rb") as reader:
        durable.publish_bytes(b"new", file, temporary)
        assert reader.read() == b"a longer old content"
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]
    assert calls == ["unlink temporary", "sync temporary", "rename file", f"sync {tmp_path.name}"]
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.EIO, "bad disk")))
    with pytest.raises(OSError, match="bad disk"):
        durable.publish_bytes(b"newer", file, temporary)
    assert file.read_bytes() == b"new"


def test_writing_back_is_a_hint_that_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = durable.create(tmp_path / "a")
    durable.write_all(fd, b"abc")
    durable.start_writing_back(fd, 0, 3)
    os.close(fd)
    durable.start_writing_back(fd, 0, 3)
    monkeypatch.setattr(durable, "_sync_file_range", None)
    durable.start_writing_back(fd, 0, 3)
    assert (tmp_path / "a").read_bytes() == b"abc"


def test_link_within_the_stream_to_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    """Other things that are no plain files are told in test_damage."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    before = open_descriptors()
    with pytest.raises(FileRefused) as caught:
        read_file(tmp_path / "link")
    assert (caught.value.kind, caught.value.file) == ("a named pipe", str(tmp_path / "link"))
    assert open_descriptors() == before


def test_link_out_of_the_stream_is_refused_and_one_within_it_is_followed(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    (stream / "deep").mkdir(parents=True)
    (stream / "deep" / "data").write_bytes(b"data")
    (stream / "link").symlink_to("deep/data")
    (tmp_path / "alias").symlink_to(stream)
    assert read_file(stream / "link") == read_file(tmp_path / "alias" / "link") == b"data"
    (tmp_path / "secret").write_bytes(b"secret")
    for number, target in enumerate([tmp_path / "secret", Path("../secret"), Path("link_0")]):
        (stream / f"link_{number}").symlink_to(target)
        with pytest.raises(FileRefused, match="out of the stream"):
            read_file(stream / f"link_{number}")


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
        "import sys\nfrom pathlib import Path\nfrom lazyshard.errors import AccessRefused\n"
        "from lazyshard.store.files import read_file\nfrom lazyshard.stream.listing import list_chunks\n"
        "for call, path in ((read_file, sys.argv[1]), (list_chunks, sys.argv[2])):\n"
        "    try:\n        call(Path(path))\n"
        "    except AccessRefused as error:\n        print(error.uid, error.file, 'uid 65534' in str(error))\n",
        file,
        hidden,
        before=nobody,
    )
    assert done.stdout == f"65534 {file} True\n65534 {hidden} True\n", done.stderr


def test_stale_file_is_opened_again_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That readers go on after once is told in faults/test_network_stale.py."""
    (tmp_path / "file").write_bytes(b"data")
    before = open_descriptors()
    stale = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale"):
        patch.setattr(os, "pread", stale)
        read_file(tmp_path / "file")
    assert stale.call_count == 5
    stale.reset_mock(side_effect=True)
    assert open_descriptors() == before


def test_listing_refuses_two_files_of_one_number(tmp_path: Path) -> None:
    (tmp_path / "chunk_1.jsonl").touch()
    (tmp_path / "chunk_00001.jsonl").touch()
    with pytest.raises(ValueError, match=r"chunk_00001.jsonl and chunk_1.jsonl"):
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
