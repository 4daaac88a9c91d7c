"""Waits: of one node look together, how often a reader looks and reports, what it says of the producer."""

import contextlib
import fcntl
import heapq
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import StreamMissing, WaitTimeout
from lazyshard.format.records import Head, ProducerState
from lazyshard.stream import head, waiting
from lazyshard.stream.listing import Published, has_unpublished_rows
from lazyshard.stream.waiting import HEAD_SLOT, Answer, NodeFile, NodePoll, Waker, file_name, next_poll
from tests.stream import streams
from tests.stream.damage import edit
from tests.stream.streams import DEADLINE_S, open_descriptors, produce, raising, rows, wait_until

ID: Final = "0123456789abcdef" * 2
NAME: Final = "f" * 32


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the node's memory, so that no test meets what others share there."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(waiting, "MEMORY", str(folder))
    return folder


def own_folder(memory: Path) -> Path:
    return memory / f"lazyshard-{os.geteuid()}"


def shared_files(memory: Path) -> list[str]:
    return sorted(os.listdir(own_folder(memory)))


class Waiter:
    """What a wait does with its looks: `asked` has the moments of its own, `taken` what it took from others."""

    def __init__(self, node: "Node", stream_id: str | None) -> None:
        self._node = node
        self.looks = NodePoll(stream_id, lambda: os.stat(node.directory), lambda: node.now)
        self.asked: list[float] = []
        self.taken: list[bytes] = []

    def renew(self, age: float, accept: bool = True) -> None:
        def ask() -> bytes:
            self.asked.append(self._node.now)
            return b"seen at %d" % self._node.now

        def adopt(data: bytes) -> bool:
            self.taken.append(data)
            return accept

        self.looks.renew(HEAD_SLOT, age, ask, adopt)


class Node:
    """Waiters of one node in this process, and a clock that is set by hand."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.directory = directory

    def waiters(self, number: int = 2, stream_id: str | None = ID) -> list[Waiter]:
        return [Waiter(self, stream_id) for _ in range(number)]

    def both_look(self, waiters: list[Waiter], apart: float = 0.0) -> list[list[float]]:
        """Has one look and then the other, where a young answer of the first would do; returns when who has asked."""
        for waiter in waiters:
            waiter.renew(5.0)
            self.now += apart
        return [waiter.asked for waiter in waiters]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    "looks",
    [
        # A young answer of the other is as good as an own one.
        [("a", 1000, 5.0, None), ("b", 1002, 5.0, 1000)],
        # One that is older than the own pause is not enough; what is seen then serves the other.
        [("a", 1000, 5.0, None), ("b", 1002, 1.0, None), ("a", 1003, 5.0, 1002)],
        # An answer from the future is none.
        [("a", 1000, 5.0, None), ("b", 500, 5.0, None)],
        # Who must know asks whatever others know, and tells them.
        [("a", 1000, 5.0, None), ("b", 1000, 5.0, 1000), ("b", 1001, 0.0, None), ("a", 1001, 5.0, 1001)],
        # An answer that is older than the own one is none.
        [("a", 1000, 5.0, None), ("b", 1001, 0.0, None), ("b", 1002, 5.0, 1001)],
    ],
)
def test_answers_are_taken_by_their_age(looks: list[tuple[str, int, float, int | None]], node: Node) -> None:
    """Who looks, when, how old what it knows may be, and of when what it then knows is; None where it asks."""
    waiters = dict(zip("ab", node.waiters(), strict=True))
    known: dict[str, int] = {}
    for name, now, age, taken in looks:
        waiter = waiters[name]
        asked, adopted = len(waiter.asked), len(waiter.taken)
        node.now = float(now)
        waiter.renew(age)
        assert len(waiter.asked) - asked == (taken is None)
        if taken is not None:
            assert waiter.taken[adopted:] == ([] if known.get(name) == taken else [b"seen at %d" % taken])
        known[name] = now if taken is None else taken


def test_what_cannot_be_shared_is_asked_by_each(node: Node, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.both_look(node.waiters(stream_id=None)) == [[1000.0], [1000.0]]
    assert os.listdir(memory) == []
    one, other = node.waiters()
    one.renew(5.0)
    node.now += 1
    other.renew(5.0, accept=False)
    assert (len(other.taken) > 0, other.asked) == (True, [1001.0])
    for waiter in (one, other, one):
        node.now += 10
        with pytest.raises(StreamMissing):
            waiter.looks.renew(HEAD_SLOT, 5.0, raising(StreamMissing("gone", directory="s")), lambda data: True)
    # Only what cannot be told to others is no error.
    monkeypatch.setattr(NodeFile, "write", raising(OSError(28, "No space left on device")))
    node.now += 10
    assert node.both_look(node.waiters()) == [[node.now], [node.now]]


def _looks(node: Node, waiters: int, start: float, stop: float) -> int:
    """Counts the looks of the seconds [start, stop) of so many waits that begin 7 ms after each other."""
    begin = node.now
    all_of_them = node.waiters(waiters)
    due = [(begin + 0.007 * number, number) for number in range(waiters)]
    ages = dict.fromkeys(range(waiters), 0.0)
    while due:
        node.now, number = heapq.heappop(due)
        if node.now - begin >= stop:
            continue
        waiter = all_of_them[number]
        waiter.renew(ages[number])
        ages[number] = next_poll(node.now - begin - 0.007 * number, None)
        heapq.heappush(due, (node.now + waiter.looks.pause(HEAD_SLOT, ages[number]), number))
    for waiter in all_of_them:
        waiter.looks.close()
    return sum(start <= at - begin < stop for waiter in all_of_them for at in waiter.asked)


def test_looks_do_not_grow_with_the_processes(node: Node) -> None:
    alone = _looks(node, 1, 5, 600)
    assert alone > 100
    for waiters in (2, 64):
        assert alone - 2 <= _looks(node, waiters, 5, 600) <= alone + 2


def _hold_the_right_to_ask(path: Path, mark: Path) -> None:
    file = NodeFile(file_name(ID, os.stat(path)))
    assert file.lock(0)
    mark.touch()
    signal.pause()


def test_the_answer_of_another_is_waited_for_but_not_for_long(node: Node, tmp_path: Path) -> None:
    (waiter,) = node.waiters(1)
    with streams.running(_hold_the_right_to_ask, node.directory, tmp_path / "mark"):
        wait_until((tmp_path / "mark").exists, "the right is held")
        waiter.renew(5.0)
        assert waiter.asked == []
        assert 0 < waiter.looks.pause(HEAD_SLOT, 5.0) < 0.1
        node.now += waiting.ASKING_S
        waiter.renew(5.0)
        assert waiter.asked == [1000.0 + waiting.ASKING_S]
    # Its end has freed the right, and who has asked gives it back.
    node.now += 5
    waiter.renew(5.0)
    assert waiter.asked == [1000.0 + waiting.ASKING_S, 1005.0 + waiting.ASKING_S]
    name = file_name(ID, os.stat(node.directory))
    assert streams.forked(lambda: os._exit(not NodeFile(name).lock(0))) == 0


def test_the_last_to_leave_removes_what_is_left(node: Node, memory: Path, tmp_path: Path) -> None:
    names = {file_name(stream_id, os.stat(place)) for stream_id in (ID, ID[::-1]) for place in (tmp_path, memory)}
    assert len(names) == 4 and all(len(name) == 32 for name in names)
    one, other = node.waiters()
    before = open_descriptors()
    one.renew(5.0)
    other.renew(5.0)
    assert stat.S_IMODE(os.stat(own_folder(memory)).st_mode) == 0o700
    (used,) = shared_files(memory)
    for left in ("2" * 32, "notes.txt"):
        (own_folder(memory) / left).write_bytes(b"x")
    NodeFile(NAME).close()
    one.looks.close()
    assert shared_files(memory) == sorted([used, "notes.txt"])
    other.looks.close()
    other.looks.close()
    assert shared_files(memory) == ["notes.txt"]
    assert open_descriptors() == before


def test_a_file_that_is_removed_while_it_is_opened_is_made_anew(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NodeFile(NAME).close()
    (own_folder(memory) / NAME).touch()
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        os.unlink(own_folder(memory) / NAME)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with contextlib.closing(NodeFile(NAME)) as one, contextlib.closing(NodeFile(NAME)) as other:
        one.write(0, (1.0, b"told"))
        assert other.read(0) == (1.0, b"told")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def make_anothers(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("place", "plant"),
    [
        ("file", lambda path: path.write_bytes(os.urandom(2 * waiting.SLOT_BYTES))),
        ("file", huge),
        ("file", lambda path: path.symlink_to(path.parents[2] / "target")),
        ("file", os.mkfifo),
        ("file", os.mkdir),
        ("folder", Path.touch),
        ("folder", lambda folder: folder.symlink_to(folder.parent)),
        ("folder", lambda folder: (folder.mkdir(), folder.chmod(0o777))),
        pytest.param("folder", make_anothers, marks=streams.needs_root),
        ("folder", lambda folder: folder.parent.rmdir()),
    ],
)
def test_what_is_planted_changes_nothing(place: str, plant: Callable[[Path], object], node: Node, memory: Path) -> None:
    target = memory.parent / "target"
    target.write_bytes(b"mine")
    if place == "file":
        own_folder(memory).mkdir(0o700)
        plant(own_folder(memory) / file_name(ID, os.stat(node.directory)))
    else:
        plant(own_folder(memory))
    before = open_descriptors()
    waiters = node.waiters()
    assert node.both_look(waiters, 7) == [[1000.0], [1007.0]]
    assert waiters[0].taken == []
    for waiter in waiters:
        waiter.looks.close()
    assert open_descriptors() == before
    assert target.read_bytes() == b"mine"
    if place == "folder" and own_folder(memory).is_dir():
        assert not [name for name in shared_files(memory) if len(name) == 32]


answers = st.tuples(st.floats(allow_nan=False), st.binary(max_size=300))


@given(answers, answers, st.data())
def test_half_an_answer_over_another_one_is_none_or_whole(new: Answer, old: Answer, data: st.DataObject) -> None:
    assert waiting.decode_answer(data.draw(st.binary(max_size=400)), NAME) is None
    after, before = waiting.encode_answer(new, NAME), waiting.encode_answer(old, NAME)
    # Whole, it is read whatever lies behind it, in the file of its name alone.
    assert waiting.decode_answer(after + before[len(after) :], NAME) == new
    assert waiting.decode_answer(after, "e" * 32) is None
    cut = data.draw(st.integers(0, len(after)))
    assert waiting.decode_answer(after[:cut] + before[cut:], NAME) in (None, new, old)


def head_of(chunks: int, samples: int, ended: bool = False) -> bytes:
    return Head(chunks, samples, ended, "running", 1.0, "node", 7, 1.0).encode()


def test_a_reader_takes_nothing_back_by_what_another_has_seen(tmp_path: Path) -> None:
    reader = StreamReader(produce(tmp_path / "s", 4, end=False))
    looks = {head_of(1, 2): False, b"": False, head_of(2, 4): True, head_of(3, 6): True}
    # A head that contradicts the stream is none.
    looks |= dict.fromkeys([head_of(4, 7), head_of(4, 6, True), head_of(4, 9), b'{"format": 2}', b"\xff" * 80], False)
    assert {data: reader._adopt(data) for data in looks} == looks and not reader._adopt(head_of(2, 4))
    assert reader.seen.samples == 6
    assert reader._adopt(head_of(3, 6, True)) and not reader._adopt(head_of(3, 6)) and reader.seen.ended


@pytest.mark.parametrize("woken", [False, True])
def test_a_wait_begins_and_ends_by_its_own_look(woken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renew = Mock(side_effect=NodePoll.renew)
    monkeypatch.setattr(NodePoll, "renew", lambda *given: renew(*given))
    reader = StreamReader(produce(tmp_path / "s", 4, end=False), max_wait=DEADLINE_S if woken else 0.1)
    if woken:
        monkeypatch.setattr(Waker, "sleep", lambda *_: bool(produce(tmp_path / "s", 6)))
        assert reader.wait_for(5).samples == 6
    else:
        streams.raised(WaitTimeout, reader.wait_for, 5)
    ages = [call.args[2] for call in renew.mock_calls]
    assert (ages[0], ages[-1]) == (0.0, 0.0) and max(ages) > 0


@pytest.mark.parametrize(("answer", "left"), [(b"1", [1]), (b"of another release", [0, 1]), (b"9" * 5000, [0, 1])])
def test_deleted_chunks_are_let_go_by_what_another_has_seen(tmp_path: Path, answer: bytes, left: list[int]) -> None:
    reader = StreamReader(produce(tmp_path / "s", 4, end=False))
    reader.read(0)
    reader.read(2)
    other, looks = (waiter.looks for waiter in Node(tmp_path / "s").waiters())
    other.renew(waiting.RETIRED_SLOT, 1.0, lambda: answer, lambda data: False)
    reader._let_go_at -= 10
    reader._let_go(looks)
    assert list(reader._chunks) == left


def published(state: ProducerState = "running", rate: float = 2.0, updated_at: float = 100.0, **more: Any) -> Published:
    head = Head(5, 10, state == "finished", state, rate, "node7", 42, updated_at, **more)
    return Published(5, 10, head.ended, head)


@pytest.mark.parametrize(
    ("what", "now", "parts"),
    [
        (published(), 101.0, ["pid 42 on node7", "2.0 samples/s", "about 1 s"]),
        (published(rate=0.0), 161.0, ["for 1 min 1 s", "is 1 min 1 s old, it may be dead"]),
        (published(), 50.0, ["is running"]),
        (published(rate=8.0, updated_at=100.5), 101.0, ["should be there by now"]),
        (published(rate=5875.0, open=3, row_at=85.0), 101.0, ["for 16 s", "3 rows or more"]),
        (published(rate=0.01, open=1, row_at=70.0), 101.0, ["in about 6 min 39 s", "for 31 s", "1 row or more"]),
        (published(rate=5875.0), 121.0, ["with rows, if any"]),
        (published("failed", note="a.jsonl:6: no object"), 101.0, ["has failed: a.jsonl:6: no object"]),
        (published("waiting", rate=0.0, note="--max-ahead 5 chunks"), 101.0, ["is waiting (--max-ahead 5 chunks)"]),
        (Published(3, 6, False, gap=3), 0.0, ["nothing is known about the producer", "chunk 3 lacks"]),
        (Published(9, 18, False, published().head, short=1400), 101.0, ["only 1,400 rows"]),
    ],
)
def test_producer_is_described_with_what_to_do(what: Published, now: float, parts: list[str]) -> None:
    text = head.describe_producer(what, 14, now)
    assert [part for part in parts if part not in text] == [], text
    assert ("may be dead" in text) is (now == 161.0)
    assert "no longer runs and did not report a stop" not in text
    if what.head is not None and what.head.state == "running":
        assert "no longer runs and did not report a stop" in head.describe_producer(what, 14, now + 20, gone=True)
        assert head.heartbeat_age(what, now) == max(0.0, now - what.head.updated_at)
    elif what.head is None:
        assert head.heartbeat_age(what, now) is None


def test_producer_that_was_killed_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    killed = streams.ended_process()
    beat = {"state": "running", "rate": 100.0, "host": socket.gethostname(), "updated_at": time.time() - 100}
    for pid, told in ((killed, f"pid {killed} on .* no longer runs"), (os.getpid(), "is running")):
        edit("head.json", **beat, pid=pid)(tmp_path)
        streams.refusal_of(WaitTimeout, told, StreamReader(tmp_path, max_wait=0).read, 5)


@pytest.mark.parametrize(("arrays", "overlap"), [(False, True), (True, False)])
@pytest.mark.parametrize(("per_chunk", "words"), [(100, "with rows"), (40, "with rows"), (25, "and shows no row")])
def test_silent_producer_may_hold_rows(tmp_path: Path, per_chunk: int, words: str, arrays: bool, overlap: bool) -> None:
    writer = ChunkWriter(tmp_path, per_chunk, clock=lambda: time.time() - 20, overlap=overlap, arrays=arrays)
    for row in rows(0, 50):
        writer.write(row)
        writer.settle()
    streams.refusal_of(WaitTimeout, f"for 20 s, {words}", StreamReader(tmp_path, max_wait=0).read, 50)
    assert has_unpublished_rows(tmp_path, writer.published_chunks) is (words == "with rows")
    writer.close(end=False)
    assert has_unpublished_rows(tmp_path, writer.published_chunks) is None
    # What cannot be seen is not denied.
    (tmp_path / "elsewhere" / "1.0").mkdir(parents=True)
    (tmp_path / ".tmp").symlink_to(tmp_path / "elsewhere")
    assert has_unpublished_rows(tmp_path, 0) is None


def test_writers_that_give_no_sign_are_named(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    for name in ("done", "gone", "silent", "busy", "failed"):
        streams.write_pieces(stream, name, 4, end=name == "done")
    (stream / ".writers" / "new").mkdir()
    streams.sequence(stream)
    gone, host = streams.ended_process(), socket.gethostname()
    changes: dict[str, dict[str, Any]] = {"gone": {"pid": gone}, "silent": {"updated_at": time.time() - 100}}
    for name, change in {**changes, "busy": {}, "failed": {"state": "failed"}}.items():
        here = {"host": host, "pid": os.getpid(), "state": "running", "process": head.own_process()}
        edit(f".writers/{name}/head.json", **here | {"updated_at": time.time()} | change)(stream)
    read = StreamReader(stream, max_wait=0).read
    text = str(streams.refusal_of(WaitTimeout, "the sequencer .* of its 6 writers", read, 99))
    assert f"failed (pid {os.getpid()} on {host}) has failed" in text
    assert f"gone (pid {gone} on {host}) no longer runs" in text
    assert [words in text for words in ("silent (pid", "new has not begun")] == [True, True]
    assert [name in text for name in ("busy", "done")] == [False, False]
