"""Whether a producer's process still runs: told at once where it can be known, and never claimed where it cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.format import Head
from lazyshard.storage import producer_process
from lazyshard.storage.producer_process import own_process, process_ended, process_gone

HERE: Final = Head(0, 0, False, "running", 0.0, socket.gethostname(), os.getpid(), 0.0)


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
        yield replace(HERE, pid=pid, process=process)
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
    gone = replace(HERE, pid=pid)
    assert (process_gone(gone), process_ended(gone)) == (True, False)
    assert process_ended(replace(gone, process=own_process())) is True


def test_where_the_kernel_tells_nothing_nothing_is_claimed(child: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_process, "_BOOT_ID", Path("/nowhere/boot_id"))
    assert own_process() == ""
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_ended(child) is False


def test_process_of_another_machine() -> None:
    assert process_gone(HERE) is False
    assert process_gone(replace(HERE, pid=1)) is False
    assert process_gone(replace(HERE, host="elsewhere")) is None
    assert process_gone(replace(HERE, pid=0)) is None
