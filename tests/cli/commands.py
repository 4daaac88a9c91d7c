"""Runs the command on small directories of chunk files: in this process, in one of its own, or on a terminal."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from lazyshard.cli.main import main
from lazyshard.format.records import Head, Manifest
from lazyshard.format.state import BlendShare, Cursor, ReadingHint, RunState
from lazyshard.inspection.outlook import Looks, Outlook
from lazyshard.inspection.survey import Census, DiskUse, Survey
from lazyshard.part import Part
from lazyshard.stream import write_cursor
from lazyshard.stream.cursor import Consumer
from lazyshard.stream.listing import names_of
from tests.harness.processes.environment import environment, run_command
from tests.stream.streams import forked, publish_rows, stream_id_of

DEADLINE_S: Final = 60.0

CHUNKS: Final = (b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', b'{"id":4}\n')


def python(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return run_command(sys.executable, *arguments, env=environment())


@contextlib.contextmanager
def started(*arguments: object, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Runs a program of Python in a process of its own, which is killed at the end of the block."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command, env = [sys.executable, *map(str, arguments)], environment() | options.pop("variables", {})
    with subprocess.Popen(command, env=env, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def lazyshard(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs the command in this process, as one of its own would: a plain terminal's width, nothing on stdin."""
    out, err, words = io.StringIO(), io.StringIO(), [str(one) for one in arguments]
    with (
        open(os.devnull) as nothing,
        mock.patch.dict(os.environ, environment()),
        mock.patch.object(sys, "stdin", nothing),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def fill(directory: Path, *chunks: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    for number, content in enumerate(chunks or CHUNKS):
        (directory / f"chunk_{number:05d}.jsonl").write_bytes(content)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def as_other_user(place: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], mode: int = 0o755) -> None:
    """Does something in a directory as a user who owns nothing there; all that it imports is to be imported before."""
    place.chmod(mode)
    # A relative path, as the directories above are closed to that user.
    monkeypatch.chdir(place)

    def other() -> None:
        os.setgid(65534)
        os.setuid(65534)
        work()

    assert forked(other) == 0


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, bytearray]]:
    """A terminal for somebody else, and what has been shown on it so far."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def take() -> None:
        # Reading fails once the other side is closed.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                shown.extend(part)

    taker = threading.Thread(target=take)
    taker.start()
    try:
        yield theirs, shown
    finally:
        with contextlib.suppress(OSError):
            os.close(theirs)
        taker.join()
        os.close(ours)


def on_terminal(*arguments: object) -> tuple[int, str]:
    """Runs the command in this process, on a terminal of its own; returns its exit code and what it showed there."""
    variables = {name: value for name, value in environment().items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    with (
        terminal() as (fd, shown),
        open(fd, "w", encoding="utf-8", closefd=False) as output,
        mock.patch.dict(os.environ, variables, clear=True),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        code = main([str(one) for one in arguments])
    return code, shown.decode()


def make_stream(directory: Path, samples: int = 24, *, end: bool = True) -> str:
    publish_rows(directory, 3, ({"id": number, "text": f"row {number}"} for number in range(samples)), end=end)
    return str(json.loads((directory / "stream.json").read_bytes())["stream_id"])


def run_of(stream_id: str | None, *parts: Part, **settings: Any) -> RunState:
    consumed = sum(part.dp * part.draws for part in parts if part.trained)
    values: dict[str, Any] = {"samples_per_chunk": 3, "unit": 3, "window": 0, "seed": 0, "max_total_samples": None}
    return RunState(stream_id, parts=parts, consumed=consumed, **(values | settings))


def two_ranks(steps: int) -> Part:
    """A part of two ranks, two samples of each in a step."""
    return Part(2, 1, 2 * steps, draws_per_step=2)


def save(folder: Path, step: int, state: RunState, **values: Any) -> Path:
    """Writes a checkpoint as ms-swift's is; those saved later are of later steps unless told otherwise."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    content = {"step": step, "consumed": state.consumed, "consumer": "sft", "saved_at": 100.0 + step} | values
    (checkpoint / "lazyshard.json").write_text(json.dumps(content | {"state": state.to_dict()}))
    return checkpoint


def commit(directory: Path, state: RunState | None, chunks_before: int = 0, **values: Any) -> None:
    fields: dict[str, Any] = {"consumer": "sft", "consumed": 0 if state is None else state.consumed} | values
    fields |= {"stream_id": stream_id_of(directory), "chunks_before": chunks_before}
    write_cursor(directory, Cursor(plan={}, updated_at=1.0, state=state, **fields))


def changed(state: RunState, part: int, **fields: Any) -> RunState:
    parts = list(state.parts)
    parts[part] = replace(parts[part], **fields)
    return with_parts(state, parts)


def blended(one: Consumer, *shares: BlendShare) -> Consumer:
    assert one.cursor is not None
    return replace(one, cursor=replace(one.cursor, blend=shares))


def with_parts(state: RunState, parts: Iterable[Part]) -> RunState:
    parts = tuple(parts)
    return replace(state, parts=parts, consumed=sum(part.dp * part.draws for part in parts if part.trained))


NOW: Final = 1_700_000_000.0
ID: Final = "0" * 32
HEAD: Final = Head(1234, 12340, False, "running", 50.0, "node7", 12345, NOW - 2)
SURVEY: Final = Survey(
    directory=Path("/data/stream"),
    looked_at=NOW,
    census=Census(True, Manifest(ID, 10, NOW), HEAD, 1234, 12340, False, 0, names_of),
    gone=None,
    consumers=(),
    unread_since={},
    disk=DiskUse(12_340_000, True, 10_000.0, ()),
    free=2_000_000_000,
    quarantine=None,
    problems=(),
)


def consumer(
    name: str = "sft",
    consumed: int | None = None,
    done: int = 0,
    needs: int | None = None,
    at: float = NOW - 4,
    problem: str | None = None,
) -> Consumer:
    cursor = None if consumed is None else Cursor(name, ID, consumed, done, {}, at)
    reading = None if needs is None else ReadingHint(name, ID, 1, 0, needs, at)
    return Consumer(name, cursor, reading, problem)


def told(
    name: str = "sft",
    consumed: int = 0,
    done: int = 0,
    needs: int = 0,
    at: float = NOW - 4,
    ranks: int = 2,
    window: int = 0,
) -> Consumer:
    """A consumer whose cursor tells how the run deals: chunks of 10 samples, `window` of them shuffled together."""
    rules = {"unit": 10, "window": window * 10, "seed": 0}
    state = RunState(ID, 10, 10, window * 10, 0, None, (Part(ranks, 1, consumed // ranks),), consumed)
    cursor = Cursor(name, ID, consumed, done, {"dp_size": ranks, "batch_size": 1, **rules}, at, state)
    span = ranks * (window or 1)
    return Consumer(name, cursor, ReadingHint(name, ID, ranks, -(-needs // span) - 1, needs, at), None)


def survey(head: Head | None = HEAD, census: dict[str, Any] | None = None, **values: Any) -> Survey:
    """Returns a look; `census` and `values` are what is otherwise than in `SURVEY`."""
    ended = head is not None and head.ended
    return SURVEY._replace(census=SURVEY.census._replace(head=head, ended=ended, **(census or {})), **values)


def outlook(*looks: Survey) -> Outlook:
    memory = Looks()
    for look in looks[:-1]:
        memory.add(look)
    return memory.add(looks[-1])
