"""Locks and fencing of producers, whether their processes still run; durable writes, and files that are opened."""

import contextlib
import errno
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import AccessRefused, FileRefused, ProducerFenced, StreamEnded
from lazyshard.format.records import Head, Owner
from lazyshard.store import durable
from lazyshard.store.files import read_file
from lazyshard.stream.head import own_process, process_ended, process_gone
from lazyshard.stream.listing import list_chunks
from lazyshard.stream.writer import ChunkWriter as Writer
from tests.stream import streams
from tests.stream.damage import edit
from tests.stream.streams import add, fail_when, forked, go_on, head, names, produce, raised, refusal_of, rows


def owner(directory: Path) -> Owner:
    return Owner.decode((directory / "stream.owner").read_bytes())


def take_over(directory: Path, writer: Writer) -> ChunkWriter:
    """Opens the stream as a producer on another machine would, where the lock of this one does not hold."""
    writer._lock._lock.release()
    return ChunkWriter(directory)


def test_second_writer_is_refused_and_names_the_holder_and_each_start_raises_the_epoch(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        with ChunkWriter(tmp_path, 2) as writer:
            caught = raised(ProducerFenced, ChunkWriter, tmp_path, 2)
            assert caught.holder == f"process {os.getpid()} on {os.uname().nodename}"
            assert (owner(tmp_path).epoch, owner(tmp_path).pid) == (epoch, os.getpid())
            writer.close(end=False)
    (tmp_path / "stream.owner").write_bytes(b"")
    go_on(tmp_path, 3)


def test_writer_whose_owners_file_is_gone_or_torn_stops_and_names_no_one(tmp_path: Path) -> None:
    for torn in (False, True):
        writer = ChunkWriter(tmp_path, 2)
        (tmp_path / "stream.owner").unlink()
        if torn:
            (tmp_path / "stream.owner").touch()
        assert raised(ProducerFenced, writer.heartbeat).holder is None
        raised(ProducerFenced, writer.close)
    go_on(tmp_path, 3)
    # Nor is the stream touched where it is only asked who owns it.
    writer = ChunkWriter(tmp_path / "asked", 2)
    writer.check_owner()
    with take_over(tmp_path / "asked", writer):
        for call in (writer.check_owner, writer.close):
            raised(ProducerFenced, call)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("step", ["publish", "heartbeat", "close", "leave"])
def test_fenced_writer_stops_at_its_next_step_and_publishes_nothing(step: str, finished: bool, tmp_path: Path) -> None:
    old = ChunkWriter(tmp_path, 2, overlap=step in ("close", "leave"))
    add(old, 0, 3)
    old.settle()
    new = take_over(tmp_path, old)
    if finished:
        add(new, new.published_samples, 5)
        new.close()
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name != ".tmp"}
    holder = str(owner(tmp_path))
    first: dict[str, list[Callable[[], object]]] = {
        "publish": [lambda: old.write({"id": 99}), lambda: old.write({"id": 99}), old.close],
        "heartbeat": [old.heartbeat, lambda: old.write({"id": 99}), old.close],
        "close": [old.close],
        "leave": [],
    }
    for call in first[step]:
        assert raised(ProducerFenced, call).holder == holder
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
    raised(ProducerFenced, writer.write, {"id": 9})
    assert StreamReader(tmp_path / "b").line(0) == (tmp_path / "a" / "chunk_00000.jsonl").read_bytes()[:9]


def test_file_that_a_fork_holds_keeps_nobody_from_taking_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS gives it another name, under which it cannot be removed as long as it is open on this machine."""
    old = ChunkWriter(tmp_path, 2)
    (old.check_owner() / ".nfs0001").touch()
    fail_when(monkeypatch, "unlink", lambda path: path == ".nfs0001", OSError(errno.EBUSY, "busy"))
    new = take_over(tmp_path, old)
    monkeypatch.undo()
    raised(ProducerFenced, old.close)
    assert len(names(tmp_path / ".tmp")) == 2
    new.close()
    raised(StreamEnded, ChunkWriter, tmp_path)
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
            refusal_of(RuntimeError, f"belongs to process {os.getppid()}", call)
        writer.close(end=False)
        writer._lock._lock.__del__()
        raised(ProducerFenced, ChunkWriter, tmp_path, 3)

    assert forked(child) == 0
    raised(ProducerFenced, ChunkWriter, tmp_path, 3)
    add(writer, 1, 4)
    writer.close()
    assert list(StreamReader(tmp_path)) == rows(0, 4)
    assert [streams.seal(tmp_path, n).samples for n in range(2)] == [3, 1]


def test_fork_that_lives_on_does_not_hold_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    def parent() -> None:
        writer = ChunkWriter(tmp_path / "s", 2)
        writer.write({"id": 0})
        with streams.running(signal.pause) as pid:
            (tmp_path / "lives").write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked(parent) == -signal.SIGKILL
    try:
        go_on(tmp_path / "s", 2)
    finally:
        os.kill(int((tmp_path / "lives").read_text()), signal.SIGKILL)


TOLD: Final = Head(0, 0, False, "running", 0.0, socket.gethostname(), os.getpid(), 0.0)


@pytest.fixture
def child() -> Iterator[Head]:
    """A process that runs until it is killed, and is waited for only at the end; as a producer."""
    told, tells = os.pipe()

    def work() -> None:
        os.write(tells, own_process().encode())
        signal.pause()

    with streams.running(work) as pid:
        yield replace(TOLD, pid=pid, process=os.read(told, 100).decode())
    os.close(told)
    os.close(tells)


def test_killed_process_has_ended_before_a_wait(child: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (process_gone(child), process_ended(child)) == (False, False)
    # Another process of the same number is not it.
    earlier = replace(child, process=child.process.rpartition(" ")[0] + " 1")
    assert (process_gone(earlier), process_ended(earlier)) == (True, True)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (process_gone(child), process_ended(child)) == (True, True)
    # Its number is still taken: without more than that it may run.
    assert process_gone(replace(child, process="")) is False
    gone = replace(child, pid=streams.ended_process(), process="")
    assert (process_gone(gone), process_ended(gone)) == (True, False)
    assert process_ended(replace(gone, process=own_process())) is True
    told: list[dict[str, Any]] = [{}, {"pid": 1}, {"host": "elsewhere"}, {"pid": 0}]
    assert [process_gone(replace(TOLD, **one)) for one in told] == [False, False, None, None]
    # Of one elsewhere, or before this boot, nothing is known.
    for process in ("", "x", f"{'0' * 36} 1 1"):
        assert process_ended(replace(child, process=process)) is False
    assert re.fullmatch(r"[0-9a-f-]{36} [0-9]+ [0-9]+", own_process())
    ChunkWriter(tmp_path, 2).close(end=False)
    assert head(tmp_path).process == own_process()
    monkeypatch.setattr("lazyshard.store.durable.BOOT_ID", Path("/nowhere/boot_id"))
    assert (own_process(), process_ended(child)) == ("", False)


def test_failed_rename_may_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [("old", True), (None, True), (None, False), ("old", False), ("another name of it", False)]
    for number, (target, done) in enumerate(targets):
        source, named = tmp_path / f"a{number}", tmp_path / f"b{number}"
        source.write_bytes(b"new")
        if target == "old":
            named.write_bytes(b"old")
        elif target is not None:
            os.link(source, named)

        def lost(source: Path, target: Path, done: bool = done) -> None:
            if done:
                os.rename(source, target)
            raise OSError(errno.EIO, "answer lost")

        monkeypatch.setattr(os, "replace", lost)
        with contextlib.nullcontext() if done else pytest.raises(OSError, match="lost"):
            durable.rename(source, named)
        assert (named if done else source).read_bytes() == b"new"
    # To remove what is not there is no error.
    durable.remove(tmp_path / "missing")


def test_link_out_of_the_stream_is_refused_and_one_within_it_is_followed(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    (stream / "deep").mkdir(parents=True)
    (stream / "deep" / "data").write_bytes(b"data")
    (stream / "link").symlink_to("deep/data")
    (tmp_path / "alias").symlink_to(stream)
    assert read_file(stream / "link") == read_file(tmp_path / "alias" / "link") == b"data"
    (tmp_path / "secret").touch()
    for number, target in enumerate([tmp_path / "secret", Path("../secret"), Path("link_0")]):
        (stream / f"link_{number}").symlink_to(target)
        refusal_of(FileRefused, "out of the stream", read_file, stream / f"link_{number}")
    (stream / "dangling").symlink_to("missing")
    for name in ("missing", "dangling"):
        assert "missing" in str(raised(FileNotFoundError, read_file, stream / name).filename)


def test_unreadable_names_path_and_uid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Callable[[Path], object], str]] = [(read_file, "open"), (list_chunks, "listdir")]
    for call, name in calls:
        with monkeypatch.context() as patch:
            fail_when(patch, name, lambda path, *_: str(path) == str(tmp_path), PermissionError(13, "denied"))
            error = raised(AccessRefused, call, tmp_path)
        assert (error.uid, error.file) == (os.geteuid(), str(tmp_path))
        assert f"uid {os.geteuid()}" in str(error)


def test_stale_file_is_opened_again_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That readers continue after once is told in faults/test_network_stale.py."""
    (tmp_path / "file").write_bytes(b"data")
    before = streams.open_descriptors()
    stale = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale"):
        patch.setattr(os, "pread", stale)
        read_file(tmp_path / "file")
    assert stale.call_count == 5
    stale.reset_mock(side_effect=True)
    assert streams.open_descriptors() == before


def test_listing_passes_over_other_names_counts_to_the_gap_and_refuses_two_files_of_one_number(tmp_path: Path) -> None:
    for name in ("0.jsonl", "0.jsonl.completed", "1.jsonl", "2.jsonl.completed", ".jsonl", "x"):
        (tmp_path / f"chunk_{name}").touch()
    listing = list_chunks(tmp_path)
    assert (listing.sealed, listing.complete, listing.gap) == (1, 1, 1)
    (tmp_path / "chunk_00001.jsonl").touch()
    refusal_of(ValueError, r"chunk_00001.jsonl and chunk_1.jsonl", list_chunks, tmp_path)
