"""Reading by samples: order, copies, bounds, damage."""

import _thread
import contextlib
import copy
import errno
import gc
import logging
import os
import pickle
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lazyshard import StreamReader
from lazyshard.errors import ChunkMissing, StreamInvalid, StreamMismatch, StreamMissing, WaitTimeout
from lazyshard.stream.waiting import HEAD_SLOT, NodePoll, Waker
from tests.stream.damage import edit
from tests.stream.streams import DEADLINE_S, forked, open_descriptors, produce, raised, rows, running, wait_until


class Clock:
    """Time that passes only in `sleep`; each sleep may do something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.at: dict[float, Callable[[], object]] = {}
        fake = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self.sleep)
        for module in ("reader", "waiting"):
            monkeypatch.setattr(f"lazyshard.stream.{module}.time", fake)
        monkeypatch.setattr(Waker, "sleep", lambda _, seconds: self.sleep(seconds))

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        for due in [due for due in self.at if due <= self.now - 1000.0]:
            self.at.pop(due)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_wrong_path_is_not_waited_for(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("no/stream", "no/such/stream", "AI-MO/NuminaMath-1.5"):
        caught = raised(StreamMissing, StreamReader, path)
        assert caught.directory == path
        assert ("hub data sets" in str(caught)) is (path != "no/such/stream")
    assert clock.now == 1000


def test_directory_remembered_as_missing(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new").mkdir()
    stat = os.stat

    def remembers(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if clock.now < 1003 and str(path).startswith(str(tmp_path / "new")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return stat(path, *given, **named)

    monkeypatch.setattr(os, "stat", remembers)
    clock.at = {4.0: lambda: produce(tmp_path / "new" / "run" / "s", 3)}
    raised(StreamMissing, StreamReader, tmp_path / "other" / "run" / "s", max_wait=60)
    reader = StreamReader(tmp_path / "new" / "run" / "s", max_wait=60)
    assert list(reader) == rows(0, 3)
    assert 4 <= reader.waited_s < 6
    for wrong in (-1.0, float("nan")):
        assert "max_wait" in str(raised(ValueError, StreamReader, tmp_path, max_wait=wrong))


def test_no_stream_in_time_is_a_timeout_that_says_so(tmp_path: Path, clock: Clock) -> None:
    missing = tmp_path / "missing"
    for present in ((), ("d.parquet", "c.parquet", "b.parquet", "a.parquet")):
        for name in present:
            missing.mkdir(exist_ok=True)
            (missing / name).touch()
        error = raised(WaitTimeout, StreamReader, missing, max_wait=30)
        assert (error.directory, error.chunk, error.waited) == (str(missing), None, 30.0)
        assert (error.state, error.heartbeat_age) == (None, None)
        assert ("a.parquet, b.parquet, c.parquet" in str(error)) is bool(present)


def test_timeout_names_chunk_directory_time_and_state(tmp_path: Path, clock: Clock) -> None:
    edit("head.json", updated_at=900.0, state="failed")(produce(tmp_path, 4, end=False))
    caught = raised(WaitTimeout, StreamReader(tmp_path, max_wait=125).read, 7)
    error = pickle.loads(pickle.dumps(caught))
    assert (error.directory, error.chunk, error.waited, error.state) == (str(tmp_path), 3, 125.0, "failed")
    assert error.heartbeat_age == 225.0


def test_wait_of_no_time_looks_once_and_leaves_neither_thread_nor_descriptor(tmp_path: Path) -> None:
    readers = [StreamReader(produce(tmp_path / "s", 2, end=False), max_wait=max_wait) for max_wait in (0.0, 0.001)]
    assert [reader.read(1) for reader in readers] == [{"id": 1}] * 2
    before = open_descriptors(), threading.active_count()
    for reader in 2 * readers:
        raised(WaitTimeout, reader.read, 2)
        raised(WaitTimeout, StreamReader, tmp_path / "missing", max_wait=0.05)
    assert (open_descriptors(), threading.active_count()) == before


def test_wait_is_logged_ever_more_rarely(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    edit("head.json", updated_at=1000.0, state="waiting", rate=0.0)(produce(tmp_path, 4, end=False))
    reader = StreamReader(tmp_path, max_wait=float("inf"))
    reader.label = "rank 3"
    clock.at = {700.0: lambda: produce(tmp_path, 6)}
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert reader.wait_for(5).samples == 6
    texts = [record.getMessage() for record in caplog.records]
    waited = ["10 s", "30 s", "1 min 10 s", "2 min 30 s", "5 min 10 s", "10 min 30 s"]
    assert [text.partition("(")[2].partition(" of")[0] for text in texts] == waited
    assert texts[0].startswith("rank 3: ")
    assert "it may be dead" not in texts[1] and "it may be dead" in texts[2]


def test_one_of_the_processes_of_a_rank_warns(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    directory, mark = produce(tmp_path / "s", 4, end=False), tmp_path / "mark"
    reader = StreamReader(directory, max_wait=40)

    def warn() -> None:
        poll = NodePoll(reader.stream_id, lambda: os.stat(directory), lambda: 0.0)
        poll.renew(HEAD_SLOT, 1.0, lambda: None, lambda _: True)
        mark.write_text(str(poll.warns_for(os.getppid())))
        signal.pause()

    with running(warn):
        wait_until(lambda: mark.exists() and mark.read_text(), "the other warns")
        with caplog.at_level(logging.DEBUG, "lazyshard"):
            raised(WaitTimeout, reader.read, 5)
            # Forks of this process are other ranks to each other.
            assert forked(lambda: os._exit(_levels(reader, caplog) != [logging.WARNING] * 2)) == 0
    assert (mark.read_text(), [record.levelno for record in caplog.records]) == ("True", [logging.DEBUG] * 2)
    assert _levels(reader, caplog) == [logging.WARNING] * 2


def _levels(reader: StreamReader, caplog: pytest.LogCaptureFixture) -> list[int]:
    caplog.clear()
    raised(WaitTimeout, reader.read, 5)
    return [record.levelno for record in caplog.records]


def test_directory_removed_while_reading_is_said_at_once(tmp_path: Path, clock: Clock) -> None:
    calls: list[tuple[Callable[[StreamReader], object], float]] = [
        (lambda reader: reader.read(0), 0.0),
        (StreamReader.refresh, 0.0),
        (lambda reader: reader.wait_for(9), 0.0),
        (lambda reader: reader.wait_for(9), 20.0),
    ]
    for call, after in calls:
        reader, started = StreamReader(produce(tmp_path / "s", 4, end=False)), clock.now
        if after:
            clock.at = {started - 1000 + after: lambda: shutil.rmtree(tmp_path / "s")}
        else:
            shutil.rmtree(tmp_path / "s")
        assert raised(StreamMissing, call, reader).directory == str(tmp_path / "s")
        assert clock.now < started + 1 + 1.5 * after


def test_stream_made_anew_is_another_one(tmp_path: Path) -> None:
    calls: dict[Callable[[StreamReader], object], int] = {StreamReader.refresh: 2, lambda reader: reader.read(3): 8}
    for call, samples in calls.items():
        reader = StreamReader(produce(tmp_path / "s", 4, end=False))
        assert reader.read(0) == {"id": 0}
        shutil.rmtree(tmp_path / "s")
        produce(tmp_path / "s", samples)
        raised(StreamMismatch, call, reader)
        shutil.rmtree(tmp_path / "s")


@pytest.mark.parametrize("name", ["chunk_00001.jsonl", "chunk_00001.jsonl.completed"])
def test_file_that_shows_late(name: str, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    produce(tmp_path, 4)
    (tmp_path / name).rename(tmp_path / "hidden")
    for max_wait, grace in ((600.0, 60.0), (5.0, 5.0)):
        caught = raised(ChunkMissing, StreamReader(tmp_path, max_wait=max_wait).read, 2)
        assert (caught.file, caught.chunk) == (str(tmp_path / name), 1)
        assert caught.waited is not None and grace < caught.waited < grace + 6
    caplog.clear()
    clock.at = {clock.now - 1000.0 + 40.0: lambda: (tmp_path / "hidden").rename(tmp_path / name)}
    reader = StreamReader(tmp_path)
    assert reader.read(0) == {"id": 0}
    assert reader.read(2) == {"id": 2}
    assert [str(tmp_path / name) in message for message in caplog.messages] == [True, True]


def test_older_copies_of_the_head_take_nothing_back(tmp_path: Path) -> None:
    produce(tmp_path, 2, end=False)
    old = (tmp_path / "head.json").read_bytes()
    produce(tmp_path, 4, end=False)
    same_count = (tmp_path / "head.json").read_bytes()
    reader = StreamReader(tmp_path)
    (tmp_path / "head.json").write_bytes(old)
    assert reader.refresh().samples == 4
    produce(tmp_path, 4)
    assert reader.refresh().ended
    for stale in (same_count, old):
        (tmp_path / "head.json").write_bytes(stale)
        assert (reader.refresh().samples, reader.refresh().ended) == (4, True)
    edit("head.json", chunks=1, samples=2, ended=True, state="finished")(tmp_path)
    raised(StreamInvalid, reader.refresh)


def test_open_chunks_are_bounded_and_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.stream.chunk.OPEN_CHUNKS", 3)
    reader = StreamReader(produce(tmp_path, 20))
    before = open_descriptors()
    assert list(reader) == rows(0, 20)
    assert open_descriptors() == before + 3
    assert reader.chunks_opened == 10
    for chunk in (7, 8, 9, 7, 0, 9, 7):
        reader.read(2 * chunk)
    assert reader.chunks_opened == 11
    for sample in (-1, 20, 10**12):
        for call in (reader.read, reader.line):
            raised(IndexError, call, sample)


def test_forked_copied_and_pickled_readers_have_chunks_of_their_own(tmp_path: Path) -> None:
    reader = StreamReader(produce(tmp_path, 9))
    reader.read(0)
    codes = [forked(lambda: os._exit(list(reader) != rows(0, 9))) for _ in range(2)]
    assert (codes, list(reader)) == ([0, 0], rows(0, 9))
    before = open_descriptors()
    ways: list[Callable[[StreamReader], StreamReader]] = [copy.copy, lambda one: pickle.loads(pickle.dumps(one))]
    for how in ways:
        copied = how(reader)
        assert (copied.chunks_opened, copied.stream_id, copied.seen) == (0, reader.stream_id, reader.seen)
        assert copied.read(0) == {"id": 0}
        assert open_descriptors() == before + 1
        assert list(copied) == rows(0, 9)
        del copied
    assert (open_descriptors(), reader.read(0), reader.chunks_opened) == (before, {"id": 0}, 5)


def test_a_reader_that_has_waited_is_let_go_without_a_collection(tmp_path: Path) -> None:
    reader = StreamReader(produce(tmp_path, 4, end=False), max_wait=0.1)
    reader.read(0)
    gone = weakref.ref(reader)
    gc.disable()
    try:
        with contextlib.suppress(WaitTimeout):
            reader.wait_for(5)
        del reader
        assert gone() is None
    finally:
        gc.enable()


def test_a_long_first_pause_can_be_woken(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    edit("head.json", updated_at=1000.0, state="running", rate=1.0)(produce(tmp_path, 4, end=False))
    reader = StreamReader(tmp_path, max_wait=10)
    woken: list[float] = []

    def write(_: Waker, seconds: float) -> bool:
        woken.append(seconds)
        produce(tmp_path, 8)
        return True

    monkeypatch.setattr(Waker, "sleep", write)
    assert reader.wait_for(8).samples == 8
    # A tenth of the four seconds that four samples should take.
    assert (woken, clock.now) == ([0.4], 1000.0)


def test_watching_that_is_refused_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Mock(side_effect=OSError(24, "inotify instance limit reached"))
    monkeypatch.setattr("watchdog.observers.Observer", observer)
    monkeypatch.setattr(Waker, "_refused", False)
    for _ in range(3):
        with Waker(tmp_path) as waker:
            waker.sleep(0)
            waker.sleep(0)
    observer.assert_called_once()


def test_keyboard_interrupt_ends_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamReader(produce(tmp_path, 2, end=False), max_wait=DEADLINE_S)
    before = threading.active_count()
    start = Waker._start

    def interrupted(waker: Waker) -> None:
        start(waker)
        threading.Timer(0.05, _thread.interrupt_main).start()

    monkeypatch.setattr(Waker, "_start", interrupted)
    raised(KeyboardInterrupt, reader.read, 2)
    wait_until(lambda: threading.active_count() == before, "watching has ended")


def test_sleeper_is_woken_by_a_new_head_end_or_seal(tmp_path: Path) -> None:
    started = time.monotonic()
    # A directory that is not there yet is slept for.
    with Waker(tmp_path / "later") as waker:
        waker.sleep(0)
        (tmp_path / "later").mkdir()
        waker.sleep(60)
    with Waker(tmp_path) as waker:
        # The first one returns at once, since what came before the watch woke nobody.
        waker.sleep(60)
        for name in ("head.json", "stream.end", "chunk_00000.jsonl.completed"):
            (tmp_path / "temporary").write_bytes(b"")
            os.replace(tmp_path / "temporary", tmp_path / name)
            waker.sleep(60)
    assert time.monotonic() - started < 30
