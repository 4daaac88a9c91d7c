"""The real command, killed at requests to a real S3 server and at calls in its spool; two of them on one stream."""

import json
import os
import random
from pathlib import Path

import pytest

from lazyshard.errors import ProducerFenced, StreamInvalid
from lazyshard.format.records import chunk_name, seal_name
from lazyshard.store.files import UrlPath
from lazyshard.stream import ChunkWriter
from lazyshard_producer.shipping.shipper import put_chunk
from lazyshard_producer.shipping.store import StreamStore, next_owner
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import Run, When, check_ended, ids, refusing, taken, until, watched
from tests.stream.streams import raised

pytestmark = pytest.mark.full


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_change_of_the_store_it_goes_on(run: Run, when: When) -> None:
    # After one change the store is as before the next one: the two kinds together meet it after each.
    for number in range(0, 100, 2):
        one = run.beside(number)
        code, said = one.kill_at(number, when)
        if code == 0:
            assert number >= 10, "fewer objects were put than a stream of three chunks has"
            break
        assert code == -9, said
        moves = number // 2 % 2 == (when == "before")
        if moves:
            one.move()
        said = one.finish()
        assert moves or "is discarded" not in said
        check_ended(one.objects(), 7, 3)
    else:
        pytest.fail("the run never ended by itself")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_spool_is_known_again_after_a_kill_at_the_taking_over(run: Run, when: When) -> None:
    assert run.kill_at(7, "before")[0] == -9
    assert run.kill_at(0, when)[0] == -9
    assert run.changes == [("PUT", "stream.owner")]
    assert "is discarded" not in run.finish()
    assert ("PUT", "chunk_00000.jsonl") not in run.changes
    check_ended(run.objects(), 7, 3)


def test_killed_in_the_spool(run: Run) -> None:
    draw = random.Random("spool")
    run.beside("all").finish(kill_at=0)
    calls = run.nursery.counted.calls
    assert calls > 50
    for turn, number in enumerate(draw.sample(range(1, calls + 1), 12)):
        one = run.beside(number)
        code, said = one.run(kill_at=number, when=draw.choice(["before", "after"]))
        # The thread's calls are not the same number each time, so the last ones may not be met.
        assert code in (-9, 0), said
        if turn % 2:
            one.move()
        one.finish()
        check_ended(one.objects(), 7, 3)


def test_the_one_before_and_a_second_one_here_are_fenced(run: Run) -> None:
    two = run.elsewhere("two")
    pid = run.start("--max-ahead", 1)
    until(lambda: run.read(seal_name(0)))
    assert_one_line(run.wait(run.nursery.start(*run.arguments(), most_s=60.0), 6), "this machine")
    two.finish()
    assert_one_line(run.wait(pid, 6), str(run.url))
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

    run.ends(6, fault=let_the_other_one_work)
    assert done == [two.objects()], "the fenced one has changed something"
    check_ended(two.objects(), 7, 3)


def test_a_spool_left_behind(run: Run, source: Path) -> None:
    """The two see other rows, as of live sources: what the first had not put yet must not come back."""
    source.write_bytes(rows(0, 9))
    two = run.elsewhere("two")
    with watched(run.server, refusing(chunk_name(1))):
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
