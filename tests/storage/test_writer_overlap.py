"""A writer that publishes in a thread: the same files, the same promises, a little later."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LazyShardError, ProducerFenced, ProducerLocked, WriterFailed
from lazyshard.storage import durable, piece_file
from tests.storage.streams import DEADLINE_S, forked, head, names, produce, python, rows, wait_until
from tests.storage.test_writer_faults import STEPS, check_prefix


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
    monkeypatch.setattr(piece_file, "sync", made.sync)
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
    writer.write({"id": 2})

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(STEPS[step], fail)
    writer.write({"id": 3})
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


def test_fork_can_neither_write_nor_close(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2, overlap=True)
    for row in rows(0, 3):
        writer.write(row)
    writer.heartbeat()

    def child() -> None:
        for call in (lambda: writer.write({"id": 99}), writer.heartbeat, writer.close):
            with pytest.raises(RuntimeError, match="belongs to process"):
                call()

    assert forked(child) == 0
    writer.write({"id": 3})
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 4)


def test_program_that_ends_without_closing_has_published_what_was_full_and_says_what_was_not(tmp_path: Path) -> None:
    done = python(
        "import sys\n"
        "from lazyshard import ChunkWriter\n"
        "writer = ChunkWriter(sys.argv[1], 2, overlap=True)\n"
        "for number in range(3): writer.write({'id': number})\n",
        tmp_path,
    )
    assert done.returncode == 0
    assert "dropped without close(): 1 rows of its open chunk are not published" in done.stderr
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


def test_errors_are_those_of_a_writer_without_a_thread(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2, overlap=True)
    with pytest.raises(LazyShardError):
        writer.write({"id": float("nan")})
    writer.write_lines([b'{"id":0}\n', b'{"id":1}\n'])
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 2)


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
