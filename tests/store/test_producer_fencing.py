"""Two producers on one stream in a bucket: one is fenced, and no chunk is published twice."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import ProducerFenced, StreamInvalid
from lazyshard.format.records import chunk_name, seal_name
from lazyshard.store.files import UrlPath
from lazyshard.stream import ChunkWriter
from lazyshard_producer.shipping.shipper import put_chunk
from lazyshard_producer.shipping.store import StreamStore, next_owner
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import Run, check_ended, ids, taken, until, watched
from tests.stream.streams import raised

pytestmark = pytest.mark.full


def test_the_one_before_and_a_second_one_here_are_fenced(run: Run) -> None:
    two = run.elsewhere("two")
    pid = run.start("--max-ahead", 1)
    until(lambda: run.read(seal_name(0)))
    code, said = run.nursery.run(*run.arguments())
    assert code == 6
    assert_one_line(said, "this machine")
    two.finish()
    code, said = run.nursery.wait(pid)
    assert code == 6
    assert_one_line(said, str(run.url))
    check_ended(two.objects(), 7, 3)


@pytest.mark.parametrize("at", [chunk_name(1), seal_name(1), "head.json", "stream.end"])
def test_sleeper_publishes_nothing_twice(run: Run, other_nursery: Commands, at: str) -> None:
    """The sleeper has looked at the owner, and wakes when the other one has done all: the worst moment."""
    two = run.elsewhere("two", other_nursery)
    done: list[dict[str, bytes]] = []

    def let_the_other_one_work(method: str, key: str) -> None:
        if method == "PUT" and key.endswith(f"/{at}") and not done:
            done.append({})
            two.finish()
            done[0] = two.objects()

    code, said = run.run(fault=let_the_other_one_work)
    assert code == 6, said
    assert done == [two.objects()], "the fenced one has changed something"
    check_ended(two.objects(), 7, 3)


def test_a_spool_left_behind(run: Run, source: Path) -> None:
    """The two see other rows, as of live sources: what the first had not put yet must not come back."""
    source.write_bytes(rows(0, 9))
    two = run.elsewhere("two")

    def refuse(method: str, key: str) -> Any:
        return (503, b"") if method == "PUT" and key.endswith(chunk_name(1)) else None

    with watched(run.server, refuse):
        run.stopped(lambda: any(run.spool.rglob(f"stream/{seal_name(2)}")))
    source.write_bytes(rows(0, 3) + rows(100, 106))
    two.stopped(lambda: two.read(seal_name(1)), "--max-ahead", 2)
    assert "is discarded" in run.finish()
    assert ids(run.objects()) == [0, 1, 2, *range(100, 106)]


def made(folder: Path, first: int) -> tuple[bytes, bytes]:
    with ChunkWriter(folder, 2) as writer:
        writer.write({"id": first})
        writer.write({"id": first + 1}, source=first + 2)
    return (folder / chunk_name(0)).read_bytes(), (folder / seal_name(0)).read_bytes()


def test_of_two_that_take_a_stream_at_the_same_moment_one_gets_it(bucket: UrlPath) -> None:
    before: StreamStore | None = None
    for epoch in (1, 2):
        one, other = (StreamStore(str(bucket), 0.0, "", pause=lambda seconds: False) for _ in range(2))
        found, tag = one.find_owner()
        one.take(next_owner(found), tag)
        raised(ProducerFenced, other.take, next_owner(found), tag)
        one.check_owner()
        if before is not None:
            raised(ProducerFenced, before.check_owner)
        before, owner = one, one.owner
        assert owner is not None and (owner.epoch, owner.pid) == (epoch, os.getpid())
        told = {name: getattr(owner, name) for name in ("epoch", "token", "host", "pid", "since")}
        assert json.loads(one.get("stream.owner")) == {"format": 1} | told
    # An owner that is gone stops the producer too.
    one.delete("stream.owner")
    raised(ProducerFenced, one.check_owner)


def test_a_chunk_may_be_put_again_and_sealed_rows_stay(bucket: UrlPath, tmp_path: Path) -> None:
    first, second, others = made(tmp_path / "a", 0), made(tmp_path / "b", 0), made(tmp_path / "c", 5)
    assert first[0] == second[0] and first[1] != second[1]
    one = taken(bucket)
    # Rows that were never sealed are replaced.
    one.put(chunk_name(0), b'{"id":9}\n')
    for _ in range(3):
        put_chunk(one, 0, *first)
    # The same rows sealed at another time are the same chunk, and what is sealed never changes.
    put_chunk(taken(bucket), 0, *second)
    raised(StreamInvalid, put_chunk, taken(bucket), 0, *others)
    assert (one.get(chunk_name(0)), one.get(seal_name(0))) == first


def test_a_late_seal_stays(bucket: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old owner sleeps in front of its seal while the new one, with other rows, replaces its rows."""
    theirs, ours = made(tmp_path / "a", 0), made(tmp_path / "b", 5)
    taken(bucket).put(chunk_name(0), theirs[0])
    one = taken(bucket)
    check = one.check_owner

    def wakes_behind_the_look() -> None:
        check()
        if one.get(chunk_name(0)) == ours[0]:
            one.put_new(seal_name(0), theirs[1])

    monkeypatch.setattr(one, "check_owner", wakes_behind_the_look)
    raised(StreamInvalid, put_chunk, one, 0, *ours)
    assert (one.get(chunk_name(0)), one.get(seal_name(0))) == theirs


def test_one_fenced_in_between(bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """`replace` looks at the owner after it has taken the tag, so what comes between is seen by one of the two."""
    one = taken(bucket)
    one.put("head.json", b"old")
    check = one.check_owner

    def fenced_behind_the_look() -> None:
        check()
        monkeypatch.setattr(one, "check_owner", check)
        taken(bucket).replace("head.json", b"new")

    monkeypatch.setattr(one, "check_owner", fenced_behind_the_look)
    raised(ProducerFenced, one.replace, "head.json", b"late")
    assert one.get("head.json") == b"new"
