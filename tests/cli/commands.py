"""Runs the command on small directories of chunk files: in this process, in one of its own, or on a terminal."""

import contextlib
import io
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from lazyshard.cli.main import main
from tests.stream.streams import forked

ROOT: Final = Path(__file__).resolve().parents[2]
DEADLINE_S: Final = 60.0

CHUNKS: Final = (b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', b'{"id":4}\n')


def environment() -> dict[str, str]:
    # The plain terminal: no colours, no wrapping.
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


def python(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


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


def as_another_user(
    place: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], mode: int = 0o755
) -> None:
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
