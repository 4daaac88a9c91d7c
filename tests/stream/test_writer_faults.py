"""A filesystem that refuses: nothing is half published, and a new writer goes on when there is room again."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LazyShardError, ProducerFenced, WriterFailed
from lazyshard.store import durable
from lazyshard.stream import publishing
from lazyshard.stream.publishing import WriteSteps
from tests.harness.disks import SmallDisk
from tests.stream.streams import (
    DEADLINE_S,
    add,
    forked,
    go_on,
    head,
    names,
    needs_root,
    produce,
    python,
    raising,
    rows,
    wait_until,
)

BIG = "x" * 3000


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
def test_full_disk_fails_the_writer_and_a_new_one_goes_on_exactly(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "mount", "size=64k") as disk:
        ballast, stream = disk.point / "ballast", disk.point / "stream"
        ballast.write_bytes(b"x" * 16_000)
        writer = ChunkWriter(stream, 2)
        with pytest.raises(WriterFailed, match="No space left on device") as caught:
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
        ballast.unlink()
        with ChunkWriter(stream) as again:
            assert again.published_samples == published
            again.write({"id": published})
        assert check_prefix(stream, 1) == published + 1
        assert ".tmp" not in names(stream)


def test_file_size_limit_fails_the_writer_and_a_new_one_goes_on_exactly(tmp_path: Path) -> None:
    produce(tmp_path, 2, end=False)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        writer = ChunkWriter(tmp_path)
        writer.write({"id": 2, "text": BIG})
        for call in (lambda: writer.write({"id": 3, "text": BIG}), lambda: writer.write({"id": 2}), writer.close):
            with pytest.raises(WriterFailed, match="File too large") as caught:
                call()
            assert caught.value.published_samples == 2

    assert forked(limited) == 0
    assert check_prefix(tmp_path, 2) == 2
    assert head(tmp_path).state == "failed"
    go_on(tmp_path, 5)


STEPS = {
    "data sync": "lazyshard.stream.publishing.sync",
    "data write": "lazyshard.stream.publishing.write_all",
    "data create": "lazyshard.stream.publishing.create",
    "data rename": "lazyshard.stream.publishing.rename",
    "data directory": "lazyshard.stream.publishing.sync_directory",
    "seal create": "lazyshard.store.durable.create",
    "seal write": "lazyshard.store.durable.write_all",
    "seal sync": "lazyshard.store.durable.sync",
    "seal rename": "lazyshard.store.durable.rename",
    "seal directory": "lazyshard.store.durable.sync_directory",
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("call", ["write", "heartbeat", "close", "leave"])
@pytest.mark.parametrize("step", STEPS)
def test_bad_disk_at_a_step_publishes_nothing_wrong_and_a_new_writer_goes_on(
    step: str, call: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the call that fills the chunk, and by later ones; where a thread does it, by whichever comes next."""
    writer = ChunkWriter(tmp_path, 2, overlap=overlap)
    add(writer, 0, 2)
    writer.heartbeat()
    written = threading.Event()

    def fail(*_: Any) -> None:
        assert not overlap or written.wait(DEADLINE_S)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(STEPS[step], fail)
    with contextlib.nullcontext() if overlap else pytest.raises(WriterFailed):
        add(writer, 2, 4)
    written.set()
    with pytest.raises(WriterFailed, match="Input/output error") as caught:
        if call == "write":
            add(writer, 4, 10)
        elif call == "heartbeat":
            writer.heartbeat()
        else:
            writer.close(end=call == "close" or not overlap)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.published_samples == 2
    monkeypatch.undo()
    if call in ("write", "heartbeat"):
        with pytest.raises(WriterFailed):
            writer.close()
        assert head(tmp_path).state == "failed"
    assert check_prefix(tmp_path, 2) == 2
    go_on(tmp_path, 5)
    assert ".tmp" not in names(tmp_path)


@pytest.mark.parametrize("step", ["write_all", "rename", "create"])
def test_heartbeat_that_cannot_be_written_is_logged_and_stops_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})
    with monkeypatch.context() as patch:
        patch.setattr(f"lazyshard.store.durable.{step}", raising(OSError(errno.EIO, "Input/output error")))
        writer.heartbeat()
    assert "Input/output error" in caplog.text
    writer.write({"id": 1})
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 2)
    assert ".tmp" not in names(tmp_path)


@pytest.mark.parametrize("failing", ["write_all", "rename"])
def test_stream_that_cannot_be_made_leaves_no_lock(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Read-only"):
        patch.setattr(f"lazyshard.store.durable.{failing}", raising(OSError(errno.EROFS, "Read-only file system")))
        ChunkWriter(tmp_path, 2)
    go_on(tmp_path, 1)


def test_descriptor_whose_close_fails_is_not_closed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 1)
    closed: list[int] = []

    def fail(fd: int) -> None:
        closed.append(fd)
        os.close(fd)
        raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patch:
        patch.setattr("lazyshard.stream.publishing.os", SimpleNamespace(close=fail))
        with pytest.raises(LazyShardError, match="lost"):
            writer.write({"id": 0})
    writer.close(end=False)
    assert len(closed) == 1
    produce(tmp_path, 1, 1)


class Gate:
    """Stands in for the sync of data files, and holds each of them up until it may pass."""

    def __init__(self) -> None:
        self.waiting = 0
        self.let = threading.Semaphore(0)

    def sync(self, fd: int) -> None:
        self.waiting += 1
        assert self.let.acquire(timeout=DEADLINE_S)
        durable.sync(fd)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(publishing, "sync", made.sync)
    yield made
    made.let.release(100)


def test_call_that_fills_a_chunk_returns_before_it_is_published(tmp_path: Path, gate: Gate) -> None:
    with ChunkWriter(tmp_path, 2, overlap=True) as writer:
        for row in rows(0, 3):
            writer.write(row, source=row["id"])
        assert (writer.full_chunks, writer.samples, writer.room) == (1, 3, 1)
        assert (writer.published_chunks, writer.published_samples, writer.source) == (0, 0, None)
        assert head(tmp_path).chunks == 0
        gate.let.release(100)
        wait_until(lambda: head(tmp_path).chunks == 1, "the chunk is published")
        wait_until(lambda: writer.publish_s > 0, "it is timed")
        assert (writer.published_chunks, writer.published_samples, writer.source) == (1, 2, 1)
        add(writer, 3, 7)
        writer.settle()
        assert (writer.published_chunks, writer.published_samples, writer.full_chunks) == (3, 6, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 7)


def test_one_chunk_is_on_its_way_at_most(tmp_path: Path, gate: Gate) -> None:
    writer = ChunkWriter(tmp_path, 1, overlap=True)
    writer.write({"id": 0})
    second = threading.Thread(target=writer.write, args=({"id": 1},))
    second.start()
    wait_until(lambda: gate.waiting, "the first chunk is on its way")
    assert second.is_alive() and writer.full_chunks == 1
    gate.let.release()
    second.join(DEADLINE_S)
    assert not second.is_alive() and (writer.full_chunks, writer.published_chunks) == (2, 1)
    gate.let.release()
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 2)


def test_close_without_an_end_finishes_the_chunk_in_hand_and_drops_the_next(tmp_path: Path, gate: Gate) -> None:
    writer = ChunkWriter(tmp_path, 2, overlap=True)
    add(writer, 0, 3)
    wait_until(lambda: gate.waiting, "the chunk is on its way")
    gate.let.release()
    writer.close(end=False)
    assert (head(tmp_path).chunks, head(tmp_path).state) == (1, "idle")
    assert ".tmp" not in names(tmp_path)
    gate.let.release(100)
    go_on(tmp_path, 5)


def test_fenced_writer_publishes_nothing_and_says_so(tmp_path: Path) -> None:
    old = ChunkWriter(tmp_path, 2, overlap=True)
    old.write({"id": 0})
    old._lock.release()
    new = ChunkWriter(tmp_path)
    # Said by whichever call comes after the thread has found it out.
    with pytest.raises(ProducerFenced):
        try:
            old.write({"id": 99})
        finally:
            old.close()
    new.close(end=False)
    go_on(tmp_path, 3)


def test_interrupted_close_keeps_the_lock_while_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 2, overlap=True)
    writer.write({"id": 0})
    steps = writer._steps
    assert steps._executor is not None
    shutdown = steps._executor.shutdown
    monkeypatch.setattr(steps._executor, "shutdown", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        writer.close(end=False)
    with pytest.raises(ProducerFenced):
        ChunkWriter(tmp_path)
    # What was interrupted is not waited for a second time.
    assert not steps.stop()
    shutdown()
    writer._lock.release()
    go_on(tmp_path, 3)


@pytest.mark.parametrize(("closes", "told"), [("", "1 rows"), ("atexit.register(writer.close)\n", "")])
def test_program_that_ends_has_published_full_chunks_and_tells_the_rest(closes: str, told: str, tmp_path: Path) -> None:
    done = python(
        "import atexit, sys\n"
        "from lazyshard import ChunkWriter\n"
        "writer = ChunkWriter(sys.argv[1], 2, overlap=True)\n"
        f"{closes}"
        "for number in range(3): writer.write({'id': number})\n",
        tmp_path,
    )
    assert (done.returncode, bool(done.stderr)) == (0, bool(told))
    assert told in done.stderr
    if told:
        assert check_prefix(tmp_path, 2) == 2
        produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_owner_is_checked_without_touching_the_stream(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.check_owner()
    (tmp_path / ".producer.lock").unlink()
    with ChunkWriter(tmp_path, 2):
        with pytest.raises(ProducerFenced):
            writer.check_owner()
        with pytest.raises(ProducerFenced):
            writer.close()


@pytest.fixture
def thread() -> Iterator[WriteSteps]:
    made = WriteSteps(overlap=True)
    yield made
    made.stop()


def fail() -> None:
    raise OSError("lost")


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_done_in_order(overlap: bool) -> None:
    steps = WriteSteps(overlap=overlap)
    done: list[int] = []
    for number in range(100):
        steps.do(functools.partial(done.append, number), 1 << 20)
    steps.wait()
    with pytest.raises(OSError, match="lost"):
        while True:
            steps.do(fail)
    assert steps.stop()
    assert done == list(range(100))


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_done_after_a_failed_step_and_stop_does_the_rest(waits: bool, thread: WriteSteps) -> None:
    done: list[int] = []
    gate = threading.Event()
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.do(lambda: done.append(1))
    thread.do(fail)
    thread.do(lambda: done.append(2))
    gate.set()
    if waits:
        with pytest.raises(OSError, match="lost"):
            thread.wait()
        thread.do(lambda: done.append(3))
        thread.wait()
    assert thread.stop() and thread.stop()
    assert done == [1]


def test_wait_for_a_number_waits_for_no_later_step(thread: WriteSteps) -> None:
    gate = threading.Event()
    done: list[str] = []
    first = thread.do(lambda: done.append("first"))
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.wait(first)
    assert done == ["first"]
    gate.set()


@pytest.mark.parametrize("size", [4, 1000])
def test_caller_waits_when_too_much_is_held(size: int, thread: WriteSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.publishing._BACKLOG_BYTES", 10)
    held: list[int] = []
    most: list[int] = []

    def take() -> None:
        most.append(len(held))
        held.pop()

    for _ in range(50):
        held.append(1)
        thread.do(take, size)
    thread.wait()
    # Two fit into 10 bytes, a third is being handed over, and one that was done has not been noticed yet.
    assert max(most) <= 4 and len(most) == 50


def test_step_is_not_done_twice_where_no_thread_starts(thread: WriteSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        thread.do(lambda: done.append(1))
    assert thread.stop()
    assert done == []
