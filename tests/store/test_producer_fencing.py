"""Two producers on one stream in a bucket: one is fenced, and no chunk is published twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import ProducerFenced, StreamInvalid
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.store.urls import UrlPath
from lazyshard.stream import ChunkWriter
from lazyshard_producer.shipping.shipper import put_chunk
from lazyshard_producer.shipping.store import StreamStore, next_owner
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import Run, Watched, check_ended, ids, objects, taken, until
from tests.store.server import Server

pytestmark = pytest.mark.full


Machine = Callable[..., Run]


@pytest.fixture
def machine(nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path) -> Machine:
    """Makes the run of another machine."""

    def make(name: str, commands: Commands = nursery, url: UrlPath = bucket) -> Run:
        return Run(commands, server, url, tmp_path / name, "--source", source, "--samples-per-chunk", 3)

    return make


def begun(run: Run, *options: object) -> int:
    """Starts it, and waits until the store has its first chunk."""
    pid = run.start(*options)
    until(lambda: "chunk_00000.jsonl.completed" in run.objects())
    return pid


def test_the_one_that_was_there_before_is_fenced_and_ends_with_6_and_so_does_a_second_one_here(
    nursery: Commands, machine: Machine, bucket: UrlPath
) -> None:
    one, two = machine("one"), machine("two")
    pid = begun(one, "--max-ahead", 1)
    code, said = nursery.run(*one.arguments())
    assert code == 6
    assert_one_line(said, "this machine")
    two.finish()
    code, said = nursery.wait(pid)
    assert code == 6
    assert_one_line(said, str(bucket))
    check_ended(two.objects(), 7, 3)


@pytest.mark.parametrize("at", [chunk_name(1), seal_name(1), "head.json", "stream.end"])
def test_sleeper_publishes_nothing_twice(
    nursery: Commands, server: Server, machine: Machine, tmp_path: Path, at: str
) -> None:
    """The sleeper has looked at the owner, and wakes when the other one has done all: the worst moment."""
    # One is busy while it waits for the end of a command.
    with Commands(tmp_path, *nursery.modules) as other:
        one, two = machine("one"), machine("two", other)
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


def test_a_spool_that_others_have_published_past_is_not_gone_on_with(
    nursery: Commands, server: Server, machine: Machine, bucket: UrlPath, source: Path
) -> None:
    """The two see other rows, as of live sources: what the first had not put yet must not come back."""
    source.write_bytes(rows(0, 9))
    one, two = machine("one"), machine("two")

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


def made(folder: Path, first: int) -> tuple[bytes, bytes]:
    with ChunkWriter(folder, 2) as writer:
        writer.write({"id": first})
        writer.write({"id": first + 1}, source=first + 2)
    return (folder / chunk_name(0)).read_bytes(), (folder / seal_name(0)).read_bytes()


def test_of_two_that_take_a_stream_at_the_same_moment_one_gets_it(server: Server, bucket: UrlPath) -> None:
    before: StreamStore | None = None
    for epoch in (1, 2):
        one, other = (StreamStore(str(bucket), 0.0, "", pause=lambda seconds: False) for _ in range(2))
        found = one.find_owner()
        one.take(next_owner(found.owner), found)
        with pytest.raises(ProducerFenced):
            other.take(next_owner(found.owner), found)
        one.check_owner()
        if before is not None:
            with pytest.raises(ProducerFenced):
                before.check_owner()
        before, owner = one, one.owner
        assert owner is not None and owner.epoch == epoch
        told: dict[str, Any] = {
            "format": 1,
            "epoch": epoch,
            "token": owner.token,
            "host": owner.host,
            "pid": os.getpid(),
        }
        told["since"] = owner.since
        assert json.loads(one.objects.get("stream.owner")) == told


def test_an_owner_that_is_gone_stops_the_producer(server: Server, bucket: UrlPath) -> None:
    one = taken(bucket)
    one.objects.delete("stream.owner")
    with pytest.raises(ProducerFenced):
        one.check_owner()


def test_a_chunk_may_be_put_again_and_other_rows_that_are_sealed_stay(
    server: Server, bucket: UrlPath, tmp_path: Path
) -> None:
    first, second, others = made(tmp_path / "a", 0), made(tmp_path / "b", 0), made(tmp_path / "c", 5)
    assert first[0] == second[0] and first[1] != second[1]
    one = taken(bucket)
    # Rows that were never sealed are replaced.
    one.objects.put(chunk_name(0), b'{"id":9}\n')
    for _ in range(3):
        put_chunk(one, 0, *first)
    # The same rows sealed at another time are the same chunk, and what is sealed never changes.
    put_chunk(taken(bucket), 0, *second)
    with pytest.raises(StreamInvalid):
        put_chunk(taken(bucket), 0, *others)
    assert (one.objects.get(chunk_name(0)), one.objects.get(seal_name(0))) == first


def test_rows_that_get_their_seal_in_the_last_moment_are_put_back(
    server: Server, bucket: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old owner sleeps in front of its seal while the new one, with other rows, replaces its rows."""
    theirs, ours = made(tmp_path / "a", 0), made(tmp_path / "b", 5)
    taken(bucket).objects.put(chunk_name(0), theirs[0])
    one = taken(bucket)
    check = one.check_owner

    def wakes_behind_the_look() -> None:
        check()
        if one.objects.get(chunk_name(0)) == ours[0]:
            one.objects.put_new(seal_name(0), theirs[1])

    monkeypatch.setattr(one, "check_owner", wakes_behind_the_look)
    with pytest.raises(StreamInvalid):
        put_chunk(one, 0, *ours)
    assert (one.objects.get(chunk_name(0)), one.objects.get(seal_name(0))) == theirs


def test_one_that_is_fenced_between_look_and_put_cannot_overwrite(
    server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replace` looks at the owner after it has taken the tag, so what comes between is seen by one of the two."""
    one = taken(bucket)
    one.objects.put("head.json", b"old")
    check = one.check_owner

    def fenced_behind_the_look() -> None:
        check()
        monkeypatch.setattr(one, "check_owner", check)
        taken(bucket).replace("head.json", b"new")

    monkeypatch.setattr(one, "check_owner", fenced_behind_the_look)
    with pytest.raises(ProducerFenced):
        one.replace("head.json", b"late")
    assert one.objects.get("head.json") == b"new"
