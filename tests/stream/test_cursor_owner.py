"""Who may write a cursor: one run, its successor after any kill, of two that cannot see each other the later one."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import filelock
import pytest

from lazyshard.errors import CursorTaken, VersionUnsupported
from lazyshard.format.cursor import Cursor, CursorToken
from lazyshard.format.state import RunState
from lazyshard.inspection.verification_files import read_files
from lazyshard.part import Part
from lazyshard.stream import CursorOwner, forget_consumer, list_consumers, read_cursor, write_cursor
from tests.stream.streams import forked, names, produce, raising, reap, signalled_at, wait_until

HOST = os.uname().nodename


def at(consumed: int, *, updated_at: float = 1700000000.0) -> Cursor:
    """The cursor of a run of one rank at that many samples."""
    state = RunState(None, 2, 2, 0, 0, None, (Part(1, 1, consumed),), consumed)
    return Cursor("sft", None, consumed, consumed // 2, {"dp_size": 1}, updated_at, state)


def written(directory: Path) -> int | None:
    """How far the cursor in a directory is."""
    found = read_cursor(directory, "sft")
    assert found is None or replace(found, owner="") == at(found.consumed, updated_at=found.updated_at)
    return None if found is None else found.consumed


def token(directory: Path) -> CursorToken:
    found = read_cursor(directory, "sft")
    parsed = CursorToken.parse("" if found is None else found.owner)
    assert parsed is not None
    return parsed


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines whose locks do not meet, or a filesystem that has none."""
    monkeypatch.setattr(filelock.FileLock, "acquire", raising(OSError(errno.ENOLCK, "No locks available")))


def test_each_run_begins_with_a_higher_turn_and_writes_its_cursor(tmp_path: Path) -> None:
    turns = []
    for consumed in (4, 2, 0):
        with CursorOwner(str(tmp_path), "sft") as owner:
            # It goes back where a run starts from an older checkpoint.
            owner.begin(at(consumed))
            assert written(tmp_path) == consumed
            owner.write(at(consumed + 2))
        assert written(tmp_path) == consumed + 2
        turns.append(token(tmp_path).turn)
        assert token(tmp_path) == CursorToken(turns[-1], token(tmp_path).token, os.getpid(), HOST)
    assert turns == sorted(set(turns))
    assert names(tmp_path / "cursors") == [".sft.lock", "sft.json"]


def test_second_run_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    with CursorOwner(tmp_path, "sft") as owner:
        with pytest.raises(CursorTaken) as caught:
            CursorOwner(tmp_path, "sft")
        error = caught.value
        assert (error.directory, error.consumer) == (str(tmp_path), "sft")
        assert error.holder == f"process {os.getpid()} on {HOST}"
        with CursorOwner(tmp_path, "dpo") as other:
            other.begin(replace(at(0), consumer="dpo"))
        owner.begin(at(0))
        owner.write(at(2))
        for left in (b"", b"garbage", b"\xff\xff", b"3/"):
            (tmp_path / "cursors" / ".sft.lock").write_bytes(left)
            with pytest.raises(CursorTaken) as caught:
                CursorOwner(tmp_path, "sft")
            assert caught.value.holder == "a process that has not written its name yet"
    assert written(tmp_path) == 2


def test_run_that_takes_over_is_the_only_one_that_writes_on(tmp_path: Path) -> None:
    old = CursorOwner(tmp_path, "sft")
    assert not old.begun
    old.put(at(0))
    assert old.begun
    with CursorOwner(tmp_path, "sft", take_over=True) as new:
        old.put(at(2))
        new.begin(at(0))
        for _ in range(2):
            with pytest.raises(CursorTaken) as caught:
                old.put(at(4))
            assert (caught.value.consumer, caught.value.holder) == ("sft", f"process {os.getpid()} on {HOST}")
            assert written(tmp_path) == 0
        new.write(at(2))
        # It has the lock now, which the other one has let go of.
        for _ in range(2):
            with pytest.raises(CursorTaken):
                CursorOwner(tmp_path, "sft")
            old.close()
    # Whatever becomes of the cursor.
    old = CursorOwner(tmp_path, "sft")
    old.begin(at(0))
    with CursorOwner(tmp_path, "sft", take_over=True) as new:
        new.begin(at(0))
        with pytest.raises(CursorTaken):
            old.write(at(2))
    assert forget_consumer(tmp_path, "sft")
    with pytest.raises(CursorTaken):
        old.write(at(2))
    assert names(tmp_path / "cursors") == []


@pytest.mark.parametrize("skew", [-(10.0**9), 0.0, 10.0**9])
@pytest.mark.usefixtures("no_locks")
def test_of_two_runs_without_locks_the_later_one_goes_on_whatever_clocks_say(tmp_path: Path, skew: float) -> None:
    now = 1700000000.0
    # Made in one order, begun in the other.
    new, old = CursorOwner(tmp_path, "sft"), CursorOwner(tmp_path, "sft")
    old.begin(at(0, updated_at=now))
    new.begin(at(0, updated_at=now + skew))
    with pytest.raises(CursorTaken):
        old.write(at(8, updated_at=now + 1))
    new.write(at(2, updated_at=now + skew))
    new.write(at(4, updated_at=now + 2 * skew))
    assert written(tmp_path) == 4


@pytest.mark.parametrize("owner", ["", "me", "0123456789abcdef", -1, 0, 1])
def test_who_has_no_lower_turn_has_taken_over(tmp_path: Path, owner: str | int) -> None:
    with CursorOwner(tmp_path, "sft") as run:
        run.begin(at(0))
        text, holder = str(owner), "a program that gives no name"
        if isinstance(owner, int):
            text, holder = CursorToken(token(tmp_path).turn + owner, "f" * 16, 1, "node2").text, "process 1 on node2"
        write_cursor(tmp_path, replace(at(6), owner=text))
        if owner == -1:
            run.write(at(2))
            assert written(tmp_path) == 2
        else:
            with pytest.raises(CursorTaken) as caught:
                run.write(at(2))
            assert (caught.value.holder, written(tmp_path)) == (holder, 6)
    with CursorOwner(tmp_path, "sft") as run:
        run.begin(at(6))
        run.write(at(8))
    assert written(tmp_path) == 8


def test_cursor_that_is_gone_is_written_anew(tmp_path: Path) -> None:
    with CursorOwner(tmp_path, "sft") as owner:
        owner.begin(at(0))
        assert forget_consumer(tmp_path, "sft")
        # A run that lives keeps its lock.
        assert names(tmp_path / "cursors") == [".sft.lock"]
        with pytest.raises(CursorTaken):
            CursorOwner(tmp_path, "sft")
        owner.write(at(2))
        for name in ("sft.json", ".sft.lock"):
            (tmp_path / "cursors" / name).unlink()
        (tmp_path / "cursors").rmdir()
        owner.write(at(4))
    assert written(tmp_path) == 4


@pytest.mark.parametrize("data", [b"", b"{", b"\0" * 100, at(2).encode()[:-40], b'{"format":1,"consumer":"dpo"}'])
def test_torn_cursor_is_told_once_and_replaced(tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cursors" / "sft.json"
    with CursorOwner(tmp_path, "sft") as owner, caplog.at_level(logging.WARNING, "lazyshard"):
        owner.begin(at(0))
        for consumed in (2, 4):
            path.write_bytes(data)
            (found,) = list_consumers(tmp_path)
            # Its chunks are kept meanwhile.
            assert (found.name, found.chunks_before, found.problem is not None) == ("sft", 0, True)
            owner.write(at(consumed))
            assert written(tmp_path) == consumed
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("no_locks")
def test_run_that_begins_over_a_torn_cursor_still_takes_over(tmp_path: Path) -> None:
    (tmp_path / "cursors").mkdir()
    path = tmp_path / "cursors" / ".sft.lock"
    path.write_bytes(b"7/0123456789abcdef process 1 on " + b"h" * 200 + b"\n")
    old = CursorOwner(tmp_path, "sft")
    old.begin(at(0))
    # Nothing is left of a longer name.
    assert path.read_text() == token(tmp_path).text + "\n"
    assert token(tmp_path).turn > 7
    (tmp_path / "cursors" / "sft.json").write_bytes(b"{")
    new = CursorOwner(tmp_path, "sft")
    new.begin(at(0))
    with pytest.raises(CursorTaken):
        old.write(at(2))
    new.write(at(4))
    assert written(tmp_path) == 4


def test_cursor_of_a_later_release_is_neither_written_over_nor_taken(tmp_path: Path) -> None:
    later = at(6).encode().replace(b'{"format":1,"consumer"', b'{"format":2,"consumer"')
    path = tmp_path / "cursors" / "sft.json"
    with CursorOwner(tmp_path, "sft") as owner:
        owner.begin(at(0))
        path.write_bytes(later)
        with pytest.raises(CursorTaken) as caught:
            owner.write(at(2))
        assert caught.value.holder == "a run with a later release of lazyshard"
    # Kept, and with it whatever held the lock.
    kept = []
    for _ in range(2):
        with pytest.raises(VersionUnsupported) as refused:
            CursorOwner(tmp_path, "sft")
        kept.append(refused.value)
    assert path.read_bytes() == later


def test_failed_write_leaves_the_cursor_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
        patch.setattr(filelock.FileLock, "acquire", raising(OSError(errno.EIO, "broken")))
        CursorOwner(tmp_path, "sft")
    with CursorOwner(tmp_path, "sft") as owner:
        for write, before in ((owner.begin, None), (owner.write, 2)):
            with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
                patch.setattr(os, "write", raising(OSError(errno.ENOSPC, "no space")))
                write(at(2))
            assert written(tmp_path) == before
            write(at(2))
            assert written(tmp_path) == 2
    assert names(tmp_path / "cursors") == [".sft.lock", "sft.json"]


def test_calls_out_of_turn_are_refused_and_write_nothing(tmp_path: Path) -> None:
    owner = CursorOwner(tmp_path, "sft")
    with pytest.raises(RuntimeError):
        owner.write(at(2))
    with pytest.raises(ValueError, match="dpo"):
        owner.begin(replace(at(2), consumer="dpo"))
    owner.begin(at(0))
    for closed, calls in ((False, [owner.begin]), (True, [owner.begin, owner.write])):
        if closed:
            owner.close()
            owner.close()
        for call in calls:
            with pytest.raises(RuntimeError):
                call(at(2))
    assert written(tmp_path) == 0


def test_fork_neither_writes_nor_unlocks_what_its_parent_owns(tmp_path: Path) -> None:
    owner = CursorOwner(tmp_path, "sft")
    owner.begin(at(0))

    def child() -> None:
        for call in (owner.begin, owner.write):
            with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}"):
                call(at(8))
        owner.close()
        owner._lock.__del__()
        with pytest.raises(CursorTaken):
            CursorOwner(tmp_path, "sft")

    assert forked(child) == 0
    with pytest.raises(CursorTaken):
        CursorOwner(tmp_path, "sft")
    owner.write(at(2))
    owner.close()
    assert written(tmp_path) == 2


def test_lock_files_are_nobodys_cursor_and_go_with_a_consumer_that_is_forgotten(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 4)
    owners = [CursorOwner(stream, name) for name in ("sft", "a.json", "sft2")]
    owners[0].begin(at(0))
    assert names(stream / "cursors") == [".a.json.lock", ".sft.lock", ".sft2.lock", "sft.json"]
    assert [one.name for one in list_consumers(stream)] == ["sft"]
    facts = read_files(stream, 0.0)
    assert ([file for file, _ in facts.cursors], facts.findings) == (["cursors/sft.json"], [])
    for owner in owners:
        owner.close()
    assert forget_consumer(stream, "sft") is True
    assert names(stream / "cursors") == [".a.json.lock", ".sft2.lock"]


def forks(number: int, work: Callable[[int], object]) -> list[int]:
    """Starts forks that run `work` with their number, from 0; their exit codes are those of `forked`, 3 if taken."""
    pids = []
    for index in range(number):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(index)
                code = 0
            except CursorTaken:
                code = 3
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


@pytest.mark.parametrize("locks", [True, False])
def test_of_many_runs_at_once_one_writes_on(locks: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not locks:
        request.getfixturevalue("no_locks")
    go, stop = tmp_path / "go", tmp_path / "stop"
    stream = tmp_path / "s"
    stream.mkdir()

    def run(index: int) -> None:
        wait_until(go.exists, "the start")
        try:
            owner = CursorOwner(stream, "sft")
            owner.begin(at(index))
            (tmp_path / f"own{index}").touch()
            while not stop.exists():
                owner.write(at(index))
        except CursorTaken:
            (tmp_path / f"taken{index}").touch()
            raise

    pids = forks(6, run)
    go.touch()
    wait_until(lambda: len(list(tmp_path.glob("taken*"))) >= 5 and list(tmp_path.glob("own*")), "one that is left")
    stop.touch()
    codes = [os.waitstatus_to_exitcode(reap(pid)) for pid in pids]
    assert sorted(codes) == [0, *[3] * 5]
    assert written(stream) == codes.index(0)
    assert token(stream).pid == pids[codes.index(0)]
    assert names(stream / "cursors") == [".sft.lock", "sft.json"]


CALLS = ("write", "fsync", "ftruncate", "replace", "mkdir", "unlink")


def killed_at(number: int, when: str, stream: Path) -> None:
    """A run that is killed at a call that changes files."""
    signalled_at(number, when, *CALLS)
    owner = CursorOwner(stream, "sft")
    owner.begin(at(2))
    owner.write(at(4))
    owner.write(at(6))


@pytest.mark.few(2)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_run_killed_at_any_call_leaves_a_whole_cursor_and_no_lock(tmp_path: Path, when: str, fresh: bool) -> None:
    seen: list[int | None] = []
    for number in range(1, 100):
        stream = tmp_path / f"{number}"
        stream.mkdir()
        if not fresh:
            with CursorOwner(stream, "sft") as before:
                before.begin(at(100))
        code = forked(partial(killed_at, number, when, stream))
        seen.append(written(stream))
        with CursorOwner(stream, "sft") as owner:
            assert [one.name for one in list_consumers(stream)] == ([] if seen[-1] is None else ["sft"])
            owner.begin(at(8))
            owner.write(at(10))
        assert written(stream) == 10
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert number > 10
    steps = [None if fresh else 100, 2, 4, 6]
    # Each step is met, and none is taken back by a later kill.
    assert list(dict.fromkeys(seen)) == steps
    assert [steps.index(one) for one in seen] == sorted(steps.index(one) for one in seen)


def hang_at(number: int, stream: Path, _: int) -> None:
    """Begins, stops this process at call `number` of its first write, and writes a second time once it is told to."""
    owner = CursorOwner(stream, "sft")
    owner.begin(at(0))
    stopped = signalled_at(number, "before", *CALLS, by=signal.SIGSTOP)
    try:
        owner.write(at(2))
    finally:
        (stream / "woken").touch()
    if stopped:
        wait_until((stream / "go").exists, "the successor's first write")
        owner.write(at(4))


@pytest.mark.usefixtures("no_locks")
def test_hung_run_that_wakes_up_after_its_successor_has_begun_is_refused(tmp_path: Path) -> None:
    outcomes = set()
    for number in range(1, 100):
        stream = tmp_path / f"{number}"
        stream.mkdir()
        (pid,) = forks(1, partial(hang_at, number, stream))
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        with CursorOwner(stream, "sft") as new:
            new.begin(at(8))
            os.kill(pid, signal.SIGCONT)
            wait_until((stream / "woken").exists, "the end of its write")
            outcomes.add(written(stream))
            new.write(at(10))
            (stream / "go").touch()
            assert os.waitstatus_to_exitcode(reap(pid)) == 3
            new.write(at(12))
            assert written(stream) == 12
    # Refused at once, or stopped behind its look, where its successor has written over it.
    assert outcomes == {2, 8}
