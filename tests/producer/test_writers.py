"""Several named writers of one stream: runs, limits of the whole stream, `sequence` and `end`."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import LazyShardError, StreamEnded, StreamInvalid, StreamMismatch
from lazyshard.stream import ChunkWriter
from lazyshard.stream.share import MOST_PIECES
from lazyshard_producer.cli import main
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import ids, rows, run_arguments
from tests.producer.commands import Fails, Running, commit
from tests.stream.streams import raised, refusal_of, write_pieces

SIZE = 4
ROWS_OF_B = [f"b-{number}" for number in range(2 * SIZE)]


def arguments(out: Path, name: str, first: int, stop: int, *more: object) -> list[str]:
    """A run of writer `name` with the rows [first, stop)."""
    source = out.parent / f"{name}.jsonl"
    source.write_bytes(rows(first, stop))
    return run_arguments(out, [source], SIZE, "--writer", name, *more)


def head(out: Path, name: str | None = None) -> dict[str, Any]:
    """The head of the stream, or of a writer; empty while there is none."""
    path = (out if name is None else out / ".writers" / name) / "head.json"
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def test_runs_end_the_stream_together_and_may_be_killed(nursery: Commands, out: Path, fails: Fails) -> None:
    slow = arguments(out, "b", 100, 130, "--writers", 2, "--rate", 40)
    with Running(nursery, *slow) as killed:
        killed.wait_until(lambda: head(out, "b").get("chunks") == 2)
        killed.end(signal.SIGKILL)
    assert nursery.run(*arguments(out, "a", 0, 10, "--writers", 2))[0] == 0
    assert not (out / "stream.end").exists()
    assert nursery.run(*arguments(out, "b", 100, 130))[0] == 0
    found = ids(out)
    assert [one for one in found if one < 100] == list(range(10))
    assert [one for one in found if one >= 100] == list(range(100, 130))
    assert json.loads((out / "stream.end").read_bytes())["samples"] == 40
    status, said = nursery.run(*arguments(out, "a", 0, 10))
    assert status == 0
    assert said == f"already ended: {out}/.writers/a holds 10 samples in 3 chunks; nothing to do\n"
    fails(arguments(out, "a", 0, 12), 5, "these rows are not in it: ", "a.jsonl (52 bytes behind byte ")


@pytest.mark.full  # A waiting run reports its reason every 5 s.
def test_a_limit_holds_back_all_writers(nursery: Commands, out: Path) -> None:
    limits = ("--max-ahead", 3, "--retain", "consumed", "--consumers", "trainer")
    with (
        Running(nursery, *arguments(out, "a", 0, 100, *limits)) as a,
        Running(nursery, *arguments(out, "b", 100, 200, *limits)) as b,
    ):

        def held() -> bool:
            pieces = sum(head(out, name).get("chunks", 0) for name in "ab")
            return head(out).get("chunks") == 3 and pieces == 3 + 2 * MOST_PIECES and head(out)["state"] == "waiting"

        a.wait_until(held)
        a.wait_until(lambda: all("--max-ahead 3 chunks" in head(out, name).get("note", "") for name in "ab"))
        commit(out, 2, SIZE)
        a.wait_until(lambda: head(out)["chunks"] == 5 and not (out / "chunk_00001.jsonl").exists())
        assert (out / "chunk_00002.jsonl").exists()
        assert [one.end(signal.SIGTERM)[0] for one in (a, b)] == [0, 0]
    assert {head(out, name)["state"] for name in "ab"} == {"idle"}


def test_a_signal_ends_the_wait_for_the_last_numbers(nursery: Commands, out: Path) -> None:
    held = arguments(out, "a", 0, 3 * SIZE, "--writers", 1, "--max-ahead", 1)
    for _ in range(2):  # The second run finds that its own stream has ended.
        with Running(nursery, *held) as run:
            run.wait_until(lambda: head(out, "a").get("state") == "finished" and head(out).get("state") == "waiting")
            status, said = run.end(signal.SIGTERM)
            assert status == 0
            assert "terminated: " in said
        assert head(out)["chunks"] == 1
    assert nursery.run(*arguments(out, "a", 0, 3 * SIZE))[0] == 0
    assert ids(out) == list(range(3 * SIZE))
    assert (out / "stream.end").exists()


def test_sequence_numbers_what_a_killed_writer_has_left(nursery: Commands, out: Path) -> None:
    with Running(nursery, "sequence", out) as early:
        with Running(nursery, "sequence", out, "--max-ahead", 1) as limited:
            run = Running(nursery, *arguments(out, "a", 0, 100, "--max-ahead", 1))
            with run:
                run.wait_until(lambda: head(out, "a").get("chunks", 0) >= 3)
                run.end(signal.SIGKILL)
            assert limited.end(signal.SIGTERM)[0] == 0
        early.wait_until(lambda: head(out)["chunks"] == head(out, "a")["chunks"])
        early.wait_until(lambda: "this process sequences the stream's writers" in early.said())
        status, said = nursery.run("end", out, "--force")
        assert status == 0, said
        assert early.end()[0] == 0
    assert ids(out) == list(range(SIZE * head(out)["chunks"]))


def test_end_leaves_out_what_was_not_published(nursery: Commands, out: Path, fails: Fails) -> None:
    assert nursery.run(*arguments(out, "a", 0, 6))[0] == 0
    with Running(nursery, *arguments(out, "b", 100, 200, "--rate", 30)) as b:
        b.wait_until(lambda: head(out, "b").get("chunks", 0) >= 1)
        fails(["end", str(out)], 6, f"writer 'b' still runs (pid {b.pid} on ")
        assert not (out / ".writers" / "end.json").exists()
        b.end(signal.SIGKILL)
    published = head(out, "b")["chunks"] * SIZE
    # What it has not published would be left out for good.
    fails(["end", str(out)], 6, f"writer 'b' was killed after {published} rows, before its end; ")
    for force in (["--force"], []):  # A second `end` says the same.
        status, said = nursery.run("end", out, "--no-progress", *force)
        assert status == 0
        assert said.splitlines()[-3:] == [
            f"finished: {out} holds {6 + published} samples in {len(list(out.glob('chunk_*.jsonl')))} chunks",
            "  a: 6 rows",
            f"  b: {published} rows; it has not ended, and rows that it had not published are left out",
        ]
    assert sorted(ids(out)) == [*range(6), *range(100, 100 + published)]
    fails(arguments(out, "b", 100, 200), 5, "rows of writer 'b' that are not in it")


def test_end_by_force_while_a_writer_runs(nursery: Commands, out: Path) -> None:
    with Running(nursery, *arguments(out, "b", 100, 200, "--rate", 20)) as b:
        b.wait_until(lambda: head(out, "b").get("chunks", 0) >= 1)
        assert nursery.run("end", out, "--force")[0] == 0
        status, said = b.end()
        assert status == 5, said
    found = ids(out)
    assert found == list(range(100, 100 + len(found)))


@pytest.mark.parametrize("command", ["sequence", "end"])
def test_stream_without_writers_is_refused(command: str, out: Path, tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows(0, 3))
    assert main(run_arguments(out, [tmp_path / "a.jsonl"])) == 0
    fails([command, str(out)], 5, "has one producer without a name")
    assert main(["end", str(tmp_path / "nowhere")]) == 7


def test_check_shows_where_a_writer_would_continue(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(out, "a", 0, 6)
    assert main(given) == 0
    assert main(["check", *arguments(out, "b", 50, 60)[1:], "--rows", "1"]) == 0
    assert f"{out}/.writers/b: does not exist yet" in capsys.readouterr().out
    assert main(["check", *given[1:]]) == 0
    assert f"{out}/.writers/a: has ended with 6 samples in 2 chunks" in capsys.readouterr().out


@pytest.mark.parametrize(("declared", "missing"), [("3", "1 of 3 writers not begun"), ("a,b,c", "'c' has not begun")])
def test_end_refuses_until_declared_writers_have_begun(declared: str, missing: str, out: Path, fails: Fails) -> None:
    for name, first in (("a", 0), ("b", 10)):
        assert main(arguments(out, name, first, first + 5, "--writers", declared, "--no-progress")) == 0
    fails(["end", str(out), "--no-progress"], 6, missing)
    assert not (out / "stream.end").exists()
    assert main(arguments(out, "c", 20, 25, "--no-progress")) == 0
    assert main(["end", str(out), "--no-progress"]) == 0
    assert sorted(ids(out)) == [*range(5), *range(10, 15), *range(20, 25)]


def end(out: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main(["end", str(out), "--no-progress", "--force"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--writers", "3"), "--writers: requires --writer"),
        (("--writer", "a", "--writers", "-1"), "--writers: expected N|NAME,..."),
        (("--writer", "a", "--writers", "a,b/c"), "--writers: expected N|NAME,..."),
        (("--writer", "../a"), "--writer: expected NAME, got '../a'"),
        (("--writer", "a", "--out", "gs://bucket/x"), "--writer: several writers need a store with conditional puts"),
    ],
)
def test_options_that_cannot_be(given: tuple[str, ...], words: str, tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows(0, 3))
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    fails(["run", "--source", str(tmp_path / "a.jsonl"), "--samples-per-chunk", "3", *out, *given], 2, words)


@pytest.mark.parametrize("suffix", ["", ".completed"])
def test_cut_piece_is_left_out_by_the_end(suffix: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pieces(out, "a", 2 * SIZE, end=False)
    piece = out / ".writers" / "a" / f"chunk_00001.jsonl{suffix}"
    os.truncate(piece, piece.stat().st_size // 2)
    refused = raised(LazyShardError, ChunkWriter, out, SIZE, writer="a")
    assert str(piece) in str(refused)
    write_pieces(out, "b", 2 * SIZE)
    first, last = end(out, capsys)
    assert first.startswith(f"  a: {SIZE} rows; left out {SIZE} published rows: {piece}: ")
    assert last == f"  b: {2 * SIZE} rows"
    assert sorted(map(str, ids(out))) == ["a-0", "a-1", "a-2", "a-3", *ROWS_OF_B]


def test_a_piece_without_a_seal_is_not_published(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pieces(out, "a", 2 * SIZE, end=False)
    folder = out / ".writers" / "a"
    shutil.copy(folder / "chunk_00001.jsonl", folder / "chunk_00002.jsonl")
    more = "it has not ended, and rows that it had not published are left out"
    assert end(out, capsys) == [f"  a: {2 * SIZE} rows; {more}"]
    assert list(map(str, ids(out))) == [f"a-{number}" for number in range(2 * SIZE)]
    raised(StreamEnded, ChunkWriter, out, SIZE, writer="a")


def test_the_folder_of_another_stream_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    write_pieces(other, "a", 2 * SIZE, end=False)
    write_pieces(out, "b", 2 * SIZE)
    shutil.copytree(other / ".writers" / "a", out / ".writers" / "a")
    refused = refusal_of((StreamInvalid, StreamMismatch), r"/\.writers/a: ", ChunkWriter, out, SIZE, writer="a")
    assert refused.directory == str(out / ".writers" / "a")
    end(out, capsys)
    assert list(map(str, ids(out))) == ROWS_OF_B
