"""Locks and fencing of producers, and whether a producer's process still runs."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ProducerFenced, ProducerLocked, StreamEnded
from lazyshard.format.records import Head, Owner
from lazyshard.store.durable import clear_folder
from lazyshard.stream import lock
from lazyshard.stream.head import own_process, process_ended, process_gone
from lazyshard.stream.lock import Workplace, make_workplace
from lazyshard.stream.writer import ChunkWriter as Writer
from tests.stream.damage import edit
from tests.stream.streams import DEADLINE_S, HERE, forked, head, names, produce, python, rows, seal

OPEN = "import sys\nfrom lazyshard import ChunkWriter\nwriter = ChunkWriter(sys.argv[1], 2)\n"


def owner(directory: Path) -> Owner:
    return Owner.decode((directory / "stream.owner").read_bytes())


def take_over(directory: Path, writer: Writer) -> ChunkWriter:
    """Opens the stream as a producer on another machine would, where the lock of this one does not hold."""
    writer._lock._lock.release()
    return ChunkWriter(directory)


def test_second_writer_in_the_same_process_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2)
    with pytest.raises(ProducerLocked) as caught:
        ChunkWriter(tmp_path, 2)
    assert caught.value.holder == f"process {os.getpid()} on {os.uname().nodename}"
    writer.write({"id": 0})
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 1)


def test_lock_of_a_holder_that_was_killed_is_free(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", OPEN + "writer.write({'id': 0})\nprint('open', flush=True)\nsys.stdin.read()", tmp_path],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(ProducerLocked, match=f"process {holder.pid} on"):
            ChunkWriter(tmp_path, 2)
        holder.send_signal(signal.SIGKILL)
        holder.wait(DEADLINE_S)
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


def test_each_start_raises_the_epoch(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        writer = ChunkWriter(tmp_path, 2)
        assert (owner(tmp_path).epoch, owner(tmp_path).pid) == (epoch, os.getpid())
        writer.close(end=False)


def test_torn_owner_file_does_not_keep_the_next_producer_out(tmp_path: Path) -> None:
    produce(tmp_path, 2, end=False)
    (tmp_path / "stream.owner").write_bytes(b"")
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


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
    produce(tmp_path, 3)
    assert list(StreamReader(tmp_path)) == rows(0, 3)


@pytest.mark.parametrize("step", ["publish", "heartbeat", "close"])
def test_fenced_writer_stops_at_its_next_step_and_publishes_nothing(step: str, tmp_path: Path) -> None:
    old = ChunkWriter(tmp_path, 2)
    for row in rows(0, 3):
        old.write(row)
    new = take_over(tmp_path, old)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name != ".tmp"}
    with pytest.raises(ProducerFenced, match="has taken this stream over") as caught:
        if step == "publish":
            old.write({"id": 99})
        elif step == "heartbeat":
            old.heartbeat()
        else:
            old.close()
    assert caught.value.holder == str(owner(tmp_path))
    if step != "close":
        with pytest.raises(ProducerFenced):
            old.write({"id": 99})
        with pytest.raises(ProducerFenced):
            old.close()
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name != ".tmp"} == before
    for row in rows(new.published_samples, 5):
        new.write(row)
    new.close()
    assert list(StreamReader(tmp_path)) == rows(0, 5)
    assert ".tmp" not in names(tmp_path)


def test_fenced_writer_that_leaves_does_not_disturb_its_successor(tmp_path: Path) -> None:
    old = ChunkWriter(tmp_path, 2)
    new = take_over(tmp_path, old)
    old.close(end=False)
    assert head(tmp_path).state == "running"
    new.heartbeat()
    new.write({"id": 0})
    new.close()
    assert list(StreamReader(tmp_path)) == rows(0, 1)


def test_fenced_writer_says_so_even_where_its_successor_has_finished(tmp_path: Path) -> None:
    old = ChunkWriter(tmp_path, 2)
    old.write({"id": 0})
    new = take_over(tmp_path, old)
    for row in rows(0, 3):
        new.write(row)
    new.close()
    with pytest.raises(ProducerFenced):
        old.write({"id": 99})


def test_chunk_that_somebody_else_has_published_is_not_replaced(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "a", 2)
    produce(tmp_path / "b", 2)
    writer.write({"id": 8})
    for name in ("chunk_00000.jsonl", "chunk_00000.jsonl.completed"):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ProducerFenced, match="somebody else has published this chunk"):
        writer.write({"id": 9})
    assert StreamReader(tmp_path / "b").line(0) == (tmp_path / "a" / "chunk_00000.jsonl").read_bytes()[:9]


def test_directory_of_a_fenced_one_goes_although_files_appear_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".tmp" / "1.0123456789abcdef"
    left.mkdir(parents=True)
    cleared: list[Path] = []
    clear = clear_folder

    def late(folder: Path) -> bool:
        found = clear(folder)
        cleared.append(folder)
        if len(cleared) == 1:
            (folder / "chunk_00000.jsonl").touch()
        return found

    monkeypatch.setattr(lock, "clear_folder", late)
    writer = ChunkWriter(tmp_path, 2)
    assert cleared == 2 * [left.with_name("1.0123456789abcdef.gone")]
    assert [path.name.partition(".")[0] for path in (tmp_path / ".tmp").iterdir()] == ["2"]
    writer.close()


def test_file_that_a_fork_has_open_keeps_nobody_from_taking_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS gives it another name, under which it cannot be removed as long as it is open on this machine."""
    old = ChunkWriter(tmp_path, 2)
    (old.check_owner() / ".nfs0001").touch()
    unlink = os.unlink

    def busy(path: str, **named: int) -> None:
        if path == ".nfs0001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, **named)

    monkeypatch.setattr(os, "unlink", busy)
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


@pytest.mark.parametrize("others", ["5.fedcba9876543210", "5.fedcba9876543210.gone"])
def test_one_that_meets_a_later_one_as_it_starts_gives_up(
    others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(tmp_path, 2, end=False)
    before = owner(tmp_path)
    make = make_workplace

    def met(temporary: Path, least: int, token: str) -> Workplace:
        found = make(temporary, least, token)
        (temporary / others).mkdir()
        return found

    monkeypatch.setattr(lock, "make_workplace", met)
    with pytest.raises(ProducerFenced, match="another producer is taking this stream over") as caught:
        ChunkWriter(tmp_path)
    assert caught.value.holder is None
    assert (owner(tmp_path), names(tmp_path / ".tmp")) == (before, [others])


def test_fork_can_neither_write_nor_close_nor_unlock_what_its_parent_writes(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 3)
    writer.write({"id": 0})
    writer._chunks._chunk.pass_on()

    def child() -> None:
        lines = [b"{}"]
        for call in (lambda: writer.write({}), lambda: writer.write_lines(lines), writer.heartbeat, writer.close):
            with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}"):
                call()
        writer.close(end=False)
        writer._lock._lock.__del__()
        with pytest.raises(ProducerLocked):
            ChunkWriter(tmp_path, 3)

    assert forked(child) == 0
    with pytest.raises(ProducerLocked):
        ChunkWriter(tmp_path, 3)
    assert python(OPEN.replace("2", "3"), tmp_path).stderr.count("ProducerLocked: ") == 1
    for row in rows(1, 4):
        writer.write(row)
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 4)
    assert [seal(tmp_path, n).samples for n in range(2)] == [3, 1]


def test_fork_that_lives_on_does_not_hold_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    ready, go = os.pipe(), os.pipe()

    def parent() -> None:
        writer = ChunkWriter(tmp_path, 2)
        if os.fork() == 0:
            os.close(go[1])
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        writer.write({"id": 0})
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        assert forked(parent) == -signal.SIGKILL
        produce(tmp_path, 2)
    finally:
        for fd in (*ready, *go):
            os.close(fd)
    assert list(StreamReader(tmp_path)) == rows(0, 2)


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


def test_process_is_told_by_boot_namespace_and_start() -> None:
    assert re.fullmatch(r"[0-9a-f-]{36} [0-9]+ [0-9]+", own_process())
    assert own_process() == own_process()


def test_head_of_a_writer_names_its_process(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({})
        assert Head.decode((tmp_path / "head.json").read_bytes()).process == own_process()


def test_killed_process_has_ended_before_anybody_has_waited_for_it(child: Head) -> None:
    assert (process_gone(child), process_ended(child)) == (False, False)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (process_gone(child), process_ended(child)) == (True, True)
    # Its number is still taken: without more than that it may run.
    assert process_gone(replace(child, process="")) is False


def test_another_process_of_the_same_number_is_not_it(child: Head) -> None:
    earlier = replace(child, process=child.process.rpartition(" ")[0] + " 1")
    assert (process_gone(earlier), process_ended(earlier)) == (True, True)


@pytest.mark.parametrize("process", ["", "x", f"{'0' * 36} 1 1"], ids=["none", "odd", "another boot"])
def test_nothing_is_known_of_a_process_elsewhere(child: Head, process: str) -> None:
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_ended(replace(child, process=process)) is False


def test_process_that_was_waited_for_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    gone = replace(TOLD, pid=pid)
    assert (process_gone(gone), process_ended(gone)) == (True, False)
    assert process_ended(replace(gone, process=own_process())) is True


def test_where_the_kernel_tells_nothing_nothing_is_claimed(child: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.head._BOOT_ID", Path("/nowhere/boot_id"))
    assert own_process() == ""
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_ended(child) is False


def test_process_of_another_machine() -> None:
    assert process_gone(TOLD) is False
    assert process_gone(replace(TOLD, pid=1)) is False
    assert process_gone(replace(TOLD, host="elsewhere")) is None
    assert process_gone(replace(TOLD, pid=0)) is None
