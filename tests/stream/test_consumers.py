"""Who consumes a stream, never an exception for what others left in `cursors/`; who may write a cursor."""

import errno
import logging
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import filelock
import pytest

from lazyshard import StreamReader
from lazyshard import stream as streaming
from lazyshard.errors import CursorTaken, FileInvalid, StreamMissing, VersionUnsupported
from lazyshard.format.state import Cursor, CursorToken, ReadingHint, RunState
from lazyshard.inspection.verification_files import read_files
from lazyshard.part import Part
from lazyshard.store import durable
from lazyshard.stream import CursorOwner, forget_consumer, list_consumers, read_cursor, write_cursor
from tests.harness.processes.kill_points import KillPoint, When
from tests.stream import streams
from tests.stream.streams import forked, names, produce, raised, raising, refusal_of, wait_until


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 8, end=False)


HOST = os.uname().nodename


def at(consumed: int, *, updated_at: float = 1700000000.0) -> Cursor:
    """The cursor of a run of one rank at that many samples."""
    state = RunState(None, 2, 2, 0, 0, None, (Part(1, 1, consumed),), consumed)
    return Cursor("sft", None, consumed, consumed // 2, {"dp_size": 1}, updated_at, state)


def cursor(stream: Path, name: str = "sft", chunks: int = 2) -> Cursor:
    return Cursor(name, StreamReader(stream).stream_id, chunks * 2, chunks, {"dp_size": 1}, 1700000000.0)


def mark(stream: Path, name: str = "sft", needs: int = 4) -> ReadingHint:
    return ReadingHint(name, StreamReader(stream).stream_id, 2, 0, needs, 1700000000.0)


def test_consumers_are_listed_by_name_with_what_they_have_told(stream: Path) -> None:
    assert (list_consumers(stream), forget_consumer(stream / "nowhere", "sft")) == ((), False)
    odd = "a.reading.b.json"
    for told in (cursor(stream), cursor(stream, "dpo", 1), cursor(stream, odd)):
        write_cursor(stream, told)
    for hint in (mark(stream), mark(stream, "new"), mark(stream, "dpo")):
        assert streaming.write_reading(stream, hint)
    folder = stream / "cursors"
    (folder / "dpo.reading.json").write_bytes(b"torn")
    # Names that are nobody's.
    for name in (".sft.0123456789abcdef", ".x.json", "README", "sft.json.bak", "sft.yaml", ".json", ".reading.json"):
        (folder / name).write_bytes(b"x")
    with open(os.fsencode(folder) + b"/\xff.json", "wb"):
        pass
    assert list_consumers(str(stream), 4) == (
        streaming.Consumer(odd, cursor(stream, odd), None, None),
        streaming.Consumer("dpo", cursor(stream, "dpo", 1), None, None),
        streaming.Consumer("new", None, mark(stream, "new"), None),
        streaming.Consumer("sft", cursor(stream), mark(stream), None),
    )
    assert [one.chunks_before for one in list_consumers(stream)] == [2, 1, 0, 2]


def test_damaged_manifest_and_cursors_that_cannot_be_listed_are_raised_and_not_taken_for_none(stream: Path) -> None:
    (stream / "cursors").write_bytes(b"a file")
    raised(NotADirectoryError, list_consumers, stream)
    (stream / "cursors").unlink()
    write_cursor(stream, cursor(stream))
    (stream / "stream.json").write_bytes(b"{")
    raised(FileInvalid, list_consumers, stream)


def test_forgotten_consumer_leaves_nothing_and_others_stay(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stream / "cursors"
    for name in ("sft", "sft2"):
        write_cursor(stream, cursor(stream, name))
        streaming.write_reading(stream, mark(stream, name))
        CursorOwner(stream, name).close()
    assert ([one.name for one in list_consumers(stream)], read_files(stream, 0.0).findings) == (["sft", "sft2"], [])
    # What a kill has left half written goes too; of others, and of names that only look alike, nothing.
    for name in (".sft.0123456789abcdef", ".sft.reading.0123456789abcdef", ".sft2.0123456789abcdef", ".sft.x"):
        (folder / name).write_bytes(b"half")
    assert forget_consumer(stream, "sft") is True
    assert names(folder) == [".sft.x", ".sft2.0123456789abcdef", ".sft2.lock", "sft2.json", "sft2.reading.json"]
    assert (read_cursor(stream, "sft"), streaming.read_reading(stream, "sft")) == (None, None)
    assert forget_consumer(str(stream), "sft") is False
    for left in ("sft.reading.json", "sft.json"):
        (folder / left).write_bytes(b"torn")
        calls = streams.recorded(monkeypatch)
        assert forget_consumer(stream, "sft") is True
    assert calls == ["unlink sft.reading.json", "unlink sft.json", "sync cursors"]


def test_cursor_is_read_as_it_was_written_or_refused_by_its_name(tmp_path: Path) -> None:
    assert read_cursor(tmp_path, "sft") is None
    assert read_cursor(tmp_path / "nowhere", "sft") is None
    caught = raised(StreamMissing, write_cursor, tmp_path / "nowhere", at(8))
    assert (caught.directory, names(tmp_path)) == (str(tmp_path / "nowhere"), [])
    for told in (at(8), at(16, updated_at=1700000009.0)):
        write_cursor(str(tmp_path), told)
        assert read_cursor(str(tmp_path), "sft") == read_cursor(tmp_path, "sft") == told
    assert read_cursor(tmp_path, "dpo") is None
    assert (names(tmp_path), names(tmp_path / "cursors")) == (["cursors"], ["sft.json"])
    invalid = (b"", b"{", at(8).encode()[:-9], b"\0" * 100, at(8).encode().replace(b"sft", b"dpo"))
    later = at(8).encode().replace(b'"format":1', b'"format":2')
    cases: list[tuple[bytes, type[Exception]]] = [(later, VersionUnsupported), *((one, FileInvalid) for one in invalid)]
    path = tmp_path / "cursors" / "sft.json"
    for data, error in cases:
        path.write_bytes(data)
        refusal_of(error, str(path), read_cursor, tmp_path, "sft")


OLD_MARK = ReadingHint("sft", None, 2, 0, 4, 1700000000.0)
NEW_MARK = replace(OLD_MARK, window=1, needs_chunks=8, updated_at=1700000009.0)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.cursor._told", set())


def test_mark_is_read_as_it_was_written_and_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raising(AssertionError("a hint was synced")))
    assert streaming.read_reading(tmp_path, "sft") is None
    for mark in (OLD_MARK, NEW_MARK):
        assert streaming.write_reading(str(tmp_path), mark)
        assert streaming.read_reading(str(tmp_path), "sft") == mark
    assert names(tmp_path / "cursors") == ["sft.reading.json"]
    # One that cannot be used is none.
    for data in (b"", b"{", OLD_MARK.encode()[:-9], OLD_MARK.encode().replace(b'"format":1', b'"format":2')):
        (tmp_path / "cursors" / "sft.reading.json").write_bytes(data)
        assert streaming.read_reading(tmp_path, "sft") is None


def test_refusing_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    refused = ((OSError(errno.ENOSPC, "no space"), "no space"), (PermissionError(13, "no"), f"uid {os.geteuid()}"))
    for error, told in refused:
        directory = tmp_path / told
        directory.mkdir()
        streaming.write_reading(directory, OLD_MARK)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_all", raising(error))
            assert [streaming.write_reading(directory, NEW_MARK) for _ in range(3)] == [False, False, False]
        assert (len(caplog.records), told in caplog.text) == (1, True)
        assert streaming.read_reading(directory, "sft") == OLD_MARK
        assert names(directory / "cursors") == ["sft.reading.json"]
        caplog.clear()
    (tmp_path / "cursors").write_bytes(b"a file")
    for place in (tmp_path, tmp_path / "nowhere"):
        assert not streaming.write_reading(place, OLD_MARK)
    assert len(caplog.records) == 2
    assert not (tmp_path / "nowhere").exists()


def written(directory: Path) -> int | None:
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


def test_second_run_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    with CursorOwner(tmp_path, "sft") as owner:
        error = raised(CursorTaken, CursorOwner, tmp_path, "sft")
        assert (error.directory, error.consumer) == (str(tmp_path), "sft")
        assert error.holder == f"process {os.getpid()} on {HOST}"
        with CursorOwner(tmp_path, "dpo") as other:
            other.begin(replace(at(0), consumer="dpo"))
        owner.begin(at(0))
        owner.write(at(2))
        for left in (b"", b"garbage", b"\xff\xff", b"3/"):
            (tmp_path / "cursors" / ".sft.lock").write_bytes(left)
            caught = raised(CursorTaken, CursorOwner, tmp_path, "sft")
            assert caught.holder == "a process that has not written its name yet"
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
            caught = raised(CursorTaken, old.put, at(4))
            assert (caught.consumer, caught.holder) == ("sft", f"process {os.getpid()} on {HOST}")
            assert written(tmp_path) == 0
        new.write(at(2))
        # It has the lock now, which the other one has let go of.
        for _ in range(2):
            raised(CursorTaken, CursorOwner, tmp_path, "sft")
            old.close()
    # Whatever becomes of the cursor.
    old = CursorOwner(tmp_path, "sft")
    old.begin(at(0))
    with CursorOwner(tmp_path, "sft", take_over=True) as new:
        new.begin(at(0))
        raised(CursorTaken, old.write, at(2))
    assert forget_consumer(tmp_path, "sft")
    raised(CursorTaken, old.write, at(2))
    assert names(tmp_path / "cursors") == []


@pytest.mark.usefixtures("no_locks")
def test_of_two_runs_without_locks_the_later_one_goes_on_whatever_clocks_say(tmp_path: Path) -> None:
    now = 1700000000.0
    for skew in (-(10.0**9), 0.0, 10.0**9):
        # Made in one order, begun in the other.
        new, old = CursorOwner(tmp_path, "sft"), CursorOwner(tmp_path, "sft")
        old.begin(at(0, updated_at=now))
        new.begin(at(0, updated_at=now + skew))
        raised(CursorTaken, old.write, at(8, updated_at=now + 1))
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
            assert (raised(CursorTaken, run.write, at(2)).holder, written(tmp_path)) == (holder, 6)
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
        raised(CursorTaken, CursorOwner, tmp_path, "sft")
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


def test_run_that_begins_before_its_cursor_logs_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for consumed, warnings in ((4, 0), (4, 0), (2, 1), (6, 1)):
        with CursorOwner(tmp_path, "sft") as owner:
            owner.begin(at(consumed))
        assert len(caplog.records) == warnings
    assert {"'sft'", "4", "2"} <= set(caplog.text.split())


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
    raised(CursorTaken, old.write, at(2))
    new.write(at(4))
    assert written(tmp_path) == 4


def test_cursor_of_a_later_release_is_neither_written_over_nor_taken(tmp_path: Path) -> None:
    later = at(6).encode().replace(b'{"format":1,"consumer"', b'{"format":2,"consumer"')
    path = tmp_path / "cursors" / "sft.json"
    with CursorOwner(tmp_path, "sft") as owner:
        owner.begin(at(0))
        path.write_bytes(later)
        assert raised(CursorTaken, owner.write, at(2)).holder == "a run with a later release of lazyshard"
    # A lock that the refused one held would refuse the second one otherwise.
    for _ in range(2):
        raised(VersionUnsupported, CursorOwner, tmp_path, "sft")
    assert path.read_bytes() == later


def test_failed_write_leaves_the_cursor_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
        patch.setattr(filelock.FileLock, "acquire", raising(OSError(errno.EIO, "broken")))
        CursorOwner(tmp_path, "sft")
    with CursorOwner(tmp_path, "sft") as owner:
        for write, before in ((owner.begin, None), (owner.write, 2)):
            for call in ("fsync", "write", "replace"):
                with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
                    patch.setattr(os, call, raising(OSError(errno.ENOSPC, "no space")))
                    write(at(2))
                assert written(tmp_path) == before
            write(at(2))
            assert written(tmp_path) == 2
    assert names(tmp_path / "cursors") == [".sft.lock", "sft.json"]


def test_calls_out_of_turn_are_refused_and_write_nothing(tmp_path: Path) -> None:
    owner = CursorOwner(tmp_path, "sft")
    raised(RuntimeError, owner.write, at(2))
    refusal_of(ValueError, "dpo", owner.begin, replace(at(2), consumer="dpo"))
    owner.begin(at(0))
    for closed, calls in ((False, [owner.begin]), (True, [owner.begin, owner.write])):
        if closed:
            owner.close()
            owner.close()
        for call in calls:
            raised(RuntimeError, call, at(2))
    assert written(tmp_path) == 0


def test_fork_neither_writes_nor_unlocks_what_its_parent_owns(tmp_path: Path) -> None:
    owner = CursorOwner(tmp_path, "sft")
    owner.begin(at(0))

    def child() -> None:
        for call in (owner.begin, owner.write):
            refusal_of(RuntimeError, f"belongs to process {os.getppid()}", call, at(8))
        owner.close()
        owner._lock.__del__()
        raised(CursorTaken, CursorOwner, tmp_path, "sft")

    assert forked(child) == 0
    raised(CursorTaken, CursorOwner, tmp_path, "sft")
    owner.write(at(2))
    owner.close()
    assert written(tmp_path) == 2


CALLS = ("write", "fsync", "ftruncate", "replace", "mkdir", "unlink")


def killed_at(number: int, when: When, stream: Path) -> None:
    KillPoint(number, when, among=CALLS).install()
    owner = CursorOwner(stream, "sft")
    owner.begin(at(2))
    owner.write(at(4))
    owner.write(at(6))


@pytest.mark.few(2)
@pytest.mark.parametrize(("when", "fresh"), [("before", True), ("half", False), ("after", False), ("half", True)])
def test_run_killed_at_any_call_leaves_a_whole_cursor_and_no_lock(tmp_path: Path, when: When, fresh: bool) -> None:
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


def hang_at(number: int, stream: Path) -> None:
    """Begins, stops this process at call `number` of its first write, and writes a second time once it is told to."""
    owner = CursorOwner(stream, "sft")
    owner.begin(at(0))
    stopped: list[int] = []
    KillPoint(number, "before", signal.SIGSTOP, lambda: stopped.append(number), among=CALLS).install()
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
        pid = streams.fork(hang_at, number, stream, expected=CursorTaken)
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
            assert os.waitstatus_to_exitcode(streams.reap(pid)) == 3
            new.write(at(12))
            assert written(stream) == 12
    # Refused at once, or stopped behind its look, where its successor has written over it.
    assert outcomes == {2, 8}
