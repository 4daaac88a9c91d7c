"""Locks and fencing of producers, and whether a producer's process still runs."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ProducerFenced, StreamEnded
from lazyshard.format.records import Head, Owner
from lazyshard.stream import lock
from lazyshard.stream.head import own_process, process_ended, process_gone
from lazyshard.stream.writer import ChunkWriter as Writer
from tests.stream.damage import edit
from tests.stream.streams import add, fail_when, forked, go_on, head, names, produce, python, rows, seal

OPEN = "import sys\nfrom lazyshard import ChunkWriter\nwriter = ChunkWriter(sys.argv[1], 2)\n"


def owner(directory: Path) -> Owner:
    return Owner.decode((directory / "stream.owner").read_bytes())


def take_over(directory: Path, writer: Writer) -> ChunkWriter:
    """Opens the stream as a producer on another machine would, where the lock of this one does not hold."""
    writer._lock._lock.release()
    return ChunkWriter(directory)


def test_second_writer_is_refused_and_names_the_holder_and_each_start_raises_the_epoch(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        with ChunkWriter(tmp_path, 2) as writer:
            with pytest.raises(ProducerFenced) as caught:
                ChunkWriter(tmp_path, 2)
            assert caught.value.holder == f"process {os.getpid()} on {os.uname().nodename}"
            assert (owner(tmp_path).epoch, owner(tmp_path).pid) == (epoch, os.getpid())
            writer.close(end=False)
    (tmp_path / "stream.owner").write_bytes(b"")
    go_on(tmp_path, 3)


@pytest.mark.parametrize("torn", [False, True])
def test_writer_whose_owners_file_is_gone_or_torn_stops_and_names_no_one(torn: bool, tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    (tmp_path / "stream.owner").unlink()
    if torn:
        (tmp_path / "stream.owner").touch()
    with pytest.raises(ProducerFenced) as caught:
        writer.heartbeat()
    assert caught.value.holder is None
    with pytest.raises(ProducerFenced):
        writer.close()
    go_on(tmp_path, 3)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("step", ["publish", "heartbeat", "close", "leave"])
def test_fenced_writer_stops_at_its_next_step_and_publishes_nothing(step: str, finished: bool, tmp_path: Path) -> None:
    old = ChunkWriter(tmp_path, 2)
    add(old, 0, 3)
    new = take_over(tmp_path, old)
    if finished:
        add(new, new.published_samples, 5)
        new.close()
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name != ".tmp"}
    holder = str(owner(tmp_path))
    calls: dict[str, list[Callable[[], object]]] = {
        "publish": [lambda: old.write({"id": 99}), lambda: old.write({"id": 99}), old.close],
        "heartbeat": [old.heartbeat, lambda: old.write({"id": 99}), old.close],
        "close": [old.close],
        "leave": [],
    }
    for call in calls[step]:
        with pytest.raises(ProducerFenced) as caught:
            call()
        assert caught.value.holder == holder
    old.close(end=False)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name != ".tmp"} == before
    if not finished:
        add(new, new.published_samples, 5)
        new.close()
    assert list(StreamReader(tmp_path)) == rows(0, 5)
    assert ".tmp" not in names(tmp_path)


def test_chunk_that_somebody_else_has_published_is_not_replaced(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "a", 2)
    produce(tmp_path / "b", 2)
    writer.write({"id": 8})
    for name in ("chunk_00000.jsonl", "chunk_00000.jsonl.completed"):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ProducerFenced):
        writer.write({"id": 9})
    assert StreamReader(tmp_path / "b").line(0) == (tmp_path / "a" / "chunk_00000.jsonl").read_bytes()[:9]


def test_file_that_a_fork_holds_keeps_nobody_from_taking_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS gives it another name, under which it cannot be removed as long as it is open on this machine."""
    old = ChunkWriter(tmp_path, 2)
    (old.check_owner() / ".nfs0001").touch()
    fail_when(monkeypatch, "unlink", lambda path: path == ".nfs0001", OSError(errno.EBUSY, "busy"))
    new = take_over(tmp_path, old)
    monkeypatch.undo()
    with pytest.raises(ProducerFenced):
        old.close()
    assert len(names(tmp_path / ".tmp")) == 2
    new.close()
    with pytest.raises(StreamEnded):
        ChunkWriter(tmp_path)
    assert ".tmp" not in names(tmp_path)


def test_token_of_the_owners_file_leads_nowhere_else(tmp_path: Path) -> None:
    produce(tmp_path / "a", 2, end=False)
    (tmp_path / "kept").mkdir()
    (tmp_path / "a" / ".tmp" / "1.x").mkdir(parents=True)
    edit("stream.owner", token="x/../../../kept")(tmp_path / "a")
    produce(tmp_path / "a", 3)
    assert (tmp_path / "kept").is_dir()


def test_fork_can_neither_write_nor_close_nor_unlock_what_its_parent_writes(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 3)
    writer.write({"id": 0})
    writer._chunk.rows.pass_on()

    def child() -> None:
        lines = [b"{}"]
        for call in (lambda: writer.write({}), lambda: writer.write_lines(lines), writer.heartbeat, writer.close):
            with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}"):
                call()
        writer.close(end=False)
        writer._lock._lock.__del__()
        with pytest.raises(ProducerFenced):
            ChunkWriter(tmp_path, 3)

    assert forked(child) == 0
    with pytest.raises(ProducerFenced):
        ChunkWriter(tmp_path, 3)
    assert python(OPEN.replace("2", "3"), tmp_path).stderr.count("ProducerFenced: ") == 1
    add(writer, 1, 4)
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 4)
    assert [seal(tmp_path, n).samples for n in range(2)] == [3, 1]


def test_fork_that_lives_on_does_not_hold_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    ready, go = os.pipe(), os.pipe()

    def parent() -> None:
        writer = ChunkWriter(tmp_path, 2)
        writer.write({"id": 0})
        if os.fork() == 0:
            os.close(go[1])
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        assert forked(parent) == -signal.SIGKILL
        go_on(tmp_path, 2)
    finally:
        for fd in (*ready, *go):
            os.close(fd)


TOLD: Final = Head(0, 0, False, "running", 0.0, socket.gethostname(), os.getpid(), 0.0)


@pytest.fixture
def child() -> Iterator[Head]:
    """A process that runs until it is killed, and is waited for only at the end; as a producer."""
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tells, own_process().encode())
        os.close(tells)
        signal.pause()
        os._exit(0)
    os.close(tells)
    with os.fdopen(told) as end:
        process = end.read()
    try:
        yield replace(TOLD, pid=pid, process=process)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_process_is_told_by_boot_namespace_and_start(tmp_path: Path) -> None:
    assert re.fullmatch(r"[0-9a-f-]{36} [0-9]+ [0-9]+", own_process())
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({})
        assert head(tmp_path).process == own_process()


def test_killed_process_has_ended_before_anybody_has_waited_for_it(child: Head) -> None:
    assert (process_gone(child), process_ended(child)) == (False, False)
    # Another process of the same number is not it.
    earlier = replace(child, process=child.process.rpartition(" ")[0] + " 1")
    assert (process_gone(earlier), process_ended(earlier)) == (True, True)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (process_gone(child), process_ended(child)) == (True, True)
    # Its number is still taken: without more than that it may run.
    assert process_gone(replace(child, process="")) is False
    waited_for = os.fork()
    if waited_for == 0:
        os._exit(0)
    os.waitpid(waited_for, 0)
    gone = replace(child, pid=waited_for, process="")
    assert (process_gone(gone), process_ended(gone)) == (True, False)
    assert process_ended(replace(gone, process=own_process())) is True
    told: list[dict[str, Any]] = [{}, {"pid": 1}, {"host": "elsewhere"}, {"pid": 0}]
    assert [process_gone(replace(TOLD, **one)) for one in told] == [False, False, None, None]


def test_nothing_is_known_of_a_process_elsewhere(child: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    for process in ("", "x", f"{'0' * 36} 1 1"):
        assert process_ended(replace(child, process=process)) is False
    monkeypatch.setattr("lazyshard.store.room.BOOT_ID", Path("/nowhere/boot_id"))
    assert own_process() == ""
    assert process_ended(child) is False


@pytest.mark.parametrize("other", ["5.fedcba9876543210", "5.fedcba9876543210.gone"])
def test_one_that_meets_a_later_one_as_it_starts_gives_up(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(tmp_path, 2, end=False)
    before = owner(tmp_path)
    make = lock.make_workplace

    def met(temporary: Path, least: int, token: str) -> lock.Workplace:
        found = make(temporary, least, token)
        (temporary / other).mkdir()
        return found

    monkeypatch.setattr(lock, "make_workplace", met)
    with pytest.raises(ProducerFenced) as caught:
        ChunkWriter(tmp_path)
    assert (caught.value.holder, owner(tmp_path)) == (None, before)
