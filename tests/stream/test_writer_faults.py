"""A filesystem that refuses: nothing is half published, and a new writer goes on when there is room again."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LazyShardError, WriterFailed
from tests.harness.disks import SmallDisk
from tests.stream.streams import forked, head, names, needs_root, produce, rows

BIG = "x" * 3000


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 64 KiB."""
    with SmallDisk(tmp_path / "mount", "size=64k") as disk:
        yield disk.point


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("options", ["size=64k", "size=1m,nr_inodes=9"])
def test_readers_are_told_what_a_producer_does_while_there_is_no_room(options: str, tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "mount", options) as disk:
        stream = disk.point / "stream"
        writer = ChunkWriter(stream, 2)
        if "nr_inodes" in options:
            with pytest.raises(OSError, match="No space left"):
                for i in range(9):
                    (disk.point / f"filler{i}").touch()
        else:
            disk.fill()
        for note in ("first", "second", "third"):
            writer.heartbeat("waiting", note)
            assert (head(stream).state, head(stream).note) == ("waiting", note)
        writer.close(end=False)
        assert head(stream).state == "idle"
        assert ".tmp" not in names(stream)


def check_prefix(stream: Path, per_chunk: int) -> int:
    """Every sealed chunk is whole and in order; returns how many samples are published."""
    reader = StreamReader(stream)
    reader.refresh()
    found = [reader.read(i)["id"] for i in range(reader.seen.samples)]
    assert found == list(range(len(found)))
    assert len(found) % per_chunk == 0
    return len(found)


@needs_root
@pytest.mark.root
def test_full_disk_fails_the_writer_and_a_new_one_goes_on_exactly(small: Path) -> None:
    (small / "ballast").write_bytes(b"x" * 16_000)
    stream = small / "stream"
    writer = ChunkWriter(stream, 2)
    with pytest.raises(WriterFailed, match=r"No space left on device. \d+ samples are published and safe") as caught:
        for i in range(100):
            writer.write({"id": i, "text": BIG})
    published = caught.value.published_samples
    assert published is not None and published == writer.published_samples >= 2
    assert caught.value.directory == str(stream)
    # Before it is closed, which whoever catches the error may never do.
    told = head(stream)
    assert (told.state, told.open, "No space left" in told.note) == ("failed", 0, True)
    writer.close(end=False)
    assert check_prefix(stream, 2) in (published - 2, published)  # the head may have found no room
    (small / "ballast").unlink()
    with ChunkWriter(stream) as again:
        assert again.published_samples == published
        again.write({"id": published})
    assert check_prefix(stream, 1) == published + 1
    assert ".tmp" not in names(stream)


def limited(stream: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    writer = ChunkWriter(stream)
    with pytest.raises(WriterFailed, match=r"File too large.* 2 samples are published"):
        for i in (2, 3):
            writer.write({"id": i, "text": BIG})
    with pytest.raises(WriterFailed, match="File too large"):
        writer.write({"id": 2})
    with pytest.raises(WriterFailed, match="File too large"):
        writer.close()


def test_file_size_limit_fails_the_writer_and_a_new_one_goes_on_exactly(tmp_path: Path) -> None:
    produce(tmp_path, 2, end=False)
    assert forked(lambda: limited(tmp_path)) == 0
    assert check_prefix(tmp_path, 2) == 2
    assert head(tmp_path).state == "failed"
    produce(tmp_path, 5)
    assert list(StreamReader(tmp_path)) == rows(0, 5)


STEPS = {
    "data sync": "lazyshard.stream.open_chunk.sync",
    "data write": "lazyshard.stream.open_chunk.write_all",
    "data create": "lazyshard.stream.open_chunk.create",
    "data rename": "lazyshard.stream.publishing.rename",
    "data directory": "lazyshard.stream.publishing.sync_directory",
    "seal create": "lazyshard.store.durable.create",
    "seal write": "lazyshard.store.durable.write_all",
    "seal sync": "lazyshard.store.durable.sync",
    "seal rename": "lazyshard.store.durable.rename",
    "seal directory": "lazyshard.store.durable.sync_directory",
}


@pytest.mark.parametrize("step", STEPS)
def test_bad_disk_at_a_step_publishes_nothing_wrong_and_a_new_writer_goes_on(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    for row in rows(0, 2):
        writer.write(row)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(STEPS[step], fail)
    with pytest.raises(WriterFailed, match=r"Input/output error\. 2 samples") as caught:
        for row in rows(2, 4):
            writer.write(row)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.published_samples == 2
    with pytest.raises(WriterFailed):
        writer.close()
    monkeypatch.undo()
    assert check_prefix(tmp_path, 2) == 2
    produce(tmp_path, 5)
    assert list(StreamReader(tmp_path)) == rows(0, 5)
    assert ".tmp" not in names(tmp_path)


@pytest.mark.parametrize("step", ["write_all", "rename", "create"])
def test_heartbeat_that_cannot_be_written_is_logged_and_stops_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"lazyshard.store.durable.{step}", fail)
        writer.heartbeat()
    assert "readers cannot be told that this producer is alive" in caplog.text
    assert "Input/output error" in caplog.text
    writer.write({"id": 1})
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 2)
    assert ".tmp" not in names(tmp_path)


@pytest.mark.parametrize("failing", ["lazyshard.store.durable.write_all", "lazyshard.store.durable.rename"])
def test_stream_that_cannot_be_created_leaves_no_lock(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(failing, fail)
        with pytest.raises(OSError, match="Read-only"):
            ChunkWriter(tmp_path, 2)
    produce(tmp_path, 1)
    assert list(StreamReader(tmp_path)) == rows(0, 1)


def test_descriptor_whose_close_fails_is_not_closed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 1)
    closed: list[int] = []

    def fail(fd: int) -> None:
        closed.append(fd)
        os.close(fd)
        raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patch:
        patch.setattr("lazyshard.stream.open_chunk.os", SimpleNamespace(close=fail))
        with pytest.raises(LazyShardError, match="lost"):
            writer.write({"id": 0})
    writer.close(end=False)
    assert len(closed) == 1
    produce(tmp_path, 1, 1)
