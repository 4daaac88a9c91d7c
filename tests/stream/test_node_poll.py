"""Waits of one node look at a stream together; whatever goes wrong with that, each looks for itself."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.errors import StreamMissing, WaitTimeout
from lazyshard.format.records import Head
from lazyshard.stream import node_poll
from lazyshard.stream.node_poll import (
    ASKING_S,
    SLOT_BYTES,
    Answer,
    NodeFile,
    NodePoll,
    SingleFlight,
    decode_head,
    decode_retired,
    encode_retired,
    file_name,
)
from lazyshard.stream.pacing import next_poll
from lazyshard.stream.waiting import Waker
from tests.stream.streams import DEADLINE_S, forked, needs_root, open_descriptors, produce, wait_until

ID: Final = "0123456789abcdef" * 2
NAME: Final = "f" * 32
FORK: Final = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the node's memory, so that no test meets what others share there."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(node_poll, "MEMORY", str(folder))
    return folder


def own_folder(memory: Path) -> Path:
    return memory / f"lazyshard-{os.geteuid()}"


def shared_files(memory: Path) -> list[str]:
    return sorted(os.listdir(own_folder(memory)))


class Node:
    """Waiters of one node in this process, and a clock that is set by hand."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.directory = directory

    def waiter(self, stream_id: str | None = ID) -> Waiter:
        return Waiter(self, stream_id)


class Waiter:
    """What a wait does with its looks: `asked` has the moments of its own, `taken` what it took from others."""

    def __init__(self, node: Node, stream_id: str | None) -> None:
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

        self.looks.head.renew(age, ask, adopt)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("second", "third"),
    [
        # A young answer of the other is as good as an own one.
        ((1002, 5.0, 1000), None),
        # One that is older than the own pause is not enough; what is seen then serves the other.
        ((1002, 1.0, None), (1003, 5.0, 1002)),
        # An answer from the future is none.
        ((500, 5.0, None), None),
    ],
)
def test_answers_are_taken_by_their_age(
    second: tuple[int, float, int | None], third: tuple[int, float, int | None] | None, node: Node
) -> None:
    """One waiter asks at 1000; then the other and the first look: the time, the age, and whose answer is taken."""
    one, other = node.waiter(), node.waiter()
    one.renew(5.0)
    for waiter, look in ((other, second), (one, third)):
        if look is not None:
            asked = len(waiter.asked)
            node.now, age, taken = float(look[0]), look[1], look[2]
            waiter.renew(age)
            assert len(waiter.asked) - asked == (taken is None)
            assert taken is None or waiter.taken == [b"seen at %d" % taken]


def test_who_must_know_asks_whatever_others_know_and_tells_them(node: Node) -> None:
    one, other = node.waiter(), node.waiter()
    one.renew(5.0)
    other.renew(5.0)
    node.now += 1
    other.renew(0.0)
    assert other.asked == [1001.0]
    one.renew(5.0)
    assert one.taken == [b"seen at 1001"]


def test_an_answer_that_is_refused_is_none(node: Node) -> None:
    one, other = node.waiter(), node.waiter()
    one.renew(5.0)
    node.now += 1
    other.renew(5.0, accept=False)
    assert (len(other.taken) > 0, other.asked) == (True, [1001.0])


def test_an_answer_that_is_older_than_the_own_one_is_none(node: Node) -> None:
    one, other = node.waiter(), node.waiter()
    one.renew(5.0)
    node.now += 1
    other.renew(0.0)
    node.now += 1
    other.renew(5.0)
    assert (other.asked, other.taken) == ([1001.0], [])


def test_what_fails_is_met_by_each_process_itself(node: Node) -> None:
    one, other = node.waiter(), node.waiter()

    def fail() -> bytes:
        raise StreamMissing("gone", directory="s")

    for waiter in (one, other, one):
        with pytest.raises(StreamMissing):
            waiter.looks.head.renew(5.0, fail, lambda data: True)


def test_a_foreign_stream_shares_nothing(node: Node, memory: Path) -> None:
    one, other = node.waiter(None), node.waiter(None)
    one.renew(5.0)
    other.renew(5.0)
    assert (one.asked, other.asked, os.listdir(memory)) == ([1000.0], [1000.0], [])


def _looks(node: Node, waiters: int, start: float, stop: float) -> int:
    """Counts the looks of the seconds [start, stop) of so many waits that begin 7 ms after each other."""
    begin = node.now
    all_of_them = [node.waiter() for _ in range(waiters)]
    due = [(begin + 0.007 * number, number) for number in range(waiters)]
    first = {number: at for at, number in due}
    ages = dict.fromkeys(first, 0.0)
    while due:
        node.now, number = heapq.heappop(due)
        if node.now - begin >= stop:
            continue
        waiter = all_of_them[number]
        waiter.renew(ages[number])
        ages[number] = next_poll(node.now - first[number], None)
        heapq.heappush(due, (node.now + waiter.looks.head.pause(ages[number]), number))
    for waiter in all_of_them:
        waiter.looks.close()
    return sum(start <= at - begin < stop for waiter in all_of_them for at in waiter.asked)


@pytest.mark.parametrize("waiters", [2, 8, 64])
def test_looks_do_not_grow_with_the_processes(waiters: int, node: Node) -> None:
    alone, together = _looks(node, 1, 5, 600), _looks(node, waiters, 5, 600)
    assert alone > 100
    assert alone - 2 <= together <= alone + 2


def test_each_waits_no_longer_for_news_than_by_its_own_pace(node: Node) -> None:
    patient, hasty = node.waiter(), node.waiter()
    patient.renew(5.0)
    for _ in range(20):
        node.now += 0.1
        hasty.renew(0.1)
    assert len(hasty.asked) == 20
    patient.renew(5.0)
    assert patient.looks.head.pause(5.0) == pytest.approx(5.02)
    assert hasty.looks.head.pause(0.1) == pytest.approx(0.1)


def _hold_the_right_to_ask(path: Path, ready: str, mark: Path) -> None:
    file = NodeFile(file_name(ID, os.stat(path)))
    assert file.lock(0)
    mark.write_text(ready)
    signal.pause()


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: object) -> Iterator[ForkProcess]:
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_the_answer_of_another_is_waited_for_but_not_for_long(node: Node, tmp_path: Path) -> None:
    waiter = node.waiter()
    with child(_hold_the_right_to_ask, node.directory, "holds", tmp_path / "mark"):
        wait_until((tmp_path / "mark").exists, "the right is held")
        waiter.renew(5.0)
        assert waiter.asked == []
        assert 0 < waiter.looks.head.pause(5.0) < 0.1
        node.now += ASKING_S
        waiter.renew(5.0)
        assert waiter.asked == [1000.0 + ASKING_S]
    # Its end has freed the right.
    node.now += 5
    waiter.renew(5.0)
    assert waiter.asked == [1000.0 + ASKING_S, 1005.0 + ASKING_S]


def test_the_right_to_ask_is_given_back(node: Node) -> None:
    waiter = node.waiter()
    waiter.renew(5.0)

    def take() -> None:
        assert NodeFile(file_name(ID, os.stat(node.directory))).lock(0)

    assert forked(take) == 0


def test_two_streams_copies_and_mounts_are_kept_apart(tmp_path: Path) -> None:
    places = [tmp_path / "one", tmp_path / "copy"]
    for place in places:
        place.mkdir()
    names = {file_name(stream_id, os.stat(place)) for stream_id in (ID, ID[::-1]) for place in places}
    assert len(names) == 4 and all(len(name) == 32 for name in names)


def test_the_last_to_leave_removes_the_file(node: Node, memory: Path) -> None:
    one, other = node.waiter(), node.waiter()
    before = open_descriptors()
    one.renew(5.0)
    other.renew(5.0)
    assert stat.S_IMODE(os.stat(own_folder(memory)).st_mode) == 0o700
    one.looks.close()
    assert len(shared_files(memory)) == 1
    other.looks.close()
    other.looks.close()
    assert shared_files(memory) == []
    assert open_descriptors() == before


def test_what_killed_processes_left_is_removed_and_what_is_used_stays(memory: Path) -> None:
    used, left, strange = "1" * 32, "2" * 32, "notes.txt"
    holder = NodeFile(used)
    for name in (left, strange):
        (own_folder(memory) / name).write_bytes(b"x")
    NodeFile(NAME).close()
    assert shared_files(memory) == [used, strange]
    holder.close()


def test_a_file_that_is_removed_while_it_is_opened_is_made_anew(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NodeFile(NAME).close()
    (own_folder(memory) / NAME).touch()
    flock = fcntl.flock
    removed: list[str] = []

    def late(fd: int, how: int) -> None:
        if not removed:
            removed.append(NAME)
            os.unlink(own_folder(memory) / NAME)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    one, other = NodeFile(NAME), NodeFile(NAME)
    one.write(0, Answer(1.0, b"told"))
    assert other.read(0) == Answer(1.0, b"told")
    one.close()
    other.close()


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(2 * SLOT_BYTES))


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _linked(path: Path) -> None:
    target = path.parents[2] / "target"
    target.write_bytes(b"mine")
    path.symlink_to(target)


def _writeable(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def _owned_by_another(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, 12345)


def _folder_of_another(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)


def _folder_open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


PLANTED: Final = [
    _garbage,
    _huge,
    _linked,
    _writeable,
    pytest.param(_owned_by_another, marks=needs_root),
    os.mkfifo,
    os.mkdir,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_in_place_of_the_file_changes_nothing(
    plant: Callable[[Path], object], node: Node, memory: Path
) -> None:
    own_folder(memory).mkdir(0o700)
    path = own_folder(memory) / file_name(ID, os.stat(node.directory))
    plant(path)
    one, other = node.waiter(), node.waiter()
    one.renew(5.0)
    node.now += 7
    other.renew(5.0)
    assert (one.asked, one.taken, other.asked) == ([1000.0], [], [1007.0])
    for waiter in (one, other):
        waiter.looks.close()
    if plant is _linked:
        assert (memory.parent / "target").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "plant",
    [
        Path.touch,
        lambda folder: folder.symlink_to(folder.parent),
        _folder_open_to_all,
        pytest.param(_folder_of_another, marks=needs_root),
        lambda folder: folder.parent.rmdir(),
    ],
    ids=["a file", "a link", "open to all", "another's", "no memory"],
)
def test_a_folder_that_is_not_the_users_own_is_not_used(
    plant: Callable[[Path], object], node: Node, memory: Path
) -> None:
    plant(own_folder(memory))
    one, other = node.waiter(), node.waiter()
    before = open_descriptors()
    for waiter in (one, other):
        for _ in range(4):
            waiter.renew(5.0)
    assert (len(one.asked), len(other.asked)) == (4, 4)
    assert open_descriptors() == before
    if own_folder(memory).is_dir():
        assert not [name for name in shared_files(memory) if len(name) == 32]


def test_a_write_that_fails_is_no_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: NodeFile, slot: int, answer: Answer) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NodeFile, "write", full)
    one, other = node.waiter(), node.waiter()
    one.renew(5.0)
    other.renew(5.0)
    assert (one.asked, other.asked) == ([1000.0], [1000.0])


answers = st.builds(Answer, st.floats(allow_nan=False), st.binary(max_size=300))


@given(answers, st.binary(max_size=40))
def test_an_answer_is_read_as_it_was_written_whatever_is_behind_it(answer: Answer, behind: bytes) -> None:
    assert Answer.decode(answer.encode(NAME) + behind, NAME) == answer


@given(st.binary(max_size=400))
def test_other_bytes_are_no_answer(data: bytes) -> None:
    assert Answer.decode(data, NAME) is None


@given(answers, answers, st.data())
def test_half_an_answer_over_another_one_is_none_or_whole(new: Answer, old: Answer, data: st.DataObject) -> None:
    after, before = new.encode(NAME), old.encode(NAME)
    cut = data.draw(st.integers(0, len(after)))
    torn = after[:cut] + before[cut:]
    assert Answer.decode(torn, NAME) in (None, new, old)


def test_the_answer_of_another_stream_is_none() -> None:
    assert Answer.decode(Answer(1.0, b"told").encode("e" * 32), NAME) is None


def head(chunks: int, samples: int, ended: bool = False) -> bytes:
    return Head(chunks, samples, ended, "running", 1.0, "node", 7, 1.0).encode()


@given(st.binary(max_size=400))
def test_bytes_of_anything_are_neither_a_head_nor_a_mark(data: bytes) -> None:
    assert decode_head(data, 2) is None
    assert decode_retired(data) is None or data.isdigit()


@pytest.mark.parametrize(
    ("data", "samples"),
    [
        (head(3, 6), 6),
        (head(3, 5, True), 5),
        (head(3, 5), None),
        (head(3, 4, True), None),
        (head(3, 7), None),
        (b'{"format": 2}', None),
    ],
)
def test_a_head_that_contradicts_the_stream_is_none(data: bytes, samples: int | None) -> None:
    found = decode_head(data, 2)
    assert (found and found.samples) == samples


def test_the_mark_is_read_as_it_was_written() -> None:
    assert [decode_retired(encode_retired(chunks)) for chunks in (0, 7, 10**15)] == [0, 7, 10**15]
    assert decode_retired(b"9" * 20) is None and decode_retired(b"-1") is None and decode_retired(b"") is None


def test_a_reader_takes_nothing_back_by_what_another_has_seen(tmp_path: Path) -> None:
    reader = StreamReader(produce(tmp_path / "s", 4, end=False))
    looks = {head(1, 2): False, b"": False, head(2, 4): True, head(3, 6): True}
    assert {data: reader._adopt(data) for data in looks} == looks and not reader._adopt(head(2, 4))
    assert reader.seen.samples == 6
    assert reader._adopt(head(3, 6, True)) and not reader._adopt(head(3, 6)) and reader.seen.ended


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How old what is published may be, at each look of a wait."""
    found: list[float] = []
    renew = SingleFlight.renew

    def noted(look: SingleFlight, age: float, *how: Any) -> None:
        found.append(age)
        renew(look, age, *how)

    monkeypatch.setattr(SingleFlight, "renew", noted)
    return found


def test_a_wait_begins_and_gives_up_by_a_look_of_its_own(tmp_path: Path, ages: list[float]) -> None:
    reader = StreamReader(produce(tmp_path / "s", 4, end=False), max_wait=0.1)
    with pytest.raises(WaitTimeout):
        reader.wait_for(5)
    assert (ages[0], ages[-1]) == (0.0, 0.0) and max(ages) > 0


def test_who_is_woken_looks_by_itself(tmp_path: Path, ages: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamReader(produce(tmp_path / "s", 4, end=False), max_wait=DEADLINE_S)

    def woken(waker: Waker, seconds: float) -> bool:
        produce(tmp_path / "s", 6)
        return True

    monkeypatch.setattr(Waker, "sleep", woken)
    assert reader.wait_for(5).samples == 6
    assert ages[-1] == 0.0 and max(ages) > 0


def _wait(directory: Path, log: Path, stops: bool) -> None:
    """Waits for the fifth sample without inotify, as on a network filesystem; says when it has looked by itself."""
    Waker._refused = True
    reader = StreamReader(directory, max_wait=DEADLINE_S)
    look = reader._look
    looks = itertools.count()

    def told(wanted: int) -> bytes | None:
        # Here it has the right to look; the first time it looks, there is no file yet.
        if stops and next(looks) == 1:
            with log.open("a") as file:
                file.write(f"{os.getpid()} stops\n")
            os.kill(os.getpid(), signal.SIGSTOP)
        found = look(wanted)
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return found

    reader._look = told  # type: ignore[method-assign]
    if reader.wait_for(5).samples != 6:
        os._exit(3)


@pytest.mark.parametrize("how", ["nobody", "killed", "stopped", "stopped while it looks"])
def test_all_get_the_data_whatever_becomes_of_the_one_that_looks(how: str, tmp_path: Path, memory: Path) -> None:
    directory, log = produce(tmp_path / "s", 4, end=False), tmp_path / "log"
    log.touch()
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(child(_wait, directory, log, how == "stopped while it looks"))
        others = [stack.enter_context(child(_wait, directory, log, False)) for _ in range(3)]
        everybody = {process.pid for process in (stops, *others)}
        wait_until(lambda: {int(line.split()[0]) for line in log.read_text().splitlines()} >= everybody, "all wait")
        wait_until(lambda: len(shared_files(memory)) == 1, "they share a file")
        if how == "stopped while it looks":
            wait_until(lambda: "stops" in log.read_text(), "it has stopped")
        elif how != "nobody":
            victim = int(log.read_text().splitlines()[-1])
            os.kill(victim, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            stops, *others = sorted((stops, *others), key=lambda process: process.pid != victim)
        produce(directory, 6, end=False)
        for process in others if how != "nobody" else [stops, *others]:
            process.join(DEADLINE_S)
            assert process.exitcode == 0, how


def test_deleted_chunks_are_let_go_by_what_another_has_seen(tmp_path: Path) -> None:
    reader = StreamReader(produce(tmp_path / "s", 4, end=False))
    reader.read(0)
    reader.read(2)
    node = Node(tmp_path / "s")
    node.now = 0.0
    other, looks = (NodePoll(ID, lambda: os.stat(node.directory), lambda: node.now) for _ in range(2))
    other.retired.renew(1.0, lambda: encode_retired(1), lambda data: False)
    reader._let_go_at -= 10
    reader._let_go(looks)
    assert reader._chunks.numbers == [1]
    for one in (other, looks):
        one.close()
