"""`lazyshard status` in processes of its own; what it says of looks that are made up: test_status_view.py."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.cli.main import main
from lazyshard.stream.retire import retire
from tests.cli.commands import environment, fill, lazyshard
from tests.inspection.surveyed import checkpoint, edit_head, reads
from tests.stream.streams import foreign, forked, needs_root, produce, wait_until

TWO_HOURS_S = 7201.0
"""Two hours, and nearly a minute until that is said otherwise."""

ROWS = b'{"id":0}\n{"id":1}\n'


def test_live_stream(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 20, end=False)
    then = time.time() - TWO_HOURS_S
    checkpoint(stream, "sft", 11, 5, then)
    reads(stream, "sft", 7, then)
    retire(stream, 4, 10)
    os.utime(stream / "chunk_00005.jsonl.completed", (then, then))
    edit_head(stream, host="node7", pid=12345, updated_at=then)
    done = lazyshard("status", stream)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        str(stream),
        "the producer was stopped 2 h 0 min ago: start it again to go on; the producer is",
        "3 chunks ahead of the slowest reader, 'sft'",
    ]
    for line in (
        "published     10 chunks, 20 samples (2 a chunk); live",
        "  process     12345 on node7, heartbeat 2 h 0 min old",
        "  checkpoint  11 samples, done with 5 chunks; 2 h 0 min old",
        "  lag         5 chunks, 9 samples, 2 h 0 min",
        "  reading     needs 7 chunks, 3 chunks ahead of it; 2 h 0 min old",
    ):
        assert line in lines


def test_json_of_streams_of_either_kind(tmp_path: Path) -> None:
    for stream, kind, samples in (
        (produce(tmp_path / "native", 5), "native", 5),
        (foreign(tmp_path / "foreign", ROWS, ROWS, ROWS, end=True), "foreign", None),
    ):
        before = time.time()
        done = lazyshard("status", stream, "--json")
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        found = json.loads(done.stdout)
        assert before <= found["looked_at_s"] <= time.time()
        assert (found["kind"], found["published_chunks"], found["published_samples"]) == (kind, 3, samples)
        assert found["ended"] is True
        if found["producer"] is not None:
            assert (found["producer"]["host"], found["producer"]["pid"]) == (socket.gethostname(), os.getpid())
            assert found["producer"]["process_is_gone"] is False
        assert (found["producer"] is None) is (kind == "foreign")


def test_damaged_files_are_told_and_got_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    produce(tmp_path, 4, end=False)
    (tmp_path / "head.json").write_bytes(b"")
    (tmp_path / "cursors").mkdir()
    (tmp_path / "cursors" / "sft.json").write_bytes(b"{}")
    assert main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["published_chunks"], found["producer"], found["consumers"][0]["lag_chunks"]) == (2, None, None)
    head, cursor = found["problems"]
    assert head.startswith(f"{tmp_path}/head.json: expected a JSON object")
    assert cursor.startswith(f"consumer 'sft': {tmp_path}/cursors/sft.json: ")
    assert cursor.endswith(f"run `lazyshard forget {tmp_path} sft`")


PRODUCER = """
import sys, time
from lazyshard import ChunkWriter
writer = ChunkWriter(sys.argv[1], 2)
writer.write({}), writer.write({})
print("published", flush=True)
time.sleep(3600)
"""


def test_killed_producer_is_dead_at_once_or_once_its_heartbeats_are_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def producer() -> tuple[str, bool, str]:
        assert main(["status", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["producer"]["state"], found["producer"]["process_is_gone"], found["summary"]

    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(tmp_path)], env=environment(), stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"published\n"
        edit_head(tmp_path, updated_at=time.time() - 30)
        assert producer() == ("running", False, "the producer is running; no consumer has registered")
        child.kill()
        child.wait()
    assert producer() == (
        "dead",
        True,
        "the producer is dead, its process has ended: start it again, it goes on where it was; "
        "no consumer has registered",
    )
    # Of another machine, by what it says, only that it is silent can be told.
    edit_head(tmp_path, updated_at=time.time(), process="elsewhere")
    assert producer()[0] == "running"
    edit_head(tmp_path, updated_at=time.time() - 30, process="elsewhere")
    state, gone, summary = producer()
    assert (state, gone) == ("dead", True)
    assert re.match(r"the producer is dead, no sign of it for \d+ s and its process is gone: start it again", summary)
    edit_head(tmp_path, updated_at=time.time() + 1)
    assert producer()[:2] == ("running", True)


def empty(directory: Path) -> None:
    pass


def unmarked(directory: Path) -> None:
    fill(directory)


def later(directory: Path) -> None:
    (directory / "stream.json").write_bytes(b'{"format":3}')


def twice(directory: Path) -> None:
    foreign(directory, ROWS)
    (directory / "chunk_0.jsonl").touch()


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (empty, 5, "there is no stream: neither stream.json nor any chunk file; see whether the path"),
        (unmarked, 5, "3 chunk files, but no .completed marker"),
        (later, 5, "written in stream format 3"),
        (twice, 3, "are both chunk 0"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_refusal(
    make: Callable[[Path], object],
    code: int,
    message: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path)
    assert main(["status", str(tmp_path), *options]) == code
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"lazyshard: error: {tmp_path}")
    assert message in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/place", "--watch"], "/no/such/place: no stream is there, nor is /no/such, in which a producer"),
        ([__file__, "--watch"], "is not a directory"),
        (["", "--watch"], "'' is not a directory"),
        ([__file__], "is not a directory"),
        (["/", "--interval", "1"], "goes with --watch only"),
        (["/", "--watch", "--interval", "0"], "--interval"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err


@needs_root
def test_permission_is_a_matter_of_the_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    produce(tmp_path, 2)
    (tmp_path / "head.json").chmod(0)
    # A relative path, as the directories above are closed to the other user; and all is imported before they are.
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    assert main(["status", "."]) == 0
    capfd.readouterr()

    def other_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        assert main(["status", "."]) == 7

    assert forked(other_user) == 0
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "head.json: uid 65534 may not read it" in said.err


def test_look_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stamps() -> dict[str, Any]:
        return {str(path): path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}

    produce(tmp_path, 5, end=False)
    checkpoint(tmp_path, "sft", 1, 0, time.time())
    before = stamps()
    assert main(["status", str(tmp_path)]) == 0
    assert stamps() == before


class Watching:
    """`lazyshard status --watch` in a process of its own."""

    def __init__(self, *arguments: object, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lazyshard.cli", "status", "--watch", "--interval", "0.1", *map(str, arguments)],
            env=environment() | options.pop("env", {}),
            stdin=subprocess.DEVNULL,
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            if self.process.poll() is None:
                self.process.kill()

    def line(self) -> str:
        assert self.process.stdout is not None
        found: str = self.process.stdout.readline()
        assert found, self.process.communicate()
        return found

    def look_until(self, condition: Callable[[Any], bool]) -> Any:
        found: Any = None
        while found is None or not condition(found):
            found = json.loads(self.line())
        return found

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def test_watch_as_json_follows_the_stream(tmp_path: Path) -> None:
    with Watching(tmp_path, "--json") as watching:
        missing = json.loads(watching.line())
        assert missing["error"].startswith(
            f"{tmp_path}: there is no stream: neither stream.json nor any chunk file; see"
        )
        produce(tmp_path, 20, end=False)
        edit_head(tmp_path, state="running", rate=4.0)
        now = time.time()
        reads(tmp_path, "sft", 2, now)
        first = watching.look_until(lambda found: found["error"] is None and bool(found["consumers"]))
        assert (first["consumers"][0]["read_chunks_per_s"], first["published_chunks_per_s"]) == (None, 2.0)
        reads(tmp_path, "sft", 6, now + 1)
        second = watching.look_until(lambda found: found["consumers"][0]["needs_chunks"] == 6)
        reader = second["consumers"][0]
        assert (reader["read_chunks_per_s"], reader["read_samples_per_s"]) == (4.0, 8.0)
        assert (reader["ahead_chunks"], reader["supply"], reader["starving_in_s"]) == (4, "shrinking", 2.0)
        produce(tmp_path, 22)
        assert watching.look_until(lambda found: found["ended"])["published_chunks"] == 11
        assert watching.interrupt() == (130, "")


def test_watch_without_a_terminal_prints_pages_once_the_stream_has_come(tmp_path: Path) -> None:
    stream = tmp_path / "to come"
    with Watching(stream) as watching:
        lines = [watching.line() for _ in range(2)]
        assert lines[1] == f"{stream}: no stream is here; it will be shown as soon as its producer has begun it\n"
        produce(stream, 4)
        while watching.line() != "the stream has ended; no consumer has registered\n":
            pass
        page = [watching.line() for _ in range(12)]
        assert page[3:5] == ["band          ++\n", "              + ready\n"]
        assert (page[0], page[-2:]) == ("\n", ["consumers     none has registered\n", "\n"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", watching.line())
        assert watching.interrupt() == (130, "")


def test_watch_on_a_terminal_keeps_the_page_in_its_place(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    ours, theirs = os.openpty()
    text = b""
    with Watching(tmp_path, stdout=theirs, env={"TERM": "xterm", "COLUMNS": "60", "LINES": "40"}) as watching:
        os.close(theirs)

        def read() -> bytes:
            nonlocal text
            text += os.read(ours, 65536)
            return text

        wait_until(lambda: read().count(b"Ctrl-C ends") >= 2, "two pages")
        edit_head(tmp_path, state="failed")
        wait_until(lambda: b"has failed" in read(), "a page that says otherwise")
        watching.process.send_signal(signal.SIGINT)
        # A terminal that nobody reads any more blocks its writer.
        with pytest.raises(OSError):
            while read():
                pass
        assert watching.process.stderr is not None
        assert (watching.process.stderr.read(), watching.process.wait(60)) == ("", 130)
    os.close(ours)
    # The cursor goes up over the old page and is there again in the end; nothing is cleared as a whole.
    assert b"\x1b[1A" in text
    assert b"\x1b[2J" not in text
    assert text.rstrip().endswith(b"\x1b[?25h")
    assert max(len(re.sub(rb"\x1b\[[0-9?]*[a-zA-Z]", b"", line).strip()) for line in text.split(b"\n")) <= 60 + len(
        str(tmp_path)
    )


def test_watch_ends_when_nobody_listens(tmp_path: Path) -> None:
    produce(tmp_path, 4)
    with Watching(tmp_path, "--json") as watching:
        watching.line()
        assert watching.process.stdout is not None
        watching.process.stdout.close()
        assert watching.process.stderr is not None
        assert watching.process.stderr.read() == ""
        assert watching.process.wait(60) == 0


def test_watch_into_a_full_disk_fails(tmp_path: Path) -> None:
    produce(tmp_path, 4)
    with open("/dev/full", "w") as full, Watching(tmp_path, stdout=full) as watching:
        _, err = watching.process.communicate(timeout=60)
    assert (watching.process.returncode, err.count("\n")) == (7, 1)
    assert "No space left on device" in err
