"""`lazyshard adopt` in a process of its own; what that does to a directory: tests/conversion."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.cli.main import main
from tests.cli.commands import CHUNKS, DEADLINE_S, contents, environment, fill, lazyshard, python
from tests.stream.streams import forked, needs_root

IDS = [{"id": i} for i in range(5)]


@pytest.mark.parametrize("markers", [True, False])
def test_adopt_and_adopt_again(markers: bool, tmp_path: Path) -> None:
    stream = fill(tmp_path / "stream")
    for path in list(stream.iterdir()) if markers else []:
        path.with_name(f"{path.name}.completed").touch()
    done = lazyshard("adopt", stream)
    summary = f"{stream} holds 3 chunks, 5 samples, 2 a chunk"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"adopted: {summary}, 45 bytes; ended\n"
    assert list(StreamReader(stream)) == IDS
    before = contents(stream)
    done = lazyshard("adopt", stream, "--samples-per-chunk", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"already a stream: {summary}; ended, nothing to do\n"
    assert contents(stream) == before


def test_open_stream_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, *CHUNKS[:2])
    assert main(["adopt", str(tmp_path), "--no-end"]) == 0
    assert capsys.readouterr().out.endswith(", 36 bytes; open: a ChunkWriter can go on\n")
    assert main(["adopt", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("; open, nothing to do\n")
    with ChunkWriter(tmp_path) as writer:
        writer.write({"id": 4})
    assert list(StreamReader(tmp_path)) == IDS


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "options", "code", "message"),
    [
        (write("chunk_00001.jsonl", b'{"id":2}\n{"id"}\n'), [], 3, "chunk_00001.jsonl: line 2 (byte 14): "),
        (
            write("chunk_00001.jsonl", b'{"id":2}\n\n'),
            [],
            3,
            "--samples-per-chunk 2` writes the rows into a new stream",
        ),
        (write("chunk_3.jsonl", CHUNKS[0]), [], 3, "rename it: `mv "),
        (write("chunk_00004.jsonl", CHUNKS[0]), [], 3, "chunk_00003.jsonl: missing"),
        (write("chunk_00003.jsonl", CHUNKS[0]), [], 3, "chunk_00002.jsonl: expected exactly 2 rows, found 1"),
        (lambda directory: None, ["--samples-per-chunk", "3"], 3, "expected exactly 3 rows, found 2"),
        (lambda directory: None, ["--no-end"], 3, "holds 1 rows of 2, so no chunk can follow"),
        (write("stream.json", b"{}"), [], 5, "stream.json: field 'format'"),
        (write("chunk_00000.jsonl.completed", b'{"format":3}'), [], 5, "written in stream format 3"),
    ],
)
def test_refusal(
    damage: Callable[[Path], object],
    options: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(tmp_path)
    damage(tmp_path)
    before = contents(tmp_path)
    assert main(["adopt", str(tmp_path), *options]) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith(f"lazyshard: error: {tmp_path}")
    assert message in shown.err
    assert contents(tmp_path) == before


def test_refusal_of_a_real_process(tmp_path: Path) -> None:
    stream = fill(tmp_path / "new\nline", b'{"id":0}')
    done = lazyshard("adopt", stream)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(
        rf"lazyshard: error: {tmp_path}/new\nline/chunk_00000.jsonl: line 1 (byte 8): no newline"
    )
    assert done.stderr.count("\n") == 1


def test_live_producer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = tmp_path / "stream"
    with ChunkWriter(stream, 2):
        (stream / "stream.json").rename(tmp_path / "aside")
        (stream / "head.json").unlink()
        fill(stream)
        assert main(["adopt", str(stream)]) == 6
        (tmp_path / "aside").rename(stream / "stream.json")
    assert f"process {os.getpid()} on " in capsys.readouterr().err


@needs_root
@pytest.mark.parametrize("closed", ["directory", "file"])
def test_permission_is_a_matter_of_the_filesystem(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path).chmod(0o755)
    if closed == "file":
        (tmp_path / "chunk_00001.jsonl").chmod(0)
    before = contents(tmp_path)
    # A relative path, as the directories above are closed to the other user; and all is imported before they are.
    monkeypatch.chdir(tmp_path)
    assert main(["adopt", ""]) == 2
    capfd.readouterr()

    def other_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        assert main(["adopt", "."]) == 7

    assert forked(other_user) == 0
    shown = capfd.readouterr()
    assert shown.err.startswith("lazyshard: error: ")
    assert ("chunk_00001.jsonl: uid 65534 may not read it" if closed == "file" else "ermission denied") in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert contents(tmp_path) == before


SIGNALLED = """
import os, signal, sys
from lazyshard.store import durable
original = durable.rename

def rename(source, target):
    if target.name == sys.argv[2]:
        os.kill(os.getpid(), int(sys.argv[3]))
    original(source, target)
    if target.name + " done" == sys.argv[2]:
        os.kill(os.getpid(), int(sys.argv[3]))

durable.rename = rename
from lazyshard.cli.main import main
sys.exit(main(["adopt", sys.argv[1]]))
"""


@pytest.mark.parametrize("point", ["chunk_00001.jsonl.completed done", "stream.end", "stream.json", "head.json"])
def test_killed_and_run_again(point: str, tmp_path: Path) -> None:
    fill(tmp_path)
    assert python("-c", SIGNALLED, tmp_path, point, int(signal.SIGKILL)).returncode == -signal.SIGKILL
    assert (tmp_path / "stream.json").exists() is (point == "head.json")
    done = lazyshard("adopt", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(StreamReader(tmp_path)) == IDS
    assert not (tmp_path / ".tmp").exists()


def test_interrupted_and_run_again(tmp_path: Path) -> None:
    fill(tmp_path)
    done = python("-c", SIGNALLED, tmp_path, "chunk_00001.jsonl.completed", int(signal.SIGINT))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "lazyshard: interrupted; run the same command again to go on\n"
    assert not (tmp_path / ".tmp").exists()
    assert lazyshard("adopt", tmp_path).returncode == 0
    assert list(StreamReader(tmp_path)) == IDS


def on_terminal(*arguments: object) -> tuple[int, str]:
    """Runs the command on a terminal of its own; returns its exit code and what it showed there."""
    ours, theirs = pty.openpty()
    variables = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "TERM")}
    with subprocess.Popen(
        [sys.executable, "-m", "lazyshard.cli", *map(str, arguments)],
        env=variables | {"TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        # Reading fails once the last process that has the other side is gone.
        while part := _read(ours):
            shown += part
        code = process.wait(DEADLINE_S)
    os.close(ours)
    return code, shown.decode()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize(("chunks", "bar"), [(40, True), (3, False)])
def test_bar_on_a_terminal_where_chunks_are_many(chunks: int, bar: bool, tmp_path: Path) -> None:
    code, shown = on_terminal("adopt", fill(tmp_path, *[b"{}\n"] * chunks))
    assert code == 0
    assert ("checking" in shown and f"{chunks}/{chunks}" in shown and "sealing" in shown) is bar
    last = shown.replace("\r\n", "\n").rstrip("\n").rpartition("\n")[2]
    assert f"adopted: {tmp_path} holds {chunks} chunks, {chunks} samples, 1 a chunk" in last


def test_no_bar_elsewhere(tmp_path: Path) -> None:
    done = lazyshard("adopt", fill(tmp_path, *[b"{}\n"] * 40))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
