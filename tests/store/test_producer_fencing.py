"""Two producers on one stream in a bucket: one is fenced, and no chunk is published twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import ProducerFenced, StreamInvalid
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.store.objects import ObjectStore
from lazyshard.store.urls import UrlPath
from lazyshard.stream import ChunkWriter
from lazyshard_producer.shipping.shipper import put_chunk
from lazyshard_producer.shipping.store import Ownership, Tries, find_owner, next_owner, replace
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import Run, Watched, check_ended, ids, objects, until
from tests.store.server import Server

pytestmark = pytest.mark.full


def machine(nursery: Commands, server: Server, url: UrlPath, root: Path, source: Path) -> Run:
    return Run(nursery, server, url, root, "--source", source, "--samples-per-chunk", 3)


def test_the_one_that_was_there_before_is_fenced_and_ends_with_6(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path
) -> None:
    one = machine(nursery, server, bucket, tmp_path / "one", source)
    two = machine(nursery, server, bucket, tmp_path / "two", source)
    pid = one.start("--max-ahead", 1)
    until(lambda: "chunk_00000.jsonl.completed" in one.objects())
    two.finish()
    code, said = nursery.wait(pid)
    assert code == 6
    assert_one_line(said, "has taken this stream over", str(bucket))
    check_ended(two.objects(), 7, 3)


@pytest.fixture
def other_nursery(nursery: Commands, tmp_path: Path) -> Iterator[Commands]:
    """One is busy while it waits for the end of a command."""
    with Commands(tmp_path, *nursery.modules) as found:
        yield found


@pytest.mark.parametrize("at", [chunk_name(1), seal_name(1), "head.json", "stream.end"])
def test_one_that_sleeps_in_front_of_a_put_publishes_nothing_twice(
    nursery: Commands, other_nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path, at: str
) -> None:
    """The sleeper has looked at the owner, and wakes when the other one has done all: the worst moment."""
    one = machine(nursery, server, bucket, tmp_path / "one", source)
    two = machine(other_nursery, server, bucket, tmp_path / "two", source)
    done: list[dict[str, bytes]] = []

    def let_the_other_one_work(method: str, key: str) -> None:
        if method == "PUT" and key.endswith(f"/{at}") and not done:
            done.append({})
            two.finish()
            done[0] = two.objects()

    pid = one.start()
    with Watched(server, let_the_other_one_work):
        code, said = nursery.wait(pid)
    assert code == 6, said
    assert done == [two.objects()], "the fenced one has changed something"
    check_ended(two.objects(), 7, 3)


def test_a_second_one_on_the_same_machine_is_refused(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path
) -> None:
    one = machine(nursery, server, bucket, tmp_path, source)
    pid = one.start("--max-ahead", 1)
    until(lambda: "chunk_00000.jsonl.completed" in one.objects())
    code, said = nursery.run(*one.arguments())
    assert code == 6
    assert_one_line(said, "a process of this machine is already producing")
    os.kill(pid, signal.SIGTERM)
    assert nursery.wait(pid)[0] == 0


def test_a_spool_that_others_have_published_past_is_not_gone_on_with(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path
) -> None:
    """The two see other rows, as of live sources: what the first had not put yet must not come back."""
    source.write_bytes(rows(0, 9))
    one = machine(nursery, server, bucket, tmp_path / "one", source)
    two = machine(nursery, server, bucket, tmp_path / "two", source)

    def refuse(method: str, key: str) -> Any:
        return (503, b"") if method == "PUT" and key.endswith(chunk_name(1)) else None

    with Watched(server, refuse):
        pid = one.start()
        until(lambda: any(one.spool.rglob(f"stream/{seal_name(2)}")))
        os.kill(pid, signal.SIGKILL)
        nursery.wait(pid)
    source.write_bytes(rows(0, 3) + rows(100, 106))
    pid = two.start("--max-ahead", 2)
    until(lambda: "chunk_00001.jsonl.completed" in two.objects())
    os.kill(pid, signal.SIGKILL)
    nursery.wait(pid)
    assert "is not gone on with" in one.finish()
    assert ids(objects(bucket)) == [0, 1, 2, *range(100, 106)]


def test_a_chunk_that_another_one_has_sealed_in_its_last_moment_is_gone_on_after(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path
) -> None:
    source.write_bytes(rows(0, 3) + rows(100, 106))
    machine(nursery, server, bucket / "other", tmp_path / "other", source).finish()
    theirs = objects(bucket / "other")
    source.write_bytes(rows(0, 9))
    one = machine(nursery, server, bucket / "one", tmp_path / "one", source)
    store, key = one.url.store, one.url.key

    def seal_before(method: str, path: str) -> None:
        if method == "PUT" and path == f"{key}/{seal_name(1)}" and server.fault is seal_before:
            server.fault = lambda method, path: None
            for name in (chunk_name(1), seal_name(1)):
                store.put(f"{key}/{name}", theirs[name])

    with Watched(server, seal_before):
        code, said = nursery.wait(one.start())
    assert code == 5
    assert_one_line(said, "another producer has published this chunk, with other rows", "Run the same command again")
    source.write_bytes(rows(0, 3) + rows(100, 106))
    one.finish()
    assert ids(one.objects()) == [0, 1, 2, *range(100, 106)]


class Two:
    """Two producers' rights on one stream."""

    def __init__(self, url: UrlPath) -> None:
        self.store = ObjectStore(str(url), patience_s=0)
        self.tries = Tries(str(url), 0.0, "", pause=lambda seconds: False)

    def take(self) -> Ownership:
        found = find_owner(self.store, self.tries)
        ownership = Ownership(self.store, self.tries, next_owner(found.owner, 1e9))
        ownership.take(found)
        return ownership

    def put(self, ownership: Ownership, chunk: tuple[bytes, bytes]) -> None:
        put_chunk(self.store, self.tries, ownership.check, 0, *chunk)


@pytest.fixture
def two(server: Server, bucket: UrlPath) -> Two:
    return Two(bucket)


def made(folder: Path, first: int) -> tuple[bytes, bytes]:
    with ChunkWriter(folder, 2) as writer:
        writer.write({"id": first})
        writer.write({"id": first + 1}, source=first + 2)
    return (folder / chunk_name(0)).read_bytes(), (folder / seal_name(0)).read_bytes()


def test_of_two_that_take_a_stream_at_the_same_moment_one_gets_it(two: Two) -> None:
    found = find_owner(two.store, two.tries)
    one, other = (Ownership(two.store, two.tries, next_owner(found.owner, 1e9)) for _ in range(2))
    one.take(found)
    with pytest.raises(ProducerFenced, match="has taken this stream over"):
        other.take(found)
    one.check()
    found = find_owner(two.store, two.tries)
    third, fourth = (Ownership(two.store, two.tries, next_owner(found.owner, 1e9)) for _ in range(2))
    fourth.take(found)
    with pytest.raises(ProducerFenced):
        third.take(found)
    with pytest.raises(ProducerFenced):
        one.check()
    assert fourth.owner.epoch == 2


def test_an_owner_that_is_gone_stops_the_producer(two: Two) -> None:
    one = two.take()
    two.store.delete("stream.owner")
    with pytest.raises(ProducerFenced, match="is gone or cannot be read"):
        one.check()


def test_a_chunk_may_be_put_again(two: Two, tmp_path: Path) -> None:
    one, chunk = two.take(), made(tmp_path, 0)
    for _ in range(3):
        two.put(one, chunk)
    assert (two.store.get(chunk_name(0)), two.store.get(seal_name(0))) == chunk


def test_the_same_rows_sealed_at_another_time_are_the_same_chunk(two: Two, tmp_path: Path) -> None:
    one = two.take()
    first, second = made(tmp_path / "a", 0), made(tmp_path / "b", 0)
    assert first[1] != second[1]
    two.put(one, first)
    two.put(two.take(), second)
    assert two.store.get(seal_name(0)) == first[1], "what is sealed never changes"


def test_rows_that_were_never_sealed_are_replaced(two: Two, tmp_path: Path) -> None:
    one = two.take()
    two.store.put(chunk_name(0), b'{"id":9}\n')
    chunk = made(tmp_path, 0)
    two.put(one, chunk)
    assert two.store.get(chunk_name(0)) == chunk[0]


def test_other_rows_that_are_sealed_stay(two: Two, tmp_path: Path) -> None:
    theirs, ours = made(tmp_path / "a", 0), made(tmp_path / "b", 5)
    two.put(two.take(), theirs)
    with pytest.raises(StreamInvalid, match="another producer has published this chunk, with other rows"):
        two.put(two.take(), ours)
    assert (two.store.get(chunk_name(0)), two.store.get(seal_name(0))) == theirs


def test_rows_that_get_their_seal_in_the_last_moment_are_put_back(two: Two, tmp_path: Path) -> None:
    """The old owner sleeps in front of its seal while the new one, with other rows, replaces its rows."""
    theirs, ours = made(tmp_path / "a", 0), made(tmp_path / "b", 5)
    two.take()
    two.store.put(chunk_name(0), theirs[0])
    one = two.take()

    def wakes_behind_the_look() -> None:
        one.check()
        if two.store.get(chunk_name(0)) == ours[0]:
            two.store.put_new(seal_name(0), theirs[1])

    with pytest.raises(StreamInvalid, match="Run the same command again: it goes on after that chunk"):
        put_chunk(two.store, two.tries, wakes_behind_the_look, 0, *ours)
    assert (two.store.get(chunk_name(0)), two.store.get(seal_name(0))) == theirs


def test_one_that_is_fenced_between_look_and_put_cannot_overwrite(two: Two) -> None:
    """`replace` looks at the owner after it has taken the tag, so what comes between is seen by one of the two."""
    one = two.take()
    two.store.put("head.json", b"old")

    def fenced_behind_the_look() -> None:
        one.check()
        other = two.take()
        replace(two.store, two.tries, other.check, "head.json", b"new")

    with pytest.raises(ProducerFenced):
        turns = iter([fenced_behind_the_look, one.check])
        replace(two.store, two.tries, lambda: next(turns)(), "head.json", b"late")
    assert two.store.get("head.json") == b"new"


def test_the_owner_in_the_store_is_a_stream_owner(two: Two) -> None:
    owner = two.take().owner
    assert json.loads(two.store.get("stream.owner")) == {
        "format": 1,
        "epoch": 1,
        "token": owner.token,
        "host": owner.host,
        "pid": os.getpid(),
        "since": 1e9,
    }
