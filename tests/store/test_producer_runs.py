"""Whole runs of the real command into a bucket: the same objects as files of a run into a directory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lazyshard.store.urls import UrlPath
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, rows
from tests.store.producing import Run, check_ended, chunk_names, ids, objects, until
from tests.store.server import Server

pytestmark = pytest.mark.full

TIMES = {"sealed_at", "created_at", "updated_at", "at", "rate", "pid", "process", "since", "token", "stream_id"}
"""What differs between any two runs."""


def timeless(data: bytes) -> Any:
    lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def test_objects_are_as_the_files_of_a_directory(run: Run, nursery: Commands, tmp_path: Path, source: Path) -> None:
    source.write_bytes(rows(0, 4) + b"no row\n" + rows(4, 7) + b"{\n")
    out = tmp_path / "out"
    options = ("--source", source, "--samples-per-chunk", 3, "--on-bad-row", "quarantine")
    code, said = nursery.run("run", "--out", out, *options)
    assert code == 0, said
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


def test_rows_are_put_before_their_seal_and_seals_before_the_end_and_the_head_that_says_so(run: Run) -> None:
    run.finish()
    names = [name for _, name in run.changes]
    at = [names.index(name) for name in sorted(chunk_names(3))]
    assert at == sorted(at)
    assert names.index("stream.json") < at[0]
    assert at[-1] < names.index("stream.end")
    assert names[-1] == "head.json"
    assert all(names.count(name) == 1 for name in set(names) - {"head.json"})


def test_of_an_ended_stream_nothing_is_changed(run: Run, source: Path) -> None:
    run.finish()
    assert [path.name for path in run.spool.rglob("*") if path.is_file()] == ["lock"]
    before = run.objects()
    said = run.finish()
    assert "already ended" in said
    assert run.changes == []
    with source.open("ab") as file:
        file.write(b"{}\n")
    code, said = run.run()
    assert (code, run.changes) == (5, [])
    run.move()
    assert run.run("--samples-per-chunk", 4)[0] == 5
    assert run.objects() == before


@pytest.mark.parametrize("machine", ["same", "other"])
def test_after_a_signal_the_same_command_goes_on(run: Run, machine: str, tmp_path: Path) -> None:
    pid = run.start("--rate", 1000, "--max-ahead", 2, "--retain", "all")
    until(lambda: json.loads(run.objects().get("head.json", b'{"chunks":0}'))["chunks"] == 2)
    os.kill(pid, signal.SIGTERM)
    code, said = run.nursery.wait(pid)
    assert code == 0, said
    assert "result=terminated" in said
    found = run.objects()
    assert json.loads(found["head.json"])["state"] == "idle"
    assert set(found) == chunk_names(2) | {"stream.json", "stream.owner", "head.json"}
    if machine == "other":
        run.move()
    run.finish()
    check_ended(run.objects(), 7, 3)


def test_refused_rows_and_journals_come_along(
    nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path
) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    options = ("--follow", incoming, "--samples-per-chunk", 2, "--on-bad-row", "quarantine")
    run = Run(nursery, server, bucket, tmp_path, *options)
    (incoming / "b.jsonl").write_bytes(rows(0, 3) + b"no row\n")
    pid = run.start()
    until(lambda: "chunk_00000.jsonl.completed" in run.objects())
    (incoming / "a.jsonl").write_bytes(rows(3, 6))
    until(lambda: "chunk_00002.jsonl.completed" in run.objects())
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


def test_two_streams_of_a_bucket_do_not_meet(run: Run, bucket: UrlPath) -> None:
    for name in ("a", "ab"):
        run.url = bucket / name
        run.finish()
    for name in ("a", "ab"):
        check_ended(objects(bucket / name), 7, 3)


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


def test_settings_are_read_again_while_it_runs(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("limits.max_ahead = 1\n")
    pid = run.start("--config", config)
    until(lambda: "chunk_00000.jsonl.completed" in run.objects())
    config.write_text("limits.max_ahead = 5\n")
    os.kill(pid, signal.SIGHUP)
    code, said = run.nursery.wait(pid)
    assert code == 0, said
    assert "cannot change" not in said
    check_ended(run.objects(), 7, 3)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--out", "file:///tmp/a"], 2, "--out: "),
        (["--out", "s3://"], 2, "--out: "),
        (["--out", "s3://bucket/a", "--min-free-disk", "1GB"], 2, "--min-free-disk: "),
        (["--out", "s3://bucket/a", "--max-spool", "0"], 2, "--max-spool: "),
        (["--out", "a", "--spool", "b"], 2, "--spool: "),
        (["--out", "s3://not-there/a"], 7, "s3://not-there/a"),
    ],
)
def test_settings_that_do_not_go_with_a_place_and_a_bucket_that_is_not_there_are_refused(
    nursery: Commands, server: Server, source: Path, options: list[str], code: int, said: str
) -> None:
    found, told = nursery.run("run", "--source", source, "--samples-per-chunk", 3, *options)
    assert found == code
    assert_one_line(told, said)


def test_a_gap_is_refused(run: Run) -> None:
    run.kill_at(9, "before")
    run.url.store.delete(f"{run.url.key}/chunk_00000.jsonl.completed")
    run.move()
    code, said = run.run()
    assert code == 5
    assert_one_line(said, "chunk_00000.jsonl.completed")


def test_the_head_never_names_a_chunk_that_is_not_there_yet(run: Run, server: Server) -> None:
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
