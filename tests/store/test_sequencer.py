"""The sequencer of several writers in a bucket: what the store moves, kills at each request, two at once, damage."""

import threading
import time
from pathlib import Path

import pytest

from lazyshard import LazyShardedDataset
from lazyshard.format.records import chunk_name
from lazyshard.format.writers import WRITERS, Intent
from lazyshard.store.files import UrlPath
from lazyshard.stream import sequencer
from lazyshard.stream.members import read_committed
from lazyshard.stream.sequencer import Sequencing
from lazyshard_producer.shipping import open_sequenced
from lazyshard_producer.shipping.sequenced import StoreSequencer
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.store.producing import CHANGES, Run, When, chunk_names, watched
from tests.store.server import Server
from tests.store.streams import APART, SIZE, check_rows, put, put_all, put_pieces, put_stream, shared

ROWS = {"a": SIZE + 1, "b": SIZE + 2, "c": 1}  # two pieces, and remainders that fill a chunk and one row more
CHUNKS = chunk_names(4)

pytestmark = pytest.mark.full


class Stall:
    """Holds back the request of that number (from 0) to change something."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._lock = threading.Lock()
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self, method: str, key: str) -> None:
        if method in CHANGES:
            with self._lock:
                self._left -= 1
                mine = self._left == -1
            if mine:
                self.reached.set()
                self.over.wait(DEADLINE_S)


class Sequence(Run):
    def arguments(self, *options: object) -> list[object]:
        return ["sequence", self.url, *options]


def pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def sequencing(url: UrlPath) -> Sequencing:
    return Sequencing(url, lambda: open_sequenced(url, 5.0, pause), None, StoreSequencer)


def finish(one: Sequencing) -> None:
    """Sequences until the stream has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while not one.ended:
        assert time.monotonic() < deadline
        time.sleep(min(one.step(), 0.01))
    one.close()


def test_the_store_copies_the_pieces(tmp_path: Path, server: Server, bucket: UrlPath) -> None:
    put_all(tmp_path, bucket, {"a": 4 * SIZE, "b": 4 * SIZE}, arrays=True)
    server.asked.clear()
    finish(sequencing(bucket))
    data = [key for method, key in server.asked if method == "GET" and f"/{WRITERS}/" in key and "chunk_" in key]
    assert {key.rpartition(".")[2] for key in data} == {"completed"}
    assert len(data) == 8
    found = check_rows(bucket, {"a": 4 * SIZE, "b": 4 * SIZE})
    read = LazyShardedDataset(bucket, dp_rank=0, dp_size=1)
    assert [read[index]["id"] for index in range(len(found))] == found
    assert [len(read[index]["array"]) for index in range(len(found))] == [one % APART for one in found]


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_one_goes_on(when: When, nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path) -> None:
    # After one change the store is as before the next one.
    for number in range(0, 100, 2):
        url = bucket / str(number)
        put_all(tmp_path / str(number), url, ROWS)
        run = Sequence(nursery, server, url, tmp_path)
        code, said = run.kill_at(number, when)
        if code == 0:
            assert number >= 16
            break
        assert code == -9, said
        assert run.run()[0] == 0
        check_rows(url, ROWS)
        found = shared(url)
        assert set(found) == {"head.json", "stream.end", "stream.json", "stream.owner"} | CHUNKS
    else:
        pytest.fail("it never ended by itself")


@pytest.mark.parametrize("number", range(14))
def test_a_request_that_comes_after_another_one_has_taken_over_changes_nothing(
    number: int, server: Server, bucket: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer, "LEASE_S", 0.0)
    # It has 13 changes to make until all pieces have numbers but those of a writer that comes meanwhile.
    put_stream(bucket, len(ROWS) + 1)
    for at, (name, count) in enumerate(ROWS.items()):
        put_pieces(tmp_path, bucket, name, at * APART, count)
    stall = Stall(number)
    late = threading.Thread(target=finish, args=(sequencing(bucket),))
    with watched(server, stall):
        late.start()
        assert stall.reached.wait(DEADLINE_S)
        # The other one would choose this one's pieces first.
        put_pieces(tmp_path, bucket, "0", len(ROWS) * APART, 2 * SIZE)
        finish(sequencing(bucket))
        before = shared(bucket)
        stall.over.set()
        late.join()
    check_rows(bucket, {**ROWS, "0": 2 * SIZE})
    after = shared(bucket)
    assert {name: after[name] for name in chunk_names(6)} == {name: before[name] for name in chunk_names(6)}


@pytest.mark.parametrize("name", ["chunk_00001.jsonl", "chunk_00001.jsonl.completed", "stream.json"])
def test_a_damaged_piece_blocks_no_other_writer(name: str, bucket: UrlPath, tmp_path: Path) -> None:
    rows = {"a": 3 * SIZE, "b": 2 * SIZE + 1}
    put_all(tmp_path, bucket, rows)
    target = bucket / WRITERS / "a" / name
    whole = target.store.get(target.key)
    put(target, whole[:-3])
    one, deadline = sequencing(bucket), time.monotonic() + DEADLINE_S
    sound = 2 + (name != "stream.json")
    while (told := read_committed(bucket)) is None or told.chunks < sound:
        assert time.monotonic() < deadline
        one.step()
    assert [*told.refused] == ["a"]
    assert str(target) in told.refused["a"]
    # Once it is restored the writer's other rows follow.
    put(target, whole)
    finish(one)
    check_rows(bucket, rows)


def test_what_was_chosen_is_chosen_anew_if_it_was_damaged_since(bucket: UrlPath, tmp_path: Path) -> None:
    rows = {"a": SIZE, "b": SIZE}
    put_all(tmp_path, bucket, rows)
    target = bucket / WRITERS / "a" / chunk_name(0)
    whole = target.store.get(target.key)
    put(bucket / WRITERS / Intent.NAME, Intent(0, ((("a", 0, SIZE),), (("b", 0, SIZE),))).encode())
    target.store.delete(target.key)
    one, deadline = sequencing(bucket), time.monotonic() + DEADLINE_S
    while not target.store.exists((bucket / chunk_name(0)).key):
        assert time.monotonic() < deadline
        one.step()
    put(target, whole)
    finish(one)
    assert check_rows(bucket, rows)[0] == APART
