"""A run that waits, for rows, for what it has read before or for room: it answers signals, and ends when asked to."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import head, ids, published, rows, run_arguments
from tests.producer.commands import Running

SHUFFLED: Final = ("--shuffle", 5)
IN_WORKERS: Final = ("--transform", "tests.producer.recipes:same", "--workers", 1)


def notes(out: Path) -> str:
    return str(head(out).get("note", ""))


@contextmanager
def live_run(kind: str, folder: Path, out: Path, nursery: Commands, *options: object) -> Iterator[Running]:
    """A run that has got rows 0 to 6, three to a chunk, and waits for more of the one live source it has."""
    pipe, stdin, arguments = folder / "pipe", None, run_arguments(out, [], 3, *options)
    with ExitStack() as stack:
        if kind == "followed":
            (folder / "in").mkdir()
            (folder / "in" / "a.jsonl").write_bytes(rows(0, 7))
            arguments += ["--follow", str(folder / "in")]
        elif kind == "generator":
            arguments += ["--source", "python:tests.producer.recipes:seven"]
        else:
            os.mkfifo(pipe)
            # For both, so that opening it does not wait.
            stack.enter_context(pipe.open("r+b", buffering=0)).write(rows(0, 7))
            stdin = pipe if kind == "stdin" else None
            arguments += ["--source", "-" if kind == "stdin" else str(pipe)]
        run = stack.enter_context(Running(nursery, *arguments, stdin=stdin))
        # Of a block of five rows one chunk is published, and the two rows behind it wait for others.
        chunks = 1 if "--shuffle" in options else 2
        run.wait_until(lambda: head(out).get("state") == "waiting" and published(out) == chunks)
        yield run


@pytest.mark.parametrize(
    ("kind", "recipe", "number", "code"),
    [
        ("stdin", (), signal.SIGINT, 130),
        ("stdin", SHUFFLED, signal.SIGUSR1, 0),
        ("pipe", (), signal.SIGTERM, 0),
        ("pipe", IN_WORKERS, signal.SIGUSR1, 0),
        ("followed", (), signal.SIGTERM, 0),
        ("followed", SHUFFLED, signal.SIGUSR1, 0),
        ("generator", (), signal.SIGTERM, 0),
        ("generator", (), signal.SIGUSR1, 0),
    ],
)
def test_sigusr1_ends_a_live_source_and_with_it_the_stream_and_others_stop_at_once(
    kind: str, recipe: tuple[object, ...], number: signal.Signals, code: int, nursery: Commands, tmp_path: Path
) -> None:
    out, ends = tmp_path / "out", number == signal.SIGUSR1
    with live_run(kind, tmp_path, out, nursery, *recipe) as run:
        assert recipe or "; 1 of the 3 rows of the next chunk" in notes(out)
        status, text = run.end(number)
    assert (status, "event=end result=finished" in text) == (code, ends)
    assert sorted(ids(out)) == list(range(7 if ends else 6))
    assert (head(out)["state"] == "idle", head(out)["ended"]) == (not ends, ends)
    assert (out / "stream.end").exists() == ends
    assert not (out / ".tmp").exists()


def test_nobody_has_opened_the_pipe(nursery: Commands, tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with Running(nursery, *run_arguments(out, [pipe], 3)) as run:
            run.wait_until(lambda: head(out).get("pid") == run.pid and str(pipe) in notes(out))
            assert run.end(number)[0] == 0
    assert json.loads((out / "stream.end").read_bytes())["samples"] == 0


def test_the_published_part_of_a_pipe_is_waited_for_and_told(nursery: Commands, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with live_run("pipe", tmp_path, out, nursery) as run:
        run.end(signal.SIGTERM)
    arguments = run_arguments(out, [tmp_path / "pipe"], 3)
    with (tmp_path / "pipe").open("r+b", buffering=0) as pipe, Running(nursery, *arguments) as run:
        run.wait_until(lambda: "to be read again: 0 of " in notes(out))
        pipe.write(rows(0, 11))
        run.wait_until(lambda: published(out) == 3)
        assert run.end(signal.SIGUSR1)[0] == 0
    assert ids(out) == list(range(11))


def test_sigusr1_does_not_end_the_wait_for_room(nursery: Commands, tmp_path: Path) -> None:
    out, config = tmp_path / "out", tmp_path / "run.toml"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(rows(0, 10))
    text = f'out = "{out}"\nsamples_per_chunk = 3\n[[source]]\nfollow = "{tmp_path}/in"\n[limits]\nmax_ahead = '
    config.write_text(text + "1")
    with Running(nursery, "run", "--config", config) as run:
        run.wait_until(lambda: "--max-ahead 1 chunk" in notes(out))
        run.send(signal.SIGUSR1)
        config.write_text(text + "2")
        run.send(signal.SIGHUP)
        run.wait_until(lambda: published(out) == 2 and "--max-ahead 2 chunks" in notes(out))
        config.write_text(text + "100")
        assert run.end(signal.SIGHUP)[0] == 0
    assert ids(out) == list(range(10))
    assert (out / "stream.end").exists()


def test_sighup_changes_the_cap_on_bad_rows(nursery: Commands, tmp_path: Path) -> None:
    out, config, incoming = tmp_path / "out", tmp_path / "run.toml", tmp_path / "in"
    incoming.mkdir()
    text = f'out = "{out}"\nsamples_per_chunk = 3\n[[source]]\nfollow = "{incoming}"\n'
    text += '[rows]\non_bad_row = "quarantine"\nmax_bad_rows = '

    def write(name: str, first: int, last: int) -> None:
        (incoming / ".hidden").write_bytes(b"bad\n" + rows(first, last))
        (incoming / ".hidden").rename(incoming / name)

    config.write_text(text + "1")
    write("a.jsonl", 0, 6)
    with Running(nursery, "run", "--config", config) as run:
        run.wait_until(lambda: published(out) == 2 and head(out)["state"] == "waiting")
        config.write_text(text + "2")
        run.send(signal.SIGHUP)
        run.wait_until(lambda: "max_bad_rows from 1 to 2" in run.said())
        write("b.jsonl", 6, 9)
        run.wait_until(lambda: published(out) == 3)
        write("c.jsonl", 9, 12)
        assert run.end()[0] == 3
    assert ids(out) == list(range(9))
