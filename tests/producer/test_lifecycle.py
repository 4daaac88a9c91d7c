"""A run that waits, for rows, for what it has read before or for room: it answers signals, and ends when asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.harness.processes.environment import DEADLINE_S, ROOT
from tests.harness.processes.producing import head, ids, published, rows, run_arguments, running, wait_until

LIVE: Final = ("stdin", "pipe", "followed", "generator")
SHUFFLED: Final = ("--shuffle", 5)
IN_WORKERS: Final = ("--transform", "tests.producer.recipes:same", "--workers", 1)


def notes(out: Path) -> str:
    return str(head(out).get("note", ""))


live = partial(running, cwd=ROOT, stdin=subprocess.PIPE)


@contextmanager
def live_run(kind: str, folder: Path, out: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
    """A run that has got rows 0 to 6, three to a chunk, and waits for more of the one live source it has."""
    arguments = run_arguments(out, [], 3, *options)
    with ExitStack() as stack:
        if kind == "followed":
            (folder / "in").mkdir()
            (folder / "in" / "a.jsonl").write_bytes(rows(0, 7))
            arguments += ["--follow", str(folder / "in")]
        elif kind == "generator":
            arguments += ["--source", "python:tests.producer.recipes:seven"]
        elif kind == "pipe":
            os.mkfifo(folder / "pipe")
            # For both, so that opening it does not wait.
            stack.enter_context((folder / "pipe").open("r+b", buffering=0)).write(rows(0, 7))
            arguments += ["--source", str(folder / "pipe")]
        else:
            arguments += ["--source", "-"]
        process = stack.enter_context(live(*arguments))
        if kind == "stdin":
            assert process.stdin is not None
            process.stdin.write(rows(0, 7).decode())
            process.stdin.flush()
        # Of a block of five rows one chunk is published, and the two rows behind it wait for others.
        chunks = 1 if "--shuffle" in options else 2
        wait_until(lambda: head(out).get("state") == "waiting" and published(out) == chunks, process)
        yield process


def end(process: subprocess.Popen[str], number: signal.Signals, code: int = 0) -> str:
    """Sends a signal and waits for the end that it brings; returns what was said."""
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == code
    assert process.stderr is not None
    text = process.stderr.read()
    assert "Traceback" not in text
    return text


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kind", "recipe", "number", "code"),
    [
        *((kind, (), signal.SIGUSR1, 0) for kind in LIVE),
        *((kind, (), signal.SIGTERM, 0) for kind in LIVE),
        ("stdin", (), signal.SIGINT, 130),
        ("stdin", SHUFFLED, signal.SIGUSR1, 0),
        ("pipe", IN_WORKERS, signal.SIGUSR1, 0),
        ("followed", SHUFFLED, signal.SIGUSR1, 0),
    ],
)
def test_sigusr1_ends_a_live_source_and_with_it_the_stream_and_others_stop_at_once(
    kind: str, recipe: tuple[object, ...], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    out, ends = tmp_path / "out", number == signal.SIGUSR1
    with live_run(kind, tmp_path, out, *recipe) as process:
        assert recipe or "; 1 of the 3 rows of the next chunk" in notes(out)
        text = end(process, number, code)
    assert ("event=end result=finished" in text) == ends
    assert sorted(ids(out)) == list(range(7 if ends else 6))
    assert (head(out)["state"] == "idle", head(out)["ended"]) == (not ends, ends)
    assert (out / "stream.end").exists() == ends
    assert not (out / ".tmp").exists()


def test_nobody_has_opened_the_pipe(tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with live(*run_arguments(out, [pipe], 3)) as process:
            wait_until(lambda: head(out).get("pid") == process.pid and str(pipe) in notes(out), process)
            end(process, number)
    assert json.loads((out / "stream.end").read_bytes())["samples"] == 0


def test_the_published_part_of_a_pipe_is_waited_for_and_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with live_run("pipe", tmp_path, out) as process:
        end(process, signal.SIGTERM)
    again = run_arguments(out, [tmp_path / "pipe"], 3)
    with live(*again) as process:
        wait_until(lambda: "that is published, once more: 0 of " in notes(out), process)
        end(process, signal.SIGTERM)
    with (tmp_path / "pipe").open("r+b", buffering=0) as pipe, live(*again) as process:
        pipe.write(rows(0, 11))
        wait_until(lambda: published(out) == 3, process)
        end(process, signal.SIGUSR1)
    assert ids(out) == list(range(11))


def test_sigusr1_does_not_end_the_wait_for_room(tmp_path: Path) -> None:
    out, config = tmp_path / "out", tmp_path / "run.toml"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(rows(0, 10))
    text = f'out = "{out}"\nsamples_per_chunk = 3\n[[source]]\nfollow = "{tmp_path}/in"\n[limits]\nmax_ahead = '
    config.write_text(text + "1")
    with live("run", "--config", config) as process:
        wait_until(lambda: "--max-ahead 1 chunk" in notes(out), process)
        process.send_signal(signal.SIGUSR1)
        config.write_text(text + "2")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: published(out) == 2 and "--max-ahead 2 chunks" in notes(out), process)
        config.write_text(text + "100")
        end(process, signal.SIGHUP)
    assert ids(out) == list(range(10))
    assert (out / "stream.end").exists()


def test_sighup_changes_the_cap_on_bad_rows(tmp_path: Path) -> None:
    out, config, incoming = tmp_path / "out", tmp_path / "run.toml", tmp_path / "in"
    incoming.mkdir()
    text = f'out = "{out}"\nsamples_per_chunk = 3\n[[source]]\nfollow = "{incoming}"\n'
    text += '[rows]\non_bad_row = "quarantine"\nmax_bad_rows = '

    def write(name: str, first: int, last: int) -> None:
        (incoming / ".hidden").write_bytes(b"bad\n" + rows(first, last))
        (incoming / ".hidden").rename(incoming / name)

    config.write_text(text + "1")
    write("a.jsonl", 0, 6)
    with live("run", "--config", config) as process:
        wait_until(lambda: published(out) == 2 and head(out)["state"] == "waiting", process)
        config.write_text(text + "2")
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        while "max_bad_rows from 1 to 2" not in (line := process.stderr.readline()):
            assert line
        write("b.jsonl", 6, 9)
        wait_until(lambda: published(out) == 3, process)
        write("c.jsonl", 9, 12)
        assert process.wait(DEADLINE_S) == 3
    assert ids(out) == list(range(9))
