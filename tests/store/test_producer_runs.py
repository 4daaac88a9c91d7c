"""Runs of the real command into a bucket: the same objects as files, also of a store that fails or is away a while."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import StoreUnavailable, StreamInvalid
from lazyshard.format.records import seal_name
from lazyshard.store.files import UrlPath
from lazyshard_producer.shipping.store import StreamStore, read_stream
from lazyshard_producer.stop import GivenUp
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import HASTE, Run, check_ended, chunk_names, ids, objects, refusing, taken, until, watched
from tests.store.server import BROKEN, BUSY
from tests.store.streams import publish
from tests.stream.streams import raised, refusal_of

pytestmark = pytest.mark.full
TIMES = {"sealed_at", "created_at", "updated_at", "at", "rate", "pid", "process", "since", "token", "stream_id"}
"""What differs between any two runs."""


def timeless(data: bytes) -> Any:
    lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def test_objects_are_as_files(run: Run, bucket: UrlPath, tmp_path: Path, source: Path) -> None:
    source.write_bytes(rows(0, 4) + b"no row\n" + rows(4, 7) + b"{\n")
    out = tmp_path / "out"
    code, said = run.nursery.run("run", "--out", out, *run.options, "--on-bad-row", "quarantine")
    assert code == 0, said
    # Beside another stream with more of a name.
    publish(tmp_path / "other", bucket / "ab", 4, 2)
    others, run.url = objects(bucket / "ab"), bucket / "a"
    run.finish("--on-bad-row", "quarantine")
    files = {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".producer.lock"}
    found = run.objects()
    assert set(found) == set(files)
    for name, data in files.items():
        if name.endswith(".jsonl") and name != "quarantine.jsonl":
            assert found[name] == data, name
        else:
            assert timeless(found[name]) == timeless(data), name
    assert ids(found) == list(range(7))
    assert objects(bucket / "ab") == others


def test_order_in_which_objects_are_put_and_of_an_ended_stream_nothing_is_changed(run: Run, source: Path) -> None:
    run.finish()
    names = [name for _, name in run.changes]
    at = [names.index(name) for name in sorted(chunk_names(3))]
    assert at == sorted(at), "rows before their seal"
    assert names.index("stream.json") < at[0]
    assert at[-1] < names.index("stream.end")
    assert names[-1] == "head.json"
    assert all(names.count(name) == 1 for name in set(names) - {"head.json"})
    assert [path.name for path in run.spool.rglob("*") if path.is_file()] == ["lock"]
    before = run.objects()
    assert "already ended" in run.finish()
    assert run.changes == []
    with source.open("ab") as file:
        file.write(b"{}\n")
    assert (run.run()[0], run.changes) == (5, [])
    run.move()
    run.ends(5, "--samples-per-chunk", 4)
    assert run.objects() == before


def test_after_a_signal_the_same_command_goes_on(run: Run) -> None:
    options = ("--rate", 1000, "--max-ahead", 2, "--retain", "all")
    code, said = run.stopped(lambda: b'"chunks":2,' in run.read("head.json"), *options, by=signal.SIGTERM)
    assert code == 0, said
    assert "result=terminated" in said
    found = run.objects()
    assert json.loads(found["head.json"])["state"] == "idle"
    assert set(found) == chunk_names(2) | {"stream.json", "stream.owner", "head.json"}
    assert "is discarded" not in run.finish()
    check_ended(run.objects(), 7, 3)


def test_refused_rows_and_journals_come(run: Run, tmp_path: Path) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    run.options = ("--follow", incoming, "--samples-per-chunk", 2, "--on-bad-row", "quarantine")
    (incoming / "b.jsonl").write_bytes(rows(0, 3) + b"no row\n")
    pid = run.start()
    until(lambda: run.read(seal_name(0)))
    # One that is found empty, between its making and its writing, counts as complete.
    (incoming / ".a").write_bytes(rows(3, 6))
    (incoming / ".a").rename(incoming / "a.jsonl")
    until(lambda: run.read(seal_name(2)))
    os.kill(pid, signal.SIGKILL)
    run.nursery.wait(pid)
    assert any(name.startswith(".producer.sources/") for name in run.objects())
    run.move()
    (incoming / "c.jsonl").write_bytes(rows(6, 7))
    (incoming / "_END").write_bytes(b"")
    run.finish()
    found = run.objects()
    (journal,) = (name for name in found if name.startswith(".producer.sources/"))
    check_ended(found, 7, 2, "quarantine.jsonl", journal)
    assert "already ended" in run.finish()
    (incoming / "d.jsonl").write_bytes(rows(7, 8))
    run.move()
    assert_one_line(run.ends(5), str(incoming / "d.jsonl"))
    assert run.changes == []
    assert [line["row"] for line in timeless(found["quarantine.jsonl"])] == ["no row"]


def test_what_is_missing_or_somebody_elses_is_said_before_another_producer_is_fenced(run: Run, source: Path) -> None:
    store, key = run.url.store, f"{run.url.key}/chunk_00000.jsonl"
    store.put(key, b'{"id":0}\n')
    assert_one_line(run.ends(5))
    assert run.changes == []
    store.delete(key)
    source.unlink()
    assert_one_line(run.ends(4), "in.jsonl")
    assert run.changes == []


def test_a_run_that_fails_tells_the_readers_why(run: Run, source: Path) -> None:
    source.write_bytes(rows(0, 4) + b"no row\n")
    assert run.run()[0] == 3
    found = run.objects()
    head = json.loads(found["head.json"])
    assert (head["chunks"], head["state"]) == (1, "failed")
    assert "in.jsonl:5" in head["note"]
    assert ids(found) == [0, 1, 2]


def test_a_gap_is_refused(bucket: UrlPath, tmp_path: Path) -> None:
    publish(tmp_path / "local", bucket, 9, 3)
    store = taken(bucket)
    store.delete(seal_name(1))
    caught = refusal_of(StreamInvalid, seal_name(1), read_stream, store, 3)
    assert (caught.directory, caught.chunk) == (str(bucket), 1)


def test_the_head_never_names_a_chunk_that_is_not_there_yet(run: Run) -> None:
    wrong = []

    def look(method: str, key: str) -> Any:
        if method == "PUT" and key.endswith("/chunk_00000.jsonl"):
            # By then the spool is far ahead.
            until(lambda: any(run.spool.rglob("stream/stream.end")))
        if method == "PUT" and key.endswith("/head.json"):
            there = sum(name.endswith(".completed") for name in run.objects())

            def check(body: bytes) -> list[bytes]:
                head = json.loads(run.objects()["head.json"])
                if head["chunks"] > there or (head["ended"] and "stream.end" not in run.objects()):
                    wrong.append(head)
                return [body]

            return check
        return None

    run.finish(prepare=["tests.store.producer_haste:talkative"], fault=look)
    assert wrong == []


@pytest.fixture
def longer(run: Run, source: Path) -> Run:
    """One of 15 rows."""
    source.write_bytes(rows(0, 15))
    return run


def waiting(run: Run) -> int:
    """Chunks that lie in the spool."""
    return len(list(run.spool.rglob("stream/*.completed")))


def note(run: Run) -> str:
    """What the run waits for, as the head in the spool has it."""
    return "".join(json.loads(head.read_bytes()).get("note", "") for head in run.spool.rglob("stream/head.json"))


def test_failing_requests_lose_and_double_nothing(longer: Run) -> None:
    turns = most = 0

    def cut(body: bytes) -> Any:
        raise RuntimeError("made so")

    def every_third(method: str, key: str) -> Any:
        nonlocal turns, most
        turns += 1
        if method == "PUT" and key.endswith(".completed"):
            most = max(most, waiting(longer))
        # At the start the store is away for a while.
        if turns > 5 and turns % 3:
            return None
        # Half of them are done all the same, and only the answer is a failure: a PUT that is repeated is refused then.
        return [(503, BUSY), cut, (500, BROKEN), cut][turns // 3 % 4]

    longer.finish("--max-spool", 2000, fault=every_third)
    # Three fit into the bound. The one that is put last stays until the next one is there.
    assert 1 <= most <= 4
    check_ended(longer.objects(), 15, 3)


# Rows that fit into the spool are all published there, and the command is through but for the store.
@pytest.mark.parametrize(("options", "chunks"), [(("--max-spool", 2000), 3), ((), 5)])
def test_the_run_says_why_it_waits(options: tuple[object, ...], chunks: int, longer: Run) -> None:
    with watched(longer.server, refusing()):
        pid = longer.start(*options, prepare=HASTE)
        until(lambda: "event=waiting" in longer.nursery.said(pid))
        if options:
            until(lambda: "SlowDown" in note(longer))
            # A chunk with its seal has some 650 bytes.
            assert waiting(longer) == 3
            assert "--max-spool 2.0 kB: 3 chunks" in note(longer) and str(longer.url) in note(longer)
    said = longer.wait(pid)
    line, *_ = [line for line in said.splitlines() if "event=waiting" in line]
    assert f"{chunks} chunks" in line
    assert not options or "event=resumed" in said
    check_ended(longer.objects(), 15, 3)


def test_past_its_patience_the_run_fails_with_7_and_keeps_what_is_not_put(longer: Run) -> None:
    said = longer.ends(7, "--store-patience-seconds", 1, fault=refusing("chunk_00002"))
    assert_one_line(said, "--store-patience-seconds", "SlowDown")
    assert ids(longer.objects()) == list(range(6))
    assert waiting(longer) > 1
    assert "is discarded" not in longer.finish()
    check_ended(longer.objects(), 15, 3)


def test_signal_while_the_store_is_away_leaves_the_rest_for_the_next_start(longer: Run) -> None:
    with watched(longer.server, refusing()):
        pid = longer.start("--max-spool", 2000, prepare=HASTE)
        until(lambda: note(longer).startswith("--max-spool"))
        os.kill(pid, signal.SIGINT)
        longer.wait(pid, 130)
    assert waiting(longer) == 3
    longer.move()
    longer.finish()
    check_ended(longer.objects(), 15, 3)


def test_a_signal_while_the_store_is_waited_for_at_the_start_ends_the_run(run: Run) -> None:
    with watched(run.server, lambda method, key: (503, BUSY)):
        code, said = run.stopped(lambda: run.server.asked.total() > 2, by=signal.SIGTERM)
    assert code == 0
    assert "result=terminated" in said


def store_that_fails(monkeypatch: pytest.MonkeyPatch, times: int, pause: Callable[[float], bool]) -> StreamStore:
    """A store that refuses so many connections; each pause takes 10 s."""
    now, store = [0.0], StreamStore("s3://a/b", 35.0, "It is kept", pause=lambda seconds: pause(now[0]))

    def refuse() -> tuple[Any, str]:
        nonlocal times
        times -= 1
        if times < 0:
            return None, ""
        now[0] += 10.0
        raise OSError("connection refused")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(store, "_system", refuse)
    return store


def test_tries_go_on_until_the_call_is_done_and_say_since_when_and_why_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str | None] = []

    def pause(now: float) -> bool:
        said.append(store.trouble)
        return False

    store = store_that_fails(monkeypatch, 3, pause)
    assert store.request("", "reading", lambda fs, path: "done") == "done"
    assert store.trouble is None
    assert said == [f"the store has not responded for {10 * n} s (connection refused)" for n in range(1, 4)]


def test_tries_end_with_patience_or_by_being_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match=r"40 s: connection refused.* It is kept; --store-patience-seconds 35 "):
        store_that_fails(monkeypatch, 100, lambda now: False).get("a")
    raised(GivenUp, store_that_fails(monkeypatch, 100, lambda now: now >= 20).get, "a")
