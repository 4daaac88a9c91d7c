"""A filesystem that refuses: nothing is half published, and a new writer continues when there is room again."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LazyShardError, ProducerFenced, WriterFailed
from lazyshard.store import durable
from lazyshard.stream import publishing
from lazyshard.stream.publishing import WriteSteps
from tests.harness.disks import SmallDisk
from tests.stream import streams
from tests.stream.streams import add, go_on, head, names, produce, raised, raising, rows


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
    found = [reader.read(i)["id"] for i in range(reader.seen.samples)]
    assert found == list(range(len(found)))
    assert len(found) % per_chunk == 0
    return len(found)


STEPS = [
    *(f"lazyshard.stream.publishing.{call}" for call in ("create", "write_all", "sync", "rename", "sync_directory")),
    *(f"lazyshard.store.durable.{call}" for call in ("create", "write_all", "sync", "rename", "sync_directory")),
]
"""Of the data, and of its seal."""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("step", "call"), [(step, ("write", "heartbeat", "close", "leave")[at % 4]) for at, step in enumerate(STEPS)]
)
def test_bad_disk_at_step(step: str, call: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the call that fills the chunk, and by later ones; where a thread does it, by whichever comes next."""
    writer = ChunkWriter(tmp_path, 2, overlap=overlap)
    add(writer, 0, 2)
    writer.heartbeat()
    written = threading.Event()

    def fail(*_: Any) -> None:
        assert not overlap or written.wait(streams.DEADLINE_S)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(step, fail)
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
        raised(WriterFailed, writer.close)
        assert head(tmp_path).state == "failed"
    assert check_prefix(tmp_path, 2) == 2
    go_on(tmp_path, 5)
    assert ".tmp" not in names(tmp_path)


def test_failed_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write({"id": 0})
    for step in ("write_all", "rename", "create"):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(f"lazyshard.store.durable.{step}", raising(OSError(errno.EIO, "Input/output error")))
            writer.heartbeat()
        assert "Input/output error" in caplog.text
    writer.write({"id": 1})
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 2)
    assert ".tmp" not in names(tmp_path)


def test_descriptor_whose_close_fails_is_not_closed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ChunkWriter(tmp_path, 1)

    def fail(fd: int) -> None:
        os.close(fd)
        raise OSError(errno.EIO, "lost")

    close = Mock(side_effect=fail)
    with monkeypatch.context() as patch:
        patch.setattr("lazyshard.stream.publishing.os", SimpleNamespace(close=close))
        streams.refusal_of(LazyShardError, "lost", writer.write, {"id": 0})
    writer.close(end=False)
    close.assert_called_once()
    produce(tmp_path, 1, 1)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Holds up each sync of a data file until it may pass."""
    found = SimpleNamespace(reached=threading.Event(), let=threading.Semaphore(0))

    def sync(fd: int) -> None:
        found.reached.set()
        assert found.let.acquire(timeout=streams.DEADLINE_S)
        durable.sync(fd)

    monkeypatch.setattr(publishing, "sync", sync)
    yield found
    found.let.release(100)


def test_call_that_fills_a_chunk_returns_before_it_is_published(tmp_path: Path, gate: Any) -> None:
    with ChunkWriter(tmp_path, 2, overlap=True) as writer:
        for row in rows(0, 3):
            writer.write(row, source=row["id"])
        assert (writer.full_chunks, writer.samples, writer.room) == (1, 3, 1)
        assert (writer.published_chunks, writer.published_samples, writer.source) == (0, 0, None)
        assert head(tmp_path).chunks == 0
        gate.let.release(100)
        streams.wait_until(lambda: head(tmp_path).chunks == 1, "the chunk is published")
        streams.wait_until(lambda: writer.publish_s > 0, "it is timed")
        assert (writer.published_chunks, writer.published_samples, writer.source) == (1, 2, 1)
        add(writer, 3, 7)
        writer.settle()
        assert (writer.published_chunks, writer.published_samples, writer.full_chunks) == (3, 6, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 7)


def test_one_chunk_is_on_its_way_at_most(tmp_path: Path, gate: Any) -> None:
    writer = ChunkWriter(tmp_path, 1, overlap=True)
    writer.write({"id": 0})
    second = threading.Thread(target=writer.write, args=({"id": 1},))
    second.start()
    assert gate.reached.wait(streams.DEADLINE_S)
    assert second.is_alive() and writer.full_chunks == 1
    gate.let.release()
    second.join(streams.DEADLINE_S)
    assert not second.is_alive() and (writer.full_chunks, writer.published_chunks) == (2, 1)
    gate.let.release()
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 2)


def test_close_without_an_end_finishes_the_chunk_in_hand_and_drops_the_next(tmp_path: Path, gate: Any) -> None:
    writer = ChunkWriter(tmp_path, 2, overlap=True)
    add(writer, 0, 3)
    assert gate.reached.wait(streams.DEADLINE_S)
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
    raised(KeyboardInterrupt, writer.close, end=False)
    raised(ProducerFenced, ChunkWriter, tmp_path)
    # What was interrupted is not waited for a second time.
    assert not steps.stop()
    shutdown()
    writer._lock.release()
    go_on(tmp_path, 3)


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ("", "1 rows"),
        ("atexit.register(writer.close)\n", ""),
        # A fork says nothing of its parent's rows.
        ("if os.fork() == 0: sys.exit()\nos.wait()\nwriter.close()\n", ""),
    ],
)
def test_program_that_ends_has_published_full_chunks_and_tells_the_rest(ends: str, told: str, tmp_path: Path) -> None:
    done = streams.python(
        "import atexit, os, sys\n"
        "from lazyshard import ChunkWriter\n"
        f"writer = ChunkWriter(sys.argv[1], 2, overlap={'fork' not in ends})\n"
        "for number in range(3): writer.write({'id': number})\n"
        f"{ends}",
        tmp_path,
    )
    assert (done.returncode, bool(done.stderr)) == (0, bool(told))
    assert told in done.stderr
    if told:
        assert check_prefix(tmp_path, 2) == 2
        produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


@pytest.fixture
def thread() -> Iterator[WriteSteps]:
    made = WriteSteps(overlap=True)
    yield made
    made.stop()


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
