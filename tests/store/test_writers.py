"""Several named writers of one stream in an object store: real commands, an S3 server, kills; and their sequencer."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
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
from tests.cli.commands import lazyshard
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import DEADLINE_S
from tests.harness.processes.producing import rows
from tests.store.producing import CHANGES, LASTING, Run, When, chunk_names, ids, objects, until, watched
from tests.store.server import Server
from tests.store.streams import APART, SIZE, check_rows, put, put_all, put_pieces, put_stream, shared
from tests.stream.streams import cursor

pytestmark = pytest.mark.full

SLOW = ("--rate", 12)  # The rows take seconds
ROWS = {"a": SIZE + 1, "b": SIZE + 2, "c": 1}  # two pieces, and remainders that fill a chunk and one row more


class Writers(Run):
    """Writers of a stream in a bucket, each on a machine of its own."""

    def command(self, name: str, first: int, stop: int, *more: object) -> list[object]:
        source = self.root / f"{name}.jsonl"
        source.write_bytes(rows(first, stop))
        given = ("--source", source, "--samples-per-chunk", SIZE, "--writer", name)
        return ["run", "--out", self.url, "--spool", self.root / f"spool-{name}", *given, *more]

    def begin(self, name: str, first: int, stop: int, *more: object) -> int:
        return self.nursery.start(*self.command(name, first, stop, *more), most_s=60.0)

    def write(self, name: str, first: int, stop: int, *more: object, code: int = 0, words: str = "") -> str:
        return self.wait(self.begin(name, first, stop, *more), code, words)

    def end(self, code: int = 0, words: str = "") -> str:
        return self.wait(self.nursery.start("end", self.url, most_s=60.0), code, words)


@pytest.fixture
def writers(nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path) -> Writers:
    return Writers(nursery, server, bucket, tmp_path)


def check(writers: Writers, *spans: tuple[int, int]) -> None:
    """Whether the stream has ended and holds the rows of each writer once and in order, as training reads them."""
    found = ids(shared(writers.url))
    for first, stop in spans:
        assert [one for one in found if first <= one < stop] == list(range(first, stop))
    assert len(found) == sum(stop - first for first, stop in spans)
    assert writers.record("stream.end")["samples"] == len(found)
    data = LazyShardedDataset(writers.url, dp_rank=0, dp_size=1)
    assert [data[index]["id"] for index in data.rank_indices] == found


def chunks(writers: Writers, name: str = "") -> int:
    return int(writers.record(f"{name and f'.writers/{name}/'}head.json").get("chunks", 0))


def test_two_writers_end_the_stream_together(writers: Writers) -> None:
    b = writers.begin("b", 100, 107, "--writers", 2)
    writers.write("a", 0, 7, "--writers", 2)
    writers.wait(b)
    check(writers, (0, 7), (100, 107))
    # Only the newest piece is left of each: its seal holds the position to continue from.
    pieces = [name for name in objects(writers.url) if "/chunk_" in name]
    assert sorted(pieces) == [f".writers/{name}/chunk_00002.jsonl{end}" for name in "ab" for end in ("", ".completed")]
    told = f"already ended: {writers.url}/.writers/a holds 7 samples in 3 chunks; nothing to do"
    writers.write("a", 0, 7, words=told)
    writers.write("a", 0, 9, code=5, words="these rows are not in it")
    assert writers.end().splitlines()[-2:] == ["  a: 7 rows", "  b: 7 rows"]
    told = lazyshard("status", str(writers.url)).stdout
    assert "2 of 2: 2 finished" in told
    sample = ids(shared(writers.url)).index(104)
    traced = json.loads(lazyshard("trace", str(writers.url), "--sample", sample, "--json").stdout)
    [origin] = traced["origins"]
    assert (traced["writer"], traced["writer_row"]) == ("b", 4)
    assert (origin["path"], origin["lines"]) == (str(writers.root / "b.jsonl"), [5])
    assert lazyshard("verify", str(writers.url)).returncode == 0


def test_a_writer_whose_part_is_complete_is_started_again(writers: Writers) -> None:
    for _ in range(2):
        writers.write("a", 0, 7, "--writers", 2)
    writers.write("b", 100, 107)
    check(writers, (0, 7), (100, 107))


@pytest.mark.parametrize("killed", ["the writer", "the sequencer", "both"])
def test_killed_processes_are_started_again(killed: str, writers: Writers) -> None:
    # Whoever starts first sequences.
    a = writers.begin("a", 0, 40, *SLOW, "--writers", 2)
    until(lambda: chunks(writers) >= 2)
    b = writers.begin("b", 100, 140, *SLOW)
    until(lambda: chunks(writers, "b") >= 2 and chunks(writers, "a") >= 4)
    assert writers.record(".writers/committed.json")["pid"] == a
    gone = {"the writer": [b], "the sequencer": [a], "both": [a, b]}[killed]
    for pid in gone:
        os.kill(pid, signal.SIGKILL)
        writers.wait(pid, -9)
    if killed == "the sequencer":
        # The other writer goes on, and takes over.
        before = chunks(writers)
        until(lambda: chunks(writers) > before + 1)
        assert writers.record(".writers/committed.json")["pid"] == b
    again = [writers.begin(name, first, first + 40) for name, pid, first in (("a", a, 0), ("b", b, 100)) if pid in gone]
    for pid in {a, b, *again} - {*gone}:
        writers.wait(pid)
    check(writers, (0, 40), (100, 140))


def test_a_writer_that_does_not_fit_leaves_nothing(writers: Writers) -> None:
    writers.write("a", 0, 4, "--writers", "a,b")
    for name, given, words in (
        ("b", ("--samples-per-chunk", SIZE + 1), "which never changes; got 4"),
        ("c", (), "'c' is none of its writers, a, b"),
        ("b", ("--writers", 3), "it was made for writers=('a', 'b'), not 3"),
    ):
        writers.write(name, 0, 4, *given, code=5, words=words)
    unnamed = [*writers.command("a", 0, 4)[:-2], "--spool", writers.root / "one"]
    writers.wait(writers.nursery.start(*unnamed, most_s=60.0), 5, "several writers, each with a name")
    owners = {name for name in objects(writers.url) if "stream.owner" in name}
    assert owners == {"stream.owner", ".writers/a/stream.owner"}


def test_end_refuses_while_a_writer_runs_and_leaves_out_what_it_has_not_published(writers: Writers) -> None:
    writers.write("a", 0, 7)
    b = writers.begin("b", 100, 200, *SLOW)
    until(lambda: chunks(writers, "b") >= 2)
    writers.end(6, "writer 'b' still runs")
    os.kill(b, signal.SIGTERM)
    writers.wait(b)
    published = chunks(writers, "b") * SIZE
    told = ", and rows that it had not published are left out"
    assert writers.end().splitlines()[-2:] == ["  a: 7 rows", f"  b: {published} rows; it has not ended{told}"]
    check(writers, (0, 7), (100, 100 + published))
    writers.write("b", 100, 200, code=5, words="rows of writer 'b' that are not in it")


def test_the_limits_of_the_sequencer_hold_back_all_writers(writers: Writers) -> None:
    limits = ("--max-ahead", 3, "--retain", "consumed", "--consumers", "trainer")
    alone = writers.nursery.start("sequence", writers.url, *limits, most_s=60.0)
    # The writer may be the sequencer at first, as it creates the stream.
    a = writers.begin("a", 0, 20 * SIZE, "--writers", 1, *limits)
    until(lambda: writers.record("head.json").get("state") == "waiting" and chunks(writers, "a") == 3 + 8)
    assert chunks(writers) == 3
    stream_id = writers.record("stream.json")["stream_id"]
    cursor(writers.url, "trainer", consumed=2 * SIZE, chunks_before=2, stream_id=stream_id)
    until(lambda: chunks(writers) == 5)
    until(lambda: writers.record("retired.json").get("chunks_before") == 2)
    until(lambda: not writers.url.store.exists(f"{writers.url.key}/chunk_00001.jsonl"))
    for pid in (a, alone):
        os.kill(pid, signal.SIGTERM)
    for pid in (a, alone):
        writers.wait(pid)
    writers.write("a", 0, 20 * SIZE)
    assert writers.record("stream.end")["samples"] == 20 * SIZE


class Sequence(Run):
    def arguments(self, *options: object) -> list[object]:
        return ["sequence", self.url, *options]


def sequencing(url: UrlPath) -> Sequencing:
    return Sequencing(url, lambda: open_sequenced(url, 5.0, lambda seconds: False), None, StoreSequencer)


def step_until(one: Sequencing, condition: Callable[[], object]) -> None:
    def stepped() -> object:
        one.step()
        return condition()

    until(stepped)


def finish(one: Sequencing) -> None:
    """Sequences until the stream has ended."""
    step_until(one, lambda: one.ended)
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
        assert set(shared(url)) == LASTING | chunk_names(4)
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
    changes, reached, over = itertools.count(), threading.Event(), threading.Event()

    def hold(method: str, key: str) -> None:
        if method in CHANGES and next(changes) == number:
            reached.set()
            over.wait(DEADLINE_S)

    late = threading.Thread(target=finish, args=(sequencing(bucket),))
    with watched(server, hold):
        late.start()
        assert reached.wait(DEADLINE_S)
        # The other one would choose this one's pieces first.
        put_pieces(tmp_path, bucket, "0", len(ROWS) * APART, 2 * SIZE)
        finish(sequencing(bucket))
        before = shared(bucket)
        over.set()
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
    one, sound = sequencing(bucket), 2 + (name != "stream.json")
    step_until(one, lambda: (told := read_committed(bucket)) is not None and told.chunks >= sound)
    told = read_committed(bucket)
    assert told is not None
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
    one = sequencing(bucket)
    step_until(one, lambda: target.store.exists((bucket / chunk_name(0)).key))
    put(target, whole)
    finish(one)
    assert check_rows(bucket, rows)[0] == APART
