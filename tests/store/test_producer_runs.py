"""Whole runs of the real command into a bucket: the same objects as files of a run into a directory."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import StreamInvalid
from lazyshard.format.records import seal_name
from lazyshard.store.files import UrlPath
from lazyshard_producer.shipping.store import read_stream
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import Run, check_ended, chunk_names, ids, objects, taken, until
from tests.store.streams import publish

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
    assert run.run("--samples-per-chunk", 4)[0] == 5
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
    code, said = run.run()
    assert (code, run.changes) == (5, [])
    assert_one_line(said, str(incoming / "d.jsonl"))
    assert [line["row"] for line in timeless(found["quarantine.jsonl"])] == ["no row"]


def test_what_is_missing_or_somebody_elses_is_said_before_another_producer_is_fenced(run: Run, source: Path) -> None:
    store, key = run.url.store, f"{run.url.key}/chunk_00000.jsonl"
    store.put(key, b'{"id":0}\n')
    code, said = run.run()
    assert (code, run.changes) == (5, [])
    assert_one_line(said)
    store.delete(key)
    source.unlink()
    code, said = run.run()
    assert (code, run.changes) == (4, [])
    assert_one_line(said, "in.jsonl")


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
    with pytest.raises(StreamInvalid, match=seal_name(1)) as caught:
        read_stream(store, 3)
    assert (caught.value.directory, caught.value.chunk) == (str(bucket), 1)


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
