"""Who may write a cursor: one run, its successor after any kill, of two that cannot see each other the later one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import pytest

from lazyshard.errors import CursorTaken, VersionUnsupported
from lazyshard.format.cursor import Cursor, CursorToken
from lazyshard.format.state import RunState
from lazyshard.inspection.verification_files import gather_facts
from lazyshard.part import Part
from lazyshard.stream import CursorOwner, forget_consumer, list_consumers, read_cursor, write_cursor
from tests.stream.streams import DEADLINE_S, HERE, forked, names, produce, reap, wait_until

HOST = os.uname().nodename
START = "import sys\nfrom lazyshard.stream import CursorOwner\nowner = CursorOwner(sys.argv[1], 'sft')\n"


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
    assert found is not None
    parsed = CursorToken.parse(found.owner)
    assert parsed is not None
    return parsed


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines whose locks do not meet, or a filesystem that has none."""

    def acquire(_: filelock.FileLock) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)


def test_run_begins_and_writes_its_cursor(tmp_path: Path) -> None:
    with CursorOwner(tmp_path, "sft") as owner:
        assert written(tmp_path) is None
        owner.begin(at(0))
        assert written(tmp_path) == 0
        owner.write(at(4))
        assert written(tmp_path) == 4
        assert token(tmp_path) == CursorToken(token(tmp_path).turn, token(tmp_path).token, os.getpid(), HOST)
    assert written(tmp_path) == 4
    assert names(tmp_path / "cursors") == [".sft.lock", "sft.json"]


def test_each_run_takes_a_higher_turn(tmp_path: Path) -> None:
    turns = []
    for consumed in (4, 2, 0):
        with CursorOwner(str(tmp_path), "sft") as owner:
            owner.begin(at(consumed))
            owner.write(at(consumed + 2))
        # It goes back where a run starts from an older checkpoint.
        assert written(tmp_path) == consumed + 2
        turns.append(token(tmp_path).turn)
    assert turns == sorted(set(turns))


def test_second_run_in_the_same_process_is_refused_and_names_the_holder(tmp_path: Path) -> None:
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
    assert written(tmp_path) == 2


def test_put_begins_once_and_then_writes(tmp_path: Path) -> None:
    with CursorOwner(tmp_path, "sft") as first:
        assert not first.begun
        first.put(at(8))
        assert first.begun
        with CursorOwner(tmp_path, "sft", take_over=True) as second:
            second.put(at(4))
            # It does not begin again.
            with pytest.raises(CursorTaken):
                first.put(at(9))
            assert written(tmp_path) == 4


@pytest.mark.parametrize("left", [b"", b"garbage", b"\xff\xff", b"3/"])
def test_holder_that_has_not_written_its_name_is_called_so(tmp_path: Path, left: bytes) -> None:
    with CursorOwner(tmp_path, "sft"):
        (tmp_path / "cursors" / ".sft.lock").write_bytes(left)
        with pytest.raises(CursorTaken, match="a process that has not written its name yet is running as 'sft'"):
            CursorOwner(tmp_path, "sft")


def test_shorter_name_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / "cursors").mkdir()
    path = tmp_path / "cursors" / ".sft.lock"
    path.write_bytes(b"7/0123456789abcdef process 1 on " + b"h" * 200 + b"\n")
    with CursorOwner(tmp_path, "sft") as owner:
        owner.begin(at(0))
        assert path.read_text() == token(tmp_path).text + "\n"
        assert token(tmp_path).turn > 7


def test_run_that_takes_over_is_the_only_one_that_writes_on(tmp_path: Path) -> None:
    old = CursorOwner(tmp_path, "sft")
    old.begin(at(0))
    with CursorOwner(tmp_path, "sft", take_over=True) as new:
        old.write(at(2))
        new.begin(at(0))
        for _ in range(2):
            with pytest.raises(CursorTaken) as caught:
                old.write(at(4))
            assert (caught.value.consumer, caught.value.holder) == ("sft", f"process {os.getpid()} on {HOST}")
            assert written(tmp_path) == 0
        assert names(tmp_path / "cursors") == [".sft.lock", "sft.json"]
        new.write(at(2))
        # It has the lock now, which the other one has let go of.
        for closes in (False, True):
            if closes:
                old.close()
            with pytest.raises(CursorTaken, match="is running as 'sft'"):
                CursorOwner(tmp_path, "sft")


def test_run_that_was_taken_over_never_writes_again_whatever_becomes_of_the_cursor(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("no_locks")
def test_of_two_runs_whose_locks_do_not_meet_the_later_one_goes_on(tmp_path: Path) -> None:
    first, second = CursorOwner(tmp_path, "sft"), CursorOwner(tmp_path, "sft")
    # Made in one order, begun in the other.
    second.begin(at(0))
    first.begin(at(0))
    with pytest.raises(CursorTaken):
        second.write(at(8))
    first.write(at(2))
    third = CursorOwner(tmp_path, "sft")
    third.begin(at(0))
    with pytest.raises(CursorTaken):
        first.write(at(8))
    third.write(at(2))
    assert written(tmp_path) == 2


@pytest.mark.usefixtures("no_locks")
def test_write_that_comes_between_look_and_rename_is_written_over_by_the_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = CursorOwner(tmp_path, "sft"), CursorOwner(tmp_path, "sft")
    old.begin(at(0))
    os_replace = os.replace

    def slow(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", os_replace)
        new.begin(at(0))
        os_replace(source, target)

    monkeypatch.setattr(os, "replace", slow)
    old.write(at(8))
    assert written(tmp_path) == 8
    new.write(at(2))
    with pytest.raises(CursorTaken):
        old.write(at(10))
    new.write(at(4))
    assert written(tmp_path) == 4


@pytest.mark.parametrize("skew", [-(10.0**9), -1.0, 0.0, 1.0, 10.0**9])
@pytest.mark.usefixtures("no_locks")
def test_clocks_decide_nothing(tmp_path: Path, skew: float) -> None:
    ahead = 1700000000.0
    old, new = CursorOwner(tmp_path, "sft"), CursorOwner(tmp_path, "sft")
    old.begin(at(0, updated_at=ahead))
    new.begin(at(0, updated_at=ahead + skew))
    with pytest.raises(CursorTaken):
        old.write(at(8, updated_at=ahead + 1))
    new.write(at(2, updated_at=ahead + skew))
    new.write(at(4, updated_at=ahead + 2 * skew))
    assert written(tmp_path) == 4


@pytest.mark.parametrize("owner", ["", "me", "0123456789abcdef"])
def test_program_that_takes_no_turn_has_taken_over_as_well(tmp_path: Path, owner: str) -> None:
    with CursorOwner(tmp_path, "sft") as run:
        run.begin(at(0))
        write_cursor(tmp_path, replace(at(6), owner=owner))
        with pytest.raises(CursorTaken, match="a program that gives no name has taken over the cursor of 'sft'"):
            run.write(at(2))
    assert written(tmp_path) == 6
    with CursorOwner(tmp_path, "sft") as run:
        run.begin(at(6))
        run.write(at(8))
    assert written(tmp_path) == 8


@pytest.mark.parametrize(("more", "refused"), [(-1, False), (0, True), (1, True)])
def test_run_of_the_same_turn_has_taken_over_and_one_of_a_lower_turn_has_not(
    tmp_path: Path, more: int, refused: bool
) -> None:
    with CursorOwner(tmp_path, "sft") as run:
        run.begin(at(0))
        other = replace(token(tmp_path), turn=token(tmp_path).turn + more, token="f" * 16, host="node2")
        write_cursor(tmp_path, replace(at(6), owner=other.text))
        with pytest.raises(CursorTaken, match="on node2 has taken over") if refused else contextlib.nullcontext():
            run.write(at(2))
    assert written(tmp_path) == (6 if refused else 2)


def test_cursor_that_is_gone_is_written_anew(tmp_path: Path) -> None:
    with CursorOwner(tmp_path, "sft") as owner:
        owner.begin(at(0))
        assert forget_consumer(tmp_path, "sft")
        # A run that lives keeps its lock.
        assert names(tmp_path / "cursors") == [".sft.lock"]
        owner.write(at(2))
        assert written(tmp_path) == 2
        (tmp_path / "cursors" / "sft.json").unlink()
        (tmp_path / "cursors" / ".sft.lock").unlink()
        (tmp_path / "cursors").rmdir()
        owner.write(at(4))
    assert written(tmp_path) == 4


@pytest.mark.parametrize("data", [b"", b"{", b"\0" * 100, at(2).encode()[:-40], b'{"format":1,"consumer":"dpo"}'])
def test_torn_cursor_is_told_once_and_written_anew(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
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
    old = CursorOwner(tmp_path, "sft")
    for _ in range(5):
        old = CursorOwner(tmp_path, "sft")
        old.begin(at(0))
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
        with pytest.raises(CursorTaken, match="a run with a later release of lazyshard has taken over"):
            owner.write(at(2))
    refusals = []
    for _ in range(2):
        with pytest.raises(VersionUnsupported) as caught:
            CursorOwner(tmp_path, "sft")
        # Kept, and with it whatever held the lock.
        refusals.append(caught.value)
    assert path.read_bytes() == later


def test_write_that_fails_leaves_the_cursor_and_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with CursorOwner(tmp_path, "sft") as owner:
        for call, write in (("begin", owner.begin), ("write", owner.write)):
            before = written(tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", fail)
                with pytest.raises(OSError, match="no space"):
                    write(at(2))
            assert written(tmp_path) == before, call
            write(at(2))
            assert written(tmp_path) == 2
    assert names(tmp_path / "cursors") == [".sft.lock", "sft.json"]


def test_filesystem_that_refuses_the_lock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(_: filelock.FileLock) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with pytest.raises(OSError, match="broken"):
        CursorOwner(tmp_path, "sft")


def test_calls_out_of_turn_are_refused_and_write_nothing(tmp_path: Path) -> None:
    owner = CursorOwner(tmp_path, "sft")
    with pytest.raises(RuntimeError, match="has not begun"):
        owner.write(at(2))
    with pytest.raises(ValueError, match="a cursor of 'sft' is written here, got one of 'dpo'"):
        owner.begin(replace(at(2), consumer="dpo"))
    owner.begin(at(0))
    with pytest.raises(RuntimeError, match="has begun already"):
        owner.begin(at(2))
    owner.close()
    owner.close()
    for call in (owner.begin, owner.write):
        with pytest.raises(RuntimeError, match="was closed"):
            call(at(2))
    assert written(tmp_path) == 0


def test_fork_neither_writes_nor_unlocks_what_its_parent_owns(tmp_path: Path) -> None:
    owner = CursorOwner(tmp_path, "sft")
    owner.begin(at(0))

    def child() -> None:
        for call in (owner.begin, owner.write):
            with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}, of which this one is a fork"):
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


def test_fork_that_lives_on_does_not_hold_the_cursor_of_its_dead_parent(tmp_path: Path) -> None:
    ready, go = os.pipe(), os.pipe()

    def parent() -> None:
        owner = CursorOwner(tmp_path, "sft")
        owner.begin(at(0))
        if os.fork() == 0:
            os.close(go[1])
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        assert forked(parent) == -signal.SIGKILL
        with CursorOwner(tmp_path, "sft") as owner:
            owner.begin(at(2))
    finally:
        for fd in (*ready, *go):
            os.close(fd)
    assert written(tmp_path) == 2


def test_killed_run_is_succeeded_at_once(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", START + "print('owned', flush=True)\nsys.stdin.read()", tmp_path],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "owned\n"
        with pytest.raises(CursorTaken, match=f"process {holder.pid} on"):
            CursorOwner(tmp_path, "sft")
        holder.send_signal(signal.SIGKILL)
        holder.wait(DEADLINE_S)
    with CursorOwner(tmp_path, "sft") as owner:
        owner.begin(at(0))
    assert written(tmp_path) == 0


def test_lock_files_are_nobodys_cursor(tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 4)
    owners = [CursorOwner(stream, name) for name in ("sft", "a.json", "b.lock")]
    owners[0].begin(at(0))
    assert names(stream / "cursors") == [".a.json.lock", ".b.lock.lock", ".sft.lock", "sft.json"]
    assert [one.name for one in list_consumers(stream)] == ["sft"]
    facts = gather_facts(stream, 0.0)
    assert ([file for file, _ in facts.cursors], facts.findings) == (["cursors/sft.json"], [])
    for owner in owners:
        owner.close()


def test_forgotten_consumer_leaves_no_lock_file(tmp_path: Path) -> None:
    for name in ("sft", "sft2"):
        with CursorOwner(tmp_path, name) as owner:
            owner.begin(replace(at(0), consumer=name))
    assert forget_consumer(tmp_path, "sft") is True
    assert names(tmp_path / "cursors") == [".sft2.lock", "sft2.json"]
    with CursorOwner(tmp_path, "sft") as owner:
        owner.begin(at(0))
        assert forget_consumer(tmp_path, "sft") is True
        with pytest.raises(CursorTaken):
            CursorOwner(tmp_path, "sft")


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


def test_of_many_runs_that_start_at_once_just_one_owns_the_cursor(tmp_path: Path) -> None:
    go, stop = tmp_path / "go", tmp_path / "stop"
    stream = tmp_path / "s"
    stream.mkdir()

    def run(index: int) -> None:
        wait_until(go.exists, "the start")
        try:
            with CursorOwner(stream, "sft") as owner:
                owner.begin(at(index * 2))
                (tmp_path / f"own{index}").touch()
                wait_until(stop.exists, "the end")
                owner.write(at(100))
        finally:
            (tmp_path / f"done{index}").touch()

    pids = forks(8, run)
    go.touch()
    wait_until(lambda: len(list(tmp_path.glob("done*"))) == 7 and list(tmp_path.glob("own*")), "the refusals")
    stop.touch()
    codes = sorted(os.waitstatus_to_exitcode(reap(pid)) for pid in pids)
    assert codes == [0, *[3] * 7]
    assert written(stream) == 100


@pytest.mark.usefixtures("no_locks")
def test_of_many_runs_whose_locks_do_not_meet_just_one_writes_on(tmp_path: Path) -> None:
    go, stop = tmp_path / "go", tmp_path / "stop"
    stream = tmp_path / "s"
    stream.mkdir()

    def run(index: int) -> None:
        wait_until(go.exists, "the start")
        owner = CursorOwner(stream, "sft")
        owner.begin(at(index))
        while not stop.exists():
            try:
                owner.write(at(index))
            except CursorTaken:
                (tmp_path / f"done{index}").touch()
                raise
        (tmp_path / "last").write_text(str(index))

    pids = forks(6, run)
    go.touch()
    wait_until(lambda: len(list(tmp_path.glob("done*"))) >= 5, "one that is left")
    stop.touch()
    codes = [os.waitstatus_to_exitcode(reap(pid)) for pid in pids]
    assert sorted(codes) == [0, *[3] * 5]
    assert written(stream) == codes.index(0) == int((tmp_path / "last").read_text())
    assert token(stream).pid == pids[codes.index(0)]
    assert names(stream / "cursors") == [".sft.lock", "sft.json"]


CALLS = ("write", "fsync", "ftruncate", "replace", "mkdir", "unlink")


def killed_at(number: int, when: str, work: Callable[[], object]) -> None:
    """Runs `work`, and kills this process before, half way through or after its call `number` that changes files."""
    left = number

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left != 0:
                return call(*arguments, **named)
            try:
                if when == "half" and name == "write":
                    call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                elif when == "after":
                    call(*arguments, **named)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

        return run

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
    work()


def run_to_the_end(stream: Path) -> None:
    owner = CursorOwner(stream, "sft")
    owner.begin(at(2))
    owner.write(at(4))
    owner.write(at(6))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_run_killed_at_any_call_leaves_a_whole_cursor_and_lets_its_successor_in(
    tmp_path: Path, when: str, fresh: bool
) -> None:
    seen: list[int | None] = []
    for number in range(1, 100):
        stream = tmp_path / f"{number}"
        stream.mkdir()
        if not fresh:
            with CursorOwner(stream, "sft") as before:
                before.begin(at(100))

        code = forked(partial(killed_at, number, when, partial(run_to_the_end, stream)))
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
    left = number

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            return call(*arguments, **named)

        return run

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    try:
        owner.write(at(2))
    finally:
        (stream / "woken").touch()
    if left <= 0:
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
