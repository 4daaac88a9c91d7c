"""A writer that publishes in a thread: the same files and promises, a little later; its steps."""

from __future__ import annotations

import errno
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ProducerFenced, ProducerLocked, WriterFailed
from lazyshard.store import durable
from lazyshard.stream import open_chunk
from lazyshard.stream.open_chunk import StepsInThread, WriteSteps
from tests.stream.streams import DEADLINE_S, head, names, produce, python, rows, wait_until
from tests.stream.test_writer_faults import STEPS, check_prefix


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
    monkeypatch.setattr(open_chunk, "sync", made.sync)
    yield made
    made.let.release(100)


def test_files_are_the_same(tmp_path: Path) -> None:
    for name, overlap in (("at once", False), ("overlap", True)):
        with ChunkWriter(tmp_path / name, 3, clock=lambda: 5.0, overlap=overlap) as writer:
            for row in rows(0, 8):
                writer.write(row, tokens=row["id"], source=row["id"] + 1)
    assert names(tmp_path / "at once") == names(tmp_path / "overlap")
    for name in names(tmp_path / "overlap"):
        if name.startswith(("chunk_", "stream.end")):
            assert (tmp_path / "at once" / name).read_bytes() == (tmp_path / "overlap" / name).read_bytes()
    assert list(StreamReader(tmp_path / "overlap")) == rows(0, 8)


def test_call_that_fills_a_chunk_returns_before_it_is_published(tmp_path: Path, gate: Gate) -> None:
    with ChunkWriter(tmp_path, 2, overlap=True) as writer:
        for row in rows(0, 3):
            writer.write(row, source=row["id"])
        assert (writer.full_chunks, writer.samples, writer.room) == (1, 3, 1)
        assert (writer.published_chunks, writer.published_samples, writer.source) == (0, 0, None)
        assert head(tmp_path).chunks == 0
        gate.let.release(2)
        wait_until(lambda: head(tmp_path).chunks == 1, "the chunk is published")
        wait_until(lambda: writer.publish_s > 0, "it is timed")
        assert (writer.published_chunks, writer.published_samples, writer.source) == (1, 2, 1)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


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
    for row in rows(0, 3):
        writer.write(row)
    wait_until(lambda: gate.waiting, "the chunk is on its way")
    gate.let.release()
    writer.close(end=False)
    assert (head(tmp_path).chunks, head(tmp_path).state) == (1, "idle")
    assert ".tmp" not in names(tmp_path)
    gate.let.release(100)
    produce(tmp_path, 5)
    assert list(StreamReader(tmp_path)) == rows(0, 5)


@pytest.mark.parametrize("call", ["write", "heartbeat", "close", "leave"])
@pytest.mark.parametrize("step", STEPS)
def test_bad_disk_is_told_by_a_later_call_and_a_new_writer_goes_on(
    step: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChunkWriter(tmp_path, 2, overlap=True)
    for row in rows(0, 2):
        writer.write(row)
    writer.heartbeat()
    written = threading.Event()

    def fail(*_: Any) -> None:
        assert written.wait(DEADLINE_S)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(STEPS[step], fail)
    for row in rows(2, 4):
        writer.write(row)
    written.set()
    with pytest.raises(WriterFailed, match=r"Input/output error\. 2 samples") as caught:
        if call == "write":
            for row in rows(4, 10):
                writer.write(row)
        elif call == "heartbeat":
            writer.heartbeat()
        else:
            writer.close(end=call == "close")
    assert isinstance(caught.value.__cause__, OSError) and caught.value.published_samples == 2
    monkeypatch.undo()
    if call in ("write", "heartbeat"):
        with pytest.raises(WriterFailed):
            writer.close()
        assert head(tmp_path).state == "failed"
    assert check_prefix(tmp_path, 2) == 2
    produce(tmp_path, 5)
    assert list(StreamReader(tmp_path)) == rows(0, 5)
    assert ".tmp" not in names(tmp_path)


def test_position_that_is_not_json_fails_the_writer_later(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 1, overlap=True)
    writer.write({"id": 0}, source={1, 2})
    with pytest.raises(TypeError):
        writer.heartbeat()
    with pytest.raises(WriterFailed, match=r"ended by TypeError"):
        writer.write({"id": 1})
    writer.close(end=False)
    produce(tmp_path, 2, 1)
    assert list(StreamReader(tmp_path)) == rows(0, 2)


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
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_interrupted_close_keeps_the_lock_for_what_is_still_being_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChunkWriter(tmp_path, 2, overlap=True)
    writer.write({"id": 0})
    shutdown = writer._steps._executor.shutdown  # type: ignore[attr-defined]

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer._steps._executor, "shutdown", interrupt)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        writer.close(end=False)
    with pytest.raises(ProducerLocked):
        ChunkWriter(tmp_path)
    shutdown()
    writer._lock.release()
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_program_that_ends_without_closing_has_published_what_was_full_and_says_what_was_not(tmp_path: Path) -> None:
    done = python(
        "import sys\n"
        "from lazyshard import ChunkWriter\n"
        "writer = ChunkWriter(sys.argv[1], 2, overlap=True)\n"
        "for number in range(3): writer.write({'id': number})\n",
        tmp_path,
    )
    assert done.returncode == 0
    assert "1 rows of its open chunk are not published" in done.stderr
    assert check_prefix(tmp_path, 2) == 2
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_writer_can_be_closed_when_the_program_ends(tmp_path: Path) -> None:
    done = python(
        "import atexit, sys\n"
        "from lazyshard import ChunkWriter\n"
        "writer = ChunkWriter(sys.argv[1], 2, overlap=True)\n"
        "atexit.register(writer.close)\n"
        "for number in range(3): writer.write({'id': number})\n",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_settled_writer_has_published_every_full_chunk(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2, overlap=True) as writer:
        for number in range(7):
            writer.write({"id": number})
        writer.settle()
        assert (writer.published_chunks, writer.published_samples, writer.full_chunks) == (3, 6, 3)


def test_owner_is_checked_without_touching_the_stream(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.check_owner()
    (tmp_path / ".producer.lock").unlink()
    with ChunkWriter(tmp_path, 2):
        with pytest.raises(ProducerFenced):
            writer.check_owner()
        with pytest.raises(ProducerFenced):
            writer.close()


@pytest.fixture(params=[WriteSteps, StepsInThread])
def steps(request: pytest.FixtureRequest) -> Iterator[WriteSteps]:
    made: WriteSteps = request.param()
    yield made
    made.stop()


@pytest.fixture
def thread() -> Iterator[StepsInThread]:
    made = StepsInThread()
    yield made
    made.stop()


def fail() -> None:
    raise OSError("lost")


def test_steps_are_done_in_order(steps: WriteSteps) -> None:
    done: list[int] = []
    for number in range(100):
        steps.do(functools.partial(done.append, number), 1 << 20)
    steps.wait()
    assert done == list(range(100))


def test_nothing_is_done_after_a_step_that_failed(thread: StepsInThread) -> None:
    done: list[int] = []
    gate = threading.Event()
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.do(fail)
    thread.do(lambda: done.append(1))
    gate.set()
    with pytest.raises(OSError, match="lost"):
        thread.wait()
    thread.do(lambda: done.append(2))
    thread.wait()
    assert thread.stop()
    assert done == []


def test_failure_of_a_step_at_once_is_raised_at_once() -> None:
    with pytest.raises(OSError, match="lost"):
        WriteSteps().do(fail)


def test_failure_of_a_step_in_the_thread_is_raised_by_a_later_call(thread: StepsInThread) -> None:
    thread.do(fail)
    with pytest.raises(OSError, match="lost"):
        while True:
            thread.do(lambda: None)


def test_wait_for_a_number_waits_for_no_later_step(thread: StepsInThread) -> None:
    gate = threading.Event()
    done: list[str] = []
    first = thread.do(lambda: done.append("first"))
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.wait(first)
    assert done == ["first"]
    gate.set()


def test_caller_waits_when_too_much_is_held(thread: StepsInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.open_chunk._BACKLOG_BYTES", 10)
    held: list[int] = []
    most: list[int] = []

    def take() -> None:
        most.append(len(held))
        held.pop()

    for _ in range(50):
        held.append(1)
        thread.do(take, 4)
    thread.wait()
    # Two fit into 10 bytes, a third is being handed over, and one that was done has not been noticed yet.
    assert max(most) <= 4


def test_step_larger_than_the_backlog_is_done(thread: StepsInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.open_chunk._BACKLOG_BYTES", 10)
    done: list[int] = []
    for number in range(3):
        thread.do(functools.partial(done.append, number), 1000)
    thread.wait()
    assert done == [0, 1, 2]


def test_stop_does_what_is_left_and_raises_nothing(thread: StepsInThread) -> None:
    done: list[int] = []
    gate = threading.Event()
    thread.do(lambda: gate.wait(DEADLINE_S))
    thread.do(lambda: done.append(1))
    thread.do(fail)
    gate.set()
    assert thread.stop()
    assert thread.stop()
    assert done == [1]


def test_interrupted_stop_says_so_and_waits_no_second_time(
    thread: StepsInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread._executor, "shutdown", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.stop()
    assert not thread.stop()
    thread._executor.shutdown()


def test_step_is_not_done_twice_where_no_thread_can_be_started(
    thread: StepsInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.do(lambda: done.append(1))
    assert thread.stop()
    assert done == []
